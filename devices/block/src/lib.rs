//! The block device engine: virtio-blk requests on raw, qcow2, memory and null back ends.
//!
//! # Theory of operation
//! A [`BlockPort`] is one disk of a VM: to its session a `vhost_user::Device`, below it a
//! [`Backend`]. Each virtqueue that runs is one worker on a sidecore with a disk of its own (for
//! files: an io_uring), so that queues share nothing but counters of the size and the write cache.
//!
//! A poll of a queue has four parts. Steps that wait from earlier polls are given to the disk. New
//! chains are popped, each into a slot that was allocated when the queue started: the slot's
//! `ChainBuf` keeps the segments at a fixed address and the memory table mapped until the request
//! is done. The request is copied once, checked and given to the disk, which reads and writes guest
//! memory directly. One call starts everything, finished operations are taken in, and their chains
//! are completed together, with one notification. Nothing of this allocates, and only the start is
//! a system call.
//!
//! A request is a list of ranges, done in steps, each in as many operations as the disk needs. That
//! one loop serves short reads and writes, direct I/O with unaligned guest buffers (through bounce
//! buffers), zeroes on file systems that cannot zero, stages, and fairness: a large request is many
//! steps, and others have their turn in between.
//!
//! Durability: a FLUSH completes after `fdatasync`, which covers every write that completed before
//! it was started. Without the write cache (`writeback` off, switched off by the driver, or a
//! driver that cannot flush) each write is followed by such a flush before it completes. What a
//! driver switched off stays off until a driver switches it on: over resets and reconnects, and,
//! through the session that the holder keeps, in the next daemon.
//!
//! A flush that failed stays failed, on all queues, until the image is opened anew: Linux marks
//! pages that it could not write as clean, and the next flush would be a lie. Each ring has an
//! opening of its own, since the kernel tells each of them once. A queue has one flush in its disk
//! at a time, which all requests share that wait for one: see `engine/flushes.rs`.
//!
//! Requests that find no space wait for it in their slots, and the guest with them, unless the
//! config says otherwise: see [`OnError`] and `engine/held_requests.rs`.
//!
//! A queue that ends with operations in its disk leaves them, with all that they use, to a thread
//! that waits for them; the image stays locked so long: see `orphans.rs`.
//!
//! Files on tmpfs are the exception to one system call per batch: each operation is a call, which
//! is cheaper there than the kernel thread that io_uring would use (see `resident.rs`).
//!
//! On request the guest's memory is registered with each queue's io_uring: see
//! `registered_memory.rs`.
//!
//! A driver that works through a backlog of completions is neither interrupted for each further one
//! nor asked to kick: see `driver_pace.rs`.
//!
//! A queue asks its VM's account before it takes requests or begins further steps of them, and
//! charges each step by the bytes that it moves, at least 4 KiB: see `cost.rs`. While several VMs
//! use one device, most of their requests wait in the rings: see `gate.rs`.
//!
//! The time of each request is counted, with the clock that a poll is given: see `latency.rs`.
//!
//! Before a queue starts, an earlier daemon's requests must be out of the disk: see `claim.rs`.
//!
//! Other parts of the daemon read a raw disk in place, through the page cache, with a descriptor of
//! their own, and with a pass for the gate of its device: see [`BlockPort::image`].
//!
//! Placeholder requests are guest I/O whose data the host replaces with a pipe's. Such a request
//! waits with its slot, without an operation of the disk, until the pipe answers it from a thread
//! of its own: see [`placeholder`] and [`BlockPort::set_placeholder_handler`]. It costs nothing on
//! a port without a handler, and a load for each batch while the handler expects none.
//!
//! A qcow2 image is a disk over the disks of its files: the crate `qcow2` has the map, and
//! `qcow2/disk.rs` moves the data. Mapped clusters are served as a raw disk is, new clusters take a
//! second operation for their entries, and a few helper threads do operations that have to wait.
//!
//! # Limits
//! See [`limits`]: each number with its reason.
//!
//! - 256 requests in flight per queue, 64 taken at once, 1 MiB per operation and per poll; 4 MiB
//!   where a device takes the data from guest memory itself.
//! - Steps of 128 KiB on disks that work within the call (memory, tmpfs, null) while others on the
//!   sidecore do anything; all queues of a VM go beyond its turn of a round by one step. Files keep
//!   steps of 1 MiB, also where their pages are cached and the copy is made within the call.
//! - A DISCARD on a device or a file is charged 1/256 of its length; a WRITE ZEROES that the disk
//!   turns out not to have pays its first step twice.
//! - 64 requests in a device while several VMs use it, and 2 of each queue in any case. Queues that
//!   wait for a device without having anything in it look again every 50 µs.
//! - 126 data segments of a request are announced, up to 254 by config
//!   ([`BlockPortConfig::seg_max`]); 2,046 and 64 MiB are served, counted after buffers are cut
//!   where they cross memory regions; more, or a buffer outside the VM's memory, is an I/O error of
//!   that request. A request with no status byte in reach (its last buffer is outside, too) is
//!   completed with nothing written.
//! - 8 requests of a queue in flight that have more than 256 segments; the ring waits while others
//!   are next. They go to the disk 256 segments at a time, on direct I/O through bounce buffers
//!   unless each is of whole blocks.
//! - 16 ranges of at most 1 GiB per DISCARD or WRITE ZEROES.
//! - 32 bounce buffers of 128 KiB per queue, only for direct I/O and for ports with stages.
//! - Registered memory up to 16,384 buffers of 1 GiB per queue, which the kernel pins and counts
//!   for each queue. Only operations with one buffer, within one region and one GiB, use it; bounce
//!   buffers are not registered. A VMM that takes memory back from the guest makes disk and guest
//!   see different memory: nobody tells us, so it must not.
//! - A memory disk that began empty refuses a queue that is not at its beginning, until one was:
//!   its driver wrote to an earlier daemon's. A split ring that stands at a multiple of 65,536, or
//!   a packed one at the beginning of an odd lap, cannot be told from a new one.
//! - Memory disks up to 64 GiB; qcow2 chains up to 8 images.
//! - Of a qcow2 operation on clusters that do not follow each other 16 pieces are moved at a time,
//!   and 64 of a queue beyond the first of each operation; the rest follows.
//! - A write cache that a driver switched off is on again when the daemon ends without a held
//!   session (no holder, or no front end connected) and the same driver comes back. Where drivers
//!   do that, configure `writeback = false`.
//! - One writer per image, or many readers, QEMU and its tools included: see `lock.rs`. What
//!   another holder has locked is an error, never waited for.
//! - 5 s for the requests of a killed daemon to end; then the queue does not start, and says so.
//! - 5 s for requests that an ended queue of the same port left in the disk, likewise.
//! - Held requests are tried again after 100 ms, then with pauses of up to 5 s, one at a time.
//!   Flushes, and requests that a pipe answers, are never held. A held request takes a slot of its
//!   queue: with all slots held nothing else is taken.
//! - Errors that the host's page cache finds at a flush (NFS, btrfs, thin devices) are no space
//!   that can be waited for: such images are best preallocated, or served with `direct`.
//! - A request's time is known to within the rest of a round, and 1/32.
//! - Only raw disks are read in place, and none with a stage that changes content. Stages that only
//!   watch or refuse do not see what is read so, nor what a pipe writes.
//! - Writes of placeholders on disks with direct I/O are whole pages of the host; others are
//!   written as they are. Reads over placeholders are of whole blocks of 4,096 bytes, into memory
//!   that begins 512 bytes behind the beginning of a page. Looking at them is charged as writing
//!   and reading are, and takes half as long as copying: 50 µs for the 2,048 sectors of a step.
//! - A queue that stops waits for the placed requests that were taken, as long as the pipe needs.
//! - SECURE ERASE, zones and lifetime are not offered.

