//! Polling threads that serve the virtqueues of all VMs.
//!
//! # Theory of operation
//! A [`Sidecore`] is one thread, pinned when the config says so, that owns a set of [`Worker`]s and
//! runs them round robin, each to completion of one batch. Nothing is shared between sidecores: a
//! thread that wants to change a worker sends a closure ([`WorkerRef::call`]) that the sidecore
//! runs between two rounds; an atomic flag tells it that one is waiting, so that a busy round costs
//! one relaxed load and no lock. When no worker has had work for a while ([`Spin`] adapts it, up to
//! `spin_us`), every worker arms its kicks (and says if work came meanwhile), and the thread sleeps
//! in `epoll_wait`. Descriptors are watched edge-triggered: a kick costs no `read`.
//!
//! A worker may move to another sidecore between two rounds, alone or with its [`Group`]; handles
//! follow it, and its descriptors are watched by both for a moment, so that no kick is lost. Every
//! 32nd round or so the time of each worker is measured. The [`Placer`] decides by that: it moves
//! workers from busy to less busy sidecores, and lets as many be active as the load needs
//! ([`placement`] has the rules). A parked one has no workers and sleeps.
//!
//! On machines with several NUMA nodes a worker is best on the node of the memory that it works on
//! ([`WorkerRef::works_on`]). The placer asks for the node of each unit every 10 s, and every
//! second while it is unknown. New workers begin there where they can ([`Sidecore::for_memory`]),
//! and their memory is taken from there ([`Sidecore::prefer_node`]). A unit with the memory of many
//! VMs, such as a switch, belongs to the node of two thirds of it, or to none.
//!
//! Each sidecore has a [`Ledger`] that says which VM's work is done next when there is more than
//! fits: see [`credit`]. A round begins with another worker each time, and a round after which a VM
//! that was held back may go on counts as busy.
//!
//! Workers never block, but a doorbell shared with a hostile VMM may make them block. A
//! [`Watchdog`] interrupts a sidecore that neither slept nor finished a round for about a second.
//!
//! Three files know each other: `core` (the handle), `run` (the thread) and `seat` (the places of
//! workers on it). Everything else stands above them or below.
//!
//! # Limits
//! - A worker is the smallest unit that moves. A switch or a vsock domain is one worker however
//!   many ports it has: all of them move, and none of them gets more than one sidecore. A disk
//!   queue is one; all queues of a disk with stages are a group, since they share the stages.
//! - A call waits for the end of the current round: at most one batch of every worker there, and
//!   one more such round for each 16 calls before it. A move waits for two sidecores; its worker is
//!   not polled meanwhile.
//! - Each watched descriptor may count one kick too many, or too few, when its worker moves: the
//!   new watch fires when the descriptor was ever rung, and an event of the old one has no owner.
//! - Requests of a disk that are in flight while its queue moves complete on the old thread, which
//!   is the one that the kernel runs their last step on: a timer tick later at most. So sidecores
//!   are parked, never ended, while the daemon runs.
//! - Load is time spent in rounds that did something. A sidecore that is given single packets shows
//!   a high load that batches would lower; it is relieved all the same.
//! - A worker that panics, in whatever it does, is dropped, and its name told
//!   ([`SidecoreConfig::panicked`]): its maker has to make it anew.
//! - 64 wake-ups are taken from the kernel at once (one page of events); more take another call.
//! - A sleep arms every worker and a wake-up disarms every worker, so its cost grows with the
//!   number of workers.
//! - Shares hold per resource: of each sidecore's bytes, and of each device. Over sidecores they
//!   hold up to the sixteenth of its share that a VM keeps everywhere, whatever it does elsewhere.
//! - A VM's floor is not checked against what the host can do, nor against the others' floors.
//! - Memory that was made for a worker (rings of its own, slabs, buffers) does not follow when it
//!   moves to another node, and memory that the allocator reuses stays where it is. Guests' memory
//!   is never moved. A sidecore that may run on CPUs of several nodes has no node.
//! - Workers are numbered with 32 bits: 4 billion over the life of the daemon, then numbers repeat.

mod config;
pub mod core;
pub mod credit;
mod interrupt;
mod load;
mod memory;
mod pause;
pub mod placement;
mod placer;
mod run;
mod spin;
mod stats;
mod unit_nodes;
pub mod watchdog;
pub mod worker;
mod worker_ref;

pub use crate::core::Sidecore;
pub use config::SidecoreConfig;
pub use credit::{
    Account, Accounts, Allowance, Grant, Ledger, SEG_CHARGE_BYTES, Settings, Spent, VmId,
    least_charge_bytes,
};
pub use pause::Pause;
pub use placer::{Placer, PlacerStats};
pub use spin::Spin;
pub use stats::{SidecoreStats, WorkerStats};
pub use watchdog::Watchdog;
pub use worker::{Arm, SidecoreError, Watcher, Worker};
pub use worker_ref::{Group, WorkerInfo, WorkerRef};

#[cfg(test)]
mod tests;
