//! The other end of the API, for the command line: one blocking request per connection.

use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::error::ControlError;

/// Longest wait for an answer: longer than the daemon's own time-out, so that its error arrives.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Longest wait while a body goes to the daemon and is worked on: the rest of it is made durable,
/// and modules may start twice, in 150 s each.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(900);

/// Longest headers of an answer.
const MAX_HEAD_BYTES: u64 = 16 << 10;

/// Bytes of a body that are sent at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// Largest answer: 1,024 ports with 32 queues make metrics of about 40 MiB.
const MAX_ANSWER_LEN_BYTES: u64 = 128 << 20;

/// An answer of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: String,
}

impl Answer {
    /// Whether the status is a success.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The body as JSON; null when it is empty or none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or(Value::Null)
    }

    /// The text of an error answer.
    pub fn error(&self) -> String {
        match self.json().get("error").and_then(Value::as_str) {
            Some(error) => error.into(),
            None => format!("HTTP status {}", self.status),
        }
    }
}

/// A daemon's control socket.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// The daemon that listens on `socket`.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.into() }
    }

    fn connect(&self, timeout: Duration) -> std::io::Result<UnixStream> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(stream)
    }

    fn parse(&self, raw: &[u8]) -> Result<Answer, ControlError> {
        parse(raw).map_err(|what| ControlError::BadAnswer { path: self.socket.clone(), what })
    }

    /// Requests a long body: that of a success is for the caller to read, up to its end, and says
    /// itself whether it is whole. The inner error is an answer that is no success.
    pub fn download(&self, path: &str) -> Result<Result<impl Read + use<>, Answer>, ControlError> {
        let unreachable = ControlError::unreachable(&self.socket);
        let mut stream = self.connect(TIMEOUT).map_err(&unreachable)?;
        // HTTP/1.0: a body of unknown length ends with the connection.
        let head = format!("GET {path} HTTP/1.0\r\nHost: millrace\r\n\r\n");
        stream.write_all(head.as_bytes()).map_err(&unreachable)?;
        let mut stream = BufReader::with_capacity(CHUNK_BYTES, stream);
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && (head.len() as u64) < MAX_HEAD_BYTES {
            if stream.read(&mut byte).map_err(&unreachable)? == 0 {
                break;
            }
            head.push(byte[0]);
        }
        if head.starts_with(b"HTTP/1.0 200 ") || head.starts_with(b"HTTP/1.1 200 ") {
            return Ok(Ok(stream));
        }
        stream.take(MAX_ANSWER_LEN_BYTES).read_to_end(&mut head).map_err(&unreachable)?;
        self.parse(&head).map(Err)
    }

    /// Sends a long body, as it comes, and waits for the answer.
    pub fn upload(&self, path: &str, body: &mut dyn Read) -> Result<Answer, ControlError> {
        let unreachable = ControlError::unreachable(&self.socket);
        let mut stream = self.connect(UPLOAD_TIMEOUT).map_err(&unreachable)?;
        let head = format!(
            "PUT {path} HTTP/1.1\r\nHost: millrace\r\nConnection: close\r\n\
             Transfer-Encoding: chunked\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).map_err(&unreachable)?;
        let (mut piece, mut sent) = (vec![0; CHUNK_BYTES], Ok(()));
        loop {
            // An error of `body` ends the request as one that is cut short.
            let n = body.read(&mut piece).map_err(ControlError::Input)?;
            sent = sent
                .and_then(|()| stream.write_all(format!("{n:x}\r\n").as_bytes()))
                .and_then(|()| stream.write_all(&piece[..n]))
                .and_then(|()| stream.write_all(b"\r\n"));
            // The daemon may answer before it has read all; the answer counts.
            if n == 0 || sent.is_err() {
                break;
            }
        }
        let mut raw = Vec::new();
        let read = stream.take(MAX_ANSWER_LEN_BYTES + 1).read_to_end(&mut raw);
        if raw.is_empty() {
            sent.and(read.map(drop)).map_err(&unreachable)?;
        }
        self.parse(&raw)
    }

    /// Sends one request and waits for its answer.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, ControlError> {
        let unreachable = ControlError::unreachable(&self.socket);
        let mut stream = self.connect(TIMEOUT).map_err(&unreachable)?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: millrace\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        // The daemon may answer (413) and close before it has read all; the answer counts.
        let sent =
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        let mut raw = Vec::new();
        let read = (&mut stream).take(MAX_ANSWER_LEN_BYTES + 1).read_to_end(&mut raw);
        if raw.is_empty() {
            sent.map_err(&unreachable)?;
        }
        if let Err(e) = read
            && raw.is_empty()
        {
            return Err(unreachable(e));
        }
        self.parse(&raw)
    }
}

/// Encodes a name for a path.
pub fn encode(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Parses an answer. It ends with the connection, so only its length is checked.
fn parse(raw: &[u8]) -> Result<Answer, String> {
    if raw.len() as u64 > MAX_ANSWER_LEN_BYTES {
        return Err(format!("it is larger than {MAX_ANSWER_LEN_BYTES} bytes"));
    }
    let split = raw.windows(4).position(|w| w == b"\r\n\r\n").ok_or("it has no end of headers")?;
    let head = std::str::from_utf8(&raw[..split]).map_err(|_| "its headers are not text")?;
    let body = &raw[split + 4..];
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.strip_prefix("HTTP/1.1 ").or_else(|| line.strip_prefix("HTTP/1.0 ")))
        .and_then(|rest| rest.get(..3))
        .and_then(|code| code.parse().ok())
        .ok_or("its first line is not HTTP/1.1")?;
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        if name.eq_ignore_ascii_case("content-length")
            && value.trim().parse::<usize>() != Ok(body.len())
        {
            return Err(format!("it has {} of {} bytes", body.len(), value.trim()));
        }
        if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err("it is chunked, which the daemon never sends".into());
        }
    }
    let body = String::from_utf8(body.to_vec()).map_err(|_| "its body is not UTF-8")?;
    Ok(Answer { status, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart() {
        let answer =
            parse(b"HTTP/1.1 404 Not Found\r\ncontent-length: 13\r\n\r\n{\"error\":\"x\"}");
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.error().as_str()), (404, "x"));
        assert!(!answer.is_success());
    }

    #[test]
    fn nonsense_is_an_error() {
        for bad in [
            &b""[..],
            b"HTTP/1.1 200 OK",
            b"SSH-2.0\r\n\r\n",
            b"HTTP/1.1 2",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n\r\n\xff",
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_cannot_leave_their_place_in_a_path() {
        assert_eq!(encode("web-1"), "web-1");
        assert_eq!(encode("../a b\r\n"), "..%2Fa%20b%0D%0A");
    }
}
