//! Frames from the uplink that wait for a receiver.
//!
//! Frames from the uplink come one behind the other, for all VMs, so none is left where it is for
//! one of them. But a peer out there sends a window's worth at once, in super-packets that one with
//! few buffers must get in pieces: a boot loader with eight of them would lose most of each burst,
//! and its connection would crawl. So what finds no buffers is copied, cut into what the receiver
//! takes, and put into its ring as it posts buffers, in the order in which it came.
//!
//! The memory is the switch's: a fixed number of buffers, made with the uplink, one for a receiver
//! at a time, and only while it has something in it. A receiver that takes nothing for a second
//! loses all of it, and gets no buffer again before it has taken a frame without. Where no buffer
//! is left, frames are dropped as if there were none.
//!
//! Ports with a hook have none: it looks at a frame once, as it arrives.

use base::counter::DropReason;
use frame::{Allowed, Body, Frame, HEAD_LEN, Head, SegmentPlan, VNET_LEN, Vnet};
use sidecore::VmId;

use crate::delivery::Delivery;
use crate::engine::Engine;
use crate::fdb::PortId;
use crate::forward::{Fabric, Outcome, WhenFull};
use crate::port::Port;

/// Bytes of one receiver's buffer: two windows of 256 KiB, the largest that boot loaders announce.
const BUFFER_LEN_BYTES: usize = 512 << 10;
/// Receivers of a switch that may have one at a time: 16 MiB, which are touched when they are used.
const MAX_BUFFERS: usize = 32;
/// Buffers of one VM: with more, the ports of one that takes a frame a second could keep those of
/// all others.
const MAX_BUFFERS_PER_VM: usize = MAX_BUFFERS / 4;
/// A receiver that takes nothing for so long is dead: Linux' first retransmission is long over
/// then.
const PATIENCE_NS: u64 = 1_000_000_000;
/// Frames of one receiver in a round: the others wait for their turn meanwhile.
const MAX_ROUND_FRAMES: usize = 64;
/// In front of each frame: its length and its lane.
const RECORD_LEN: usize = 8;

/// Frames that wait for one receiver, oldest first.
#[derive(Debug)]
pub(crate) struct Backlog {
    bytes: Box<[u8]>,
    /// Offsets at which the oldest begins, and the newest ends.
    start: usize,
    end: usize,
    count: u64,
    /// When the receiver last took something.
    since_ns: u64,
}

impl Backlog {
    fn new() -> Self {
        let bytes = vec![0; BUFFER_LEN_BYTES].into_boxed_slice();
        Self { bytes, start: 0, end: 0, count: 0, since_ns: 0 }
    }

    fn clear(&mut self) {
        (self.start, self.end, self.count) = (0, 0, 0);
    }

    /// Adds a frame with its virtio-net header, in two parts. False: no room.
    fn push(&mut self, lane: usize, wire: &[u8], rest: &[u8]) -> bool {
        let len = wire.len() + rest.len();
        let need = RECORD_LEN + len;
        if self.end + need > self.bytes.len() {
            // Moved only when half of it is free: a byte is moved once for each that goes.
            if self.start < self.bytes.len() / 2 {
                return false;
            }
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut put = |bytes: &[u8]| {
            self.bytes[self.end..self.end + bytes.len()].copy_from_slice(bytes);
            self.end += bytes.len();
        };
        put(&(len as u32).to_ne_bytes());
        put(&(lane as u32).to_ne_bytes());
        put(wire);
        put(rest);
        self.count += 1;
        true
    }

    /// The oldest frame: its lane, and its bytes with the virtio-net header.
    fn front(&self) -> Option<(usize, &[u8])> {
        let record = &self.bytes[self.start..self.end];
        let (head, rest) = record.split_at_checked(RECORD_LEN)?;
        let word = |at| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        Some((word(4) as usize, &rest[..word(0) as usize]))
    }

    fn pop(&mut self) {
        let Some((_, bytes)) = self.front() else { return };
        self.start += RECORD_LEN + bytes.len();
        self.count -= 1;
        if self.start == self.end {
            self.clear();
        }
    }
}

/// The switch's buffers, and who has one.
#[derive(Debug, Default)]
pub(crate) struct Backlogs {
    spare: Vec<Backlog>,
    waiting: Vec<PortId>,
}

impl Backlogs {
    /// Makes those of a switch with an uplink. Allocates: not on a sidecore.
    pub fn new() -> Self {
        let spare = std::iter::repeat_with(Backlog::new).take(MAX_BUFFERS).collect();
        Self { spare, waiting: Vec::with_capacity(MAX_BUFFERS) }
    }

