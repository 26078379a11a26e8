//! A twin that receives for the guest: a stretch of the peer's stream is its, and the stream is split.
//!
//! On the wire the peer's bytes are the guest's up to `from`, then the twin's up to `end`, then the
//! guest's again. Nobody is told that bytes arrived before all in front of them did: as long as the
//! guest lacks some of its own, its acknowledgement counts; then the twin's; and when the twin has all
//! of its bytes, the stream is *joined*: the guest's numbers are shifted over the twin's bytes, and
//! the twin has no say any more, though the pipe may still be taking bytes from it.
//!
//! The guest gets bytes behind `end` only when the twin has all in front of them; what came too early
//! comes again. A FIN is the guest's, too, and not acknowledged before the pipe has ended.

use crate::FlowEvent;
use crate::segment::{ACK, Editor, FIN, RST, SYN, Segment, URG, after, later};
use crate::state::{Flow, Heard, Share, ToLocal};

/// A twin receives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Receiving {
    /// Names it in events.
    pub token: u64,
    /// The twin's first byte.
    pub from: u32,
    /// Behind its last.
    pub end: u32,
    /// The twin has everything before.
    pub got: u32,
    /// Its window, as it stood in its header.
    pub window: u16,
    /// It allowed the peer to send up to there.
    pub edge: u32,
    /// How far its numbers of the peer's bytes are behind the wire's: what passed after they were taken.
    pub offset: u32,
    /// What it would send, had it anything to send.
    pub send_seq: u32,
    /// The last timestamp of the peer's that it echoed.
    pub echo: Option<u32>,
    /// Where the peer's stream ends.
    pub fin: Option<u32>,
    pub ended_told: bool,
    /// What the guest was told of its own bytes: acknowledgement and window.
    pub guest_acked: u32,
    pub guest_window: u16,
    /// See the module's text.
    pub is_joined: bool,
    /// The pipe is over; only the guest lacks bytes from before it.
    pub is_gone: bool,
}

impl Receiving {
    /// Bytes of the twin.
    pub fn len(&self) -> u32 {
        self.end.wrapping_sub(self.from)
    }

    /// It has all of them; so has one that is stopped.
    pub fn is_done(&self) -> bool {
        !after(self.end, self.got)
    }

    /// A place of the guest's, counted without the twin's bytes, on the wire.
    fn on_wire(&self, place: u32) -> u32 {
        let is_behind = self.is_done() && after(place, self.from);
        if is_behind { place.wrapping_add(self.len()) } else { place }
    }

