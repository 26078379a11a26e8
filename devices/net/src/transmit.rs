//! From a transmit queue into the switch: a batch of frames is loaded, judged and delivered.

use std::ops::Range;

use base::counter::DropReason;
use frame::{Body, Frame, HEAD_LEN, Head, Mac, VNET_LEN, Vnet};
use queue::seg::prefetch_head;
use queue::{Batch, Chain, Completion};
use sidecore::{Allowance, Ledger, Spent};

use crate::binding::Tables;
use crate::fdb::{Dest, PortId};
use crate::forward::{Fabric, LONG_TURN_BYTES};
use crate::head_batch::HeadBatch;
use crate::hook::FromGuest;
use crate::outcome::{Awaited, Outcome, WhenFull};
use crate::port::{Port, TX_BATCH, TxQueue, charge_bytes};
use crate::rejects;
use crate::rxq::{Room, RxQueue};

/// Bytes taken from one transmit queue in a round, for a port whose VM has no account, and so no
/// turn: four super-packets. More would push the other queues' frames out of the cache. A flood
/// counts once for each receiver: each has its copy made.
const ROUND_BYTES: u64 = 256 << 10;

/// Frames whose headers are fetched together: enough to wait for memory once for all of them, few
/// enough that a round's end throws little away.
const CHUNK: usize = 16;

/// A transmit queue's turn with one batch of its frames.
struct Turn<'a> {
    port: &'a mut Port,
    txq: &'a mut TxQueue,
    /// The queue's number among the port's: it picks the receive queue.
    lane: usize,
    now_ns: u64,
    sent: Sent,
}

impl Turn<'_> {
    /// Whether it has sent as much as it may.
    #[inline(always)]
    fn is_over(&self) -> bool {
        self.sent.cost_bytes >= self.sent.most_bytes
    }
}

/// Outcome of a batch.
#[derive(Default)]
struct Sent {
    /// Bytes of the frames that were sent.
    bytes: u64,
    /// Bytes that were copied to us first.
    head_bytes: u64,
    /// Charge to the sender: with the least for each frame and segment, the copies of floods, and
    /// what buffers of the receivers cost beyond the usual.
    cost_bytes: u64,
    /// Charge at which it ends.
    most_bytes: u64,
    wire_used: bool,
}

impl Sent {
    /// A frame was sent.
    #[inline(always)]
    fn count(&mut self, head: &Head, chain: &Chain<'_>) {
        self.bytes += head.frame_len() as u64;
        self.head_bytes += head.eth().len() as u64;
        self.cost_bytes += charge_bytes(chain);
    }
}

/// Turn of a transmit queue: takes frames from it and sends them. Returns how many are done.
pub(crate) fn poll(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    port: &mut Port,
    txq: &mut TxQueue,
    lane: usize,
    now_ns: u64,
    ledger: &mut Ledger,
) -> usize {
    fabric.begin_turn(port.id);
    if txq.held.is_some_and(|held| fabric.still_waits(held)) {
        return 0;
    }
    let allowance = ledger.allowance(port.vm, now_ns);
    if allowance.is_none() {
        if txq.vring.has_work() {
            port.turn_bytes += LONG_TURN_BYTES;
            ledger.held_back(port.vm, now_ns);
        }
        return 0;
    }
    let was_held = txq.held.take().is_some();
    let allowance = Allowance { bytes: allowance.bytes.min(ROUND_BYTES), ..allowance };
    let most = allowance.batch(txq.mean_cost, TX_BATCH);
    let popped = txq.vring.pop(&mut txq.batch, most);
    if popped == 0 {
        return 0;
    }
    port.forward_cache.refresh(&fabric.tables, now_ns);
    prefetch(&txq.batch, 0);
    let sent = Sent { most_bytes: allowance.bytes, ..Sent::default() };
    let mut turn = Turn { port, txq, lane, now_ns, sent };
    for first in (0..popped).step_by(CHUNK) {
        let chunk = first..popped.min(first + CHUNK);
        load(heads, &turn, chunk.clone());
        if !send_chunk(fabric, heads, &mut turn, chunk) {
            break;
        }
    }
    let Turn { port, txq, sent, .. } = turn;
    let Sent { bytes, cost_bytes, wire_used, .. } = sent;
    txq.count_hold(was_held, now_ns, &fabric.stats);
    let stats = &txq.vring.parts.stats;
    stats.bytes.add(bytes);
    stats.copied_bytes.add(sent.head_bytes);
    if wire_used {
        fabric.flush_uplink();
    }
    fabric.flush_lent();
    let done = txq.done.len();
    txq.vring.unpop(&mut txq.batch, popped - done);
    if done > 0 {
        let more = txq.held.is_none() && (popped == most || done < popped);
        let spent = Spent { bytes: cost_bytes, requests: done as u32 };
        ledger.charge(port.vm, spent, more, now_ns);
        fabric.unpublished_bytes += cost_bytes;
        port.turn_bytes += cost_bytes;
        txq.mean_cost = cost_bytes / done as u64;
        txq.vring.push(&txq.done);
        txq.done.clear();
    }
    done
}

