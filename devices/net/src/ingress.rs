//! Ingress: frames from the uplink into the switch, sent at once or kept for receivers that have no
//! buffers ([`crate::backlog`]).

use base::counter::{DropReason, QueueStats};
use frame::{Allowed, Body, Frame, Head, flow_hash};
use sidecore::{Ledger, Spent, VmId};

use crate::backlog::MAX_BUFFERS_PER_VM;
use crate::delivery::Delivery;
use crate::fdb::{Dest, Learn, LearnRules, PortId, UPLINK};
use crate::forward::Fabric;
use crate::head_batch::HeadBatch;
use crate::outcome::{Outcome, WhenFull};
use crate::port::{MIN_CHARGE_BYTES, Port};
use crate::uplink::Uplink;

/// Frames taken from the uplink in a round.
const UPLINK_BATCH: usize = 64;

/// Bytes of them, with the copies of floods: two super-packets. It is for all VMs, and each of them
/// may take half of a super-packet in a round when there are several.
const UPLINK_BYTES: u64 = 128 << 10;

/// Frames of one receiver's backlog in a round: the others wait for their turn meanwhile.
const MAX_ROUND_FRAMES: usize = 64;

/// Takes frames from the uplink, if there is one, and sends them; how many.
#[inline]
pub(crate) fn poll(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    now_ns: u64,
    ledger: &mut Ledger,
) -> usize {
    match fabric.uplink {
        None => 0,
        Some(_) => take_turn(fabric, heads, now_ns, ledger),
    }
}

/// The uplink's turn. Not inlined: a switch without one is polled as often.
#[inline(never)]
fn take_turn(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    now_ns: u64,
    ledger: &mut Ledger,
) -> usize {
    let Some(mut uplink) = fabric.uplink.take() else { return 0 };
    let work = receive(fabric, heads, &mut uplink, now_ns, ledger);
    uplink.unfilled = uplink.queue.wire.refill().is_err();
    if uplink.unfilled {
        uplink.queue.stats.drop_one(DropReason::WireError);
    }
    fabric.uplink = Some(uplink);
    work
}

fn receive(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    uplink: &mut Uplink,
    now_ns: u64,
    ledger: &mut Ledger,
) -> usize {
    let (mut work, mut taken) = (0, 0);
    while work < UPLINK_BATCH && taken < UPLINK_BYTES {
        let Some(bytes) = uplink.queue.wire.receive() else { break };
        taken += bytes.len() as u64;
        if let Outcome::Dropped(reason) =
            inject(fabric, heads.lone(), bytes, &uplink.queue.stats, now_ns, ledger)
        {
            uplink.queue.stats.drop_one(reason);
        }
        taken += std::mem::take(&mut fabric.extra_cost_bytes);
        fabric.flush_lent();
        uplink.queue.wire.release();
        work += 1;
    }
    if work > 0 {
        uplink.queue.stats.batches.add(1);
    }
    work
}

/// One frame from the uplink.
fn inject(
    fabric: &mut Fabric,
    head: &mut Head,
    bytes: &[u8],
    stats: &QueueStats,
    now_ns: u64,
    ledger: &mut Ledger,
) -> Outcome {
    if let Err(reason) = head.load_slice(bytes, Allowed::ALL) {
        return Outcome::Dropped(reason);
    }
    let src = head.src();
    if src.is_group() || src.is_zero() {
        return Outcome::Dropped(DropReason::Malformed);
    }
    // Bound addresses stay where they are; a full table only costs flooding.
    let rules = LearnRules { owner_limit: fabric.tables.max_macs_uplink, may_move: true };
    if fabric.tables.learn_mac(src, UPLINK, now_ns, rules) == Learn::Taken
        && !fabric.tables.macs.owner(src, now_ns).is_some_and(|owner| fabric.is_away(owner))
    {
        return Outcome::Dropped(DropReason::Spoofed);
    }
    let dest = fabric.lookup(head.dst(), UPLINK, now_ns);
    // A flood is not charged: none of its receivers has asked for it.
    let vm = if let Dest::Port(to) = dest { fabric.vm_of(to) } else { VmId::NONE };
    if !ledger.may_receive(vm, now_ns) {
        return Outcome::Dropped(DropReason::Throttled);
    }
    let lane = flow_hash(head.eth()) as usize;
    let start = head.bytes();
    let body = Body::Ours(&bytes[start.len()..]);
    let frame = Frame { vnet: head.vnet(), head: start, body };
    // Never held: behind this frame are those for all other VMs.
    let kept = match dest {
        Dest::Port(to) => send_or_keep(fabric, to, lane, &frame, now_ns),
        _ => None,
    };
    let outcome = match kept {
        Some(outcome) => outcome,
        // SAFETY: the uplink is not in the fabric now, and what hooks have of the frame is
        // flushed before it is released.
        None => unsafe { fabric.deliver(dest, lane, &frame, WhenFull::Drop, now_ns) },
    };
    if matches!(outcome, Outcome::Sent | Outcome::Consumed) {
        stats.requests.add(1);
        stats.bytes.add(head.frame_len() as u64);
        let mut spent = Spent::default();
        // For one receiver: what its own buffers cost. For several: nobody is charged.
        let bytes = head.frame_len() as u64 + fabric.extra_cost_bytes;
        spent.add(bytes, MIN_CHARGE_BYTES);
        ledger.debit(vm, spent, now_ns);
    }
    outcome
}

