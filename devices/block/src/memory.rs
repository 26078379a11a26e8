//! A disk in the daemon's memory: a sparse shared memory file, copied to and from guests.
//!
//! The file is mapped once, as large as such a disk may ever be; only touched pages cost memory.
//! Ranges that are discarded or zeroed are given back to the kernel when they are large: one system
//! call for such a request, the only one of this back end.
//!
//! A process that keeps the file open keeps the bytes, over the end of the daemon too: the holder
//! does. The file's last page says how long the disk is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::io::{Disk, DiskOp};
use base::shm::SharedMemory;
use queue::iovec::{gather, scatter};
use rustix::fs::FallocateFlags;

use crate::backend::{Backend, Demands};
use crate::error::BlockError;
use crate::immediate::{Executor, ImmediateDisk};
use crate::limits::{MAX_MEMORY_DISK_LEN_BYTES, SECTOR_LEN_BYTES, STEP_LEN_BYTES};

/// Ranges from this size on are given back to the kernel; smaller ones are overwritten.
const PUNCH_LEN_BYTES: u64 = 64 << 10;

/// Length of the file: the largest disk, and a page that says what is in it.
const FILE_LEN_BYTES: usize = MAX_MEMORY_DISK_LEN_BYTES as usize + 4096;

/// Mark of a file that is a disk of this form: "MRMEMDK1".
const MAGIC: u64 = u64::from_le_bytes(*b"MRMEMDK1");

/// The last page of the file.
#[repr(C)]
struct Label {
    magic: AtomicU64,
    /// Size in the config when the disk was last opened.
    configured_bytes: AtomicU64,
    /// Size now.
    len_bytes: AtomicU64,
}

#[derive(Debug)]
struct Shared {
    memory: SharedMemory,
    /// Whether this daemon made the file, which was empty then.
    is_new: bool,
}

/// The memory back end of a port: a mapped memory file.
#[derive(Debug)]
pub struct MemoryBackend(Arc<Shared>);

impl MemoryBackend {
    /// A zeroed disk of that size.
    pub fn new(len_bytes: u64) -> Result<Self, BlockError> {
        check_len(len_bytes)?;
        let memory = SharedMemory::new("millrace-disk", FILE_LEN_BYTES)
            .map_err(BlockError::resource("making its memory file"))?;
        let shared = Shared { memory, is_new: true };
        let label = shared.label();
        label.len_bytes.store(len_bytes, Ordering::Relaxed);
        label.configured_bytes.store(len_bytes, Ordering::Relaxed);
        label.magic.store(MAGIC, Ordering::Release);
        Ok(Self(Arc::new(shared)))
    }

    /// The disk of an earlier daemon, by the file that [`MemoryBackend::file`] gave. It has the
    /// size that it had, unless the config, which says `configured_bytes`, says something else than
    /// then.
    pub fn from_file(file: OwnedFd, configured_bytes: u64) -> Result<Self, BlockError> {
        check_len(configured_bytes)?;
        let memory = SharedMemory::from_fd(file)
            .map_err(BlockError::resource("mapping the memory of an earlier daemon"))?;
        let foreign = || {
            let source =
                io::Error::new(io::ErrorKind::InvalidData, "another version's, or no disk");
            BlockError::Resource { what: "the memory of an earlier daemon", source }
        };
        if memory.len_bytes() != FILE_LEN_BYTES {
            return Err(foreign());
        }
        let shared = Shared { memory, is_new: false };
        let label = shared.label();
        if label.magic.load(Ordering::Acquire) != MAGIC {
            return Err(foreign());
        }
        check_len(label.len_bytes.load(Ordering::Relaxed)).map_err(|_| foreign())?;
        let was_bytes = label.configured_bytes.swap(configured_bytes, Ordering::Relaxed);
        let backend = Self(Arc::new(shared));
        if was_bytes != configured_bytes {
            backend.resize(Some(configured_bytes))?;
        }
        Ok(backend)
    }

    /// File with the disk's bytes: a process that keeps it open keeps them.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.memory.as_fd()
    }
}

fn check_len(len_bytes: u64) -> Result<(), BlockError> {
    if len_bytes > MAX_MEMORY_DISK_LEN_BYTES {
        let reason = format!("a memory disk has at most {MAX_MEMORY_DISK_LEN_BYTES} bytes");
        return Err(BlockError::Resize { len_bytes, reason });
    }
    if len_bytes == 0 || !len_bytes.is_multiple_of(SECTOR_LEN_BYTES) {
        let reason = format!("a disk has whole sectors of {SECTOR_LEN_BYTES} bytes, at least one");
        return Err(BlockError::Resize { len_bytes, reason });
    }
    Ok(())
}

impl Shared {
    fn label(&self) -> &Label {
        // SAFETY: the mapping has a page there, aligned, that lives as long as `self` and holds
        // nothing else; atomics may be changed through shared references, and all their values are
        // valid.
        unsafe { &*self.memory.as_ptr().add(MAX_MEMORY_DISK_LEN_BYTES as usize).cast::<Label>() }
    }

    fn len_bytes(&self) -> u64 {
        self.label().len_bytes.load(Ordering::Relaxed)
    }

    /// Makes `offset..offset + len` (inside the mapping) read as zeroes.
    fn zero(&self, offset: u64, len: u64) -> Result<(), i32> {
        if len >= PUNCH_LEN_BYTES {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            return rustix::fs::fallocate(self.memory.as_fd(), flags, offset, len)
                .map_err(|e| e.raw_os_error());
        }
        // SAFETY: the caller checked the range against the size, which never exceeds the mapping;
        // bytes are shared memory that several queues may write, as on a real disk.
        unsafe {
            std::ptr::write_bytes(self.memory.as_ptr().add(offset as usize), 0, len as usize)
        };
        Ok(())
    }

