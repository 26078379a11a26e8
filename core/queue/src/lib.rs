//! Guest memory and the one descriptor walker.
//!
//! # Theory of operation
//! [`memory::GuestMemory`] is an immutable table of mapped regions; a change makes a new table, and
//! an `Arc` of the old one keeps it mapped while anything still uses it. [`Queue`] walks
//! split and packed rings: it copies each descriptor once, checks it, translates it into
//! [`seg::Seg`]s of a preallocated [`batch::Batch`], and publishes completions in batches.
//! [`vring::Vring`] adds the doorbells, the counters and the saved position to a queue: it is what
//! device engines hold.
//!
//! **Hostile memory.** All fields of a ring are read and written with atomic or volatile accesses,
//! in one file (`parts`); payload is copied by the functions of [`seg`] only. A number from the
//! guest is used from our copy, never read again. The queue remembers the region that the last
//! buffer was in, so that a translation is usually a subtraction and two comparisons. A broken rule
//! is an error that stops the port ([`health::PortHealth`]); the chains before it are still served.
//! A chain that is only too long, or has a buffer outside the VM's memory, is delivered with a
//! [`ChainFault`], for the engine to fail that one request: its descriptors are walked to the end,
//! since a disk's status byte is there. A file that its owner truncates under us raises SIGBUS: a
//! process-wide handler (`sigbus`) puts zero pages there, and the port stops at its next batch.
//!
//! **Order.** Split: the used index is stored last, with Release. Packed: each used descriptor is
//! one 8-byte store, the batch's first one last. Either way a batch appears at once. Between our
//! index and the read of the other side's event suppression stands a full fence, on both sides.
//!
//! **Death.** The daemon may be killed between any two instructions. Devices that complete in order
//! keep a [`slot::PositionSlot`]: [`Queue::resume`] takes unfinished chains again and finishes
//! a publication that was begun. Devices that do not keep an [`inflight::InflightRegion`], in the
//! layout of the vhost-user specification: [`vring::Vring::new`] delivers its requests first. A
//! test kills the daemon before every store into guest memory, slot and region.
//!
//! **Huge pages.** A thread has the kernel put the VMs' memory into huge pages ([`huge_pages`]).
//!
//! **Duties of the engines.** The written length of a [`Completion`] must not be above
//! what was really written: the bytes beyond it are old content of the buffer. Chains given
//! back with `unpop` must be the last popped.
//!
//! The feature `testing` adds [`testing`](crate): the driver's side, for tests of all crates.
//!
//! # Limits
//! - Descriptors of a queue: 32,768 ([`base::limits::MAX_QUEUE_SIZE`]). What the specification
//!   allows; nothing of ours grows with it but inflight tracking, 10 to 20 bytes a descriptor.
//! - Segments of a chain: 2,048 ([`base::limits::MAX_CHAIN_SEGS`]). 1,024 descriptors that each
//!   cross two regions; bounds a batch.
//! - Bytes of a chain: 64 MiB ([`base::limits::MAX_CHAIN_LEN_BYTES`]). 1,024 segments of 64 KiB
//!   fit; far from 32-bit overflow.
//! - Entries of an indirect table: 4,096. Drivers send tables longer than the queue; of a chain
//!   beyond the limits the status byte is still found.
//! - Chains with a [`ChainFault`] of a pop: 1. Each costs a walk and no room in the batch.
//! - Descriptors of an inflight region: 131,072 in all queues ([`inflight::MAX_INFLIGHT_DESCS`]). 4
//!   MiB of ours for packed rings, 2 for split ones: 32 queues of 4,096.
//! - Chains in flight: the queue's size. A driver has no more descriptors; engines can size by it.
//! - Memory regions of a VM: 64 ([`base::limits::MAX_MEMORY_REGIONS`]). The number announced to the
//!   VMM.
//! - Memory of a VM: 16 TiB ([`base::limits::MAX_MEMORY_BYTES`]). A sparse file costs its owner
//!   nothing, our address space is everybody's.
//! - Mapped for the ports of a VM: twice the host's memory, 1 to 16 TiB, or as the config says
//!   ([`MemoryShare`]); a file counts once, dirty logs not. No VM takes it from the others.
//! - Mappings of a VM: 512 (`base::limits`). Eight tables of 64 regions: guards of mappings are the
//!   process's.
//! - Mapped by the process: 64 TiB ([`base::limits::MAX_MAPPED_BYTES`]). Half of the address space.
//! - Files mapped: regular ones on tmpfs (memfd), hugetlbfs, ramfs, ext4, xfs, btrfs, overlay. A
//!   page fault on FUSE or on the network waits for a server.
//! - Mappings of the process: 16,384. The table of the SIGBUS handler is static.
//! - Dirty log: 2 GiB ([`dirty::MAX_LOG_BYTES`]). Tells of 64 TiB.
//! - Completions published at once with a slot: 504. What a page holds; more are published in
//!   parts.
//! - Packed completions published at once with an inflight region: 1. See `inflight::packed`.
//!
//! Pages of a sparse memory file that we touch first (disk reads, received frames) are charged to
//! the daemon's control group, not to the VMM's: have VMMs allocate memory beforehand, or leave the
//! daemon's group without a memory limit. Memory in huge pages that we asked for is charged to it
//! in any case.
//!
//! Little-endian guests only (virtio 1.x); no vIOMMU: addresses in rings are guest-physical.

pub mod batch;
pub mod block_mover;
mod budget;
mod crash;
pub mod dirty;
pub mod error;
mod file_system;
pub mod health;
pub mod huge_pages;
pub mod inflight;
pub mod iovec;
mod mapping;
pub mod memory;
mod packed;
mod parts;
mod queue;
mod redelivery;
pub mod seg;
mod setup;
mod share;
mod sigbus;
pub mod slot;
mod split;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod vring;
mod walk;

pub use crate::queue::Queue;
pub use batch::{Batch, Chain, ChainBuf};
pub use error::{ChainFault, MemoryError, RingError};
pub use memory::GuestMemory;
pub use seg::Seg;
pub use setup::{Completion, Layout, Position, RingAddrs, RingSetup};
pub use share::MemoryShare;
pub use vring::{Coalescing, Vring};
