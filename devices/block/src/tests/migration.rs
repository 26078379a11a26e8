//! Pages that a migration must be told of: those that requests wrote.

use std::os::fd::AsFd;
use std::sync::Arc;

use base::shm::SharedMemory;
use queue::dirty::{DirtyLog, LOG_PAGE_BYTES};
use queue::{GuestMemory, MemoryShare};
use sidecore::Worker;

use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Offered, Rig, RigOptions, range};

const LEN: usize = 1 << 20;

/// A migration's bitmap.
struct Bitmap(SharedMemory, Arc<DirtyLog>);

impl Bitmap {
    fn new(rig: &Rig) -> Self {
        let region = rig.driver.region();
        let len = (region.guest_addr + region.len_bytes) / LOG_PAGE_BYTES / 8 + 1;
        let shm = SharedMemory::new("log", len as usize).unwrap();
        let fd = shm.as_fd().try_clone_to_owned().unwrap();
        Self(shm, Arc::new(DirtyLog::new(&MemoryShare::new(), fd, len, 0).unwrap()))
    }

    fn is_dirty(&self, addr: u64) -> bool {
        let page = addr / LOG_PAGE_BYTES;
        assert!(((page / 8) as usize) < self.0.len_bytes());
        // SAFETY: inside the mapping, as just checked; bytes are only set meanwhile.
        let byte = unsafe { self.0.as_ptr().add((page / 8) as usize).read_volatile() };
        byte >> (page % 8) & 1 == 1
    }

    fn pages(&self, addr: u64, len: u64) -> Vec<bool> {
        (0..len.div_ceil(LOG_PAGE_BYTES))
            .map(|i| self.is_dirty(addr + i * LOG_PAGE_BYTES))
            .collect()
    }
}

/// A request with pages of its own for data and for the status byte.
fn ask(rig: &mut Rig, kind: u32, body: &[u8], room: u32) -> Offered {
    let mut readable = vec![rig.header(kind, 0)];
    if !body.is_empty() {
        readable.push(rig.driver.buffer(body));
    }
    let data = rig.driver.ram().alloc_aligned(room.max(1) as usize, LOG_PAGE_BYTES);
    let status = rig.driver.ram().alloc_aligned(1, LOG_PAGE_BYTES);
    rig.driver.ram().alloc_aligned(1, LOG_PAGE_BYTES);
    let writable = if room > 0 { vec![(data, room), (status, 1)] } else { vec![(status, 1)] };
    let id = rig.driver.offer(&readable, &writable);
    Offered { id, data, status }
}

#[test]
fn abuse_P11_what_requests_write_is_marked() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let bitmap = Bitmap::new(&rig);
        let before = ask(&mut rig, kind::IN, &[], 8192);
        assert_eq!(rig.finish(before).0, 0);
        rig.engine.set_memory(rig.driver.memory().with_log(Some(Arc::clone(&bitmap.1))));
        assert_eq!(bitmap.pages(before.data, 8192), [false, false]);

        let read = ask(&mut rig, kind::IN, &[], 3 * 4096);
        assert_eq!(rig.finish(read).0, 0);
        assert_eq!(bitmap.pages(read.data, 3 * 4096), [true; 3]);
        assert!(bitmap.is_dirty(read.status));
        let id = ask(&mut rig, kind::GET_ID, &[], 20);
        assert_eq!(rig.finish(id).0, 0);
        assert!(bitmap.is_dirty(id.data) && bitmap.is_dirty(id.status));
        // A read that fails half way has written too; the others write a status only.
        disk.state().script.push_back(Err(libc::EIO));
        let failed = ask(&mut rig, kind::IN, &[], 4096);
        assert_eq!(rig.finish(failed).0, 1);
        assert!(bitmap.is_dirty(failed.data) && bitmap.is_dirty(failed.status));
        let others: [(u32, &[u8]); 4] = [
            (kind::OUT, &[7; 512]),
            (kind::FLUSH, &[]),
            (kind::DISCARD, &range(0, 8, 0)),
            (99, &[]),
        ];
        for (kind, body) in others {
            let other = ask(&mut rig, kind, body, 0);
            rig.finish(other);
            assert!(bitmap.is_dirty(other.status), "kind {kind}");
        }
    }
}

/// The table changes under a read: it goes on with the old mappings, and is marked all the same.
#[test]
fn abuse_P11_a_read_in_flight_over_a_new_memory_table_is_marked() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        disk.state().hold = true;
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let bitmap = Bitmap::new(&rig);
        let read = ask(&mut rig, kind::IN, &[], 8192);
        rig.engine.poll(0, &mut rig.ledger);
        assert_eq!(disk.state().held.len(), 1);
        let again =
            GuestMemory::empty().with_region(rig.driver.region(), &rig.driver.fd()).unwrap();
        rig.engine.set_memory(again.with_log(Some(Arc::clone(&bitmap.1))));
        disk.let_go();
        assert_eq!(rig.finish(read).0, 0);
        assert_eq!(bitmap.pages(read.data, 8192), [true, true]);
        assert!(bitmap.is_dirty(read.status));
    }
}
