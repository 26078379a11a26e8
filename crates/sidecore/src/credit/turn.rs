//! How long a turn may be: what a VM may take in a round while others do anything.
//!
//! Who waits for an answer waits for the turns of all others, so a turn is meant to take [`TURN_NS`].
//! It is counted in bytes as they are charged, and what a byte takes differs: between CPUs and their
//! clocks, and between a frame for one and a broadcast. So the rounds lately tell it: their time,
//! without what a round takes in which nothing is charged, over what they charged.

use super::{LOOK_INTERVAL_NS, TURN_BYTES};

/// What a turn should take. [`TURN_BYTES`] take less on a fast core.
const TURN_NS: u64 = 5_000;

/// Least turn: ten frames of the usual MTU. Below, a round's own cost is most of it.
pub(super) const MIN_TURN_BYTES: u64 = 16 << 10;

/// Rounds that charged less tell little of what a byte takes.
const TELLING_BYTES: u64 = 8 << 10;

/// A round that took longer was interrupted: by the scheduler, or the hypervisor.
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
    /// Charged since the round began, and in the round before.
    charged: u64,
    charged_before: u64,
    /// When the round before began.
    began_ns: u64,
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
            charged_before: 0,
            began_ns: 0,
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

    /// So much was charged.
    #[inline]
    pub fn charge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_add(bytes);
    }

    /// A round ends that began at `began_ns`: the one before it took until then.
    #[inline]
    pub fn end_round(&mut self, began_ns: u64) {
        let took_ns = began_ns.saturating_sub(std::mem::replace(&mut self.began_ns, began_ns));
        let charged = std::mem::replace(&mut self.charged, 0);
        match std::mem::replace(&mut self.charged_before, charged) {
            _ if took_ns == 0 || took_ns > INTERRUPTED_NS => {}
            0 => self.empty_ns = self.empty_ns.min(took_ns),
            bytes if bytes < TELLING_BYTES => {}
            bytes => {
                let Sum { bytes: b, ns, rounds } = self.telling;
                self.telling = Sum { bytes: b + bytes, ns: ns + took_ns, rounds: rounds + 1 };
            }
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
            self.most_bytes = (bytes * TURN_NS / ns).clamp(MIN_TURN_BYTES, TURN_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sidecore's clock and its turns.
    #[derive(Default)]
    struct Rig {
        turn: Turn,
        now_ns: u64,
    }

    impl Rig {
        /// Looks after 50 rounds of so many bytes that took `ns` each.
        fn after(&mut self, bytes: u64, ns: u64) -> u64 {
            for _ in 0..50 {
                self.turn.charge(bytes);
                self.turn.end_round(self.now_ns);
                self.now_ns += ns;
            }
            self.turn.look();
            self.turn.most_bytes()
        }
    }

    #[test]
    fn a_turn_takes_its_time_whatever_a_byte_takes() {
        let mut rig = Rig::default();
        assert_eq!(rig.turn.most_bytes(), TURN_BYTES);
        assert_eq!(rig.after(40_000, 3_000), TURN_BYTES, "a fast core");
        rig.after(40_000, 10_000);
        assert_eq!(rig.after(40_000, 10_000), 20_000, "a slow one");
        assert_eq!(rig.after(40_000, 900_000), MIN_TURN_BYTES);
        rig.after(100, 10);
        assert_eq!(rig.after(100, 10), MIN_TURN_BYTES, "small rounds tell nothing");
    }

    #[test]
    fn what_an_empty_round_takes_is_no_cost_of_bytes() {
        let mut rig = Rig::default();
        rig.after(0, 6_000);
        rig.after(40_000, 16_000);
        assert_eq!(rig.after(40_000, 16_000), 20_000);
        // It is remembered when there are no empty rounds any more.
        assert_eq!(rig.after(40_000, 16_000), 20_000);
    }

    #[test]
    fn an_interruption_does_not_count() {
        let mut rig = Rig::default();
        assert_eq!(rig.after(40_000, 2 * INTERRUPTED_NS), TURN_BYTES);
    }
}
