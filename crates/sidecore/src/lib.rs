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

pub mod core;
pub mod worker;

pub use crate::core::{Sidecore, SidecoreConfig, SidecoreStats, WorkerRef};
pub use worker::{Arm, SidecoreError, Watcher, Worker};
