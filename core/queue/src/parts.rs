//! The three parts of a ring in guest memory, and every access to their fields. All accesses are
//! atomic or volatile: the guest writes at the same time. Fields are little-endian (virtio 2.4).

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use crate::crash;
use crate::error::RingError;
use crate::memory::GuestMemory;
use crate::seg::prefetch;
use crate::setup::{Layout, RingSetup};

/// Descriptors fetched ahead of the one that is walked: eight cache lines of them, since another
/// core has just written each.
pub(crate) const AHEAD: u16 = 32;

/// A copy of one descriptor, in our memory. `tail` is the last field but flags: `next` (split) or
/// `id` (packed).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Desc {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub tail: u16,
}

impl Desc {
    /// Copies a descriptor of a split ring or of an indirect table: each byte is read once.
    ///
    /// # Safety
    /// `ptr` points to 16 mapped bytes, aligned to 8.
    #[inline]
    pub unsafe fn read(ptr: *const u8) -> Self {
        // SAFETY: by the contract.
        let (low, high) = unsafe {
            (ptr.cast::<u64>().read_volatile(), ptr.add(8).cast::<u64>().read_volatile())
        };
        Self::split(u64::from_le(low), u64::from_le(high))
    }

    /// From the bytes of a descriptor of a split ring or of an indirect table.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let value = u128::from_le_bytes(bytes);
        Self::split(value as u64, (value >> 64) as u64)
    }

    #[inline]
    fn split(addr: u64, rest: u64) -> Self {
        Self { addr, len: rest as u32, flags: (rest >> 32) as u16, tail: (rest >> 48) as u16 }
    }

    /// Reads the same bytes as a packed descriptor, where `id` comes before `flags`.
    #[inline]
    pub fn from_packed(split: Self) -> Self {
        Self { flags: split.tail, tail: split.flags, ..split }
    }
}

/// Finds and checks one part.
fn part(
    memory: &GuestMemory,
    name: &'static str,
    addr: u64,
    len: u64,
    align: u64,
) -> Result<*mut u8, RingError> {
    if !addr.is_multiple_of(align) {
        return Err(RingError::Misaligned { part: name, addr, align });
    }
    let host = memory
        .contiguous(addr, len)
        .map_err(|source| RingError::Memory { place: "ring", source })?;
    // A region may begin at any guest address, so guest alignment says nothing about ours.
    if !(host as usize).is_multiple_of(align as usize) {
        return Err(RingError::Misaligned { part: name, addr, align });
    }
    Ok(host)
}