/// Copies the beginnings of a chunk's frames and judges them; those of the next chunk are on
/// their way to the cache meanwhile.
#[inline]
fn load(heads: &mut HeadBatch, turn: &Turn<'_>, chunk: Range<usize>) {
    let (port, batch) = (&*turn.port, &turn.txq.batch);
    prefetch(batch, chunk.end);
    let HeadBatch { heads, verdicts } = heads;
    let (heads, verdicts) = (&mut heads[chunk.clone()], &mut verdicts[chunk.clone()]);
    for ((head, verdict), at) in heads.iter_mut().zip(verdicts).zip(chunk) {
        *verdict = head.load_chain(&batch.get(at), port.tx_vnet_len, port.allowed);
    }
}

/// Sends frames whose beginnings are loaded. False: enough for this round.
#[inline]
fn send_chunk(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    turn: &mut Turn<'_>,
    chunk: Range<usize>,
) -> bool {
    let mut at = chunk.start;
    while at < chunk.end && !turn.is_over() {
        at += send_run(fabric, heads, turn, at..chunk.end);
        if at == chunk.end || turn.is_over() {
            break;
        }
        if !send_one(fabric, heads, turn, at) {
            return false;
        }
        at += 1;
    }
    !turn.is_over()
}

/// Sends the first of these frames that need nothing done to them and go from and to the
/// addresses that the last ones did: nearly all. Returns how many.
#[inline]
fn send_run(
    fabric: &mut Fabric,
    heads: &HeadBatch,
    turn: &mut Turn<'_>,
    run: Range<usize>,
) -> usize {
    let Turn { port, txq, lane, now_ns, sent } = turn;
    if !port.sends_plain() {
        return 0;
    }
    let Fabric { ports, tables, touched, sender, .. } = fabric;
    let (heads, verdicts) = (&heads.heads[run.clone()], &heads.verdicts[run.clone()]);
    let cache = &port.forward_cache;
    let (Some(first), Some(source)) = (heads.first(), cache.source()) else { return 0 };
    let dst = first.dst();
    let Some(Dest::Port(to)) = cache.dest(dst, tables) else { return 0 };
    let Some((longest, untagged, queue, rxq)) = open(ports, to, *lane, dst) else { return 0 };
    let mut count = 0;
    for ((head, verdict), at) in heads.iter().zip(verdicts).zip(run) {
        let is_alike = sent.cost_bytes < sent.most_bytes
            && verdict.is_ok()
            && head.vnet().is_plain()
            && head.dst() == dst
            && head.frame_len() <= longest
            && !(untagged && head.is_tagged())
            && source.is_of(head);
        let chain = txq.batch.get(at);
        let may_wait =
            sender.is_late || sender.may_wait() && rxq.is_before_window(sender, head.eth());
        if !is_alike || may_wait || !rxq.put_plain(&chain, head, *now_ns) {
            break;
        }
        txq.done.push(Completion { id: chain.id, ndesc: chain.ndesc, written: 0 });
        sent.count(head, &chain);
        count += 1;
    }
    if count > 0 && !std::mem::replace(&mut rxq.touched, true) {
        touched.push((to, queue));
    }
    count
}

/// Sends any frame. False when it has to stay where it is.
fn send_one(fabric: &mut Fabric, heads: &mut HeadBatch, turn: &mut Turn<'_>, at: usize) -> bool {
    let Turn { port, txq, lane, now_ns, sent } = turn;
    let chain = txq.batch.get(at);
    // SAFETY: the batch keeps the chain's memory mapped and `heads[at]` is not used again
    // before uplink and hooks are flushed, at the end of the batch.
    let (outcome, to_wire) = unsafe { send(fabric, heads, port, &chain, at, *lane, *now_ns) };
    sent.wire_used |= to_wire;
    sent.cost_bytes += std::mem::take(&mut fabric.extra_cost_bytes);
    match outcome {
        Outcome::Hold(held) => {
            txq.held = Some(held);
            return false;
        }
        Outcome::Dropped(reason) => {
            txq.vring.parts.stats.drop_one(reason);
            let frame = (&chain, &heads.heads[at], port.tx_vnet_len);
            rejects::tell(&mut port.rejects, &port.name, reason, frame, *now_ns);
            sent.cost_bytes += charge_bytes(&chain);
        }
        Outcome::Sent | Outcome::Consumed => sent.count(&heads.heads[at], &chain),
    }
    txq.done.push(Completion { id: chain.id, ndesc: chain.ndesc, written: 0 });
    fabric.sender.is_late = false;
    true
}

