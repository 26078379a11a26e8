//! The requests of one queue in flight, and the buffers they may borrow.

use std::collections::VecDeque;

use base::io::IoSlice;
use queue::{Batch, ChainBuf};
use zerocopy::{FromBytes, FromZeros, IntoBytes, KnownLayout};

use crate::limits::{BOUNCE_COUNT, BOUNCE_LEN_BYTES, MAX_OP_SEGS, SERIAL_LEN_BYTES, WIDE_COUNT};
use crate::placeholder::PlaceholderHead;
use crate::request::{Range, Ranges};

/// Segment lists handed to the disk; at fixed addresses, because they never grow.
#[derive(Debug)]
pub(crate) struct IoVecs(pub Vec<IoSlice>);

// SAFETY: the addresses are those of guest memory or of the queue's bounce buffers, which the
// slot's owner keeps mapped and which any thread may use; the list is a plain value.
unsafe impl Send for IoVecs {}

impl IoVecs {
    /// An empty list with room for an operation's buffers.
    pub fn new() -> Self {
        Self(Vec::with_capacity(MAX_OP_SEGS))
    }
}

/// Kind of a request that the disk works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

/// Progress of a request. A request is a list of ranges; a range is done in steps; a step may take
/// several operations when the disk moves less than asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    pub kind: JobKind,
    /// The range in work (READ and WRITE have one).
    pub range: Range,
    /// Number of ranges that are done.
    pub range_index: u8,
    /// Number of ranges.
    pub range_count: u8,
    /// Bytes of the range that are done.
    pub done: u64,
    /// Bytes of the step in work; 0: no step has begun.
    pub step_len: u32,
    /// Bytes of the step that are done.
    pub step_done: u32,
    /// Whether the data is written and a flush makes it durable (write-through).
    pub is_flushing: bool,
    /// Whether WRITE ZEROES writes zeroes as data: the disk has no such operation.
    pub writes_zeroes: bool,
    /// Whether the data goes through a bounce buffer.
    pub is_bouncing: bool,
    /// Repeats after EINTR or EAGAIN.
    pub retries: u8,
    /// Whether the disk has an operation of the request.
    pub is_in_disk: bool,
    /// Whether its first sector is a placeholder and the rest is to be inspected: see
    /// [`crate::placeholder`].
    pub may_be_placeholder: bool,
    /// Whether a handler has it, as a placeholder request, and has not answered.
    pub is_parked: bool,
    /// Bytes charged for steps to come: see [`crate::cost`].
    pub paid_bytes: u64,
    /// Bytes to be charged for the step that was begun, once the disk has it.
    pub due_bytes: u64,
}

impl Job {
    /// Whether the disk has an operation for it that takes no data.
    pub fn is_native(&self) -> bool {
        self.kind == JobKind::Discard || (self.kind == JobKind::WriteZeroes && !self.writes_zeroes)
    }

    /// Whether its next operation is a flush.
    pub fn is_flush(&self) -> bool {
        self.is_flushing || self.kind == JobKind::Flush
    }

    /// A request of one range (or none).
    pub fn new(kind: JobKind, range: Range) -> Self {
        Self {
            kind,
            range,
            range_index: 0,
            range_count: 1,
            done: 0,
            step_len: 0,
            step_done: 0,
            is_flushing: false,
            writes_zeroes: false,
            is_bouncing: false,
            retries: 0,
            is_in_disk: false,
            may_be_placeholder: false,
            is_parked: false,
            paid_bytes: 0,
            due_bytes: 0,
        }
    }
}

