//! Sending half of a connection: the guest's bytes, and those of a twin that sends for it.
//!
//! Nothing here knows of the receiving half. All sequence numbers are the wire's.

use crate::segment::{ACK, FIN, RST, Segment, after, later};
use crate::types::{FlowError, FlowEvent, FlowSnapshot};
use crate::verdict::{GuestVerdict, Share, Shares};

/// Distance in bytes over which selective acknowledgements are looked at, and the most that a twin
/// receives: half of what numbers can be compared over.
pub(crate) const MAX_BACK: u32 = 1 << 30;

/// A twin that sends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendingTwin {
    /// First byte that is the twin's.
    pub start: u32,
    /// End of its bytes: acknowledged so far, it has nothing more to do.
    pub target: u32,
    /// The pipe was told that the target is reached.
    pub target_told: bool,
    /// The peer's number that the twin waits for, for ever.
    pub receive_seq: u32,
    /// Name of its pipe in events.
    pub token: u64,
    /// Acknowledgement that the guest was told last.
    pub guest_acked: u32,
}

/// Bytes from the guest's side to the peer.
#[derive(Debug, Default)]
pub(crate) struct SendHalf {
    /// The guest's own number of its first byte; none: its SYN was not seen.
    pub base: Option<u32>,
    /// Behind the last byte that was sent, by guest or twin.
    pub end: u32,
    /// The peer has everything before.
    pub acked: u32,
    /// First number that is the guest's now: older ones were a twin's, or are acknowledged.
    pub guest_from: u32,
    /// The peer's window, as it stood in its header.
    pub window: u16,
    /// The guest has sent its FIN.
    pub is_closed: bool,
    pub twin: Option<SendingTwin>,
}

impl SendHalf {
    /// The twin of that pipe.
    pub fn twin_of(&self, token: u64) -> Option<SendingTwin> {
        self.twin.filter(|twin| twin.token == token)
    }

    /// Judges a segment of the guest's beside a twin: what was sent before may be sent again, what
    /// comes now has to wait, and what it acknowledges goes on. `seq` and `end` are the wire's.
    pub fn judge_beside_twin(
        &mut self,
        segment: &Segment,
        seq: u32,
        end: u32,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> GuestVerdict {
        let acked = self.acked;
        let Some(twin) = self.twin.as_mut() else { return GuestVerdict::Pass };
        if segment.has(RST) {
            tell(twin.token, FlowEvent::Reset);
            return GuestVerdict::Pass;
        }
        // A keepalive probe, or one of a closed window: an old byte or none, in front of what the
        // guest sends next, all before it acknowledged.
        let is_all_acked = !after(twin.start, acked);
        if segment.payload_len <= 1 && seq == twin.start.wrapping_sub(1) && is_all_acked {
            return GuestVerdict::Answer;
        }
        // It does not know that the peer has these: the next acknowledgement is for it too.
        if end != seq && after(twin.guest_acked, seq) {
            twin.guest_acked = seq;
        }
        if !after(end, twin.start) {
            return GuestVerdict::Pass;
        }
        // A part of it is old: the peer may wait for just that, and the twin with it.
        if after(twin.start, seq) && segment.payload_len > 0 {
            return GuestVerdict::Trimmed(twin.start.wrapping_sub(seq) as usize);
        }
        if segment.has(ACK) { GuestVerdict::Bare(0) } else { GuestVerdict::Drop }
    }

    /// Shares of guest and sending twin in a segment of the peer's, whose stream is not split.
    /// `is_sane`: it acknowledges nothing that was never sent.
    pub fn share(
        &mut self,
        segment: &Segment,
        is_sane: bool,
        tell: &mut dyn FnMut(u64, FlowEvent),
    ) -> Shares {
        let Some(twin) = self.twin.as_mut() else { return Shares::GUEST };
        let guest = |is| if is { Share::Whole } else { Share::Nothing };
        let has_data = segment.payload_len > 0 || segment.has(FIN);
        if !is_sane {
            return Shares { guest: guest(has_data), twin: Share::Nothing };
        }
        let for_guest = if after(segment.ack, twin.start) { twin.start } else { segment.ack };
        let is_news = after(for_guest, twin.guest_acked);
        let is_twins = !after(twin.start, segment.ack);
        let (token, is_done) = (twin.token, !after(twin.target, segment.ack));
        if is_done && !std::mem::replace(&mut twin.target_told, true) {
            tell(token, FlowEvent::Acknowledged);
        }
        // An acknowledgement of old bytes of the guest's that comes twice may tell of a loss: that
        // is for the guest to judge.
        let twin = if is_twins { Share::Bare } else { Share::Nothing };
        Shares { guest: guest(has_data || is_news || !is_twins), twin }
    }

    /// Notes the acknowledgement of a segment that the guest got.
    pub fn note_delivery(&mut self, segment: &Segment) {
        if let Some(twin) = self.twin.as_mut()
            && segment.has(ACK)
            && !after(segment.ack, self.end)
        {
            let ack = if after(segment.ack, twin.start) { twin.start } else { segment.ack };
            twin.guest_acked = later(twin.guest_acked, ack);
        }
    }

    /// Notes acknowledgement and window of a segment of the peer's. False: it acknowledges nothing,
    /// or what was never sent.
    pub fn note_peer_ack(&mut self, segment: &Segment) -> bool {
        // Nobody can have what was never sent.
        if !segment.has(ACK) || after(segment.ack, self.end) {
            return false;
        }
        if !after(self.acked, segment.ack) {
            self.acked = segment.ack;
            self.window = segment.window;
            // Numbers are only compared over half of their space.
            if self.twin.is_none() && self.acked.wrapping_sub(self.guest_from) > MAX_BACK {
                self.guest_from = self.acked.wrapping_sub(MAX_BACK);
            }
        }
        true
    }

    /// Has a twin send `len` bytes behind those of the guest's.
    pub fn start(&mut self, token: u64, snapshot: &FlowSnapshot, len: u32) {
        let start = snapshot.send_seq;
        self.twin = Some(SendingTwin {
            start,
            target: start.wrapping_add(len),
            target_told: false,
            receive_seq: snapshot.receive_seq,
            token,
            guest_acked: self.acked,
        });
    }

    /// Gives the twin another length. True: all of it is acknowledged already.
    pub fn retarget(&mut self, token: u64, len: u32) -> bool {
        let acked = self.acked;
        let Some(twin) = self.twin.as_mut().filter(|twin| twin.token == token) else {
            return false;
        };
        twin.target = twin.start.wrapping_add(len);
        twin.target_told = !after(twin.target, acked);
        twin.target_told
    }

    /// Ends the twin, all of whose bytes the peer has. Returns how many these are; 0: that pipe has
    /// no twin.
    pub fn finish(&mut self, token: u64, len: u32) -> Result<u32, FlowError> {
        let Some(twin) = self.twin_of(token) else { return Ok(0) };
        let end = twin.start.wrapping_add(len);
        // A twin that sent nothing can lose nothing.
        if self.end != end || (len > 0 && after(end, self.acked)) {
            return Err(FlowError::Broken);
        }
        self.twin = None;
        if len > 0 {
            self.guest_from = end;
        }
        Ok(len)
    }

    /// Ends the twin, some of whose bytes are lost. Returns how many the peer has; none: that pipe
    /// has no twin.
    pub fn give_up(&mut self, token: u64) -> Option<u32> {
        let twin = self.twin.take_if(|twin| twin.token == token)?;
        Some(later(self.acked, twin.start).wrapping_sub(twin.start))
    }
}