    /// Where the guest finds a segment that begins there on the wire. What is the twin's, or too early,
    /// stands where the guest waits: it has no bytes for it.
    fn at_guest(&self, seq: u32) -> u32 {
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

    /// What of these payload bytes is the guest's, and what the twin's.
    fn shares(&self, segment: &Segment) -> ToLocal {
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
        ToLocal { guest, twin }
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

impl Flow {
    /// The twin that has a part of the peer's stream, while the guest's numbers differ in front of that
    /// part and behind it.
    pub fn split(&self) -> Option<&Receiving> {
        self.receiving.as_ref().filter(|receiving| !receiving.is_joined)
    }

    /// Whether the twin's acknowledgements count: the guest has all that is in front of its bytes.
    pub fn twin_speaks(&self) -> bool {
        self.split().is_some_and(|split| !after(split.from, self.guest_ack))
    }

    /// What the peer is told to have arrived.
    pub fn wire_ack(&self) -> u32 {
        match self.split() {
            Some(split) if !after(split.from, self.guest_ack) => split.got,
            _ => self.guest_ack,
        }
    }

    /// The window that goes with it.
    pub fn wire_window(&self) -> u16 {
        match self.split() {
            Some(split) if !after(split.from, self.guest_ack) => split.window,
            _ => self.guest_window,
        }
    }

    /// The peer may send up to there.
    pub fn wire_edge(&self) -> u32 {
        match self.split() {
            Some(split) => later(split.on_wire(self.guest_edge), split.edge),
            None => self.guest_edge,
        }
    }

    /// Where the guest finds a segment of the peer's, not shifted yet.
    pub fn place_for_guest(&self, seq: u32) -> u32 {
        self.split().map_or(seq, |split| split.at_guest(seq))
    }

    /// The echo of a segment that the guest sends: the twin's, if that is a later one.
    pub fn echo(&self, own: u32) -> u32 {
        let twins = self.split().and_then(|split| split.echo);
        twins.filter(|_| self.twin_speaks()).map_or(own, |twins| later(own, twins))
    }

    /// Joins the stream, if all is there: guest and twin have everything up to the twin's last byte.
    pub fn join(&mut self) {
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
        self.shift.receive = self.shift.receive.wrapping_add(split.len());
        let echo = self.peer_timestamp.map(|own| split.echo.map_or(own, |echo| later(own, echo)));
        self.peer_timestamp = echo;
        self.receiving = match split.is_gone {
            true => None,
            false => Some(Receiving { is_joined: true, ..split }),
        };
    }

    /// Tells the pipe that nothing comes behind what was acknowledged, once.
    pub fn tell_ended(&mut self, tell: &mut dyn FnMut(u64, FlowEvent)) {
        let told = self.wire_ack();
        let Some(receiving) = self.receiving.as_mut().filter(|r| !r.ended_told && !r.is_gone)
        else {
            return;
        };
        if let Some(fin) = receiving.fin
            && !after(fin, receiving.end)
            && !after(fin, told)
        {
            receiving.ended_told = true;
            tell(receiving.token, FlowEvent::Ended);
        }
    }

    /// Whether more is taken from a segment with payload than where it stands: the twin's kernel looks
    /// at all that only passes.
    pub fn split_wants_sum(&self, segment: &Segment) -> bool {
        let Some(split) = self.split() else { return false };
        let is_cut = |share| matches!(share, Share::First(_));
        let ToLocal { guest, twin } = split.shares(segment);
        is_cut(guest) || is_cut(twin) || split.is_news(segment)
    }

    /// Who gets a segment of the peer's while the stream is split.
    pub fn share_of_split(&self, segment: &Segment, heard: Heard) -> ToLocal {
        let Some(split) = self.split() else { return ToLocal::GUEST };
        if heard == Heard::Nonsense {
            return ToLocal::NOBODY;
        }
        let is_news = heard == Heard::All && split.is_news(segment);
        let news = if is_news { Share::Bare } else { Share::Nothing };
        if segment.payload_len > 0 {
            let shares = split.shares(segment);
            let guest = if shares.guest == Share::Nothing { news } else { shares.guest };
            return ToLocal { guest, ..shares };
        }
        if segment.has(FIN) {
            let is_guests = split.is_done() && !after(split.end, segment.seq);
            return if is_guests {
                ToLocal::GUEST
            } else {
                ToLocal { guest: news, ..ToLocal::NOBODY }
            };
        }
        // A probe of the peer's: an old number. Who has the last word in the stream answers it.
        if self.twin_speaks() && after(self.wire_ack(), segment.seq) {
            return ToLocal { guest: news, twin: Share::Whole };
        }
        ToLocal::GUEST
    }

    /// The guest got what a segment of the peer's says of its bytes.
    pub fn told_beside_receiver(&mut self, segment: &Segment) {
        if let Some(receiving) = self.receiving.as_mut()
            && segment.has(ACK)
            && !after(receiving.guest_acked, segment.ack)
            && !after(segment.ack, self.sent_end)
        {
            (receiving.guest_acked, receiving.guest_window) = (segment.ack, segment.window);
        }
    }

    /// What a segment of the guest's says of the peer's stream, while that is split.
    pub fn edit_ack(&self, editor: &mut Editor<'_>, segment: &Segment) {
        let Some(split) = self.split() else { return };
        if segment.has(ACK) {
            editor.set_ack(self.wire_ack());
            if self.twin_speaks() {
                editor.set_window(split.window);
            }
        }
        let place = |n: u32| n.wrapping_add(self.shift.receive);
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

    /// A segment of the twin's, of which only the acknowledgement counts. False: it has nothing to say.
    pub fn edit_from_receiver(
        &mut self,
        eth: &mut [u8],
        segment: &Segment,
        summed: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> bool {
        let Some(split) = self.receiving.as_mut().filter(|r| !r.is_joined && !r.is_gone) else {
            return false;
        };
        let ack = segment.ack.wrapping_add(split.offset);
        let is_pure = segment.has(ACK) && !segment.has(RST | SYN | FIN) && segment.payload_len == 0;
        let is_its_own = segment.seq == split.send_seq;
        if !is_pure || !is_its_own || after(split.got, ack) || after(ack, split.end) {
            return false;
        }
        (split.got, split.window) = (ack, segment.window);
        let window = u32::from(segment.window) << self.guest_scale;
        split.edge = later(split.edge, ack.wrapping_add(window));
        let (offset, timestamps) = (split.offset, segment.timestamps(eth));
        if let Some((_, echo)) = timestamps {
            // A fresh one has heard none.
            split.echo = Some(echo).filter(|echo| *echo != 0).or(self.peer_timestamp);
        }
        // As long as it has nothing, nothing may be left of it: not its clock either.
        let (echo, has_bytes) = (split.echo, ack != split.from);
        if !self.twin_speaks() {
            return false;
        }
        self.join();
        self.tell_ended(tell);
        eth[..12].copy_from_slice(&self.macs);
        let mut editor = Editor::new(eth, segment, summed);
        editor.set_seq(self.sent_end);
        let up = |n: u32| n.wrapping_add(offset);
        editor.map_sacks(|left, right| Some((up(left), up(right))));
        let clock = |value| if has_bytes { value } else { self.timestamp.unwrap_or(value) };
        let timestamps = timestamps.map(|(value, own)| (clock(value), own));
        self.speak_for_guest(&mut editor, timestamps, echo);
        true
    }
}

#[cfg(test)]
mod tests;
