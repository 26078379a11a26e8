//! Guest memory that the kernel has pinned for a ring, and which operations may use it.
//!
//! For a registered buffer the kernel need not look up and hold the pages of each operation. It
//! looks at the pages that were there when it registered them, not at the address: so a ring's
//! buffers are those of one memory table and never change. A queue whose table changes gets a new
//! ring (`queue_disks.rs`), made and registered by the session's thread, since pinning takes long,
//! and what is in flight ends on the old one, which keeps the old pages until then. The two change
//! together, between two polls: no request of the new table meets the old buffers, whatever its
//! address. A request of the old table that goes on meets the new ones only at addresses that both
//! tables map, which are the same pages: its own mappings stay as long as it lasts, so no others
//! can be there.

use std::io;
use std::sync::Arc;

use base::counter::Counter;
use base::io::{Disk, IoSlice};
use queue::GuestMemory;
use rustix::io::Errno;
use rustix::mm::Advice;
use rustix::process::Resource;

use crate::limits::{BUFFER_LEN_BYTES, FILL_LEN_BYTES, MAX_BUFFERS};

/// A range of addresses, in buffers of [`BUFFER_LEN_BYTES`]; the last may be shorter.
#[derive(Debug)]
struct Window {
    start: usize,
    len: usize,
    /// Index of the first buffer.
    first: u16,
}

/// Registered buffers of a ring; empty at first.
#[derive(Debug, Default)]
pub(crate) struct RegisteredBuffers {
    /// Largest first: that is where most requests are.
    windows: Vec<Window>,
    used: Arc<Counter>,
}

impl RegisteredBuffers {
    /// Cuts memory into buffers that the kernel takes. Returns its list and ours. `used` counts the
    /// operations that find a buffer.
    pub fn cut(memory: &[IoSlice], used: Arc<Counter>) -> io::Result<(Vec<IoSlice>, Self)> {
        let mut memory = memory.to_vec();
        memory.sort_by_key(|m| std::cmp::Reverse(m.iov_len));
        let mut list = Vec::new();
        let mut windows = Vec::with_capacity(memory.len());
        for &IoSlice { iov_base, iov_len } in &memory {
            let first = u16::try_from(list.len()).unwrap_or(u16::MAX);
            windows.push(Window { start: iov_base as usize, len: iov_len, first });
            list.extend((0..iov_len).step_by(BUFFER_LEN_BYTES).map(|at| IoSlice {
                iov_base: iov_base.wrapping_byte_add(at),
                iov_len: (iov_len - at).min(BUFFER_LEN_BYTES),
            }));
        }
        if list.len() > MAX_BUFFERS {
            let text = format!("{} buffers; io_uring takes {MAX_BUFFERS}", list.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok((list, Self { windows, used }))
    }

    /// Finds, and counts, the buffer in which all of `buf` lies.
    #[inline]
    pub fn find(&self, buf: &IoSlice) -> Option<u16> {
        for window in &self.windows {
            let offset = (buf.iov_base as usize).wrapping_sub(window.start);
            if offset >= window.len {
                continue;
            }
            let last = buf.iov_len.checked_sub(1)?;
            if last >= window.len - offset {
                return None;
            }
            let (from, to) = (offset / BUFFER_LEN_BYTES, (offset + last) / BUFFER_LEN_BYTES);
            if from != to {
                return None;
            }
            self.used.add(1);
            // Below MAX_BUFFERS.
            return Some(window.first + from as u16);
        }
        None
    }
}

/// Reason why a table's memory is not registered, for the log.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistrationError {
    /// More than the administrator allows.
    ///
    /// Remedy: raise `registered_memory` to what the VM has, or take it out.
    #[error(
        "the guest has {mib} MiB of memory and `registered_memory` allows {max_mib} MiB: nothing is \
         registered, the disk works without"
    )]
    TooMuch {
        /// Guest memory.
        mib: u64,
        /// The limit.
        max_mib: u64,
    },
    /// The kernel refuses.
    ///
    /// Remedy: give the service CAP_IPC_LOCK or a larger LimitMEMLOCK=, or take `registered_memory`
    /// out.
    #[error(
        "cannot register {mib} MiB of guest memory in {regions} regions ({source}): the disk works \
         without. Without CAP_IPC_LOCK all that the daemon's user registers, once for each queue, \
         must be within RLIMIT_MEMLOCK, which is {limit} (LimitMEMLOCK= of the service)"
    )]
    Refused {
        /// Guest memory.
        mib: u64,
        /// Number of its regions.
        regions: usize,
        /// RLIMIT_MEMLOCK.
        limit: String,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// Registers all memory of a table, if it is at most `max_bytes`, with a disk that is new.
pub(crate) fn register(
    disk: &mut dyn Disk,
    memory: &GuestMemory,
    max_bytes: u64,
    used: &Arc<Counter>,
) -> Result<(), RegistrationError> {
    let mapped = memory.mapped();
    let len_bytes = mapped.iter().map(|m| m.iov_len as u64).sum::<u64>();
    let mib = len_bytes >> 20;
    // Before anything is filled: memory that a front end only declares costs it nothing, but us.
    if len_bytes > max_bytes {
        return Err(RegistrationError::TooMuch { mib, max_mib: max_bytes >> 20 });
    }
    fill(&mapped)
        // SAFETY: the table maps these ranges now, and the caller gives the disk a successor before
        // its queue gets another table.
        .and_then(|()| unsafe { disk.set_memory(&mapped, Arc::clone(used)) })
        .map_err(|source| {
            let limit = rustix::process::getrlimit(Resource::Memlock).current;
            let limit = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes >> 10));
            RegistrationError::Refused { mib, regions: mapped.len(), limit, source }
        })
}

