//! Backpressure: whether senders wait for a receiver that is out of buffers.
//!
//! A held frame stops everything else its sender has to send, so a receiver must not be waited for
//! as often as it likes by posting a buffer now and then. It has a budget, the switch's hold time,
//! that waiting spends. Taking frames refills it: a busy receiver slows its senders down and
//! nothing is lost. So does time in which nobody waits, slowly. A receiver that has used it up is
//! stalled: frames for which it has no buffers are dropped until a part of the budget is back.
//! Waiting for a window ([`crate::window`]) spends the same budget.

/// Time that one frame gives back: a receiver that takes 20,000 frames in a second is waited for as
/// long as that goes on. No guest that is at work takes fewer when it has more to take.
const FRAME_REFILL_NS: u64 = 50_000;

/// Time that each byte of a frame gives back: 1 Gbit/s, for those who take few large frames.
const BYTE_REFILL_NS: u64 = 8;

/// One part in so many of the time without waiting comes back: a receiver that posts nothing but
/// single buffers delays a sender for an eighth of the time.
const IDLE_SHARE: u64 = 8;

/// Waiting begins only with one part in so many of the budget left: else a stalled receiver would
/// be waited for again and again for a few microseconds, each with its sleep and wake-up.
const WORTH_SHARE: u64 = 4;

/// Fate of a frame that does not fit now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Keep it; try again.
    Hold,
    /// The receiver has been waited for too long: drop.
    Stalled {
        /// The queue was declared stalled just now.
        new: bool,
    },
}

/// Budget of waiting for one receive queue. `budget_ns` is the switch's hold time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HoldBudget {
    /// Time since which a sender waits.
    since_ns: Option<u64>,
    spent_ns: u64,
    /// Until when time has given its part back.
    counted_ns: u64,
    stalled: bool,
}

impl HoldBudget {
    /// A frame does not fit: keep it or drop it?
    pub fn refuse(&mut self, now_ns: u64, budget_ns: u64) -> Refusal {
        if self.since_ns.is_none() {
            self.refill(now_ns, budget_ns);
            if self.spent_ns > budget_ns - budget_ns / WORTH_SHARE {
                return self.stall();
            }
            self.since_ns = Some(now_ns);
        }
        if self.is_on(now_ns, budget_ns) {
            self.stalled = false;
            return Refusal::Hold;
        }
        self.end(now_ns);
        self.stall()
    }

    fn refill(&mut self, now_ns: u64, budget_ns: u64) {
        let back_ns = now_ns.saturating_sub(self.counted_ns) / IDLE_SHARE;
        self.spent_ns = self.spent_ns.min(budget_ns).saturating_sub(back_ns);
        self.counted_ns = now_ns;
    }

    fn stall(&mut self) -> Refusal {
        Refusal::Stalled { new: !std::mem::replace(&mut self.stalled, true) }
    }

    /// Whether somebody waits and should go on waiting.
    pub fn is_on(&self, now_ns: u64, budget_ns: u64) -> bool {
        self.ends_ns(budget_ns).is_some_and(|end_ns| now_ns < end_ns)
    }

    /// When the waiting is over.
    pub fn ends_ns(&self, budget_ns: u64) -> Option<u64> {
        Some(self.since_ns?.saturating_add(budget_ns.saturating_sub(self.spent_ns)))
    }

    /// Ends the waiting, if any: there are new buffers.
    #[inline]
    pub fn end(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.since_ns.take() {
            self.spent_ns = self.spent_ns.saturating_add(now_ns.saturating_sub(since_ns));
            self.counted_ns = now_ns;
        }
    }

    /// The receiver took a frame.
    #[inline]
    pub fn frame_taken(&mut self, len_bytes: usize) {
        if self.spent_ns == 0 {
            return;
        }
        let back_ns = FRAME_REFILL_NS + len_bytes as u64 * BYTE_REFILL_NS;
        self.spent_ns = self.spent_ns.saturating_sub(back_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET_NS: u64 = 20_000_000;
    const STALLED: Refusal = Refusal::Stalled { new: false };

    #[test]
    fn a_budget_is_spent_by_waiting_and_comes_back_with_time() {
        let mut hold = HoldBudget::default();
        assert_eq!(hold.refuse(5, BUDGET_NS), Refusal::Hold);
        assert_eq!(hold.ends_ns(BUDGET_NS), Some(5 + BUDGET_NS));
        hold.end(5 + BUDGET_NS / 2);
        assert!(!hold.is_on(6, BUDGET_NS));
        let mut now_ns = 5 + BUDGET_NS / 2;
        assert_eq!(hold.refuse(now_ns, BUDGET_NS), Refusal::Hold);
        now_ns += BUDGET_NS / 2;
        assert_eq!(hold.refuse(now_ns, BUDGET_NS), Refusal::Stalled { new: true });
        // A quarter of the budget takes two of it, and is all there is.
        now_ns += 2 * BUDGET_NS - 8;
        assert_eq!(hold.refuse(now_ns, BUDGET_NS), STALLED);
        now_ns += 8;
        assert_eq!(hold.refuse(now_ns, BUDGET_NS), Refusal::Hold);
        assert_eq!(hold.ends_ns(BUDGET_NS), Some(now_ns + BUDGET_NS / 4));
    }

    #[test]
    fn whoever_takes_frames_is_waited_for_again() {
        let mut hold = HoldBudget::default();
        let mut now_ns = 0;
        // Always out of buffers, but 25,000 frames in a second: never stalled.
        for _ in 0..10_000 {
            assert_eq!(hold.refuse(now_ns, BUDGET_NS), Refusal::Hold);
            now_ns += 40_000;
            hold.end(now_ns);
            hold.frame_taken(60);
        }
        // As few large ones.
        for _ in 0..10_000 {
            assert_eq!(hold.refuse(now_ns, BUDGET_NS), Refusal::Hold);
            now_ns += 500_000;
            hold.end(now_ns);
            hold.frame_taken(65_000);
        }
    }

    #[test]
    fn a_time_of_zero_waits_for_nobody() {
        let mut hold = HoldBudget::default();
        assert_eq!(hold.refuse(1, 0), Refusal::Stalled { new: true });
        assert_eq!(hold.refuse(2, 0), STALLED);
    }
}