    /// Whether there are none: the switch has had no uplink yet.
    pub fn is_none(&self) -> bool {
        self.spare.is_empty() && self.waiting.is_empty()
    }

    /// Ports whose frames wait.
    pub fn waiting(&self) -> &[PortId] {
        &self.waiting
    }

    /// Takes back what a port has that goes.
    pub fn reclaim(&mut self, port: &mut Port) {
        if let Some(mut backlog) = port.backlog.take() {
            backlog.clear();
            self.spare.push(backlog);
            self.waiting.retain(|id| *id != port.id);
        }
    }
}

impl Port {
    /// When what waits for it is given up; none when nothing does.
    pub fn backlog_ends_ns(&self) -> Option<u64> {
        self.backlog.as_ref().map(|backlog| backlog.since_ns.saturating_add(PATIENCE_NS))
    }

    /// The receive queue that the oldest frame waits for.
    pub fn backlog_queue(&self) -> Option<u16> {
        let (lane, _) = self.backlog.as_ref()?.front()?;
        self.rx_for(lane)
    }

    fn drop_for(&self, lane: usize, count: u64) {
        let queue = self.rx_for(lane).and_then(|queue| self.rx[usize::from(queue)].as_ref());
        if let Some(rxq) = queue {
            rxq.vring.parts.stats.drops[DropReason::ReceiverStalled as usize].add(count);
        }
    }
}

impl Fabric {
    /// Sends a frame of the uplink's to one port, or keeps it until that has room. None: this port
    /// keeps nothing.
    pub fn send_or_keep(
        &mut self,
        to: PortId,
        lane: usize,
        frame: &Frame<'_>,
        now_ns: u64,
    ) -> Option<Outcome> {
        let port = self.ports.get(usize::from(to))?.as_deref()?;
        if port.hook.is_some() {
            return None;
        }
        if port.backlog.is_none() {
            let outcome = self.send_to_guest(to, lane, frame, WhenFull::Keep, now_ns);
            let port = self.ports[usize::from(to)].as_deref_mut()?;
            port.is_stuck &= outcome != Outcome::Sent;
            if !matches!(outcome, Outcome::Hold(_)) {
                return Some(outcome);
            }
        }
        Some(self.keep(to, lane, frame, now_ns))
    }

    /// Whether its VM has fewer buffers than one may have. Ports without a VM have no share.
    fn may_have_backlog(&self, port: PortId) -> bool {
        let vm = self.vm_of(port);
        let of_vm = |other: &&PortId| self.vm_of(**other) == vm;
        vm == VmId::NONE || self.backlogs.waiting.iter().filter(of_vm).count() < MAX_BUFFERS_PER_VM
    }

    fn keep(&mut self, to: PortId, lane: usize, frame: &Frame<'_>, now_ns: u64) -> Outcome {
        let stalled = Outcome::Dropped(DropReason::ReceiverStalled);
        let needs_one = |port: &Port| port.backlog.is_none() && !port.is_stuck;
        let port = self.ports[usize::from(to)].as_deref();
        let may_have_one = port.is_some_and(needs_one) && self.may_have_backlog(to);
        let Self { ports, backlogs, buffer, .. } = self;
        let Some(port) = ports[usize::from(to)].as_deref_mut() else { return stalled };
        let delivery = match Delivery::find(port, lane, frame) {
            Ok(delivery) => delivery,
            Err(reason) => return Outcome::Dropped(reason),
        };
        if may_have_one {
            port.backlog = backlogs.spare.pop();
            if let Some(backlog) = &mut port.backlog {
                backlog.since_ns = now_ns;
                backlogs.waiting.push(to);
            }
        }
        let Some(backlog) = &mut port.backlog else {
            port.drop_for(lane, 1);
            return stalled;
        };
        let (kept, lost) = match delivery.plan() {
            Some(plan) if buffer.load(frame) => put_segments(backlog, lane, buffer.eth(), plan),
            Some(_) => (0, 1),
            None => put_whole(backlog, lane, frame),
        };
        port.drop_for(lane, lost);
        if kept > 0 { Outcome::Sent } else { stalled }
    }
}

/// Copies a frame: how many are kept, and how many found no room.
fn put_whole(backlog: &mut Backlog, lane: usize, frame: &Frame<'_>) -> (u64, u64) {
    match frame.body {
        Body::Ours(rest) if backlog.push(lane, frame.head, rest) => (1, 0),
        _ => (0, 1),
    }
}

/// Puts a frame into a backlog as [`put_whole`] does, in the pieces that the receiver takes.
fn put_segments(
    backlog: &mut Backlog,
    lane: usize,
    frame: &[u8],
    plan: &SegmentPlan,
) -> (u64, u64) {
    let mut wire = [0; VNET_LEN + HEAD_LEN];
    wire[..VNET_LEN].copy_from_slice(&Vnet::default().to_bytes(1));
    let count = plan.count() as u64;
    for index in 0..plan.count() {
        let n = plan.headers(frame, index, &mut wire[VNET_LEN..]);
        let payload = plan.payload(frame, index);
        if !backlog.push(lane, &wire[..VNET_LEN + n], payload) {
            return (index as u64, count - index as u64);
        }
    }
    (count, 0)
}

impl Engine {
    /// Puts what waits into the receivers' rings as far as there is room; how many frames that
    /// were.
    pub(crate) fn drain_backlogs(&mut self, now_ns: u64) -> usize {
        let (mut work, mut at) = (0, 0);
        while let Some(&id) = self.fabric.backlogs.waiting.get(at) {
            let (done, is_over) = self.drain_backlog(id, now_ns);
            work += done;
            if is_over {
                self.fabric.backlogs.waiting.swap_remove(at);
            } else {
                at += 1;
            }
        }
        work
    }

