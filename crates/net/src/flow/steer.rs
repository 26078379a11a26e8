//! Where the switch meets the connections of a port: frames of its guest, frames for it, and frames of
//! its twins.

use base::counter::DropReason;
use sidecore::{Allowance, Ledger, Spent};

use super::build::{MAX_SEGMENT, bare};
use super::icmp::Whose;
use super::segment::{ACK, Answer, FIN, RST, SYN, Segment};
use super::state::{FromGuest, Share, Sum};
use super::{FlowKey, PortFlows, TWIN_MAC, turned};
use crate::engine::Engine;
use crate::fdb::PortId;
use crate::forward::{Dest, Fabric, Outcome, Staging, WhenFull};
use crate::header::{
    Allowed, F_DATA_VALID, F_NEEDS_CSUM, HEAD_LEN, Head, Mac, PLAIN, VNET_LEN, Vnet, flow_hash,
};
use crate::port::{Awaited, MIN_CHARGE_BYTES, Port};
use crate::rxq::{Body, Frame, Room};

/// Room for the copied part of a frame.
pub(crate) type Wire = [u8; VNET_LEN + HEAD_LEN];

/// Frames of twins taken in a turn.
const TWIN_BATCH: usize = 64;

/// What becomes of a frame of the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlowVerdict {
    /// It goes on as it is now.
    Pass,
    /// It ends here.
    Swallow,
    /// This many bytes of the buffer are an answer to the guest, and the frame ends here.
    Answer(usize),
    /// As [`FlowVerdict::Answer`], and the frame goes on as it is now.
    AnswerAndPass(usize),
}

/// Where a frame for the guest goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bound {
    /// The guest gets so many bytes of it, with this header and the beginning that is in the buffer now.
    pub guest: Option<(Vnet, usize)>,
    /// A connection with a twin: to be told once the guest has its own.
    pub told: Option<FlowKey>,
    /// The guest can do without: the next acknowledgement tells it the same.
    pub may_miss: bool,
}

impl PortFlows {
    /// A frame that the guest sends; its beginning is changed in place.
    pub fn guest_sends(&mut self, head: &mut Head, answer: &mut Wire, now_ns: u64) -> FlowVerdict {
        let Some(segment) = Segment::parse(head.eth(), head.frame_len()) else {
            return FlowVerdict::Pass;
        };
        let summed = head.vnet().flags & F_NEEDS_CSUM == 0;
        let Self { table, watch, .. } = self;
        let mut tell = |token, event| watch.flow_event(token, event);
        match table.guest_sends(head.eth_mut(), &segment, summed, now_ns, &mut tell) {
            FromGuest::Pass => FlowVerdict::Pass,
            FromGuest::Bare(len) => {
                head.cut(len);
                FlowVerdict::Pass
            }
            FromGuest::Trimmed(len) => {
                head.trim(len, segment.offset());
                FlowVerdict::Pass
            }
            FromGuest::Drop => FlowVerdict::Swallow,
            FromGuest::Answer => {
                let wire = head.wire();
                answer[..wire.len()].copy_from_slice(wire);
                answer[..VNET_LEN].copy_from_slice(&PLAIN);
                let eth = &mut answer[VNET_LEN..wire.len()];
                let Some(flow) = table.get(&segment.key_of_sender(eth)) else {
                    return FlowVerdict::Swallow;
                };
                let with = flow.answer_to_probe(eth, &segment);
                let len = VNET_LEN + segment.answer(eth, &with);
                if !flow.is_broken {
                    return FlowVerdict::Answer(len);
                }
                let bare = flow.edit_prompt(head.eth_mut(), &segment, summed);
                head.cut(bare);
                match segment.has(RST) {
                    true => FlowVerdict::Pass,
                    false => FlowVerdict::AnswerAndPass(len),
                }
            }
        }
    }

