//! Programs of a guest and modules of the host.
//!
//! # Frames
//! A program connects to port [`PORT`] of the host (vsock), or to a Unix socket that stands for it.
//! Both sides send [`Frame`]s, each with a body behind it. Everything is little-endian. A frame's
//! `check` is XXH3-64 of the body, with the frame's first 16 bytes as seed ([`Frame::seed`]); a
//! frame that is wrong in any way ends the connection, after a [`kind::GOODBYE`] that says why.
//!
//! | client says | host answers | |
//! | --- | --- | --- |
//! | [`Hello`] | [`Welcome`] with its [`ModuleInfo`]s | once, first; `seq` is 0 |
//! | [`kind::REQUEST`] | [`kind::REPLY`] with the same `seq` | what the bodies are is the module's affair |
//! | [`kind::CANCEL`] | (the reply of that `seq`) | wait no longer for what the request waits for |
//! | [`kind::PING`] | [`kind::PONG`] | the body, at most [`MAX_PING_BYTES`], comes back |
//! | [`kind::RING`] | [`kind::RING`] | all that follows goes by memory that both share: [`crate::module_ring`] |
//! | [`kind::GOODBYE`] | | the client ends for good: its state in the module ends at once |
//!
//! # Sequence numbers
//! A client numbers its requests 1, 2, 3, …, sends them in that order, and has at most
//! [`Welcome::max_in_flight`] of them unanswered. So a request tells the host that the client has
//! all replies up to `seq - max_in_flight`, and the host keeps no more than so many. Replies come
//! in any order.
//!
//! # A broken connection
//! A client has an id, random and its own secret. When its connection breaks it connects again,
//! says [`Hello`] with the same id within [`Welcome::linger_ms`], and sends all requests again to
//! which it has no reply: the same bytes, the same numbers, in order, with [`flag::AGAIN`]. The
//! host executes none twice: it answers with the reply that it kept, or with the one that is still
//! to come. Requests with [`flag::REPEATABLE`] change nothing: their replies are not kept, they are
//! executed again. Of the others' replies the host keeps [`KEPT_BYTES`] at most, and when its
//! memory for all clients is used up only some 16 KiB of each; a request whose reply is not kept
//! any more is answered with [`failure::OUT_OF_ORDER`]. A goodbye with [`failure::ENDING`] or
//! [`failure::RING`] says: connect again, and send again; [`failure::RING_ONLY`] says so to those
//! who can have a ring. Any other is the end. [`Welcome::max_in_flight`] is the same in all
//! welcomes of a client.
//!
//! When the guest itself ends or begins anew, nothing of its clients is kept: there is nobody to
//! connect again.
//!
//! A host that ends before its welcome says nothing: the client connects again.
//!
//! [`Welcome::instance`] changes when the module lost its memory: it was replaced, or the host's
//! process ended. What a module had promised to keep (commits) it still has, and it knows the
//! requests that made them, so these may be sent again, too; all else (open transactions) is gone,
//! and requests that build on it are answered with an error.
//!
//! # Errors
//! A reply with [`flag::FAILED`] comes from the host and not from the module; its body is a
//! [`Failure`] with a text behind it. Errors of a module are in its own replies.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The host's vsock port for modules. Any program of the guest may connect.
pub const PORT: u32 = 28_019;

/// First bytes of [`Hello`] and [`Welcome`]: `MLRCMODU`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MLRCMODU");

/// The version of this file.
pub const VERSION: u16 = 1;

/// Longest body: the longest row of a table, with its keys. MariaDB's own limit for a statement is
/// 16 MiB by default.
pub const MAX_BODY_BYTES: u32 = 16 << 20;

/// Longest body of a ping.
pub const MAX_PING_BYTES: usize = 64;

/// Longest text of a [`Failure`] or a goodbye.
pub const MAX_TEXT_BYTES: usize = 512;

/// Most requests of a client without a reply.
pub const MAX_IN_FLIGHT: u32 = 64;

/// Bytes of replies that are kept for a client, should its connection break.
pub const KEPT_BYTES: usize = 1 << 20;

/// Longest name of a module: lower case letters, digits, `-`, `_`.
pub const MAX_NAME_BYTES: usize = 32;

/// Most modules of a VM.
pub const MAX_MODULES: usize = 16;

/// Kinds of frames.
pub mod kind {
    /// [`super::Hello`], client to host, the first frame.
    pub const HELLO: u16 = 1;
    /// [`super::Welcome`] and [`super::ModuleInfo`]s, its answer.
    pub const WELCOME: u16 = 2;
    /// Request to the module.
    pub const REQUEST: u16 = 3;
    /// Reply to a request.
    pub const REPLY: u16 = 4;
    /// Cancel of the request with that `seq`; no body.
    pub const CANCEL: u16 = 5;
    /// The sender ends the connection. From the host: [`super::Failure`] and a text; from a client:
    /// no body.
    pub const GOODBYE: u16 = 6;
    /// At most [`super::MAX_PING_BYTES`].
    pub const PING: u16 = 7;
    /// The same body.
    pub const PONG: u16 = 8;
    /// [`crate::module_ring::RingWanted`] and its answer, [`crate::module_ring::RingGranted`].
    pub const RING: u16 = 9;
}

