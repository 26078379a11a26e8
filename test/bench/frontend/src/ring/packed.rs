//! A packed ring (virtio 1.2, 2.8).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::descriptor::{
    Buf, F_INDIRECT, F_NEXT, RingShape, Slot, Tables, Used, broken, free_slots, rest, tables,
    write_desc,
};
use crate::error::FrontendError;
use crate::memory::Memory;

const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;
/// Event suppression (2.8.14).
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;

/// Driver's side of a packed ring.
#[derive(Debug)]
pub struct Packed {
    pub(super) shape: RingShape,
    desc: *mut u8,
    driver: *mut u8,
    device: *mut u8,
    tables: Tables,
    slots: Box<[Slot]>,
    free_id: u16,
    free: u16,
    next: u16,
    wrap: bool,
    /// Descriptors posted since the last look at the device's wishes.
    unpublished: u16,
    used_at: u16,
    used_wrap: bool,
    /// In order: ids are used one after the other; the batch that is being read ends at this one.
    batch_end: Option<(u16, u32)>,
    oldest_id: u16,
}

// SAFETY: addresses in memory that the owner of the ring keeps mapped, used by one thread.
unsafe impl Send for Packed {}

impl Packed {
    pub(super) fn new(memory: &mut Memory, shape: RingShape) -> Result<Self, FrontendError> {
        let size = usize::from(shape.size);
        let mut ring = Self {
            shape,
            desc: memory.alloc(16 * size, 4096)?,
            driver: memory.alloc(4, 64)?,
            device: memory.alloc(4, 64)?,
            tables: tables(memory, shape)?,
            slots: free_slots(shape),
            free_id: 0,
            free: shape.size,
            next: 0,
            wrap: true,
            unpublished: 0,
            used_at: 0,
            used_wrap: true,
            batch_end: None,
            oldest_id: 0,
        };
        ring.set_interrupts(false);
        Ok(ring)
    }

    pub(super) fn parts(&self) -> [*mut u8; 3] {
        [self.desc, self.driver, self.device]
    }

    #[inline]
    pub(super) fn has_room(&self, count: usize) -> bool {
        let need = if self.shape.indirect && count > 1 { 1 } else { count };
        usize::from(self.free) >= need
    }

    #[inline]
    fn avail_flags(&self) -> u16 {
        if self.wrap { F_AVAIL } else { F_USED }
    }

    #[inline]
    fn advance(&mut self) {
        self.next += 1;
        if self.next == self.shape.size {
            self.next = 0;
            self.wrap = !self.wrap;
        }
    }

    /// The second half of a descriptor, which makes it available.
    #[inline]
    fn half(&self, index: u16) -> &AtomicU64 {
        // SAFETY: `index` is below the size; descriptors are 16-byte aligned.
        unsafe { AtomicU64::from_ptr(self.desc.add(16 * usize::from(index) + 8).cast()) }
    }

    #[inline]
    pub(super) fn post(&mut self, bufs: &[Buf], token: u16) {
        let id = self.free_id;
        let slot = &mut self.slots[usize::from(id)];
        self.free_id = slot.next;
        slot.token = token;
        let count = if self.shape.indirect && bufs.len() > 1 {
            let (addr, len) = self.write_table(bufs, id);
            self.write_one(addr, rest(len, id, F_INDIRECT | self.avail_flags()));
            1
        } else {
            self.write_chain(bufs, id);
            bufs.len() as u16
        };
        self.slots[usize::from(id)].count = count;
        self.free -= count;
        self.unpublished += count;
    }

    fn write_table(&mut self, bufs: &[Buf], id: u16) -> (u64, u32) {
        let (table, addr) = self.tables.at(id);
        for (i, buf) in bufs.iter().enumerate() {
            // SAFETY: a table has room for MAX_CHAIN entries, chains are no longer.
            unsafe { write_desc(table.add(16 * i), buf.addr, rest(buf.len, 0, buf.flags())) };
        }
        (addr, 16 * bufs.len() as u32)
    }

    /// Address first, the word with the flags last: it makes the descriptor visible.
    #[inline]
    fn write_one(&mut self, addr: u64, word: u64) {
        // SAFETY: `next` is below the size.
        unsafe {
            self.desc.add(16 * usize::from(self.next)).cast::<u64>().write_volatile(addr.to_le());
        }
        self.half(self.next).store(word.to_le(), Ordering::Release);
        self.advance();
    }