/// Judges and delivers one chain of a sender; also says whether the uplink may be using it.
///
/// # Safety
/// The chain stays mapped, and head `at` unused, until uplink and hooks are flushed.
#[inline]
unsafe fn send(
    fabric: &mut Fabric,
    heads: &mut HeadBatch,
    port: &mut Port,
    chain: &Chain<'_>,
    at: usize,
    lane: usize,
    now_ns: u64,
) -> (Outcome, bool) {
    let head = &mut heads.heads[at];
    let admitted = heads.verdicts[at].and_then(|()| admit(port, head, &mut fabric.tables, now_ns));
    if let Err(reason) = admitted {
        return (Outcome::Dropped(reason), false);
    }
    if port.hook.is_some() && !pass_hook(port, head, &mut fabric.touched, now_ns) {
        return (Outcome::Consumed, false);
    }
    let dest = destination(fabric, port, head.dst(), now_ns);
    let frame = chain_frame(chain, head, port.tx_vnet_len);
    // SAFETY: the caller's promise.
    let outcome = unsafe { fabric.deliver(dest, lane, &frame, WhenFull::Hold, now_ns) };
    (outcome, matches!(dest, Dest::Uplink | Dest::All))
}

/// Has the cache fetch the headers of a chunk of frames.
#[inline]
fn prefetch(batch: &Batch, first: usize) {
    for at in first..batch.len().min(first + CHUNK) {
        prefetch_head(batch.get(at).readable);
    }
}

/// Whether a port may send this frame.
#[inline]
pub(crate) fn admit(
    port: &mut Port,
    head: &Head,
    tables: &mut Tables,
    now_ns: u64,
) -> Result<(), DropReason> {
    if !port.link_up {
        return Err(DropReason::LinkDown);
    }
    port.binding.admit(port.id, head, tables, now_ns)?;
    if head.dst().is_broadcast() && !port.broadcasts.take(now_ns) {
        return Err(DropReason::Throttled);
    }
    port.forward_cache.note_source(head, port.binding.mode, tables);
    Ok(())
}

/// Shows a frame to the port's hook, which may change it. False: it ends here.
fn pass_hook(port: &mut Port, head: &mut Head, touched: &mut Vec<Awaited>, now_ns: u64) -> bool {
    let Some(slot) = port.hook.as_mut() else { return true };
    let mut answer = [0; VNET_LEN + HEAD_LEN];
    match slot.hook.from_guest(head, &mut answer, now_ns) {
        FromGuest::Pass => true,
        FromGuest::Consume => false,
        FromGuest::Reply(len) => {
            reply(port, touched, &answer[..len], now_ns);
            false
        }
        FromGuest::ReplyAndPass(len) => {
            reply(port, touched, &answer[..len], now_ns);
            true
        }
    }
}

/// Puts a short frame of ours into a port's first receive queue, if there is room.
fn reply(port: &mut Port, touched: &mut Vec<Awaited>, bytes: &[u8], now_ns: u64) {
    let Some(queue) = port.rx_for(0) else { return };
    let Some(rxq) = port.rx[usize::from(queue)].as_deref_mut() else { return };
    let frame = Frame::short(bytes);
    if !rxq.vring.parts.health.is_live() || rxq.room(1, frame.len(), now_ns) != Room::Yes {
        return;
    }
    rxq.put(&frame, &Vnet::default());
    if !std::mem::replace(&mut rxq.touched, true) {
        touched.push((port.id, queue));
    }
}

/// Looks up where a port's frames to `dst` go.
#[inline]
fn destination(fabric: &Fabric, port: &mut Port, dst: Mac, now_ns: u64) -> Dest {
    if let Some(dest) = port.forward_cache.dest(dst, &fabric.tables) {
        return dest;
    }
    let dest = fabric.lookup(dst, port.id, now_ns);
    port.forward_cache.note_dest(dst, dest, &fabric.tables);
    dest
}

/// The queue of a port that takes plain frames to `dst` as they come, with the length of the
/// longest, and whether they must have no tag.
#[inline]
fn open(
    ports: &mut [Option<Box<Port>>],
    to: PortId,
    lane: usize,
    dst: Mac,
) -> Option<(usize, bool, u16, &mut RxQueue)> {
    let port = ports.get_mut(usize::from(to))?.as_deref_mut()?;
    if !port.link_up || port.hook.is_some() {
        return None;
    }
    let untagged = match &port.filter {
        None => false,
        Some(filter) if !filter.takes_unicast(dst) => return None,
        Some(filter) => filter.looks_at_tags(),
    };
    let (longest, queue) = (port.longest(), port.rx_for(lane)?);
    let rxq = port.rx.get_mut(usize::from(queue))?.as_deref_mut()?;
    // Buffers that were at hand when it stopped are not filled any more.
    rxq.vring.parts.health.is_live().then_some((longest, untagged, queue, rxq))
}

/// The frame of a chain whose beginning is in `head`.
#[inline]
fn chain_frame<'a>(chain: &Chain<'a>, head: &'a Head, vnet_len: usize) -> Frame<'a> {
    let offset = vnet_len + head.eth().len();
    let len = head.frame_len() - head.eth().len();
    let body = Body::Guest { segs: chain.readable, offset, len };
    Frame { vnet: head.vnet(), head: head.bytes(), body }
}
