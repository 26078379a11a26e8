//! Front ends that attack the daemon in all ways at once, beside others that must not notice: ports
//! come and go, disks answer, no sidecore stands. `MILLRACE_SOAK=1` does it for half an hour.
#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Daemon, Place};
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::ring::RingShape;
use frontend::{Reach, hostile};
use serde_json::{Value, json};

const CONFIG: &str = "
[sidecore]
count = 1
[[switch]]
name = 'lan'
[[vm]]
name = 'bad'
[[vm.net]]
name = 'n'
switch = 'lan'
[[vm.disk]]
name = 'd'
format = 'memory'
size = '64MiB'
[vm.vsock]
cid = 9
path = '@/guest'
[[vm]]
name = 'good'
[[vm.disk]]
name = 'd'
format = 'memory'
size = '64MiB'
";

/// Time of a step of load at a disk of the good VM.
const STEP_NS: u64 = 50_000_000;

/// Attaches a disk, uses it, and detaches it; how long both changes took.
fn comes_and_goes(place: &Place, daemon: &Daemon) -> [Duration; 2] {
    let body = json!({"disk": {"name": "x", "format": "memory", "size": "1MiB",
        "socket": place.socket("x.sock")}});
    let began = Instant::now();
    assert_eq!(daemon.ask("POST", "/v1/vms/new/ports", Some(body)).status, 201);
    let attached = began.elapsed();
    let mut disk = load(&place.socket("x.sock"));
    assert_eq!(disk.run(STEP_NS / 5).unwrap().errors, 0);
    disk.stop().unwrap();
    let began = Instant::now();
    assert!(daemon.ask("DELETE", "/v1/vms/new/ports/x", None).status < 300);
    [attached, began.elapsed()]
}

fn load(socket: &Path) -> DiskLoad {
    let (packed, in_order, event_idx, indirect) = (false, false, true, false);
    let shape = RingShape { size: 64, packed, in_order, event_idx, indirect };
    let (op, depth, block_bytes) = (Op::Write, 8, 4096);
    let (verify, wait, huge, seed) = (true, true, false, 7);
    let run = DiskRun { op, shape, block_bytes, depth, verify, wait, huge, seed };
    DiskLoad::start(Reach::Dial(socket), run).unwrap()
}

fn total(daemon: &Daemon, what: &str) -> u64 {
    let status: Value = daemon.get("/v1/status");
    status["sidecores"].as_array().unwrap().iter().map(|core| core[what].as_u64().unwrap()).sum()
}

#[test]
fn abuse_V_hostile_front_ends_hold_up_nobody() {
    let is_soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let steps = if is_soak { 36_000 } else { 100 };
    let place = Place::new(CONFIG);
    let daemon = place.start();
    let pid = daemon.pid();
    let (ended, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for name in ["bad-n.sock", "bad-d.sock", "bad-vsock.sock"] {
            let (path, ended, rounds) = (place.socket(name), &ended, &rounds);
            assert!(path.exists(), "{}", path.display());
            scope.spawn(move || hostile::attack(&path, ended, rounds).unwrap());
        }
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut disk = load(&place.socket("good-d.sock"));
            let mut slowest = [Duration::ZERO; 2];
            for step in 0..steps {
                assert_eq!(disk.run(STEP_NS).unwrap().errors, 0);
                if step % 10 == 0 {
                    let took = comes_and_goes(&place, &daemon);
                    slowest = [0, 1].map(|change: usize| slowest[change].max(took[change]));
                    if took.iter().any(|took| *took > Duration::from_millis(300)) {
                        println!("step {step}: attach and detach took {took:?}");
                    }
                }
            }
            disk.stop().unwrap();
            println!("slowest attach and detach {slowest:?}");
        }));
        ended.store(true, Ordering::Relaxed);
        checked.unwrap();
    });
    println!("{rounds:?} rounds of attacks");
    assert!(rounds.load(Ordering::Relaxed) > 0);
    assert_eq!(daemon.pid(), pid);
    assert_eq!((total(&daemon, "stalls"), total(&daemon, "panics")), (0, 0));
    assert_eq!(daemon.port("good", "d")["health"], "ok");
    let log = place.log();
    assert!(log.lines().count() < 3000 + steps, "{} lines", log.lines().count());
    // Threads of the bad ports may hang in a close, which is theirs alone.
    daemon.kill();
}
