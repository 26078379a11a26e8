//! A twin that sends for the guest: what becomes of segments beside it, and of its own.

use crate::segment::{ACK, Answer, ECE, Editor, FIN, RST, SYN, Segment, after, later};
use crate::state::{Flow, FromGuest, Share, ToLocal};
use crate::{FlowEvent, TWIN_MAC};

/// A twin sends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sending {
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

impl Flow {
    /// The guest sends while a twin sends for it: what it sent before may be sent again, what comes
    /// now has to wait, and what it acknowledges goes on.
    pub(crate) fn beside_twin(
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

    /// Who gets a segment of the peer's that has been heard, when the stream is not split.
    pub(crate) fn beside_sender(
        &mut self,
        segment: &Segment,
        is_sane: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> ToLocal {
        let Some(twin) = self.twin.as_mut() else { return ToLocal::GUEST };
        let guest = |is| if is { Share::Whole } else { Share::Nothing };
        let has_data = segment.payload_len > 0 || segment.has(FIN);
        if !is_sane {
            return ToLocal { guest: guest(has_data), twin: Share::Nothing };
        }
        let for_guest = if after(segment.ack, twin.start) { twin.start } else { segment.ack };
        let is_news = after(for_guest, twin.guest_acked);
        let is_twins = !after(twin.start, segment.ack);
        let (token, is_done) = (twin.token, !after(twin.target, segment.ack));
        if is_done && !std::mem::replace(&mut twin.target_told, true) {
            tell(token, FlowEvent::Acknowledged);
        }
        // What acknowledges old bytes of the guest's twice may be its loss: its business.
        let twin = if is_twins { Share::Bare } else { Share::Nothing };
        ToLocal { guest: guest(has_data || is_news || !is_twins), twin }
    }

    /// The guest got this segment.
    pub fn told_guest(&mut self, segment: &Segment) {
        self.told_beside_receiver(segment);
        if let Some(twin) = self.twin.as_mut()
            && segment.has(ACK)
            && !after(segment.ack, self.sent_end)
        {
            let ack = if after(segment.ack, twin.start) { twin.start } else { segment.ack };
            twin.guest_acked = later(twin.guest_acked, ack);
        }
    }

    /// Makes a segment of the peer's one for the twin, or its share of it. The payload of one that is cut
    /// must have been summed: its checksum is made anew.
    pub fn edit_for_twin(&self, eth: &mut [u8], segment: &Segment, summed: bool, share: Share) {
        eth[..TWIN_MAC.len()].copy_from_slice(&TWIN_MAC);
        let mut editor = Editor::new(eth, segment, summed);
        match (self.twin, self.receiving) {
            (Some(twin), _) => editor.set_seq(twin.receive_seq),
            (None, Some(receiving)) => receiving.edit(&mut editor, segment),
            (None, None) => {}
        }
        share.cut(&mut editor);
    }

    /// A segment of the twin's: it gets the guest's side of what it says. False: it has nothing to say.
    pub fn edit_from_twin(
        &mut self,
        eth: &mut [u8],
        segment: &Segment,
        summed: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> bool {
        let Some(twin) = self.twin else {
            return self.edit_from_receiver(eth, segment, summed, tell);
        };
        let is_its_own = !after(twin.start.wrapping_sub(1), segment.seq);
        if segment.has(RST | SYN | FIN) || !segment.has(ACK) || !is_its_own {
            return false;
        }
        self.sent_end = later(self.sent_end, segment.end());
        let timestamps = segment.timestamps(eth);
        eth[..12].copy_from_slice(&self.macs);
        self.speak_for_guest(
            &mut Editor::new(eth, segment, summed),
            timestamps,
            self.peer_timestamp,
        );
        true
    }

    /// What a twin's segment says in the guest's place: what has arrived, how much is taken, whether there
    /// is congestion, and timestamps, which never go back. `echo` is the peer's last, if it is known.
    pub(crate) fn speak_for_guest(
        &mut self,
        editor: &mut Editor<'_>,
        timestamps: Option<(u32, u32)>,
        echo: Option<u32>,
    ) {
        editor.set_ack(self.wire_ack());
        editor.set_window(self.wire_window());
        if !self.guest_ece {
            editor.clear_flags(ECE);
        }
        if let (Some((value, own)), Some(last)) = (timestamps, self.timestamp) {
            let value = later(last, value);
            self.timestamp = Some(value);
            editor.set_timestamps(value, echo.unwrap_or(own));
        }
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
