//! The switch's worker: polls every transmit queue and the uplink, round robin.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use base::counter::{DropReason, QueueStats};
use queue::seg::prefetch_head;
use queue::{Batch, Chain, Completion, Lazy};
use sidecore::{Arm, Ledger, Spent, VmId, Worker};
use stage::{Direction, FrameView};

use crate::binding::Tables;
use crate::fdb::{Learn, LearnRules, PortId, UPLINK};
use crate::forward::{Dest, Fabric, Outcome, Staging, WhenFull, rx_mut};
use crate::header::{Allowed, Head, Mac, VNET_LEN, flow_hash};
use crate::metrics::SwitchStats;
use crate::port::{MIN_CHARGE_BYTES, Port, TX_BATCH, TxQueue};
use crate::rxq::{Body, Frame};
use crate::uplink::Uplink;

/// Bytes taken from one transmit queue, or from the uplink, in a round: four super-packets. More
/// would push the other queues' frames out of the cache and let one sender hold up a round for
/// long. A flood counts once for each receiver: each has its copy made.
const ROUND_BYTES: u64 = 256 << 10;

/// Frames whose headers are fetched together: enough to wait for memory once for all of them, few
/// enough that a round's end throws little away.
const CHUNK: usize = 16;

/// What became of a batch.
#[derive(Default)]
struct Sent {
    /// Bytes of the frames that were sent.
    bytes: u64,
    /// Those that were copied to us first.
    head_bytes: u64,
    /// What the sender is charged: with the least for each frame, and the copies of floods.
    cost_bytes: u64,
    /// It ends when that is reached.
    most_bytes: u64,
    wire_used: bool,
}

/// Frames taken from the uplink in a round.
const UPLINK_BATCH: usize = 64;

/// A wire that could not take its receive buffers (no memory) cannot wake anybody either: it is
/// asked again so soon. A tick of the kernel, which may have freed some by then.
const REFILL_AGAIN_NS: u64 = 1_000_000;

/// Nobody waits for the end of a transmission: drivers free the buffers, and Linux does so whenever
/// it is told of received frames too. A request and its answer then cost each guest one interrupt
/// and not two. 1 ms is what TCP small queues let a sender have in its device.
pub(crate) const TX_TELL: Lazy = Lazy { max_pending: 16, max_wait_ns: 1_000_000 };

/// See the module's text. Lives on one sidecore.
pub(crate) struct Engine {
    pub fabric: Fabric,
    /// Our copies of the frames of one batch; the uplink reads from them until it is flushed.
    heads: Box<[Head]>,
    /// Whether each of them makes sense.
    verdicts: Box<[Result<(), DropReason>]>,
    /// A sender's whole frame, for its stages that want payload.
    outgoing: Staging,
    /// Which port is polled first in this round.
    turn: usize,
    /// Which queue a kick belongs to.
    pub kicks: HashMap<RawFd, (PortId, u16)>,
}

impl Engine {
    pub fn new(tables: Tables, hold_ns: u64, max_touched: usize, stats: Arc<SwitchStats>) -> Self {
        let fabric = Fabric {
            ports: Vec::new(),
            uplink: None,
            tables,
            touched: Vec::with_capacity(max_touched),
            staging: Staging::new(),
            hold_ns,
            flooded_bytes: 0,
            stats,
        };
        Self {
            fabric,
            heads: vec![Head::default(); TX_BATCH].into_boxed_slice(),
            verdicts: vec![Ok(()); TX_BATCH].into_boxed_slice(),
            outgoing: Staging::new(),
            turn: 0,
            kicks: HashMap::new(),
        }
    }

