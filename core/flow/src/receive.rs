//! Receiving half of a connection: the peer's bytes, a stretch of which may be a twin's.
//!
//! Nothing here knows of the sending half. All sequence numbers are the wire's.
//!
//! A twin that receives *splits* the peer's stream. On the wire the peer's bytes are the guest's up
//! to `from`, then the twin's up to `end`, then the guest's again. Nobody is told that bytes
//! arrived before all in front of them did: as long as the guest lacks some of its own, its
//! acknowledgement counts; then the twin's; and when the twin has all of its bytes, the stream is
//! *joined*: the guest's numbers are shifted over the twin's bytes, and the twin has no say any
//! more, though the pipe may still be taking bytes from it.
//!
//! The guest gets bytes behind `end` only when the twin has all in front of them; what came too
//! early comes again. A FIN is the guest's, too, and not acknowledged before the pipe has ended.

use crate::clock::Clock;
use crate::segment::{ACK, ECE, Editor, FIN, RST, SYN, Segment, URG, after, later};
use crate::shift::Shift;
use crate::types::{FlowError, FlowEvent, FlowSnapshot};
use crate::verdict::{Evidence, Share, Shares};

/// A twin that receives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceivingTwin {
    /// Name of its pipe in events.
    pub token: u64,
    /// The twin's first byte.
    pub from: u32,
    /// Behind its last.
    pub end: u32,
    /// The twin has everything before.
    pub got: u32,
    /// The twin's window, as it stood in its header.
    pub window: u16,
    /// End of the window that the twin allowed the peer.
    pub edge: u32,
    /// Bytes by which its numbers of the peer's stream are behind the wire's: what passed after
    /// they were taken.
    pub offset: u32,
    /// Sequence number of its next byte, had it anything to send.
    pub send_seq: u32,
    /// The last timestamp of the peer's that it echoed.
    pub echo: Option<u32>,
    /// End of the peer's stream.
    pub fin: Option<u32>,
    /// The pipe was told of that end.
    pub ended_told: bool,
    /// Acknowledgement of its own bytes that the guest was told last.
    pub guest_acked: u32,
    /// Window that went with it.
    pub guest_window: u16,
    /// The stream is joined: the guest's numbers are shifted over the twin's bytes.
    pub is_joined: bool,
    /// The pipe is over; only the guest lacks bytes from before it.
    pub is_gone: bool,
}

impl ReceivingTwin {
    /// Bytes of the twin.
    pub fn len(&self) -> u32 {
        self.end.wrapping_sub(self.from)
    }

    /// Whether it has all of its bytes; a twin that was stopped has.
    pub fn is_done(&self) -> bool {
        !after(self.end, self.got)
    }

    /// Number on the wire of a place that the guest counts without the twin's bytes.
    fn on_wire(&self, place: u32) -> u32 {
        let is_behind = self.is_done() && after(place, self.from);
        if is_behind { place.wrapping_add(self.len()) } else { place }
    }

    /// Number at which the guest finds a segment that begins at `seq` on the wire. Bytes of the
    /// twin's, or such that came too early, stand where the guest waits: it has no bytes for it.
    fn guest_seq(&self, seq: u32) -> u32 {
        match after(seq, self.from) {
            false => seq,
            true if self.is_done() && !after(self.end, seq) => seq.wrapping_sub(self.len()),
            true => self.from,
        }
    }

    /// Whether a segment of the peer's tells the guest something of its own bytes.
    fn is_news(&self, segment: &Segment) -> bool {
        let is_same = segment.ack == self.guest_acked;
        after(segment.ack, self.guest_acked)
            || (is_same && segment.window != self.guest_window)
            || (segment.has_sacks() && !after(self.guest_acked, segment.ack))
    }

    /// Shares of guest and twin in the payload of a segment.
    fn shares(&self, segment: &Segment) -> Shares {
        let (seq, len) = (segment.seq, segment.payload_len);
        let end = seq.wrapping_add(len as u32);
        let guest = if after(self.from, seq) {
            let is_all = !after(end, self.from);
            let is_whole = is_all && !segment.has(FIN);
            let own = if is_all { len } else { self.from.wrapping_sub(seq) as usize };
            if is_whole { Share::Whole } else { Share::First(own) }
        } else if self.is_done() && !after(self.end, seq) {
            Share::Whole
        } else {
            Share::Nothing
        };
        let is_twins = after(end, self.from) && after(self.end, seq) && !self.is_gone;
        let twin = match is_twins {
            false => Share::Nothing,
            true if after(end, self.end) => Share::First(self.end.wrapping_sub(seq) as usize),
            true => Share::Whole,
        };
        Shares { guest, twin }
    }

