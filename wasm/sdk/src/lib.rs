//! Kit for WebAssembly modules: the host's calls, the events, the exports.
//!
//! # Theory of operation
//! A module implements [`Module`] and says [`export!`]. All that it wants of the outside goes
//! through [`Host`], so the same code runs natively in tests, against files that lose what was not
//! synced. `guest_abi::module_call` is the specification of both sides.
//!
//! # Limits
//! - One thread. What takes long is done in pieces ([`Host::wake_after`]).
//! - No panic comes back: it traps, and the host replaces the instance.

#![cfg_attr(target_arch = "wasm32", no_std)]

extern crate alloc;

mod errno;
mod events;
pub mod stream;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;
#[doc(hidden)]
#[cfg(target_arch = "wasm32")]
pub mod wasm;

use alloc::string::String;
use alloc::vec::Vec;

pub use errno::Errno;
pub use events::{Event, Events};
pub use guest_abi::module_call::{open, reply};

/// An open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct File(pub i32);

/// Host of a module: all that the module can do to the outside. The names are those of the imports.
pub trait Host {
    /// Answers a request, once. [`reply`] has the flags.
    fn reply(&mut self, client: u32, seq: u64, flags: u32, body: &[u8]) -> Result<(), Errno>;
    /// Opens a file of the module's folder. [`open`] has the flags.
    fn open(&mut self, name: &str, flags: u32) -> Result<File, Errno>;
    /// Closes it.
    fn close(&mut self, file: File);
    /// Length of a file in bytes.
    fn len(&mut self, file: File) -> Result<u64, Errno>;
    /// Reads up to `into.len()` bytes; fewer only at the end.
    fn read(&mut self, file: File, at: u64, into: &mut [u8]) -> Result<usize, Errno>;
    /// Writes all of it.
    fn write(&mut self, file: File, at: u64, bytes: &[u8]) -> Result<(), Errno>;
    /// Writes all of it at the end, or nothing; says where.
    fn append(&mut self, file: File, bytes: &[u8]) -> Result<u64, Errno>;
    /// Makes it durable, and that it is there.
    fn sync(&mut self, file: File) -> Result<(), Errno>;
    /// Cuts it, or lengthens it with zeroes.
    fn truncate(&mut self, file: File, len_bytes: u64) -> Result<(), Errno>;
    /// Gives a file another's name, durably.
    fn rename(&mut self, from: &str, to: &str) -> Result<(), Errno>;
    /// Removes a file.
    fn remove(&mut self, name: &str) -> Result<(), Errno>;
    /// The names of all files, sorted.
    fn list(&mut self) -> Result<Vec<String>, Errno>;
    /// A monotonic clock.
    fn now_ms(&mut self) -> u64;
    /// Random bytes.
    fn random(&mut self, into: &mut [u8]) -> Result<(), Errno>;
    /// Asks to be served by then; the soonest counts.
    fn wake_after(&mut self, ms: u32);
    /// Tells the daemon's log. `guest_abi::module_call::log` has the levels.
    fn log(&mut self, level: u32, text: &str);
}

/// A module.
pub trait Module: Sized {
    /// Opens its files and whatever it needs. An error: it cannot serve.
    fn start(host: &mut dyn Host) -> Result<Self, Errno>;
    /// Takes events. An error: its memory is not to be trusted any more.
    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno>;
}

/// Makes a type that is a [`Module`] the module of this crate.
#[macro_export]
macro_rules! export {
    ($type:ty) => {
        #[cfg(target_arch = "wasm32")]
        mod millrace_exports {
            use super::*;

            static INSTANCE: $crate::wasm::Instance<$type> = $crate::wasm::Instance::new();

            #[unsafe(no_mangle)]
            extern "C" fn millrace_abi() -> i32 {
                $crate::wasm::ABI
            }

            #[unsafe(no_mangle)]
            extern "C" fn millrace_start() -> i32 {
                INSTANCE.start()
            }

            #[unsafe(no_mangle)]
            extern "C" fn millrace_buffer(len: i32) -> i32 {
                INSTANCE.buffer(len)
            }

            #[unsafe(no_mangle)]
            extern "C" fn millrace_serve(len: i32) -> i32 {
                INSTANCE.serve(len)
            }
        }
    };
}