    fn poll_port(&mut self, port: &mut Port, now_ns: u64, ledger: &mut Ledger) -> usize {
        let (mut work, count) = (0, port.tx.len());
        // Credit that is short goes to the first one: another each time.
        let first = ledger.lot().checked_rem(count).unwrap_or(0);
        for k in 0..count {
            let index = if first + k < count { first + k } else { first + k - count };
            if let Some(mut txq) = port.tx[index].take() {
                work += self.poll_tx(port, &mut txq, index, now_ns, ledger);
                txq.vring.notify_lazily(now_ns, TX_TELL);
                port.tx[index] = Some(txq);
            }
        }
        work
    }

    fn poll_tx(
        &mut self,
        port: &mut Port,
        txq: &mut TxQueue,
        lane: usize,
        now_ns: u64,
        ledger: &mut Ledger,
    ) -> usize {
        if txq.held_on.is_some_and(|at| self.fabric.still_full(at, now_ns)) {
            return 0;
        }
        let allowance = ledger.allowance(port.vm, now_ns);
        if allowance.is_none() {
            if txq.vring.has_work() {
                ledger.held_back(port.vm, now_ns);
            }
            return 0;
        }
        let was_held = txq.held_on.take().is_some();
        let most = allowance.batch(MIN_CHARGE_BYTES, TX_BATCH);
        let popped = txq.vring.pop(&mut txq.batch, most);
        if popped == 0 {
            return 0;
        }
        let most_bytes = allowance.bytes.min(ROUND_BYTES);
        let mut sent = Sent { most_bytes, ..Sent::default() };
        port.lately.refresh(&self.fabric.tables, now_ns);
        prefetch(&txq.batch, 0);
        for first in (0..popped).step_by(CHUNK) {
            // The headers of all frames of a chunk are on their way to us before one is judged.
            prefetch(&txq.batch, first + CHUNK);
            let chunk = first..popped.min(first + CHUNK);
            for at in chunk.clone() {
                let chain = txq.batch.get(at);
                self.verdicts[at] =
                    self.heads[at].load_chain(&chain, port.tx_vnet_len, port.allowed);
            }
            if !self.send_chunk(port, txq, chunk, lane, now_ns, &mut sent) {
                break;
            }
        }
        let Sent { bytes, cost_bytes, wire_used, .. } = sent;
        txq.count_hold(was_held, now_ns, &self.fabric.stats);
        let stats = &txq.vring.parts.stats;
        stats.bytes.add(bytes);
        stats.copied_bytes.add(sent.head_bytes);
        if wire_used {
            self.fabric.flush_uplink();
        }
        let done = txq.done.len();
        txq.vring.unpop(&mut txq.batch, popped - done);
        if done > 0 {
            let more = txq.held_on.is_none() && (popped == most || done < popped);
            let spent = Spent { bytes: cost_bytes, requests: done as u32 };
            ledger.charge(port.vm, spent, more, now_ns);
            txq.vring.push(&txq.done);
            txq.done.clear();
        }
        done
    }

    /// Sends frames whose beginnings are loaded. False: enough for this round.
    #[inline]
    fn send_chunk(
        &mut self,
        port: &mut Port,
        txq: &mut TxQueue,
        chunk: Range<usize>,
        lane: usize,
        now_ns: u64,
        sent: &mut Sent,
    ) -> bool {
        for at in chunk {
            let chain = txq.batch.get(at);
            // SAFETY: the batch keeps the chain's memory mapped and `heads[at]` is not used again
            // before the uplink is flushed, at the end of the batch.
            let (outcome, to_wire) = unsafe { self.send(port, &chain, at, lane, now_ns) };
            sent.wire_used |= to_wire;
            match outcome {
                Outcome::Hold(awaited) => {
                    txq.held_on = Some(awaited);
                    return false;
                }
                Outcome::Dropped(reason) => txq.vring.parts.stats.drop_one(reason),
                Outcome::Done => {
                    let head = &self.heads[at];
                    sent.bytes += head.frame_len() as u64;
                    sent.head_bytes += head.eth().len() as u64;
                }
            }
            txq.done.push(Completion { id: chain.id, ndesc: chain.ndesc, written: 0 });
            sent.cost_bytes += u64::from(chain.readable_len).max(MIN_CHARGE_BYTES);
            sent.cost_bytes += std::mem::take(&mut self.fabric.flooded_bytes);
            if sent.cost_bytes >= sent.most_bytes {
                return false;
            }
        }
        true
    }

