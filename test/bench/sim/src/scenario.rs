//! Scenarios that are simulated, by name.

use sidecore::Settings;
use sidecore::placement::Limits;

use crate::engine::run;
use crate::load::{Kind, Source, Vm};
use crate::report::{Report, Run};
use crate::setup::{Nodes, Options, Setup};

fn setup(options: &Options, vms: Vec<Vm>) -> Setup {
    Setup {
        vms,
        cores: 1,
        begin_on: 1,
        limits: None,
        spin_ns: 50_000,
        adapts: true,
        cost: options.cost.clone(),
        seed: options.seed,
        warm_up_ns: 1_000_000_000,
        length_ns: options.seconds * 1_000_000_000,
        factors: Vec::new(),
        nodes: None,
    }
}

fn simulate(name: &str, setup: &Setup) -> Run {
    Run::new(name, setup, &run(setup))
}

/// One I/O thread per VM, each with a CPU of its own and asleep when idle, as vhost has it; against
/// 1, 2 and 4 sidecores.
fn against_threads(options: &Options, vms: Vec<Vm>) -> Vec<Run> {
    let count = vms.len();
    let base = setup(options, vms);
    let threads = Setup { cores: count, begin_on: count, spin_ns: 0, ..base.clone() };
    let mut runs = vec![simulate(&format!("{count} I/O threads"), &threads)];
    for cores in [1, 2, 4] {
        let limits = Some(Limits::new(1, cores));
        let sidecores = Setup { cores, limits, ..base.clone() };
        let plural = if cores == 1 { "" } else { "s" };
        runs.push(simulate(&format!("{cores} sidecore{plural}"), &sidecores));
    }
    runs
}

/// Eight VMs with uneven load: two that move bulk, two in bursts, two that wait for answers, two
/// with disks. Together they ask for one to two CPUs.
pub fn consolidate(options: &Options) -> Report {
    let bulk = Source::Closed { window: 16, think_ns: 40_000.0 };
    let burst = Source::OnOff { rate: 400_000.0, on_ns: 2e7, off_ns: 6e7 };
    let answers = Source::Closed { window: 1, think_ns: 20_000.0 };
    let disk = Source::Closed { window: 32, think_ns: 200_000.0 };
    let vms = [
        Vm::new("bulk", Kind::Net, 65_536, bulk),
        Vm::new("burst", Kind::Net, 1500, burst),
        Vm::new("request", Kind::Net, 64, answers),
        Vm::new("disk", Kind::Disk, 4096, disk),
    ];
    let vms = vms.iter().cycle().take(8).cloned().collect();
    Report::new("consolidate", options, against_threads(options, vms))
}

/// 1,000 VMs on up to 64 sidecores, rates by Zipf's law, the sum falling to a quarter and rising
/// again. A request of 1 MiB stands for a batch.
pub fn scale(options: &Options) -> Report {
    let follows = crowd(options);
    let fixed = Setup { begin_on: 64, limits: None, ..follows.clone() };
    let all = Setup { limits: Some(Limits::new(64, 64)), ..fixed.clone() };
    let runs = vec![
        simulate("64, nothing moves", &fixed),
        simulate("64, VMs move", &all),
        simulate("1 to 64", &follows),
    ];
    Report::new("scale", options, runs)
}

/// The load of [`scale`], with as many sidecores active as it needs.
fn crowd(options: &Options) -> Setup {
    const VMS: u32 = 1000;
    /// Demand of all VMs together, in CPUs, at full load.
    const ASKED: f64 = 24.0;
    const EXPONENT: f64 = 0.6;
    let len_bytes = 1 << 20;
    let shares: Vec<f64> = (1..=VMS).map(|rank| f64::from(rank).powf(-EXPONENT)).collect();
    let sum: f64 = shares.iter().sum();
    let each_ns = (options.cost.net_ns + 1024 * options.cost.net_kib_ns) as f64;
    let source = |share: &f64| Source::Poisson { rate: ASKED * share / sum * 1e9 / each_ns };
    let vms =
        shares.iter().map(|share| Vm::new("zipf", Kind::Net, len_bytes, source(share))).collect();
    let base = setup(options, vms);
    let third_ns = base.length_ns / 3;
    let factors = vec![(base.warm_up_ns + third_ns, 0.25), (base.warm_up_ns + 2 * third_ns, 1.0)];
    Setup { factors, cores: 64, limits: Some(Limits::new(1, 64)), ..base }
}

