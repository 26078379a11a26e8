//! The table of a VM's memory regions.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};

use base::limits::{MAX_MEMORY_BYTES, MAX_MEMORY_REGIONS, MAX_QUEUES};
use base::numa::{self, NumaMemory, Spread};
use base::sync::lock;

use crate::budget::Purpose;
use crate::dirty::DirtyLog;
use crate::error::MemoryError;
use crate::mapping::Mapping;
use crate::share::MemoryShare;

/// One region as a vhost-user front end describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionSpec {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// First address in the front end's own space (rings are named by it).
    pub user_addr: u64,
    /// Length in bytes (above 0).
    pub len_bytes: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
}

#[derive(Debug, Clone)]
struct Region {
    spec: RegionSpec,
    mapping: Arc<Mapping>,
}

/// One region as the hot path sees it: a range of guest addresses and its host address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    start: u64,
    len: u64,
    host: *mut u8,
}

// SAFETY: an address; whoever uses it keeps the table that it came from.
unsafe impl Send for Window {}

impl Window {
    /// A window that holds nothing.
    pub const NONE: Self = Self { start: 0, len: 0, host: std::ptr::null_mut() };

    /// The host address of a guest range that lies wholly in this window. `len` is above 0.
    #[inline(always)]
    pub fn get(&self, addr: u64, len: u32) -> Option<*mut u8> {
        let offset = addr.wrapping_sub(self.start);
        if offset < self.len && u64::from(len) <= self.len - offset {
            return Some(self.host.wrapping_add(offset as usize));
        }
        None
    }

    /// Bytes from `addr` to the end of the window and the host address of `addr`, which is inside.
    fn rest(&self, addr: u64) -> (*mut u8, u64) {
        let offset = addr - self.start;
        (self.host.wrapping_add(offset as usize), self.len - offset)
    }
}

/// An immutable table of mapped regions. Changing it makes a new one; mappings are shared between
/// the old and the new table and unmapped with the last of them.
#[derive(Debug)]
pub struct GuestMemory {
    /// Sorted by guest address.
    regions: Vec<Region>,
    log: Option<Arc<DirtyLog>>,
    rings: Rings,
    share: Arc<MemoryShare>,
}

/// Guest addresses of rings' parts. The daemon touches these pages all the time, so Linux can tell
/// their node when it knows few of the others yet.
#[derive(Debug, Default)]
struct Rings(Mutex<Vec<u64>>);

/// Parts of all rings that a port can have.
const MAX_RING_PARTS: usize = 3 * MAX_QUEUES as usize;

impl Rings {
    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        lock(&self.0)
    }
}

impl GuestMemory {
    /// An empty table, of a VM of its own.
    pub fn empty() -> Arc<Self> {
        Self::of(MemoryShare::new())
    }

    /// An empty table, whose regions will be charged to a VM's share.
    pub fn of(share: Arc<MemoryShare>) -> Arc<Self> {
        Arc::new(Self { regions: Vec::new(), log: None, rings: Rings::default(), share })
    }

    /// Makes a table of this one and one region more. The file's offset must be page aligned and,
    /// for a regular file, the file must hold the whole region.
    pub fn with_region(&self, spec: RegionSpec, fd: &impl AsFd) -> Result<Arc<Self>, MemoryError> {
        self.check_new(&spec)?;
        let mapping = self
            .share
            .map(Purpose::Memory, fd.as_fd(), spec.mmap_offset, spec.len_bytes)
            .map_err(|reason| MemoryError::Unmappable {
                addr: spec.guest_addr,
                len: spec.len_bytes,
                reason,
            })?;
        let mut regions = self.regions.clone();
        let at = regions.partition_point(|r| r.spec.guest_addr < spec.guest_addr);
        regions.insert(at, Region { spec, mapping });
        Ok(self.with_regions(regions, self.log.clone()))
    }

    fn check_new(&self, spec: &RegionSpec) -> Result<(), MemoryError> {
        let (addr, len) = (spec.guest_addr, spec.len_bytes);
        if self.regions.len() >= MAX_MEMORY_REGIONS {
            let count = self.regions.len() + 1;
            return Err(MemoryError::TooMany { count, limit: MAX_MEMORY_REGIONS });
        }
        if len == 0 || usize::try_from(len).is_err() {
            let reason = format!("length {len:#x} is 0 or does not fit in an address space");
            return Err(MemoryError::Unmappable { addr, len, reason });
        }
        for start in [addr, spec.user_addr, spec.mmap_offset] {
            if start.checked_add(len).is_none() {
                return Err(MemoryError::Wraps { addr: start, len });
            }
        }
        let mapped: u64 = self.regions.iter().map(|r| r.spec.len_bytes).sum();
        let (total, limit) = (mapped.saturating_add(len), MAX_MEMORY_BYTES);
        if total > limit {
            return Err(MemoryError::TooLarge { addr, len, total, limit });
        }
        let overlaps = |a: u64, a_len: u64, b: u64| a < b + len && b < a + a_len;
        let taken = self.regions.iter().any(|r| {
            overlaps(r.spec.guest_addr, r.spec.len_bytes, addr)
                || overlaps(r.spec.user_addr, r.spec.len_bytes, spec.user_addr)
        });
        if taken { Err(MemoryError::Overlaps { addr, len }) } else { Ok(()) }
    }