/// Flags of frames.
pub mod flag {
    /// Request that changes nothing, and may be executed again.
    pub const REPEATABLE: u16 = 1;
    /// Request that may have been sent before, on a connection that broke.
    pub const AGAIN: u16 = 2;
    /// Reply whose body is a [`super::Failure`].
    pub const FAILED: u16 = 4;
}

/// Header in front of each body.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Frame {
    /// Bytes of the body, at most [`MAX_BODY_BYTES`].
    pub len_bytes: U32,
    /// [`kind`].
    pub kind: U16,
    /// [`flag`]s.
    pub flags: U16,
    /// Number of the request.
    pub seq: U64,
    /// XXH3-64 of the body with [`Frame::seed`].
    pub check: U64,
}

/// Bytes of a [`Frame`].
pub const FRAME_BYTES: usize = size_of::<Frame>();

impl Frame {
    /// A frame, still without its `check`.
    pub fn new(kind: u16, flags: u16, seq: u64, len_bytes: usize) -> Self {
        Self {
            len_bytes: U32::new(len_bytes as u32),
            kind: U16::new(kind),
            flags: U16::new(flags),
            seq: U64::new(seq),
            check: U64::ZERO,
        }
    }

    /// Seed of the body's hash: the first eight bytes as a number, exclusive-or the sequence number
    /// times an odd constant, so that length, kind, flags and number are covered as well.
    pub fn seed(&self) -> u64 {
        let first = u64::from(self.len_bytes.get())
            | u64::from(self.kind.get()) << 32
            | u64::from(self.flags.get()) << 48;
        first ^ self.seq.get().wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

/// The client begins.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: U64,
    /// Oldest version it speaks.
    pub lowest: U16,
    /// Newest version it speaks.
    pub highest: U16,
    /// Zero.
    pub reserved: U32,
    /// Random, the same each time this client connects; not zero.
    pub client: [u8; 16],
    /// Name of the module that its requests are for, filled up with zeroes. Empty: it wants the
    /// list only.
    pub module: [u8; MAX_NAME_BYTES],
}

/// The host agrees. [`Welcome::modules`] times [`ModuleInfo`] follow: what this VM may use.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: U64,
    /// The version of all that follows.
    pub version: U16,
    /// Number of [`ModuleInfo`]s that follow.
    pub modules: U16,
    /// Most requests without a reply.
    pub max_in_flight: U32,
    /// Longest body.
    pub max_body_bytes: U32,
    /// Time for which the client's state outlives its connection.
    pub linger_ms: U32,
    /// Id of the module's life; 0 when no module was asked for.
    pub instance: U64,
    /// The highest `seq` of this client that the host has got; 0: it does not know the client.
    pub known_seq: U64,
}

/// A module that the VM may use.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ModuleInfo {
    /// Filled up with zeroes.
    pub name: [u8; MAX_NAME_BYTES],
    /// SHA-256 of the WebAssembly file.
    pub hash: [u8; 32],
}

/// Why a request, or a connection, failed in the host.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Failure {
    /// [`failure`].
    pub code: U32,
    /// Zero.
    pub reserved: U32,
}

/// Codes of [`Failure`]s.
pub mod failure {
    /// A frame is not as this page says.
    pub const BAD_FRAME: u32 = 1;
    /// No version in common.
    pub const VERSION: u32 = 2;
    /// The VM has no such module.
    pub const NO_MODULE: u32 = 3;
    /// Too many clients, connections, or bytes in flight. Of a reply: the request was executed, and
    /// what the module answered found no room. Only replies of more than 256 bytes are refused so.
    pub const LIMIT: u32 = 4;
    /// The module was stopped by its deadline or its limit of memory, or trapped, while it had this
    /// request. It was replaced.
    pub const STOPPED: u32 = 5;
    /// The module cannot be started; the text says why. It is tried again, ever more rarely, at
    /// least once a minute.
    pub const BROKEN: u32 = 6;
    /// The same client connected once more.
    pub const REPLACED: u32 = 7;
    /// The host's storage failed: what the request wrote may be durable or not.
    pub const STORAGE: u32 = 8;
    /// The service ends, or is replaced by another. Connect again.
    pub const ENDING: u32 = 9;
    /// The request is one whose reply the host does not keep any more, or which it cannot have.
    pub const OUT_OF_ORDER: u32 = 10;
    /// No ring is there for this client. Of a goodbye: what came by its ring is damaged, maybe by
    /// another program; connect again, without one.
    pub const RING: u32 = 11;
    /// Requests are taken by rings alone, and this one came by a socket. A client that can have a
    /// ring connects again, asks for one, also after [`RING`], and sends again.
    pub const RING_ONLY: u32 = 12;
}

#[cfg(test)]
mod tests;
