//! Heads of requests.

use alloc::vec::Vec;

use crate::path;

/// Longest head.
pub const MAX_HEAD_BYTES: usize = 16 << 10;
/// Limit of fields.
const MAX_FIELDS: usize = 64;
/// Bytes without a line's end after which it is the target that is too long.
const MAX_LINE_BYTES: usize = 8 << 10;

/// Method of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Get an object.
    Get,
    /// Get what is said of it.
    Head,
    /// Store one.
    Put,
    /// Remove one.
    Delete,
    /// Any other method.
    Other,
}

/// A request without its body.
#[derive(Debug, PartialEq, Eq)]
pub struct Head<'a> {
    /// Method.
    pub method: Method,
    /// Target; see [`path::parse`].
    pub path: Vec<u8>,
    /// HTTP/1.0.
    pub is_old: bool,
    /// The connection goes on afterwards.
    pub keeps: bool,
    /// Bytes of the body, if the head says so.
    pub length: Option<u64>,
    /// The client waits for a word before it sends the body.
    pub expects: bool,
    /// Part of an object.
    pub range: Option<&'a [u8]>,
    /// Condition: only if the object is still the same, else the whole.
    pub if_range: Option<&'a [u8]>,
    /// Lists of tags of which it must be one.
    pub if_match: Vec<&'a [u8]>,
    /// Lists of tags of which it must be none.
    pub if_none_match: Vec<&'a [u8]>,
    /// Condition: only if the object is newer.
    pub if_modified_since: Option<&'a [u8]>,
    /// Condition: only if the object is not newer.
    pub if_unmodified_since: Option<&'a [u8]>,
    /// Time when the stored object was changed.
    pub last_modified: Option<&'a [u8]>,
}

/// Finds the end of the head; none: it has not come yet. Depends on the bytes only, not on how many
/// more there are.
///
/// # Errors
/// The status to refuse it with.
pub fn end(input: &[u8]) -> Result<Option<usize>, u16> {
    let most = &input[..input.len().min(MAX_HEAD_BYTES)];
    let mut first = None;
    for (at, _) in most.iter().enumerate().filter(|(_, b)| **b == b'\n') {
        if at == 0 || most[at - 1] != b'\r' {
            return Err(400);
        }
        if most[..at].ends_with(b"\r\n\r") {
            return Ok(Some(at + 1));
        }
        first = first.or(Some(at));
    }
    match (most.len() == MAX_HEAD_BYTES, first) {
        (false, _) => Ok(None),
        (true, Some(at)) if at < MAX_LINE_BYTES => Err(431),
        (true, _) => Err(414),
    }
}

/// Reads a head.
///
/// # Errors
/// The status to refuse it with.
pub fn parse(bytes: &[u8]) -> Result<Head<'_>, u16> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err(400),
        Err(httparse::Error::TooManyHeaders) => return Err(431),
        Err(httparse::Error::Version) if names_version(bytes) => return Err(505),
        Err(_) => return Err(400),
    }
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version)
    else {
        return Err(400);
    };
    let path = match path::parse(target.as_bytes()) {
        Ok(path) => path,
        Err(path::Refused::Long) => return Err(414),
        // That of OPTIONS; there is no such method here.
        Err(path::Refused::Wrong) if target == "*" => b"*".to_vec(),
        Err(path::Refused::Wrong) => return Err(400),
    };
    let mut head = Head::new(method, path, minor == 0);
    head.take_fields(request.headers)?;
    Ok(head)
}

/// Whether the first line is a request of HTTP, of any version.
fn names_version(bytes: &[u8]) -> bool {
    let line = bytes.split(|&b| b == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&b| b == b' ').skip(2);
    words.next().is_some_and(|w| w.starts_with(b"HTTP/")) && words.next().is_none()
}

/// Fields that decide where the next request begins.
#[derive(Debug, Default)]
struct Framing {
    hosts: usize,
    coding: Option<bool>,
}

impl<'a> Head<'a> {
    fn new(method: &str, path: Vec<u8>, is_old: bool) -> Self {
        let method = match method {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "PUT" => Method::Put,
            "DELETE" => Method::Delete,
            _ => Method::Other,
        };
        Self {
            method,
            path,
            is_old,
            keeps: !is_old,
            length: None,
            expects: false,
            range: None,
            if_range: None,
            if_match: Vec::new(),
            if_none_match: Vec::new(),
            if_modified_since: None,
            if_unmodified_since: None,
            last_modified: None,
        }
    }

    /// Whether a body follows.
    pub fn has_body(&self) -> bool {
        self.length.is_some_and(|len| len > 0)
    }

    fn take_fields(&mut self, fields: &[httparse::Header<'a>]) -> Result<(), u16> {
        let mut framing = Framing::default();
        let (mut closes, mut stays) = (false, false);
        for field in fields {
            if field.name.eq_ignore_ascii_case("connection") {
                for word in field.value.split(|&b| b == b',').map(<[u8]>::trim_ascii) {
                    closes |= word.eq_ignore_ascii_case(b"close");
                    stays |= word.eq_ignore_ascii_case(b"keep-alive");
                }
            } else {
                self.take_field(field.name, field.value, &mut framing)?;
            }
        }
        self.keeps = !closes && (stays || !self.is_old);
        self.check(&framing)
    }

    fn take_field(
        &mut self,
        name: &str,
        value: &'a [u8],
        framing: &mut Framing,
    ) -> Result<(), u16> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        if is("host") {
            framing.hosts += 1;
        } else if is("content-length") {
            let fine = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
            let length =
                core::str::from_utf8(value).ok().filter(|_| fine).and_then(|t| t.parse().ok());
            only(&mut self.length, length.ok_or(400u16)?)?;
        } else if is("transfer-encoding") {
            only(&mut framing.coding, value.eq_ignore_ascii_case(b"chunked"))?;
        } else if is("expect") {
            self.expects = value.eq_ignore_ascii_case(b"100-continue");
            self.expects.then_some(()).ok_or(417u16)?;
        } else if is("range") {
            only(&mut self.range, value)?;
        } else if is("if-range") {
            only(&mut self.if_range, value)?;
        } else if is("if-match") {
            self.if_match.push(value);
        } else if is("if-none-match") {
            self.if_none_match.push(value);
        } else if is("if-modified-since") {
            only(&mut self.if_modified_since, value)?;
        } else if is("if-unmodified-since") {
            only(&mut self.if_unmodified_since, value)?;
        } else if is("last-modified") {
            only(&mut self.last_modified, value)?;
        }
        Ok(())
    }