    /// Makes a segment of the peer's one for the twin.
    pub fn edit(&self, editor: &mut Editor<'_>, segment: &Segment) {
        editor.set_seq(segment.seq.wrapping_sub(self.offset));
        // It has sent nothing, and hears of nothing that the guest has sent.
        editor.set_ack(self.send_seq);
        editor.map_sacks(|_, _| None);
        editor.clear_flags(FIN | URG);
    }
}

/// Knowledge of which bytes of the peer's stream have passed to the guest. A connection from the
/// last daemon's time begins without: its guest may keep bytes behind a gap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Passage {
    #[default]
    Known,
    Unknown,
    /// All that is not known was sent into a window that ended there.
    Before(u32),
}

/// Bytes from the peer to the guest's side.
#[derive(Debug, Default)]
pub(crate) struct ReceiveHalf {
    /// The peer's own number of its first byte.
    pub base: Option<u32>,
    pub passage: Passage,
    /// The guest has everything before. While the stream is split this and `guest_edge` are as if
    /// the twin's part of it were not there.
    pub guest_ack: u32,
    /// The guest's window, as it stood in its header.
    pub guest_window: u16,
    /// Bits by which the guest's windows are scaled.
    pub scale: u8,
    /// The guest allowed the peer to send up to there.
    pub guest_edge: u32,
    /// The guest's last segment told of congestion.
    pub has_ece: bool,
    /// Behind the last byte that the peer sent.
    pub end: u32,
    /// The peer has sent its FIN.
    pub is_closed: bool,
    pub twin: Option<ReceivingTwin>,
}

impl ReceiveHalf {
    /// The twin that has a part of the peer's stream, while the guest's numbers differ in front of
    /// that part and behind it.
    pub fn split(&self) -> Option<&ReceivingTwin> {
        self.twin.as_ref().filter(|twin| !twin.is_joined)
    }

    /// The twin of that pipe.
    pub fn twin_of(&mut self, token: u64) -> Option<&mut ReceivingTwin> {
        self.twin.as_mut().filter(|twin| twin.token == token && !twin.is_gone)
    }

    /// Whether the twin's acknowledgements count: the guest has all that is in front of its bytes.
    pub fn twin_speaks(&self) -> bool {
        self.split().is_some_and(|split| !after(split.from, self.guest_ack))
    }

    /// Acknowledgement that the peer is told.
    pub fn wire_ack(&self) -> u32 {
        match self.split() {
            Some(split) if !after(split.from, self.guest_ack) => split.got,
            _ => self.guest_ack,
        }
    }

    /// Window that goes with it.
    pub fn wire_window(&self) -> u16 {
        match self.split() {
            Some(split) if !after(split.from, self.guest_ack) => split.window,
            _ => self.guest_window,
        }
    }

    /// End of the window that the peer was told.
    fn wire_edge(&self) -> u32 {
        match self.split() {
            Some(split) => later(split.on_wire(self.guest_edge), split.edge),
            None => self.guest_edge,
        }
    }

    /// Number at which the guest finds a segment of the peer's, not shifted yet.
    pub fn guest_seq(&self, seq: u32) -> u32 {
        self.split().map_or(seq, |split| split.guest_seq(seq))
    }

    /// Echo of a segment that the guest sends: the twin's, if that is a later one.
    pub fn echo(&self, own: u32) -> u32 {
        let twins = self.split().and_then(|split| split.echo);
        twins.filter(|_| self.twin_speaks()).map_or(own, |twins| later(own, twins))
    }

    /// Joins the stream, if all is there: guest and twin have everything up to the twin's last
    /// byte.
    pub fn join(&mut self, shift: &mut Shift, clock: &mut Clock) {
        let (Some(split), is_through) = (self.split().copied(), self.twin_speaks()) else { return };
        // Where there is nothing between, the guest may go on.
        if !split.is_done() || !(is_through || split.len() == 0) {
            return;
        }
        if is_through {
            self.guest_ack = self.guest_ack.wrapping_add(split.len());
            // What the twin allowed, the peer may use still.
            self.guest_edge = later(self.guest_edge.wrapping_add(split.len()), split.edge);
        }
        shift.receive = shift.receive.wrapping_add(split.len());
        clock.peer = clock.peer.map(|own| split.echo.map_or(own, |echo| later(own, echo)));
        self.twin = match split.is_gone {
            true => None,
            false => Some(ReceivingTwin { is_joined: true, ..split }),
        };
    }

