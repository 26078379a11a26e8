//! A virtio driver in user space over vhost-user: loads and checks any back end without a VM.
//!
//! # Theory of operation
//! One thread, pinned, plays the driver of one or two devices of one back end. [`session`] does the
//! handshake as QEMU does it, [`memory`] is the guest's memory, [`ring`] the driver's side of split
//! and packed rings with in-order use, event index and indirect tables, written without a look at
//! our own device side. [`net`] floods frames from one port to another, or plays ping-pong;
//! [`disk`] keeps a number of requests under way, for blocks in the order of [`access`]; [`many`]
//! drives the ports of many VMs at once, also those of hostile ones, and counts in windows;
//! [`hostile`] attacks the session itself; [`idle`] attaches ports and leaves them alone. The first
//! two can check every byte, and can poll or sleep on the interrupt. What is counted while it runs
//! is in [`report`].
//!
//! The driver writes the descriptors of every buffer anew, as a real one does, but touches payload
//! only when it checks: the back end's core is to be the one that is busy.
//!
//! # Limits
//! - One region of memory, one queue pair per port.
//! - Chains of up to 32 buffers: 64 KiB in pieces of 4 KiB, a header and a spare.
//! - Queues of up to 1,024 descriptors, as the back ends take.
//! - No offloads: super-packets go as plain long frames over mergeable buffers.

pub mod access;
pub mod cli;
pub mod disk;
mod driver;
pub mod error;
pub mod frame;
pub mod hostile;
pub mod idle;
pub mod many;
pub mod memory;
pub mod net;
mod port;
pub mod report;
pub mod ring;
pub mod session;

pub use error::FrontendError;
pub use port::Reach;
