//! One connection of a guest: what was seen of it, who sends and receives for it, and how its numbers
//! differ from those on the wire. All sequence numbers kept here are the wire's.

use crate::FlowEvent;
use crate::journal::Noted;
use crate::receive::Receiving;
use crate::segment::{ACK, ECE, Editor, FIN, RST, SYN, Segment, after, later};
use crate::sending::Sending;

/// How far back selective acknowledgements are looked at, and the most that a twin receives: half of
/// what numbers can be compared over.
pub(crate) const MAX_BACK: u32 = 1 << 30;

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

/// What becomes of a segment that the guest sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FromGuest {
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

/// How much of a segment of the peer's somebody gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    Nothing,
    Whole,
    /// What its headers say, without payload and FIN.
    Bare,
    /// So many bytes of its payload, without FIN.
    First(usize),
}

impl Share {
    /// Length of the frame that is left of one of `frame_len` bytes.
    pub fn frame_len(self, segment: &Segment, frame_len: usize) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Whole => frame_len,
            Self::Bare => segment.headers_len(),
            Self::First(len) => segment.headers_len() + len,
        }
    }

    /// Makes the copied part of a segment that of its share.
    pub fn cut(self, editor: &mut Editor<'_>) {
        match self {
            Self::Nothing | Self::Whole => {}
            Self::Bare => {
                editor.strip();
            }
            Self::First(len) => {
                editor.trim(len);
            }
        }
    }
}

/// Who gets a segment of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ToLocal {
    pub guest: Share,
    pub twin: Share,
}

impl ToLocal {
    pub const NOBODY: Self = Self { guest: Share::Nothing, twin: Share::Nothing };
    pub const GUEST: Self = Self { guest: Share::Whole, twin: Share::Nothing };
}

/// What the switch has learned from a segment of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Nothing: the guest would not accept it.
    Nothing,
    /// How far the peer has sent: nobody has looked at its checksum.
    Length,
    /// It acknowledges what was never sent.
    Nonsense,
    All,
}

/// What is known of a segment's checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    Right,
    Wrong,
    /// Nobody has looked at all of it.
    Unknown,
}

/// Whether it is known what of the peer's stream has passed to the guest. That of a connection from the
/// last daemon's time is not: the guest may keep bytes of it behind a gap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Passed {
    #[default]
    Known,
    Unknown,
    /// All that is not was sent into a window that ended there.
    Before(u32),
}

/// See [`Flow::settling`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settling {
    pub expected: u32,
    pub token: u64,
    pub is_told: bool,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    /// The guest's own number of its first byte; none: its SYN was not seen.
    pub send_base: Option<u32>,
    /// The same of the peer's first byte.
    pub receive_base: Option<u32>,
    /// Behind the last byte that was sent, by guest or twin.
    pub sent_end: u32,
    /// The peer has everything before.
    pub acked: u32,
    /// The guest has acknowledged the peer's SYN: numbers of the peer's mean something.
    pub is_open: bool,
    pub passed: Passed,
    /// The guest has everything before. While the peer's stream is split ([`Receiving`]) this and
    /// `guest_edge` are as if the twin's part of it were not there.
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
    /// Beside a twin that receives there is none that sends.
    pub receiving: Option<Receiving>,
    /// A pipe is about to begin, or waits for the guest's bytes up to there.
    pub settling: Option<Settling>,
    pub noted: Noted,
    /// What acknowledges the peer's last SYN for a new connection: the guest may know of none.
    pub peer_syn: Option<u32>,
    /// The peer's segments come by here, and not by another port of the guest's.
    pub is_heard: bool,
    /// Some of them in fragments: not all that they say is known.
    pub is_fragmented: bool,
    pub seen_ns: u64,
    /// When the guest's SYN came; 0: before this daemon.
    pub begun_ns: u64,
}

impl Flow {
    /// Whether its segments are changed: it must not be forgotten.
    pub fn is_shifted(&self) -> bool {
        self.has_twin() || !self.shift.is_none()
    }

    /// Whether a twin has one of its halves.
    pub fn has_twin(&self) -> bool {
        self.twin.is_some() || self.receiving.is_some()
    }