/// Slot for one request in flight.
#[derive(Debug)]
pub(crate) struct Slot {
    pub chain: ChainBuf,
    /// The slot's own list, while `chain` is a wide one.
    pub own_chain: Option<ChainBuf>,
    pub iov: IoVecs,
    pub job: Job,
    pub ranges: Ranges,
    /// The bounce buffer it holds.
    pub bounce: Option<u16>,
    /// Time at which its request was taken from the ring.
    pub taken_ns: u64,
    /// Whether it holds a request.
    pub is_taken: bool,
    /// Whether the memory table of its request is not the queue's any more.
    pub has_old_table: bool,
    /// Head of a request that may be a placeholder.
    pub placeholder_head: PlaceholderHead,
    /// Bytes of such a request that were inspected.
    pub inspected_bytes: u64,
    /// Whether a placeholder request needs no flush after its answer.
    pub is_durable: bool,
}

/// All slots of a queue, made once.
#[derive(Debug)]
pub(crate) struct Slab {
    pub slots: Vec<Slot>,
    /// Free slots, last in first out: the warmest first.
    pub free: Vec<u16>,
    /// Slots that wait for their turn at the disk.
    pub ready: VecDeque<u16>,
    /// Lists for chains that a slot has no room for.
    wide: Vec<ChainBuf>,
}

impl Slab {
    /// `count` free slots.
    pub fn new(count: u16) -> Self {
        let slot = |_| Slot {
            chain: ChainBuf::new(MAX_OP_SEGS),
            own_chain: None,
            iov: IoVecs::new(),
            job: Job::new(JobKind::Flush, Range::default()),
            ranges: Ranges::default(),
            bounce: None,
            taken_ns: 0,
            is_taken: false,
            has_old_table: false,
            placeholder_head: PlaceholderHead::default(),
            inspected_bytes: 0,
            is_durable: false,
        };
        Self {
            slots: (0..count).map(slot).collect(),
            free: (0..count).rev().collect(),
            ready: VecDeque::with_capacity(usize::from(count)),
            wide: (0..count.min(WIDE_COUNT))
                .map(|_| ChainBuf::new(base::limits::MAX_CHAIN_SEGS))
                .collect(),
        }
    }

    /// Whether a slot that is free has, or can borrow, room for the segments of this chain.
    #[inline]
    pub fn has_room(&self, batch: &Batch, index: usize) -> bool {
        let chain = batch.get(index);
        chain.readable.len() + chain.writable.len() <= MAX_OP_SEGS || !self.wide.is_empty()
    }

    /// Puts a chain into a slot. False where [`Slab::has_room`] says so.
    #[inline]
    pub fn load(&mut self, slot: u16, batch: &Batch, index: usize) -> bool {
        let s = &mut self.slots[usize::from(slot)];
        s.chain.load(batch, index) || self.load_wide(slot, batch, index)
    }

    #[cold]
    fn load_wide(&mut self, slot: u16, batch: &Batch, index: usize) -> bool {
        let Some(wide) = self.wide.pop() else { return false };
        let s = &mut self.slots[usize::from(slot)];
        s.own_chain = Some(std::mem::replace(&mut s.chain, wide));
        s.chain.load(batch, index)
    }

    /// Gives a slot's wide list back, if it has one.
    #[inline]
    pub fn narrow(&mut self, slot: u16) {
        if self.slots[usize::from(slot)].own_chain.is_some() {
            self.take_wide(slot);
        }
    }

    #[cold]
    fn take_wide(&mut self, slot: u16) {
        let s = &mut self.slots[usize::from(slot)];
        if let Some(own) = s.own_chain.take() {
            self.wide.push(std::mem::replace(&mut s.chain, own));
        }
    }

    /// All lists that no request is in.
    pub fn unused_chains(&mut self) -> impl Iterator<Item = &mut ChainBuf> {
        let slots = self.slots.iter_mut();
        let unused = slots.filter_map(|s| match s.is_taken {
            true => s.own_chain.as_mut(),
            false => Some(&mut s.chain),
        });
        unused.chain(&mut self.wide)
    }

    /// The lists of wide chains that are free.
    #[cfg(test)]
    pub fn free_wide(&self) -> usize {
        self.wide.len()
    }

