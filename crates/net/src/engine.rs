//! The switch's worker: polls every transmit queue and the uplink, round robin. A VM's frames are
//! sent in [`crate::transmit`].

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;

use base::counter::{DropReason, QueueStats};
use frame::{Allowed, Body, Frame, FrameBuffer, Head, flow_hash};
use queue::Coalescing;
use sidecore::{Arm, Ledger, Spent, VmId, Worker};

use crate::backlog::Backlogs;
use crate::binding::Tables;
use crate::fdb::{Learn, LearnRules, PortId, UPLINK};
use crate::forward::{Dest, Fabric, Outcome, WhenFull, rx_mut};
use crate::hook::Hooks;
use crate::metrics::SwitchStats;
use crate::port::{Awaited, MIN_CHARGE_BYTES, Port, TX_BATCH};
use crate::uplink::Uplink;

/// Frames taken from the uplink in a round.
const UPLINK_BATCH: usize = 64;

/// Bytes of them, with the copies of floods: two super-packets. It is for all VMs, and each of them
/// may take half of a super-packet in a round when there are several.
const UPLINK_BYTES: u64 = 128 << 10;

/// A wire that could not take its receive buffers (no memory) cannot wake anybody either: it is
/// asked again so soon. A tick of the kernel, which may have freed some by then.
const REFILL_AGAIN_NS: u64 = 1_000_000;

/// Coalescing of the end of transmissions, for which nobody waits: drivers free the buffers, and
/// Linux does so whenever it is told of received frames too. A request and its answer then cost
/// each guest one interrupt and not two. 1 ms is what TCP small queues let a sender have in its
/// device.
pub(crate) const TX_TELL: Coalescing = Coalescing { max_pending: 16, max_wait_ns: 1_000_000 };

/// A switch's worker, with all that it works on. Lives on one sidecore.
pub(crate) struct Engine {
    pub fabric: Fabric,
    /// Copies of the beginnings of one batch of frames; the uplink reads from them until it is
    /// flushed.
    pub heads: Box<[Head]>,
    /// Whether each of them makes sense.
    pub verdicts: Box<[Result<(), DropReason>]>,
    /// Port that is polled first in this round.
    turn: usize,
    /// Queue that a kick belongs to.
    pub kicks: HashMap<RawFd, (PortId, u16)>,
}

impl Engine {
    pub fn new(tables: Tables, hold_ns: u64, max_touched: usize, stats: Arc<SwitchStats>) -> Self {
        let fabric = Fabric {
            ports: Vec::new(),
            uplink: None,
            tables,
            touched: Vec::with_capacity(max_touched),
            buffer: FrameBuffer::new(),
            hold_ns,
            extra_cost_bytes: 0,
            unpublished_bytes: 0,
            hooks: Hooks::new(base::limits::MAX_PORTS),
            backlogs: Backlogs::default(),
            stats,
        };
        Self {
            fabric,
            heads: vec![Head::default(); TX_BATCH].into_boxed_slice(),
            verdicts: vec![Ok(()); TX_BATCH].into_boxed_slice(),
            turn: 0,
            kicks: HashMap::new(),
        }
    }

