//! Turns descriptors into segments of a batch, with every check on the way.

use base::limits::{MAX_CHAIN_LEN_BYTES, MAX_CHAIN_SEGS};

use crate::batch::{Batch, Entry, FaultEntry};
use crate::error::{ChainFault, MemoryError, RingError};
use crate::memory::{GuestMemory, Window};
use crate::parts::Desc;
use crate::seg::Seg;
use crate::setup::Layout;

/// The buffer continues in another descriptor (virtio 2.7.5).
pub(crate) const F_NEXT: u16 = 1;
/// The device may write the buffer.
pub(crate) const F_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub(crate) const F_INDIRECT: u16 = 4;

/// Bytes of a descriptor, in every table.
pub(crate) const DESC_BYTES: u32 = 16;

/// Most entries of an indirect table: bounds the walk to the end of a chain that is too long.
const MAX_TABLE_ENTRIES: u32 = 4096;

/// Reason why a chain was not taken. Boxed: an error ends the port, success is the hot path.
#[derive(Debug)]
pub(crate) enum Stop {
    /// No room left in the batch: take the chain next time.
    Full,
    /// The ring is broken.
    Broken(Box<RingError>),
}

/// Reason why a buffer was not taken.
enum Misfit {
    /// No room left in the batch.
    Full,
    /// The chain with it cannot be served.
    Fault(ChainFault),
}

impl From<RingError> for Stop {
    #[cold]
    fn from(error: RingError) -> Self {
        Self::Broken(Box::new(error))
    }
}

/// Context of a chain walk: memory and features, without the ring.
pub(crate) struct Walk<'a> {
    pub memory: &'a GuestMemory,
    pub window: &'a mut Window,
    pub indirect: bool,
    pub layout: Layout,
    /// Copies of a packed ring's descriptors, for the inflight region; never grows beyond the queue
    /// size.
    pub record: Option<&'a mut Vec<Desc>>,
}

/// A chain under construction at the end of a batch. Dropped segments are rolled back by the
/// caller, who truncates `batch.segs` to `first`.
pub(crate) struct ChainBuilder {
    /// Head index or buffer id, for error texts.
    pub head: u16,
    first: usize,
    // Wider than in an `Entry`, so that the compiler converts one by one: reading several fields at
    // once, just after they were written one by one, stalls (no store forwarding).
    readable_segs: usize,
    writable_segs: usize,
    readable_len: u64,
    writable_len: u64,
    /// Most segments of the batch with this chain's; no more are added for a chain with a fault.
    segs_end: usize,
    fault: Option<ChainFault>,
    /// Buffers walked, of a chain with a fault.
    walked: usize,
    /// Address of the last byte, if it is writable, of a chain with a fault.
    last_byte: Option<u64>,
}

impl ChainBuilder {
    #[inline]
    pub fn new(batch: &Batch, head: u16) -> Self {
        Self {
            head,
            first: batch.segs.len(),
            readable_segs: 0,
            writable_segs: 0,
            readable_len: 0,
            writable_len: 0,
            segs_end: batch.max_segs.min(batch.segs.len() + MAX_CHAIN_SEGS),
            fault: None,
            walked: 0,
            last_byte: None,
        }
    }

    /// Index of the chain's first segment in the batch.
    #[inline]
    pub fn first(&self) -> usize {
        self.first
    }

    /// Appends the finished chain to the batch.
    #[inline]
    pub fn finish(
        &mut self,
        walk: &Walk<'_>,
        batch: &mut Batch,
        id: u16,
        ndesc: u16,
    ) -> Result<(), Stop> {
        if let Some(fault) = self.fault {
            self.keep_last_byte(walk, batch)?;
            let faulty = FaultEntry { fault, skipped: self.walked as u16 };
            batch.faulty = Some((batch.entries.len(), faulty));
        }
        batch.entries.push(Entry {
            id,
            ndesc,
            first_seg: self.first as u32,
            readable_segs: self.readable_segs as u16,
            writable_segs: self.writable_segs as u16,
            readable_len: self.readable_len as u32,
            writable_len: self.writable_len as u32,
        });
        Ok(())
    }

    /// Makes the last byte the only writable one, of a chain with a fault. A disk's status is
    /// there.
    #[cold]
    fn keep_last_byte(&mut self, walk: &Walk<'_>, batch: &mut Batch) -> Result<(), Stop> {
        (self.writable_segs, self.writable_len) = (0, 0);
        let byte = self.last_byte.and_then(|addr| walk.memory.contiguous(addr, 1).ok());
        if let Some(ptr) = byte {
            push_seg(batch, self.first, ptr, 1).map_err(|_| Stop::Full)?;
            (self.writable_segs, self.writable_len) = (1, 1);
        }
        Ok(())
    }

    /// Adds a buffer, or the buffers of an indirect table. `index` is for error texts.
    #[inline(always)]
    pub fn add(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        desc: Desc,
        index: u16,
    ) -> Result<(), Stop> {
        if desc.flags & F_INDIRECT != 0 {
            return self.add_table(walk, batch, desc);
        }
        self.add_buffer(walk, batch, desc, index)
    }