    /// Takes all slots, and leaves none.
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::new(0))
    }

    /// Requests in flight.
    pub fn taken(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// Page of a bounce buffer, aligned as strictly as any disk asks for.
#[derive(FromBytes, IntoBytes, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Aligned buffers for data that must not, or cannot, go directly to guest memory.
pub(crate) struct Bounces {
    pages: Box<[Page]>,
    free: Vec<u16>,
}

impl Bounces {
    /// Allocates [`BOUNCE_COUNT`] buffers when they are `wanted`; else none.
    pub fn new(wanted: bool) -> Result<Self, std::io::Error> {
        let count = if wanted { BOUNCE_COUNT } else { 0 };
        let pages = usize::from(count) * BOUNCE_LEN_BYTES as usize / size_of::<Page>();
        let pages = <[Page]>::new_box_zeroed_with_elems(pages)
            .map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        Ok(Self { pages, free: (0..count).rev().collect() })
    }

    /// No buffers.
    pub fn none() -> Self {
        Self { pages: Box::default(), free: Vec::new() }
    }

    /// Number of free buffers.
    #[cfg(test)]
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// A free buffer.
    pub fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Gives a buffer back.
    pub fn give(&mut self, index: u16) {
        self.free.push(index);
    }

    /// Bytes of a buffer that was taken.
    pub fn bytes(&mut self, index: u16) -> &mut [u8] {
        let len = BOUNCE_LEN_BYTES as usize;
        let all = self.pages.as_mut_bytes();
        &mut all[usize::from(index) * len..][..len]
    }
}

/// Zeroes to write where the disk cannot zero by itself: one page-aligned block, named many times.
#[repr(C, align(4096))]
pub(crate) struct Zeroes([u8; 65536]);

pub(crate) static ZEROES: Zeroes = Zeroes([0; 65536]);

impl Zeroes {
    /// Describes `len_bytes` of zeroes in `out`, as far as its capacity goes. Returns the bytes
    /// described.
    pub fn describe(&'static self, len_bytes: u32, out: &mut Vec<IoSlice>) -> u32 {
        let mut left = len_bytes;
        while left > 0 && out.len() < out.capacity() {
            let len = left.min(self.0.len() as u32);
            let base = self.0.as_ptr().cast_mut().cast();
            out.push(IoSlice { iov_base: base, iov_len: len as usize });
            left -= len;
        }
        len_bytes - left
    }
}

/// A serial number, padded with zero bytes.
pub(crate) type Serial = [u8; SERIAL_LEN_BYTES];

/// Pads or cuts a text to a serial number.
pub(crate) fn serial(text: &str) -> Serial {
    let mut serial = [0u8; SERIAL_LEN_BYTES];
    for (to, from) in serial.iter_mut().zip(text.bytes()) {
        *to = from;
    }
    serial
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounces_are_aligned_distinct_and_counted() {
        let mut bounces = Bounces::new(true).unwrap();
        let all: Vec<u16> = std::iter::from_fn(|| bounces.take()).collect();
        assert_eq!(all.len(), usize::from(BOUNCE_COUNT));
        let mut starts: Vec<usize> =
            all.iter().map(|&i| bounces.bytes(i).as_ptr() as usize).collect();
        starts.sort_unstable();
        assert!(starts.iter().all(|s| s.is_multiple_of(4096)));
        assert!(starts.windows(2).all(|w| w[1] - w[0] == BOUNCE_LEN_BYTES as usize));
        bounces.give(3);
        assert_eq!(bounces.take(), Some(3));
        assert!(Bounces::new(false).unwrap().take().is_none());
    }

    #[test]
    fn zeroes_are_described_up_to_the_capacity() {
        let mut out = Vec::with_capacity(2);
        assert_eq!(ZEROES.describe(70_000, &mut out), 70_000);
        assert_eq!(out.iter().map(|v| v.iov_len).sum::<usize>(), 70_000);
        out.clear();
        assert_eq!(ZEROES.describe(1 << 20, &mut out), 131_072);
    }
}
