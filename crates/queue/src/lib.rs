//! Guest memory and the one descriptor walker.
//!
//! # Theory of operation
//! (the owner of this crate completes this text)
//!
//! [`memory::GuestMemory`] is an immutable table of mapped regions; a change makes a new table, and
//! an `Arc` of the old one keeps it mapped while anything still uses it. [`ring::Queue`] walks
//! split and packed rings: it copies each descriptor once, checks it, translates it into
//! [`seg::Seg`]s of a preallocated [`batch::Batch`], and publishes completions in batches.
//! [`vring::Vring`] adds the doorbells, the counters and the saved position to a queue: it is what
//! device engines hold.

pub mod batch;
mod crash;
pub mod dirty;
pub mod error;
pub mod inflight;
mod mapping;
pub mod memory;
mod packed;
mod parts;
mod resubmit;
pub mod ring;
pub mod seg;
mod sigbus;
pub mod slot;
mod split;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod vring;
mod walk;

pub use batch::{Batch, Chain, ChainBuf};
pub use error::{MemoryError, RingError};
pub use memory::GuestMemory;
pub use ring::{Completion, Layout, Position, Queue, RingAddrs, RingSetup};
pub use seg::Seg;
pub use vring::Vring;
