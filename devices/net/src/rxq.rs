//! One receive queue: the buffers a driver has posted, and filling them.
//!
//! Posted chains are taken in batches and kept in [`RxQueue::batch`] until used; whoever stops the
//! queue gives the unused ones back. Completions gather in [`RxQueue::done`] and are published
//! together, so that all frames of a round become visible at once with one notification.

use base::counter::DropReason;
use frame::{Frame, Head, PLAIN, VNET_LEN, VNET_LEN_LEGACY, Vnet};
use queue::seg::{copy_across, copy_in, copy_out};
use queue::{Batch, Chain, Completion, RingError, Vring};
use sidecore::SEG_CHARGE_BYTES;

use crate::backpressure::{HoldBudget, Refusal};
use crate::outcome::Sender;
use crate::window::{self, Window};

/// Chains taken from the ring at once: twice as many as the last round used, within these. A frame
/// that comes alone does not wait until dozens of descriptors have come from another core's cache.
const MIN_POP_CHAINS: usize = 8;
/// Most chains of a batch, see [`MIN_POP_CHAINS`].
const MAX_POP_CHAINS: usize = 64;

/// Most receive chains held, and so the most buffers one frame may take: 64 KiB in the smallest
/// buffers in use (1,526 bytes) are 43, and a software-cut super-packet has 128 segments.
pub const RX_BATCH: usize = 256;

/// Segments held for them: drivers without mergeable buffers post 64 KiB in up to 19 pieces.
const RX_SEGS: usize = 2048;

/// Segments that a frame may take at the receiver before they cost extra: the 19 above, and the
/// header's.
const USUAL_SEGS: u64 = 20;

/// Whether frames fit now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    /// Yes.
    Yes,
    /// The frame has to wait: more buffers are needed.
    Wait,
    /// Never.
    No(DropReason),
}

/// One running receive queue.
#[derive(Debug)]
pub(crate) struct RxQueue {
    pub vring: Vring,
    batch: Batch,
    /// First unused chain of `batch`.
    next: usize,
    /// How many chains to take at once next time.
    pop_chains: usize,
    /// Chains posted behind `batch` did not fit beside it, when `next` was 0: its segments are
    /// full.
    full: bool,
    done: Vec<Completion>,
    vnet_len: usize,
    mergeable: bool,
    hold: HoldBudget,
    window: Window,
    /// Buffers of datagrams that were filled and not notified of.
    datagrams: usize,
    /// Bytes put since the last time that they were counted.
    put_bytes: u64,
    /// Segments that were used, or walked again, since they were counted the last time; not those
    /// of [`RxQueue::put_plain`].
    segs: u64,
    /// In the switch's list of queues to publish.
    pub touched: bool,
}

impl RxQueue {
    pub fn new(vring: Vring, vnet_len: usize, mergeable: bool) -> Self {
        Self {
            vring,
            batch: Batch::new(RX_BATCH, RX_SEGS),
            next: 0,
            pop_chains: MIN_POP_CHAINS,
            full: false,
            done: Vec::with_capacity(RX_BATCH),
            vnet_len,
            mergeable,
            hold: HoldBudget::default(),
            window: Window::default(),
            datagrams: 0,
            put_bytes: 0,
            segs: 0,
            touched: false,
        }
    }

    /// Publishes what is done and gives unused chains back: nothing is in flight afterwards.
    pub fn stop(mut self) -> Vring {
        self.publish();
        self.give_back();
        self.vring
    }

    /// Gives unused chains back, so that they are translated anew (memory table changed), and lets
    /// go of the table they came with: a region that was removed must not stay mapped for an idle
    /// queue.
    pub fn give_back(&mut self) {
        let left = self.batch.len() - self.next;
        if left > 0 {
            self.vring.unpop(&mut self.batch, left);
        }
        self.batch.release();
        (self.next, self.full) = (0, false);
    }

    /// More chains for a queue that has used all at hand: twice as many the next time, if that is
    /// in this round.
    fn refill(&mut self, now_ns: u64) -> bool {
        let max = self.pop_chains;
        self.pop_chains = (2 * max).min(MAX_POP_CHAINS);
        self.top_up(max, now_ns)
    }

