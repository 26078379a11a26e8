//! Counts what is on the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Most bytes that an input may put on the heap, beyond what was there. The largest thing that is
/// meant to be there is a qcow2 image's map.
pub const MAX_BYTES: usize = 64 << 20;

static NOW_BYTES: AtomicUsize = AtomicUsize::new(0);
static MOST_BYTES: AtomicUsize = AtomicUsize::new(0);

struct Counting;

fn took(len: usize) {
    let now = NOW_BYTES.fetch_add(len, Relaxed) + len;
    MOST_BYTES.fetch_max(now, Relaxed);
}

// SAFETY: hands everything to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        took(new_size);
        NOW_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NOW_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs a target.
///
/// # Panics
/// It panics, or takes too much memory.
pub fn bounded(bytes: &[u8], one: fn(&[u8])) {
    let before = NOW_BYTES.load(Relaxed);
    MOST_BYTES.store(before, Relaxed);
    one(bytes);
    let most = MOST_BYTES.load(Relaxed).saturating_sub(before);
    assert!(most <= MAX_BYTES, "an input of {} bytes took {most} bytes of memory", bytes.len());
}
