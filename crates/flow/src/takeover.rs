//! A half of a connection taken over by a twin, and given back.

use crate::receive::Receiving;
use crate::segment::{ACK, Answer, Editor, FIN, Segment, after, later};
use crate::sending::Sending;
use crate::state::{Flow, MAX_BACK, Passed, Settling};
use crate::{FlowError, FlowEvent, FlowSnapshot, ReceiveStart};

/// See [`Flow::snapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Snapshot {
    /// The guest's last bytes are still on their way; [`FlowEvent::Settled`] will tell.
    Waiting,
    /// Here it is.
    Ready(FlowSnapshot),
}

/// See [`Flow::relief`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relief {
    /// It begins with the first byte that the peer has not acknowledged.
    pub state: FlowSnapshot,
    /// Bytes of the twin that the peer has acknowledged.
    pub acked_bytes: u32,
    /// Bytes behind these that were sent.
    pub sent_bytes: u32,
}

impl Flow {
    /// The pipe whose twin that is.
    pub fn twin_token(&self) -> Option<u64> {
        let receivers = self.receiving.filter(|receiving| !receiving.is_gone);
        self.twin.map(|twin| twin.token).or(receivers.map(|receiving| receiving.token))
    }

    /// The pipe that has it, or is about to.
    pub fn token(&self) -> Option<u64> {
        self.twin_token().or(self.settling.map(|settling| settling.token))
    }

    /// What another twin must know that takes the place of the one that sends.
    pub fn relief(&self, token: u64) -> Result<Relief, FlowError> {
        let twin = self.twin.filter(|twin| twin.token == token).ok_or(FlowError::Unknown)?;
        let send_seq = later(self.acked, twin.start);
        let state = FlowSnapshot { send_seq, receive_seq: twin.receive_seq, ..self.taken() };
        let acked_bytes = send_seq.wrapping_sub(twin.start);
        Ok(Relief { state, acked_bytes, sent_bytes: self.sent_end.wrapping_sub(send_seq) })
    }

    /// What a twin needs to know, once everything that the guest has sent passed by.
    pub fn snapshot(&mut self, sent_bytes: u64, token: u64) -> Result<Snapshot, FlowError> {
        if self.reset || self.guest_fin {
            return Err(FlowError::Closing);
        }
        self.check_free(token)?;
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
        Ok(Snapshot::Ready(self.taken()))
    }

    fn check_free(&self, token: u64) -> Result<(), FlowError> {
        if !self.is_heard || self.is_fragmented {
            return Err(FlowError::Unknown);
        }
        let is_reserved = self.settling.is_some_and(|other| other.token != token);
        if self.has_twin() || is_reserved { Err(FlowError::Busy) } else { Ok(()) }
    }

