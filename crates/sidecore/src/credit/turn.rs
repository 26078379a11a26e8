//! How long a turn may be: what a VM may take in a round while others do anything.
//!
//! # Theory of operation
//! Who waits for an answer waits for the turns of all others, so a turn is meant to take [`TURN_NS`].
//! It is counted in bytes as they are charged, and what a byte takes differs: between CPUs and their
//! clocks, and between a frame for one and a broadcast. So the rounds lately tell it: their time,
//! without what a round takes in which nothing is charged, over what they charged. Only rounds right
//! after a busy one count: no pause, no sleep and no calls are in their time.
//!
//! # Limits
//! - One figure for all VMs and engines of a sidecore: a VM whose bytes take long shortens the turns of
//!   all, by 2.5 at most. That costs throughput; shares stay as they are.
//! - Bytes that a device moves count as if the thread did: beside many large reads turns are longer
//!   than they need be, [`TURN_BYTES`] at most.
//! - What an empty round takes is as old as the last one. Until the next it may be too little, after
//!   many queues came, and turns shorter than they need be.

use super::{LONE_TURN_BYTES, LOOK_INTERVAL_NS, TURN_BYTES};

/// What a turn should take. [`TURN_BYTES`] take less on a fast core.
const TURN_NS: u64 = 5_000;

/// Least turn: ten frames of the usual MTU. Below, a round's own cost is most of it.
const MIN_TURN_BYTES: u64 = 16 << 10;

/// Rounds that charged less tell little of what a byte takes.
const TELLING_BYTES: u64 = 8 << 10;

/// A round that took longer was interrupted, by the scheduler or the hypervisor, or stood in a guest's
/// page fault: it tells nothing of bytes.
const INTERRUPTED_NS: u64 = LOOK_INTERVAL_NS;

/// Bytes and time of some rounds.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    ns: u64,
    rounds: u64,
}

/// What a turn may be on one sidecore.
#[derive(Debug)]
pub(super) struct Turn {
    /// Now.
    most_bytes: u64,
    /// Charged since the round began.
    charged: u64,
    /// Rounds that tell something, since the last look.
    telling: Sum,
    /// The shortest round without a charge: since the last look (the most there is: none), and before.
    empty_ns: u64,
    fixed_ns: u64,
}

impl Default for Turn {
    fn default() -> Self {
        Self {
            most_bytes: TURN_BYTES,
            charged: 0,
            telling: Sum::default(),
            empty_ns: u64::MAX,
            fixed_ns: 0,
        }
    }
}

impl Turn {
    /// Bytes of a turn.
    #[inline]
    pub fn most_bytes(&self) -> u64 {
        self.most_bytes
    }

    /// A batch was charged. No thread moves more than [`LONE_TURN_BYTES`] at once: a device does.
    #[inline]
    pub fn charge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_add(bytes.min(LONE_TURN_BYTES));
    }

    /// A round is over. How long it took, if that is all its own.
    #[inline]
    pub fn end_round(&mut self, took_ns: Option<u64>) {
        let charged = std::mem::take(&mut self.charged);
        let Some(took_ns) = took_ns.filter(|ns| *ns <= INTERRUPTED_NS) else { return };
        if charged == 0 {
            self.empty_ns = self.empty_ns.min(took_ns);
        } else if charged >= TELLING_BYTES {
            self.telling.bytes = self.telling.bytes.saturating_add(charged);
            self.telling.ns += took_ns;
            self.telling.rounds += 1;
        }
    }

    /// About once a millisecond: draws the conclusion. Without telling rounds it stays as it is.
    pub fn look(&mut self) {
        match std::mem::replace(&mut self.empty_ns, u64::MAX) {
            u64::MAX => {}
            empty_ns => self.fixed_ns = empty_ns,
        }
        let Sum { bytes, ns, rounds } = std::mem::take(&mut self.telling);
        if rounds > 0 {
            let ns = ns.saturating_sub(rounds * self.fixed_ns).max(1);
            self.most_bytes =
                (bytes.saturating_mul(TURN_NS) / ns).clamp(MIN_TURN_BYTES, TURN_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks after 50 rounds of so many bytes that took `ns` each.
    fn after(turn: &mut Turn, bytes: u64, ns: u64) -> u64 {
        for _ in 0..50 {
            turn.charge(bytes);
            turn.end_round(Some(ns));
        }
        turn.look();
        turn.most_bytes()
    }

    #[test]
    fn a_turn_takes_its_time_whatever_a_byte_takes() {
        let mut turn = Turn::default();
        assert_eq!(turn.most_bytes(), TURN_BYTES);
        assert_eq!(after(&mut turn, 40_000, 3_000), TURN_BYTES, "a fast core");
        assert_eq!(after(&mut turn, 40_000, 10_000), 20_000, "a slow one");
        assert_eq!(after(&mut turn, 40_000, 900_000), MIN_TURN_BYTES);
        assert_eq!(after(&mut turn, 100, 10), MIN_TURN_BYTES, "small rounds tell nothing");
        assert_eq!(after(&mut turn, 40_000, 0), TURN_BYTES, "a clock that stands still");
    }

    #[test]
    fn what_an_empty_round_takes_is_no_cost_of_bytes() {
        let mut turn = Turn::default();
        after(&mut turn, 0, 6_000);
        assert_eq!(after(&mut turn, 40_000, 16_000), 20_000);
        // It is remembered when there are no empty rounds any more.
        assert_eq!(after(&mut turn, 40_000, 16_000), 20_000);
    }

    #[test]
    fn interruptions_and_rounds_with_a_pause_do_not_count() {
        let mut turn = Turn::default();
        assert_eq!(after(&mut turn, 40_000, 2 * INTERRUPTED_NS), TURN_BYTES);
        for _ in 0..50 {
            turn.charge(40_000);
            turn.end_round(None);
        }
        turn.look();
        assert_eq!(turn.most_bytes(), TURN_BYTES);
        // Nor does what those charged fall to the next.
        assert_eq!(after(&mut turn, 40_000, 10_000), 20_000);
    }

    #[test]
    fn one_large_request_does_not_count_in_full() {
        let mut turn = Turn::default();
        for _ in 0..50 {
            turn.charge(u64::MAX);
            turn.charge(40_000);
            turn.end_round(Some(50_000));
        }
        turn.look();
        assert_eq!(turn.most_bytes(), (LONE_TURN_BYTES + 40_000) / 10);
    }
}
