//! A key-value cache that speaks memcached's text protocol.
//!
//! # Theory of operation
//! Each client is a stream (`sdk::stream`): a connection of a program that the guest's relay passes
//! on, or one that speaks `guest_abi::stream` itself. [`executor`] cuts it into commands
//! ([`command`]) and executes them on one [`cache`], which all clients of the VM share. Nothing is
//! stored: a module that is replaced begins empty, as memcached does.
//!
//! The memory that values may have is bounded. What goes when it is full is decided by S3-FIFO: a
//! small queue for what is new, a main queue for what was asked for again, and the hashes of what
//! left the small one lately. Most keys of a cache are asked for once; those leave early and do not
//! displace others, where LRU and CLOCK give each a way through the whole cache. A hit costs a
//! counter and moves nothing, and there is nothing to tune.
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | memory of items | 64 MiB, or the file `memory-mib` says | the instance's own limit has to be a third higher, and 32 MiB |
//! | key | 250 bytes, no space, no control character | memcached's |
//! | value | 1 MiB | memcached's default |
//! | line | 64 KiB | `get` of some hundred keys |
//! | bytes of clients that wait for more, or are not taken | 32 MiB together | memory |
//! | clients | 4,096 | memory |
//!
//! Unlike memcached: expiry as a date (more than 30 days, which means seconds since 1970) is
//! refused, as a module has no calendar; a data block that is not as long as was said, a line that
//! is too long and a length that is none end the connection after the error, as what follows would
//! be taken for commands; the meta commands, the binary protocol, SASL and UDP are not there.

#![cfg_attr(target_arch = "wasm32", no_std)]

extern crate alloc;

pub mod cache;
pub mod command;
pub mod executor;
mod list;

use alloc::vec;

use guest_abi::module_call::log;
use sdk::stream::{Limits, Streams};
use sdk::{Errno, Events, Host, Module};

use crate::cache::Cache;
use crate::command::{MAX_LINE_BYTES, MAX_VALUE_BYTES};
use crate::executor::{Executor, Shared};

/// Memory of items without such a file, in MiB.
const MEMORY_MIB: u64 = 64;
/// Name of the file that sets the memory of items, in MiB.
const MEMORY_FILE: &str = "memory-mib";

/// Limits of what is kept for clients.
const LIMITS: Limits = Limits {
    unused_bytes: MAX_LINE_BYTES + MAX_VALUE_BYTES + 2,
    all_bytes: 32 << 20,
    clients: 4096,
};

/// Module `kv`.
#[derive(Debug)]
pub struct Kv {
    shared: Shared,
    streams: Streams<Executor>,
}

impl Module for Kv {
    fn start(host: &mut dyn Host) -> Result<Self, Errno> {
        let mut secret = [0; 16];
        host.random(&mut secret)?;
        let memory_mib = memory_mib(host)?;
        let memory_bytes = usize::try_from(memory_mib << 20).map_err(|_| Errno::INVAL)?;
        let shared = Shared::new(Cache::new(memory_bytes, secret), host.now_ms());
        Ok(Self { shared, streams: Streams::new(LIMITS) })
    }

    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno> {
        self.shared.set_now_ms(host.now_ms());
        for event in events {
            self.streams.take(&mut self.shared, host, event);
            self.shared.clients = self.streams.len();
        }
        Ok(())
    }
}

/// Reads the memory of items from its file. A file without a number is logged.
fn memory_mib(host: &mut dyn Host) -> Result<u64, Errno> {
    let file = match host.open(MEMORY_FILE, 0) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(MEMORY_MIB),
        Err(errno) => return Err(errno),
    };
    let mut bytes = vec![0; 16];
    let len = host.read(file, 0, &mut bytes)?;
    host.close(file);
    let text = core::str::from_utf8(&bytes[..len]).unwrap_or_default().trim();
    let number = text.parse().ok().filter(|n| (1..=2048).contains(n));
    Ok(number.unwrap_or_else(|| {
        host.log(log::WARN, "memory-mib: a number from 1 to 2048 is wanted; 64 is used");
        MEMORY_MIB
    }))
}

sdk::export!(Kv);

#[cfg(test)]
mod tests;
