//! Helpers for tests of this and other crates: a recording file in memory, and its states after
//! kills.

mod bytes;
mod death;
mod recorder;

pub use bytes::Bytes;
pub use death::{killed_at, power_cut_at};
pub use recorder::{Event, Recorder};
