//! Memory table of a session, with the descriptors it came from. Every change makes a new value, so
//! that a change that fails leaves nothing behind.

use std::sync::Arc;

use base::peer_fd::PeerFd;
use queue::dirty::{DirtyLog, LOG_PAGE_BYTES};
use queue::memory::RegionSpec;
use queue::{GuestMemory, Layout, MemoryError, MemoryShare, RingAddrs};

use crate::codec::{Region, Request, SingleRegion, VringAddr, payload};
use crate::error::VhostUserError;

/// Dirty log with the file and place that it was mapped from.
#[derive(Debug, Clone)]
pub(super) struct LogArea {
    pub fd: Arc<PeerFd>,
    pub size: u64,
    pub offset: u64,
    map: Arc<DirtyLog>,
}

/// Memory table: the mapped regions, their descriptors, the dirty log.
#[derive(Debug, Clone)]
pub(super) struct MemoryTable {
    share: Arc<MemoryShare>,
    table: Arc<GuestMemory>,
    pub regions: Vec<(RegionSpec, Arc<PeerFd>)>,
    pub log: Option<LogArea>,
    logging: bool,
}

impl MemoryTable {
    /// Makes an empty table that maps at the expense of `share`.
    pub fn new(share: Arc<MemoryShare>) -> Self {
        let table = GuestMemory::of(Arc::clone(&share));
        Self { share, table, regions: Vec::new(), log: None, logging: false }
    }

    /// Mapped memory, as devices take it.
    pub fn table(&self) -> &Arc<GuestMemory> {
        &self.table
    }

    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Whether `VHOST_F_LOG_ALL` is on.
    pub fn wants_logging(&self) -> bool {
        self.logging
    }

    pub fn is_logging(&self) -> bool {
        self.logging && self.log.is_some()
    }

    /// Copy with other regions and the same log.
    pub fn replaced(&self, regions: Vec<(RegionSpec, PeerFd)>) -> Result<Self, MemoryError> {
        let table = GuestMemory::of(Arc::clone(&self.share));
        let mut next = Self { regions: Vec::new(), table, ..self.clone() };
        for (spec, fd) in regions {
            next.table = next.table.with_region(spec, &fd)?;
            next.regions.push((spec, Arc::new(fd.checked())));
        }
        Ok(next.with_log_applied())
    }

    /// Copy with one region more.
    pub fn with_region(&self, spec: RegionSpec, fd: PeerFd) -> Result<Self, MemoryError> {
        let mut next = self.clone();
        next.table = self.table.with_region(spec, &fd)?;
        next.regions.push((spec, Arc::new(fd.checked())));
        Ok(next)
    }

    /// Whether the table has exactly this region.
    pub fn has(&self, spec: &RegionSpec) -> bool {
        self.regions.iter().any(|(s, _)| s == spec)
    }

    /// Copy without one region; the file offset does not matter.
    pub fn without_region(&self, spec: RegionSpec) -> Result<Self, MemoryError> {
        let mut next = self.clone();
        next.table = self.table.without_region(spec)?;
        next.regions.retain(|(s, _)| {
            (s.guest_addr, s.user_addr, s.len_bytes)
                != (spec.guest_addr, spec.user_addr, spec.len_bytes)
        });
        Ok(next)
    }

    /// Copy with another dirty log.
    pub fn with_log(&self, fd: PeerFd, size: u64, offset: u64) -> Result<Self, MemoryError> {
        let map = Arc::new(DirtyLog::new(&self.share, &fd, size, offset)?);
        let log = LogArea { fd: Arc::new(fd.checked()), size, offset, map };
        Ok(Self { log: Some(log), ..self.clone() }.with_log_applied())
    }

    /// Copy with logging on or off; without a log, on has no effect until one comes.
    pub fn with_logging(&self, on: bool) -> Self {
        Self { logging: on, ..self.clone() }.with_log_applied()
    }

    /// Checks that the log, while it is written to, covers all memory (a bit for each 4 KiB page).
    /// A page behind its end would be lost silently.
    pub fn check_log(&self) -> Result<(), MemoryError> {
        let Some(log) = self.log.as_ref().filter(|_| self.logging) else { return Ok(()) };
        // `GuestMemory` refuses regions that wrap around.
        let end = self.regions.iter().map(|(s, _)| s.guest_addr + s.len_bytes).max().unwrap_or(0);
        let needed = end.div_ceil(LOG_PAGE_BYTES * 8);
        if log.size >= needed {
            return Ok(());
        }
        Err(MemoryError::LogTooShort { len: log.size, end, needed })
    }

    fn with_log_applied(mut self) -> Self {
        let log = if self.logging { self.log.as_ref().map(|l| Arc::clone(&l.map)) } else { None };
        self.table = self.table.with_log(log);
        self
    }

    /// Translates a ring's addresses into guest addresses, for `size` descriptors; the error names
    /// the part that is outside (never the front end's address).
    pub fn resolve(
        &self,
        addrs: &VringAddr,
        size: u16,
        layout: Layout,
    ) -> Result<RingAddrs, &'static str> {
        let n = u64::from(size);
        let (desc_len, avail_len, used_len) = match layout {
            Layout::Split => (16 * n, 6 + 2 * n, 6 + 8 * n),
            Layout::Packed => (16 * n, 4, 4),
        };
        let find = |addr, len, part| self.table.user_to_guest(addr, len).map_err(|_| part);
        Ok(RingAddrs {
            desc: find(addrs.desc, desc_len, "descriptor ring")?,
            driver: find(addrs.avail, avail_len, "available ring")?,
            device: find(addrs.used, used_len, "used ring")?,
        })
    }
}

impl Region {
    /// Region as crate `queue` takes it.
    fn spec(&self) -> RegionSpec {
        RegionSpec {
            guest_addr: self.guest_addr,
            user_addr: self.user_addr,
            len_bytes: self.len_bytes,
            mmap_offset: self.mmap_offset,
        }
    }
}

/// Regions out of `SET_MEM_TABLE`, with their descriptors.
pub(super) fn parse_table(
    bytes: &[u8],
    fds: Vec<PeerFd>,
) -> Result<Vec<(RegionSpec, PeerFd)>, VhostUserError> {
    let request = Request::SetMemTable;
    let count: u32 = payload(request, bytes)?;
    let want = 8 + u64::from(count) * size_of::<Region>() as u64;
    if bytes.len() as u64 != want {
        return Err(VhostUserError::BadSize {
            message: request.message(),
            got: bytes.len() as u32,
            want: format!("{want} (for {count} regions)"),
        });
    }
    let mut regions = Vec::with_capacity(fds.len());
    for (chunk, fd) in bytes[8..].chunks_exact(size_of::<Region>()).zip(fds) {
        let region: Region = payload(request, chunk)?;
        regions.push((region.spec(), fd));
    }
    Ok(regions)
}

/// Region out of `ADD_MEM_REG` or `REM_MEM_REG`.
pub(super) fn parse_region(request: Request, bytes: &[u8]) -> Result<RegionSpec, VhostUserError> {
    let single: SingleRegion = payload(request, bytes)?;
    Ok(single.region.spec())
}

/// Makes the error of a message about memory from the table's.
pub(super) fn memory_error(request: Request) -> impl Fn(MemoryError) -> VhostUserError {
    move |source| VhostUserError::Memory { message: request.message(), source }
}
