//! Virtqueues of a port as the engine works on them.

use base::counter::DropReason;
use queue::{Batch, Chain, Completion, RingError, Seg, Vring};
use sidecore::{Allowance, Spent, least_charge_bytes};
use zerocopy::IntoBytes;

use crate::limits::{BATCH, MIN_CHARGE_BYTES, ROUND_BYTES, ROUND_PACKETS, TYPICAL_BYTES};
use crate::packet::{HEADER_LEN_BYTES, RawHeader};

const HEADER: usize = HEADER_LEN_BYTES as usize;

/// Index of the queue towards the driver (virtio 1.2, 5.10.2).
pub(crate) const RX: u16 = 0;
/// Index of the queue from the driver.
pub(crate) const TX: u16 = 1;
/// Index of the event queue: kept for front ends that hand it over, nothing is sent on it.
pub(crate) const EVENT: u16 = 2;

/// Segments of a batch: Linux uses one or two per packet; bigger chains just make smaller batches.
const BATCH_SEGS: usize = BATCH * 4;

/// Receive queue (device → driver). Takes empty buffers in batches, keeps those not needed yet,
/// completes in order.
#[derive(Debug)]
pub(crate) struct RxQueue {
    vring: Vring,
    batch: Batch,
    next: usize,
    done: Vec<Completion>,
    /// Whether completions were pushed since the last notification.
    owes_notify: bool,
    /// Packets and payload bytes that may still go to the guest in this round.
    packets_left: u32,
    bytes_left: u32,
    /// Segments of the buffers that were filled in this round.
    segs: u64,
}

/// Reason why a packet cannot go to the guest now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitReason {
    /// The guest has posted no buffers.
    Buffers,
    /// The port has had its share of this round.
    Round,
}

impl RxQueue {
    pub fn new(vring: Vring) -> Self {
        Self {
            vring,
            batch: Batch::new(BATCH, BATCH_SEGS),
            next: 0,
            done: Vec::with_capacity(BATCH),
            owes_notify: false,
            packets_left: ROUND_PACKETS,
            bytes_left: ROUND_BYTES,
            segs: 0,
        }
    }

    /// Begins a new round: the port's share of it is whole again.
    pub fn begin_round(&mut self) {
        (self.packets_left, self.bytes_left, self.segs) = (ROUND_PACKETS, ROUND_BYTES, 0);
    }

    /// Packets and bytes that went to the guest since the round began.
    pub fn spent(&self) -> Spent {
        let requests = ROUND_PACKETS - self.packets_left;
        let bytes = u64::from(ROUND_BYTES - self.bytes_left);
        let least = least_charge_bytes(u64::from(requests) * MIN_CHARGE_BYTES, self.segs);
        Spent { bytes: bytes.max(least), requests }
    }

    /// Number of payload bytes that may still go to the guest in this round.
    pub fn bytes_left(&self) -> u32 {
        self.bytes_left
    }

    /// Makes sure that a buffer for header and payload is at hand and the port's share of the round
    /// is not used up. A buffer without room for one byte of payload breaks the port: no driver
    /// posts such, and completing them empty would never end while the guest posts more. One that
    /// cannot be filled ([`queue::ChainFault`]) goes back empty, as a packet of the round's share.
    pub fn ensure_buffer(&mut self) -> Result<(), WaitReason> {
        if !self.vring.parts.health.is_live() {
            return Err(WaitReason::Buffers);
        }
        loop {
            if self.packets_left == 0 || self.bytes_left == 0 {
                return Err(WaitReason::Round);
            }
            if self.next >= self.batch.len() {
                self.push();
                self.next = 0;
                if self.vring.pop(&mut self.batch, BATCH) == 0 {
                    return Err(WaitReason::Buffers);
                }
            }
            if self.batch.get(self.next).fault.is_none() {
                break;
            }
            self.vring.parts.stats.drop_one(DropReason::Malformed);
            self.vring.parts.log_unfilled(&self.batch.get(self.next));
            self.packets_left -= 1;
            self.complete(0);
        }
        let chain = self.batch.get(self.next);
        if chain.writable_len > HEADER_LEN_BYTES {
            return Ok(());
        }
        let head = chain.id;
        self.vring.parts.stats.drop_one(DropReason::Malformed);
        let what = "a receive buffer has no room for a header and one byte";
        self.vring.fail(&RingError::BadRequest { head, what });
        Err(WaitReason::Buffers)
    }