/// Sends a frame of the uplink's to one port, or keeps it until that has room. None: this port
/// keeps nothing.
fn send_or_keep(
    fabric: &mut Fabric,
    to: PortId,
    lane: usize,
    frame: &Frame<'_>,
    now_ns: u64,
) -> Option<Outcome> {
    let port = fabric.ports.get(usize::from(to))?.as_deref()?;
    if port.hook.is_some() {
        return None;
    }
    if port.backlog.is_none() {
        let outcome = fabric.send_to_guest(to, lane, frame, WhenFull::Keep, now_ns);
        let port = fabric.ports[usize::from(to)].as_deref_mut()?;
        port.is_stuck &= outcome != Outcome::Sent;
        if !matches!(outcome, Outcome::Hold(_)) {
            return Some(outcome);
        }
    }
    Some(keep(fabric, to, lane, frame, now_ns))
}

/// Whether its VM has fewer buffers than one may have. Ports without a VM have no share.
fn may_have_backlog(fabric: &Fabric, port: PortId) -> bool {
    let vm = fabric.vm_of(port);
    let of_vm = |other: &&PortId| fabric.vm_of(**other) == vm;
    vm == VmId::NONE || fabric.backlogs.waiting().iter().filter(of_vm).count() < MAX_BUFFERS_PER_VM
}

fn keep(fabric: &mut Fabric, to: PortId, lane: usize, frame: &Frame<'_>, now_ns: u64) -> Outcome {
    let stalled = Outcome::Dropped(DropReason::ReceiverStalled);
    let needs_one = |port: &Port| port.backlog.is_none() && !port.is_stuck;
    let port = fabric.ports[usize::from(to)].as_deref();
    let may_have_one = port.is_some_and(needs_one) && may_have_backlog(fabric, to);
    let Fabric { ports, backlogs, buffer, .. } = fabric;
    let Some(port) = ports[usize::from(to)].as_deref_mut() else { return stalled };
    let delivery = match Delivery::find(port, lane, frame) {
        Ok(delivery) => delivery,
        Err(reason) => return Outcome::Dropped(reason),
    };
    if may_have_one {
        port.backlog = backlogs.lend(to, now_ns);
    }
    let Some(backlog) = &mut port.backlog else {
        port.count_stalled(lane, 1);
        return stalled;
    };
    let (kept, lost) = match delivery.plan() {
        Some(plan) if buffer.load(frame) => backlog.push_segments(lane, buffer.eth(), plan),
        Some(_) => (0, 1),
        None => backlog.push_whole(lane, frame),
    };
    port.count_stalled(lane, lost);
    if kept > 0 { Outcome::Sent } else { stalled }
}

/// Puts what waits into the receivers' rings as far as there is room; how many frames that
/// were.
#[inline]
pub(crate) fn drain_backlogs(fabric: &mut Fabric, heads: &mut HeadBatch, now_ns: u64) -> usize {
    let (mut work, mut at) = (0, 0);
    while let Some(&id) = fabric.backlogs.waiting().get(at) {
        let (done, is_over) = drain_backlog(fabric, heads.lone(), id, now_ns);
        work += done;
        if is_over {
            fabric.backlogs.unlist(at);
        } else {
            at += 1;
        }
    }
    work
}

/// How many frames of a port went, and whether nothing waits any more. Not inlined: it is seldom
/// that any wait.
#[inline(never)]
fn drain_backlog(fabric: &mut Fabric, head: &mut Head, id: PortId, now_ns: u64) -> (usize, bool) {
    let taken = fabric.ports[usize::from(id)].as_deref_mut().and_then(|p| p.backlog.take());
    let Some(mut backlog) = taken else { return (0, true) };
    let mut done = 0;
    while done < MAX_ROUND_FRAMES
        && let Some((lane, bytes)) = backlog.front()
    {
        match send_kept(fabric, head, id, lane, bytes, now_ns) {
            Outcome::Hold(_) => break,
            Outcome::Sent | Outcome::Consumed => backlog.since_ns = now_ns,
            Outcome::Dropped(reason) => {
                if let Some(uplink) = &fabric.uplink {
                    uplink.queue.stats.drop_one(reason);
                }
            }
        }
        backlog.pop();
        done += 1;
    }
    let is_late = backlog.ends_ns() <= now_ns;
    let Some(port) = fabric.ports[usize::from(id)].as_deref_mut() else { return (done, true) };
    if backlog.count > 0 && !is_late {
        port.backlog = Some(backlog);
        return (done, false);
    }
    if backlog.count > 0 {
        port.is_stuck = true;
        let lane = backlog.front().map_or(0, |(lane, _)| lane);
        port.count_stalled(lane, backlog.count);
    }
    fabric.backlogs.give_back(backlog);
    (done, true)
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