    #[inline(always)]
    fn add_buffer(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        desc: Desc,
        index: u16,
    ) -> Result<(), Stop> {
        let head = self.head;
        if desc.len == 0 {
            return Err(RingError::ZeroLength { head, index }.into());
        }
        let is_writable = desc.flags & F_WRITE != 0;
        if !is_writable && self.writable_segs != 0 {
            return Err(RingError::ReadableAfterWritable { head }.into());
        }
        let segs = if self.place_whole(walk, batch, desc) {
            1
        } else {
            match self.place(walk, batch, desc) {
                Ok(segs) => segs,
                Err(Misfit::Full) => return Err(Stop::Full),
                Err(Misfit::Fault(fault)) => return self.skip(batch, desc, fault),
            }
        };
        if is_writable {
            self.writable_segs += segs;
            self.writable_len += u64::from(desc.len);
        } else {
            self.readable_segs += segs;
            self.readable_len += u64::from(desc.len);
        }
        Ok(())
    }

    /// Translates a buffer that is in the region of the last one, as nearly all are. False: nothing
    /// was done, and [`ChainBuilder::place`] has to look at it.
    #[inline(always)]
    fn place_whole(&self, walk: &Walk<'_>, batch: &mut Batch, desc: Desc) -> bool {
        let total = self.readable_len + self.writable_len + u64::from(desc.len);
        if batch.segs.len() >= self.segs_end || total > u64::from(MAX_CHAIN_LEN_BYTES) {
            return false;
        }
        let Some(ptr) = walk.window.get(desc.addr, desc.len) else { return false };
        batch.segs.push(Seg { ptr, len: desc.len as usize });
        true
    }

    /// Translates a buffer; returns the number of segments.
    #[cold]
    fn place(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        desc: Desc,
    ) -> Result<usize, Misfit> {
        if let Some(fault) = self.fault {
            return Err(Misfit::Fault(fault));
        }
        let total = self.readable_len + self.writable_len;
        if total + u64::from(desc.len) > u64::from(MAX_CHAIN_LEN_BYTES) {
            return Err(Misfit::Fault(ChainFault::TooManyBytes));
        }
        add_crossing(walk, batch, self.first, desc)
    }

    /// Passes over a buffer of a chain with a fault. Of such a chain only the first buffer is kept,
    /// if it is readable: it has the header.
    #[cold]
    fn skip(&mut self, batch: &mut Batch, desc: Desc, fault: ChainFault) -> Result<(), Stop> {
        if self.fault.is_none() {
            if batch.has_fault() {
                return Err(Stop::Full);
            }
            (self.fault, self.segs_end) = (Some(fault), 0);
            self.walked = batch.segs.len() - self.first;
            self.readable_segs = self.readable_segs.min(1);
            batch.segs.truncate(self.first + self.readable_segs);
            self.readable_len = batch.segs[self.first..].iter().map(|s| s.len as u64).sum();
        }
        self.walked += 1;
        let is_writable = desc.flags & F_WRITE != 0;
        // Counted for the order of buffers only.
        self.writable_segs += usize::from(is_writable);
        let last = desc.addr.wrapping_add(u64::from(desc.len) - 1);
        self.last_byte = is_writable.then_some(last);
        Ok(())
    }

    /// Adds the buffers of an indirect table (2.7.5.3, 2.8.7); its own WRITE flag is ignored.
    fn add_table(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        table: Desc,
    ) -> Result<(), Stop> {
        let head = self.head;
        let bad = |rule| RingError::BadIndirect { head, rule };
        if !walk.indirect {
            return Err(RingError::NotNegotiated { feature: "INDIRECT_DESC" }.into());
        }
        if table.flags & F_NEXT != 0 {
            return Err(bad("INDIRECT and NEXT are both set").into());
        }
        if table.len == 0 || !table.len.is_multiple_of(DESC_BYTES) {
            return Err(bad("length is 0 or not a multiple of 16").into());
        }
        let count = table.len / DESC_BYTES;
        if count > MAX_TABLE_ENTRIES {
            return Err(bad("the table has more than 4096 entries").into());
        }
        let count = count as u16;
        match walk.layout {
            Layout::Split => self.add_linked(walk, batch, table.addr, count),
            Layout::Packed => self.add_listed(walk, batch, table.addr, count),
        }
    }

    /// Adds the entries of a split ring's table, linked by `next`, from entry 0.
    fn add_linked(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        table: u64,
        count: u16,
    ) -> Result<(), Stop> {
        let head = self.head;
        let mut index = 0;
        for _ in 0..count {
            let desc = read_entry(walk, table, index)?;
            self.add_inner(walk, batch, desc, index)?;
            if desc.flags & F_NEXT == 0 {
                return Ok(());
            }
            index = desc.tail;
            if index >= count {
                return Err(RingError::BadIndex { index, size: count }.into());
            }
        }
        Err(too_long(head, u64::from(count), "descriptors"))
    }

