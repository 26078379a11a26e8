//! When the log is to say what a dropped frame or packet looked like.
//!
//! Counters say how many; a line says what it was, which is what one looks for first. The first of each
//! reason is told of, then one in [`EVERY_NS`] with how many came between. For the thread that drops
//! them: no lock, no look at a clock.

use crate::counter::DropReason;

/// Between two lines about one reason, in nanoseconds: ten minutes. Not a guest's to fill a disk with.
pub const EVERY_NS: u64 = 600_000_000_000;

/// One per port, or per queue.
#[derive(Debug, Default)]
pub struct RejectLog {
    /// When the next line may be written, by reason; none yet: at once.
    next_at_ns: [Option<u64>; DropReason::COUNT],
    left_out: [u64; DropReason::COUNT],
}

impl RejectLog {
    /// One was dropped at `now_ns`. Some when a line may be written: how many had none before it.
    pub fn admit(&mut self, reason: DropReason, now_ns: u64) -> Option<u64> {
        let at = reason as usize;
        if self.next_at_ns[at].is_some_and(|next| now_ns < next) {
            self.left_out[at] += 1;
            return None;
        }
        self.next_at_ns[at] = Some(now_ns + EVERY_NS);
        Some(std::mem::take(&mut self.left_out[at]))
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn abuse_V18_each_reason_is_told_of_once_in_ten_minutes() {
        let mut log = RejectLog::default();
        let mut lines = |reason, from: u64| {
            (0..1000).filter_map(|n| log.admit(reason, from + n)).collect::<Vec<_>>()
        };
        assert_eq!(lines(DropReason::Malformed, 0), [0]);
        assert_eq!(lines(DropReason::Malformed, EVERY_NS - 1000), []);
        assert_eq!(lines(DropReason::Spoofed, 1), [0]);
        assert_eq!(lines(DropReason::Malformed, EVERY_NS), [1999]);
    }
}
