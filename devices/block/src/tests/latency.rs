//! The time of requests, in a time that the test makes.

use sidecore::Worker;

use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Rig, RigOptions};

#[test]
fn a_request_takes_from_its_poll_to_the_poll_after_its_completion() {
    for layout in BOTH {
        let disk = ModelDisk::new(1 << 20);
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        disk.state().hold = true;
        rig.ask(kind::IN, 0, 512);
        rig.ask(kind::IN, 8, 512);
        rig.engine.poll(1000, &mut rig.ledger);
        disk.finish_one(0);
        rig.engine.poll(5000, &mut rig.ledger);
        let count = |rig: &Rig| rig.stats.latency_ns.snapshot().count();
        // Completed, but how long that took is known to the next poll.
        assert_eq!((rig.stats.reads.get(), count(&rig)), (1, 0));
        disk.let_go();
        rig.engine.poll(6000, &mut rig.ledger);
        rig.engine.poll(9000, &mut rig.ledger);
        rig.engine.poll(10_000, &mut rig.ledger);
        let times = rig.stats.latency_ns.snapshot();
        assert_eq!((times.count(), times.sum()), (2, 5000 + 8000));
    }
}

#[test]
fn refused_requests_count_too() {
    let disk = ModelDisk::new(1 << 20);
    let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), RigOptions::default());
    (0..8).for_each(|_| _ = rig.send(77, 0, &[]));
    rig.engine.poll(100, &mut rig.ledger);
    rig.engine.poll(300, &mut rig.ledger);
    let times = rig.stats.latency_ns.snapshot();
    assert_eq!((times.count(), times.sum()), (8, 1600));
}
