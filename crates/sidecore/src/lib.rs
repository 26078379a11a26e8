//! Polling threads that serve the virtqueues of all VMs.
//!
//! # Theory of operation
//! A [`Sidecore`] is one thread, pinned when the config says so, that owns a set of [`Worker`]s and
//! runs them round robin, each to completion of one batch. Nothing is shared between sidecores:
//! whoever wants to change a worker sends a closure ([`WorkerRef::call`]) that the sidecore runs
//! between two rounds; an atomic flag tells it that one is waiting, so that a busy round costs one
//! relaxed load and no lock. When no worker has had work for `spin_us`, every worker arms its kicks
//! (and says if work came meanwhile), and the thread sleeps in `epoll_wait`. Descriptors are watched
//! edge-triggered: a kick costs no `read`.
//!
//! Workers never block, but a doorbell shared with a hostile VMM may make them. A [`Watchdog`]
//! interrupts a sidecore that neither slept nor finished a round for about a second.
//!
//! # Limits
//! - A worker stays on the sidecore it was added to; moving by load comes later.
//! - A call waits for the end of the current round: at most one batch of every worker there, and
//!   one more such round for each 16 calls before it.
//! - A worker that panics, in whatever it does, is dropped: its ports are dead until they are
//!   attached anew.
//! - 64 wake-ups are taken from the kernel at once (one page of events); more take another call.
//! - A sleep arms every worker and a wake-up disarms every worker, so its cost grows with the
//!   number of workers. A switch or a vsock domain is one worker however many ports it has; a disk
//!   queue is one.

pub mod core;
mod interrupt;
mod load;
pub mod placement;
mod placer;
mod run;
mod seat;
pub mod watchdog;
pub mod worker;

pub use crate::core::{Sidecore, SidecoreConfig, SidecoreStats};
pub use placer::{Placer, PlacerStats};
pub use seat::{Group, WorkerRef, WorkerStats};
pub use watchdog::Watchdog;
pub use worker::{Arm, SidecoreError, Watcher, Worker};

#[cfg(test)]
mod tests;
