//! Programs of a guest and modules of its host: the client's side of `guest_abi::module`, and a
//! relay that lets unmodified programs use modules that speak a protocol of bytes.
//!
//! # Theory of operation
//! [`session`] is the protocol without sockets: it gets received bytes and returns bytes to send.
//! It keeps each request until its reply, and sends it again, with the same number, on a new
//! connection. [`client`] puts it on a socket and waits; [`raw`] sends and receives single frames,
//! also wrong ones for tests of the host.
//!
//! The relay ([`serve`]) is one thread and one `epoll`. Each connection of a program is a [`link`],
//! which is a client of the module. The program's bytes become requests, as `guest_abi::stream`
//! describes; the replies' bytes go to the program in the order of the requests. While the module
//! has more bytes the relay asks for them, some pieces ahead, and reads nothing from the program.
//!
//! A connection to the host that breaks is made again, and the program notices nothing. If the
//! module was replaced meanwhile it has lost the program's state, and the program's connection
//! ends: programs that talk to caches and upstream servers are used to that.
//!
//! vsock does not report a host that is gone, so a host that is silent while a message is due is
//! asked for a sign of life, and given up after a while.
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | connections of programs | 256 ([`serve::MAX_CONNECTIONS`]), an option | memory; more wait in the kernel |
//! | requests of a program under way | 12, 1 MiB (`guest_abi::stream`) | both sides keep them |
//! | bytes for a program that reads slowly | 512 KiB and the replies under way ([`link::BACKLOG_BYTES`]) | memory |
//! | broken connection to the host | 10 s, an option, and the host's own limit | programs have timeouts, too |
//! | silence of the host | 12 s | vsock |
//!
//! One thread serves all. Each connection of a program costs one to the host and a round trip for
//! its welcome: programs should keep theirs.

pub mod address;
pub mod client;
pub mod error;
pub mod link;
pub mod log;
pub mod outbox;
pub mod poller;
pub mod raw;
pub mod serve;
pub mod session;

pub use address::{Address, Listen};
pub use client::{Client, Config};
pub use error::{Failure, RelayError, WireError};
