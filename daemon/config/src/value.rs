//! Notations inside settings: names, MAC addresses, hashes, sizes, paths.

use std::path::{Component, Path, PathBuf};

use base::limits::MAX_NAME_LEN_BYTES;

/// Longest path of a Unix socket: `sun_path` has 108 bytes, one is the closing zero.
pub const MAX_SOCKET_PATH_LEN_BYTES: usize = 107;

/// Checks a name, which is a metric label and part of a file name: letters, digits, `.`, `_`, `-`,
/// a letter or digit first. The error says what is wrong.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("is empty".into());
    }
    if name.len() > MAX_NAME_LEN_BYTES {
        return Err(format!("has {} bytes, the limit is {MAX_NAME_LEN_BYTES}", name.len()));
    }
    let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if let Some(bad) = name.chars().find(|&c| !ok(c)) {
        return Err(format!("has the character {bad:?}"));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Err("does not start with a letter or digit".into());
    }
    Ok(())
}

/// Parses a MAC address, `02:00:00:00:00:01` or with dashes.
pub(crate) fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0u8; 6];
    let separator = if text.contains('-') { '-' } else { ':' };
    let mut parts = text.split(separator);
    for byte in &mut mac {
        let part = parts.next()?;
        if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

/// Writes a MAC address in the usual way: `02:00:00:00:00:01`.
pub fn format_mac(mac: [u8; 6]) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

/// Parses a SHA-256 of 64 hexadecimal digits.
pub(crate) fn parse_sha256(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut hash = [0u8; 32];
    for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// Writes a SHA-256 as `sha256sum` does.
pub fn format_sha256(hash: &[u8; 32]) -> String {
    hash.iter().map(|b| format!("{b:02x}")).collect()
}

/// Parses a size in bytes: `64MiB`, `4 GiB`, `4096`, `512B`. Units are powers of 1024 and written
/// out, since `M` and `MB` mean different things to different people.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_start() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The path without `.` and doubled slashes. Links are not followed: the file may not exist yet,
/// and the engine's lock on the image catches two ways to the same file.
pub(crate) fn plain_path(path: &Path) -> PathBuf {
    path.components().filter(|c| !matches!(c, Component::CurDir)).collect()
}

/// The known word nearest to a mistyped one, if any is near enough to be meant.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    // Words longer than any setting are not typing errors; comparing them would only cost time.
    if word.len() > 32 {
        return None;
    }
    known
        .iter()
        .map(|k| (edit_distance(word, k), *k))
        .min()
        .filter(|(distance, k)| *distance <= 2.max(k.len() / 3))
        .map(|(_, k)| k)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let keep = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = keep.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "web-1", "vm.prod_7", "0"] {
            check_name(good).unwrap();
        }
        for bad in ["", "-a", ".a", "a/b", "a b", "ä", "..", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn macs() {
        assert_eq!(parse_mac("02:00:00:aB:00:01"), Some([2, 0, 0, 0xab, 0, 1]));
        assert_eq!(parse_mac("02-00-00-00-00-01"), Some([2, 0, 0, 0, 0, 1]));
        for bad in
            ["", "02:00:00:00:00", "02:00:00:00:00:01:02", "2:0:0:0:0:1", "+2:00:00:00:00:01"]
        {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
        assert_eq!(format_mac([2, 0, 0, 0xab, 0, 1]), "02:00:00:ab:00:01");
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("64MiB"), Some(64 << 20));
        assert_eq!(parse_size("4 GiB"), Some(4 << 30));
        assert_eq!(parse_size("512B"), Some(512));
        assert_eq!(parse_size("4096"), Some(4096));
        for bad in ["", "MiB", "1MB", "1.5GiB", "-1", "17000000TiB", "99999999999999999999"] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
    }

    #[test]
    fn typing_errors_find_their_word() {
        let known = ["queue_pairs", "mtu", "mac"];
        assert_eq!(nearest("queue_pair", &known), Some("queue_pairs"));
        assert_eq!(nearest("mtuu", &known), Some("mtu"));
        assert_eq!(nearest("completely", &known), None);
    }
}