    /// Tells the pipe that nothing comes behind what was acknowledged, once.
    pub fn tell_ended(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        let told = self.wire_ack();
        let Some(twin) = self.twin.as_mut().filter(|twin| !twin.ended_told && !twin.is_gone) else {
            return;
        };
        if let Some(fin) = twin.fin
            && !after(fin, twin.end)
            && !after(fin, told)
        {
            twin.ended_told = true;
            tell(twin.token, FlowEvent::Ended);
        }
    }

    /// Begins the stream at the guest's first acknowledgement, `ack` on the wire.
    pub fn open(&mut self, ack: u32) {
        // If the guest believed another answer than the one that was seen, that number is wrong.
        self.base = self.base.filter(|_| ack == self.end);
        (self.guest_ack, self.end, self.guest_edge) = (ack, ack, ack);
    }

    /// Notes what a segment of the guest's acknowledges and allows; `ack` is its number on the
    /// wire.
    pub fn note_guest_ack(&mut self, segment: &Segment, ack: u32) {
        let window = u32::from(segment.window) << self.scale;
        self.guest_edge = later(self.guest_edge, ack.wrapping_add(window));
        match self.passage {
            Passage::Known => {}
            Passage::Unknown => self.passage = Passage::Before(self.guest_edge),
            Passage::Before(edge) if !after(edge, ack) => self.passage = Passage::Known,
            Passage::Before(_) => {}
        }
        if !after(self.guest_ack, ack) {
            self.guest_ack = ack;
            self.guest_window = segment.window;
            self.has_ece = segment.has(ECE) && !segment.has(SYN);
        }
    }

    /// Notes where a segment of the peer's ends, and the peer's stream with it.
    pub fn note_peer_end(&mut self, segment: &Segment) {
        self.end = later(self.end, segment.end());
        if segment.has(FIN) {
            self.is_closed = true;
            if let Some(twin) = self.twin.as_mut() {
                twin.fin = Some(segment.end().wrapping_sub(1));
            }
        }
    }

    /// Whether a segment of the peer's touches the window (RFC 9293, 3.10.7.4).
    pub fn is_in_window(&self, segment: &Segment) -> bool {
        let is_old = after(self.wire_ack(), segment.end());
        !is_old && !after(segment.seq, self.wire_edge())
    }

    /// Whether a number is between what was acknowledged and what the peer sent.
    pub fn is_expected(&self, seq: u32) -> bool {
        !after(self.wire_ack(), seq) && !after(seq, self.end)
    }

    /// Whether more is taken from a segment with payload than where it stands: the twin's kernel
    /// looks at all that only passes.
    pub fn wants_checksum(&self, segment: &Segment) -> bool {
        let Some(split) = self.split() else { return false };
        let is_cut = |share| matches!(share, Share::First(_));
        let Shares { guest, twin } = split.shares(segment);
        is_cut(guest) || is_cut(twin) || split.is_news(segment)
    }

    /// Shares of guest and twin in a segment of the peer's while the stream is split.
    pub fn share(&self, segment: &Segment, evidence: Evidence) -> Shares {
        let Some(split) = self.split() else { return Shares::GUEST };
        if evidence == Evidence::Nonsense {
            return Shares::NOBODY;
        }
        let is_news = evidence == Evidence::All && split.is_news(segment);
        let news = if is_news { Share::Bare } else { Share::Nothing };
        if segment.payload_len > 0 {
            let shares = split.shares(segment);
            let guest = if shares.guest == Share::Nothing { news } else { shares.guest };
            return Shares { guest, ..shares };
        }
        if segment.has(FIN) {
            let is_guests = split.is_done() && !after(split.end, segment.seq);
            return if is_guests {
                Shares::GUEST
            } else {
                Shares { guest: news, ..Shares::NOBODY }
            };
        }
        // A probe of the peer's: an old number. Guest or twin, whichever acknowledges the stream
        // now, answers it.
        if self.twin_speaks() && after(self.wire_ack(), segment.seq) {
            return Shares { guest: news, twin: Share::Whole };
        }
        Shares::GUEST
    }

    /// Notes what a segment that the guest got says of its bytes, sent up to `sent_end`.
    pub fn note_delivery(&mut self, segment: &Segment, sent_end: u32) {
        if let Some(twin) = self.twin.as_mut()
            && segment.has(ACK)
            && !after(twin.guest_acked, segment.ack)
            && !after(segment.ack, sent_end)
        {
            (twin.guest_acked, twin.guest_window) = (segment.ack, segment.window);
        }
    }

