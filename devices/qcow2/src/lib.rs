//! Images in qcow2: the format, and a map of clusters that survives kills and power cuts.
//!
//! # Theory of operation
//! Three parts, from the bottom: [`format`] knows the bytes, [`map`] knows the places of clusters
//! and the order in which they may change, [`chain`] puts an image and its backing files together.
//! None of them moves the data of mapped clusters: a sidecore asks [`Chain::find`] and
//! [`Chain::plan`] where bytes are or go, and moves them itself; operations that take longer are
//! plain calls that wait.
//!
//! **Order.** The guest outlives this process, so an acknowledged write must be in the file, not in
//! our memory: an entry is in the file before its write is answered, and a FLUSH is the file's
//! `fdatasync` and nothing more. New clusters come from a *reserve* that is durably counted and
//! durably zero (see [`map::writer`]), so that an entry may reach the disk at any time after data
//! is written. Where an entry replaces content, its cluster is made durable first. A cluster is
//! free again when no entry refers to it, durably, and nobody is at work on it.
//!
//! **Death.** So a kill leaves clusters that nobody refers to, at worst; a power cut leaves counts
//! that are wrong, besides. Both are mended at the next opening, from the tables ([`check`]), which
//! the dirty bit asks for; version 2 has none, so there each count is durable before it is needed,
//! and leaks are looked for at each opening.
//!
//! **Threads.** Looking at the map takes no lock: slices of L2 tables are shared, their entries are
//! atomic words. Changing an entry takes a claim on its cluster. A lock of a few list operations
//! guards claims and reserve; another one, held over reads and writes of the file, guards counts
//! and tables, and no sidecore takes it.
//!
//! **Hostile images.** Every number from the file is checked before it is used; nothing recurses;
//! an entry that points at metadata is never written through. A contradiction is EIO for that
//! request, marks the image, and ends writing to it.
//!
//! # Limits
//! See [`limits`]: each number with its reason.
//!
//! - Encrypted images, and unknown incompatible features, are refused by name.
//! - Clusters are never compressed by us, and snapshots never made: `qemu-img` does both, while the
//!   image is not served.
//! - Where a write replaces content of a backing file or a snapshot for the first time, it waits
//!   for a sync of the file, which all such writes at the time share.
//! - A freed cluster is used again after the next FLUSH at the earliest.
//! - A disk grows as far as the clusters of its L1 table, in a row, are counted by one refcount
//!   block: with the usual refcounts to 510 MiB in clusters of 512 bytes, 8 GiB in those of 1 KiB,
//!   2 TiB in those of 4 KiB.
//! - Images with a data file, or with extended entries, get new space by the longer way.

pub mod chain;
pub mod check;
pub mod error;
pub mod format;
pub mod limits;
pub mod map;
pub mod store;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use chain::clear::Clear;
pub use chain::plan::{Allocation, Plan};
pub use chain::read::Scratch;
pub use chain::{Chain, ChainView, Layer, Place};
pub use error::Error;
pub use format::header::Header;
pub use map::image::Image;
pub use map::open::{Opened, Options, read_header};
pub use store::{FileStore, Store};
