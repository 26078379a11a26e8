//! Preallocated batches of popped descriptor chains.

use std::sync::Arc;

use crate::error::ChainFault;
use crate::memory::GuestMemory;
use crate::seg::Seg;

/// One descriptor chain, translated: what the device may read, then what it may write.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'b> {
    /// Head index (split) or buffer id (packed); goes back in the completion.
    pub id: u16,
    /// Descriptors taken from the ring (1 for an indirect table); goes back in the completion.
    pub ndesc: u16,
    /// Device-readable segments, in order.
    pub readable: &'b [Seg],
    /// Device-writable segments, in order.
    pub writable: &'b [Seg],
    /// Bytes in `readable`.
    pub readable_len: u32,
    /// Bytes in `writable`.
    pub writable_len: u32,
    /// Reason why this chain must not be served, only completed. It keeps at most its first
    /// readable buffer, and its last byte when the device may write that.
    pub fault: Option<ChainFault>,
    /// Segments that were walked and not kept.
    skipped: u16,
}

impl Chain<'_> {
    /// Number of segments of either kind that were walked, also those that a chain with a fault
    /// lacks.
    #[inline]
    pub fn segs(&self) -> u64 {
        (self.readable.len() + self.writable.len() + usize::from(self.skipped)) as u64
    }
}

/// Fault of a chain that must not be served. Not a part of each [`Entry`], which is written and
/// read for every frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultEntry {
    pub fault: ChainFault,
    /// Segments that were walked and are not kept.
    pub skipped: u16,
}

/// Record of one chain in a batch; its segments are in the batch's list.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Entry {
    pub id: u16,
    pub ndesc: u16,
    pub first_seg: u32,
    pub readable_segs: u16,
    pub writable_segs: u16,
    pub readable_len: u32,
    pub writable_len: u32,
}

impl Entry {
    #[inline(always)]
    fn chain<'b>(&self, segs: &'b [Seg], faulty: Option<FaultEntry>) -> Chain<'b> {
        let first = self.first_seg as usize;
        let middle = first + usize::from(self.readable_segs);
        let end = middle + usize::from(self.writable_segs);
        Chain {
            id: self.id,
            ndesc: self.ndesc,
            readable: &segs[first..middle],
            writable: &segs[middle..end],
            readable_len: self.readable_len,
            writable_len: self.writable_len,
            fault: faulty.map(|f| f.fault),
            skipped: faulty.map_or(0, |f| f.skipped),
        }
    }
}

/// Room for `max_chains` chains with `max_segs` segments together, filled by
/// [`crate::Queue::pop`] and reused. Keeps the memory table of its chains alive.
#[derive(Debug)]
pub struct Batch {
    pub(crate) segs: Vec<Seg>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) memory: Option<Arc<GuestMemory>>,
    pub(crate) max_chains: usize,
    pub(crate) max_segs: usize,
    /// Chain with a fault, by its index. One for each pop, because it costs a walk and no room.
    pub(crate) faulty: Option<(usize, FaultEntry)>,
}

impl Batch {
    /// An empty batch; all its memory is allocated here. `max_segs` is raised to
    /// [`base::limits::MAX_CHAIN_SEGS`] so that any legal chain fits alone.
    pub fn new(max_chains: usize, max_segs: usize) -> Self {
        let max_segs = max_segs.max(base::limits::MAX_CHAIN_SEGS);
        Self {
            segs: Vec::with_capacity(max_segs),
            entries: Vec::with_capacity(max_chains),
            memory: None,
            max_chains,
            max_segs,
            faulty: None,
        }
    }

    /// Number of chains in the batch.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// True when a chain has a [`ChainFault`].
    #[inline]
    pub fn has_fault(&self) -> bool {
        self.faulty.is_some()
    }

    #[inline(always)]
    fn faulty_at(&self, index: usize) -> Option<FaultEntry> {
        match self.faulty {
            Some((at, faulty)) if at == index => Some(faulty),
            _ => None,
        }
    }

