//! Many VMs on one sidecore: some at work, some that stall, one that is hostile.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use frontend::disk::Op;
use frontend::many::plan::{Behaviour, DevicePlan, DiskPlan, LoadPlan, NetPlan, Plan, PortPlan};
use frontend::many::{self, ManyReport};

const LENGTH_MS: u64 = 1000;
const DEPTH: usize = 4;

/// Longest hold that there can be: a driver that a busy machine keeps from its CPU is not one that
/// stalls.
const LONG_HOLD_US: u32 = 1_000_000;
/// Much less than a run takes.
const SHORT_HOLD_US: u32 = 20_000;

/// A switch with ports of these stations, each of a VM `v<station>`, and two disks.
fn config(stations: std::ops::RangeInclusive<u16>, hold_us: u32) -> String {
    let mut text = format!("[sidecore]\ncount=1\n[[switch]]\nname='lan'\nhold_us={hold_us}\n");
    for n in stations {
        text += &format!(
            "[[vm]]\nname='v{n}'\n[[vm.net]]\nname='n'\nswitch='lan'\n\
             mac='02:00:00:00:00:{n:02x}'\naddresses=['10.99.0.{n}']\n"
        );
    }
    for name in ["busy", "lazy"] {
        text += &format!(
            "[[vm]]\nname='{name}'\n[[vm.disk]]\nname='d'\nformat='memory'\nsize='8MiB'\n"
        );
    }
    text
}

fn net(place: &Place, behaviour: Behaviour, from: u16, to: Option<u16>) -> LoadPlan {
    let port = |n: u16| PortPlan { socket: place.socket(&format!("v{n}-n.sock")), station: n };
    let plan = NetPlan { from: port(from), to: to.map(port), frame_bytes: 256 };
    let device = DevicePlan::Net(plan);
    LoadPlan { vm: format!("v{from}"), device, behaviour, start_ms: 0, stop_ms: None }
}

fn disk(place: &Place, behaviour: Behaviour, vm: &str) -> LoadPlan {
    let socket = place.socket(&format!("{vm}-d.sock"));
    let plan = DiskPlan { socket, op: Op::Mixed, block_bytes: 4096, depth: DEPTH };
    let device = DevicePlan::Disk(plan);
    LoadPlan { vm: vm.into(), device, behaviour, start_ms: 0, stop_ms: None }
}

fn run(loads: Vec<LoadPlan>) -> ManyReport {
    let (window_ms, latency_window_ms) = (10, 100);
    let plan = Plan {
        length_ms: LENGTH_MS,
        window_ms,
        latency_window_ms,
        queue_size: 64,
        hugepages: false,
        loads,
    };
    let report = many::run(&plan).unwrap();
    for load in &report.loads {
        assert_eq!(load.window_ops.len(), 100);
        assert_eq!(load.window_ops.iter().sum::<u64>(), load.ops);
        let counted = load.latency.map(|l| l.count);
        assert!(counted.is_none_or(|n| n == load.ops), "{load:?}");
    }
    report
}

#[test]
fn one_thread_drives_senders_disks_and_round_trips_of_many_vms() {
    let place = Place::new(&config(1..=7, LONG_HOLD_US));
    let daemon = place.start();
    let report = run(vec![
        net(&place, Behaviour::Saturate, 1, Some(3)),
        LoadPlan { start_ms: 500, ..net(&place, Behaviour::Saturate, 2, Some(3)) },
        net(&place, Behaviour::Saturate, 4, Some(7)),
        net(&place, Behaviour::RoundTrip, 5, Some(6)),
        disk(&place, Behaviour::Saturate, "busy"),
    ]);
    let [a, late, b, rr, disk] = &report.loads[..] else { unreachable!() };
    for load in &report.loads {
        assert!(load.ops > 0 && load.lost == 0 && load.errors == 0, "{load:?}");
    }
    // What is under way in the end was taken and has not arrived, or the other way round.
    for load in [a, late, b] {
        assert!(load.ops.abs_diff(load.taken) <= 2 * 64, "{load:?}");
        assert_eq!(load.bytes, load.ops * 256);
    }
    assert!(late.window_ops[..50].iter().all(|n| *n == 0), "{late:?}");
    assert_eq!(disk.bytes, disk.ops * 4096);
    assert_eq!(rr.window_latency.len(), 10);
    // Everything is disconnected in order: nothing of it broke a ring.
    let ports = daemon.get("/v1/ports");
    assert!(ports.as_array().unwrap().iter().all(|p| p["error"].is_null()), "{ports:#}");
}

#[test]
fn those_that_stall_or_flood_stop_nobody() {
    let place = Place::new(&config(1..=7, SHORT_HOLD_US));
    let _daemon = place.start();
    let report = run(vec![
        net(&place, Behaviour::RoundTrip, 1, Some(2)),
        disk(&place, Behaviour::RoundTrip, "busy"),
        net(&place, Behaviour::Saturate, 3, Some(4)),
        net(&place, Behaviour::Stall, 5, Some(6)),
        net(&place, Behaviour::HostileFlood, 7, None),
        LoadPlan { stop_ms: Some(LENGTH_MS / 2), ..disk(&place, Behaviour::Stall, "lazy") },
    ]);
    let [rr, busy, sender, stall, hostile, lazy] = &report.loads[..] else { unreachable!() };
    for load in [rr, busy, sender] {
        assert!(load.ops > 0 && load.errors == 0, "{load:?}");
    }
    // Broadcasts that reach the sink too are not counted as the sender's.
    assert!(sender.ops <= sender.taken + 2 * 64, "{sender:?}");
    // Sent, held for a while and thrown away.
    assert!(stall.taken > 64, "{stall:?}");
    assert!(hostile.taken > 64 && hostile.kicks > hostile.taken / 64, "{hostile:?}");
    assert_eq!(lazy.ops, DEPTH as u64, "taken when its time was over: {lazy:?}");
}
