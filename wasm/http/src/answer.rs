//! Heads of answers.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::date;
use crate::index::Object;

/// State of the connection after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct After {
    /// Whether the connection goes on.
    pub keeps: bool,
    /// Whether the client speaks HTTP/1.0 and has to be told that the connection goes on.
    pub is_old: bool,
}

impl After {
    /// The connection ends.
    pub const CLOSE: Self = Self { keeps: false, is_old: false };

    fn field(self) -> &'static str {
        match (self.keeps, self.is_old) {
            (false, _) => "Connection: close\r\n",
            (true, true) => "Connection: keep-alive\r\n",
            (true, false) => "",
        }
    }
}

/// The words of a status.
fn words(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        206 => "Partial Content",
        304 => "Not Modified",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        411 => "Length Required",
        412 => "Precondition Failed",
        413 => "Content Too Large",
        414 => "URI Too Long",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        507 => "Insufficient Storage",
        _ => "Internal Server Error",
    }
}

/// The word that a client waits for before it sends a body.
pub fn go_on(out: &mut Vec<u8>) {
    out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
}

fn begin(status: u16, after: After) -> String {
    format!("HTTP/1.1 {status} {}\r\n{}", words(status), after.field())
}

/// An answer that says no more than its status, in words; those who asked with `HEAD` get no words.
pub fn status(out: &mut Vec<u8>, status: u16, after: After, with_body: bool, fields: &str) {
    let body = format!("{status} {}\n", words(status));
    let len =
        if status == 204 { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
    let kind = if status == 204 { "" } else { "Content-Type: text/plain\r\n" };
    let head = format!("{}{kind}{len}{fields}\r\n", begin(status, after));
    out.extend_from_slice(head.as_bytes());
    if with_body && status != 204 {
        out.extend_from_slice(body.as_bytes());
    }
}

/// Fields about an object that each of its answers has.
pub fn validators(object: &Object) -> String {
    let modified = match object.modified {
        0 => String::new(),
        seconds => format!("Last-Modified: {}\r\n", date::format(seconds)),
    };
    format!("ETag: {}\r\n{modified}", object.tag())
}

/// The client has it already.
pub fn not_modified(out: &mut Vec<u8>, object: &Object, after: After) {
    let head = format!("{}{}\r\n", begin(304, after), validators(object));
    out.extend_from_slice(head.as_bytes());
}

/// The head of an object, or of a range of it.
pub fn object(
    out: &mut Vec<u8>,
    object: &Object,
    kind: &str,
    range: Option<(u64, u64)>,
    after: After,
) {
    let (first, end) = range.unwrap_or((0, object.len));
    let part = match range {
        Some(_) => format!("Content-Range: bytes {first}-{}/{}\r\n", end - 1, object.len),
        None => String::new(),
    };
    let status = if range.is_some() { 206 } else { 200 };
    let head = format!(
        "{}Content-Type: {kind}\r\nContent-Length: {}\r\n{part}Accept-Ranges: bytes\r\n{}\r\n",
        begin(status, after),
        end - first,
        validators(object),
    );
    out.extend_from_slice(head.as_bytes());
}
