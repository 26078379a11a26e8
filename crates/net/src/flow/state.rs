//! One connection of a guest: what was seen of it, who sends for it, and how its numbers differ from
//! those on the wire. All sequence numbers kept here are the wire's.

use super::segment::{ACK, Answer, ECE, Editor, FIN, RST, SYN, Segment, after, later};
use super::{FlowEvent, TWIN_MAC};

/// How far back selective acknowledgements are looked at: half of what numbers can be compared over.
const MAX_BACK: u32 = 1 << 30;

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
    pub target: u32,
    pub target_told: bool,
    /// The peer's number that the twin waits for, for ever.
    pub receive_seq: u32,
    /// Names it in events.
    pub token: u64,
    /// What the guest was told to be acknowledged.
    pub guest_acked: u32,
}

/// What becomes of a segment that the guest sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FromGuest {
    /// It goes on, changed or not.
    Pass,
    /// It goes on without its payload, so long.
    Bare(usize),
    /// The part that was sent before goes on, in a frame so long whose checksum is to be filled in.
    Trimmed(usize),
    /// It ends here: the guest will send it again.
    Drop,
    /// It ends here: we answer in the peer's place.
    Answer,
}

/// Who gets a segment of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ToLocal {
    pub guest: bool,
    pub twin: bool,
}

/// What is known of a segment's checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sum {
    Right,
    Wrong,
    /// Nobody has looked at all of it.
    Unknown,
}