    /// Whether the range is within the mapping (the engine checked it against the disk's size).
    fn holds(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= MAX_MEMORY_DISK_LEN_BYTES)
    }
}

impl Backend for MemoryBackend {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn open_queue(&self, depth: u16) -> Result<Box<dyn Disk>, BlockError> {
        Ok(Box::new(ImmediateDisk::new(MemoryQueue(Arc::clone(&self.0)), depth)))
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn demands(&self) -> Demands {
        Demands { max_range_bytes: u64::from(STEP_LEN_BYTES), copies: true, ..Demands::NONE }
    }

    fn resize(&self, new_len_bytes: Option<u64>) -> Result<u64, BlockError> {
        if let Some(len_bytes) = new_len_bytes {
            check_len(len_bytes)?;
            let old = self.0.label().len_bytes.swap(len_bytes, Ordering::Relaxed);
            if len_bytes < old {
                // What was cut off must not come back when the disk grows again.
                let label = MAX_MEMORY_DISK_LEN_BYTES;
                let cut = (old - len_bytes).max(PUNCH_LEN_BYTES).min(label - len_bytes);
                self.0.zero(len_bytes, cut).map_err(|e| {
                    let source = io::Error::from_raw_os_error(e);
                    BlockError::Resource { what: "giving back the cut part", source }
                })?;
            }
        }
        Ok(self.len_bytes())
    }

    fn sync(&self) -> Result<(), BlockError> {
        Ok(())
    }

    fn began_empty(&self) -> bool {
        self.0.is_new
    }
}

/// Access of one queue to the memory file.
struct MemoryQueue(Arc<Shared>);

impl Executor for MemoryQueue {
    const BATCHES: bool = false;

    #[inline]
    unsafe fn execute(&self, op: DiskOp) -> Result<u32, i32> {
        let shared = &self.0;
        let (offset, len) = match op {
            DiskOp::Read { offset, len_bytes, .. } | DiskOp::Write { offset, len_bytes, .. } => {
                (offset, u64::from(len_bytes))
            }
            DiskOp::Discard { offset, len_bytes } => (offset, len_bytes),
            DiskOp::WriteZeroes { offset, len_bytes, .. } => (offset, len_bytes),
            DiskOp::Flush => return Ok(0),
        };
        if !shared.holds(offset, len) {
            return Err(libc::EIO);
        }
        // The offset fits: `holds` compared it with a mapping's length.
        let at = shared.memory.as_ptr().wrapping_add(offset as usize);
        match op {
            // SAFETY: the caller vouches for the buffers, which hold `len` bytes together; `at` is
            // valid for `len` bytes (checked above); guest memory is never this private mapping.
            DiskOp::Read { bufs, count, .. } => unsafe { scatter(at, bufs, count) },
            // SAFETY: as for reads.
            DiskOp::Write { bufs, count, .. } => unsafe { gather(bufs, count, at) },
            _ => return shared.zero(offset, len).map(|()| 0),
        }
        Ok(len as u32)
    }

    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_whole_sectors_within_the_limit() {
        let disk = MemoryBackend::new(4096).unwrap();
        for len_bytes in [0, 1000, MAX_MEMORY_DISK_LEN_BYTES + 512] {
            assert!(MemoryBackend::new(len_bytes).is_err(), "{len_bytes}");
            assert!(disk.resize(Some(len_bytes)).is_err(), "{len_bytes}");
        }
        assert_eq!(disk.resize(Some(8192)).unwrap(), 8192);
    }

    #[test]
    fn the_next_daemon_finds_bytes_and_size() {
        let disk = MemoryBackend::new(1 << 20).unwrap();
        disk.resize(Some(2 << 20)).unwrap();
        let at = |disk: &MemoryBackend, offset| disk.0.memory.as_ptr().wrapping_add(offset);
        // SAFETY: inside the mapping, which only this thread uses.
        unsafe { at(&disk, (2 << 20) - 1).write(7) };
        let file = disk.file().try_clone_to_owned().unwrap();
        let again = || file.try_clone().unwrap();
        drop(disk);
        let disk = MemoryBackend::from_file(again(), 1 << 20).unwrap();
        assert_eq!((disk.len_bytes(), disk.began_empty()), (2 << 20, false));
        // SAFETY: as above.
        assert_eq!(unsafe { at(&disk, (2 << 20) - 1).read() }, 7);
        // The config says something new: that holds, and what is cut off does not come back.
        for len_bytes in [1 << 19, 4 << 20] {
            let disk = MemoryBackend::from_file(again(), len_bytes).unwrap();
            assert_eq!(disk.len_bytes(), len_bytes);
        }
        // SAFETY: as above.
        assert_eq!(unsafe { at(&disk, (2 << 20) - 1).read() }, 0);
        // The largest disk leaves the label alone.
        let disk = MemoryBackend::from_file(again(), MAX_MEMORY_DISK_LEN_BYTES).unwrap();
        disk.resize(Some(MAX_MEMORY_DISK_LEN_BYTES - 512)).unwrap();
        assert_eq!(disk.len_bytes(), MAX_MEMORY_DISK_LEN_BYTES - 512);
        let other = SharedMemory::new("other", 4096).unwrap().as_fd().try_clone_to_owned().unwrap();
        assert!(MemoryBackend::from_file(other, 4096).is_err());
        let unlabelled = SharedMemory::new("other", FILE_LEN_BYTES).unwrap();
        let unlabelled = unlabelled.as_fd().try_clone_to_owned().unwrap();
        assert!(MemoryBackend::from_file(unlabelled, 4096).is_err());
    }
}
