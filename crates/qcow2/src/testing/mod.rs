//! For tests of this and other crates: a file in memory that records, and what deaths leave of it.

mod bytes;
mod death;
mod recorder;

pub use bytes::Bytes;
pub use death::{killed_at, power_cut_at};
pub use recorder::{Event, Recorder};
