//! Workers that change their sidecore while guests use them: no byte is lost or changed.
//!
//! Nobody tells them to move, the placer does, by load. Two more disks make that load, driven from
//! this process: two emulated guests keep no sidecore half busy. Both at once fill a sidecore, so
//! a second one is activated and one of them goes there. Then the one beside the guests' workers
//! stops, and the other takes it easy: now the guests' sidecore is the one with less to do, so all
//! that the guests use moves to the other one, and it is parked.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use frontend::Reach;
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::ring::RingShape;
use lab::Vm;
use lab::{Daemon, Disk, Guest, Image, Lab, Net, Vsock};
use serde_json::Value;

use crate::common::{GIB, LONG, MIB, alone, amount, boot, daemon, transfer};

/// How often each worker of the guests is moved at least.
const MOVES: u64 = 6;
/// Between two looks at the daemon: it decides ten times a second, and tells nobody.
const LOOK: Duration = Duration::from_millis(50);
/// For one decision; it takes 1 to 3 s on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The ceiling keeps guests light where they are not emulated.
const GUEST: &str = "trust_domain = \"t\"\nceiling_bytes_per_s = \"64MiB\"";

/// Loads. A light one is busy a quarter of the time: more than guests need, and so little that both
/// fit one sidecore.
const OFF: u8 = 0;
const LIGHT: u8 = 1;
const FULL: u8 = 2;
const LOAD_NS: u64 = 10_000_000;
const LIGHT_PAUSE: Duration = Duration::from_millis(30);

/// A disk that is loaded as `mode` says.
struct Load {
    port: &'static str,
    mode: AtomicU8,
}

impl Load {
    const fn new(port: &'static str) -> Self {
        Self { port, mode: AtomicU8::new(OFF) }
    }

    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::Relaxed);
    }

    /// Until `ended`.
    fn drive(&self, daemon: &Daemon, ended: &AtomicBool) {
        // A load that waits for its CPU loads nobody.
        rustix::process::setpriority_process(None, -20).unwrap();
        let (packed, in_order, event_idx, indirect) = (false, false, true, false);
        let shape = RingShape { size: 64, packed, in_order, event_idx, indirect };
        let (op, depth, block_bytes) = (Op::Read, 8, 1 << 20);
        let (verify, wait, huge, seed) = (false, true, false, 7);
        let run = DiskRun { op, shape, block_bytes, depth, verify, wait, huge, seed };
        let socket = daemon.socket("load", self.port);
        let mut disk = DiskLoad::start(Reach::Dial(&socket), run).unwrap();
        while !ended.load(Ordering::Relaxed) {
            let mode = self.mode.load(Ordering::Relaxed);
            if mode != OFF {
                assert_eq!(disk.run(LOAD_NS).unwrap().errors, 0);
            }
            if mode != FULL {
                std::thread::sleep(LIGHT_PAUSE);
            }
        }
        disk.stop().unwrap();
    }
}

/// Status of the daemon's placement.
struct Placed(Value);

impl Placed {
    fn count(&self, name: &str) -> u64 {
        self.0["placement"][name].as_u64().unwrap()
    }

    fn workers(&self, is: impl Fn(&str) -> bool) -> Vec<&Value> {
        let all = self.0["workers"].as_array().unwrap();
        all.iter().filter(|w| is(w["name"].as_str().unwrap())).collect()
    }

    fn sidecore(&self, start: &str) -> u64 {
        self.workers(|name| name.starts_with(start))[0]["sidecore"].as_u64().unwrap()
    }

    /// Moves of the guests' worker that was moved least.
    fn least_moves(&self) -> u64 {
        let of_guests = self.workers(|name| !name.starts_with("disk load/"));
        assert_eq!(of_guests.len(), 4, "switch, vsock, two disks: {of_guests:?}");
        of_guests.iter().map(|w| w["moves"].as_u64().unwrap()).min().unwrap()
    }
}

/// Waits until the daemon has activated or parked once more than `before`.
fn wait_for(daemon: &Daemon, name: &str, before: &Placed) -> Placed {
    let until = Instant::now() + PATIENCE;
    loop {
        let now = Placed(daemon.status().unwrap());
        if now.count(name) > before.count(name) {
            return now;
        }
        let shown = now.0["sidecores"].to_string();
        assert!(Instant::now() < until, "no {name}: {shown}\n{}", daemon.log_tail(20));
        std::thread::sleep(LOOK);
    }
}

/// Loads until every worker of the guests was moved often enough.
fn move_all(daemon: &Daemon, loads: &[Load; 2]) {
    let mut now = Placed(daemon.status().unwrap());
    while now.least_moves() < MOVES {
        loads.iter().for_each(|load| load.set(FULL));
        now = wait_for(daemon, "activations", &now);
        let guests = now.sidecore("switch ");
        for load in loads {
            let away = now.sidecore(&format!("disk load/{} ", load.port)) != guests;
            load.set(if away { LIGHT } else { OFF });
        }
        now = wait_for(daemon, "parks", &now);
        println!("placement {}, least moves {}", now.0["placement"], now.least_moves());
    }
}

