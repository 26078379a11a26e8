//! A connection before its hello.

use std::os::fd::OwnedFd;
use std::time::Instant;

use guest_abi::module::{FRAME_BYTES, Hello, MAGIC, VERSION, failure, kind};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use zerocopy::FromBytes;

use crate::clients::ClientId;
use crate::conn::{failure as failed, last_words, parse};
use crate::service::welcome;

const HELLO_BYTES: usize = FRAME_BYTES + size_of::<Hello>();

/// A connection whose hello has not come in whole. No byte behind the hello is read.
#[derive(Debug)]
pub(crate) struct Greeting {
    pub fd: OwnedFd,
    /// It is the guest's.
    pub of_guest: bool,
    pub since: Instant,
    bytes: [u8; HELLO_BYTES],
    len: usize,
}

/// What a hello says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It is not there in whole.
    Partial,
    /// The connection has ended.
    Gone,
    /// It wants the list of modules.
    List,
    /// It wants a module.
    Client { module: String, client: ClientId },
    /// It gets nothing: code and text.
    Refused(u32, String),
}

impl Greeting {
    pub fn new(fd: OwnedFd, of_guest: bool) -> Self {
        Self { fd, of_guest, since: Instant::now(), bytes: [0; HELLO_BYTES], len: 0 }
    }

    /// Reads on. `has` tells whether there is a module of this name.
    pub fn hear(&mut self, has: impl Fn(&str) -> bool) -> Heard {
        match rustix::net::recv(&self.fd, &mut self.bytes[self.len..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Heard::Gone,
            Ok((n, _)) => self.len += n,
            Err(Errno::AGAIN | Errno::INTR) => return Heard::Partial,
            Err(_) => return Heard::Gone,
        }
        let bad = |text: &str| Heard::Refused(failure::BAD_FRAME, text.into());
        let (head, body) = match parse(&self.bytes[..self.len]) {
            // What says that it is longer is no hello: not waited for.
            Ok(None) if self.len == HELLO_BYTES => return bad("the first frame is no hello"),
            Ok(None) => return Heard::Partial,
            Ok(Some(found)) => found,
            Err(crate::conn::Bad(text)) => return Heard::Refused(failure::BAD_FRAME, text),
        };
        let hello = Hello::read_from_bytes(body).ok().filter(|_| head.kind.get() == kind::HELLO);
        let Some(hello) = hello.filter(|hello| hello.magic.get() == MAGIC) else {
            return bad("the first frame is no hello");
        };
        understood(&hello, has)
    }
}

fn understood(hello: &Hello, has: impl Fn(&str) -> bool) -> Heard {
    let (lowest, highest) = (hello.lowest.get(), hello.highest.get());
    if !(lowest..=highest).contains(&VERSION) {
        let text = format!("versions {lowest} to {highest}, the host has {VERSION}");
        return Heard::Refused(failure::VERSION, text);
    }
    let len = hello.module.iter().position(|b| *b == 0).unwrap_or(hello.module.len());
    let name = std::str::from_utf8(&hello.module[..len]).unwrap_or("?");
    if name.is_empty() {
        return Heard::List;
    }
    if !has(name) {
        let name: String = name.chars().filter(|c| !c.is_control()).collect();
        return Heard::Refused(failure::NO_MODULE, format!("this VM has no module {name}"));
    }
    if hello.client == [0; 16] {
        return Heard::Refused(failure::BAD_FRAME, "a hello without a client's id".into());
    }
    Heard::Client { module: name.into(), client: hello.client }
}

/// Says which modules there are, to a connection that is closed then.
pub(crate) fn tell_list(fd: &OwnedFd, list: &[u8]) {
    // Less than 2 KiB, into an empty socket.
    let _ = last_words(fd, &welcome(0, 0, list));
}

/// Says why there is nothing for it, to a connection that is closed then.
pub(crate) fn refuse(fd: &OwnedFd, code: u32, text: &str) {
    let _ = last_words(fd, &failed(kind::GOODBYE, 0, code, text));
}
