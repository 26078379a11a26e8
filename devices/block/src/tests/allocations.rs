//! The hot path allocates nothing and calls the kernel once per batch.

use sidecore::Worker;

use crate::backend::Backend;
use crate::null::NullBackend;
use crate::raw::RawBackend;
use crate::request::kind;
use crate::testing::{BOTH, Rig, alloc};

/// Rounds of 32 reads and writes; the polls' allocations after the first round.
fn allocations(backend: &dyn Backend) {
    for layout in BOTH {
        let mut rig = Rig::new(layout, backend);
        let mut in_polls = 0;
        for round in 0..20u64 {
            let mark = rig.driver.ram().mark();
            for i in 0..10 {
                rig.send(kind::OUT, i * 8, &[round as u8; 4096]);
                rig.ask(kind::IN, i * 8, 4096);
            }
            let mut finished = 0;
            while finished < 20 {
                let before = alloc::count();
                rig.engine.poll(round, &mut rig.ledger);
                if round > 0 {
                    in_polls += alloc::count() - before;
                }
                while let Some((_, written)) = rig.driver.used() {
                    assert!(written > 0);
                    finished += 1;
                }
            }
            rig.driver.ram().free_to(mark);
        }
        assert_eq!(in_polls, 0, "{} {layout:?}", backend.kind());
        assert_eq!(rig.stats.reads.get(), 200);
    }
}

#[test]
fn no_allocation_on_the_null_disk() {
    allocations(&NullBackend::new(1 << 20).unwrap());
}

#[test]
fn no_allocation_on_files() {
    for place in ["/dev/shm", "/var/tmp"] {
        let dir = tempfile::tempdir_in(place).unwrap();
        let path = dir.path().join("disk.img");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        allocations(&RawBackend::open(&path, false, false, 512).unwrap());
    }
}

#[test]
fn no_allocation_on_registered_memory() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let backend = RawBackend::open(&path, true, false, 4096).unwrap();
    allocations(&backend.registering_memory(1 << 30));
}
