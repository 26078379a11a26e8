//! A sidecore that polls moves frames and blocks without a system call.
#![allow(clippy::unwrap_used)]

mod common;

use common::strace::Strace;
use common::{Daemon, Place, TWO_VMS};
use frontend::Reach;
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::net::{Mode, NetPair, NetRun};
use frontend::ring::RingShape;

const SIDECORE: &str = "
[sidecore]
count=1
spin_us=10000
spin='fixed'
yield=false
";

/// Between two looks at how much was done.
const RUN_NS: u64 = 10_000_000;
/// Frames or requests.
const ENOUGH: u64 = 100_000;
/// A front end that does not get its CPU for longer than the sidecore polls lets it sleep and wake;
/// and the tracer itself restarts a call.
const PER_CALL: u64 = 1000;

/// Number of the thread of the only sidecore.
fn sidecore(daemon: &Daemon) -> String {
    let tasks = format!("/proc/{}/task", daemon.pid());
    let mut threads = std::fs::read_dir(tasks).unwrap().map(|t| t.unwrap().path());
    let is_core = |t: &std::path::PathBuf| {
        std::fs::read_to_string(t.join("comm")).unwrap().starts_with("sidecore")
    };
    let thread = threads.find(is_core).unwrap();
    thread.file_name().unwrap().to_str().unwrap().into()
}

/// System calls of the sidecore while `run`, which says how much it did, is repeated.
fn calls(place: &Place, daemon: &Daemon, mut run: impl FnMut() -> u64) {
    let strace = Strace::attach(&["-p", &sidecore(daemon)], &place.path("strace.txt"));
    let mut done = 0;
    while done < ENOUGH {
        done += run();
    }
    let (calls, text) = strace.finish();
    println!("{calls} system calls for {done}");
    assert!(calls < done / PER_CALL, "{calls} system calls for {done}\n{text}");
}

#[test]
fn frames_and_blocks_move_without_system_calls() {
    let place = Place::new(&format!("{SIDECORE}{TWO_VMS}"));
    let daemon = place.start();
    let shape =
        RingShape { size: 256, packed: false, in_order: false, event_idx: true, indirect: false };
    let (a, b) = (place.socket("a-n.sock"), place.socket("b-n.sock"));
    let run = NetRun {
        mode: Mode::Flood,
        shape,
        mergeable: false,
        frame_bytes: 64,
        verify: false,
        wait: false,
        huge: false,
    };
    let mut pair = NetPair::start(Reach::Dial(&a), Reach::Dial(&b), run).unwrap();
    calls(&place, &daemon, || pair.run(RUN_NS).unwrap().ops);
    pair.stop().unwrap();

    let (op, depth, block_bytes) = (Op::Read, 32, 4096);
    let run =
        DiskRun { op, shape, block_bytes, depth, verify: false, wait: false, huge: false, seed: 7 };
    let mut load = DiskLoad::start(Reach::Dial(&place.socket("b-d.sock")), run).unwrap();
    calls(&place, &daemon, || load.run(RUN_NS).unwrap().ops);
    load.stop().unwrap();
    assert!(daemon.terminate().success());
}
