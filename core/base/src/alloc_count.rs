//! An allocator that counts, for tests which hold that the data path allocates nothing.
//!
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: base::alloc_count::Counting = base::alloc_count::Counting;
//! assert_eq!(base::alloc_count::allocations(|| engine.poll()), 0);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with a count of the allocations of each thread.
#[derive(Debug)]
pub struct Counting;

fn note() {
    // A thread that is ending has no counter any more, and no test counts on it.
    let _ = COUNT.try_with(|c| c.set(c.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, len) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Allocations of this thread so far. 0 unless [`Counting`] is the program's allocator.
pub fn count() -> u64 {
    COUNT.with(Cell::get)
}

/// How often this thread allocates in `f`.
pub fn allocations(f: impl FnOnce()) -> u64 {
    let before = count();
    f();
    count() - before
}