    /// Returns the buffer that is `ahead` places after the next one, if it is at hand, good, and
    /// within the port's share of the round.
    pub fn peek(&self, ahead: usize) -> Option<Chain<'_>> {
        let at = self.next + ahead;
        if at >= self.batch.len() || ahead >= self.packets_left as usize {
            return None;
        }
        Some(self.batch.get(at)).filter(|c| c.writable_len > HEADER_LEN_BYTES)
    }

    /// Completes the next buffer with `header` and `payload_len` bytes that lie behind it already.
    /// Call only after [`RxQueue::ensure_buffer`] or [`RxQueue::peek`] found it.
    pub fn put(&mut self, header: &RawHeader, payload_len: u32) {
        let chain = self.batch.get(self.next);
        // Fewer only if the buffer were smaller than `ready` saw it.
        let head = queue::seg::copy_in(chain.writable, 0, header.as_bytes());
        let written = head as u32 + payload_len;
        self.vring.queue.mark_written(chain.writable, written as usize);
        self.vring.parts.stats.bytes.add(u64::from(payload_len));
        self.packets_left = self.packets_left.saturating_sub(1);
        self.bytes_left = self.bytes_left.saturating_sub(payload_len);
        self.complete(written);
    }

    fn complete(&mut self, written: u32) {
        let chain = self.batch.get(self.next);
        self.segs += chain.segs();
        self.done.push(Completion { id: chain.id, ndesc: chain.ndesc, written });
        self.next += 1;
    }

    fn push(&mut self) {
        if !self.done.is_empty() {
            self.vring.push(&self.done);
            self.done.clear();
            self.owes_notify = true;
        }
    }

    /// Publishes what was completed and notifies the driver.
    pub fn finish(&mut self) {
        self.push();
        if std::mem::take(&mut self.owes_notify) {
            self.vring.notify();
        }
    }

    /// Gives buffers that were not used back to the ring.
    pub fn give_back(&mut self) {
        self.finish();
        let unused = self.batch.len() - self.next;
        if unused > 0 {
            self.vring.unpop(&mut self.batch, unused);
        }
        self.batch.release();
        self.next = 0;
    }

    /// Returns the ring, with nothing of it in use.
    pub fn into_vring(mut self) -> Vring {
        self.give_back();
        self.vring
    }

    pub fn vring(&mut self) -> &mut Vring {
        &mut self.vring
    }

    pub fn count_copied(&self, bytes: u32) {
        self.vring.parts.stats.copied_bytes.add(u64::from(bytes));
    }
}

/// Transmit queue (driver → device). A batch is taken, worked off and completed within one poll.
#[derive(Debug)]
pub(crate) struct TxQueue {
    pub vring: Vring,
    pub batch: Batch,
    done: Vec<Completion>,
    /// Average charge of a packet of the last batch: not many more are taken from the ring
    /// than are allowed.
    mean_cost: u64,
}

impl TxQueue {
    pub fn new(vring: Vring) -> Self {
        Self {
            vring,
            batch: Batch::new(BATCH, BATCH_SEGS),
            done: Vec::with_capacity(BATCH),
            mean_cost: TYPICAL_BYTES,
        }
    }

    /// Takes the next packets until the allowance is spent, which the last one may exceed. Returns
    /// what they are charged, and whether there may be more.
    pub fn take_batch(&mut self, allowance: Allowance) -> (Spent, bool) {
        let most = allowance.batch(self.mean_cost, BATCH);
        let popped = if most > 0 { self.vring.pop(&mut self.batch, most) } else { 0 };
        let (mut spent, mut count) = (Spent::default(), 0);
        while count < popped && spent.bytes < allowance.bytes {
            let chain = self.batch.get(count);
            let least = least_charge_bytes(MIN_CHARGE_BYTES, chain.segs());
            spent.add(chain.readable_len.into(), least);
            count += 1;
        }
        self.vring.unpop(&mut self.batch, popped - count);
        if count > 0 {
            self.mean_cost = spent.bytes / count as u64;
        }
        (spent, popped == most || count < popped)
    }

    /// Copies a packet's header, once; none when the packet is shorter.
    pub fn header(&self, index: usize) -> Option<RawHeader> {
        let chain = self.batch.get(index);
        let mut bytes = [0u8; HEADER];
        (queue::seg::copy_out(chain.readable, 0, &mut bytes) == HEADER)
            .then(|| RawHeader::from_wire(&bytes))
    }

    /// Bytes of a packet; payload starts at [`HEADER_LEN_BYTES`].
    pub fn bytes(&self, index: usize) -> &[Seg] {
        self.batch.get(index).readable
    }

    /// Completes the whole batch and notifies the driver.
    pub fn finish(&mut self) {
        self.done.clear();
        for i in 0..self.batch.len() {
            let chain = self.batch.get(i);
            self.done.push(Completion { id: chain.id, ndesc: chain.ndesc, written: 0 });
        }
        self.vring.push(&self.done);
        self.vring.notify();
        self.batch.clear();
    }

    pub fn count_copied(&self, bytes: u64) {
        self.vring.parts.stats.copied_bytes.add(bytes);
    }
}