    /// Whether it is used, or its segments are not only passed on.
    pub fn is_needed(&self) -> bool {
        self.is_noted() || self.settling.is_some()
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
            receive_base: is_open.then_some(segment.ack),
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

    pub fn note_macs(&mut self, eth: &[u8]) {
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
        // An answer to a SYN that was not shifted: nothing of it is of this connection.
        if segment.has(RST) && segment.has(ACK) && Some(segment.ack) == self.peer_syn {
            return FromGuest::Pass;
        }
        self.note_macs(eth);
        let seq = segment.seq.wrapping_add(self.shift.send);
        let end = segment.end().wrapping_add(self.shift.send);
        if segment.has(ACK) {
            self.note_guest_ack(segment);
            self.tell_ended(tell);
        }
        if self.is_broken {
            return FromGuest::Answer;
        }
        let answer = match self.twin {
            Some(_) => self.beside_twin(segment, seq, end, tell),
            None => {
                self.guest_fin |= segment.has(FIN);
                self.sent_end = later(self.sent_end, end);
                if let (true, Some(token)) = (segment.has(RST), self.twin_token()) {
                    tell(token, FlowEvent::Reset);
                }
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
            // Of an answer that was not the one that the guest believed, the number is wrong.
            self.receive_base = self.receive_base.filter(|_| ack == self.peer_end);
            (self.guest_ack, self.peer_end, self.guest_edge) = (ack, ack, ack);
        }
        let window = u32::from(segment.window) << self.guest_scale;
        self.guest_edge = later(self.guest_edge, ack.wrapping_add(window));
        match self.passed {
            Passed::Known => {}
            Passed::Unknown => self.passed = Passed::Before(self.guest_edge),
            Passed::Before(edge) if !after(edge, ack) => self.passed = Passed::Known,
            Passed::Before(_) => {}
        }
        if !after(self.guest_ack, ack) {
            self.guest_ack = ack;
            self.guest_window = segment.window;
            self.guest_ece = segment.has(ECE) && !segment.has(SYN);
        }
        self.join();
    }

    fn edit_from_guest(&mut self, eth: &mut [u8], segment: &Segment, summed: bool, seq: u32) {
        let timestamps = segment.timestamps(eth);
        if let Some((value, _)) = timestamps {
            self.advance_clock(value);
        }
        if !self.is_shifted() {
            return;
        }
        let (shift, up) = (self.shift, |n: u32| n.wrapping_add(self.shift.receive));
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(seq);
        match self.split() {
            None => {
                if segment.has(ACK) {
                    editor.set_ack(up(segment.ack));
                }
                editor.map_sacks(|left, right| Some((up(left), up(right))));
            }
            Some(_) => self.edit_ack(&mut editor, segment),
        }
        if let Some((value, echo)) = timestamps {
            editor.set_timestamps(value.wrapping_add(shift.timestamp), self.echo(echo));
        }
    }

    /// Timestamps never go back (RFC 7323, 4.3): a guest whose clock is behind its twin's is moved up.
    pub fn advance_clock(&mut self, value: u32) {
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
        let is_cheap = segment.payload_len == 0 || segment.has(RST | FIN | SYN);
        is_cheap || self.twin.is_some() || self.split_wants_sum(segment)
    }

    /// The peer's next segment; tells who gets it. Nothing is changed yet.
    pub fn peer_sends(
        &mut self,
        eth: &[u8],
        segment: &Segment,
        sum: Sum,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> ToLocal {
        if sum == Sum::Wrong {
            // Part of the twin's bytes, perhaps: the guest must not see them in any disguise.
            return if self.split().is_some() { ToLocal::NOBODY } else { ToLocal::GUEST };
        }
        self.is_heard = true;
        if segment.has(SYN) {
            // This connection's own, sent again, asks for no other.
            let is_own = Some(segment.seq.wrapping_add(1)) == self.receive_base;
            if !is_own && !segment.has(ACK) {
                self.peer_syn = Some(segment.end());
            }
            self.note_answer(eth, segment);
            return ToLocal::GUEST;
        }
        if segment.has(RST) {
            if self.is_reset_by(segment) {
                self.twin_token().into_iter().for_each(|token| tell(token, FlowEvent::Reset));
                self.end_by_reset(tell);
            }
            return ToLocal::GUEST;
        }
        let heard = self.hear(eth, segment, sum);
        self.tell_ended(tell);
        if self.split().is_some() {
            return self.share_of_split(segment, heard);
        }
        match heard {
            Heard::Nothing | Heard::Length => ToLocal::GUEST,
            Heard::Nonsense => self.beside_sender(segment, false, tell),
            Heard::All => self.beside_sender(segment, true, tell),
        }
    }

    fn hear(&mut self, eth: &[u8], segment: &Segment, sum: Sum) -> Heard {
        if !self.is_acceptable(segment) {
            return Heard::Nothing;
        }
        self.peer_end = later(self.peer_end, segment.end());
        if segment.has(FIN) {
            self.peer_fin = true;
            if let Some(receiving) = self.receiving.as_mut() {
                receiving.fin = Some(segment.end().wrapping_sub(1));
            }
        }
        if sum == Sum::Unknown {
            return Heard::Length;
        }
        if let Some((value, _)) = segment.timestamps(eth) {
            self.peer_timestamp = Some(self.peer_timestamp.map_or(value, |t| later(t, value)));
        }
        // Nobody can have what was never sent.
        if !segment.has(ACK) || after(segment.ack, self.sent_end) {
            return Heard::Nonsense;
        }
        if !after(self.acked, segment.ack) {
            self.acked = segment.ack;
            self.peer_window = segment.window;
            // Numbers are only compared over half of their space.
            if self.twin.is_none() && self.acked.wrapping_sub(self.guest_from) > MAX_BACK {
                self.guest_from = self.acked.wrapping_sub(MAX_BACK);
            }
        }
        Heard::All
    }

    /// The peer's SYN, in answer to the guest's. It comes once; later ones are stragglers or forged.
    fn note_answer(&mut self, eth: &[u8], segment: &Segment) {
        if self.is_open || !segment.has(ACK) || segment.ack != self.sent_end {
            return;
        }
        (self.peer_end, self.acked) = (segment.end(), segment.ack);
        self.receive_base = Some(segment.seq.wrapping_add(1));
        // The window of a SYN is not scaled, all others are.
        self.peer_window = segment.window >> segment.scale;
        self.peer_timestamp = segment.timestamps(eth).map(|(value, _)| value);
    }

    /// Whether the guest can accept it (RFC 9293, 3.10.7.4): else it says nothing to anybody, and the
    /// guest answers it. Keepalive probes of the peer are of that kind.
    fn is_acceptable(&self, segment: &Segment) -> bool {
        let is_old = after(self.wire_ack(), segment.end());
        self.is_open && !is_old && !after(segment.seq, self.wire_edge())
    }

    /// Whether the guest believes that reset: it has to have just the number that the guest expects
    /// (RFC 5961, 3.2), which is somewhere between what it acknowledged and what the peer sent.
    fn is_reset_by(&self, segment: &Segment) -> bool {
        match self.is_open {
            true => !after(self.wire_ack(), segment.seq) && !after(segment.seq, self.peer_end),
            false => segment.has(ACK) && segment.ack == self.sent_end,
        }
    }

    fn end_by_reset(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        self.reset = true;
        if let Some(settling) = self.settling.take() {
            tell(settling.token, FlowEvent::Reset);
        }
    }

    /// Makes a segment of the peer's one for the guest, or its share of it.
    pub fn edit_for_guest(&self, eth: &mut [u8], segment: &Segment, summed: bool, share: Share) {
        // A SYN is for a new connection, whose numbers are nobody's yet.
        if !self.is_shifted() || segment.has(SYN) {
            return;
        }
        let shift = self.shift;
        let limit = self.twin.map(|twin| twin.start);
        let timestamps = segment.timestamps(eth);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(self.place_for_guest(segment.seq).wrapping_sub(shift.receive));
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
        share.cut(&mut editor);
    }
}

#[cfg(test)]
mod tests;
