//! The order of strings as MySQL has it.
//!
//! `mysql_ci` is that of MySQL's collations that do not distinguish case: letters by their upper
//! case, spaces at the end do not count. Accents count, unlike in MySQL.

use core::cmp::Ordering;
use core::ffi::{c_int, c_void};
use core::ptr;

use super::{Db, Failure};
use crate::ffi;

/// Adds them to a connection.
pub fn add(db: &Db) -> Result<(), Failure> {
    let (raw, utf8) = (db.0.raw, ffi::SQLITE_UTF8);
    // SAFETY: a string that ends with a zero, and a function that wants nothing.
    let done = unsafe {
        let name = c"mysql_ci".as_ptr();
        ffi::sqlite3_create_collation_v2(raw, name, utf8, ptr::null_mut(), Some(compare_ci), None)
    };
    db.check(done)
}

unsafe extern "C" fn compare_ci(
    _: *mut c_void,
    a_len: c_int,
    a: *const c_void,
    b_len: c_int,
    b: *const c_void,
) -> c_int {
    // SAFETY: SQLite gives two strings of these lengths; an empty one may be null.
    let bytes = |start: *const c_void, len: c_int| unsafe {
        if len <= 0 {
            &[][..]
        } else {
            core::slice::from_raw_parts(start.cast::<u8>(), len as usize)
        }
    };
    match ci(bytes(a, a_len), bytes(b, b_len)) {
        Ordering::Less => -1,
        Ordering::Equal => 0,
        Ordering::Greater => 1,
    }
}

/// Compares without case and without the spaces at the end.
pub fn ci(a: &[u8], b: &[u8]) -> Ordering {
    keys(without_spaces(a)).cmp(keys(without_spaces(b)))
}

/// Characters in upper case; bytes that are none come behind all of them.
fn keys(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.utf8_chunks().flat_map(|chunk| {
        let valid = chunk.valid().chars().flat_map(char::to_uppercase).map(u32::from);
        valid.chain(chunk.invalid().iter().map(|&b| 0x11_0000 + u32::from(b)))
    })
}

fn without_spaces(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|&b| b != b' ').map_or(0, |at| at + 1);
    &bytes[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_and_spaces_at_the_end_do_not_count() {
        assert_eq!(ci(b"Abc  ", b"aBC"), Ordering::Equal);
        assert_eq!(ci("ÄRGER".as_bytes(), "ärger".as_bytes()), Ordering::Equal);
        assert_eq!(ci(b"abc", b"abd"), Ordering::Less);
        assert_eq!(ci(b" a", b"a"), Ordering::Less);
        assert_eq!(ci(b"", b"   "), Ordering::Equal);
        assert_eq!(ci(b"\xff", "\u{10ffff}".as_bytes()), Ordering::Greater);
    }
}