/// One sidecore, different polling times, loads with different pauses: what latency costs in CPU.
pub fn sleep(options: &Options) -> Report {
    let spins = [
        ("none", 0, false),
        ("20 µs", 20_000, false),
        ("50 µs", 50_000, false),
        ("up to 50 µs", 50_000, true),
        ("200 µs", 200_000, false),
        ("up to 200 µs", 200_000, true),
    ];
    let loads = [
        ("think 15 µs", Source::Closed { window: 1, think_ns: 15_000.0 }),
        ("think 100 µs", Source::Closed { window: 1, think_ns: 100_000.0 }),
        ("think 2 ms", Source::Closed { window: 1, think_ns: 2_000_000.0 }),
        ("bursts", Source::OnOff { rate: 50_000.0, on_ns: 2e6, off_ns: 2e7 }),
    ];
    let mut runs = Vec::new();
    for (load, source) in loads {
        let base = setup(options, vec![Vm::new("request", Kind::Net, 64, source)]);
        for (spin, spin_ns, adapts) in spins {
            let one = Setup { spin_ns, adapts, ..base.clone() };
            runs.push(simulate(&format!("{load}: {spin}"), &one));
        }
    }
    Report::new("sleep", options, runs)
}

/// One sidecore that is asked for more than it can do: who gets how much. `share_error` is how far
/// a VM's bytes are from what its weight gives it of its class's. Every ring holds more than a
/// quantum: a VM that has less to do in a round than its weight is worth leaves the rest to others.
pub fn shares(options: &Options) -> Report {
    let ask = Source::Closed { window: 256, think_ns: 10_000.0 };
    let weighed = |class, len_bytes, weight| {
        let grant = Settings { weight, ..Settings::default() };
        Vm { grant, ..Vm::new(class, Kind::Net, len_bytes, ask.clone()) }
    };
    let three = |len_bytes| [100, 200, 400].map(|w| weighed("bulk", len_bytes, w)).to_vec();
    let all = |vms| Setup { warm_up_ns: 200_000_000, ..setup(options, vms) };
    let one = |name: &str, vms| simulate(name, &all(vms));

    let mut mixed = three(1500);
    mixed[1].kind = Kind::Disk;
    (mixed[0].len_bytes, mixed[1].len_bytes) = (64, 16 << 10);
    let newcomer = {
        let mut vms = three(1500);
        let base = all(Vec::new());
        vms[2].from_ns = base.warm_up_ns;
        Setup { vms, length_ns: 100_000_000, ..base }
    };
    let alone = vec![weighed("bulk", 1500, 1)];
    let mut active = alone.clone();
    let idle = Source::Poisson { rate: 10.0 };
    active.extend(vec![Vm { source: idle, ..weighed("idle", 64, 10_000) }; 99]);
    let mut ceiling = three(1500);
    ceiling[2].class = "ceiling";
    ceiling[2].grant.ceiling_bytes_per_s = 100_000_000;
    let thousand = |n: u32| Vm {
        source: Source::Closed { window: 128, think_ns: 100_000.0 },
        ..weighed("bulk", 1500, 100u32 << (n % 3))
    };
    let runs = vec![
        one("1:2:4, 64 bytes", three(64)),
        one("1:2:4, 1500 bytes", three(1500)),
        one("1:2:4, 64 KiB", three(65_536)),
        one("1:2:4, mixed", mixed),
        simulate("a newcomer's 100 ms", &newcomer),
        one("alone", alone),
        one("one active of 100", active),
        one("ceiling 100 MB/s", ceiling),
        one("1,000 VMs, 1:2:4", (0..1000).map(thousand).collect()),
    ];
    Report::new("shares", options, runs)
}

/// Two NUMA nodes with two sidecores each, and eight VMs that move bulk: those with odd numbers
/// have their memory on the second node, and begin on sidecores of either. Two of each node ask for
/// more than the others, so that loads are uneven too. Remote requests cost 1.3 times as much.
pub fn nodes(options: &Options) -> Report {
    let bulk = |rate| Vm::new("bulk", Kind::Net, 65_536, Source::Poisson { rate });
    let rates =
        [250_000.0, 250_000.0, 250_000.0, 250_000.0, 150_000.0, 150_000.0, 150_000.0, 150_000.0];
    let vms: Vec<Vm> = rates.map(bulk).to_vec();
    let with = |known| {
        let vms_nodes = vec![0, 1, 1, 0, 0, 1, 1, 0];
        Some(Nodes { cores: vec![0, 0, 1, 1], vms: vms_nodes, far: 1.3, known })
    };
    let limits = Some(Limits::new(4, 4));
    let base = Setup { cores: 4, begin_on: 4, limits, ..setup(options, vms) };
    let runs = vec![
        simulate("nodes not known", &Setup { nodes: with(false), ..base.clone() }),
        simulate("nodes known", &Setup { nodes: with(true), ..base.clone() }),
        simulate("one node", &base),
    ];
    Report::new("nodes", options, runs)
}

/// A recording, as [`consolidate`] does it with its own loads.
pub fn replay(options: &Options, vms: Vec<Vm>) -> Report {
    Report::new("replay", options, against_threads(options, vms))
}

#[cfg(test)]
mod tests;
