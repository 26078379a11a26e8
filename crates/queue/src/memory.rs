//! The table of a VM's memory regions.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::dirty::DirtyLog;
use crate::error::MemoryError;

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

/// An immutable table of mapped regions. Changing it makes a new one; mappings are shared between
/// the old and the new table and unmapped with the last of them.
#[derive(Debug, Default)]
pub struct GuestMemory {
    // (private: sorted regions, dirty log)
}

impl GuestMemory {
    /// No memory at all.
    pub fn empty() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// This table and one region more.
    pub fn with_region(&self, spec: RegionSpec, fd: &OwnedFd) -> Result<Arc<Self>, MemoryError> {
        let _ = (spec, fd);
        unimplemented!("owner of crate queue")
    }

    /// This table without the region that has these guest and user addresses and length.
    pub fn without_region(&self, spec: RegionSpec) -> Result<Arc<Self>, MemoryError> {
        let _ = spec;
        unimplemented!("owner of crate queue")
    }

    /// The same regions, with dirty pages logged (or not any more).
    pub fn with_log(&self, log: Option<Arc<DirtyLog>>) -> Arc<Self> {
        let _ = log;
        unimplemented!("owner of crate queue")
    }

    /// The regions, by guest address.
    pub fn regions(&self) -> Vec<RegionSpec> {
        unimplemented!("owner of crate queue")
    }

    /// The guest-physical address behind a front-end user address, when the whole range is in one
    /// region. Vring addresses arrive as user addresses.
    pub fn user_to_guest(&self, user_addr: u64, len_bytes: u64) -> Result<u64, MemoryError> {
        let _ = (user_addr, len_bytes);
        unimplemented!("owner of crate queue")
    }

    /// Fails when a region's file was truncated under us.
    pub fn check_intact(&self) -> Result<(), MemoryError> {
        unimplemented!("owner of crate queue")
    }
}