    /// Judges and delivers one chain of a sender; also says whether the uplink may be using it.
    ///
    /// # Safety
    /// The chain stays mapped, and head `at` unused, until the uplink is flushed.
    #[inline]
    unsafe fn send(
        &mut self,
        port: &mut Port,
        chain: &Chain<'_>,
        at: usize,
        lane: usize,
        now_ns: u64,
    ) -> (Outcome, bool) {
        let Self { fabric, heads, verdicts, outgoing, .. } = self;
        let head = &mut heads[at];
        let admitted = verdicts[at].and_then(|()| admit(port, head, &mut fabric.tables, now_ns));
        if let Err(reason) = admitted {
            return (Outcome::Dropped(reason), false);
        }
        if !port.stages.is_empty() {
            return (staged(fabric, port, chain, head, outgoing, lane, now_ns), false);
        }
        let dest = destination(fabric, port, head.dst(), now_ns);
        if let Dest::Port(to) = dest
            && head.vnet().is_plain()
            && port.tx_vnet_len == VNET_LEN
            && fabric.send_plain(to, lane, chain, head, now_ns)
        {
            return (Outcome::Done, false);
        }
        let frame = chain_frame(chain, head, port.tx_vnet_len);
        // SAFETY: the caller's promise.
        let outcome = unsafe { fabric.deliver(dest, lane, &frame, WhenFull::Hold, now_ns) };
        (outcome, matches!(dest, Dest::Uplink | Dest::All))
    }

    fn poll_uplink(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        let Some(mut uplink) = self.fabric.uplink.take() else { return 0 };
        let work = self.receive(&mut uplink, now_ns, ledger);
        uplink.unfilled = uplink.wire.refill().is_err();
        if uplink.unfilled {
            uplink.stats.drop_one(DropReason::WireError);
        }
        self.fabric.uplink = Some(uplink);
        work
    }

    fn receive(&mut self, uplink: &mut Uplink, now_ns: u64, ledger: &mut Ledger) -> usize {
        let (mut work, mut flooded) = (0, 0);
        while work < UPLINK_BATCH && flooded < ROUND_BYTES {
            let Some(bytes) = uplink.wire.receive() else { break };
            if let Outcome::Dropped(reason) = self.inject(bytes, &uplink.stats, now_ns, ledger) {
                uplink.stats.drop_one(reason);
            }
            flooded += std::mem::take(&mut self.fabric.flooded_bytes);
            uplink.wire.release();
            work += 1;
        }
        if work > 0 {
            uplink.stats.batches.add(1);
        }
        work
    }

