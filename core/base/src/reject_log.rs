//! Limit of log lines about dropped frames and packets.
//!
//! Counters say how many were dropped; a line shows one of them, which an operator looks for first.
//! The first drop of each reason gets a line, then one in [`EVERY_NS`], with the number of drops
//! between them. For the thread that drops: no lock, no look at a clock.

use crate::counter::DropReason;

/// Time between two lines about one reason, in nanoseconds: ten minutes, so that a guest cannot
/// fill a disk with them.
pub const EVERY_NS: u64 = 600_000_000_000;

/// Limit of lines of one port, or of one queue.
#[derive(Debug, Default)]
pub struct RejectLog {
    /// Time of the next line, by reason; none: at once.
    next_at_ns: [Option<u64>; DropReason::COUNT],
    left_out: [u64; DropReason::COUNT],
}

impl RejectLog {
    /// Counts a drop at `now_ns`. Some when a line may be written, with the number of drops before
    /// it that had none.
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
