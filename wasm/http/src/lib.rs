//! Static files over para-virtual HTTP.
//!
//! # Theory of operation
//! A web server in the guest hands a location over: `proxy_pass` to the relay's Unix socket. Each
//! of its connections is a stream (`sdk::stream`), in which [`executor`] finds HTTP/1.1 requests
//! ([`head`]) and answers them from the [`site`]: an index from paths to objects, and a file for
//! each object. [`condition`] decides on ranges and validators.
//!
//! *Publishing.* A stream that begins with the line `millrace-publish/1` may also `PUT` and
//! `DELETE`. No HTTP request can begin so (there is no such method, and the line names no version),
//! thus nothing that a web server passes on from its clients ever publishes. Whoever may publish
//! gets a relay of its own: `millrace-relay --module http --listen unix:/run/publish.sock --mode
//! 0600 --first-line millrace-publish/1`, and then `curl --unix-socket /run/publish.sock -T
//! page.html http://site/page.html`. An object is there when the answer says so: whole, durable,
//! under the new name only.
//!
//! *What is said of an object.* Its type is that of the path's extension. Its `ETag` is a hash of
//! its bytes (XXH3-128), so publishing the same again changes nothing for clients. A module has no
//! calendar: there is no `Date`, which a web server adds, and `Last-Modified` is what the `PUT`
//! said, if anything.
//!
//! *Paths.* `%` escapes are resolved once. A path with an empty segment, `.` or `..`, an escaped
//! slash, a backslash or a control character is refused, not mended. One that ends in `/` is its
//! `index.html`. Queries are ignored.
//!
//! *Smuggling.* What two parsers could read differently is refused: line ends other than CRLF,
//! folded lines, space before a colon, more than one length or host, a length with a transfer
//! coding. After a refusal, and after an answer to a request whose body was not read, the
//! connection ends.
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | head of a request | 16 KiB, 64 fields ([`head::MAX_HEAD_BYTES`]) | 431 |
//! | path | 1 KiB ([`path::MAX_PATH_BYTES`]) | 414 |
//! | paths | 65,536 ([`site::MAX_PATHS`]) | 507; the index is in memory |
//! | object | 16 GiB ([`executor::MAX_OBJECT_BYTES`]), the VM's folder | 413, 507 |
//! | objects being written | 32 ([`site::MAX_UPLOADS`]) | 503; open files |
//! | objects being read | 192 ([`site::MAX_OPEN`]) different ones | 503; open files |
//! | bytes of clients that wait | 32 MiB together | memory |
//! | clients | 4,096 | memory |
//!
//! Bodies need a `Content-Length`; `chunked` is answered with 411. Several ranges in a request are
//! answered with the whole object. Nothing is compressed, there are no lists of folders, no
//! redirects to a folder's slash.

#![cfg_attr(target_arch = "wasm32", no_std)]

extern crate alloc;

pub mod answer;
pub mod condition;
pub mod date;
pub mod executor;
pub mod head;
pub mod index;
pub mod path;
pub mod site;
mod types;

use sdk::stream::{Limits, Streams};
use sdk::{Errno, Events, Host, Module};

use crate::executor::Executor;
use crate::head::MAX_HEAD_BYTES;
use crate::site::Site;

/// Limits of what is kept for clients.
const LIMITS: Limits = Limits { unused_bytes: MAX_HEAD_BYTES, all_bytes: 32 << 20, clients: 4096 };

/// The module.
#[derive(Debug)]
pub struct Http {
    site: Site,
    streams: Streams<Executor>,
}

impl Module for Http {
    fn start(host: &mut dyn Host) -> Result<Self, Errno> {
        Ok(Self { site: Site::open(host)?, streams: Streams::new(LIMITS) })
    }

    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno> {
        events.for_each(|event| self.streams.take(&mut self.site, host, event));
        Ok(())
    }
}

sdk::export!(Http);

#[cfg(test)]
mod tests;
