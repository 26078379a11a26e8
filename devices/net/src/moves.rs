//! Addresses that move from port to port: one when a VM or a service moves, many a second when two
//! ports are bridged to each other, or two VMs use one address.

use crate::fdb::PortId;
use frame::Mac;

/// Between two lines in the log.
const TELL_EVERY_NS: u64 = 10_000_000_000;

/// A move, as the log tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    pub mac: Mac,
    pub from: PortId,
    pub to: PortId,
    /// Moves of all addresses that were not told of, this one included.
    pub count: u64,
}

/// The moves of a switch that were not told of.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    last: Option<Move>,
    tell_at_ns: u64,
}

impl Moves {
    /// An address moved.
    pub fn note(&mut self, mac: Mac, from: PortId, to: PortId) {
        let count = self.last.map_or(0, |last| last.count) + 1;
        self.last = Some(Move { mac, from, to, count });
    }

    /// Takes the last move, with the number of those before it, if it is to be told now.
    #[inline]
    pub fn due(&mut self, now_ns: u64) -> Option<Move> {
        if self.last.is_none() || now_ns < self.tell_at_ns {
            return None;
        }
        self.tell_at_ns = now_ns + TELL_EVERY_NS;
        self.last.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_is_told_at_once_and_a_storm_of_them_now_and_then() {
        let mac = |n| Mac::new([2, 0, 0, 0, 0, n]);
        let mut moves = Moves::default();
        assert_eq!(moves.due(0), None);
        moves.note(mac(1), 0, 1);
        assert_eq!(moves.due(5), Some(Move { mac: mac(1), from: 0, to: 1, count: 1 }));
        for n in 0..100 {
            moves.note(mac(2), n % 2, 1 - n % 2);
            assert_eq!(moves.due(5 + u64::from(n)), None);
        }
        let told = moves.due(5 + TELL_EVERY_NS).unwrap();
        assert_eq!((told.mac, told.count), (mac(2), 100));
        assert_eq!(moves.due(u64::MAX), None);
    }
}
