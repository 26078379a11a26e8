//! A half of a connection taken over by a twin, and given back: what pipes ask of a [`Flow`].

use crate::flow::{Flow, Reservation};
use crate::receive::Passage;
use crate::segment::{after, later};
use crate::send::MAX_BACK;
use crate::types::{FlowError, FlowSnapshot, ReceiveStart};

/// Answer to [`Tracker::snapshot`](crate::Tracker::snapshot).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Snapshot {
    /// The guest's last bytes are still on their way;
    /// [`FlowEvent::Settled`](crate::FlowEvent::Settled) will tell.
    Waiting,
    /// All bytes of the guest's have passed.
    Ready(FlowSnapshot),
}

/// Answer to [`Tracker::relief`](crate::Tracker::relief).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relief {
    /// Numbers of the next twin, which begins with the first byte that the peer has not
    /// acknowledged.
    pub state: FlowSnapshot,
    /// Bytes of the twin that the peer has acknowledged.
    pub acked_bytes: u32,
    /// Bytes behind these that were sent.
    pub sent_bytes: u32,
}

/// Numbers of two resets: sequence and acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resets {
    pub to_peer: (u32, u32),
    pub to_guest: (u32, u32),
}

impl Flow {
    /// Numbers of another twin that takes the place of the one that sends.
    pub fn relief(&self, token: u64) -> Result<Relief, FlowError> {
        let twin = self.send.twin_of(token).ok_or(FlowError::Unknown)?;
        let send_seq = later(self.send.acked, twin.start);
        let numbers = self.numbers();
        let state = FlowSnapshot { send_seq, receive_seq: twin.receive_seq, ..numbers };
        let acked_bytes = send_seq.wrapping_sub(twin.start);
        Ok(Relief { state, acked_bytes, sent_bytes: self.send.end.wrapping_sub(send_seq) })
    }

    /// Numbers of a sending twin, once everything that the guest has sent passed by.
    pub fn snapshot(&mut self, sent_bytes: u64, token: u64) -> Result<Snapshot, FlowError> {
        if self.reset || self.send.is_closed {
            return Err(FlowError::Closing);
        }
        self.check_free(token)?;
        let base = self.send.base.ok_or(FlowError::Unknown)?;
        let sent_end = base.wrapping_add(sent_bytes as u32).wrapping_add(self.shift.send);
        if after(self.send.end, sent_end) {
            // Another thread of the program goes on writing.
            self.reservation = None;
            return Err(FlowError::Changed);
        }
        let is_told = self.send.end == sent_end;
        self.reservation = Some(Reservation { sent_end, token, is_told });
        Ok(if is_told { Snapshot::Ready(self.numbers()) } else { Snapshot::Waiting })
    }

    fn check_free(&self, token: u64) -> Result<(), FlowError> {
        if !self.is_heard || self.is_fragmented {
            return Err(FlowError::Unknown);
        }
        let is_reserved = self.reservation.is_some_and(|other| other.token != token);
        if self.has_twin() || is_reserved { Err(FlowError::Busy) } else { Ok(()) }
    }

    fn numbers(&self) -> FlowSnapshot {
        FlowSnapshot {
            send_seq: self.send.end,
            receive_seq: self.receive.end,
            acked_seq: self.send.acked,
            send_window: self.send.window,
            receive_window: self.receive.guest_window,
            timestamp: self.clock.sent.unwrap_or(0),
        }
    }

    /// Takes the reservation of that pipe away. False: it has none.
    fn take_reservation(&mut self, token: u64) -> bool {
        self.reservation.take_if(|reservation| reservation.token == token).is_some()
    }

    fn take_own_reservation(&mut self, token: u64) -> Result<(), FlowError> {
        match self.take_reservation(token) {
            true => Ok(()),
            false => Err(if self.reset { FlowError::Closing } else { FlowError::Busy }),
        }
    }

    /// Begins a sending twin.
    pub fn start(
        &mut self,
        token: u64,
        snapshot: &FlowSnapshot,
        len: u32,
    ) -> Result<(), FlowError> {
        self.take_own_reservation(token)?;
        if self.send.end != snapshot.send_seq || self.send.is_closed || self.is_fragmented {
            return Err(FlowError::Changed);
        }
        self.send.start(token, snapshot, len);
        Ok(())
    }