    /// Makes what a segment of the guest's says of the peer's stream that of both, while it is
    /// split. The guest's numbers are behind by `shift` bytes.
    pub fn edit_ack(&self, editor: &mut Editor<'_>, segment: &Segment, shift: u32) {
        let Some(split) = self.split() else { return };
        if segment.has(ACK) {
            editor.set_ack(self.wire_ack());
            if self.twin_speaks() {
                editor.set_window(split.window);
            }
        }
        let place = |n: u32| n.wrapping_add(shift);
        editor.map_sacks(|left, right| {
            let (left, right) = (place(left), place(right));
            // What it waits for is not what it has: a block that begins there is behind the twin's.
            let left = if left == split.from {
                left.wrapping_add(split.len())
            } else {
                split.on_wire(left)
            };
            let is_early = after(right, split.from) && !split.is_done();
            (!is_early).then_some((left, split.on_wire(right)))
        });
    }

    /// Notes the acknowledgement of a segment of the twin's, all that counts in it. Returns the
    /// twin, if the peer is to hear it.
    pub fn note_twin_ack(
        &mut self,
        segment: &Segment,
        timestamps: Option<(u32, u32)>,
        peer_clock: Option<u32>,
    ) -> Option<ReceivingTwin> {
        let split = self.twin.as_mut().filter(|twin| !twin.is_joined && !twin.is_gone)?;
        let ack = segment.ack.wrapping_add(split.offset);
        let is_pure = segment.has(ACK) && !segment.has(RST | SYN | FIN) && segment.payload_len == 0;
        let is_its_own = segment.seq == split.send_seq;
        if !is_pure || !is_its_own || after(split.got, ack) || after(ack, split.end) {
            return None;
        }
        (split.got, split.window) = (ack, segment.window);
        let window = u32::from(segment.window) << self.scale;
        split.edge = later(split.edge, ack.wrapping_add(window));
        if let Some((_, echo)) = timestamps {
            // A fresh one has heard none.
            split.echo = Some(echo).filter(|echo| *echo != 0).or(peer_clock);
        }
        let twin = *split;
        self.twin_speaks().then_some(twin)
    }

    /// Has a twin receive the next `len` bytes. `send`: acknowledgement and window that the guest
    /// was told of its own bytes.
    pub fn start(&mut self, token: u64, snapshot: &FlowSnapshot, len: u32, send: (u32, u16)) {
        let from = self.end;
        let window = u32::from(snapshot.receive_window) << self.scale;
        self.twin = Some(ReceivingTwin {
            token,
            from,
            end: from.wrapping_add(len),
            got: from,
            window: snapshot.receive_window,
            edge: from.wrapping_add(window),
            offset: from.wrapping_sub(snapshot.receive_seq),
            send_seq: snapshot.send_seq,
            echo: None,
            fin: None,
            ended_told: false,
            guest_acked: send.0,
            guest_window: send.1,
            is_joined: false,
            is_gone: false,
        });
    }

    /// Cuts the twin to what it has taken, or the peer was told. Returns how much that is.
    pub fn stop(&mut self, token: u64, taken_bytes: u32) -> Result<u32, FlowError> {
        let told = self.wire_ack();
        let twin = self.twin_of(token).ok_or(FlowError::Unknown)?;
        if taken_bytes > twin.len() {
            return Err(FlowError::Changed);
        }
        // With all of them there, the guest may have bytes from behind them already.
        if !twin.is_done() {
            twin.end = later(twin.from.wrapping_add(taken_bytes), told);
            // It has what it has told, and what was taken from it.
            twin.got = twin.end;
        }
        Ok(twin.len())
    }

    /// Ends the twin, from which `len` bytes were taken. True: the stream may be joined now.
    pub fn finish(&mut self, token: u64, len: u32) -> Result<bool, FlowError> {
        let told = self.wire_ack();
        let Some(twin) = self.twin_of(token) else { return Ok(false) };
        let end = twin.from.wrapping_add(len);
        let is_right = match twin.is_done() {
            true => len == twin.len(),
            false => !after(told, end) && !after(end, twin.end),
        };
        if !is_right {
            return Err(FlowError::Broken);
        }
        if twin.is_joined {
            self.twin = None;
            return Ok(false);
        }
        (twin.end, twin.got, twin.is_gone) = (end, end, true);
        Ok(true)
    }

    /// Ends the twin, some of whose bytes are lost. Returns the number that the guest expects next,
    /// in numbers with `shift`; none: that pipe has no twin.
    pub fn give_up(&mut self, token: u64, shift: &mut Shift) -> Option<u32> {
        let told = self.wire_ack();
        let twin = *self.twin_of(token)?;
        self.twin = None;
        if twin.is_joined {
            return Some(self.end);
        }
        // The guest has all of its own, most likely.
        let lost = later(told, twin.from).wrapping_sub(twin.from);
        shift.receive = shift.receive.wrapping_add(lost);
        self.guest_ack = told;
        Some(twin.from.wrapping_add(lost))
    }
}

#[cfg(test)]
mod tests;