    /// Makes a table without the region that has these guest and user addresses and length.
    pub fn without_region(&self, spec: RegionSpec) -> Result<Arc<Self>, MemoryError> {
        let at = self.regions.iter().position(|r| {
            r.spec.guest_addr == spec.guest_addr
                && r.spec.user_addr == spec.user_addr
                && r.spec.len_bytes == spec.len_bytes
        });
        let Some(at) = at else {
            return Err(MemoryError::NoSuchRegion { addr: spec.guest_addr, len: spec.len_bytes });
        };
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(self.with_regions(regions, self.log.clone()))
    }

    /// Makes a table of the same regions, with dirty pages logged (or no longer logged).
    pub fn with_log(&self, log: Option<Arc<DirtyLog>>) -> Arc<Self> {
        self.with_regions(self.regions.clone(), log)
    }

    fn with_regions(&self, regions: Vec<Region>, log: Option<Arc<DirtyLog>>) -> Arc<Self> {
        Arc::new(Self { regions, log, rings: Rings::default(), share: Arc::clone(&self.share) })
    }

    /// The regions, by guest address.
    pub fn regions(&self) -> Vec<RegionSpec> {
        self.regions.iter().map(|r| r.spec).collect()
    }

    /// Host ranges of the regions, for the kernel, which may prepare for buffers there. Addresses
    /// only: they are valid for as long as a table with these mappings lives.
    pub fn mapped(&self) -> Vec<libc::iovec> {
        let mapped = |r: &Region| libc::iovec {
            iov_base: r.mapping.as_ptr().cast(),
            iov_len: r.spec.len_bytes as usize,
        };
        self.regions.iter().map(mapped).collect()
    }

    /// Whether the other table has the same mappings, not only equal ones.
    pub fn shares_mappings(&self, other: &Self) -> bool {
        let same = |(a, b): (&Region, &Region)| Arc::ptr_eq(&a.mapping, &b.mapping);
        self.regions.len() == other.regions.len()
            && self.regions.iter().zip(&other.regions).all(same)
    }

    /// Guest-physical address behind a front-end user address, when the whole range is in one
    /// region. Vring addresses arrive as user addresses.
    pub fn user_to_guest(&self, user_addr: u64, len_bytes: u64) -> Result<u64, MemoryError> {
        let (addr, len) = (user_addr, len_bytes);
        let end = user_addr.checked_add(len_bytes).ok_or(MemoryError::Wraps { addr, len })?;
        self.regions
            .iter()
            .map(|r| r.spec)
            .find(|s| s.user_addr <= user_addr && end <= s.user_addr + s.len_bytes)
            .map(|s| s.guest_addr + (user_addr - s.user_addr))
            .ok_or(MemoryError::NotMapped { addr, len })
    }

    /// Fails when a region's file was truncated under us.
    pub fn check_intact(&self) -> Result<(), MemoryError> {
        if self.log().is_some_and(DirtyLog::was_truncated) {
            return Err(MemoryError::LogTruncated);
        }
        match self.regions.iter().find(|r| r.mapping.was_truncated()) {
            None => Ok(()),
            Some(r) => {
                let (addr, len) = (r.spec.guest_addr, r.spec.len_bytes);
                Err(MemoryError::Truncated { addr, len })
            }
        }
    }

    /// Notes that a ring has parts at these guest addresses. Addresses of ended rings stay noted
    /// until there is another table: they are still in the guest's memory.
    pub(crate) fn note_ring(&self, parts: [u64; 3]) {
        let mut rings = self.rings.lock();
        for part in parts {
            if rings.len() < MAX_RING_PARTS && !rings.contains(&part) {
                rings.push(part);
            }
        }
    }

    /// The dirty log, while a migration runs.
    pub(crate) fn log(&self) -> Option<&DirtyLog> {
        self.log.as_deref()
    }

    /// The region that holds `addr`.
    pub(crate) fn window(&self, addr: u64) -> Option<Window> {
        let at = self.regions.partition_point(|r| r.spec.guest_addr <= addr);
        let r = self.regions.get(at.checked_sub(1)?)?;
        if addr - r.spec.guest_addr >= r.spec.len_bytes {
            return None;
        }
        Some(Window { start: r.spec.guest_addr, len: r.spec.len_bytes, host: r.mapping.as_ptr() })
    }

