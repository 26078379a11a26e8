//! Memory table of a front end, as the rest of the daemon may read it.

use std::sync::{Arc, Mutex};

use base::peer_fd::PeerFd;
use base::sync::lock;
use queue::memory::RegionSpec;

/// Region of a front end's memory table, with its file. The file stays open for as long as this
/// lives, and with it the VM's memory: keep it no longer than needed.
#[derive(Debug, Clone)]
pub struct SharedRegion {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Length.
    pub len_bytes: u64,
    /// Offset of the region in the file.
    pub mmap_offset: u64,
    /// File as the front end sent it: it may be writable.
    pub file: Arc<PeerFd>,
}

impl SharedRegion {
    fn is(&self, spec: &RegionSpec, file: &Arc<PeerFd>) -> bool {
        (self.guest_addr, self.len_bytes, self.mmap_offset)
            == (spec.guest_addr, spec.len_bytes, spec.mmap_offset)
            && Arc::ptr_eq(&self.file, file)
    }
}

/// Function that is called after each change.
pub(crate) type Watcher = Arc<dyn Fn() + Send + Sync>;

/// Current memory table of a port's front end. The session's thread writes it when the front end
/// changes the table, which is far from the data path.
#[derive(Default)]
pub(crate) struct MemoryCell {
    table: Mutex<Option<Arc<[SharedRegion]>>>,
    watcher: Mutex<Option<Watcher>>,
}

impl MemoryCell {
    /// Returns the table of the connected front end.
    pub fn get(&self) -> Option<Arc<[SharedRegion]>> {
        lock(&self.table).clone()
    }

    /// Calls `watcher` after each change, instead of an earlier one.
    pub fn watch(&self, watcher: Watcher) {
        *lock(&self.watcher) = Some(watcher);
    }

    /// Sets the table of the connected front end.
    pub fn publish(&self, regions: &[(RegionSpec, Arc<PeerFd>)]) {
        let mut table = lock(&self.table);
        let same = table.as_ref().is_some_and(|old| {
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
        *table = Some(regions.iter().map(region).collect());
        drop(table);
        self.notify();
    }

    /// Drops the table: the front end is gone.
    pub fn clear(&self) {
        let old = lock(&self.table).take();
        if old.is_some() {
            self.notify();
        }
    }

    fn notify(&self) {
        // Not called under the lock: a watcher may read the table at once.
        let watcher = lock(&self.watcher).clone();
        if let Some(watcher) = watcher {
            watcher();
        }
    }
}