/// Fills memory before the kernel pins it. The kernel would fill a whole buffer at a time under a
/// lock that every thread of this process waits for when it maps memory. Does nothing before Linux
/// 5.14.
fn fill(memory: &[IoSlice]) -> io::Result<()> {
    for m in memory {
        for at in (0..m.iov_len).step_by(FILL_LEN_BYTES) {
            let (start, len) = (m.iov_base.wrapping_byte_add(at), m.iov_len - at);
            // SAFETY: mapped, and shared with the guest: it has the pages as if it had touched
            // them. Where the file ends the call fails.
            let filled = unsafe {
                rustix::mm::madvise(start, len.min(FILL_LEN_BYTES), Advice::LinuxPopulateWrite)
            };
            match filled {
                Ok(()) => {}
                Err(Errno::INVAL) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slice(start: usize, len: usize) -> IoSlice {
        IoSlice { iov_base: std::ptr::without_provenance_mut(start), iov_len: len }
    }

    #[test]
    fn what_is_more_than_io_uring_takes_is_refused_with_the_limit() {
        let all = |count: usize| [slice(1 << 40, count * BUFFER_LEN_BYTES)];
        assert_eq!(
            RegisteredBuffers::cut(&all(MAX_BUFFERS), Arc::default()).unwrap().0.len(),
            MAX_BUFFERS
        );
        let text =
            RegisteredBuffers::cut(&all(MAX_BUFFERS + 1), Arc::default()).unwrap_err().to_string();
        assert!(text.contains("16385") && text.contains("16384"), "{text}");
    }

    /// Regions in units of a third of a buffer, so that most have an odd rest.
    fn regions() -> impl Strategy<Value = Vec<IoSlice>> {
        let unit = BUFFER_LEN_BYTES / 3;
        prop::collection::vec((0usize..3, 1usize..10), 1..8).prop_map(move |parts| {
            let mut at = unit;
            let mut all = Vec::new();
            for (gap, len) in parts {
                at += gap * unit;
                all.push(slice(at, len * unit));
                at += len * unit;
            }
            all
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn a_buffer_is_found_exactly_when_all_bytes_are_in_one(
            regions in regions(),
            buf in (1usize..100, -2isize..3, 0usize..5),
        ) {
            let (list, buffers) = RegisteredBuffers::cut(&regions, Arc::default()).unwrap();
            let covered = |all: &[IoSlice]| all.iter().map(|m| m.iov_len).sum::<usize>();
            prop_assert_eq!(covered(&list), covered(&regions));
            prop_assert!(list.iter().all(|m| m.iov_len <= BUFFER_LEN_BYTES));
            let start = (buf.0 * (BUFFER_LEN_BYTES / 3)).wrapping_add_signed(buf.1);
            let buf = slice(start, buf.2);
            let inside = |m: &IoSlice| {
                let from = m.iov_base as usize;
                from <= start && start + buf.iov_len <= from + m.iov_len && start < from + m.iov_len
            };
            let wanted = list.iter().position(inside).filter(|_| buf.iov_len > 0);
            prop_assert_eq!(buffers.find(&buf).map(usize::from), wanted);
            prop_assert_eq!(buffers.used.get(), u64::from(wanted.is_some()));
        }
    }
}
