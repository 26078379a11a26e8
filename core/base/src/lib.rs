//! Ground of all crates: time, randomness, I/O seams, descriptors, locks, counters, limits.
//!
//! # Theory of operation
//! The data path never asks the operating system for the time, for randomness, for a disk or for
//! a wire by itself: it is handed a [`clock::Clock`], a [`random::Random`], a [`io::Disk`] or a
//! [`io::Wire`]. The product hands in the real ones; the simulator hands in its own and can replay
//! a run from a seed. Counters ([`counter`]) are plain shared memory: one thread writes, everybody
//! reads, nobody waits. Limits that more than one crate needs are in [`limits`], each with its
//! reason. Answers of [`numa`] about nodes are hints: "unknown" is always a valid one.

#[cfg(any(test, feature = "testing"))]
pub mod alloc_count;
pub mod clock;
pub mod counter;
pub mod cpu;
pub mod doorbell;
pub mod durable;
pub mod event;
pub mod folder;
pub mod histogram;
pub mod io;
pub mod limits;
pub mod log_limit;
pub mod notify;
pub mod numa;
pub mod packet;
pub mod panic;
pub mod peer_fd;
pub mod random;
pub mod reject_log;
pub mod shm;
pub mod socket;
pub mod sync;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
pub mod testing;
pub mod trim;
pub mod wire_queue;