    fn check(&self, framing: &Framing) -> Result<(), u16> {
        if framing.hosts > 1 || (framing.hosts == 0 && !self.is_old) {
            return Err(400);
        }
        match framing.coding {
            None => Ok(()),
            Some(_) if self.is_old || self.length.is_some() => Err(400),
            Some(true) => Err(411),
            Some(false) => Err(501),
        }
    }
}

/// A field that may be there once.
fn only<T>(place: &mut Option<T>, value: T) -> Result<(), u16> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> Result<Head<'_>, u16> {
        assert_eq!(end(text.as_bytes()), Ok(Some(text.len())), "{text:?}");
        parse(text.as_bytes())
    }

    #[test]
    fn heads_are_read() {
        let head = told(
            "PUT /a%20b?c HTTP/1.1\r\nhost: x\r\nContent-Length: 5\r\nExpect: 100-Continue\r\n\
             If-None-Match: \"a\"\r\nIf-None-Match: \"b\"\r\nRange: bytes=1-2\r\n\r\n",
        )
        .unwrap();
        assert_eq!((head.method, head.path.as_slice()), (Method::Put, b"/a b".as_slice()));
        assert_eq!((head.length, head.expects, head.keeps), (Some(5), true, true));
        assert_eq!(head.if_none_match, [b"\"a\"", b"\"b\""]);
        for (lines, keeps) in [
            ("GET / HTTP/1.0\r\n", false),
            ("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n", true),
            ("GET / HTTP/1.1\r\nHost: a\r\n", true),
            ("GET / HTTP/1.1\r\nHost: a\r\nConnection: x, close\r\n", false),
        ] {
            assert_eq!(told(&std::format!("{lines}\r\n")).unwrap().keeps, keeps, "{lines}");
        }
        assert_eq!(told("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n").unwrap().method, Method::Other);
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        let get = "GET / HTTP/1.1\r\nHost: a\r\n";
        for (text, status) in [
            (std::format!("{get}Content-Length: 1\r\nContent-Length: 1\r\n\r\n"), 400),
            (std::format!("{get}Content-Length: 1, 1\r\n\r\n"), 400),
            (std::format!("{get}Content-Length: +1\r\n\r\n"), 400),
            (std::format!("{get}Content-Length: \r\n\r\n"), 400),
            (std::format!("{get}Content-Length: 99999999999999999999\r\n\r\n"), 400),
            (std::format!("{get}Content-Length : 1\r\n\r\n"), 400),
            (std::format!("{get}Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n"), 400),
            (std::format!("{get}Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n"), 400),
            (std::format!("{get}Transfer-Encoding: gzip, chunked\r\n\r\n"), 501),
            (std::format!("{get}Transfer-Encoding: \x0bchunked\r\n\r\n"), 400),
            (std::format!("{get}Transfer-Encoding: chunked\r\n\r\n"), 411),
            (std::format!("{get}A: b\r\n c\r\n\r\n"), 400),
            (std::format!("{get}A: b\rc\r\n\r\n"), 400),
            (std::format!("{get}A: b\0c\r\n\r\n"), 400),
            (std::format!("{get}Host: b\r\n\r\n"), 400),
            (std::format!("{get}Expect: x\r\n\r\n"), 417),
            (std::format!("{get}Range: a\r\nRange: b\r\n\r\n"), 400),
            (std::format!("{get}{}\r\n", "A: b\r\n".repeat(70)), 431),
            ("GET / HTTP/1.1\r\n\r\n".into(), 400),
            ("GET / HTTP/2.0\r\nHost: a\r\n\r\n".into(), 505),
            ("GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".into(), 400),
            ("GET /a b HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
            ("GET /\r\nHost: a\r\n\r\n".into(), 400),
            ("GET /../a HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
            ("G(T / HTTP/1.1\r\nHost: a\r\n\r\n".into(), 400),
        ] {
            assert_eq!(told(&text), Err(status), "{text:?}");
        }
    }

    #[test]
    fn heads_end_where_they_end() {
        assert_eq!(end(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nmore"), Ok(Some(27)));
        assert_eq!(end(b"GET / HTTP/1.1\r\nHost: a\r\n\r"), Ok(None));
        assert_eq!(end(b"GET / HTTP/1.1\nHost: a\n\n"), Err(400));
        assert_eq!(end(b"GET / HTTP/1.1\r\nHost: a\r\n\nGET"), Err(400));
        let long = std::format!("GET /{}", "a".repeat(MAX_HEAD_BYTES));
        assert_eq!(end(long.as_bytes()), Err(414));
        let fields = std::format!("GET / HTTP/1.1\r\n{}", "A: b\r\n".repeat(3000));
        assert_eq!(end(fields.as_bytes()), Err(431));
    }
}
