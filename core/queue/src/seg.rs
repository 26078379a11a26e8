//! Guest buffers after translation, and the only functions that copy guest bytes.

use std::sync::atomic::{Ordering, compiler_fence};

/// One host-contiguous piece of guest memory; the layout of `struct iovec`. Neither constructible
/// nor clonable outside this crate: a `Seg` lives in a [`crate::Batch`] or [`crate::ChainBuf`],
/// which keeps its memory table mapped.
#[repr(C)]
#[derive(Debug)]
pub struct Seg {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: a `Seg` is an address into shared guest memory, valid on every thread while the owner
// (a batch) keeps the table alive.
unsafe impl Send for Seg {}

impl Seg {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Segments as the kernel takes them (`readv`, io_uring).
pub fn as_iovecs(segs: &[Seg]) -> &[libc::iovec] {
    // SAFETY: `Seg` is `repr(C)` with the fields of `iovec` in its order.
    unsafe { std::slice::from_raw_parts(segs.as_ptr().cast(), segs.len()) }
}

/// Has the cache fetch the line at `ptr`; any address will do.
#[inline(always)]
pub fn prefetch(ptr: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(ptr.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = ptr;
}

/// Has the cache fetch the first two lines of a buffer: a frame's headers, a request's header.
#[inline]
pub fn prefetch_head(segs: &[Seg]) {
    if let Some(first) = segs.first() {
        prefetch(first.ptr);
        prefetch(first.ptr.wrapping_add(64));
    }
}

/// Sum of the lengths.
#[inline]
pub fn total_len(segs: &[Seg]) -> usize {
    segs.iter().map(|s| s.len).sum()
}

/// Copies as `copy_nonoverlapping`, without a call for the lengths of headers and small frames.
///
/// # Safety
/// As `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise; `copy_ends` is given a length of one to two of its halves.
    unsafe {
        match len {
            64..=128 => copy_ends::<[u8; 64]>(src, dst, len),
            32..=63 => copy_ends::<[u8; 32]>(src, dst, len),
            16..=31 => copy_ends::<u128>(src, dst, len),
            _ => std::ptr::copy_nonoverlapping(src, dst, len),
        }
    }
}

/// Copies the first and the last bytes, as many as a `Half` has. Bytes in the middle are read
/// twice: a guest that changes them meanwhile has one value or the other copied, as with any copy,
/// and only the copy is looked at.
///
/// # Safety
/// As `copy_nonoverlapping`; `len` is the size of one to two halves.
#[inline(always)]
unsafe fn copy_ends<Half: Copy>(src: *const u8, dst: *mut u8, len: usize) {
    let end = len - size_of::<Half>();
    // SAFETY: each half lies within the contract's range; it is at most `len`.
    unsafe {
        let first = src.cast::<Half>().read_unaligned();
        let last = src.add(end).cast::<Half>().read_unaligned();
        dst.cast::<Half>().write_unaligned(first);
        dst.add(end).cast::<Half>().write_unaligned(last);
    }
}

/// Copies guest bytes, from `offset` in `src`, into `dst`; returns how many there were.
#[inline]
pub fn copy_out(src: &[Seg], offset: usize, dst: &mut [u8]) -> usize {
    let done = match in_first(src, offset, dst.len()) {
        Some(ptr) => {
            // SAFETY: `ptr..ptr + dst.len()` lies in a segment, mapped while its owner lives; `dst`
            // is ours and therefore not guest memory.
            unsafe { copy(ptr, dst.as_mut_ptr(), dst.len()) };
            dst.len()
        }
        None => copy_out_pieces(src, offset, dst),
    };
    // The guest may change the bytes at any time: nothing after this line may be answered from
    // the source again instead of from our copy.
    compiler_fence(Ordering::SeqCst);
    done
}

/// Copies out of several segments. Never inlined: inlined beside the single copy, its loop took the
/// registers of every frame's values.
#[inline(never)]
fn copy_out_pieces(src: &[Seg], offset: usize, dst: &mut [u8]) -> usize {
    let mut done = 0;
    walk(src, offset, dst.len(), |ptr, len| {
        // SAFETY: as in `copy_out`; `done + len` is at most `dst.len()`.
        unsafe { copy(ptr, dst.as_mut_ptr().add(done), len) };
        done += len;
    });
    done
}

/// Copies our bytes into the guest's, from `offset` in `dst`; returns how many fitted.
#[inline]
pub fn copy_in(dst: &[Seg], offset: usize, src: &[u8]) -> usize {
    match in_first(dst, offset, src.len()) {
        Some(ptr) => {
            // SAFETY: as in `copy_out`, with the roles exchanged.
            unsafe { copy(src.as_ptr(), ptr, src.len()) };
            src.len()
        }
        None => copy_in_pieces(dst, offset, src),
    }
}

/// Copies into several segments. Never inlined, as [`copy_out_pieces`].
#[inline(never)]
fn copy_in_pieces(dst: &[Seg], offset: usize, src: &[u8]) -> usize {
    let mut done = 0;
    walk(dst, offset, src.len(), |ptr, len| {
        // SAFETY: as in `copy_out_pieces`, with the roles exchanged.
        unsafe { copy(src.as_ptr().add(done), ptr, len) };
        done += len;
    });
    done
}

/// Writes the last byte of the last segment; false when there is none.
#[inline]
pub fn set_last_byte(dst: &[Seg], byte: u8) -> bool {
    let Some(last) = dst.last().filter(|last| last.len > 0) else { return false };
    // SAFETY: the address lies in a segment, mapped while its owner lives.
    unsafe { last.ptr.add(last.len - 1).write(byte) };
    true
}

/// Copies up to `len` bytes from one guest's buffers to another's; returns how many. The one copy
/// of the switch.
#[inline]
pub fn copy_across(
    src: &[Seg],
    src_offset: usize,
    dst: &[Seg],
    dst_offset: usize,
    len: usize,
) -> usize {
    let (mut from, mut to) = (Cursor::new(src, src_offset), Cursor::new(dst, dst_offset));
    let mut done = 0;
    while done < len {
        let part = from.rest().min(to.rest()).min(len - done);
        if part == 0 {
            break;
        }
        // SAFETY: both ranges lie in segments, mapped while their owners live. `copy` and not
        // `copy_nonoverlapping`: a hostile guest may name the same bytes on both sides.
        unsafe { std::ptr::copy(from.ptr(), to.ptr(), part) };
        from.advance(part);
        to.advance(part);
        done += part;
    }
    done
}

/// Writes zeroes; returns how many fitted.
pub fn fill_zero(dst: &[Seg], offset: usize, len: usize) -> usize {
    walk(dst, offset, len, |ptr, len| {
        // SAFETY: `ptr..ptr + len` lies in a segment, mapped while its owner lives.
        unsafe { std::ptr::write_bytes(ptr, 0, len) };
    })
}

/// Appends the sub-range `offset..offset + len` of `src` to `out` as iovecs (no copy of bytes).
/// Returns how many bytes are described; stops when `out` is at its capacity (never grows it).
pub fn subrange(src: &[Seg], offset: usize, len: usize, out: &mut Vec<libc::iovec>) -> usize {
    let mut cursor = Cursor::new(src, offset);
    let mut done = 0;
    while done < len && out.len() < out.capacity() {
        let part = cursor.rest().min(len - done);
        if part == 0 {
            break;
        }
        out.push(libc::iovec { iov_base: cursor.ptr().cast(), iov_len: part });
        cursor.advance(part);
        done += part;
    }
    done
}

/// Address of a range that lies in the first segment, as most headers and frames do.
#[inline(always)]
fn in_first(segs: &[Seg], offset: usize, len: usize) -> Option<*mut u8> {
    let first = segs.first()?;
    (offset <= first.len && len <= first.len - offset).then(|| first.ptr.wrapping_add(offset))
}

/// Calls `piece` for the parts of `offset..offset + len`; returns how many bytes there were.
#[inline]
fn walk(segs: &[Seg], offset: usize, len: usize, mut piece: impl FnMut(*mut u8, usize)) -> usize {
    let mut cursor = Cursor::new(segs, offset);
    let mut done = 0;
    while done < len {
        let part = cursor.rest().min(len - done);
        if part == 0 {
            break;
        }
        piece(cursor.ptr(), part);
        cursor.advance(part);
        done += part;
    }
    done
}

/// A place in a list of segments. Between calls it stands on a byte, or at the end (`rest` is 0).
struct Cursor<'a> {
    segs: &'a [Seg],
    offset: usize,
}

impl<'a> Cursor<'a> {
    #[inline]
    fn new(segs: &'a [Seg], offset: usize) -> Self {
        let mut cursor = Self { segs, offset };
        cursor.settle();
        cursor
    }

