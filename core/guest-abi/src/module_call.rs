//! Interface between a WebAssembly module and the process that runs it.
//!
//! # What a module exports
//! | name | type | |
//! | --- | --- | --- |
//! | `memory` | | its memory |
//! | `millrace_abi` | `() -> i32` | [`VERSION`] |
//! | `millrace_start` | `() -> i32` | called once: opens its files. 0, or a negative errno: it cannot serve |
//! | `millrace_buffer` | `(len: i32) -> i32` | where the host may put `len` bytes of events; 0: no room |
//! | `millrace_serve` | `(len: i32) -> i32` | takes the events in that buffer. 0, or a negative errno: its memory is not to be trusted any more, replace it |
//!
//! One thread calls these, one after the other. A call that computes for longer than the module's
//! deadline (CPU time), that traps or that exceeds the limit of memory ends the instance; a new one
//! is started. A module that has much to do does some of it and asks to be woken.
//!
//! # Events
//! The buffer holds [`Event`]s, each with its body, filled up to [`ALIGN`]. They are what came
//! since the last call, in order. The module answers requests with the import `reply`, in any
//! order, now or in a later call.
//!
//! # What a module may import, all from `millrace`
//! Pointers are offsets in the module's memory. Whatever can fail returns a negative errno of
//! Linux.
//!
//! | name | type | |
//! | --- | --- | --- |
//! | `reply` | `(client: i32, seq: i64, flags: i32, ptr: i32, len: i32) -> i32` | answers a request once; [`reply`] |
//! | `file_open` | `(name: i32, len: i32, flags: i32) -> i32` | a handle; [`open`] |
//! | `file_close` | `(handle: i32) -> i32` | |
//! | `file_len` | `(handle: i32) -> i64` | |
//! | `file_read` | `(handle: i32, at: i64, ptr: i32, len: i32) -> i32` | bytes read, fewer only at the end |
//! | `file_write` | `(handle: i32, at: i64, ptr: i32, len: i32) -> i32` | 0: all of it |
//! | `file_append` | `(handle: i32, ptr: i32, len: i32) -> i64` | where it was put: all of it, or none |
//! | `file_sync` | `(handle: i32) -> i32` | what was written is durable, and that the file is there |
//! | `file_truncate` | `(handle: i32, len: i64) -> i32` | |
//! | `file_rename` | `(from: i32, from_len: i32, to: i32, to_len: i32) -> i32` | replaces `to`; durable when it returns |
//! | `file_remove` | `(name: i32, len: i32) -> i32` | |
//! | `file_list` | `(ptr: i32, len: i32) -> i32` | names, each ended by a zero byte, sorted; the bytes needed, written only if they fit |
//! | `clock_ms` | `() -> i64` | monotonic |
//! | `random` | `(ptr: i32, len: i32) -> i32` | |
//! | `wake_after` | `(ms: i32) -> i32` | `millrace_serve` is called again by then, with [`event::WAKE`] if nothing else came; the soonest counts |
//! | `log` | `(level: i32, ptr: i32, len: i32) -> i32` | [`log`] |
//!
//! What an earlier life of the module wrote may not be durable: a file that was there when it was
//! opened is synced with the others before the next [`reply::DURABLE`] leaves. `file_remove` is
//! durable with the next sync of any file; a handle of a file that was removed stays good, and its
//! bytes count until it is closed. After a sync that failed every other one fails, and the module
//! is started anew once its files are written anew.
//!
//! Names of files are 1 to [`MAX_FILE_NAME_BYTES`] of `a-z 0-9 . _ -`, not beginning with a dot, in
//! a folder that this VM and this module have for themselves.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of this interface.
pub const VERSION: u32 = 1;

/// Name of the imports' module.
pub const IMPORTS: &str = "millrace";

/// Alignment of events, in bytes.
pub const ALIGN: usize = 8;

/// Longest name of a file.
pub const MAX_FILE_NAME_BYTES: usize = 64;

/// Most open files of an instance.
pub const MAX_FILES: usize = 256;

/// Most files in the folder of a module: a listing of them stays short. One more is refused with
/// `ENOSPC`.
pub const MAX_FOLDER_FILES: usize = 4096;

/// Longest line of `log`; more is cut.
pub const MAX_LOG_BYTES: usize = 512;

/// Kinds of events.
pub mod event {
    /// A client is there; the body is its id, 16 bytes.
    pub const OPENED: u16 = 1;
    /// A client's request.
    pub const REQUEST: u16 = 2;
    /// A client gives up waiting for the request `seq`: it is still to be answered, soon.
    pub const CANCEL: u16 = 3;
    /// A client has gone for good; requests of it need no reply. Its number is used again.
    pub const CLOSED: u16 = 4;
    /// Wake-up that `wake_after` asked for.
    pub const WAKE: u16 = 5;
    /// The process is about to end: finish what is half done, soon.
    pub const ENDING: u16 = 6;
}

/// Flags of [`Event`]s.
pub mod event_flag {
    /// The request may have reached an earlier life of the module ([`crate::module::flag::AGAIN`]).
    pub const AGAIN: u16 = 1;
    /// The client says that it changes nothing ([`crate::module::flag::REPEATABLE`]).
    pub const REPEATABLE: u16 = 2;
}

/// Header in front of each event's body.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Event {
    /// Bytes of the body, without what fills it up.
    pub len_bytes: U32,
    /// [`event`].
    pub kind: U16,
    /// [`event_flag`]s.
    pub flags: U16,
    /// The host's number for the client, from 0 on.
    pub client: U32,
    /// Zero.
    pub reserved: U32,
    /// The request's number.
    pub seq: U64,
}

/// Bytes of an [`Event`].
pub const EVENT_BYTES: usize = size_of::<Event>();

/// Flags of `reply`.
pub mod reply {
    /// The client gets it only once all that was appended and written before is durable.
    pub const DURABLE: u32 = 1;
}

/// Flags of `file_open`.
pub mod open {
    /// Make it if it is not there.
    pub const CREATE: u32 = 1;
    /// Make it empty.
    pub const TRUNCATE: u32 = 2;
}

/// Levels of `log`.
pub mod log {
    /// An error: something is broken.
    pub const ERROR: u32 = 1;
    /// A warning: something is odd.
    pub const WARN: u32 = 2;
    /// An event: something happened.
    pub const INFO: u32 = 3;
    /// Detail for those who look for a fault.
    pub const DEBUG: u32 = 4;
}