    /// One frame from the uplink.
    fn inject(
        &mut self,
        bytes: &[u8],
        stats: &QueueStats,
        now_ns: u64,
        ledger: &mut Ledger,
    ) -> Outcome {
        let Self { fabric, heads, .. } = self;
        let head = &mut heads[0];
        if let Err(reason) = head.load_slice(bytes, Allowed::ALL) {
            return Outcome::Dropped(reason);
        }
        let src = head.src();
        if src.is_group() || src.is_zero() {
            return Outcome::Dropped(DropReason::Malformed);
        }
        // Bound addresses stay where they are; a full table only costs flooding.
        let rules = LearnRules { owner_limit: fabric.tables.max_macs_uplink, may_move: true };
        if fabric.tables.macs.learn(src, UPLINK, now_ns, rules) == Learn::Taken {
            return Outcome::Dropped(DropReason::Spoofed);
        }
        let dest = fabric.lookup(head.dst(), UPLINK, now_ns);
        // A flood is not charged: none of its receivers has asked for it.
        let vm = if let Dest::Port(to) = dest { fabric.vm_of(to) } else { VmId::NONE };
        if !ledger.may_receive(vm, now_ns) {
            return Outcome::Dropped(DropReason::Throttled);
        }
        let lane = flow_hash(head.eth()) as usize;
        let wire = head.wire();
        let frame = Frame { vnet: head.vnet(), wire, body: Body::Ours(&bytes[wire.len()..]) };
        // Never held: behind this frame are those for all other VMs, and nobody out there would
        // slow down for a pause here.
        // SAFETY: the uplink is not in the fabric now, so nothing outlives the call.
        let outcome = unsafe { fabric.deliver(dest, lane, &frame, WhenFull::Drop, now_ns) };
        if outcome == Outcome::Done {
            stats.requests.add(1);
            stats.bytes.add(head.frame_len() as u64);
            let mut spent = Spent::default();
            spent.add(head.frame_len() as u64, MIN_CHARGE_BYTES);
            ledger.debit(vm, spent, now_ns);
        }
        outcome
    }
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
fn admit(port: &mut Port, head: &Head, tables: &mut Tables, now_ns: u64) -> Result<(), DropReason> {
    if !port.link_up {
        return Err(DropReason::LinkDown);
    }
    let mode = port.binding.mode;
    if port.lately.admitted(head, mode, tables) {
        return Ok(());
    }
    port.binding.admit(port.id, head, tables, now_ns)?;
    port.lately.note_admitted(head, mode, tables);
    Ok(())
}

/// Where a port's frames to `dst` go.
#[inline]
fn destination(fabric: &Fabric, port: &mut Port, dst: Mac, now_ns: u64) -> Dest {
    if let Some(dest) = port.lately.way(dst, &fabric.tables) {
        return dest;
    }
    let dest = fabric.lookup(dst, port.id, now_ns);
    port.lately.note_way(dst, dest, &fabric.tables);
    dest
}

/// The frame of a chain whose beginning is in `head`.
#[inline]
fn chain_frame<'a>(chain: &Chain<'a>, head: &'a Head, vnet_len: usize) -> Frame<'a> {
    let offset = vnet_len + head.eth().len();
    let len = head.frame_len() - head.eth().len();
    let body = Body::Guest { segs: chain.readable, offset, len };
    Frame { vnet: head.vnet(), wire: head.wire(), body }
}

/// A frame of a port with stages. Stages judge a frame once, so room is looked for before; a frame
/// that they redirect to a full receiver is dropped.
fn staged(
    fabric: &mut Fabric,
    port: &mut Port,
    chain: &Chain<'_>,
    head: &mut Head,
    outgoing: &mut Staging,
    lane: usize,
    now_ns: u64,
) -> Outcome {
    let frame = chain_frame(chain, head, port.tx_vnet_len);
    if let Dest::Port(to) = fabric.lookup(head.dst(), port.id, now_ns) {
        match fabric.probe(to, lane, &frame, now_ns) {
            Outcome::Done => {}
            other => return other,
        }
    }
    let (vnet, len_bytes) = (frame.vnet, frame.len() as u32);
    let passed = if port.stages.want_payload {
        if !outgoing.load(&frame) {
            return Outcome::Dropped(DropReason::Malformed);
        }
        port.stages.pass(Direction::FromVm, &mut outgoing.view())
    } else {
        let mut view = FrameView { header: head.eth_mut(), payload: &mut [], len_bytes };
        port.stages.pass(Direction::FromVm, &mut view)
    };
    if !passed {
        return Outcome::Done;
    }
    let frame = match port.stages.want_payload {
        true => outgoing.frame(vnet),
        false => chain_frame(chain, head, port.tx_vnet_len),
    };
    let dest = fabric.lookup(crate::header::Mac::read(frame.eth()), port.id, now_ns);
    // SAFETY: flushed right here, while `outgoing`, `head` and the chain are still untouched.
    let outcome = unsafe { fabric.deliver(dest, lane, &frame, WhenFull::Drop, now_ns) };
    fabric.flush_uplink();
    outcome
}

impl Worker for Engine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        let count = self.fabric.ports.len();
        let mut work = 0;
        self.turn = if self.turn + 1 < count { self.turn + 1 } else { 0 };
        for k in 0..count {
            let at = if self.turn + k < count { self.turn + k } else { self.turn + k - count };
            if let Some(mut port) = self.fabric.ports[at].take() {
                work += self.poll_port(&mut port, now_ns, ledger);
                self.fabric.ports[at] = Some(port);
            }
        }
        work += self.poll_uplink(now_ns, ledger);
        self.fabric.publish(now_ns);
        work
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        let Fabric { ports, uplink, hold_ns, .. } = &mut self.fabric;
        let mut wake_at_ns: Option<u64> = None;
        let mut wait = |ports: &mut [Option<Box<Port>>], at| {
            let Some(rxq) = rx_mut(ports, at) else { return Arm::Busy };
            match rxq.hold_ends_ns(*hold_ns) {
                Some(end_ns) if end_ns > now_ns && !rxq.vring.arm() => {
                    wake_at_ns = Some(wake_at_ns.map_or(end_ns, |w| w.min(end_ns)));
                    Arm::Idle
                }
                _ => Arm::Busy,
            }
        };
        let mut tell_at_ns = u64::MAX;
        for at in 0..ports.len() {
            let vm = ports[at].as_ref().map_or(VmId::NONE, |p| p.vm);
            let ceiling_ns = ledger.until_ns(vm, now_ns);
            for index in 0..ports[at].as_ref().map_or(0, |p| p.tx.len()) {
                let Some(txq) = ports[at].as_mut().and_then(|p| p.tx[index].as_mut()) else {
                    continue;
                };
                let due_ns = txq.vring.notify_due_ns(TX_TELL);
                tell_at_ns = tell_at_ns.min(due_ns.unwrap_or(u64::MAX));
                let busy = match txq.held_on {
                    _ if ceiling_ns.is_some() => {
                        tell_at_ns = tell_at_ns.min(ceiling_ns.unwrap_or(u64::MAX));
                        false
                    }
                    Some(awaited) => wait(ports, awaited) == Arm::Busy,
                    None => txq.vring.arm(),
                };
                if busy {
                    return Arm::Busy;
                }
            }
        }
        if let Some(uplink) = uplink {
            if uplink.wire.receive().is_some() {
                return Arm::Busy;
            }
            if uplink.unfilled {
                tell_at_ns = tell_at_ns.min(now_ns + REFILL_AGAIN_NS);
            }
        }
        match tell_at_ns.min(wake_at_ns.unwrap_or(u64::MAX)) {
            u64::MAX => Arm::Idle,
            at_ns => Arm::Until(at_ns),
        }
    }

    fn disarm(&mut self) {
        for port in self.fabric.ports.iter_mut().flatten() {
            for txq in port.tx.iter_mut().flatten() {
                txq.vring.disarm();
            }
            for rxq in port.rx.iter_mut().flatten() {
                rxq.vring.disarm();
            }
        }
    }

    fn fired(&mut self, fd: RawFd) {
        let Some(&(port, queue)) = self.kicks.get(&fd) else { return };
        let Some(Some(port)) = self.fabric.ports.get_mut(usize::from(port)) else { return };
        let at = usize::from(queue / 2);
        let stats = if queue.is_multiple_of(2) {
            port.rx[at].as_ref().map(|q| &q.vring.parts.stats)
        } else {
            port.tx[at].as_ref().map(|q| &q.vring.parts.stats)
        };
        if let Some(stats) = stats {
            stats.kicks.add(1);
        }
    }
}