    #[inline]
    fn write_chain(&mut self, bufs: &[Buf], id: u16) {
        if let [buf] = bufs {
            return self.write_one(buf.addr, rest(buf.len, id, buf.flags() | self.avail_flags()));
        }
        let (head, head_flags) = (self.next, self.avail_flags());
        let mut head_word = 0;
        for (i, buf) in bufs.iter().enumerate() {
            let more = if i + 1 < bufs.len() { F_NEXT } else { 0 };
            let word = rest(buf.len, id, buf.flags() | more | self.avail_flags());
            if i == 0 {
                head_word = rest(buf.len, id, buf.flags() | more | head_flags);
                // SAFETY: `next` is below the size.
                unsafe {
                    let at = self.desc.add(16 * usize::from(self.next));
                    at.cast::<u64>().write_volatile(buf.addr.to_le());
                }
                self.advance();
            } else {
                self.write_one(buf.addr, word);
            }
        }
        // The first one last: the device looks at it first.
        self.half(head).store(head_word.to_le(), Ordering::Release);
    }

    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        let posted = std::mem::take(&mut self.unpublished);
        if posted == 0 {
            return false;
        }
        fence(Ordering::SeqCst);
        // SAFETY: the four bytes of the device's event suppression, aligned.
        let event = unsafe { AtomicU32::from_ptr(self.device.cast()) }.load(Ordering::Acquire);
        let event = u32::from_le(event);
        let (off_wrap, flags) = (event as u16, (event >> 16) as u16 & 3);
        match flags {
            EVENT_DISABLE => false,
            EVENT_DESC if self.shape.event_idx => {
                let lap = if (off_wrap >> 15 != 0) == self.wrap { 0 } else { self.shape.size };
                let at = i32::from(off_wrap & 0x7fff) - i32::from(lap);
                let next = i32::from(self.next);
                at < next && at >= next - i32::from(posted)
            }
            _ => true,
        }
    }

    #[inline]
    fn peek(&self) -> Option<(u16, u32)> {
        let word = u64::from_le(self.half(self.used_at).load(Ordering::Acquire));
        let flags = (word >> 48) as u16;
        let (avail, used) = (flags & F_AVAIL != 0, flags & F_USED != 0);
        let is_used = used == self.used_wrap && avail == self.used_wrap;
        is_used.then_some(((word >> 32) as u16, word as u32))
    }

    #[inline]
    pub(super) fn used(&mut self) -> Result<Option<Used>, FrontendError> {
        if !self.shape.in_order {
            let Some((id, len)) = self.peek() else { return Ok(None) };
            return self.take(id, Some(len)).map(Some);
        }
        if self.batch_end.is_none() {
            self.batch_end = self.peek();
        }
        let Some((end, len)) = self.batch_end else { return Ok(None) };
        let id = self.oldest_id;
        let last = id == end;
        if last {
            self.batch_end = None;
        }
        self.oldest_id = (id + 1) & (self.shape.size - 1);
        self.take(id, last.then_some(len)).map(Some)
    }

    #[inline]
    fn take(&mut self, id: u16, written: Option<u32>) -> Result<Used, FrontendError> {
        let size = self.shape.size;
        if id >= size {
            return Err(broken("used id", u64::from(id)));
        }
        let slot = &mut self.slots[usize::from(id)];
        let (token, count) = (slot.token, std::mem::take(&mut slot.count));
        if count == 0 {
            return Err(broken("used an id that is not out:", u64::from(id)));
        }
        if !self.shape.in_order {
            slot.next = self.free_id;
            self.free_id = id;
        }
        self.free += count;
        self.used_at += count;
        if self.used_at >= size {
            self.used_at -= size;
            self.used_wrap = !self.used_wrap;
        }
        Ok(Used { token, written })
    }

    pub(super) fn set_interrupts(&mut self, wanted: bool) -> bool {
        let wrap = if self.used_wrap { 1 << 15 } else { 0 };
        let (off_wrap, flags) = match (wanted, self.shape.event_idx) {
            (false, _) => (0, EVENT_DISABLE),
            (true, false) => (0, EVENT_ENABLE),
            (true, true) => (self.used_at | wrap, EVENT_DESC),
        };
        let word = u32::from(off_wrap) | u32::from(flags) << 16;
        // SAFETY: the four bytes of our event suppression, aligned.
        unsafe { AtomicU32::from_ptr(self.driver.cast()) }.store(word.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        self.peek().is_some() || self.batch_end.is_some()
    }
}