    /// The twin has gone, and the peer has all its bytes: the guest goes on behind them. If the
    /// peer has not, there is no way on but to [`Flow::give_up`].
    pub fn finish(&mut self, token: u64, len: u32) -> Result<(), FlowError> {
        self.take_reservation(token);
        let sent_bytes = self.send.finish(token, len)?;
        self.shift.send = self.shift.send.wrapping_add(sent_bytes);
        Ok(())
    }

    /// Numbers of a receiving twin; the guest has received `received_bytes`.
    pub fn receive_snapshot(
        &mut self,
        received_bytes: u64,
        token: u64,
    ) -> Result<FlowSnapshot, FlowError> {
        self.check_free(token)?;
        self.own_bytes(received_bytes)?;
        let sent_end = self.send.end;
        self.reservation = Some(Reservation { sent_end, token, is_told: true });
        Ok(self.numbers())
    }

    /// Bytes that have passed, and that the guest has not counted.
    fn own_bytes(&self, received_bytes: u64) -> Result<u32, FlowError> {
        if self.reset || self.receive.is_closed {
            return Err(FlowError::Closing);
        }
        let base = self.receive.base.filter(|_| self.is_open).ok_or(FlowError::Unknown)?;
        let received = base.wrapping_add(received_bytes as u32).wrapping_add(self.shift.receive);
        let own_bytes = self.receive.end.wrapping_sub(received);
        let is_sane = self.receive.passage == Passage::Known && own_bytes <= MAX_BACK;
        if is_sane { Ok(own_bytes) } else { Err(FlowError::Changed) }
    }

    /// Begins a receiving twin, if there is anything for it.
    pub fn receive_start(
        &mut self,
        token: u64,
        snapshot: &FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, FlowError> {
        self.take_own_reservation(token)?;
        let own_bytes = self.own_bytes(received_bytes)?;
        let twin_bytes = wanted_bytes.saturating_sub(own_bytes).min(MAX_BACK);
        let offset = self.receive.end.wrapping_sub(snapshot.receive_seq);
        if offset > MAX_BACK || self.is_fragmented {
            return Err(FlowError::Changed);
        }
        if twin_bytes > 0 {
            let send = (self.send.acked, self.send.window);
            self.receive.start(token, snapshot, twin_bytes, send);
        }
        Ok(ReceiveStart { own_bytes, twin_bytes })
    }

    /// Ends a receiving twin's part where it is. Returns how many bytes it has.
    pub fn receive_stop(&mut self, token: u64, taken_bytes: u32) -> Result<u32, FlowError> {
        let len = self.receive.stop(token, taken_bytes)?;
        self.join();
        Ok(len)
    }

    /// The guest has read all that is in front of the twin's bytes, as its agent says: its kernel
    /// may be slow to acknowledge that.
    pub fn receive_own(&mut self, token: u64) -> Result<(), FlowError> {
        let twin = *self.receive.twin_of(token).ok_or(FlowError::Unknown)?;
        if !twin.is_joined {
            self.receive.guest_ack = later(self.receive.guest_ack, twin.from);
            self.join();
        }
        Ok(())
    }

    /// The twin has gone, and `len` bytes were taken from it: the guest goes on behind them. If the
    /// peer was told that more arrived, or the twin had all, there is no way on but to
    /// [`Flow::give_up`].
    pub fn receive_finish(&mut self, token: u64, len: u32) -> Result<(), FlowError> {
        self.take_reservation(token);
        if self.receive.finish(token, len)? {
            self.join();
        }
        Ok(())
    }

    /// Ends a connection that has lost bytes of a twin: nothing of the guest's may follow them.
    /// None: that pipe has no twin here.
    pub fn give_up(&mut self, token: u64) -> Option<Resets> {
        self.take_reservation(token);
        let expected = match self.receive.give_up(token, &mut self.shift) {
            Some(expected) => expected,
            None => {
                let sent_bytes = self.send.give_up(token)?;
                self.shift.send = self.shift.send.wrapping_add(sent_bytes);
                // What the peer sent last, the guest may have without a word yet. If it has not,
                // the number is one of its window still, and it asks the peer.
                self.receive.end
            }
        };
        (self.reset, self.is_broken) = (true, true);
        let acked = self.send.acked;
        Some(Resets { to_peer: (acked, self.receive.guest_ack), to_guest: (expected, acked) })
    }
}

#[cfg(test)]
mod tests;
