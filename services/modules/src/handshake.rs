//! Handshake: a connection before its hello.

use std::os::fd::OwnedFd;
use std::time::Instant;

use guest_abi::module::{FRAME_BYTES, Hello, MAGIC, VERSION, failure, kind};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use zerocopy::FromBytes;

use crate::clients::ClientId;
use crate::conn::{failure as failed, last_words, parse, welcome};

const HELLO_BYTES: usize = FRAME_BYTES + size_of::<Hello>();

/// Connection whose hello has not come in whole. No byte behind the hello is read.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub fd: OwnedFd,
    /// Whether it is the guest's.
    pub of_guest: bool,
    pub since: Instant,
    bytes: [u8; HELLO_BYTES],
    len: usize,
}

/// Result of reading a hello.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HelloResult {
    /// The hello is not there in whole.
    Partial,
    /// The connection has ended.
    Gone,
    /// The client wants the list of modules.
    List,
    /// The client wants a module.
    Client { module: String, client: ClientId },
    /// The client gets nothing: code and text.
    Refused(u32, String),
}

impl Handshake {
    pub fn new(fd: OwnedFd, of_guest: bool) -> Self {
        Self { fd, of_guest, since: Instant::now(), bytes: [0; HELLO_BYTES], len: 0 }
    }

    /// Reads on. `has` tells whether there is a module of this name.
    pub fn read_hello(&mut self, has: impl Fn(&str) -> bool) -> HelloResult {
        match rustix::net::recv(&self.fd, &mut self.bytes[self.len..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return HelloResult::Gone,
            Ok((n, _)) => self.len += n,
            Err(Errno::AGAIN | Errno::INTR) => return HelloResult::Partial,
            Err(_) => return HelloResult::Gone,
        }
        let bad = |text: &str| HelloResult::Refused(failure::BAD_FRAME, text.into());
        let (head, body) = match parse(&self.bytes[..self.len]) {
            // What says that it is longer is no hello: not waited for.
            Ok(None) if self.len == HELLO_BYTES => return bad("the first frame is no hello"),
            Ok(None) => return HelloResult::Partial,
            Ok(Some(found)) => found,
            Err(crate::conn::BadFrame(text)) => {
                return HelloResult::Refused(failure::BAD_FRAME, text);
            }
        };
        let hello = Hello::read_from_bytes(body).ok().filter(|_| head.kind.get() == kind::HELLO);
        let Some(hello) = hello.filter(|hello| hello.magic.get() == MAGIC) else {
            return bad("the first frame is no hello");
        };
        check(&hello, has)
    }
}

/// Checks a whole hello.
fn check(hello: &Hello, has: impl Fn(&str) -> bool) -> HelloResult {
    let (lowest, highest) = (hello.lowest.get(), hello.highest.get());
    if !(lowest..=highest).contains(&VERSION) {
        let text = format!("versions {lowest} to {highest}, the host has {VERSION}");
        return HelloResult::Refused(failure::VERSION, text);
    }
    let len = hello.module.iter().position(|b| *b == 0).unwrap_or(hello.module.len());
    let name = std::str::from_utf8(&hello.module[..len]).unwrap_or("?");
    if name.is_empty() {
        return HelloResult::List;
    }
    if !has(name) {
        let name: String = name.chars().filter(|c| !c.is_control()).collect();
        return HelloResult::Refused(failure::NO_MODULE, format!("this VM has no module {name}"));
    }
    if hello.client == [0; 16] {
        return HelloResult::Refused(failure::BAD_FRAME, "a hello without a client's id".into());
    }
    HelloResult::Client { module: name.into(), client: hello.client }
}

/// Sends the list of modules to a connection that is closed then.
pub(crate) fn send_list(fd: &OwnedFd, list: &[u8]) {
    // Less than 2 KiB, into an empty socket.
    let _ = last_words(fd, &welcome(0, 0, list));
}

/// Sends the reason of a refusal to a connection that is closed then.
pub(crate) fn refuse(fd: &OwnedFd, code: u32, text: &str) {
    let _ = last_words(fd, &failed(kind::GOODBYE, 0, code, text));
}
