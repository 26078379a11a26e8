//! Length of the steps of a request, and their charge: each step is charged when it begins, by the
//! bytes that it moves.
//!
//! The first step is paid when the request is taken, so that a request within one step costs one
//! charge, in its batch. Longer requests are charged step by step: a request of 16 GiB is no debt
//! of 16 GiB. Both ledgers are charged the same, the
//! thread's because a VM's ceilings are there, and because data of files may be copied within the
//! call that starts it.

use crate::backend::Demands;
use crate::limits::{
    BOUNCE_LEN_BYTES, DIRECT_SHARE, DISCARD_SHARE, DISCARD_STEP_LEN_BYTES, MIN_CHARGE_BYTES,
    ZERO_STEP_LEN_BYTES,
};
use crate::slab::{Job, JobKind};

/// Charge for a step of `len_bytes`. `within_call`: ranges are done while the sidecore waits.
///
/// Zeroes are charged in full: whether the disk, or the file system's fallback, writes them or only
/// notes them is not known here.
#[inline]
pub(crate) fn step_charge_bytes(job: &Job, len_bytes: u64, within_call: bool) -> u64 {
    let bytes = match job.kind {
        JobKind::Flush => 0,
        JobKind::Discard if !within_call => len_bytes / DISCARD_SHARE,
        _ => len_bytes,
    };
    moved_charge_bytes(bytes)
}

/// Charge for moving `len_bytes` in one step.
#[inline]
pub(crate) fn moved_charge_bytes(len_bytes: u64) -> u64 {
    len_bytes.max(MIN_CHARGE_BYTES)
}

/// Bytes that count as one of a poll's budget and of a step. `is_copied`: they go through a buffer
/// of ours.
#[inline]
pub(crate) fn budget_share(demands: &Demands, is_copied: bool) -> u64 {
    if demands.is_direct() && !is_copied { DIRECT_SHARE } else { 1 }
}

/// Most bytes of the next step. `step_len_bytes`: the limit for steps that move data, or that are
/// charged as if they did.
pub(crate) fn max_step_len_bytes(job: &Job, demands: &Demands, step_len_bytes: u32) -> u64 {
    let step = u64::from(step_len_bytes);
    let range = if demands.within_call() { step } else { u64::MAX };
    let range = range.min(demands.max_range_bytes);
    match (job.kind, job.is_bouncing) {
        (JobKind::Discard, _) => range.min(DISCARD_STEP_LEN_BYTES),
        (JobKind::WriteZeroes, _) if job.is_native() => range.min(ZERO_STEP_LEN_BYTES),
        (_, true) => step.min(BOUNCE_LEN_BYTES.into()),
        (JobKind::Read | JobKind::Write, false) => step * budget_share(demands, false),
        _ => step,
    }
}