    /// Takes posted chains; true when there are more than before. The unused ones are walked again,
    /// so with some at hand it is worth it only when there is more ([`Vring::has_work`]).
    #[inline]
    fn top_up(&mut self, max: usize, now_ns: u64) -> bool {
        let left = self.batch.len() - self.next;
        if left > 0 {
            self.vring.unpop(&mut self.batch, left);
        }
        let popped = self.vring.pop(&mut self.batch, max);
        self.next = 0;
        let n = if self.batch.has_fault() { self.end_at_fault() } else { popped };
        let is_more = n > left;
        self.full = left > 0 && !is_more;
        if is_more {
            self.hold.end(now_ns);
        }
        is_more
    }

    /// A buffer that cannot be filled goes back empty when it is the first one, and else ends what
    /// is at hand. Returns how many are. Only one goes back at a time: a driver may post them
    /// without end.
    #[cold]
    fn end_at_fault(&mut self) -> usize {
        let good = (0..self.batch.len()).take_while(|&at| self.batch.get(at).fault.is_none());
        let good = good.count();
        let rest = self.batch.len() - good.max(1);
        self.vring.unpop(&mut self.batch, rest);
        if good > 0 {
            return good;
        }
        let chain = self.batch.get(0);
        let (done, segs) =
            (Completion { id: chain.id, ndesc: chain.ndesc, written: 0 }, chain.segs());
        self.vring.parts.log_unfilled(&chain);
        self.publish_quietly();
        self.vring.parts.stats.drop_one(DropReason::Malformed);
        self.vring.push(&[done]);
        self.segs += segs;
        self.next = 1;
        0
    }

    /// Whether all that can be at hand is.
    #[inline]
    fn is_full(&self) -> bool {
        self.batch.len() - self.next >= RX_BATCH || (self.full && self.next == 0)
    }

    /// Whether `count` frames of up to `len` bytes each fit.
    #[inline]
    pub fn room(&mut self, count: usize, len: usize, now_ns: u64) -> Room {
        loop {
            let answer = self.count_room(count, self.vnet_len + len);
            if answer != Room::Wait {
                return answer;
            }
            if self.is_full() {
                return Room::No(DropReason::TooBig);
            }
            let is_empty = self.next == self.batch.len();
            if !is_empty && !self.vring.has_work() {
                return Room::Wait;
            }
            self.segs += self.segs_at_hand();
            let is_more =
                if is_empty { self.refill(now_ns) } else { self.top_up(RX_BATCH, now_ns) };
            if !is_more && !self.full {
                return Room::Wait;
            }
        }
    }

    fn segs_at_hand(&self) -> u64 {
        (self.next..self.batch.len()).map(|at| self.batch.get(at).segs()).sum()
    }

    /// Cost of a frame of `len` bytes (without header) beyond its bytes, because buffers are cut
    /// into more pieces than usual. Call it once for each frame that was not for
    /// [`RxQueue::put_plain`], also when it was not put.
    #[inline]
    pub fn take_excess(&mut self, len: usize) -> u64 {
        let usual = (len as u64).max(USUAL_SEGS * SEG_CHARGE_BYTES);
        (std::mem::take(&mut self.segs) * SEG_CHARGE_BYTES).saturating_sub(usual)
    }

    #[inline]
    fn count_room(&mut self, count: usize, need: usize) -> Room {
        let mut at = self.next;
        for _ in 0..count {
            let mut have = 0;
            while have < need {
                if at == self.batch.len() {
                    return Room::Wait;
                }
                let len = self.batch.get(at).writable_len as usize;
                if len < self.vnet_len {
                    return self.break_port(self.batch.get(at).id);
                }
                have += len;
                at += 1;
                if have < need && !self.mergeable {
                    return Room::No(DropReason::TooBig);
                }
            }
        }
        Room::Yes
    }

    /// A receive buffer that cannot even hold the header: the ring makes no sense.
    fn break_port(&mut self, head: u16) -> Room {
        let what = "receive buffer is shorter than the virtio-net header (12 bytes)";
        self.vring.fail(&RingError::BadRequest { head, what });
        Room::No(DropReason::LinkDown)
    }

