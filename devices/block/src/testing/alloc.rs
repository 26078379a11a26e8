//! Counts this thread's allocations.

use base::alloc_count::Counting;
pub(crate) use base::alloc_count::count;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
