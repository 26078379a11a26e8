//! A sidecore that polls moves frames and blocks without a system call, and without an allocation.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::strace::Strace;
use common::{Daemon, Place, TWO_VMS};
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::net::{Mode, NetPair, NetRun};
use frontend::ring::RingShape;
use frontend::{FrontendError, Reach};

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
/// How long the sidecore polls without work: its `spin_us`.
const SPIN: Duration = Duration::from_millis(10);
/// System calls of a sleep, and as many more when the tracer comes.
const CALLS_PER_SLEEP: u64 = 4;

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

/// How often the sidecore went to sleep.
fn sleeps(daemon: &Daemon) -> u64 {
    daemon.get("/v1/status")["sidecores"][0]["sleeps"].as_u64().unwrap()
}

/// Repeats `run`, which says how much it did, until that is enough: how much it was.
fn repeat(mut run: impl FnMut() -> u64) -> u64 {
    let mut done = 0;
    while done < ENOUGH {
        done += run();
    }
    done
}

/// Traces the sidecore while `run` is repeated. It makes system calls to sleep only, and does that
/// only after it has polled in vain: where the front end does not get its CPU.
fn only_sleeps(place: &Place, daemon: &Daemon, run: impl FnMut() -> u64) {
    let (began, slept_before) = (Instant::now(), sleeps(daemon));
    let strace = Strace::attach(&["-p", &sidecore(daemon)], &place.path("strace.txt"));
    let done = repeat(run);
    let (calls, text) = strace.finish();
    let slept = sleeps(daemon) - slept_before;
    println!("{calls} system calls and {slept} sleeps for {done}");
    assert!(calls <= CALLS_PER_SLEEP * (slept + 1), "{slept} sleeps for {done}\n{text}");
    let most = began.elapsed().div_duration_f64(SPIN) as u64 + 1;
    assert!(slept <= most, "{slept} sleeps for {done} in {:?}", began.elapsed());
}

const NET: NetRun = NetRun {
    mode: Mode::Flood,
    shape: SHAPE,
    mergeable: false,
    frame_bytes: 64,
    verify: false,
    wait: false,
    huge: false,
};

const SHAPE: RingShape =
    RingShape { size: 256, packed: false, in_order: false, event_idx: true, indirect: false };

fn net(place: &Place, run: NetRun) -> Result<NetPair, FrontendError> {
    let (a, b) = (place.socket("a-n.sock"), place.socket("b-n.sock"));
    NetPair::start(Reach::Dial(&a), Reach::Dial(&b), run)
}

fn disk(place: &Place, shape: RingShape) -> DiskLoad {
    let (op, depth, block_bytes) = (Op::Read, 32, 4096);
    let run =
        DiskRun { op, shape, block_bytes, depth, verify: false, wait: false, huge: false, seed: 7 };
    DiskLoad::start(Reach::Dial(&place.socket("b-d.sock")), run).unwrap()
}

#[test]
fn frames_and_blocks_move_without_system_calls() {
    let place = Place::new(&format!("{SIDECORE}{TWO_VMS}"));
    let daemon = place.start();
    let mut pair = net(&place, NET).unwrap();
    only_sleeps(&place, &daemon, || pair.run(RUN_NS).unwrap().ops);
    pair.stop().unwrap();

    let mut load = disk(&place, SHAPE);
    only_sleeps(&place, &daemon, || load.run(RUN_NS).unwrap().ops);
    load.stop().unwrap();
    assert!(daemon.terminate().success());
}

/// The daemon with an allocator that aborts when the guarded thread uses it.
struct Guard {
    file: PathBuf,
}

impl Guard {
    /// Builds the allocator and starts a daemon on it.
    fn start(place: &Place) -> (Self, Daemon) {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/noalloc.c");
        let (library, file) = (place.path("noalloc.so"), place.path("guarded"));
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O2", "-fno-builtin", "-Wall", "-Werror", source, "-o"])
            .arg(&library)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", common::text(&built.stderr));
        let guard = Self { file };
        guard.set(0);
        let env = [("LD_PRELOAD", &*library), ("NOALLOC_FILE", &*guard.file)];
        let daemon = place.start_with(&env);
        // A library that cannot be loaded is only warned of.
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).unwrap();
        assert!(maps.contains("noalloc.so") && maps.contains("guarded"), "{}", place.log());
        (guard, daemon)
    }

    /// Guards a thread; 0 for none.
    fn set(&self, tid: i32) {
        let file = File::options().write(true).create(true).truncate(false).open(&self.file);
        file.unwrap().write_all_at(&tid.to_ne_bytes(), 0).unwrap();
    }

    /// Does `run` under guard, until it has done enough.
    fn during(&self, daemon: &Daemon, mut run: impl FnMut() -> u64) {
        // Rings start, and stop asking for notifications.
        run();
        self.set(sidecore(daemon).parse().unwrap());
        repeat(run);
        self.set(0);
    }
}

#[test]
fn frames_and_blocks_move_under_an_allocator_that_aborts() {
    let place = Place::new(&format!("{SIDECORE}{TWO_VMS}"));
    let (guard, daemon) = Guard::start(&place);
    for packed in [false, true] {
        let shape = RingShape { packed, ..SHAPE };
        for (mode, frame_bytes) in [(Mode::Flood, 64), (Mode::Flood, 1500), (Mode::RoundTrip, 64)] {
            let mut pair = net(&place, NetRun { shape, mode, frame_bytes, ..NET }).unwrap();
            guard.during(&daemon, || pair.run(RUN_NS).unwrap().ops);
            pair.stop().unwrap();
        }
        let mut load = disk(&place, shape);
        guard.during(&daemon, || load.run(RUN_NS).unwrap().ops);
        load.stop().unwrap();
    }
    assert!(daemon.terminate().success(), "{}", place.log());
}

/// Starting a queue allocates on the sidecore: the allocator does abort.
#[test]
fn the_allocator_aborts() {
    let place = Place::new(&format!("{SIDECORE}{TWO_VMS}"));
    let (guard, daemon) = Guard::start(&place);
    guard.set(sidecore(&daemon).parse().unwrap());
    drop(net(&place, NET));
    let status = daemon.ended();
    assert!(status.signal().is_some(), "{status}");
    assert!(place.log().contains("noalloc: "), "{}", place.log());
}