    #[inline]
    fn settle(&mut self) {
        while let Some((first, rest)) = self.segs.split_first() {
            if self.offset < first.len {
                return;
            }
            self.offset -= first.len;
            self.segs = rest;
        }
    }

    /// Bytes left in this segment.
    #[inline]
    fn rest(&self) -> usize {
        self.segs.first().map_or(0, |s| s.len - self.offset)
    }

    #[inline]
    fn ptr(&self) -> *mut u8 {
        self.segs.first().map_or(std::ptr::null_mut(), |s| s.ptr.wrapping_add(self.offset))
    }

    /// Moves on by `n`, at most `rest`.
    #[inline]
    fn advance(&mut self, n: usize) {
        self.offset += n;
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `bytes`, cut into segments of `step` bytes.
    fn cut(bytes: &mut [u8], step: usize) -> Vec<Seg> {
        bytes.chunks_mut(step).map(|part| Seg { ptr: part.as_mut_ptr(), len: part.len() }).collect()
    }

    /// All short lengths take ways of their own: each byte comes to its place, and no other is
    /// touched.
    #[test]
    fn bytes_of_each_length_come_to_their_place() {
        let from: Vec<u8> = (0..=u8::MAX).collect();
        for len in 0..=140 {
            for (step, offset) in [(256, 0), (256, 7), (100, 5), (33, 40), (17, 3), (1, 1)] {
                let mut guest = from.clone();
                let segs = cut(&mut guest, step);
                let mut out = vec![0xEE; len];
                assert_eq!(copy_out(&segs, offset, &mut out), len);
                assert_eq!(
                    out,
                    from[offset..offset + len],
                    "{len} bytes out at {offset} of {step}"
                );

                let mut guest = vec![0xEE; 256];
                let segs = cut(&mut guest, step);
                assert_eq!(copy_in(&segs, offset, &from[1..=len]), len);
                let mut due = vec![0xEE; 256];
                due[offset..offset + len].copy_from_slice(&from[1..=len]);
                assert_eq!(guest, due, "{len} bytes in at {offset} of {step}");
            }
        }
    }

    #[test]
    fn the_last_byte_is_that_of_the_last_segment() {
        let mut guest = [0xEE; 5];
        let mut segs = cut(&mut guest, 2);
        assert!(set_last_byte(&segs, 1));
        assert!(!set_last_byte(&[], 2));
        segs.truncate(2);
        assert!(set_last_byte(&segs, 3));
        assert_eq!(guest, [0xEE, 0xEE, 0xEE, 3, 1]);
    }
}
