//! One connection of a guest: what was seen of it, who sends for it, and how its numbers differ from
//! those on the wire. All sequence numbers kept here are the wire's.

use super::segment::{ACK, ECE, Editor, FIN, RST, SYN, Segment, after, later};
use super::{FlowError, FlowEvent, FlowSnapshot};

/// What the guest's numbers lack: they are behind the wire's by so much.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shift {
    /// Bytes that twins sent for the guest.
    pub send: u32,
    /// Bytes that twins received for it.
    pub receive: u32,
    /// Ticks that its timestamps are behind those of its twins.
    pub timestamp: u32,
}

impl Shift {
    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A twin sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sending {
    /// First byte that is the twin's.
    pub start: u32,
    /// Acknowledged so far, the twin has nothing more to do.
    target: u32,
    target_told: bool,
    /// The peer's number that the twin waits for, for ever.
    receive_seq: u32,
    /// Names it in events.
    pub token: u64,
    /// What the guest was told to be acknowledged.
    guest_acked: u32,
}

/// What becomes of a segment that the guest sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FromGuest {
    /// It goes on, changed or not.
    Pass,
    /// It goes on without its payload, so long.
    Bare(usize),
    /// It ends here: the guest will send it again.
    Drop,
    /// It is a probe: we answer in the peer's place.
    Answer,
}

/// Who gets a segment of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ToLocal {
    pub guest: bool,
    pub twin: bool,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// The guest's own number of its first byte; none: its SYN was not seen.
    send_base: Option<u32>,
    /// Behind the last byte that was sent, by guest or twin.
    sent_end: u32,
    /// The peer has everything before.
    acked: u32,
    /// The guest has everything before.
    guest_ack: u32,
    guest_window: u16,
    /// Its last segment told of congestion.
    guest_ece: bool,
    /// Behind the last byte that the peer sent.
    peer_end: u32,
    peer_window: u16,
    peer_timestamp: u32,
    /// The last timestamp sent; none: the connection has none.
    timestamp: Option<u32>,
    /// What the guest sends now begins here: older numbers were a twin's, or are acknowledged.
    guest_from: u32,
    pub shift: Shift,
    /// Where the guest's last segment went, and from which address.
    pub macs: [u8; 12],
    guest_fin: bool,
    peer_fin: bool,
    pub reset: bool,
    pub twin: Option<Sending>,
    /// A pipe is about to begin, or waits for the guest's bytes up to there.
    pub settling: Option<(u32, u64)>,
    pub seen_ns: u64,
}

impl Flow {
    /// Whether its segments are changed: it must not be forgotten.
    pub fn is_shifted(&self) -> bool {
        self.twin.is_some() || !self.shift.is_none()
    }

    /// Whether it is used or shifted.
    pub fn is_needed(&self) -> bool {
        self.is_shifted() || self.settling.is_some()
    }

    /// Whether nothing more is to be expected of it but stragglers.
    pub fn is_over(&self) -> bool {
        self.reset || (self.guest_fin && self.peer_fin)
    }

    /// A SYN of the guest's: a new connection, whatever was there before.
    pub fn begin(eth: &[u8], segment: &Segment) -> Self {
        let mut flow = Self {
            send_base: Some(segment.seq.wrapping_add(1)),
            sent_end: segment.end(),
            acked: segment.seq,
            guest_from: segment.seq,
            guest_ack: segment.ack,
            peer_end: segment.ack,
            guest_window: segment.window,
            timestamp: segment.timestamps(eth).map(|(value, _)| value),
            ..Self::default()
        };
        flow.note_macs(eth);
        flow
    }

    fn note_macs(&mut self, eth: &[u8]) {
        self.macs.copy_from_slice(&eth[..12]);
    }

