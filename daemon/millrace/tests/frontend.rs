//! Every ring format in use at full speed, every byte compared: the real daemon under the driver in
//! user space that the benchmarks use.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, TWO_VMS};
use frontend::Reach;
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::net::{Mode, NetPair, NetRun};
use frontend::report::Report;
use frontend::ring::RingShape;

const SIDECORE: &str = "
[sidecore]
count=1
spin_us=1000
";

/// Between two looks at how much was done.
const RUN_NS: u64 = 10_000_000;
/// Size of all rings.
const QUEUE_SIZE: u16 = 64;
/// Rings wrap several times.
const ENOUGH: u64 = 200;

/// Runs until enough was done, however slow the machine is; a back end that does nothing at all is
/// an error of the run.
fn run_enough(mut run: impl FnMut(u64) -> Report) {
    let mut ops = 0;
    while ops < ENOUGH {
        let report = run(RUN_NS);
        assert!(report.verified, "{report:?}");
        // A full receiver makes its senders wait: nothing is dropped between two VMs.
        assert_eq!((report.lost, report.errors), (0, 0), "{report:?}");
        ops += report.ops;
    }
}

#[test]
fn frames_arrive_whole_and_in_order_in_every_ring_format() {
    let place = Place::new(&format!("{SIDECORE}{TWO_VMS}"));
    let daemon = place.start();
    let (a, b) = (place.socket("a-n.sock"), place.socket("b-n.sock"));
    let run = |run: NetRun| {
        let mut pair = NetPair::start(Reach::Dial(&a), Reach::Dial(&b), run).unwrap();
        run_enough(|ns| pair.run(ns).unwrap_or_else(|e| panic!("{run:?}: {e}")));
        pair.stop().unwrap();
    };
    for shape in RingShape::all(QUEUE_SIZE) {
        for (mergeable, frame_bytes) in [(false, 64), (true, 1500), (true, 65_000)] {
            for (mode, wait) in [(Mode::Flood, false), (Mode::Flood, true), (Mode::RoundTrip, true)]
            {
                let huge = false;
                run(NetRun { mode, shape, mergeable, frame_bytes, verify: true, wait, huge });
            }
        }
    }
    assert!(daemon.terminate().success());
}

#[test]
fn blocks_keep_their_content_in_every_ring_format() {
    let place = Place::new(&format!("{SIDECORE}{TWO_VMS}"));
    let daemon = place.start();
    let socket = place.socket("b-d.sock");
    // Disks finish in any order: in-order rings are not offered.
    for shape in RingShape::all(QUEUE_SIZE).filter(|s| !s.in_order) {
        for (op, depth, wait) in [(Op::Mixed, 8, false), (Op::Mixed, 16, true), (Op::Read, 1, true)]
        {
            let (block_bytes, huge, seed) = (4096, false, 7);
            let run = DiskRun { op, shape, block_bytes, depth, verify: true, wait, huge, seed };
            let mut load = DiskLoad::start(Reach::Dial(&socket), run).unwrap();
            run_enough(|ns| load.run(ns).unwrap_or_else(|e| panic!("{run:?}: {e}")));
            load.stop().unwrap();
        }
    }
    assert!(daemon.terminate().success());
}
