//! Mounts of file systems, from `/proc/self/mountinfo`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Mount: a line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Major and minor number of its device.
    pub device: (u32, u32),
    /// Path at which it is mounted.
    pub point: PathBuf,
    /// Options of the file system itself.
    pub options: String,
}

/// Reads the table; skips lines of another form.
pub fn parse(table: &str) -> Vec<Mount> {
    table.lines().filter_map(parse_line).collect()
}

/// Reads a line such as `36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/vda
/// rw,data=ordered`
fn parse_line(line: &str) -> Option<Mount> {
    let (head, tail) = line.split_once(" - ")?;
    let mut words = head.split(' ').skip(2);
    let (major, minor) = words.next()?.split_once(':')?;
    let point = words.nth(1)?;
    Some(Mount {
        device: (major.parse().ok()?, minor.parse().ok()?),
        point: OsString::from_vec(unescape(point)).into(),
        options: tail.split(' ').nth(2)?.to_owned(),
    })
}

/// Replaces escapes: blanks and backslashes stand as three octal digits.
fn unescape(word: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = word.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (first, code) {
            (b'\\', Some(code)) => {
                bytes.push(code);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_forms() {
        let table = "36 35 254:1 / /srv/a\\040b\\134 rw,noatime shared:1 master:2 - ext4 /dev/vda1 rw,data=journal\n\
                     nonsense\n37 35 0:5 / /dev rw - devtmpfs dev rw";
        let got = parse(table);
        assert_eq!(got.len(), 2);
        assert_eq!(got[0].device, (254, 1));
        assert_eq!(got[0].point, PathBuf::from("/srv/a b\\"));
        assert!(got[0].options.ends_with("data=journal"));
        assert_eq!(got[1].point, PathBuf::from("/dev"));
    }
}