fn check_overlaps(parts: [(&'static str, u64, u64); 3]) -> Result<(), RingError> {
    for (i, &(name, addr, len)) in parts.iter().enumerate() {
        let hit = parts[..i].iter().any(|&(_, a, l)| a < addr + len && addr < a + l);
        if hit {
            return Err(RingError::OverlappingParts { part: name });
        }
    }
    Ok(())
}

/// Lengths in bytes of the descriptor, driver and device parts.
fn lengths(setup: &RingSetup) -> [u64; 3] {
    let size = u64::from(setup.size);
    let event = if setup.event_idx { 2 } else { 0 };
    match setup.layout {
        Layout::Split => [16 * size, 4 + 2 * size + event, 4 + 8 * size + event],
        Layout::Packed => [16 * size, 4, 4],
    }
}

fn find_parts(
    memory: &GuestMemory,
    setup: &RingSetup,
    aligns: [u64; 3],
) -> Result<[*mut u8; 3], RingError> {
    const NAMES: [&str; 3] = ["descriptor", "driver", "device"];
    let addrs = [setup.addrs.desc, setup.addrs.driver, setup.addrs.device];
    let lens = lengths(setup);
    let mut found = [std::ptr::null_mut(); 3];
    for i in 0..3 {
        found[i] = part(memory, NAMES[i], addrs[i], lens[i], aligns[i])?;
    }
    check_overlaps([0, 1, 2].map(|i| (NAMES[i], addrs[i], lens[i])))?;
    Ok(found)
}

/// A split ring (2.7). Indices are masked on access: no value can reach beyond the parts.
///
/// Invariant of all methods: the parts were found and measured by `find_parts` for `mask + 1`
/// descriptors in a table that the owner keeps mapped.
#[derive(Debug)]
pub(crate) struct SplitParts {
    desc: *const u8,
    avail: *const u8,
    used: *mut u8,
    mask: u16,
    event_idx: bool,
}

// SAFETY: addresses in shared memory, used by one thread at a time.
unsafe impl Send for SplitParts {}

impl SplitParts {
    pub fn find(memory: &GuestMemory, setup: &RingSetup) -> Result<Self, RingError> {
        let [desc, avail, used] = find_parts(memory, setup, [16, 2, 4])?;
        let mask = setup.size - 1;
        Ok(Self { desc, avail, used, mask, event_idx: setup.event_idx })
    }

    #[inline]
    fn load(ptr: *const u8, order: Ordering) -> u16 {
        // SAFETY: the invariant; all u16 fields are 2-byte aligned.
        u16::from_le(unsafe { AtomicU16::from_ptr(ptr.cast_mut().cast()) }.load(order))
    }

    #[inline]
    fn store(ptr: *mut u8, value: u16, order: Ordering) {
        crash::point();
        // SAFETY: the invariant; all u16 fields are 2-byte aligned.
        unsafe { AtomicU16::from_ptr(ptr.cast()) }.store(value.to_le(), order);
    }

    /// Descriptor `index`, which is below the queue size.
    #[inline]
    pub fn desc(&self, index: u16) -> Desc {
        // SAFETY: the invariant and the mask; descriptors are 16-byte aligned.
        unsafe { Desc::read(self.desc.add(usize::from(index & self.mask) * 16)) }
    }

    /// Has the cache fetch descriptor `index`.
    #[inline]
    pub fn prefetch(&self, index: u16) {
        prefetch(self.desc.wrapping_add(usize::from(index & self.mask) * 16));
    }

    #[inline]
    pub fn avail_flags(&self) -> u16 {
        Self::load(self.avail, Ordering::Relaxed)
    }

    /// Acquire: the entries and descriptors behind it are visible.
    #[inline]
    pub fn avail_idx(&self) -> u16 {
        Self::load(self.avail.wrapping_add(2), Ordering::Acquire)
    }

    #[inline]
    pub fn avail_entry(&self, index: u16) -> u16 {
        let at = 4 + 2 * usize::from(index & self.mask);
        Self::load(self.avail.wrapping_add(at), Ordering::Relaxed)
    }

    /// Only with EVENT_IDX: without it the field does not exist, and 0 is returned.
    #[inline]
    pub fn used_event(&self) -> u16 {
        if !self.event_idx {
            return 0;
        }
        let at = 4 + 2 * (usize::from(self.mask) + 1);
        Self::load(self.avail.wrapping_add(at), Ordering::Relaxed)
    }

    #[inline]
    pub fn set_used(&self, index: u16, id: u16, len: u32) {
        crash::point();
        // SAFETY: the invariant and the mask; used elements are 4-byte aligned.
        unsafe {
            let element = self.used.add(4 + 8 * usize::from(index & self.mask)).cast::<u32>();
            element.write_volatile(u32::from(id).to_le());
            crash::point();
            element.add(1).write_volatile(len.to_le());
        }
    }

    pub fn used_idx(&self) -> u16 {
        Self::load(self.used.wrapping_add(2), Ordering::Acquire)
    }

    /// Release: the elements written before are visible to whoever sees this.
    #[inline]
    pub fn set_used_idx(&self, index: u16) {
        Self::store(self.used.wrapping_add(2), index, Ordering::Release);
    }

    #[inline]
    pub fn set_used_flags(&self, flags: u16) {
        Self::store(self.used, flags, Ordering::Relaxed);
    }

    /// Only with EVENT_IDX.
    #[inline]
    pub fn set_avail_event(&self, index: u16) {
        if self.event_idx {
            let at = 4 + 8 * (usize::from(self.mask) + 1);
            Self::store(self.used.wrapping_add(at), index, Ordering::Relaxed);
        }
    }
}

/// A packed ring (2.8). Positions are checked on access.
///
/// Invariant of all methods: the parts were found and measured by `find_parts` for `size`
/// descriptors in a table that the owner keeps mapped.
#[derive(Debug)]
pub(crate) struct PackedParts {
    desc: *mut u8,
    driver: *const u8,
    device: *mut u8,
    size: u16,
}

// SAFETY: addresses in shared memory, used by one thread at a time.
unsafe impl Send for PackedParts {}

impl PackedParts {
    pub fn find(memory: &GuestMemory, setup: &RingSetup) -> Result<Self, RingError> {
        let [desc, driver, device] = find_parts(memory, setup, [16, 4, 4])?;
        Ok(Self { desc, driver, device, size: setup.size })
    }

    /// The second half of a descriptor: length, id, flags. One access, so that a completion is
    /// either there or not, wherever the daemon is killed.
    #[inline]
    fn half(&self, index: u16) -> &AtomicU64 {
        assert!(index < self.size, "ring position beyond the ring: a bug in the position");
        // SAFETY: the invariant and the check; descriptors are 16-byte aligned.
        unsafe { AtomicU64::from_ptr(self.desc.add(usize::from(index) * 16 + 8).cast()) }
    }

    /// Descriptor `index`. Acquire: when its flags say "available", the descriptors after it in
    /// its chain are visible too.
    #[inline]
    pub fn desc(&self, index: u16) -> Desc {
        let rest = u64::from_le(self.half(index).load(Ordering::Acquire));
        // SAFETY: the invariant; `half` checked the index.
        let addr = unsafe { self.desc.add(usize::from(index) * 16).cast::<u64>().read_volatile() };
        Desc::from_packed(Desc::split(u64::from_le(addr), rest))
    }

    /// Has the cache fetch descriptor `index`, wherever that is.
    #[inline]
    pub fn prefetch(&self, index: u16) {
        prefetch(self.desc.wrapping_add(usize::from(index) * 16));
    }

    /// Flags of descriptor `index`.
    #[inline]
    pub fn flags(&self, index: u16) -> u16 {
        (u64::from_le(self.half(index).load(Ordering::Acquire)) >> 48) as u16
    }

    /// Turns descriptor `index` into a used one. Release: see [`crate::packed`].
    #[inline]
    pub fn set_used(&self, index: u16, id: u16, len: u32, flags: u16) {
        let value = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
        crash::point();
        self.half(index).store(value.to_le(), Ordering::Release);
    }

    /// Driver event suppression: off_wrap and flags.
    #[inline]
    pub fn driver_event(&self) -> (u16, u16) {
        // SAFETY: the invariant; both fields are 2-byte aligned.
        let (off_wrap, flags) = unsafe {
            let fields = self.driver.cast::<u16>();
            // Flags first: the driver writes off_wrap before it turns the flags on.
            let flags = AtomicU16::from_ptr(fields.add(1).cast_mut()).load(Ordering::Acquire);
            (AtomicU16::from_ptr(fields.cast_mut()).load(Ordering::Relaxed), flags)
        };
        (u16::from_le(off_wrap), u16::from_le(flags))
    }

    /// Device event suppression, flags last.
    #[inline]
    pub fn set_device_event(&self, off_wrap: Option<u16>, flags: u16) {
        crash::point();
        // SAFETY: the invariant; both fields are 2-byte aligned.
        unsafe {
            let fields = self.device.cast::<u16>();
            if let Some(off_wrap) = off_wrap {
                AtomicU16::from_ptr(fields).store(off_wrap.to_le(), Ordering::Relaxed);
            }
            AtomicU16::from_ptr(fields.add(1)).store(flags.to_le(), Ordering::Release);
        }
    }
}
