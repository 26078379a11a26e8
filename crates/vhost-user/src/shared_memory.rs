//! The memory that a front end shares, as the rest of the daemon may look at it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::peer_fd::PeerFd;
use queue::memory::RegionSpec;

/// A region of a front end's memory table, with the file it is in. The file stays open for as long as
/// this is kept, and with it the VM's memory: keep it no longer than needed.
#[derive(Debug, Clone)]
pub struct SharedRegion {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub len_bytes: u64,
    /// Where it begins in the file.
    pub mmap_offset: u64,
    /// The file, as the front end sent it: it may be writable.
    pub file: Arc<PeerFd>,
}

impl SharedRegion {
    fn is(&self, spec: &RegionSpec, file: &Arc<PeerFd>) -> bool {
        (self.guest_addr, self.len_bytes, self.mmap_offset)
            == (spec.guest_addr, spec.len_bytes, spec.mmap_offset)
            && Arc::ptr_eq(&self.file, file)
    }
}

/// Who is told of changes.
pub(crate) type Watcher = Arc<dyn Fn() + Send + Sync>;

/// What a port's session shares now. Written by the session's thread when the front end changes
/// something, which is far from the data path.
#[derive(Default)]
pub(crate) struct MemoryCell {
    now: Mutex<Option<Arc<[SharedRegion]>>>,
    watcher: Mutex<Option<Watcher>>,
}

impl MemoryCell {
    /// The table of the connected front end.
    pub fn get(&self) -> Option<Arc<[SharedRegion]>> {
        lock(&self.now).clone()
    }

    /// Calls `watcher` after each change, instead of an earlier one.
    pub fn watch(&self, watcher: Watcher) {
        *lock(&self.watcher) = Some(watcher);
    }

    /// A front end is connected and has this table.
    pub fn publish(&self, regions: &[(RegionSpec, Arc<PeerFd>)]) {
        let mut now = lock(&self.now);
        let same = now.as_ref().is_some_and(|old| {
            old.len() == regions.len()
                && old.iter().zip(regions).all(|(old, (spec, file))| old.is(spec, file))
        });
        if same {
            return;
        }
        let region = |(spec, file): &(RegionSpec, Arc<PeerFd>)| SharedRegion {
            guest_addr: spec.guest_addr,
            len_bytes: spec.len_bytes,
            mmap_offset: spec.mmap_offset,
            file: Arc::clone(file),
        };
        *now = Some(regions.iter().map(region).collect());
        drop(now);
        self.tell();
    }

    /// The front end is gone.
    pub fn clear(&self) {
        let had = lock(&self.now).take();
        if had.is_some() {
            self.tell();
        }
    }

    fn tell(&self) {
        // Not called under the lock: a watcher may look at once.
        let watcher = lock(&self.watcher).clone();
        if let Some(watcher) = watcher {
            watcher();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is half done in these values when a thread panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
