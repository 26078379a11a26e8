//! Requests that their disk does within the call that takes them, and those that go the general
//! way.

use sidecore::Worker;

use crate::limits::{POLL_BUDGET_BYTES, STEP_LEN_BYTES};
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Rig, RigOptions, pattern};

const LEN: usize = 16 << 20;

/// Operations that were done at once, and all that the disk was given.
fn counts(disk: &ModelDisk) -> (usize, usize) {
    let state = disk.state();
    (state.ran, state.log.len())
}

fn disk_that_runs() -> ModelDisk {
    let disk = ModelDisk::new(LEN);
    disk.state().runs = true;
    disk
}

#[test]
fn reads_and_writes_are_over_in_the_poll_that_takes_them() {
    for layout in BOTH {
        let disk = disk_that_runs();
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let data = pattern(3, 8192);
        let write = rig.send(kind::OUT, 16, &data);
        let read = rig.ask(kind::IN, 16, 8192);
        assert_eq!(rig.engine.poll(1000, &mut rig.ledger), 2);
        assert_eq!(rig.driver.used(), Some((write.id, 1)));
        assert_eq!(rig.driver.used(), Some((read.id, 8193)));
        assert_eq!((rig.status(write), rig.status(read)), (0, 0));
        assert!(rig.driver.read(read.data, 8192) == data);
        assert_eq!(counts(&disk), (2, 2));
        let stats = &rig.stats;
        assert_eq!((stats.reads.get(), stats.writes.get(), stats.disk_ops.get()), (1, 1, 2));
        assert_eq!((stats.read_bytes.get(), stats.written_bytes.get()), (8192, 8192));
        rig.engine.poll(1700, &mut rig.ledger);
        let times = rig.stats.latency_ns.snapshot();
        assert_eq!((times.count(), times.sum()), (2, 1400));
    }
}

#[test]
fn what_the_disk_did_not_do_in_full_is_done_again_in_steps() {
    for outcome in [Err(libc::EINTR), Ok(512), Ok(0)] {
        for is_read in [true, false] {
            let disk = disk_that_runs();
            let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), RigOptions::default());
            let data = pattern(4, 4096);
            disk.state().cache[..4096].copy_from_slice(&data);
            disk.state().script.push_back(outcome);
            match is_read {
                true => assert!(rig.read(0, 4096) == data),
                false => rig.write(0, &data),
            }
            assert!(disk.state().cache[..4096] == data);
            assert_eq!(counts(&disk), (1, 2));
            assert_eq!(rig.stats.io_errors.get(), 0);
        }
    }
}

#[test]
fn an_error_reaches_the_guest_once() {
    let disk = disk_that_runs();
    let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), RigOptions::default());
    disk.state().script.extend([Err(libc::EIO), Err(libc::EIO)]);
    let read = rig.ask(kind::IN, 0, 512);
    assert_eq!(rig.finish(read).0, 1);
    assert_eq!((rig.stats.reads.get(), rig.stats.io_errors.get()), (1, 1));
}

#[test]
fn what_needs_more_than_one_operation_goes_the_general_way() {
    let disk = disk_that_runs();
    let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), RigOptions::default());
    let long = STEP_LEN_BYTES as usize + 512;
    rig.write(0, &pattern(5, long));
    assert!(rig.read(0, long) == pattern(5, long));
    let flush = rig.send(kind::FLUSH, 0, &[]);
    assert_eq!(rig.finish(flush).0, 0);
    assert_eq!(disk.state().ran, 0);
    rig.engine.set_writeback(false);
    rig.write(0, &pattern(6, 512));
    let ops: Vec<_> = disk.state().log.iter().rev().take(2).map(|op| op.0).collect();
    assert_eq!(ops, ["flush", "write"]);
    assert_eq!(disk.state().ran, 0);
    rig.read(0, 512);
    assert_eq!(disk.state().ran, 1);
}

#[test]
fn a_poll_moves_no_more_than_its_budget() {
    for layout in BOTH {
        let disk = disk_that_runs();
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let most = (POLL_BUDGET_BYTES + u64::from(STEP_LEN_BYTES)) as usize;
        (0..8).for_each(|_| _ = rig.ask(kind::IN, 0, 512 << 10));
        // Its steps wait beside the others.
        rig.ask(kind::IN, 0, 3 << 20);
        let mut done = 0;
        for now_ns in 1..100 {
            let before: u64 = disk.state().log.iter().map(|op| op.2).sum();
            rig.engine.poll(now_ns, &mut rig.ledger);
            let after: u64 = disk.state().log.iter().map(|op| op.2).sum();
            assert!((after - before) as usize <= most, "a poll has a budget");
            done += std::iter::from_fn(|| rig.driver.used()).count();
        }
        assert_eq!((done, counts(&disk).0), (9, 8));
    }
}