    /// A frame for the guest, the beginning of which is in `wire`: changed in place for the guest.
    ///
    /// # Safety
    /// As [`Fabric::deliver`].
    unsafe fn peer_sends(
        &mut self,
        frame: &Frame<'_>,
        wire: &mut Wire,
        staging: &mut Staging,
        now_ns: u64,
    ) -> Bound {
        let whole = Some((frame.vnet, frame.len()));
        let as_it_is = Bound { guest: whole, told: None, may_miss: false };
        let len = frame.wire.len();
        let Some(segment) = Segment::parse(&wire[VNET_LEN..len], frame.len()) else {
            // SAFETY: the caller's promise.
            let is_guests = unsafe { self.other_comes(frame, wire, staging) };
            return Bound { guest: whole.filter(|_| is_guests), ..as_it_is };
        };
        let key = segment.key_of_receiver(&wire[VNET_LEN..len]);
        let Some(flow) = self.table.get(&key) else { return as_it_is };
        flow.seen_ns = flow.seen_ns.max(now_ns);
        if flow.is_broken && segment.has(ACK) && !segment.has(RST | SYN) {
            // Just what the peer expects. More of them than there is room for come again.
            if self.resets.len() < self.resets.capacity() {
                self.resets.push((key, flow.macs, (segment.ack, segment.end())));
            }
            return Bound { guest: None, ..as_it_is };
        }
        let summed = frame.vnet.flags & F_NEEDS_CSUM == 0;
        let events = &mut self.events;
        let mut tell = |token, event| events.push((token, event));
        let staging = flow.wants_sum(&segment).then_some(staging);
        let sum = look_at_sum(frame, &segment, summed, staging);
        let to = flow.peer_sends(&wire[VNET_LEN..len], &segment, sum, &mut tell);
        let is_note_old = flow.is_note_old();
        let is_told = to.twin != Share::Nothing || flow.split().is_some();
        // Its news come again.
        let is_bare = segment.payload_len == 0 && !segment.has(FIN);
        let may_miss = is_told && (is_bare || to.guest == Share::Bare);
        let copy = (to.twin != Share::Nothing).then(|| {
            let mut copy = *wire;
            flow.edit_for_twin(&mut copy[VNET_LEN..len], &segment, summed, to.twin);
            copy
        });
        if to.guest != Share::Nothing {
            flow.edit_for_guest(&mut wire[VNET_LEN..len], &segment, summed, to.guest);
        }
        if let Some(mut copy) = copy {
            let (vnet, n) = shape(frame, &segment, to.twin);
            copy[..VNET_LEN].copy_from_slice(&vnet.to_bytes(1));
            // SAFETY: the caller's promise.
            unsafe { self.queue(&frame.shortened(vnet, &copy[..len], n)) };
        }
        let guest = (to.guest != Share::Nothing).then(|| shape(frame, &segment, to.guest));
        if let Some((vnet, _)) = guest {
            wire[..VNET_LEN].copy_from_slice(&vnet.to_bytes(1));
        }
        if is_note_old {
            self.table.save(&key);
        }
        Bound { guest, told: is_told.then_some(key), may_miss }
    }

    /// A frame for the guest that is no segment, but perhaps the beginning of one or an error about one.
    /// False: it is not for the guest.
    ///
    /// # Safety
    /// As [`Fabric::deliver`].
    unsafe fn other_comes(
        &mut self,
        frame: &Frame<'_>,
        wire: &mut Wire,
        staging: &mut Staging,
    ) -> bool {
        let len = frame.wire.len();
        match self.error_comes(frame, &mut wire[VNET_LEN..len], staging) {
            Whose::Guests => self.table.fragment_comes(&mut wire[VNET_LEN..len], frame.len()),
            Whose::Nobodys => false,
            Whose::Twins => {
                wire[VNET_LEN..VNET_LEN + TWIN_MAC.len()].copy_from_slice(&TWIN_MAC);
                // SAFETY: the caller's promise.
                unsafe { self.queue(&frame.shortened(frame.vnet, &wire[..len], frame.len())) };
                false
            }
        }
    }