    /// Adds every entry of a packed ring's table, in order.
    fn add_listed(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        table: u64,
        count: u16,
    ) -> Result<(), Stop> {
        for index in 0..count {
            let desc = Desc::from_packed(read_entry(walk, table, index)?);
            self.add_inner(walk, batch, desc, index)?;
        }
        Ok(())
    }

    fn add_inner(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        desc: Desc,
        index: u16,
    ) -> Result<(), Stop> {
        if desc.flags & F_INDIRECT != 0 {
            let rule = "a table inside a table";
            return Err(RingError::BadIndirect { head: self.head, rule }.into());
        }
        self.add_buffer(walk, batch, desc, index)
    }
}

/// Adds a chain of one buffer in the region of the last one: the common case. False: nothing was
/// done, and [`ChainBuilder`] has to walk it, from the same copy of the descriptor.
#[inline]
pub(crate) fn add_single(walk: &Walk<'_>, batch: &mut Batch, id: u16, desc: Desc) -> bool {
    if desc.flags & (F_NEXT | F_INDIRECT) != 0 || desc.len == 0 || desc.len > MAX_CHAIN_LEN_BYTES {
        return false;
    }
    let Some(ptr) = walk.window.get(desc.addr, desc.len) else { return false };
    if batch.segs.len() >= batch.max_segs {
        return false;
    }
    let first_seg = batch.segs.len() as u32;
    batch.segs.push(Seg { ptr, len: desc.len as usize });
    let write = desc.flags & F_WRITE != 0;
    let (writable_segs, readable_segs) = if write { (1, 0) } else { (0, 1) };
    let (writable_len, readable_len) = if write { (desc.len, 0) } else { (0, desc.len) };
    batch.entries.push(Entry {
        id,
        ndesc: 1,
        first_seg,
        readable_segs,
        writable_segs,
        readable_len,
        writable_len,
    });
    true
}

#[cold]
pub(crate) fn too_long(head: u16, limit: u64, unit: &'static str) -> Stop {
    RingError::ChainTooLong { head, limit, unit }.into()
}

/// Appends one segment of the chain that began at `first`.
#[inline]
fn push_seg(batch: &mut Batch, first: usize, ptr: *mut u8, len: usize) -> Result<(), Misfit> {
    let count = batch.segs.len();
    if count - first >= MAX_CHAIN_SEGS {
        return Err(Misfit::Fault(ChainFault::TooManySegs));
    }
    if count >= batch.max_segs {
        return Err(Misfit::Full);
    }
    batch.segs.push(Seg { ptr, len });
    Ok(())
}

/// Adds a buffer that is not in the window: moves the window there, or splits the buffer where it
/// crosses from one region into the next. Returns the number of segments.
#[cold]
fn add_crossing(
    walk: &mut Walk<'_>,
    batch: &mut Batch,
    first: usize,
    desc: Desc,
) -> Result<usize, Misfit> {
    if let Some(window) = walk.memory.window(desc.addr) {
        *walk.window = window;
    }
    let mut segs = 0;
    let mut failed = None;
    let walked = walk.memory.pieces(desc.addr, u64::from(desc.len), |ptr, len| {
        segs += 1;
        failed = push_seg(batch, first, ptr, len).err();
        failed.is_none()
    });
    match (failed, walked) {
        (Some(misfit), _) => Err(misfit),
        (None, Err(_)) => Err(Misfit::Fault(ChainFault::NotMapped)),
        (None, Ok(_)) => Ok(segs),
    }
}

/// Entry `index` of an indirect table, copied once (fields as in a split ring).
#[inline]
fn read_entry(walk: &mut Walk<'_>, table: u64, index: u16) -> Result<Desc, Stop> {
    let addr = table.wrapping_add(u64::from(index) * u64::from(DESC_BYTES));
    if let Some(ptr) = walk.window.get(addr, DESC_BYTES)
        && (ptr as usize).is_multiple_of(8)
    {
        // SAFETY: 16 bytes inside a region that `walk.memory` keeps mapped, 8-byte aligned.
        return Ok(unsafe { Desc::read(ptr) });
    }
    read_entry_slow(walk.memory, table, addr)
        .map_err(|source| RingError::Memory { place: "indirect table", source }.into())
}

/// Copies an entry as `read_entry` does, where it is in another region, across two, or not aligned.
#[cold]
fn read_entry_slow(memory: &GuestMemory, table: u64, addr: u64) -> Result<Desc, MemoryError> {
    if addr < table {
        return Err(MemoryError::Wraps { addr: table, len: addr.wrapping_sub(table) });
    }
    let mut bytes = [0u8; DESC_BYTES as usize];
    let mut at = 0;
    memory.pieces(addr, u64::from(DESC_BYTES), |ptr, len| {
        for i in 0..len {
            // SAFETY: `ptr..ptr + len` is mapped while `memory` lives.
            bytes[at + i] = unsafe { ptr.add(i).read_volatile() };
        }
        at += len;
        true
    })?;
    Ok(Desc::from_bytes(bytes))
}
