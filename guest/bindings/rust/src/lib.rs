//! Pipes for programs in a guest: the host moves bytes between files and TCP connections, and they
//! do not pass through the virtual machine.
//!
//! # Theory of operation
//! A call hands both descriptors to the guest's agent over its Unix socket; having them is the
//! permission, and the agent looks at them itself. The answer comes when the pipe is over. There is
//! no C in this crate: it speaks [`guest_abi::program`] as `libmillrace` does, and
//! `millrace_pipe(3)` tells more of what a pipe is.
//!
//! | source | sink | like |
//! | --- | --- | --- |
//! | file | socket | `sendfile(2)`; ends when the peer has acknowledged the bytes |
//! | socket | file | `recv(2)` and `pwrite(2)`; the bytes are in the file, not yet durable |
//! | file | file | `copy_file_range(2)` |
//! | socket | socket | what a proxy does |
//!
//! A count of bytes may be short; so a program calls again for the rest. Nothing moves bytes but
//! the host: an [`Error`] says with [`Error::may_fall_back`] whether the program may move them
//! itself.
//!
//! ```no_run
//! use std::fs::File;
//! use std::io::{self, Seek, SeekFrom, Write};
//! use std::net::TcpStream;
//!
//! fn send(file: &mut File, client: &mut TcpStream, len_bytes: u64) -> io::Result<()> {
//!     let mut left = len_bytes;
//!     while left > 0 {
//!         match millrace_guest::pipe(&*client, &*file, left, &Default::default()) {
//!             Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
//!             Ok(moved) => left -= moved,
//!             Err(error) if error.may_fall_back() => {
//!                 io::copy(&mut io::Read::take(&*file, left), client)?;
//!                 return Ok(());
//!             }
//!             Err(error) => return Err(error.into()),
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # Limits
//! - 16 connections to the agent are kept for later calls ([`MAX_KEPT`]), by the whole process; a
//!   child makes its own.
//! - A signal does not end a call, unlike in the C library: programs in Rust expect no `EINTR`. A
//!   timeout does, and so does dropping a [`Pipe`].
//! - `MILLRACE_AGENT_SOCKET` names another socket of an agent, for tests; a program that runs with
//!   another user's rights does not heed it.

mod connection;
mod error;
mod pipe;

pub use connection::MAX_KEPT;
pub use error::Error;
pub use guest_abi::Reason;
pub use pipe::{Offer, Options, Pipe, pipe, query};