    /// The chain at `index` (below [`Batch::len`]).
    // Always: most callers want one field of it, and a call would compute all.
    #[inline(always)]
    pub fn get(&self, index: usize) -> Chain<'_> {
        self.entries[index].chain(&self.segs, self.faulty_at(index))
    }

    /// The chain at `index` when it is a single buffer for the device to write, as receive buffers
    /// are: its id, its descriptors and the buffer. Not for a chain with a [`ChainFault`].
    #[inline]
    pub fn lone_writable(&self, index: usize) -> Option<(u16, u16, &[Seg])> {
        debug_assert!(self.faulty_at(index).is_none());
        let Entry { id, ndesc, first_seg, readable_segs, writable_segs, .. } = self.entries[index];
        let at = first_seg as usize;
        (readable_segs == 0 && writable_segs == 1).then(|| (id, ndesc, &self.segs[at..=at]))
    }

    /// Forgets all chains (they should have been completed or given back).
    pub fn clear(&mut self) {
        self.segs.clear();
        self.entries.clear();
        self.faulty = None;
    }

    /// Forgets all chains and lets go of the memory table: a VM that is gone must not keep its
    /// memory because of a batch that is not used any more. (A pop that finds nothing does this.)
    pub fn release(&mut self) {
        self.clear();
        self.memory = None;
    }

    /// Makes `memory` the table of the chains to come. Cheap when it is that already.
    #[inline]
    pub(crate) fn begin(&mut self, memory: &Arc<GuestMemory>) {
        self.clear();
        match &self.memory {
            Some(m) if Arc::ptr_eq(m, memory) => {}
            _ => self.memory = Some(Arc::clone(memory)),
        }
    }

    /// Number of chains that still fit.
    #[inline]
    pub(crate) fn room(&self) -> usize {
        self.max_chains - self.entries.len()
    }
}

/// One chain that outlives its batch (a disk request in flight): a copy of its segments, at a
/// fixed address, with the memory table that keeps them mapped.
#[derive(Debug)]
pub struct ChainBuf {
    pub(crate) segs: Box<[Seg]>,
    pub(crate) entry: Entry,
    faulty: Option<FaultEntry>,
    pub(crate) memory: Option<Arc<GuestMemory>>,
}

impl ChainBuf {
    /// Room for one chain of up to `max_segs` segments.
    pub fn new(max_segs: usize) -> Self {
        let segs = (0..max_segs).map(|_| Seg { ptr: std::ptr::null_mut(), len: 0 }).collect();
        Self { segs, entry: Entry::default(), faulty: None, memory: None }
    }

    /// Takes chain `index` of `batch`; false when it has more segments than there is room for.
    #[inline]
    pub fn load(&mut self, batch: &Batch, index: usize) -> bool {
        let from = &batch.entries[index];
        let first = from.first_seg as usize;
        let count = usize::from(from.readable_segs) + usize::from(from.writable_segs);
        if count > self.segs.len() {
            return false;
        }
        for (to, seg) in self.segs.iter_mut().zip(&batch.segs[first..first + count]) {
            *to = Seg { ptr: seg.ptr, len: seg.len };
        }
        self.entry = Entry { first_seg: 0, ..*from };
        self.faulty = batch.faulty_at(index);
        // Nearly always the same table as last time: no atomic count then.
        match (&self.memory, &batch.memory) {
            (Some(ours), Some(theirs)) if Arc::ptr_eq(ours, theirs) => {}
            _ => self.memory.clone_from(&batch.memory),
        }
        true
    }

    /// The chain; empty when nothing is loaded.
    #[inline]
    pub fn chain(&self) -> Chain<'_> {
        self.entry.chain(&self.segs, self.faulty)
    }

    /// Forgets the chain (call when the request is done) and keeps its memory table for the next
    /// one: whoever changes the queue's table must [`ChainBuf::release`] those that are not in use.
    #[inline]
    pub fn retire(&mut self) {
        (self.entry, self.faulty) = (Entry::default(), None);
    }

    /// Forgets the chain and returns the memory table, so that the caller chooses the thread on
    /// which it is dropped: this may be its last owner.
    pub fn release(&mut self) -> Option<Arc<GuestMemory>> {
        // The segments may not outlive the table that keeps them mapped.
        (self.entry, self.faulty) = (Entry::default(), None);
        self.memory.take()
    }
}
