//! Paths of the site, from the targets of requests.

use alloc::vec::Vec;

/// Longest path, without escapes.
pub const MAX_PATH_BYTES: usize = 1024;

/// Reason why a target is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The target is none, or could be read in two ways.
    Wrong,
    /// The target is too long.
    Long,
}

/// The path of a target, without its escapes. It begins with a slash and may end with one; its
/// segments are not empty and not `.` or `..`.
///
/// # Errors
/// The target is refused.
pub fn parse(target: &[u8]) -> Result<Vec<u8>, Refused> {
    let target = match target.strip_prefix(b"http://") {
        // The absolute form: the host in it is of no interest.
        Some(rest) => match rest.iter().position(|&b| b == b'/' || b == b'?') {
            Some(at) if rest[at] == b'/' => &rest[at..],
            _ => b"/",
        },
        None => target,
    };
    let escaped = target.split(|&b| b == b'?').next().unwrap_or_default();
    let path = unescape(escaped)?;
    let segments = path.strip_prefix(b"/").ok_or(Refused::Wrong)?;
    let segments = segments.strip_suffix(b"/").unwrap_or(segments);
    let wrong = |s: &[u8]| s.is_empty() || s == b"." || s == b"..";
    if path.len() > 1 && segments.split(|&b| b == b'/').any(wrong) {
        return Err(Refused::Wrong);
    }
    if path.len() > MAX_PATH_BYTES { Err(Refused::Long) } else { Ok(path) }
}

fn unescape(escaped: &[u8]) -> Result<Vec<u8>, Refused> {
    let mut path = Vec::with_capacity(escaped.len());
    let mut bytes = escaped.iter().copied();
    while let Some(byte) = bytes.next() {
        let is_escape = byte == b'%';
        let byte = match is_escape {
            true => digit(bytes.next())? << 4 | digit(bytes.next())?,
            false => byte,
        };
        let is_odd = byte < b' ' || byte == 0x7f || byte == b'\\' || (!is_escape && byte == b'#');
        if is_odd || (is_escape && byte == b'/') {
            return Err(Refused::Wrong);
        }
        path.push(byte);
    }
    Ok(path)
}

fn digit(byte: Option<u8>) -> Result<u8, Refused> {
    let digit = (byte.ok_or(Refused::Wrong)? as char).to_digit(16);
    digit.map(|d| d as u8).ok_or(Refused::Wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn targets_have_one_path_or_none() {
        for (target, path) in [
            ("/", "/"),
            ("/a/b.html?x=../", "/a/b.html"),
            ("/a/", "/a/"),
            ("/%41%20b", "/A b"),
            ("/a%3fb%23", "/a?b#"),
            ("/...", "/..."),
            ("http://site:80/a", "/a"),
            ("http://site", "/"),
            ("http://site?a/b", "/"),
        ] {
            assert_eq!(parse(target.as_bytes()), Ok(path.as_bytes().to_vec()), "{target}");
        }
        for target in [
            "",
            "*",
            "a",
            "site:80",
            "https://site/a",
            "//",
            "//a",
            "/a//b",
            "/a//",
            "/.",
            "/..",
            "/../a",
            "/a/../b",
            "/a/..",
            "/%2e%2e/a",
            "/a/%2E/b",
            "/a%2fb",
            "/a\\b",
            "/%5c",
            "/%00",
            "/%0a",
            "/%",
            "/%4",
            "/%g0",
            "/%+1",
            "/a#b",
        ] {
            assert_eq!(parse(target.as_bytes()), Err(Refused::Wrong), "{target}");
        }
        let long = std::format!("/{}", "a".repeat(MAX_PATH_BYTES));
        assert_eq!(parse(long.as_bytes()), Err(Refused::Long));
        assert!(parse(&long.as_bytes()[..MAX_PATH_BYTES]).is_ok());
    }

    proptest! {
        #[test]
        fn what_comes_out_has_plain_segments(target in prop::collection::vec(any::<u8>(), 0..40)) {
            let target = [b"/".as_slice(), &target].concat();
            if let Ok(path) = parse(&target) {
                let text = std::string::String::from_utf8_lossy(&path).into_owned();
                prop_assert!(text.starts_with('/') && !text.contains("//"));
                prop_assert!(text.split('/').all(|s| s != "." && s != ".."));
            }
        }
    }
}