    /// Fills the next buffer with a frame that needs nothing done to it, the beginning of which is
    /// in `head`. False: not possible this way, and nothing was done.
    #[inline]
    pub fn put_plain(&mut self, from: &Chain<'_>, head: &Head, now_ns: u64) -> bool {
        if self.next == self.batch.len() && !self.refill(now_ns) {
            return false;
        }
        let (eth, len) = (head.eth(), head.frame_len());
        let Some((id, ndesc, to)) = self.batch.lone_writable(self.next) else { return false };
        let fits = to[0].len() >= VNET_LEN + len;
        if !fits || self.vnet_len != VNET_LEN || self.done.len() == self.done.capacity() {
            return false;
        }
        // A driver that puts headers apart from frames (DPDK) and passes the buffer on leaves ours
        // in it. Not written, its cache line does not go from core to core with each frame.
        let mut there = [0; VNET_LEN];
        copy_out(to, 0, &mut there);
        let header = if there == PLAIN { VNET_LEN } else { copy_in(to, 0, &PLAIN) };
        let mut written = header + copy_in(to, VNET_LEN, eth);
        if len > eth.len() {
            written += copy_across(from.readable, written, to, written, len - eth.len());
        }
        self.vring.queue.mark_written(to, written);
        self.done.push(Completion { id, ndesc, written: written as u32 });
        self.next += 1;
        self.count_frame(len, eth, 1);
        true
    }

    #[inline]
    fn count_frame(&mut self, len: usize, eth: &[u8], buffers: usize) {
        self.hold.frame_taken(len);
        self.put_bytes += len as u64;
        if self.window.counts() && window::applies(eth) {
            self.datagrams += buffers;
        }
    }

    /// Fills buffers with a frame for which there is [`Room::Yes`].
    #[inline]
    pub fn put(&mut self, frame: &Frame<'_>, vnet: &Vnet) {
        let len = frame.len();
        let need = self.vnet_len + len;
        let mut used = 1;
        let first = self.batch.get(self.next);
        let (mut have, mut used_segs) = (first.writable_len as usize, first.segs());
        while have < need {
            let chain = self.batch.get(self.next + used);
            have += chain.writable_len as usize;
            used_segs += chain.segs();
            used += 1;
        }
        self.segs += used_segs;
        if self.done.len() + used > self.done.capacity() {
            self.publish_quietly();
        }
        if used == 1 && self.vnet_len == VNET_LEN && *vnet == frame.vnet {
            self.put_whole(frame, need);
        } else {
            self.put_pieces(frame, &vnet.to_bytes(used as u16), need);
        }
        self.count_frame(len, frame.eth(), used);
    }

    /// One buffer, with the header that the frame came with.
    #[inline]
    fn put_whole(&mut self, frame: &Frame<'_>, need: usize) {
        let chain = self.batch.get(self.next);
        let mut at = copy_in(chain.writable, 0, frame.head);
        if need > at {
            at += frame.body.copy_to(0, need - at, chain.writable, at);
        }
        self.vring.queue.mark_written(chain.writable, at);
        self.done.push(Completion { id: chain.id, ndesc: chain.ndesc, written: at as u32 });
        self.next += 1;
    }

    /// Several buffers, or another header than the frame came with.
    fn put_pieces(&mut self, frame: &Frame<'_>, vnet: &[u8; VNET_LEN], need: usize) {
        let eth = frame.eth();
        let mut put = 0;
        while put < need {
            let chain = self.batch.get(self.next);
            let end = need.min(put + chain.writable_len as usize);
            let start = put;
            while put < end {
                let at = put - start;
                let n = if put < self.vnet_len {
                    let to = self.vnet_len.min(end);
                    copy_in(chain.writable, at, &vnet[put..to])
                } else if put < self.vnet_len + eth.len() {
                    let to = (self.vnet_len + eth.len()).min(end);
                    let piece = &eth[put - self.vnet_len..to - self.vnet_len];
                    copy_in(chain.writable, at, piece)
                } else {
                    let from = put - self.vnet_len - eth.len();
                    frame.body.copy_to(from, end - put, chain.writable, at)
                };
                // Cannot be: the lengths were added up before. A stuck loop would be worse than a
                // short frame.
                if n == 0 {
                    break;
                }
                put += n;
            }
            let written = put - start;
            self.vring.queue.mark_written(chain.writable, written);
            let done = Completion { id: chain.id, ndesc: chain.ndesc, written: written as u32 };
            self.done.push(done);
            self.next += 1;
            if put < end {
                return;
            }
        }
    }

