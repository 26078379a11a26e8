//! Timestamps of a connection (RFC 7323), as they are on the wire.

use crate::segment::{after, later};
use crate::shift::Shift;

/// Last timestamps of both ends.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Clock {
    /// The last one sent by guest or twin; none: the connection has none.
    pub sent: Option<u32>,
    /// The peer's last.
    pub peer: Option<u32>,
}

impl Clock {
    /// Notes a timestamp of the guest's. Timestamps never go back (RFC 7323, 4.3): the clock of a
    /// guest with a shift that is behind its twin's is moved up.
    pub fn advance(&mut self, value: u32, shift: &mut Shift, is_shifted: bool) {
        let Some(last) = self.sent else { return };
        let wire = value.wrapping_add(shift.timestamp);
        if !after(last, wire) {
            self.sent = Some(wire);
        } else if is_shifted {
            shift.timestamp = shift.timestamp.wrapping_add(last.wrapping_sub(wire));
        }
    }

    /// Notes a timestamp of the peer's.
    pub fn note_peer(&mut self, value: u32) {
        self.peer = Some(self.peer.map_or(value, |last| later(last, value)));
    }
}
