//! Heap and memory for devices, which nothing goes back to: the program runs for seconds. Addresses
//! are the same for CPU and devices.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::{AtomicUsize, Ordering};

use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};

const HEAP_BYTES: usize = 16 << 20;

#[repr(C, align(4096))]
struct Heap {
    bytes: UnsafeCell<[u8; HEAP_BYTES]>,
    used: AtomicUsize,
}

// SAFETY: `take` gives each byte to one caller alone.
unsafe impl Sync for Heap {}

#[global_allocator]
static HEAP: Heap = Heap { bytes: UnsafeCell::new([0; HEAP_BYTES]), used: AtomicUsize::new(0) };

impl Heap {
    /// Zeroed bytes that nobody else has; null when there are no more.
    fn take(&self, len: usize, align: usize) -> *mut u8 {
        let place = |used: usize| used.next_multiple_of(align);
        let grow = |used| Some(place(used) + len).filter(|end| *end <= HEAP_BYTES);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow) {
            Ok(used) => self.bytes.get().cast::<u8>().wrapping_add(place(used)),
            Err(_) => null_mut(),
        }
    }
}

// SAFETY: memory is aligned, as the heap is aligned to a page, and is given out once.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        assert!(layout.align() <= PAGE_SIZE, "alignment {}", layout.align());
        self.take(layout.size(), layout.align())
    }

    unsafe fn dealloc(&self, _memory: *mut u8, _layout: Layout) {}
}

/// One address space for CPU and devices.
pub struct Identity;

// SAFETY: pages are aligned and given out once; all memory and all devices are mapped one to one.
unsafe impl Hal for Identity {
    fn dma_alloc(pages: usize, _direction: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let memory = NonNull::new(HEAP.take(pages * PAGE_SIZE, PAGE_SIZE)).expect("memory");
        (memory.as_ptr() as PhysAddr, memory)
    }

    unsafe fn dma_dealloc(_address: PhysAddr, _memory: NonNull<u8>, _pages: usize) -> i32 {
        0
    }

    unsafe fn mmio_phys_to_virt(address: PhysAddr, _len: usize) -> NonNull<u8> {
        NonNull::new(address as *mut u8).expect("a device's address")
    }

    unsafe fn share(buffer: NonNull<[u8]>, _direction: BufferDirection) -> PhysAddr {
        buffer.as_ptr().cast::<u8>() as PhysAddr
    }

    unsafe fn unshare(_address: PhysAddr, _buffer: NonNull<[u8]>, _direction: BufferDirection) {}
}
