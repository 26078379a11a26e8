//! One connection of a guest: its two halves, and how its numbers differ from those on the wire.
//!
//! All sequence numbers kept here are the wire's.

use crate::clock::Clock;
use crate::journal::JournalMark;
use crate::receive::ReceiveHalf;
use crate::segment::{ACK, Answer, ECE, Editor, FIN, RST, SYN, Segment, after, later};
use crate::send::SendHalf;
use crate::shift::Shift;
use crate::types::{FlowEvent, TWIN_MAC};
use crate::verdict::{Checksum, Evidence, GuestVerdict, Share, Shares};

/// A connection's hold by a pipe that is about to begin, or waits for the guest's last bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reservation {
    /// End of the guest's bytes, as the pipe knows it.
    pub sent_end: u32,
    pub token: u64,
    /// The pipe has heard that the guest's bytes have passed.
    pub is_told: bool,
}

/// One connection of a guest.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    pub send: SendHalf,
    /// Beside a twin that receives there is none that sends.
    pub receive: ReceiveHalf,
    pub clock: Clock,
    pub shift: Shift,
    pub reservation: Option<Reservation>,
    /// The guest has acknowledged the peer's SYN: numbers of the peer's mean something.
    pub is_open: bool,
    /// Hardware addresses of the guest's last segment: destination, source.
    pub macs: [u8; 12],
    pub reset: bool,
    /// The peer has not got all that the guest thinks was sent.
    pub is_broken: bool,
    /// State that the journal has.
    pub mark: JournalMark,
    /// Number that acknowledges the peer's last SYN for a new connection: the guest may know of
    /// none.
    pub peer_syn: Option<u32>,
    /// The peer's segments come by here, and not by another port of the guest's.
    pub is_heard: bool,
    /// The peer has sent fragments: not all that they say is known.
    pub is_fragmented: bool,
    pub seen_ns: u64,
    /// Time of the guest's SYN; 0: before this daemon.
    pub begun_ns: u64,
}

impl Flow {
    /// Whether its segments are changed: it must not be forgotten.
    pub fn is_shifted(&self) -> bool {
        self.has_twin() || !self.shift.is_none()
    }

    /// Whether a twin has one of its halves.
    pub fn has_twin(&self) -> bool {
        self.send.twin.is_some() || self.receive.twin.is_some()
    }

    /// Whether it is used, or its segments are not only passed on.
    pub fn is_needed(&self) -> bool {
        self.is_journaled() || self.reservation.is_some()
    }

    /// Whether the next daemon must know of it too.
    pub fn is_journaled(&self) -> bool {
        self.is_shifted() || self.is_broken
    }

    /// Whether nothing more is to be expected of it but stragglers.
    pub fn is_over(&self) -> bool {
        self.reset || (self.send.is_closed && self.receive.is_closed)
    }

    /// Token of the pipe that has a twin here.
    pub fn twin_token(&self) -> Option<u64> {
        let receiver = self.receive.twin.filter(|twin| !twin.is_gone);
        self.send.twin.map(|twin| twin.token).or(receiver.map(|twin| twin.token))
    }

    /// Token of the pipe that has a twin here, or is about to.
    pub fn token(&self) -> Option<u64> {
        self.twin_token().or(self.reservation.map(|reservation| reservation.token))
    }

    /// Makes a connection of the guest's SYN, whatever was there before.
    pub fn begin(eth: &[u8], segment: &Segment) -> Self {
        let is_open = segment.has(ACK);
        let timestamps = segment.timestamps(eth);
        let send = SendHalf {
            base: Some(segment.seq.wrapping_add(1)),
            end: segment.end(),
            acked: segment.seq,
            guest_from: segment.seq,
            ..SendHalf::default()
        };
        let receive = ReceiveHalf {
            base: is_open.then_some(segment.ack),
            guest_ack: segment.ack,
            end: segment.ack,
            guest_window: segment.window,
            scale: segment.scale,
            // The window of a SYN is not scaled.
            guest_edge: segment.ack.wrapping_add(segment.window.into()),
            ..ReceiveHalf::default()
        };
        let clock = Clock {
            sent: timestamps.map(|(value, _)| value),
            peer: timestamps.filter(|_| is_open).map(|(_, echo)| echo),
        };
        let mut flow = Self { send, receive, clock, is_open, ..Self::default() };
        flow.note_macs(eth);
        flow
    }

