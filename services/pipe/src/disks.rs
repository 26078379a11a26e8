//! The disks of a VM by the numbers that its agent knows.

use std::sync::{Arc, Weak};

use block::BlockPort;
use guest_abi::Reason;

use crate::config::Devices;
use crate::disk_gate::DiskGate;
use crate::file_source::FileSource;
use crate::gated_file::GatedFile;
use crate::limits::MAX_PROBED_DISKS;
use crate::purse::Purse;

/// Disks by the numbers that an agent was told. They are not kept open: a disk that is taken away
/// is unlocked, and cannot be had by its number.
#[derive(Debug, Default)]
pub(crate) struct DiskNumbers(Vec<Weak<BlockPort>>);

impl DiskNumbers {
    /// The disk of that number, if the VM still has it.
    pub fn find(&self, devices: &dyn Devices, number: u32) -> Option<Arc<BlockPort>> {
        let known = self.0.get(number as usize)?.upgrade()?;
        devices.disks().into_iter().find(|disk| Arc::ptr_eq(disk, &known))
    }

    /// The number of a disk: the one that it has, or a new one. None: too many disks have one. No
    /// number is given twice.
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

/// Whether all used disks are among the live ones.
pub(crate) fn has_all(live: &[Arc<BlockPort>], used: &[Weak<BlockPort>]) -> bool {
    used.iter().all(|used| live.iter().any(|live| Arc::as_ptr(live) == used.as_ptr()))
}

/// Disks that one pipe uses.
pub(crate) struct PipeDisks<'a> {
    devices: &'a dyn Devices,
    numbers: &'a DiskNumbers,
    /// Pays for what is read.
    purse: &'a Arc<Purse>,
    pub used: Vec<Weak<BlockPort>>,
}

impl<'a> PipeDisks<'a> {
    /// No disk yet.
    pub fn new(devices: &'a dyn Devices, numbers: &'a DiskNumbers, purse: &'a Arc<Purse>) -> Self {
        Self { devices, numbers, purse, used: Vec::new() }
    }

    /// Uses the disk of that number.
    pub fn use_disk(&mut self, number: u32) -> Result<Arc<BlockPort>, Reason> {
        let disk = self.numbers.find(self.devices, number).ok_or(Reason::NoDisk)?;
        self.used.push(Arc::downgrade(&disk));
        Ok(disk)
    }

    /// Opens a file that is read by its extents. `is_cached`: the guest has it in memory, so it is
    /// opened only if the host has it, too.
    pub fn open_file(
        &mut self,
        disk: u32,
        extents: Vec<(u64, u64)>,
        len_bytes: u64,
        is_cached: bool,
    ) -> Result<GatedFile, Reason> {
        let image = self.use_disk(disk)?.image().map_err(|_| Reason::DiskFormat)?;
        let source = FileSource::new(image.file, image.len_bytes, extents, len_bytes)
            .map_err(|_| Reason::BadExtents)?;
        if image.may_lag {
            source.drop_cached();
        }
        // Both have it: the host's way is the shorter one.
        if is_cached && !source.is_in_memory(len_bytes) {
            return Err(Reason::Cached);
        }
        let gate = DiskGate::new(Arc::clone(self.purse), Some(image.pass));
        Ok(GatedFile::new(source, gate))
    }
}