pub mod backend;
mod check_progress;
mod claim;
pub mod config;
mod cost;
mod device;
mod driver_pace;
mod dropper;
mod engine;
pub mod error;
mod error_log;
mod gate;
mod hand_over;
mod image_file;
mod immediate;
mod in_flight;
mod latency;
pub mod limits;
mod lock;
mod lock_holders;
pub mod memory;
pub mod metrics;
pub mod null;
mod orphans;
pub mod placeholder;
mod port_state;
pub mod qcow2;
mod queue_disks;
pub mod raw;
mod registered_memory;
mod request;
mod resident;
mod slab;
pub mod stage;

pub use backend::{Backend, Demands, ImageState};
pub use check_progress::CheckProgress;
pub use config::{BackendConfig, BlockPortConfig, OnError, Topology};
pub use device::{BlockPort, Image, InPlaceError, PlaceholderError};
pub use dropper::start as start_dropper;
pub use error::BlockError;
pub use gate::{Gate, InPlacePass, InPlaceRead};
pub use metrics::{BlockStats, QueueSnapshot};
pub use orphans::orphaned_operations;
pub use placeholder::{PlaceholderHandler, PlaceholderOp, PlaceholderRequest};
pub use request::Refusal;

#[cfg(feature = "testing")]
pub mod fuzzing;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