    /// The host address of a range that lies wholly in one region (ring parts must).
    pub(crate) fn contiguous(&self, addr: u64, len: u64) -> Result<*mut u8, MemoryError> {
        if addr.checked_add(len).is_none() {
            return Err(MemoryError::Wraps { addr, len });
        }
        let (host, rest) =
            self.window(addr).ok_or(MemoryError::NotMapped { addr, len })?.rest(addr);
        if len > rest {
            return Err(MemoryError::NotMapped { addr, len });
        }
        Ok(host)
    }

    /// Calls `piece` for each host-contiguous piece of a range that may cross adjacent regions;
    /// stops when it returns false (and returns `Ok(false)`).
    pub(crate) fn pieces(
        &self,
        addr: u64,
        len: u64,
        mut piece: impl FnMut(*mut u8, usize) -> bool,
    ) -> Result<bool, MemoryError> {
        if addr.checked_add(len).is_none() {
            return Err(MemoryError::Wraps { addr, len });
        }
        let mut done = 0;
        while done < len {
            let (host, rest) = self
                .window(addr + done)
                .ok_or(MemoryError::NotMapped { addr, len })?
                .rest(addr + done);
            let part = rest.min(len - done);
            if !piece(host, part as usize) {
                return Ok(false);
            }
            done += part;
        }
        Ok(true)
    }

    /// The guest address behind a host address inside one of the regions.
    pub(crate) fn host_to_guest(&self, host: *const u8) -> Option<u64> {
        self.regions.iter().find_map(|r| {
            let offset = (host as usize).checked_sub(r.mapping.as_ptr() as usize)? as u64;
            (offset < r.spec.len_bytes).then(|| r.spec.guest_addr + offset)
        })
    }
}

/// Regions whose NUMA node is asked at a time: this many of the largest, and as many others by
/// turns. One takes some 10 µs, and a front end may cut its memory into dozens.
const ASKED_REGIONS: usize = 4;

fn choose_regions(regions: &[Region], turn: u32) -> Vec<usize> {
    let mut all: Vec<usize> = (0..regions.len()).collect();
    all.sort_by_key(|&at| std::cmp::Reverse(regions[at].spec.len_bytes));
    if let Some(others) = all.get_mut(ASKED_REGIONS..).filter(|others| !others.is_empty()) {
        let first = (turn as usize).wrapping_mul(ASKED_REGIONS) % others.len();
        others.rotate_left(first);
    }
    all.truncate(2 * ASKED_REGIONS);
    all
}

impl NumaMemory for GuestMemory {
    fn spread(&self, turn: u32) -> Spread {
        let rings = self.rings.lock().clone();
        let mut sum = Spread::default();
        for &at in &choose_regions(&self.regions, turn) {
            let Region { spec, mapping } = &self.regions[at];
            let host = mapping.as_ptr().cast_const();
            let within = rings.iter().filter_map(|addr| addr.checked_sub(spec.guest_addr));
            let known: Vec<*const u8> = within
                .filter(|offset| *offset < spec.len_bytes)
                .map(|offset| host.wrapping_add(offset as usize))
                .collect();
            sum.add(&numa::spread_of(host, spec.len_bytes, turn, &known));
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::GuestRam;
    use base::numa::Nodes;

    #[test]
    fn memory_is_where_its_rings_are_until_more_is_known() {
        let ram = GuestRam::new(1 << 20);
        let map = || GuestMemory::empty().with_region(ram.region(), &ram.fd()).unwrap();
        let memory = map();
        assert!(memory.spread(0).is_unknown(), "nothing was touched");
        let ring = ram.alloc(4096) + 64;
        memory.note_ring([ring; 3]);
        assert_eq!(memory.rings.lock().len(), 1);
        assert!(memory.spread(0).is_unknown(), "asking touches nothing");
        let host = memory.contiguous(ring, 1).unwrap();
        // SAFETY: one byte of a region that is mapped for as long as `memory` lives.
        unsafe { host.write_volatile(1) };
        let spread = memory.spread(0);
        if spread.is_unknown() {
            eprintln!("skipped: move_pages is not to be had here");
        } else if Nodes::of_machine().is_one() {
            assert_eq!(spread, Spread::on(0, 1 << 20));
        }
    }

    #[test]
    fn notes_of_rings_are_bounded() {
        let memory = GuestMemory::empty();
        (0..10_000).for_each(|n| memory.note_ring([n, n, n + 1]));
        assert_eq!(memory.rings.lock().len(), MAX_RING_PARTS);
    }
}
