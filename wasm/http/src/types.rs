//! Types of content, by the path's extension.

/// Content type of a path.
pub(crate) fn of(path: &[u8]) -> &'static str {
    let name = path.rsplit(|&b| b == b'/').next().unwrap_or_default();
    let Some(dot) = name.iter().rposition(|&b| b == b'.') else { return UNKNOWN };
    let extension = name[dot + 1..].to_ascii_lowercase();
    let found = TYPES.iter().find(|(known, _)| known.as_bytes() == extension);
    found.map_or(UNKNOWN, |(_, kind)| kind)
}

const UNKNOWN: &str = "application/octet-stream";

const TYPES: [(&str, &str); 40] = [
    ("avif", "image/avif"),
    ("bmp", "image/bmp"),
    ("css", "text/css; charset=utf-8"),
    ("csv", "text/csv; charset=utf-8"),
    ("eot", "application/vnd.ms-fontobject"),
    ("epub", "application/epub+zip"),
    ("gif", "image/gif"),
    ("gz", "application/gzip"),
    ("htm", "text/html; charset=utf-8"),
    ("html", "text/html; charset=utf-8"),
    ("ico", "image/x-icon"),
    ("ics", "text/calendar; charset=utf-8"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("js", "text/javascript; charset=utf-8"),
    ("json", "application/json"),
    ("map", "application/json"),
    ("md", "text/markdown; charset=utf-8"),
    ("mjs", "text/javascript; charset=utf-8"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("ogg", "audio/ogg"),
    ("otf", "font/otf"),
    ("pdf", "application/pdf"),
    ("png", "image/png"),
    ("svg", "image/svg+xml"),
    ("tar", "application/x-tar"),
    ("tiff", "image/tiff"),
    ("ttf", "font/ttf"),
    ("txt", "text/plain; charset=utf-8"),
    ("wasm", "application/wasm"),
    ("wav", "audio/wav"),
    ("weba", "audio/webm"),
    ("webm", "video/webm"),
    ("webmanifest", "application/manifest+json"),
    ("webp", "image/webp"),
    ("woff", "font/woff"),
    ("woff2", "font/woff2"),
    ("xml", "text/xml; charset=utf-8"),
    ("zip", "application/zip"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_have_types() {
        assert_eq!(of(b"/a/index.HTML"), "text/html; charset=utf-8");
        assert_eq!(of(b"/a.tar.gz"), "application/gzip");
        for path in [b"/a".as_slice(), b"/a.b/c", b"/a.", b"/a.xyz", b"/"] {
            assert_eq!(of(path), UNKNOWN);
        }
        assert!(TYPES.is_sorted());
    }
}