    fn note_macs(&mut self, eth: &[u8]) {
        self.macs.copy_from_slice(&eth[..12]);
    }

    /// Notes the guest's SYN that was sent again: by another way, perhaps, and later.
    pub fn note_syn_again(&mut self, eth: &[u8], syn: &Segment, now_ns: u64) {
        self.seen_ns = now_ns;
        self.note_macs(eth);
        if let Some((value, _)) = syn.timestamps(eth) {
            self.advance_clock(value);
        }
    }

    fn advance_clock(&mut self, value: u32) {
        let is_shifted = self.is_shifted();
        self.clock.advance(value, &mut self.shift, is_shifted);
    }

    /// Joins the peer's stream, if guest and twin have everything up to the twin's last byte.
    pub fn join(&mut self) {
        self.receive.join(&mut self.shift, &mut self.clock);
    }

    /// Takes a segment of the guest's, changed in place to one for the wire. Events go to `tell`.
    pub fn guest_sends(
        &mut self,
        eth: &mut [u8],
        segment: &Segment,
        summed: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> GuestVerdict {
        // An answer to a SYN that was not shifted: nothing of it is of this connection.
        if segment.has(RST) && segment.has(ACK) && Some(segment.ack) == self.peer_syn {
            return GuestVerdict::Pass;
        }
        self.note_macs(eth);
        let seq = segment.seq.wrapping_add(self.shift.send);
        let end = segment.end().wrapping_add(self.shift.send);
        if segment.has(ACK) {
            self.note_guest_ack(segment);
            self.receive.tell_ended(tell);
        }
        if self.is_broken {
            return GuestVerdict::Answer;
        }
        let verdict = match self.send.twin {
            Some(_) => self.send.judge_beside_twin(segment, seq, end, tell),
            None => {
                self.send.is_closed |= segment.has(FIN);
                self.send.end = later(self.send.end, end);
                if let (true, Some(token)) = (segment.has(RST), self.twin_token()) {
                    tell(token, FlowEvent::Reset);
                }
                GuestVerdict::Pass
            }
        };
        if segment.has(RST) {
            self.end_by_reset(tell);
        }
        self.tell_settled(tell);
        // A segment that ends here changes nothing; a resend of it comes again as it was.
        if matches!(verdict, GuestVerdict::Drop | GuestVerdict::Answer) {
            return verdict;
        }
        // What carries no bytes stands behind all that was sent, as the peer expects it.
        let is_bare = self.send.twin.is_some_and(|twin| !after(twin.start, seq));
        let seq = if is_bare { self.send.end } else { seq };
        self.edit_from_guest(eth, segment, summed, seq);
        let mut editor = Editor::new(eth, segment, summed);
        match verdict {
            GuestVerdict::Bare(_) => GuestVerdict::Bare(editor.strip()),
            GuestVerdict::Trimmed(len) => GuestVerdict::Trimmed(editor.trim(len)),
            other => other,
        }
    }

    fn note_guest_ack(&mut self, segment: &Segment) {
        let ack = segment.ack.wrapping_add(self.shift.receive);
        if !std::mem::replace(&mut self.is_open, true) {
            self.receive.open(ack);
        }
        self.receive.note_guest_ack(segment, ack);
        self.join();
    }

    /// Tells the pipe that waits for the guest's last bytes, once.
    fn tell_settled(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        if let Some(reservation) = self.reservation.as_mut()
            && !reservation.is_told
            && !after(reservation.sent_end, self.send.end)
        {
            reservation.is_told = true;
            tell(reservation.token, FlowEvent::Settled);
        }
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
        match self.receive.split() {
            None => {
                if segment.has(ACK) {
                    editor.set_ack(up(segment.ack));
                }
                editor.map_sacks(|left, right| Some((up(left), up(right))));
            }
            Some(_) => self.receive.edit_ack(&mut editor, segment, shift.receive),
        }
        if let Some((value, echo)) = timestamps {
            let value = value.wrapping_add(shift.timestamp);
            editor.set_timestamps(value, self.receive.echo(echo));
        }
    }

    /// Whether more is taken from a segment than its length: its checksum has to be looked at. That
    /// of headers alone is cheap.
    pub fn wants_checksum(&self, segment: &Segment) -> bool {
        let is_cheap = segment.payload_len == 0 || segment.has(RST | FIN | SYN);
        is_cheap || self.send.twin.is_some() || self.receive.wants_checksum(segment)
    }

    /// Takes a segment of the peer's; tells who gets it. Nothing of it is changed yet.
    pub fn peer_sends(
        &mut self,
        eth: &[u8],
        segment: &Segment,
        checksum: Checksum,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> Shares {
        let is_split = self.receive.split().is_some();
        if checksum == Checksum::Wrong {
            // Part of the twin's bytes, perhaps: the guest must not see them in any disguise.
            return if is_split { Shares::NOBODY } else { Shares::GUEST };
        }
        self.is_heard = true;
        if segment.has(SYN) {
            // This connection's own, sent again, asks for no other.
            let is_own = Some(segment.seq.wrapping_add(1)) == self.receive.base;
            if !is_own && !segment.has(ACK) {
                self.peer_syn = Some(segment.end());
            }
            self.note_answer(eth, segment);
            return Shares::GUEST;
        }
        if segment.has(RST) {
            if self.is_reset_by(segment) {
                self.twin_token().into_iter().for_each(|token| tell(token, FlowEvent::Reset));
                self.end_by_reset(tell);
            }
            return Shares::GUEST;
        }
        let evidence = self.hear(eth, segment, checksum);
        self.receive.tell_ended(tell);
        if is_split {
            return self.receive.share(segment, evidence);
        }
        match evidence {
            Evidence::Nothing | Evidence::Length => Shares::GUEST,
            Evidence::Nonsense => self.send.share(segment, false, tell),
            Evidence::All => self.send.share(segment, true, tell),
        }
    }

    fn hear(&mut self, eth: &[u8], segment: &Segment, checksum: Checksum) -> Evidence {
        // What the guest cannot accept says nothing to anybody, and the guest answers it. Keepalive
        // probes of the peer are of that kind.
        if !self.is_open || !self.receive.is_in_window(segment) {
            return Evidence::Nothing;
        }
        self.receive.note_peer_end(segment);
        if checksum == Checksum::Unknown {
            return Evidence::Length;
        }
        if let Some((value, _)) = segment.timestamps(eth) {
            self.clock.note_peer(value);
        }
        if self.send.note_peer_ack(segment) { Evidence::All } else { Evidence::Nonsense }
    }

    /// Notes the peer's SYN, in answer to the guest's. It comes once; later ones are stragglers or
    /// forged.
    fn note_answer(&mut self, eth: &[u8], segment: &Segment) {
        if self.is_open || !segment.has(ACK) || segment.ack != self.send.end {
            return;
        }
        (self.receive.end, self.send.acked) = (segment.end(), segment.ack);
        self.receive.base = Some(segment.seq.wrapping_add(1));
        // The window of a SYN is not scaled, all others are.
        self.send.window = segment.window >> segment.scale;
        self.clock.peer = segment.timestamps(eth).map(|(value, _)| value);
    }

    /// Whether the guest believes that reset: it has to have just the number that the guest expects
    /// (RFC 5961, 3.2), which is somewhere between what it acknowledged and what the peer sent.
    fn is_reset_by(&self, segment: &Segment) -> bool {
        match self.is_open {
            true => self.receive.is_expected(segment.seq),
            false => segment.has(ACK) && segment.ack == self.send.end,
        }
    }

    fn end_by_reset(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        self.reset = true;
        if let Some(reservation) = self.reservation.take() {
            tell(reservation.token, FlowEvent::Reset);
        }
    }

    /// Notes that the guest got this segment.
    pub fn note_delivery(&mut self, segment: &Segment) {
        self.receive.note_delivery(segment, self.send.end);
        self.send.note_delivery(segment);
    }

    /// Makes a segment of the peer's one for the guest, or its share of it.
    pub fn edit_for_guest(&self, eth: &mut [u8], segment: &Segment, summed: bool, share: Share) {
        // A SYN is for a new connection, whose numbers are nobody's yet.
        if !self.is_shifted() || segment.has(SYN) {
            return;
        }
        let shift = self.shift;
        let limit = self.send.twin.map(|twin| twin.start);
        let timestamps = segment.timestamps(eth);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(self.receive.guest_seq(segment.seq).wrapping_sub(shift.receive));
        if segment.has(ACK) {
            let ack = limit.filter(|&l| after(segment.ack, l)).unwrap_or(segment.ack);
            editor.set_ack(ack.wrapping_sub(shift.send));
        }
        let from = self.send.guest_from;
        editor.map_sacks(|left, right| {
            let is_guests = !after(from, left) && limit.is_none_or(|l| !after(right, l));
            is_guests.then_some((left.wrapping_sub(shift.send), right.wrapping_sub(shift.send)))
        });
        if let Some((value, echo)) = timestamps {
            editor.set_timestamps(value, echo.wrapping_sub(shift.timestamp));
        }
        share.cut(&mut editor);
    }

    /// Makes a segment of the peer's one for the twin, or its share of it. The payload of one that
    /// is cut must have been summed: its checksum is made anew.
    pub fn edit_for_twin(&self, eth: &mut [u8], segment: &Segment, summed: bool, share: Share) {
        eth[..TWIN_MAC.len()].copy_from_slice(&TWIN_MAC);
        let mut editor = Editor::new(eth, segment, summed);
        match (self.send.twin, self.receive.twin) {
            (Some(twin), _) => editor.set_seq(twin.receive_seq),
            (None, Some(twin)) => twin.edit(&mut editor, segment),
            (None, None) => {}
        }
        share.cut(&mut editor);
    }

    /// Makes a segment of the twin's one of the guest's side. False: it has nothing to say.
    pub fn edit_from_twin(
        &mut self,
        eth: &mut [u8],
        segment: &Segment,
        summed: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> bool {
        let Some(twin) = self.send.twin else {
            return self.edit_from_receiver(eth, segment, summed, tell);
        };
        let is_its_own = !after(twin.start.wrapping_sub(1), segment.seq);
        if segment.has(RST | SYN | FIN) || !segment.has(ACK) || !is_its_own {
            return false;
        }
        self.send.end = later(self.send.end, segment.end());
        let timestamps = segment.timestamps(eth);
        eth[..12].copy_from_slice(&self.macs);
        self.speak_for_guest(&mut Editor::new(eth, segment, summed), timestamps, self.clock.peer);
        true
    }

    /// Makes a receiving twin's segment one of the guest's side; only its acknowledgement counts.
    fn edit_from_receiver(
        &mut self,
        eth: &mut [u8],
        segment: &Segment,
        summed: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> bool {
        let timestamps = segment.timestamps(eth);
        let Some(twin) = self.receive.note_twin_ack(segment, timestamps, self.clock.peer) else {
            return false;
        };
        self.join();
        self.receive.tell_ended(tell);
        eth[..12].copy_from_slice(&self.macs);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(self.send.end);
        let up = |n: u32| n.wrapping_add(twin.offset);
        editor.map_sacks(|left, right| Some((up(left), up(right))));
        // As long as it has nothing, nothing may be left of it: not its clock either.
        let has_bytes = twin.got != twin.from;
        let clock = |value| if has_bytes { value } else { self.clock.sent.unwrap_or(value) };
        let timestamps = timestamps.map(|(value, own)| (clock(value), own));
        self.speak_for_guest(&mut editor, timestamps, twin.echo);
        true
    }

    /// Has a twin's segment speak in the guest's place: what has arrived, how much is taken,
    /// whether there is congestion, and timestamps, which never go back. `echo` is the peer's last,
    /// if it is known.
    fn speak_for_guest(
        &mut self,
        editor: &mut Editor<'_>,
        timestamps: Option<(u32, u32)>,
        echo: Option<u32>,
    ) {
        editor.set_ack(self.receive.wire_ack());
        editor.set_window(self.receive.wire_window());
        if !self.receive.has_ece {
            editor.clear_flags(ECE);
        }
        if let (Some((value, own)), Some(last)) = (timestamps, self.clock.sent) {
            let value = later(last, value);
            self.clock.sent = Some(value);
            editor.set_timestamps(value, echo.unwrap_or(own));
        }
    }

    /// Answer to a probe of the guest's, in the guest's numbers; to anything, where the connection
    /// is broken.
    pub fn answer_to_probe(&self, eth: &[u8], segment: &Segment) -> Answer {
        let start = self.send.twin.map_or(self.send.end, |twin| twin.start);
        let timestamps = segment.timestamps(eth);
        let timestamps = timestamps.map(|(value, echo)| (self.clock.peer.unwrap_or(echo), value));
        if self.is_broken {
            // Just what the guest expects.
            let (seq, ack) = (segment.ack, segment.end());
            return Answer { flags: RST | ACK, seq, ack, window: 0, timestamps };
        }
        Answer {
            flags: ACK,
            seq: self.receive.guest_ack.wrapping_sub(self.shift.receive),
            ack: start.wrapping_sub(self.shift.send),
            window: self.send.window,
            timestamps,
        }
    }

    /// Acknowledgement and window that the peer is to know now.
    pub fn to_peer(&self) -> Answer {
        Answer {
            flags: ACK,
            seq: self.send.end,
            ack: self.receive.wire_ack(),
            window: self.receive.wire_window(),
            timestamps: self.clock.sent.zip(self.clock.peer),
        }
    }

    /// The peer's end, if it stands at the guest's next byte, in the wire's numbers.
    pub fn fin_to_guest(&self, fin: Option<u32>) -> Option<Answer> {
        let is_next = fin == Some(self.receive.guest_ack) && self.receive.twin.is_none();
        is_next.then(|| Answer {
            flags: FIN | ACK,
            seq: self.receive.guest_ack,
            ack: self.send.acked,
            window: self.send.window,
            timestamps: self.clock.peer.zip(self.clock.sent),
        })
    }

    /// Makes a segment of the guest's one that has the peer speak: what it says is answered with a
    /// reset that has the right number. Returns its length.
    pub fn edit_prompt(&self, eth: &mut [u8], segment: &Segment, summed: bool) -> usize {
        let timestamps = segment.timestamps(eth);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(self.send.acked.wrapping_sub(1));
        editor.set_ack(self.receive.guest_ack);
        editor.set_flags(ACK);
        editor.map_sacks(|_, _| None);
        if let Some((value, echo)) = timestamps {
            let value = value.wrapping_add(self.shift.timestamp);
            editor.set_timestamps(self.clock.sent.map_or(value, |last| later(last, value)), echo);
        }
        editor.strip()
    }

    /// Sequence and acknowledgement, in the guest's numbers, of a segment that makes it say where
    /// it is: an old one, as a keepalive probe has (RFC 9293, 3.8.4).
    pub fn prompt(&self) -> (u32, u32) {
        let received = self.receive.guest_ack.wrapping_sub(self.shift.receive);
        (received.wrapping_sub(1), self.send.acked.wrapping_sub(self.shift.send))
    }
}

#[cfg(test)]
mod tests;
