//! The delivery of one frame to one port: what it needs, whether there is room, into its receive
//! queue.

use base::counter::DropReason;
use frame::{
    Body, F_DATA_VALID, Frame, FrameBuffer, HEAD_LEN, SegmentPlan, VNET_LEN, Vnet,
    complete_checksum,
};

use crate::backpressure::Refusal;
use crate::fdb::PortId;
use crate::features;
use crate::metrics::SwitchStats;
use crate::offload::{Need, needed};
use crate::outcome::{Awaited, Held, Outcome, Sender, WhenFull};
use crate::port::Port;
use crate::rxq::{Room, RxQueue};

/// How one frame reaches one port.
pub(crate) struct Delivery {
    port: PortId,
    queue: u16,
    need: Need,
    plan: Option<SegmentPlan>,
    /// The header it arrives with, unless it needs something.
    vnet: Vnet,
}

impl Delivery {
    /// Finds what a frame needs at this port; or why the port does not take it.
    #[inline]
    pub fn find(port: &Port, lane: usize, frame: &Frame<'_>) -> Result<Self, DropReason> {
        let queue = port.rx_for(lane).ok_or(DropReason::LinkDown)?;
        if !port.link_up {
            return Err(DropReason::LinkDown);
        }
        if port.filter.as_ref().is_some_and(|filter| !filter.takes(frame.eth())) {
            return Err(DropReason::NoDestination);
        }
        let mut vnet = frame.vnet;
        let longest = port.longest();
        if !vnet.is_gso() && frame.len() > longest {
            return Err(DropReason::TooBig);
        }
        if vnet.flags == F_DATA_VALID && port.rx_features & features::GUEST_CSUM == 0 {
            vnet.flags = 0;
        }
        let need = needed(&vnet, frame.eth(), port.rx_features);
        let plan = match need {
            Need::Segments => Some(SegmentPlan::new(frame.eth(), frame.len(), &vnet)?),
            _ => None,
        };
        if plan.as_ref().is_some_and(|plan| plan.longest() > longest) {
            return Err(DropReason::TooBig);
        }
        Ok(Self { port: port.id, queue, need, plan, vnet })
    }

    /// How it is cut, if the receiver takes it in pieces only.
    pub fn plan(&self) -> Option<&SegmentPlan> {
        self.plan.as_ref()
    }

    /// Whether there is room for the frame now; else what becomes of it.
    #[inline]
    pub fn room(
        &self,
        port: &mut Port,
        frame: &Frame<'_>,
        when_full: WhenFull,
        sender: &Sender,
        stats: &SwitchStats,
    ) -> Result<(), Outcome> {
        let Some(rxq) = port.rx[usize::from(self.queue)].as_deref_mut() else {
            return Err(Outcome::Dropped(DropReason::LinkDown));
        };
        if !rxq.vring.parts.health.is_live() {
            return Err(Outcome::Dropped(DropReason::LinkDown));
        }
        let on = (self.port, self.queue);
        let may_wait = when_full == WhenFull::Hold && sender.may_wait();
        if may_wait && rxq.is_before_window(sender, frame.eth()) && rxq.wait_for_window(sender) {
            return Err(Outcome::Hold(Held { on, window_since_ns: Some(sender.now_ns) }));
        }
        let held = Held { on, window_since_ns: None };
        let room = match &self.plan {
            Some(plan) => rxq.room(plan.count(), plan.longest(), sender.now_ns),
            None => rxq.room(1, frame.len(), sender.now_ns),
        };
        let reason = match (room, when_full) {
            (Room::Yes, _) => return Ok(()),
            (Room::No(reason), _) => reason,
            (Room::Wait, WhenFull::Keep) => return Err(Outcome::Hold(held)),
            (Room::Wait, WhenFull::Drop) => DropReason::ReceiverStalled,
            (Room::Wait, WhenFull::Hold) => match rxq.refuse(sender) {
                Refusal::Hold => return Err(Outcome::Hold(held)),
                Refusal::Stalled { new } => {
                    stats.stalls.add(u64::from(new));
                    DropReason::ReceiverStalled
                }
            },
        };
        if when_full == WhenFull::Drop {
            rxq.vring.parts.stats.drop_one(reason);
        }
        Err(Outcome::Dropped(reason))
    }

    /// Cost of the frame at the receive queue beyond its bytes.
    #[inline]
    pub fn excess(&self, port: &mut Port, frame: &Frame<'_>) -> u64 {
        let rxq = port.rx[usize::from(self.queue)].as_deref_mut();
        rxq.map_or(0, |rxq| rxq.take_excess(frame.len()))
    }

    /// Puts the frame into the receive queue, where there is room.
    #[inline]
    pub fn put(
        &self,
        port: &mut Port,
        frame: &Frame<'_>,
        buffer: &mut FrameBuffer,
        touched: &mut Vec<Awaited>,
        stats: &SwitchStats,
    ) -> Outcome {
        let Some(rxq) = port.rx[usize::from(self.queue)].as_deref_mut() else {
            return Outcome::Dropped(DropReason::LinkDown);
        };
        if !rxq.touched {
            rxq.touched = true;
            touched.push((self.port, self.queue));
        }
        if self.need == Need::Nothing {
            rxq.put(frame, &self.vnet);
            return Outcome::Sent;
        }
        if !buffer.load(frame) {
            return Outcome::Dropped(DropReason::Malformed);
        }
        self.put_own(rxq, buffer, stats)
    }

    /// Puts a frame that is in memory of ours, after doing what the receiver cannot.
    fn put_own(&self, rxq: &mut RxQueue, buffer: &mut FrameBuffer, stats: &SwitchStats) -> Outcome {
        let plain = Vnet::default();
        match (self.need, &self.plan) {
            (Need::Segments, Some(plan)) => {
                stats.software_segmented.add(1);
                put_segments(rxq, buffer.eth(), plan);
            }
            (Need::Checksum, _) => {
                stats.software_checksums.add(1);
                if let Err(reason) = complete_checksum(buffer.eth_mut(), &self.vnet) {
                    return Outcome::Dropped(reason);
                }
                rxq.put(&buffer.frame(plain), &plain);
            }
            _ => rxq.put(&buffer.frame(self.vnet), &self.vnet),
        }
        Outcome::Sent
    }
}

fn put_segments(rxq: &mut RxQueue, frame: &[u8], plan: &SegmentPlan) {
    let plain = Vnet::default();
    let mut head = [0; VNET_LEN + HEAD_LEN];
    head[..VNET_LEN].copy_from_slice(&plain.to_bytes(1));
    for index in 0..plan.count() {
        let n = plan.headers(frame, index, &mut head[VNET_LEN..]);
        let body = Body::Ours(plan.payload(frame, index));
        rxq.put(&Frame { vnet: plain, head: &head[..VNET_LEN + n], body }, &plain);
    }
}
