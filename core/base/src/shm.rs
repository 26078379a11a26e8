//! Shared memory files, which outlive a daemon: in the holder (memfds) or by name.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A mapped memfd, read and write, sealed against shrinking so that an access can never fault.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the mapping is plain memory owned by this value; whoever accesses it through `as_ptr`
// is responsible for ordering, and moving the value between threads changes nothing.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; `&SharedMemory` only gives out the address.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// A new zeroed memfd of `len_bytes` (above 0), sealed against shrinking.
    pub fn new(name: &str, len_bytes: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&fd, len_bytes as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        Self::map(fd, len_bytes)
    }

    /// Maps a memfd made by [`SharedMemory::new`] (in an earlier daemon). Refused unless it is
    /// sealed against shrinking.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "shared memory file is not sealed against shrinking",
            ));
        }
        let len_bytes = rustix::fs::fstat(&fd)?.st_size as usize;
        Self::map(fd, len_bytes)
    }

    /// Maps a file by its name, made with `len_bytes` (above 0) of zeroes if need be, for its owner
    /// only. Other processes with the owner's rights can shorten it, and an access then faults:
    /// only for folders of the daemon's own.
    pub fn in_file(path: &Path, len_bytes: usize) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        if rustix::fs::fstat(&fd)?.st_size as usize != len_bytes {
            // Written by another version: of no use, and all bytes must be zeroes.
            rustix::fs::ftruncate(&fd, 0)?;
            rustix::fs::ftruncate(&fd, len_bytes as u64)?;
        }
        Self::map(fd, len_bytes)
    }

    /// Maps a file of `len_bytes` that other processes map as well. A process that shortens it ends
    /// this one, so only processes that could do that anyway may have it.
    pub fn of_file(fd: OwnedFd, len_bytes: usize) -> io::Result<Self> {
        let is_bytes = rustix::fs::fstat(&fd)?.st_size;
        if len_bytes == 0 || usize::try_from(is_bytes) != Ok(len_bytes) {
            let why = format!("it is {is_bytes} bytes long, and not {len_bytes}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Self::map(fd, len_bytes)
    }

    fn map(fd: OwnedFd, len_bytes: usize) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address chosen by the kernel; it aliases nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )?
        };
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { fd, base, len_bytes })
    }

    /// The first byte of the mapping; valid for [`SharedMemory::len_bytes`] while `self` lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length of the mapping.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `len_bytes` are those of the mapping made in `map`, unmapped once.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_show_the_same_bytes() {
        let a = SharedMemory::new("test", 4096).unwrap();
        let b = SharedMemory::from_fd(a.as_fd().try_clone_to_owned().unwrap()).unwrap();
        // SAFETY: both mappings are 4,096 bytes and only this thread uses them.
        unsafe {
            a.as_ptr().add(100).write_volatile(7);
            assert_eq!(b.as_ptr().add(100).read_volatile(), 7);
        }
    }

    #[test]
    fn a_named_file_keeps_its_bytes_unless_its_length_is_another() {
        let path = std::env::temp_dir().join(format!("millrace-shm-{}", std::process::id()));
        let read = |len_bytes| {
            let memory = SharedMemory::in_file(&path, len_bytes).unwrap();
            // SAFETY: the mapping is longer, and only this thread uses it.
            unsafe {
                let was = memory.as_ptr().add(5).read_volatile();
                memory.as_ptr().add(5).write_volatile(9);
                was
            }
        };
        assert_eq!([read(4096), read(4096), read(8192), read(8192)], [0, 9, 0, 9]);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_of_another_length_is_refused() {
        let file = |bytes| {
            let fd = rustix::fs::memfd_create("file", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, bytes).unwrap();
            SharedMemory::of_file(fd, 4096)
        };
        assert_eq!(file(4096).unwrap().len_bytes(), 4096);
        let why = file(8192).unwrap_err().to_string();
        assert_eq!(why, "it is 8192 bytes long, and not 4096");
        assert!(file(0).is_err());
    }

    #[test]
    fn an_unsealed_file_is_refused() {
        let fd = rustix::fs::memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(SharedMemory::from_fd(fd).is_err());
    }
}