    /// The frame of a twin in `head`, changed in place to one of the guest's. False: not one that may
    /// leave.
    fn twin_sends(&mut self, head: &mut Head) -> bool {
        let Some(segment) = Segment::parse(head.eth(), head.frame_len()) else { return false };
        let summed = head.vnet().flags & F_NEEDS_CSUM == 0;
        let key = segment.key_of_sender(head.eth());
        let Self { table, watch, .. } = self;
        let mut tell = |token, event| watch.flow_event(token, event);
        let Some(flow) = table.get(&key) else { return false };
        flow.edit_from_twin(head.eth_mut(), &segment, summed, &mut tell)
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

/// Whether a segment came as it was sent: what it says is only as good. Whole segments are looked at in
/// `staging`.
fn look_at_sum(
    frame: &Frame<'_>,
    segment: &Segment,
    summed: bool,
    staging: Option<&mut Staging>,
) -> Sum {
    if !summed || frame.vnet.flags & F_DATA_VALID != 0 {
        return Sum::Right;
    }
    let is_right = if segment.payload_len == 0 {
        segment.is_sum_right(frame.eth(), &[])
    } else {
        let Some(staging) = staging else { return Sum::Unknown };
        let first = segment.headers_len();
        staging.load(frame) && {
            let eth = staging.eth();
            segment.is_sum_right(eth, &eth[first..first + segment.payload_len])
        }
    };
    if is_right { Sum::Right } else { Sum::Wrong }
}

impl Fabric {
    /// Looks whether a frame for a port is one of a connection with a twin or a shift. `wire` gets the
    /// beginning that the guest is to have.
    ///
    /// # Safety
    /// As [`Fabric::deliver`].
    pub(crate) unsafe fn steer(
        &mut self,
        to: PortId,
        frame: &Frame<'_>,
        wire: &mut Wire,
        now_ns: u64,
    ) -> Option<Bound> {
        let Self { ports, staging, steered, lent, .. } = self;
        let port = ports.get_mut(usize::from(to))?.as_deref_mut()?;
        let flows = port.flows.as_deref_mut()?;
        wire[..frame.wire.len()].copy_from_slice(frame.wire);
        let (was_idle, was_lent) = (!flows.has_queued(), flows.is_lent);
        // SAFETY: the caller's promise.
        let bound = unsafe { flows.peer_sends(frame, wire, staging, now_ns) };
        // A segment has two events at most.
        if flows.events.len() + 2 > flows.events.capacity() {
            flows.flush();
        }
        if was_idle && flows.has_queued() {
            steered.push(to);
        }
        if !was_lent && flows.is_lent {
            lent.push(to);
        }
        Some(bound)
    }

    /// The guest has got what a segment of the connection told it.
    pub(crate) fn note_told(&mut self, to: PortId, key: &FlowKey, frame: &Frame<'_>) {
        let port = self.ports.get_mut(usize::from(to)).and_then(Option::as_deref_mut);
        let Some(flows) = port.and_then(|port| port.flows.as_deref_mut()) else { return };
        let segment = Segment::parse(frame.eth(), frame.len());
        if let (Some(flow), Some(segment)) = (flows.table.get(key), segment) {
            flow.told_guest(&segment);
        }
    }

    #[cold]
    pub(crate) fn flush_lenders(&mut self) {
        while let Some(to) = self.lent.pop() {
            if let Some(flows) = self.flows_of(to) {
                flows.is_lent = false;
                flows.flush();
            }
        }
    }

    /// Hands twins what was queued for them, and peers their resets.
    pub(crate) fn flush_twins(&mut self) {
        while let Some(to) = self.steered.pop() {
            let Some(flows) = self.flows_of(to) else { continue };
            flows.flush();
            let mut resets = std::mem::take(&mut flows.resets);
            for (key, macs, numbers) in resets.drain(..) {
                self.send_bare(to, &key, &macs, &Answer::plain(RST | ACK, numbers));
            }
            if let Some(flows) = self.flows_of(to) {
                flows.resets = resets;
            }
        }
    }

    fn flows_of(&mut self, port: PortId) -> Option<&mut PortFlows> {
        self.ports.get_mut(usize::from(port))?.as_deref_mut()?.flows.as_deref_mut()
    }

    /// Sends a segment of ours for a port; `macs`: destination, source.
    pub(super) fn send_bare(
        &mut self,
        from: PortId,
        key: &FlowKey,
        macs: &[u8; 12],
        says: &Answer,
    ) {
        let mut out = [0; MAX_SEGMENT];
        let len = bare(&mut out, key, macs, says);
        let frame = Frame { vnet: Vnet::default(), wire: &out[..len], body: Body::Ours(&[]) };
        // To the guest itself it comes as if from nowhere.
        let dest = match self.lookup(Mac::read(macs), from, 0) {
            Dest::Nowhere => Dest::Port(from),
            dest => dest,
        };
        // SAFETY: flushed before `out` goes.
        unsafe { self.deliver(dest, 0, &frame, WhenFull::Drop, 0) };
        self.flush_uplink();
        self.flush_lent();
    }

    /// Has the guest of a connection speak; `key` and `macs` are its own. As it is: in the
    /// guest's numbers, and not looked at.
    pub(super) fn prompt_guest(
        &mut self,
        to: PortId,
        key: &FlowKey,
        macs: &[u8; 12],
        numbers: (u32, u32),
    ) {
        let mut out = [0; MAX_SEGMENT];
        let says = Answer::plain(ACK, numbers);
        let len = bare(&mut out, &key.mirror(), &turned(macs), &says);
        let frame = Frame { vnet: Vnet::default(), wire: &out[..len], body: Body::Ours(&[]) };
        self.send_to_guest(to, 0, &frame, WhenFull::Drop, 0);
    }
}

/// Puts a frame of ours into a port's first receive queue, if there is room.
pub(crate) fn reply(port: &mut Port, touched: &mut Vec<Awaited>, bytes: &[u8], now_ns: u64) {
    let Some(queue) = port.rx_for(0) else { return };
    let Some(rxq) = port.rx[usize::from(queue)].as_deref_mut() else { return };
    let frame = Frame { vnet: Vnet::default(), wire: bytes, body: Body::Ours(&[]) };
    if !rxq.vring.parts.health.is_live() || rxq.room(1, frame.len(), now_ns) != Room::Yes {
        return;
    }
    rxq.put(&frame, &Vnet::default());
    if !std::mem::replace(&mut rxq.touched, true) {
        touched.push((port.id, queue));
    }
}

impl Engine {
    /// A port's turn with what its twins send.
    pub(crate) fn poll_twins(
        &mut self,
        port: &mut Port,
        now_ns: u64,
        ledger: &mut Ledger,
    ) -> usize {
        let Some(mut flows) = port.flows.take() else { return 0 };
        let held = flows.held_on.is_some_and(|at| self.fabric.still_full(at, now_ns));
        let mut work = 0;
        if !held && let Some(mut wire) = flows.wire.take() {
            flows.held_on = None;
            let allowance = ledger.allowance(port.vm, now_ns);
            let mut spent = Spent::default();
            while work < TWIN_BATCH && spent.bytes < allowance.bytes {
                let Some(bytes) = wire.receive() else { break };
                let outcome = self.send_for_twin(port, &mut flows, bytes, now_ns, &mut spent);
                if let Outcome::Hold(awaited) = outcome {
                    flows.held_on = Some(awaited);
                    break;
                }
                wire.release();
                work += 1;
            }
            self.settle_twins(port, &mut flows, wire, (allowance, spent), now_ns, ledger);
        }
        port.flows = Some(flows);
        work
    }

    /// After a turn: pays, and lets the TAP have its buffers back.
    fn settle_twins(
        &mut self,
        port: &mut Port,
        flows: &mut PortFlows,
        mut wire: Box<dyn base::io::Wire>,
        (allowance, spent): (Allowance, Spent),
        now_ns: u64,
        ledger: &mut Ledger,
    ) {
        let more = flows.held_on.is_none() && wire.receive().is_some();
        if spent.requests > 0 {
            ledger.charge(port.vm, spent, more, now_ns);
            self.fabric.unpublished_bytes += spent.bytes;
            port.turn_bytes += spent.bytes;
        } else if more && allowance.is_none() {
            ledger.held_back(port.vm, now_ns);
        }
        flows.unfilled = wire.refill().is_err();
        flows.wire = Some(wire);
    }

    fn send_for_twin(
        &mut self,
        port: &mut Port,
        flows: &mut PortFlows,
        bytes: &[u8],
        now_ns: u64,
        spent: &mut Spent,
    ) -> Outcome {
        let Self { fabric, heads, .. } = self;
        let head = &mut heads[0];
        let drop_one = |reason| {
            flows.stats.drop_one(reason);
            Outcome::Dropped(reason)
        };
        if let Err(reason) = head.load_slice(bytes, Allowed::ALL) {
            return drop_one(reason);
        }
        // Neighbour messages and whatever else a fresh interface has to say: not the guest's.
        if !flows.twin_sends(head) {
            return Outcome::Dropped(DropReason::NoDestination);
        }
        if let Err(reason) = port.binding.admit(port.id, head, &mut fabric.tables, now_ns) {
            flows.stats.drop_one(reason);
            return Outcome::Dropped(reason);
        }
        let dest = fabric.lookup(head.dst(), port.id, now_ns);
        let lane = flow_hash(head.eth()) as usize;
        let wire = head.wire();
        let frame = Frame { vnet: head.vnet(), wire, body: Body::Ours(&bytes[wire.len()..]) };
        // SAFETY: flushed right here, before `bytes` is released or `heads` used again.
        let outcome = unsafe { fabric.deliver(dest, lane, &frame, WhenFull::Hold, now_ns) };
        if matches!(dest, Dest::Uplink | Dest::All) {
            fabric.flush_uplink();
        }
        fabric.flush_lent();
        match outcome {
            Outcome::Hold(_) => return outcome,
            Outcome::Done => {
                flows.stats.requests.add(1);
                flows.stats.bytes.add(head.frame_len() as u64);
            }
            Outcome::Dropped(reason) => flows.stats.drop_one(reason),
        }
        let more = std::mem::take(&mut fabric.flooded_bytes);
        spent.add(head.frame_len() as u64 + more, MIN_CHARGE_BYTES);
        outcome
    }
}

impl PortFlows {
    fn has_queued(&self) -> bool {
        self.used > 0 || !self.events.is_empty() || !self.resets.is_empty()
    }

    /// Whether twins have sent something that can go on now; else the receiver that it waits for.
    pub fn waiting(&mut self) -> (bool, Option<Awaited>, bool) {
        let ready = self.wire.as_mut().is_some_and(|wire| wire.receive().is_some());
        (ready, self.held_on, self.unfilled)
    }
}