    /// A segment of the guest's. Events go to `tell`.
    pub fn guest_sends(
        &mut self,
        eth: &mut [u8],
        segment: &Segment,
        summed: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> FromGuest {
        self.note_macs(eth);
        let seq = segment.seq.wrapping_add(self.shift.send);
        let end = segment.end().wrapping_add(self.shift.send);
        if segment.has(ACK) {
            self.note_guest_ack(segment);
        }
        let answer = match self.twin {
            Some(_) => self.beside_twin(segment, seq, end, tell),
            None => {
                self.guest_fin |= segment.has(FIN);
                self.sent_end = later(self.sent_end, end);
                FromGuest::Pass
            }
        };
        if segment.has(RST) {
            self.end_by_reset(tell);
        }
        self.tell_settled(tell);
        // A segment that ends here changes nothing; a resend of it comes again as it was.
        if !matches!(answer, FromGuest::Pass | FromGuest::Bare(_)) {
            return answer;
        }
        // What carries no bytes stands behind all that was sent, as the peer expects it.
        let is_bare = answer != FromGuest::Pass || self.twin.is_some_and(|t| !after(t.start, seq));
        let seq = if is_bare { self.sent_end } else { seq };
        self.edit_from_guest(eth, segment, summed, seq);
        match answer {
            FromGuest::Bare(_) => FromGuest::Bare(Editor::new(eth, segment, summed).strip()),
            other => other,
        }
    }

    fn note_guest_ack(&mut self, segment: &Segment) {
        let ack = segment.ack.wrapping_add(self.shift.receive);
        if !after(self.guest_ack, ack) {
            self.guest_ack = ack;
            self.guest_window = segment.window;
            self.guest_ece = segment.has(ECE) && !segment.has(SYN);
        }
    }

    /// The guest sends while a twin sends for it: what it sent before may be sent again, what comes
    /// now has to wait, and what it acknowledges goes on.
    fn beside_twin(
        &mut self,
        segment: &Segment,
        seq: u32,
        end: u32,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> FromGuest {
        let acked = self.acked;
        let Some(twin) = self.twin.as_mut() else { return FromGuest::Pass };
        if segment.has(RST) {
            tell(twin.token, FlowEvent::Reset);
            return FromGuest::Pass;
        }
        // A keepalive probe, or one of a closed window: an old byte or none, in front of what the
        // guest sends next, all before it acknowledged.
        let is_all_acked = !after(twin.start, acked);
        if segment.payload_len <= 1 && seq == twin.start.wrapping_sub(1) && is_all_acked {
            return FromGuest::Answer;
        }
        if !after(end, twin.start) {
            // It does not know that the peer has these: the next acknowledgement is for it too.
            if end != seq && after(twin.guest_acked, seq) {
                twin.guest_acked = seq;
            }
            return FromGuest::Pass;
        }
        // A part of it may be old; its resend after the pipe brings it all.
        if segment.has(ACK) { FromGuest::Bare(0) } else { FromGuest::Drop }
    }

    fn edit_from_guest(&mut self, eth: &mut [u8], segment: &Segment, summed: bool, seq: u32) {
        let timestamps = segment.timestamps(eth);
        if let Some((value, _)) = timestamps {
            self.advance_clock(value);
        }
        if !self.is_shifted() {
            return;
        }
        let shift = self.shift;
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(seq);
        if segment.has(ACK) {
            editor.set_ack(segment.ack.wrapping_add(shift.receive));
        }
        let up = |n: u32| n.wrapping_add(shift.receive);
        editor.map_sacks(|left, right| Some((up(left), up(right))));
        if let Some((value, echo)) = timestamps {
            editor.set_timestamps(value.wrapping_add(shift.timestamp), echo);
        }
    }

    /// Timestamps never go back (RFC 7323, 4.3): a guest whose clock is behind its twin's is moved up.
    fn advance_clock(&mut self, value: u32) {
        let Some(last) = self.timestamp else { return };
        let wire = value.wrapping_add(self.shift.timestamp);
        if !after(last, wire) {
            self.timestamp = Some(wire);
        } else if self.is_shifted() {
            self.shift.timestamp = self.shift.timestamp.wrapping_add(last.wrapping_sub(wire));
        }
    }

    /// The peer's next segment; tells who gets it. Nothing is changed yet.
    pub fn peer_sends(
        &mut self,
        eth: &[u8],
        segment: &Segment,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> ToLocal {
        if segment.has(SYN) {
            if segment.has(ACK) {
                self.peer_end = segment.end();
            }
            return ToLocal { guest: true, twin: false };
        }
        if segment.has(RST) {
            if let Some(twin) = self.twin {
                tell(twin.token, FlowEvent::Reset);
            }
            self.end_by_reset(tell);
            return ToLocal { guest: true, twin: false };
        }
        self.peer_fin |= segment.has(FIN);
        self.peer_end = later(self.peer_end, segment.end());
        if let Some((value, _)) = segment.timestamps(eth) {
            self.peer_timestamp = later(self.peer_timestamp, value);
        }
        // Nobody can have what was never sent.
        let is_sane = segment.has(ACK) && !after(segment.ack, self.sent_end);
        if is_sane && !after(self.acked, segment.ack) {
            self.acked = segment.ack;
            self.peer_window = segment.window;
        }
        let Some(twin) = self.twin.as_mut() else { return ToLocal { guest: true, twin: false } };
        if !is_sane {
            return ToLocal { guest: segment.payload_len > 0 || segment.has(FIN), twin: false };
        }
        let for_guest = if after(segment.ack, twin.start) { twin.start } else { segment.ack };
        let is_news = after(for_guest, twin.guest_acked);
        let is_twins = !after(twin.start, segment.ack);
        let (token, is_done) = (twin.token, !after(twin.target, segment.ack));
        if is_done && !std::mem::replace(&mut twin.target_told, true) {
            tell(token, FlowEvent::Acknowledged);
        }
        let has_data = segment.payload_len > 0 || segment.has(FIN);
        // What acknowledges old bytes of the guest's twice may be its loss: its business.
        ToLocal { guest: has_data || is_news || !is_twins, twin: is_twins }
    }

    /// The guest got this segment.
    pub fn told_guest(&mut self, segment: &Segment) {
        if let Some(twin) = self.twin.as_mut()
            && segment.has(ACK)
            && !after(segment.ack, self.sent_end)
        {
            let ack = if after(segment.ack, twin.start) { twin.start } else { segment.ack };
            twin.guest_acked = later(twin.guest_acked, ack);
        }
    }

    fn end_by_reset(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        self.reset = true;
        if let Some((_, token)) = self.settling.take() {
            tell(token, FlowEvent::Reset);
        }
    }

    /// Makes a segment of the peer's one for the guest.
    pub fn edit_for_guest(&self, eth: &mut [u8], segment: &Segment, summed: bool) {
        // A SYN is for a new connection, whose numbers are nobody's yet.
        if !self.is_shifted() || segment.has(SYN) {
            return;
        }
        let shift = self.shift;
        let limit = self.twin.map(|twin| twin.start);
        let timestamps = segment.timestamps(eth);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(segment.seq.wrapping_sub(shift.receive));
        if segment.has(ACK) {
            let ack = limit.filter(|&l| after(segment.ack, l)).unwrap_or(segment.ack);
            editor.set_ack(ack.wrapping_sub(shift.send));
        }
        let from = self.guest_from;
        editor.map_sacks(|left, right| {
            let is_guests = !after(from, left) && limit.is_none_or(|l| !after(right, l));
            is_guests.then_some((left.wrapping_sub(shift.send), right.wrapping_sub(shift.send)))
        });
        if let Some((value, echo)) = timestamps {
            editor.set_timestamps(value, echo.wrapping_sub(shift.timestamp));
        }
    }

    /// Makes a segment of the peer's one for the twin, which only hears what is acknowledged; `true`:
    /// the payload must be summed first, since it goes. Returns the frame's length.
    pub fn edit_for_twin(&self, eth: &mut [u8], segment: &Segment, summed: bool) -> usize {
        let Some(twin) = self.twin else { return 0 };
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(twin.receive_seq);
        editor.clear_flags(FIN | super::segment::PSH | super::segment::URG);
        if segment.payload_len > 0 || !summed {
            return editor.strip();
        }
        segment.headers_len()
    }

    /// A segment of the twin's: it gets the guest's side of what it says. False: it has nothing to say.
    pub fn edit_from_twin(&mut self, eth: &mut [u8], segment: &Segment, summed: bool) -> bool {
        let Some(twin) = self.twin else { return false };
        let is_its_own = !after(twin.start.wrapping_sub(1), segment.seq);
        if segment.has(RST | SYN | FIN) || !segment.has(ACK) || !is_its_own {
            return false;
        }
        self.sent_end = later(self.sent_end, segment.end());
        let timestamps = segment.timestamps(eth);
        eth[..12].copy_from_slice(&self.macs);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_ack(self.guest_ack);
        editor.set_window(self.guest_window);
        if !self.guest_ece {
            editor.clear_flags(ECE);
        }
        if let (Some((value, _)), Some(last)) = (timestamps, self.timestamp) {
            let value = later(last, value);
            self.timestamp = Some(value);
            editor.set_timestamps(value, self.peer_timestamp);
        }
        true
    }

    /// The answer to a probe of the guest's: sequence, acknowledgement, timestamps, all the guest's.
    pub fn answer_to_probe(&self, eth: &[u8], segment: &Segment) -> (u32, u32, Option<(u32, u32)>) {
        let start = self.twin.map_or(self.sent_end, |twin| twin.start);
        let seq = self.guest_ack.wrapping_sub(self.shift.receive);
        let echo = segment.timestamps(eth).map(|(value, _)| (self.peer_timestamp, value));
        (seq, start.wrapping_sub(self.shift.send), echo)
    }

    /// What a twin needs to know, once everything that the guest has sent passed by.
    pub fn snapshot(&mut self, sent_bytes: u64, token: u64) -> Result<Snapshot, FlowError> {
        if self.reset || self.guest_fin {
            return Err(FlowError::Closing);
        }
        if self.twin.is_some() || self.settling.is_some_and(|(_, other)| other != token) {
            return Err(FlowError::Busy);
        }
        let base = self.send_base.ok_or(FlowError::Unknown)?;
        let expected = base.wrapping_add(sent_bytes as u32).wrapping_add(self.shift.send);
        if after(self.sent_end, expected) {
            // Another thread of the program goes on writing.
            self.settling = None;
            return Err(FlowError::Changed);
        }
        self.settling = Some((expected, token));
        if self.sent_end != expected {
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

    fn tell_settled(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        if let Some((expected, token)) = self.settling
            && !after(expected, self.sent_end)
        {
            tell(token, FlowEvent::Settled);
        }
    }

    /// From now on the twin sends.
    pub fn start(&mut self, token: u64, taken: &FlowSnapshot, len: u32) -> Result<(), FlowError> {
        if self.settling.take_if(|(_, other)| *other == token).is_none() {
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

    /// The twin has gone, and the peer has all its bytes: the guest goes on behind them.
    pub fn finish(&mut self, token: u64, len: u32) -> Result<(), FlowError> {
        self.settling.take_if(|(_, other)| *other == token);
        let Some(twin) = self.twin.take_if(|twin| twin.token == token) else { return Ok(()) };
        self.shift.send = self.shift.send.wrapping_add(len);
        self.guest_from = twin.start.wrapping_add(len);
        if self.sent_end == self.guest_from && !after(self.guest_from, self.acked) {
            return Ok(());
        }
        // Somebody has bytes that nobody will ever send again: there is no way on.
        self.reset = true;
        Err(FlowError::Broken)
    }
}

impl Flow {
    /// Bytes of the twin are lost. Returns the numbers of a reset to the peer and of one to the guest;
    /// none: the twin of that token is not here.
    pub fn give_up(&mut self, token: u64) -> Option<((u32, u32), (u32, u32))> {
        self.settling.take_if(|(_, other)| *other == token);
        let twin = self.twin.take_if(|twin| twin.token == token)?;
        self.reset = true;
        self.shift.send = self.shift.send.wrapping_add(self.acked.wrapping_sub(twin.start));
        Some(((self.acked, self.guest_ack), (self.guest_ack, self.acked)))
    }
}

/// See [`Flow::snapshot`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Snapshot {
    /// The guest's last bytes are still on their way; [`FlowEvent::Settled`] will tell.
    Waiting,
    /// Here it is.
    Ready(FlowSnapshot),
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
