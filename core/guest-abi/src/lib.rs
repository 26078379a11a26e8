//! Formats of messages on a wire and of memory that is shared with a guest.
//!
//! # Theory of operation
//! Every structure is little-endian, has no padding, and is read by copying it out of the bytes
//! that came ([`zerocopy`]): any bytes make a value, and its receiver checks it. Every conversation
//! begins with a hello that names a magic number and the versions that its sender speaks; the
//! answer names the one that is used. A change of any structure here is a new version.
//!
//! - [`channel`]: members of a channel and their host, in memory that they share.
//! - [`channel_net`]: the network parts of two members' kernel modules.
//! - [`frame`]: messages on a byte stream.
//! - [`module`]: programs of a guest and modules of the host; [`module_ring`]: memory that they
//!   share; [`table`]: the table store's requests.
//! - [`module_call`]: a WebAssembly module and the process that runs it; [`stream`]: modules that
//!   speak a protocol of bytes.
//! - [`pipe`]: the guest's agent and the daemon, over vsock.
//! - [`program`]: a program of the guest and its agent, over a Unix socket.
//! - [`reason`]: reasons why bytes were not piped, or not all of them; the same numbers everywhere.
//!
//! # Limits
//! - A message has at most 64 KiB ([`frame::MAX_BODY_BYTES`]): what one side keeps of the other's
//!   before it knows what it is. One to a module has at most 16 MiB ([`module::MAX_BODY_BYTES`]).
//! - A pipe has at most 2,048 extents ([`pipe::MAX_EXTENTS`]): both ends of it in one message. A
//!   file in more pieces is piped in parts.
//! - A trust domain has at most 32 members with channels ([`channel::MAX_MEMBERS`]).

#![cfg_attr(not(test), no_std)]

pub mod channel;
pub mod channel_net;
pub mod frame;
pub mod module;
pub mod module_call;
pub mod module_ring;
pub mod pipe;
pub mod program;
pub mod reason;
pub mod stream;
pub mod table;

pub use reason::Reason;