    /// A frame did not fit: keep it or drop it?
    pub fn refuse(&mut self, sender: &Sender) -> Refusal {
        self.hold.refuse(sender.now_ns, sender.hold_ns)
    }

    /// Whether a frame meets a window that it may have to wait for.
    #[inline]
    pub fn is_before_window(&self, sender: &Sender, eth: &[u8]) -> bool {
        let is_shut = self.window.is_full(self.datagrams) || self.window.line.is_before(sender);
        is_shut && window::applies(eth)
    }

    /// The window is open: whoever waits for it goes on.
    #[inline]
    fn end_window_wait(&mut self, now_ns: u64) {
        if std::mem::take(&mut self.window.is_awaited) {
            self.hold.end(now_ns);
        }
    }

    /// Whether a sender has to wait until the guest's kernel has taken what it was given, or until
    /// others have had their turns: looks if it is time to.
    #[cold]
    pub fn wait_for_window(&mut self, sender: &Sender) -> bool {
        let queue = &self.vring.queue;
        let is_full = self.window.is_full(self.datagrams);
        if !is_full || self.window.look(sender.now_ns, || queue.driver_waits()) {
            self.end_window_wait(sender.now_ns);
            return !self.window.line.is_turn_of(sender);
        }
        let waits = !self.window.is_late(sender.now_ns, sender.hold_ns)
            && self.refuse(sender) == Refusal::Hold;
        if waits {
            self.window.line.refused(sender);
            self.window.is_awaited = true;
        } else {
            self.window.forget();
            self.end_window_wait(sender.now_ns);
        }
        waits
    }

    /// Whether a sender that is held for want of buffers should go on waiting: there are no new
    /// ones, and the hold is not over.
    pub fn still_full(&mut self, sender: &Sender) -> bool {
        if !self.hold.is_on(sender.now_ns, sender.hold_ns) {
            return false;
        }
        let is_more = self.vring.has_work();
        if is_more {
            self.hold.end(sender.now_ns);
        }
        !is_more
    }

    /// When the hold is over.
    pub fn hold_ends_ns(&self, hold_ns: u64) -> Option<u64> {
        self.hold.ends_ns(hold_ns)
    }

    /// When it is time to look at the window again, if a sender waits for it.
    pub fn look_ns(&self) -> Option<u64> {
        self.window.is_awaited.then(|| self.window.look_ns())
    }

    fn publish_quietly(&mut self) {
        if !self.done.is_empty() {
            self.vring.push(&self.done);
            self.done.clear();
        }
    }

    /// Publishes as [`RxQueue::publish`], at this time of the round. Nothing waits for the window
    /// of a guest that may be a router.
    #[inline]
    pub fn publish_at(&mut self, now_ns: u64, may_route: bool) {
        self.publish();
        let datagrams = std::mem::take(&mut self.datagrams);
        if may_route {
            return self.window.forget();
        }
        let driver_waited = self.vring.queue.driver_waited();
        if self.window.published(datagrams, driver_waited, now_ns) {
            self.end_window_wait(now_ns);
        }
    }

    /// Publishes what is done and notifies once.
    #[inline]
    pub fn publish(&mut self) {
        let stats = &self.vring.parts.stats;
        stats.bytes.add(self.put_bytes);
        stats.copied_bytes.add(self.put_bytes);
        self.put_bytes = 0;
        self.pop_chains = (2 * self.done.len()).clamp(MIN_POP_CHAINS, MAX_POP_CHAINS);
        self.publish_quietly();
        self.vring.notify();
        self.touched = false;
    }
}

/// The header length of a driver with these features (virtio 1.2, 5.1.6.1).
pub(crate) fn vnet_len(features: u64) -> usize {
    let new = crate::features::VERSION_1 | crate::features::MRG_RXBUF;
    if features & new != 0 { VNET_LEN } else { VNET_LEN_LEGACY }
}