    fn taken(&self) -> FlowSnapshot {
        FlowSnapshot {
            send_seq: self.sent_end,
            receive_seq: self.peer_end,
            acked_seq: self.acked,
            send_window: self.peer_window,
            receive_window: self.guest_window,
            timestamp: self.timestamp.unwrap_or(0),
        }
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
        if self.sent_end != taken.send_seq || self.guest_fin || self.is_fragmented {
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

    /// What a receiving twin needs to know; the guest has received so many bytes.
    pub fn receive_snapshot(
        &mut self,
        received_bytes: u64,
        token: u64,
    ) -> Result<FlowSnapshot, FlowError> {
        self.check_free(token)?;
        self.own_bytes(received_bytes)?;
        self.settling = Some(Settling { expected: self.sent_end, token, is_told: true });
        Ok(self.taken())
    }

    /// Bytes that have passed, and that the guest has not counted.
    fn own_bytes(&self, received_bytes: u64) -> Result<u32, FlowError> {
        if self.reset || self.peer_fin {
            return Err(FlowError::Closing);
        }
        let base = self.receive_base.filter(|_| self.is_open).ok_or(FlowError::Unknown)?;
        let received = base.wrapping_add(received_bytes as u32).wrapping_add(self.shift.receive);
        let own_bytes = self.peer_end.wrapping_sub(received);
        let is_sane = self.passed == Passed::Known && own_bytes <= MAX_BACK;
        if is_sane { Ok(own_bytes) } else { Err(FlowError::Changed) }
    }

    /// From now on the twin receives, if there is anything for it.
    pub fn receive_start(
        &mut self,
        token: u64,
        taken: &FlowSnapshot,
        received_bytes: u64,
        wanted_bytes: u32,
    ) -> Result<ReceiveStart, FlowError> {
        if !self.unsettle(token) {
            return Err(if self.reset { FlowError::Closing } else { FlowError::Busy });
        }
        let own_bytes = self.own_bytes(received_bytes)?;
        let twin_bytes = wanted_bytes.saturating_sub(own_bytes).min(MAX_BACK);
        let (from, offset) = (self.peer_end, self.peer_end.wrapping_sub(taken.receive_seq));
        if offset > MAX_BACK || self.is_fragmented {
            return Err(FlowError::Changed);
        }
        if twin_bytes == 0 {
            return Ok(ReceiveStart { own_bytes, twin_bytes });
        }
        let window = u32::from(taken.receive_window) << self.guest_scale;
        self.receiving = Some(Receiving {
            token,
            from,
            end: from.wrapping_add(twin_bytes),
            got: from,
            window: taken.receive_window,
            edge: from.wrapping_add(window),
            offset,
            send_seq: taken.send_seq,
            echo: None,
            fin: None,
            ended_told: false,
            guest_acked: self.acked,
            guest_window: self.peer_window,
            is_joined: false,
            is_gone: false,
        });
        Ok(ReceiveStart { own_bytes, twin_bytes })
    }

    fn receiver(&mut self, token: u64) -> Option<&mut Receiving> {
        self.receiving.as_mut().filter(|r| r.token == token && !r.is_gone)
    }

    /// The twin gets no more than it has taken, or the peer was told. Returns how much that is.
    pub fn receive_stop(&mut self, token: u64, taken_bytes: u32) -> Result<u32, FlowError> {
        let told = self.wire_ack();
        let receiving = self.receiver(token).ok_or(FlowError::Unknown)?;
        if taken_bytes > receiving.len() {
            return Err(FlowError::Changed);
        }
        // With all of them there, the guest may have bytes from behind them already.
        if !receiving.is_done() {
            receiving.end = later(receiving.from.wrapping_add(taken_bytes), told);
            // It has what it has told, and what was taken from it.
            receiving.got = receiving.end;
        }
        let len = receiving.len();
        self.join();
        Ok(len)
    }

    /// The guest has read all that is in front of the twin's bytes, as its agent says: its kernel may be
    /// slow to acknowledge that.
    pub fn receive_own(&mut self, token: u64) -> Result<(), FlowError> {
        let receiving = self.receiver(token).copied().ok_or(FlowError::Unknown)?;
        if !receiving.is_joined {
            self.guest_ack = later(self.guest_ack, receiving.from);
            self.join();
        }
        Ok(())
    }

    /// The twin has gone, and `len` bytes were taken from it: the guest goes on behind them. If the
    /// peer was told that more arrived, or the twin had all, there is no way on but to
    /// [`Flow::give_up`].
    pub fn receive_finish(&mut self, token: u64, len: u32) -> Result<(), FlowError> {
        self.unsettle(token);
        let told = self.wire_ack();
        let Some(receiving) = self.receiver(token) else { return Ok(()) };
        let end = receiving.from.wrapping_add(len);
        let is_right = match receiving.is_done() {
            true => len == receiving.len(),
            false => !after(told, end) && !after(end, receiving.end),
        };
        if !is_right {
            return Err(FlowError::Broken);
        }
        if receiving.is_joined {
            self.receiving = None;
            return Ok(());
        }
        (receiving.end, receiving.got, receiving.is_gone) = (end, end, true);
        self.join();
        Ok(())
    }

    /// What the peer is to know now: what has arrived, and how much the guest takes.
    pub fn to_peer(&self) -> Answer {
        Answer {
            flags: ACK,
            seq: self.sent_end,
            ack: self.wire_ack(),
            window: self.wire_window(),
            timestamps: self.timestamp.zip(self.peer_timestamp),
        }
    }

    /// The peer's end, if it stands at the guest's next byte, in the wire's numbers.
    pub fn fin_to_guest(&self, fin: Option<u32>) -> Option<Answer> {
        let is_next = fin == Some(self.guest_ack) && self.receiving.is_none();
        is_next.then(|| Answer {
            flags: FIN | ACK,
            seq: self.guest_ack,
            ack: self.acked,
            window: self.peer_window,
            timestamps: self.peer_timestamp.zip(self.timestamp),
        })
    }

    /// Bytes of the twin are lost: nothing of the guest's may follow them. Returns the numbers of a
    /// reset to the peer and of one to the guest; none: the twin of that token is not here.
    pub fn give_up(&mut self, token: u64) -> Option<((u32, u32), (u32, u32))> {
        self.unsettle(token);
        if let Some(receiving) = self.receiver(token).copied() {
            return Some(self.give_up_receiver(&receiving));
        }
        let twin = self.twin.take_if(|twin| twin.token == token)?;
        (self.reset, self.is_broken) = (true, true);
        let sent = later(self.acked, twin.start).wrapping_sub(twin.start);
        self.shift.send = self.shift.send.wrapping_add(sent);
        // What the peer sent last, the guest may have without a word yet. If it has not, the number is
        // one of its window still, and it asks the peer.
        Some(((self.acked, self.guest_ack), (self.peer_end, self.acked)))
    }

    fn give_up_receiver(&mut self, receiving: &Receiving) -> ((u32, u32), (u32, u32)) {
        let told = self.wire_ack();
        (self.reset, self.is_broken) = (true, true);
        self.receiving = None;
        let expected = match receiving.is_joined {
            true => self.peer_end,
            // All of its own the guest has, most likely.
            false => {
                let lost = later(told, receiving.from).wrapping_sub(receiving.from);
                self.shift.receive = self.shift.receive.wrapping_add(lost);
                self.guest_ack = told;
                receiving.from.wrapping_add(lost)
            }
        };
        ((self.acked, told), (expected, self.acked))
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
mod tests;
