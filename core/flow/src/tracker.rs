//! Connections of one port, found in the frames that the switch shows: frames of its guest, frames
//! for it, and frames of its twins.

use std::sync::Arc;

use base::clock::{Clock, MonotonicClock};
use frame::{
    F_DATA_VALID, F_NEEDS_CSUM, Frame, FrameBuffer, Head, HeadBytes, PLAIN, VNET_LEN, Vnet,
};

use crate::bare_segment::BareSegment;
use crate::icmp::IcmpTarget;
use crate::journal::Journal;
use crate::segment::{ACK, Answer, FIN, RST, SYN, Segment};
use crate::table::FlowTable;
use crate::types::{FlowEvent, FlowWatch, MAX_FLOWS, TWIN_MAC};
use crate::verdict::{Checksum, GuestVerdict, Share};

/// Most resets that wait for [`Tracker::take_resets`]. What a peer sends beyond comes again.
pub const MAX_RESETS: usize = 64;

/// Events that wait for [`Tracker::tell`]. A segment has two at most.
const MAX_EVENTS: usize = 64;

/// Outcome for a frame of the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestOutcome {
    /// The frame goes on as it is now.
    Pass,
    /// The frame ends here.
    Consume,
    /// The buffer's first bytes, this many, are an answer to the guest, and the frame ends here.
    Reply(usize),
    /// The buffer's first bytes, this many, are an answer to the guest, and the frame goes on as it
    /// is now.
    ReplyAndPass(usize),
}

/// Outcome for a frame for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerOutcome {
    /// Header and length of the frame that the guest gets, with the beginning that is in the buffer
    /// now; none: the frame is not for the guest.
    pub guest: Option<(Vnet, usize)>,
    /// Call [`Tracker::delivered`] once the guest has it.
    pub wants_receipt: bool,
    /// The guest can do without: the next acknowledgement tells it the same.
    pub may_miss: bool,
}

impl PeerOutcome {
    fn whole(frame: &Frame<'_>) -> Self {
        let guest = Some((frame.vnet, frame.len()));
        Self { guest, wants_receipt: false, may_miss: false }
    }
}

/// Connections of one port.
pub struct Tracker {
    pub(crate) table: FlowTable,
    watch: Arc<dyn FlowWatch>,
    /// Events that pipes are told once their twins have heard of them.
    events: Vec<(u64, FlowEvent)>,
    /// Resets for peers of connections that are broken.
    resets: Vec<BareSegment>,
}

impl std::fmt::Debug for Tracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracker").finish_non_exhaustive()
    }
}

impl Tracker {
    /// Makes one with an empty table, or the connections in the journal, which is kept from then
    /// on. Allocates megabytes, and nothing after that.
    pub fn new(watch: Arc<dyn FlowWatch>, journal: Option<Journal>) -> Self {
        let table = match journal {
            Some(journal) => FlowTable::restored(journal, MonotonicClock.now_ns()),
            None => FlowTable::new(MAX_FLOWS),
        };
        let (events, resets) = (Vec::with_capacity(MAX_EVENTS), Vec::with_capacity(MAX_RESETS));
        Self { table, watch, events, resets }
    }

    /// Takes a frame that the guest sends; its beginning is changed in place. An answer to the
    /// guest is written to `reply`.
    pub fn guest_sends(
        &mut self,
        head: &mut Head,
        reply: &mut HeadBytes,
        now_ns: u64,
    ) -> GuestOutcome {
        let Some(segment) = Segment::parse(head.eth(), head.frame_len()) else {
            return GuestOutcome::Pass;
        };
        let summed = head.vnet().flags & F_NEEDS_CSUM == 0;
        let Self { table, watch, .. } = self;
        let mut tell = |token, event| watch.flow_event(token, event);
        match table.guest_sends(head.eth_mut(), &segment, summed, now_ns, &mut tell) {
            GuestVerdict::Pass => GuestOutcome::Pass,
            GuestVerdict::Bare(len) => {
                head.cut(len);
                GuestOutcome::Pass
            }
            GuestVerdict::Trimmed(len) => {
                head.trim(len, segment.offset());
                GuestOutcome::Pass
            }
            GuestVerdict::Drop => GuestOutcome::Consume,
            GuestVerdict::Answer => self.answer(head, &segment, summed, reply),
        }
    }

