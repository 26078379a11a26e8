//! A guest's memory: one memfd, mapped once for the driver and once for the device.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::shm::SharedMemory;

use crate::memory::{GuestMemory, RegionSpec};

/// Guest-physical address of the first byte.
pub const GUEST_BASE: u64 = 0x1_0000_0000;

/// Front-end user address of the first byte.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// The memory of a model guest. Several [`super::ModelDriver`]s may share one.
#[derive(Debug)]
pub struct GuestRam {
    shm: SharedMemory,
    next: AtomicU64,
    memory: Arc<GuestMemory>,
}

impl GuestRam {
    /// Memory of `len_bytes` (a multiple of 4096) at [`GUEST_BASE`]. Pages take room when used.
    pub fn new(len_bytes: usize) -> Arc<Self> {
        let shm = SharedMemory::new("model-guest", len_bytes).unwrap();
        let fd = shm.as_fd().try_clone_to_owned().unwrap();
        let region = Self::spec(len_bytes);
        let memory = GuestMemory::empty().with_region(region, &fd).unwrap();
        Arc::new(Self { shm, next: AtomicU64::new(0), memory })
    }

    fn spec(len_bytes: usize) -> RegionSpec {
        RegionSpec {
            guest_addr: GUEST_BASE,
            user_addr: USER_BASE,
            len_bytes: len_bytes as u64,
            mmap_offset: 0,
        }
    }

    /// The device's view.
    pub fn memory(&self) -> Arc<GuestMemory> {
        Arc::clone(&self.memory)
    }

    /// The region as a front end would send it.
    pub fn region(&self) -> RegionSpec {
        Self::spec(self.shm.len_bytes())
    }

    /// The memory file.
    pub fn fd(&self) -> OwnedFd {
        self.shm.as_fd().try_clone_to_owned().unwrap()
    }

    /// A fresh range, aligned to 64 bytes; its guest address.
    pub fn alloc(&self, len_bytes: usize) -> u64 {
        self.alloc_aligned(len_bytes, 64)
    }

    /// A fresh range with an alignment (a power of two up to 4096); its guest address.
    pub fn alloc_aligned(&self, len_bytes: usize, align: u64) -> u64 {
        let start = self
            .next
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |at| {
                Some(at.next_multiple_of(align) + len_bytes as u64)
            })
            .unwrap()
            .next_multiple_of(align);
        assert!(start as usize + len_bytes <= self.shm.len_bytes(), "model guest memory is full");
        GUEST_BASE + start
    }

    /// Offset at which the next [`GuestRam::alloc`] would begin, for [`GuestRam::free_to`].
    pub fn mark(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Frees everything allocated since `mark`.
    pub fn free_to(&self, mark: u64) {
        self.next.store(mark, Ordering::SeqCst);
    }

    /// The driver's address of a guest range.
    pub(super) fn host(&self, addr: u64, len: usize) -> *mut u8 {
        let at = addr.checked_sub(GUEST_BASE).expect("below the model guest's memory") as usize;
        assert!(at + len <= self.shm.len_bytes(), "beyond the model guest's memory");
        self.shm.as_ptr().wrapping_add(at)
    }

    /// Writes guest memory.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        let to = self.host(addr, bytes.len());
        // SAFETY: `host` checked the range, which stays mapped while `self` lives.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Reads guest memory.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let from = self.host(addr, len);
        let mut bytes = vec![0; len];
        // SAFETY: `host` checked the range, which stays mapped while `self` lives.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        bytes
    }
}
