//! A split ring (virtio 1.2, 2.7).

use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::descriptor::{
    Buf, F_INDIRECT, F_NEXT, RingShape, Slot, Tables, Used, broken, free_slots, rest, tables,
    write_desc,
};
use crate::error::FrontendError;
use crate::memory::Memory;

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`, `VIRTQ_USED_F_NO_NOTIFY`.
const F_QUIET: u16 = 1;

/// Driver's side of a split ring.
#[derive(Debug)]
pub struct Split {
    pub(super) shape: RingShape,
    desc: *mut u8,
    avail: *mut u8,
    used: *mut u8,
    tables: Tables,
    mask: u16,
    slots: Box<[Slot]>,
    free_head: u16,
    free: u16,
    next_avail: u16,
    /// The available index that the device knows.
    published: u16,
    last_used: u16,
    /// In order: the head of the oldest chain that is out.
    oldest: u16,
}

// SAFETY: addresses in memory that the owner of the ring keeps mapped, used by one thread.
unsafe impl Send for Split {}

impl Split {
    pub(super) fn new(memory: &mut Memory, shape: RingShape) -> Result<Self, FrontendError> {
        let size = usize::from(shape.size);
        let mut ring = Self {
            shape,
            desc: memory.alloc(16 * size, 4096)?,
            avail: memory.alloc(6 + 2 * size, 4096)?,
            used: memory.alloc(6 + 8 * size, 4096)?,
            tables: tables(memory, shape)?,
            mask: shape.size - 1,
            slots: free_slots(shape),
            free_head: 0,
            free: shape.size,
            next_avail: 0,
            published: 0,
            last_used: 0,
            oldest: 0,
        };
        ring.set_interrupts(false);
        Ok(ring)
    }

    pub(super) fn parts(&self) -> [*mut u8; 3] {
        [self.desc, self.avail, self.used]
    }

    #[inline]
    fn u16_at(part: *mut u8, offset: usize) -> &'static AtomicU16 {
        // SAFETY: callers name fields of the three parts, which are mapped and aligned; the
        // reference is used at once.
        unsafe { AtomicU16::from_ptr(part.add(offset).cast()) }
    }

    fn avail_event(&self) -> u16 {
        let at = 4 + 8 * usize::from(self.shape.size);
        u16::from_le(Self::u16_at(self.used, at).load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn has_room(&self, count: usize) -> bool {
        let need = if self.shape.indirect && count > 1 { 1 } else { count };
        usize::from(self.free) >= need
    }

    #[inline]
    pub(super) fn post(&mut self, bufs: &[Buf], token: u16) {
        let head = self.free_head;
        let count = if self.shape.indirect && bufs.len() > 1 {
            self.write_indirect(bufs, head);
            self.free_head = self.slots[usize::from(head)].next;
            1
        } else {
            self.write_chain(bufs, head)
        };
        self.free -= count;
        let slot = &mut self.slots[usize::from(head)];
        (slot.token, slot.count) = (token, count);
        let at = 4 + 2 * usize::from(self.next_avail & self.mask);
        Self::u16_at(self.avail, at).store(head.to_le(), Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    #[inline]
    fn write_chain(&mut self, bufs: &[Buf], head: u16) -> u16 {
        let mut index = head;
        for (i, buf) in bufs.iter().enumerate() {
            let next = self.slots[usize::from(index)].next;
            let more = if i + 1 < bufs.len() { F_NEXT } else { 0 };
            // SAFETY: `index` is a descriptor of the table.
            unsafe {
                let at = self.desc.add(16 * usize::from(index));
                write_desc(at, buf.addr, rest(buf.len, buf.flags() | more, next));
            }
            index = next;
        }
        self.free_head = index;
        bufs.len() as u16
    }

    fn write_indirect(&mut self, bufs: &[Buf], head: u16) {
        let (table, addr) = self.tables.at(head);
        for (i, buf) in bufs.iter().enumerate() {
            let more = if i + 1 < bufs.len() { F_NEXT } else { 0 };
            // SAFETY: a table has room for MAX_CHAIN entries, chains are no longer.
            unsafe {
                let at = table.add(16 * i);
                write_desc(at, buf.addr, rest(buf.len, buf.flags() | more, i as u16 + 1));
            }
        }
        // SAFETY: `head` is a descriptor of the table.
        unsafe {
            let at = self.desc.add(16 * usize::from(head));
            write_desc(at, addr, rest(16 * bufs.len() as u32, F_INDIRECT, 0));
        }
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_avail);
        if old == self.next_avail {
            return false;
        }
        Self::u16_at(self.avail, 2).store(self.next_avail.to_le(), Ordering::Release);
        // Publish, then look whether the device sleeps: it does the opposite.
        fence(Ordering::SeqCst);
        if self.shape.event_idx {
            let past = self.next_avail.wrapping_sub(self.avail_event()).wrapping_sub(1);
            return past < self.next_avail.wrapping_sub(old);
        }
        u16::from_le(Self::u16_at(self.used, 0).load(Ordering::Relaxed)) & F_QUIET == 0
    }

    #[inline]
    fn used_idx(&self) -> u16 {
        u16::from_le(Self::u16_at(self.used, 2).load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn used(&mut self) -> Result<Option<Used>, FrontendError> {
        if self.used_idx() == self.last_used {
            return Ok(None);
        }
        let at = 4 + 8 * usize::from(self.last_used & self.mask);
        // SAFETY: an element of the used ring, 4-byte aligned.
        let (id, len) = unsafe {
            let element = self.used.add(at).cast::<u32>();
            (u32::from_le(element.read_volatile()), u32::from_le(element.add(1).read_volatile()))
        };
        let (head, written) = if self.shape.in_order {
            // Entries before the last of a batch may be left out (2.7.9): only the id tells.
            (self.oldest, (id == u32::from(self.oldest)).then_some(len))
        } else if id <= u32::from(self.mask) {
            (id as u16, Some(len))
        } else {
            return Err(broken("used id", u64::from(id)));
        };
        let slot = &mut self.slots[usize::from(head)];
        let (token, count) = (slot.token, std::mem::take(&mut slot.count));
        if count == 0 {
            return Err(broken("used an id that is not out:", u64::from(head)));
        }
        self.last_used = self.last_used.wrapping_add(1);
        self.give_back(head, count);
        Ok(Some(Used { token, written }))
    }

    #[inline]
    fn give_back(&mut self, head: u16, count: u16) {
        self.free += count;
        if self.shape.in_order {
            // Descriptors go round in order: the free ones always follow each other.
            self.oldest = self.oldest.wrapping_add(count) & self.mask;
            return;
        }
        let mut tail = head;
        for _ in 1..count {
            tail = self.slots[usize::from(tail)].next;
        }
        self.slots[usize::from(tail)].next = self.free_head;
        self.free_head = head;
    }

    pub(super) fn set_interrupts(&mut self, wanted: bool) -> bool {
        if self.shape.event_idx {
            // Off: an index that is as far away as can be.
            let event = if wanted { self.last_used } else { self.last_used.wrapping_sub(1) };
            let at = 4 + 2 * usize::from(self.shape.size);
            Self::u16_at(self.avail, at).store(event.to_le(), Ordering::Relaxed);
        } else {
            let flags = if wanted { 0 } else { F_QUIET };
            Self::u16_at(self.avail, 0).store(flags.to_le(), Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.used_idx() != self.last_used
    }
}