    /// How many frames of a port went, and whether nothing waits any more.
    fn drain_backlog(&mut self, id: PortId, now_ns: u64) -> (usize, bool) {
        let Self { fabric, heads, .. } = self;
        let taken = fabric.ports[usize::from(id)].as_deref_mut().and_then(|p| p.backlog.take());
        let Some(mut backlog) = taken else { return (0, true) };
        let mut done = 0;
        while done < MAX_ROUND_FRAMES
            && let Some((lane, bytes)) = backlog.front()
        {
            match send_kept(fabric, &mut heads[0], id, lane, bytes, now_ns) {
                Outcome::Hold(_) => break,
                Outcome::Sent | Outcome::Consumed => backlog.since_ns = now_ns,
                Outcome::Dropped(reason) => {
                    if let Some(uplink) = &fabric.uplink {
                        uplink.stats.drop_one(reason);
                    }
                }
            }
            backlog.pop();
            done += 1;
        }
        let is_late = now_ns.saturating_sub(backlog.since_ns) >= PATIENCE_NS;
        let Some(port) = fabric.ports[usize::from(id)].as_deref_mut() else { return (done, true) };
        if backlog.count > 0 && !is_late {
            port.backlog = Some(backlog);
            return (done, false);
        }
        if backlog.count > 0 {
            port.is_stuck = true;
            let lane = backlog.front().map_or(0, |(lane, _)| lane);
            port.drop_for(lane, backlog.count);
        }
        backlog.clear();
        fabric.backlogs.spare.push(backlog);
        (done, true)
    }
}

/// One frame that was kept. It was checked as it came; a receiver that has changed since may refuse
/// it.
fn send_kept(
    fabric: &mut Fabric,
    head: &mut Head,
    to: PortId,
    lane: usize,
    bytes: &[u8],
    now_ns: u64,
) -> Outcome {
    if let Err(reason) = head.load_slice(bytes, Allowed::ALL) {
        return Outcome::Dropped(reason);
    }
    let start = head.bytes();
    let body = Body::Ours(&bytes[start.len()..]);
    let frame = Frame { vnet: head.vnet(), head: start, body };
    let outcome = fabric.send_to_guest(to, lane, &frame, WhenFull::Keep, now_ns);
    // Who sent it was charged when it came.
    fabric.extra_cost_bytes = 0;
    outcome
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Frames come out whole and in order, whatever their lengths, and none is taken without
        /// room.
        #[test]
        fn a_backlog_is_a_queue_of_bytes(
            steps in proptest::collection::vec(
                (any::<bool>(), 14usize..66_000, 0usize..200),
                1..200,
            ),
        ) {
            let mut backlog = Backlog::new();
            let mut model: VecDeque<(usize, Vec<u8>)> = VecDeque::new();
            for (n, (push, len, split)) in steps.into_iter().enumerate() {
                if push {
                    let bytes = vec![n as u8; len];
                    let (wire, rest) = bytes.split_at(split.min(len));
                    let used: usize = model.iter().map(|(_, bytes)| RECORD_LEN + bytes.len()).sum();
                    let need = RECORD_LEN + len;
                    let took = backlog.push(n, wire, rest);
                    prop_assert!(took || used + need > BUFFER_LEN_BYTES / 2);
                    if took {
                        model.push_back((n, bytes));
                    }
                } else {
                    backlog.pop();
                    model.pop_front();
                }
                let front = model.front().map(|(lane, bytes)| (*lane, &bytes[..]));
                prop_assert_eq!(backlog.front(), front);
                prop_assert_eq!(backlog.count, model.len() as u64);
            }
        }
    }
}