fn start(lab: &Lab, cpus: &[usize]) -> Daemon {
    let vm = |name: &str, cid| {
        let path = lab.scratch(&format!("{name}.img"), GIB).unwrap();
        let disk = format!("format = \"raw\"\npath = {:?}", path.display());
        Vm::new(name, GUEST).net("n", "switch = \"lan\"").disk("d", &disk).vsock(cid)
    };
    let memory = "format = \"memory\"\nsize = \"64MiB\"";
    daemon("d")
        .host_cpus(cpus)
        .sidecore("count = 2\nmin = 1")
        .switch("lan", "")
        .vm(vm("a", 11))
        .vm(vm("b", 12))
        .vm(Vm::new("load", "").disk("x", memory).disk("y", memory))
        .start(lab)
        .unwrap()
}

fn guests(lab: &Lab, daemon: &Daemon, cpus: &[usize]) -> [Guest; 2] {
    let guest = |name: &str, last: u8| {
        Guest::builder(name)
            .host_cpus(cpus)
            .image(Image::builder().program("fio"))
            .net(Net::vhost_user(daemon.socket(name, "n")))
            .address(format!("10.0.0.{last}/24"))
            .disk(Disk::vhost_user(daemon.socket(name, "d")))
            .vsock(Vsock::vhost_user(daemon.socket(name, "vsock")))
    };
    boot(lab, [guest("a", 1), guest("b", 2)])
}

/// Writes and checks again and again; how often.
fn fio(guest: &Guest, ended: &AtomicBool) -> u64 {
    let script = "fio --name=v --filename=/dev/vda --rw=randwrite --bs=4k --size=16m --direct=1 \
                  --ioengine=libaio --iodepth=16 --fsync=64 --verify=crc32c --verify_fatal=1 \
                  --output-format=terse && echo verified";
    let mut times = 0;
    while !ended.load(Ordering::Relaxed) {
        let output = guest.run_for(script, LONG).unwrap().ok().unwrap();
        assert_eq!(output.lines().last(), Some("verified"));
        times += 1;
    }
    times
}

/// A way between the guests: its kind, the address of each, the full amount for one direction.
type Way = (&'static str, [&'static str; 2], u64);
const NETWORK: Way = ("tcp", ["10.0.0.1", "10.0.0.2"], GIB);
const VSOCK: Way = ("vsock", ["11:9000", "12:9000"], 512 * MIB);

/// Sends in both directions again and again; how often.
fn exchange([a, b]: [&Guest; 2], (kind, at, full_bytes): Way, ended: &AtomicBool) -> u64 {
    let mut times = 0;
    while !ended.load(Ordering::Relaxed) {
        transfer(a, b, kind, at[1], amount(full_bytes));
        transfer(b, a, kind, at[0], amount(full_bytes));
        times += 1;
    }
    times
}

#[test]
fn what_guests_use_moves_between_sidecores_under_load() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let cpus = base::cpu::allowed_cpus().unwrap();
    // Where the kernel shares CPUs out among sessions first (sched(7), "The autogroup feature"),
    // what others run on this machine counts as one of them.
    let _ = std::fs::write("/proc/self/autogroup", "-20");
    // A sidecore that waits for its CPU is not saturated: guests have one of their own.
    let daemon = start(&lab, &cpus[cpus.len() - 1..]);
    let [a, b] = guests(&lab, &daemon, &cpus[..1]);
    let (loads, ended) = ([Load::new("x"), Load::new("y")], AtomicBool::new(false));
    std::thread::scope(|scope| {
        let drivers = loads.each_ref().map(|load| scope.spawn(|| load.drive(&daemon, &ended)));
        let writers = [&a, &b].map(|guest| scope.spawn(|| fio(guest, &ended)));
        let streams = [NETWORK, VSOCK].map(|way| {
            let (a, b, ended) = (&a, &b, &ended);
            scope.spawn(move || exchange([a, b], way, ended))
        });
        let moved = std::panic::catch_unwind(|| move_all(&daemon, &loads));
        ended.store(true, Ordering::Relaxed);
        drivers.into_iter().for_each(|driver| driver.join().unwrap());
        let (disks, nets) =
            (writers.map(|w| w.join().unwrap()), streams.map(|s| s.join().unwrap()));
        println!("checked: disks {disks:?} times, network and vsock {nets:?} times");
        moved.unwrap();
        assert!(disks.iter().chain(&nets).all(|&times| times > 0), "{disks:?} {nets:?}");
    });
    let failed = daemon.metric_sum("millrace_sidecore_failed_moves_total", &[]).unwrap();
    let moves = daemon.metric_sum("millrace_sidecore_moves_total", &[]).unwrap();
    // Four workers of the guests, and whatever the loads did.
    assert!(failed == 0.0 && moves >= (4 * MOVES) as f64, "{moves} moves, {failed} failed");
    for guest in [&a, &b] {
        guest.check().unwrap();
    }
}
