//! Length of a turn: the bytes that a VM may take in a round while others are active.
//!
//! # Theory of operation
//! A VM that waits for an answer waits for the turns of all others, so a turn should take
//! [`TURN_NS`]. A turn is counted in bytes as they are charged, and the time of a byte differs:
//! between CPUs and their clocks, and between a frame for one receiver and a broadcast. So it is
//! measured in the rounds of the last millisecond: their time, without the time of a round in which
//! nothing is charged, over the bytes that they charged. Only rounds right after a busy one count:
//! their time has no pause, no sleep and no call in it.
//!
//! # Limits
//! - One figure for all VMs and engines of a sidecore: a VM whose bytes take long shortens the
//!   turns of all, by 2.5 at most. That costs throughput; shares stay as they are.
//! - Bytes that a device moves count as if the thread moved them: beside many large reads turns are
//!   longer than they need be, [`TURN_BYTES`] at most.
//! - The time of an empty round is that of the last one. After many queues came it may be too short
//!   until the next empty round, and turns shorter than they need be.

use super::{LONE_TURN_BYTES, LOOK_INTERVAL_NS, TURN_BYTES};

/// Time that a turn should take. [`TURN_BYTES`] take less on a fast core.
const TURN_NS: u64 = 5_000;

/// Least turn: ten frames of the usual MTU. Below, a round's own cost is most of it.
const MIN_TURN_BYTES: u64 = 16 << 10;

/// Least bytes of a round that is measured: smaller rounds say little about the time of a byte.
const TELLING_BYTES: u64 = 8 << 10;

/// Longest time of a round that is measured: a longer one was interrupted, by the scheduler or the
/// hypervisor, or waited in a guest's page fault.
const INTERRUPTED_NS: u64 = LOOK_INTERVAL_NS;

/// Bytes and time of some rounds.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    ns: u64,
    rounds: u64,
}

/// Length of a turn on one sidecore, and its measurement.
#[derive(Debug)]
pub(super) struct Turn {
    /// Length of a turn now.
    most_bytes: u64,
    /// Bytes charged since the round began.
    charged: u64,
    /// Sum of the measured rounds since the last look.
    telling: Sum,
    /// Shortest round without a charge since the last look; `u64::MAX`: none.
    empty_ns: u64,
    /// Shortest round without a charge, of the last look that had one.
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

    /// Counts a charged batch. No thread moves more than [`LONE_TURN_BYTES`] at once: a device
    /// does.
    #[inline]
    pub fn charge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_add(bytes.min(LONE_TURN_BYTES));
    }

    /// Ends a round. `took_ns`: its time, if no pause, sleep or call is in it.
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

    /// Sets the length from the measured rounds, about once a millisecond. Without any it stays.
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