    fn poll_port(&mut self, port: &mut Port, now_ns: u64, ledger: &mut Ledger) -> usize {
        let (mut work, count) = (0, port.tx.len());
        port.turn_bytes = 0;
        // Credit that is short goes to the first one: another each time.
        let first = ledger.draw_below(count);
        for k in 0..count {
            let index = if first + k < count { first + k } else { first + k - count };
            if let Some(mut txq) = port.tx[index].take() {
                work += self.poll_tx(port, &mut txq, index, now_ns, ledger);
                txq.vring.notify_coalesced(now_ns, TX_TELL);
                port.tx[index] = Some(txq);
            }
        }
        work += self.poll_control(port, now_ns, ledger);
        work + self.poll_hook(port, now_ns, ledger)
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
        let (mut work, mut taken) = (0, 0);
        while work < UPLINK_BATCH && taken < UPLINK_BYTES {
            let Some(bytes) = uplink.wire.receive() else { break };
            taken += bytes.len() as u64;
            if let Outcome::Dropped(reason) = self.inject(bytes, &uplink.stats, now_ns, ledger) {
                uplink.stats.drop_one(reason);
            }
            taken += std::mem::take(&mut self.fabric.extra_cost_bytes);
            self.fabric.flush_lent();
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
            Dest::Port(to) => fabric.send_or_keep(to, lane, &frame, now_ns),
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
}

/// Wake-up of a switch that arms its queues to sleep. Its methods return whether there is work to
/// do at once.
struct WakeUp {
    now_ns: u64,
    /// Time that a sender may wait for a receiver.
    hold_ns: u64,
    /// Time at which the switch wakes up by itself; `u64::MAX`: never.
    at_ns: u64,
}

impl WakeUp {
    fn at_the_latest(&mut self, at_ns: u64) {
        self.at_ns = self.at_ns.min(at_ns);
    }

    /// Arms the receive queue that a sender waits for, until the end of its hold.
    fn arm_awaited(&mut self, ports: &mut [Option<Box<Port>>], awaited: Awaited) -> bool {
        let Some(rxq) = rx_mut(ports, awaited) else { return true };
        match rxq.hold_ends_ns(self.hold_ns) {
            Some(end_ns) if end_ns > self.now_ns && !rxq.vring.arm() => {
                self.at_the_latest(end_ns);
                false
            }
            _ => true,
        }
    }

    /// Arms the hook of a port, whose VM has to wait until `ceiling_ns`.
    fn arm_hook(
        &mut self,
        ports: &mut [Option<Box<Port>>],
        at: usize,
        ceiling_ns: Option<u64>,
    ) -> bool {
        let hook = ports[at].as_mut().and_then(|p| p.hook.as_mut());
        let Some((is_ready, held_on, unfilled)) = hook.map(|slot| slot.waiting()) else {
            return false;
        };
        let is_busy = match (ceiling_ns, held_on) {
            (Some(ceiling_ns), _) => {
                self.at_the_latest(ceiling_ns);
                false
            }
            (None, Some(awaited)) => self.arm_awaited(ports, awaited),
            (None, None) => is_ready,
        };
        if unfilled && !is_busy {
            self.at_the_latest(self.now_ns + REFILL_AGAIN_NS);
        }
        is_busy
    }

    /// Arms the transmit queues of a port, whose VM has to wait until `ceiling_ns`.
    fn arm_tx(
        &mut self,
        ports: &mut [Option<Box<Port>>],
        at: usize,
        ceiling_ns: Option<u64>,
    ) -> bool {
        for index in 0..ports[at].as_ref().map_or(0, |p| p.tx.len()) {
            let Some(txq) = ports[at].as_mut().and_then(|p| p.tx[index].as_mut()) else {
                continue;
            };
            self.at_the_latest(txq.vring.notify_due_ns(TX_TELL).unwrap_or(u64::MAX));
            let is_busy = match (ceiling_ns, txq.held_on) {
                (Some(ceiling_ns), _) => {
                    self.at_the_latest(ceiling_ns);
                    false
                }
                (None, Some(awaited)) => self.arm_awaited(ports, awaited),
                (None, None) => txq.vring.arm(),
            };
            if is_busy {
                return true;
            }
        }
        false
    }

    /// Arms the receive queues that backlogs wait for.
    fn arm_backlogs(&mut self, ports: &mut [Option<Box<Port>>], backlogs: &Backlogs) -> bool {
        for &id in backlogs.waiting() {
            let Some(port) = ports[usize::from(id)].as_deref_mut() else { return true };
            self.at_the_latest(port.backlog_ends_ns().unwrap_or(self.now_ns));
            let queue = port.backlog_queue().and_then(|q| port.rx[usize::from(q)].as_deref_mut());
            if queue.is_none_or(|rxq| rxq.vring.arm()) {
                return true;
            }
        }
        false
    }

    fn arm_uplink(&mut self, uplink: &mut Uplink) -> bool {
        let is_busy = uplink.wire.receive().is_some();
        if uplink.unfilled && !is_busy {
            self.at_the_latest(self.now_ns + REFILL_AGAIN_NS);
        }
        is_busy
    }
}

/// Arms the control queue of a port. True: it has requests.
fn arm_control(ports: &mut [Option<Box<Port>>], at: usize) -> bool {
    let control = ports[at].as_mut().and_then(|p| p.control.as_mut());
    control.is_some_and(|control| control.vring.arm())
}

impl Worker for Engine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        let count = self.fabric.ports.len();
        let mut work = 0;
        self.turn = if self.turn + 1 < count { self.turn + 1 } else { 0 };
        for k in 0..count {
            let at = if self.turn + k < count { self.turn + k } else { self.turn + k - count };
            if let Some(mut port) = self.fabric.publish_before(at, now_ns) {
                work += self.poll_port(&mut port, now_ns, ledger);
                self.fabric.ports[at] = Some(port);
                self.fabric.publish_in_time(now_ns);
            }
        }
        // What came before goes first.
        work += self.drain_backlogs(now_ns);
        work += self.poll_uplink(now_ns, ledger);
        self.fabric.publish(now_ns);
        if let Some(moved) = self.fabric.tables.moves.due(now_ns) {
            self.fabric.tell_of(&moved);
        }
        work
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        let Fabric { ports, uplink, hold_ns, backlogs, .. } = &mut self.fabric;
        let mut wake = WakeUp { now_ns, hold_ns: *hold_ns, at_ns: u64::MAX };
        for at in 0..ports.len() {
            let vm = ports[at].as_ref().map_or(VmId::NONE, |p| p.vm);
            let ceiling_ns = ledger.until_ns(vm, now_ns);
            let is_busy = wake.arm_hook(ports, at, ceiling_ns)
                || arm_control(ports, at)
                || wake.arm_tx(ports, at, ceiling_ns);
            if is_busy {
                return Arm::Busy;
            }
        }
        if wake.arm_backlogs(ports, backlogs) {
            return Arm::Busy;
        }
        if let Some(uplink) = uplink
            && wake.arm_uplink(uplink)
        {
            return Arm::Busy;
        }
        match wake.at_ns {
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
            if let Some(control) = &mut port.control {
                control.vring.disarm();
            }
        }
    }

    fn fired(&mut self, fd: RawFd) {
        let Some(&(port, queue)) = self.kicks.get(&fd) else { return };
        let Some(Some(port)) = self.fabric.ports.get_mut(usize::from(port)) else { return };
        if let Some(vring) = port.vring(queue) {
            vring.parts.stats.kicks.add(1);
        }
    }
}
