//! What a request is charged: each of its steps by what it moves, when it begins.
//!
//! The first step is paid when the request is taken, so that a request within one step costs one
//! charge, in its batch. Requests that go on are charged as they go: what is charged is what was
//! done, and a request of 16 GiB is no debt of 16 GiB. Both ledgers are charged the same, the
//! thread's because a VM's ceilings are there, and because data of files may be copied within the
//! call that starts it.

use crate::limits::{DISCARD_SHARE, MIN_CHARGE_BYTES};
use crate::slab::{Job, Work};

/// The cost of a step of so many bytes. `within_call`: ranges are done while the sidecore waits.
///
/// Zeroes are charged in full whatever the disk makes of them: whether it writes them or only notes
/// them, and which of the two the file system's fallback is, we are not told.
#[inline]
pub(crate) fn of_step(job: &Job, len_bytes: u64, within_call: bool) -> u64 {
    let bytes = match job.work {
        Work::Flush => 0,
        Work::Discard if !within_call => len_bytes / DISCARD_SHARE,
        _ => len_bytes,
    };
    bytes.max(MIN_CHARGE_BYTES)
}
