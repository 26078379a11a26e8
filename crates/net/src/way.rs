//! How one frame reaches one port: what it needs, whether there is room, past its stages and into its
//! receive queue.

use base::counter::DropReason;
use stage::{Direction, FrameView};

use crate::fdb::PortId;
use crate::features;
use crate::forward::{Outcome, Staging, WhenFull};
use crate::header::{F_DATA_VALID, HEAD_LEN, VNET_LEN, Vnet};
use crate::hold::Refusal;
use crate::metrics::SwitchStats;
use crate::offload::{Need, Plan, complete_checksum, needed};
use crate::port::{Awaited, Port};
use crate::rxq::{Body, Frame, Room, RxQueue};

/// How one frame reaches one port.
pub(crate) struct Way {
    port: PortId,
    queue: u16,
    need: Need,
    plan: Option<Plan>,
    /// The header it arrives with, unless it needs something.
    vnet: Vnet,
}

impl Way {
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
            Need::Segments => Some(Plan::new(frame.eth(), frame.len(), &vnet)?),
            _ => None,
        };
        if plan.as_ref().is_some_and(|plan| plan.longest() > longest) {
            return Err(DropReason::TooBig);
        }
        Ok(Self { port: port.id, queue, need, plan, vnet })
    }

    /// How it is cut, if the receiver takes it in pieces only.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    #[inline]
    pub fn room(
        &self,
        port: &mut Port,
        frame: &Frame<'_>,
        when_full: WhenFull,
        now_ns: u64,
        hold_ns: u64,
        stats: &SwitchStats,
    ) -> Outcome {
        let Some(rxq) = port.rx[usize::from(self.queue)].as_deref_mut() else {
            return Outcome::Dropped(DropReason::LinkDown);
        };
        if !rxq.vring.parts.health.is_live() {
            return Outcome::Dropped(DropReason::LinkDown);
        }
        let room = match &self.plan {
            Some(plan) => rxq.room(plan.count(), plan.longest(), now_ns),
            None => rxq.room(1, frame.len(), now_ns),
        };
        let reason = match (room, when_full) {
            (Room::Yes, _) => return Outcome::Done,
            (Room::No(reason), _) => reason,
            (Room::Wait, WhenFull::Keep) => return Outcome::Hold((self.port, self.queue)),
            (Room::Wait, WhenFull::Drop) => DropReason::ReceiverStalled,
            (Room::Wait, WhenFull::Hold) => match rxq.refuse(now_ns, hold_ns) {
                Refusal::Hold => return Outcome::Hold((self.port, self.queue)),
                Refusal::Stalled { new } => {
                    stats.stalls.add(u64::from(new));
                    DropReason::ReceiverStalled
                }
            },
        };
        if when_full == WhenFull::Drop {
            rxq.vring.parts.stats.drop_one(reason);
        }
        Outcome::Dropped(reason)
    }

    /// What the frame cost the receive queue beyond its bytes.
    #[inline]
    pub fn excess(&self, port: &mut Port, frame: &Frame<'_>) -> u64 {
        let rxq = port.rx[usize::from(self.queue)].as_deref_mut();
        rxq.map_or(0, |rxq| rxq.take_excess(frame.len()))
    }

    /// Past the stages into the receive queue, where there is room.
    #[inline]
    pub fn pass(
        &self,
        port: &mut Port,
        frame: &Frame<'_>,
        staging: &mut Staging,
        touched: &mut Vec<Awaited>,
        stats: &SwitchStats,
    ) -> Outcome {
        let Port { stages, rx, .. } = port;
        let Some(rxq) = rx[usize::from(self.queue)].as_deref_mut() else {
            return Outcome::Dropped(DropReason::LinkDown);
        };
        if !rxq.touched {
            rxq.touched = true;
            touched.push((self.port, self.queue));
        }
        if stages.is_empty() && self.need == Need::Nothing {
            rxq.put(frame, &self.vnet);
            return Outcome::Done;
        }
        if self.need == Need::Nothing && !stages.want_payload {
            return self.put_staged_head(rxq, frame, |view| stages.pass(Direction::ToVm, view));
        }
        if !staging.load(frame) {
            return Outcome::Dropped(DropReason::Malformed);
        }
        if !stages.is_empty() && !stages.pass(Direction::ToVm, &mut staging.view()) {
            return Outcome::Done;
        }
        self.put_own(rxq, staging, stats)
    }

    /// Stages that see headers only: they get a copy of ours, the rest stays where it is.
    fn put_staged_head(
        &self,
        rxq: &mut RxQueue,
        frame: &Frame<'_>,
        pass: impl FnOnce(&mut FrameView<'_>) -> bool,
    ) -> Outcome {
        let mut wire = [0; VNET_LEN + HEAD_LEN];
        let wire = &mut wire[..frame.wire.len()];
        wire.copy_from_slice(frame.wire);
        let header = &mut wire[VNET_LEN..];
        let len_bytes = frame.len() as u32;
        if pass(&mut FrameView { header, payload: &mut [], len_bytes }) {
            rxq.put(&Frame { wire, ..*frame }, &self.vnet);
        }
        Outcome::Done
    }

    /// Puts a frame that is in memory of ours, after doing what the receiver cannot.
    fn put_own(&self, rxq: &mut RxQueue, staging: &mut Staging, stats: &SwitchStats) -> Outcome {
        let plain = Vnet::default();
        match (self.need, &self.plan) {
            (Need::Segments, Some(plan)) => {
                stats.software_segmented.add(1);
                put_segments(rxq, staging.eth(), plan);
            }
            (Need::Checksum, _) => {
                stats.software_checksums.add(1);
                if let Err(reason) = complete_checksum(staging.eth_mut(), &self.vnet) {
                    return Outcome::Dropped(reason);
                }
                rxq.put(&staging.frame(plain), &plain);
            }
            _ => rxq.put(&staging.frame(self.vnet), &self.vnet),
        }
        Outcome::Done
    }
}

fn put_segments(rxq: &mut RxQueue, frame: &[u8], plan: &Plan) {
    let plain = Vnet::default();
    let mut wire = [0; VNET_LEN + HEAD_LEN];
    wire[..VNET_LEN].copy_from_slice(&plain.to_bytes(1));
    for index in 0..plan.count() {
        let n = plan.headers(frame, index, &mut wire[VNET_LEN..]);
        let body = Body::Ours(plan.payload(frame, index));
        rxq.put(&Frame { vnet: plain, wire: &wire[..VNET_LEN + n], body }, &plain);
    }
}