    /// Answers a probe of the guest's in the peer's place.
    fn answer(
        &mut self,
        head: &mut Head,
        segment: &Segment,
        summed: bool,
        reply: &mut HeadBytes,
    ) -> GuestOutcome {
        let bytes = head.bytes();
        reply[..bytes.len()].copy_from_slice(bytes);
        reply[..VNET_LEN].copy_from_slice(&PLAIN);
        let eth = &mut reply[VNET_LEN..bytes.len()];
        let Some(flow) = self.table.get(&segment.key_of_sender(eth)) else {
            return GuestOutcome::Consume;
        };
        let with = flow.answer_to_probe(eth, segment);
        let len = VNET_LEN + segment.answer(eth, &with);
        if !flow.is_broken {
            return GuestOutcome::Reply(len);
        }
        let bare = flow.edit_prompt(head.eth_mut(), segment, summed);
        head.cut(bare);
        match segment.has(RST) {
            true => GuestOutcome::Pass,
            false => GuestOutcome::ReplyAndPass(len),
        }
    }

    /// Takes a frame for the guest, the beginning of which is in `head` too: changed there for the
    /// guest. The twin's share of it is handed to `to_twin`. `buffer` is room for a whole frame, to
    /// look at its checksum.
    pub fn peer_sends(
        &mut self,
        frame: &Frame<'_>,
        head: &mut HeadBytes,
        buffer: &mut FrameBuffer,
        now_ns: u64,
        to_twin: impl FnMut(&Frame<'_>),
    ) -> PeerOutcome {
        let mut to_twin = to_twin;
        let as_it_is = PeerOutcome::whole(frame);
        let len = frame.head.len();
        let Some(segment) = Segment::parse(&head[VNET_LEN..len], frame.len()) else {
            let is_guests = self.other_comes(frame, head, buffer, to_twin);
            return PeerOutcome { guest: as_it_is.guest.filter(|_| is_guests), ..as_it_is };
        };
        let key = segment.key_of_receiver(&head[VNET_LEN..len]);
        let Some(flow) = self.table.get(&key) else { return as_it_is };
        flow.seen_ns = flow.seen_ns.max(now_ns);
        if flow.is_broken && segment.has(ACK) && !segment.has(RST | SYN) {
            // Just what the peer expects.
            if self.resets.len() < MAX_RESETS {
                let says = Answer::plain(RST | ACK, (segment.ack, segment.end()));
                self.resets.push(BareSegment::new(&key, &flow.macs, &says));
            }
            return PeerOutcome { guest: None, ..as_it_is };
        }
        let summed = frame.vnet.flags & F_NEEDS_CSUM == 0;
        let events = &mut self.events;
        let mut tell = |token, event| events.push((token, event));
        let buffer = flow.wants_checksum(&segment).then_some(buffer);
        let sum = check_sum(frame, &segment, summed, buffer);
        let to = flow.peer_sends(&head[VNET_LEN..len], &segment, sum, &mut tell);
        let is_record_stale = flow.is_record_stale();
        let wants_receipt = to.twin != Share::Nothing || flow.receive.split().is_some();
        // Its news come again.
        let is_bare = segment.payload_len == 0 && !segment.has(FIN);
        let may_miss = wants_receipt && (is_bare || to.guest == Share::Bare);
        let copy = (to.twin != Share::Nothing).then(|| {
            let mut copy = *head;
            flow.edit_for_twin(&mut copy[VNET_LEN..len], &segment, summed, to.twin);
            copy
        });
        if to.guest != Share::Nothing {
            flow.edit_for_guest(&mut head[VNET_LEN..len], &segment, summed, to.guest);
        }
        if let Some(mut copy) = copy {
            let (vnet, n) = shape(frame, &segment, to.twin);
            copy[..VNET_LEN].copy_from_slice(&vnet.to_bytes(1));
            to_twin(&frame.shortened(vnet, &copy[..len], n));
        }
        let guest = (to.guest != Share::Nothing).then(|| shape(frame, &segment, to.guest));
        if let Some((vnet, _)) = guest {
            head[..VNET_LEN].copy_from_slice(&vnet.to_bytes(1));
        }
        if is_record_stale {
            self.table.save(&key);
        }
        PeerOutcome { guest, wants_receipt, may_miss }
    }

    /// Takes a frame for the guest that is no segment, but perhaps the beginning of one or an error
    /// about one. False: it is not for the guest.
    fn other_comes(
        &mut self,
        frame: &Frame<'_>,
        head: &mut HeadBytes,
        buffer: &mut FrameBuffer,
        mut to_twin: impl FnMut(&Frame<'_>),
    ) -> bool {
        let len = frame.head.len();
        match self.table.error_comes(frame, &mut head[VNET_LEN..len], buffer) {
            IcmpTarget::Guest => self.table.fragment_comes(&mut head[VNET_LEN..len], frame.len()),
            IcmpTarget::Nobody => false,
            IcmpTarget::Twin => {
                head[VNET_LEN..VNET_LEN + TWIN_MAC.len()].copy_from_slice(&TWIN_MAC);
                to_twin(&frame.shortened(frame.vnet, &head[..len], frame.len()));
                false
            }
        }
    }

    /// Notes that the guest has got this frame.
    pub fn delivered(&mut self, frame: &Frame<'_>) {
        let Some(segment) = Segment::parse(frame.eth(), frame.len()) else { return };
        if let Some(flow) = self.table.get(&segment.key_of_receiver(frame.eth())) {
            flow.note_delivery(&segment);
        }
    }

    /// Takes the frame of a twin in `head`, changed in place to one of the guest's. False: it may
    /// not leave.
    pub fn twin_sends(&mut self, head: &mut Head) -> bool {
        let Some(segment) = Segment::parse(head.eth(), head.frame_len()) else { return false };
        let summed = head.vnet().flags & F_NEEDS_CSUM == 0;
        let key = segment.key_of_sender(head.eth());
        let Self { table, watch, .. } = self;
        let mut tell = |token, event| watch.flow_event(token, event);
        let Some(flow) = table.get(&key) else { return false };
        flow.edit_from_twin(head.eth_mut(), &segment, summed, &mut tell)
    }

    /// Whether events or resets wait.
    pub fn has_news(&self) -> bool {
        !self.events.is_empty() || !self.resets.is_empty()
    }

    /// Whether events have to be told before the next frame is shown.
    pub fn is_full(&self) -> bool {
        self.events.len() + 2 > MAX_EVENTS
    }

    /// Tells pipes what has come. Their twins must have what was handed to them before.
    pub fn tell(&mut self) {
        for (token, event) in self.events.drain(..) {
            self.watch.flow_event(token, event);
        }
    }

    /// Takes the resets that peers of broken connections are to get.
    pub fn take_resets(&mut self) -> impl Iterator<Item = BareSegment> + '_ {
        self.resets.drain(..)
    }
}

/// Header and length of somebody's share of a frame.
fn shape(frame: &Frame<'_>, segment: &Segment, share: Share) -> (Vnet, usize) {
    let len = share.frame_len(segment, frame.len());
    let vnet = match share {
        Share::Nothing | Share::Bare => Vnet::default(),
        Share::Whole => frame.vnet,
        Share::First(_) => frame.vnet.trimmed(len, segment.offset()),
    };
    (vnet, len)
}

/// Checks whether a segment came as it was sent: what it says is only as good. Whole segments are
/// looked at in `buffer`.
fn check_sum(
    frame: &Frame<'_>,
    segment: &Segment,
    summed: bool,
    buffer: Option<&mut FrameBuffer>,
) -> Checksum {
    if !summed || frame.vnet.flags & F_DATA_VALID != 0 {
        return Checksum::Right;
    }
    let is_right = if segment.payload_len == 0 {
        segment.is_sum_right(frame.eth(), &[])
    } else {
        let Some(buffer) = buffer else { return Checksum::Unknown };
        let first = segment.headers_len();
        buffer.load(frame) && {
            let eth = buffer.eth();
            segment.is_sum_right(eth, &eth[first..first + segment.payload_len])
        }
    };
    if is_right { Checksum::Right } else { Checksum::Wrong }
}