/// See [`Flow::settling`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Settling {
    pub expected: u32,
    pub token: u64,
    pub is_told: bool,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// The guest's own number of its first byte; none: its SYN was not seen.
    pub send_base: Option<u32>,
    /// Behind the last byte that was sent, by guest or twin.
    pub sent_end: u32,
    /// The peer has everything before.
    pub acked: u32,
    /// The guest has acknowledged the peer's SYN: numbers of the peer's mean something.
    pub is_open: bool,
    /// The guest has everything before.
    pub guest_ack: u32,
    pub guest_window: u16,
    pub guest_scale: u8,
    /// The peer may send up to there.
    pub guest_edge: u32,
    /// Its last segment told of congestion.
    pub guest_ece: bool,
    /// Behind the last byte that the peer sent.
    pub peer_end: u32,
    pub peer_window: u16,
    pub peer_timestamp: Option<u32>,
    /// The last timestamp sent; none: the connection has none.
    pub timestamp: Option<u32>,
    /// What the guest sends now begins here: older numbers were a twin's, or are acknowledged.
    pub guest_from: u32,
    pub shift: Shift,
    /// Where the guest's last segment went, and from which address.
    pub macs: [u8; 12],
    pub guest_fin: bool,
    pub peer_fin: bool,
    pub reset: bool,
    /// The peer has not got all that the guest thinks was sent.
    pub is_broken: bool,
    pub twin: Option<Sending>,
    /// A pipe is about to begin, or waits for the guest's bytes up to there.
    pub settling: Option<Settling>,
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
        let is_open = segment.has(ACK);
        let timestamps = segment.timestamps(eth);
        let mut flow = Self {
            send_base: Some(segment.seq.wrapping_add(1)),
            sent_end: segment.end(),
            acked: segment.seq,
            guest_from: segment.seq,
            is_open,
            guest_ack: segment.ack,
            peer_end: segment.ack,
            guest_window: segment.window,
            guest_scale: segment.scale,
            // The window of a SYN is not scaled.
            guest_edge: segment.ack.wrapping_add(segment.window.into()),
            peer_timestamp: timestamps.filter(|_| is_open).map(|(_, echo)| echo),
            timestamp: timestamps.map(|(value, _)| value),
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
        if self.is_broken {
            return FromGuest::Answer;
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
        if matches!(answer, FromGuest::Drop | FromGuest::Answer) {
            return answer;
        }
        // What carries no bytes stands behind all that was sent, as the peer expects it.
        let is_bare = self.twin.is_some_and(|t| !after(t.start, seq));
        let seq = if is_bare { self.sent_end } else { seq };
        self.edit_from_guest(eth, segment, summed, seq);
        let mut editor = Editor::new(eth, segment, summed);
        match answer {
            FromGuest::Bare(_) => FromGuest::Bare(editor.strip()),
            FromGuest::Trimmed(len) => FromGuest::Trimmed(editor.trim(len)),
            other => other,
        }
    }

    fn note_guest_ack(&mut self, segment: &Segment) {
        let ack = segment.ack.wrapping_add(self.shift.receive);
        if !self.is_open {
            self.is_open = true;
            (self.guest_ack, self.peer_end, self.guest_edge) = (ack, ack, ack);
        }
        let window = u32::from(segment.window) << self.guest_scale;
        self.guest_edge = later(self.guest_edge, ack.wrapping_add(window));
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
        // It does not know that the peer has these: the next acknowledgement is for it too.
        if end != seq && after(twin.guest_acked, seq) {
            twin.guest_acked = seq;
        }
        if !after(end, twin.start) {
            return FromGuest::Pass;
        }
        // A part of it is old: the peer may wait for just that, and the twin with it.
        if after(twin.start, seq) && segment.payload_len > 0 {
            return FromGuest::Trimmed(twin.start.wrapping_sub(seq) as usize);
        }
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

    /// Whether more is taken from a segment than its length: its checksum has to be looked at. That of
    /// headers alone is cheap.
    pub fn wants_sum(&self, segment: &Segment) -> bool {
        segment.payload_len == 0 || self.twin.is_some() || segment.has(RST | FIN | SYN)
    }

    /// The peer's next segment; tells who gets it. Nothing is changed yet.
    pub fn peer_sends(
        &mut self,
        eth: &[u8],
        segment: &Segment,
        sum: Sum,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> ToLocal {
        let only_guest = ToLocal { guest: true, twin: false };
        if sum == Sum::Wrong {
            return only_guest;
        }
        if segment.has(SYN) {
            self.note_answer(eth, segment);
            return only_guest;
        }
        if segment.has(RST) {
            if self.is_reset_by(segment) {
                if let Some(twin) = self.twin {
                    tell(twin.token, FlowEvent::Reset);
                }
                self.end_by_reset(tell);
            }
            return only_guest;
        }
        if !self.is_acceptable(segment) {
            return only_guest;
        }
        self.peer_fin |= segment.has(FIN);
        self.peer_end = later(self.peer_end, segment.end());
        if sum == Sum::Unknown {
            return only_guest;
        }
        if let Some((value, _)) = segment.timestamps(eth) {
            self.peer_timestamp = Some(self.peer_timestamp.map_or(value, |t| later(t, value)));
        }
        // Nobody can have what was never sent.
        let is_sane = segment.has(ACK) && !after(segment.ack, self.sent_end);
        if is_sane && !after(self.acked, segment.ack) {
            self.acked = segment.ack;
            self.peer_window = segment.window;
            // Numbers are only compared over half of their space.
            if self.twin.is_none() && self.acked.wrapping_sub(self.guest_from) > MAX_BACK {
                self.guest_from = self.acked.wrapping_sub(MAX_BACK);
            }
        }
        let Some(twin) = self.twin.as_mut() else { return ToLocal { guest: true, twin: false } };
        let has_data = segment.payload_len > 0 || segment.has(FIN);
        if !is_sane {
            return ToLocal { guest: has_data, twin: false };
        }
        let for_guest = if after(segment.ack, twin.start) { twin.start } else { segment.ack };
        let is_news = after(for_guest, twin.guest_acked);
        let is_twins = !after(twin.start, segment.ack);
        let (token, is_done) = (twin.token, !after(twin.target, segment.ack));
        if is_done && !std::mem::replace(&mut twin.target_told, true) {
            tell(token, FlowEvent::Acknowledged);
        }
        // What acknowledges old bytes of the guest's twice may be its loss: its business.
        ToLocal { guest: has_data || is_news || !is_twins, twin: is_twins }
    }

    /// The peer's SYN, in answer to the guest's. It comes once; later ones are stragglers or forged.
    fn note_answer(&mut self, eth: &[u8], segment: &Segment) {
        if self.is_open || !segment.has(ACK) || segment.ack != self.sent_end {
            return;
        }
        (self.peer_end, self.acked) = (segment.end(), segment.ack);
        // The window of a SYN is not scaled, all others are.
        self.peer_window = segment.window >> segment.scale;
        self.peer_timestamp = segment.timestamps(eth).map(|(value, _)| value);
    }

    /// Whether the guest can accept it (RFC 9293, 3.10.7.4): else it says nothing to anybody, and the
    /// guest answers it. Keepalive probes of the peer are of that kind.
    fn is_acceptable(&self, segment: &Segment) -> bool {
        let is_old = after(self.guest_ack, segment.end());
        self.is_open && !is_old && !after(segment.seq, self.guest_edge)
    }

    /// Whether the guest believes that reset: it has to have just the number that the guest expects
    /// (RFC 5961, 3.2), which is somewhere between what it acknowledged and what the peer sent.
    fn is_reset_by(&self, segment: &Segment) -> bool {
        match self.is_open {
            true => !after(self.guest_ack, segment.seq) && !after(segment.seq, self.peer_end),
            false => segment.has(ACK) && segment.ack == self.sent_end,
        }
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
        if let Some(settling) = self.settling.take() {
            tell(settling.token, FlowEvent::Reset);
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
        eth[..TWIN_MAC.len()].copy_from_slice(&TWIN_MAC);
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
        if let (Some((value, echo)), Some(last)) = (timestamps, self.timestamp) {
            let value = later(last, value);
            self.timestamp = Some(value);
            editor.set_timestamps(value, self.peer_timestamp.unwrap_or(echo));
        }
        true
    }

    /// The answer to a probe of the guest's, in the guest's numbers; or to anything, where there is no
    /// way on.
    pub fn answer_to_probe(&self, eth: &[u8], segment: &Segment) -> Answer {
        let start = self.twin.map_or(self.sent_end, |twin| twin.start);
        let timestamps = segment.timestamps(eth);
        let timestamps =
            timestamps.map(|(value, echo)| (self.peer_timestamp.unwrap_or(echo), value));
        if self.is_broken {
            // Just what the guest expects.
            let (seq, ack) = (segment.ack, segment.end());
            return Answer { flags: RST | ACK, seq, ack, window: 0, timestamps };
        }
        Answer {
            flags: ACK,
            seq: self.guest_ack.wrapping_sub(self.shift.receive),
            ack: start.wrapping_sub(self.shift.send),
            window: self.peer_window,
            timestamps,
        }
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
