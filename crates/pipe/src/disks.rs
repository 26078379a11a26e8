//! The disks of a VM as its agent names them.

use std::sync::{Arc, Weak};

use block::BlockPort;
use guest_abi::Reason;

use crate::file::Source;
use crate::limits::MAX_PROBED_DISKS;
use crate::vm::VmPipes;

/// Disks by the numbers that the agent was told. Not kept: one that is taken away is locked no more, and
/// not to be had by its number.
#[derive(Debug, Default)]
pub(crate) struct Known(Vec<Weak<BlockPort>>);

impl Known {
    /// One that the VM has still.
    pub fn get(&self, vm: &VmPipes, number: u32) -> Option<Arc<BlockPort>> {
        let known = self.0.get(number as usize)?.upgrade()?;
        vm.disks().into_iter().find(|disk| Arc::ptr_eq(disk, &known))
    }

    /// The number of a disk, told now or before; none: too many were told. No number is told twice.
    pub fn number(&mut self, disk: &Arc<BlockPort>) -> Option<u32> {
        let is_it = |known: &Weak<BlockPort>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(disk));
        let at = self.0.iter().position(is_it).or_else(|| {
            (self.0.len() < MAX_PROBED_DISKS).then(|| {
                self.0.push(Arc::downgrade(disk));
                self.0.len() - 1
            })
        })?;
        Some(at as u32)
    }
}

/// Whether all of them are there still.
pub(crate) fn has_all(live: &[Arc<BlockPort>], used: &[Weak<BlockPort>]) -> bool {
    used.iter().all(|used| live.iter().any(|live| Arc::as_ptr(live) == used.as_ptr()))
}

/// What a pipe uses of the disks that its agent knows.
pub(crate) struct Disks<'a> {
    vm: &'a VmPipes,
    known: &'a Known,
    pub used: Vec<Weak<BlockPort>>,
}

impl<'a> Disks<'a> {
    pub fn new(vm: &'a VmPipes, known: &'a Known) -> Self {
        Self { vm, known, used: Vec::new() }
    }

    /// By its number.
    pub fn take(&mut self, number: u32) -> Result<Arc<BlockPort>, Reason> {
        let disk = self.known.get(self.vm, number).ok_or(Reason::NoDisk)?;
        self.used.push(Arc::downgrade(&disk));
        Ok(disk)
    }

    /// A file that is read.
    pub fn file(
        &mut self,
        disk: u32,
        extents: Vec<(u64, u64)>,
        len_bytes: u64,
        is_cached: bool,
    ) -> Result<Source, Reason> {
        let image = self.take(disk)?.image().map_err(|_| Reason::DiskFormat)?;
        let source = Source::new(image.file, image.len_bytes, extents, len_bytes)
            .map_err(|_| Reason::BadExtents)?;
        if image.may_lag {
            source.drop_cached();
        }
        // Both have it: the host's way is the shorter one.
        if is_cached && !source.is_in_memory(len_bytes) { Err(Reason::Cached) } else { Ok(source) }
    }
}
