//! The sending half of a connection taken over by a twin, and given back.

use super::segment::{ACK, Editor, Segment, after, later};
use super::state::{Flow, Sending, Settling};
use super::{FlowError, FlowEvent, FlowSnapshot};

/// See [`Flow::snapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Snapshot {
    /// The guest's last bytes are still on their way; [`FlowEvent::Settled`] will tell.
    Waiting,
    /// Here it is.
    Ready(FlowSnapshot),
}

impl Flow {
    /// What a twin needs to know, once everything that the guest has sent passed by.
    pub fn snapshot(&mut self, sent_bytes: u64, token: u64) -> Result<Snapshot, FlowError> {
        if self.reset || self.guest_fin {
            return Err(FlowError::Closing);
        }
        if self.twin.is_some() || self.settling.is_some_and(|other| other.token != token) {
            return Err(FlowError::Busy);
        }
        let base = self.send_base.ok_or(FlowError::Unknown)?;
        let expected = base.wrapping_add(sent_bytes as u32).wrapping_add(self.shift.send);
        if after(self.sent_end, expected) {
            // Another thread of the program goes on writing.
            self.settling = None;
            return Err(FlowError::Changed);
        }
        let is_told = self.sent_end == expected;
        self.settling = Some(Settling { expected, token, is_told });
        if !is_told {
            return Ok(Snapshot::Waiting);
        }
        Ok(Snapshot::Ready(FlowSnapshot {
            send_seq: self.sent_end,
            receive_seq: self.peer_end,
            acked_seq: self.acked,
            send_window: self.peer_window,
            receive_window: self.guest_window,
            timestamp: self.timestamp.unwrap_or(0),
        }))
    }

    /// Tells the pipe that waits for the guest's last bytes, once.
    pub fn tell_settled(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        if let Some(settling) = self.settling.as_mut()
            && !settling.is_told
            && !after(settling.expected, self.sent_end)
        {
            settling.is_told = true;
            tell(settling.token, FlowEvent::Settled);
        }
    }

    fn unsettle(&mut self, token: u64) -> bool {
        self.settling.take_if(|settling| settling.token == token).is_some()
    }

    /// From now on the twin sends.
    pub fn start(&mut self, token: u64, taken: &FlowSnapshot, len: u32) -> Result<(), FlowError> {
        if !self.unsettle(token) {
            return Err(if self.reset { FlowError::Closing } else { FlowError::Busy });
        }
        if self.sent_end != taken.send_seq || self.guest_fin {
            return Err(FlowError::Changed);
        }
        let start = taken.send_seq;
        self.twin = Some(Sending {
            start,
            target: start.wrapping_add(len),
            target_told: false,
            receive_seq: taken.receive_seq,
            token,
            guest_acked: self.acked,
        });
        Ok(())
    }

    /// The twin has been given less than was said. True: all of it is acknowledged already.
    pub fn retarget(&mut self, token: u64, len: u32) -> bool {
        let acked = self.acked;
        let Some(twin) = self.twin.as_mut().filter(|twin| twin.token == token) else {
            return false;
        };
        twin.target = twin.start.wrapping_add(len);
        twin.target_told = !after(twin.target, acked);
        twin.target_told
    }

    /// The twin has gone, and the peer has all its bytes: the guest goes on behind them. If the peer has
    /// not, there is no way on but to [`Flow::give_up`].
    pub fn finish(&mut self, token: u64, len: u32) -> Result<(), FlowError> {
        self.unsettle(token);
        let Some(twin) = self.twin.filter(|twin| twin.token == token) else { return Ok(()) };
        let end = twin.start.wrapping_add(len);
        // Of a twin that sent nothing, nothing can be lost.
        if self.sent_end != end || (len > 0 && after(end, self.acked)) {
            return Err(FlowError::Broken);
        }
        self.twin = None;
        if len > 0 {
            self.shift.send = self.shift.send.wrapping_add(len);
            self.guest_from = end;
        }
        Ok(())
    }

    /// Bytes of the twin are lost: nothing of the guest's may follow them. Returns the numbers of a
    /// reset to the peer and of one to the guest; none: the twin of that token is not here.
    pub fn give_up(&mut self, token: u64) -> Option<((u32, u32), (u32, u32))> {
        self.unsettle(token);
        let twin = self.twin.take_if(|twin| twin.token == token)?;
        (self.reset, self.is_broken) = (true, true);
        let sent = later(self.acked, twin.start).wrapping_sub(twin.start);
        self.shift.send = self.shift.send.wrapping_add(sent);
        // What the peer sent last, the guest may have without a word yet. If it has not, the number is
        // one of its window still, and it asks the peer.
        Some(((self.acked, self.guest_ack), (self.peer_end, self.acked)))
    }

    /// Makes a segment of the guest's one that has the peer speak: what it says is answered with a reset
    /// that has the right number. Returns its length.
    pub fn edit_prompt(&self, eth: &mut [u8], segment: &Segment, summed: bool) -> usize {
        let timestamps = segment.timestamps(eth);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(self.acked.wrapping_sub(1));
        editor.set_ack(self.guest_ack);
        editor.set_flags(ACK);
        editor.map_sacks(|_, _| None);
        if let Some((value, echo)) = timestamps {
            let value = value.wrapping_add(self.shift.timestamp);
            editor.set_timestamps(self.timestamp.map_or(value, |last| later(last, value)), echo);
        }
        editor.strip()
    }

    /// Sequence and acknowledgement, in the guest's numbers, of a segment that makes it say where it is:
    /// an old one, as a keepalive probe has (RFC 9293, 3.8.4).
    pub fn prompt(&self) -> (u32, u32) {
        let received = self.guest_ack.wrapping_sub(self.shift.receive);
        (received.wrapping_sub(1), self.acked.wrapping_sub(self.shift.send))
    }
}

#[cfg(test)]
#[path = "takeover_tests.rs"]
mod tests;
