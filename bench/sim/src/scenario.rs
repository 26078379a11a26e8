//! What is simulated, by name.

use sidecore::placement::Limits;

use crate::engine::{Cost, NoCredits, Setup, run};
use crate::load::{Kind, Source, Vm};
use crate::report::{Report, Run};

/// What can be told from outside.
#[derive(Debug, Clone)]
pub struct Options {
    /// Of all random numbers.
    pub seed: u64,
    /// Virtual seconds that are counted.
    pub seconds: u64,
    /// What things cost.
    pub cost: Cost,
}

fn vm(class: &'static str, kind: Kind, len_bytes: u32, source: Source) -> Vm {
    Vm { class, source, kind, len_bytes }
}

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
    }
}

fn simulate(name: &str, setup: &Setup) -> Run {
    Run::new(name, setup, &run(setup, &mut NoCredits))
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
        vm("bulk", Kind::Net, 65_536, bulk),
        vm("burst", Kind::Net, 1500, burst),
        vm("request", Kind::Net, 64, answers),
        vm("disk", Kind::Disk, 4096, disk),
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
    /// Of all VMs together, in CPUs, at full load.
    const ASKED: f64 = 24.0;
    const EXPONENT: f64 = 0.6;
    let len_bytes = 1 << 20;
    let shares: Vec<f64> = (1..=VMS).map(|rank| f64::from(rank).powf(-EXPONENT)).collect();
    let sum: f64 = shares.iter().sum();
    let each_ns = (options.cost.net_ns + 1024 * options.cost.net_kib_ns) as f64;
    let source = |share: &f64| Source::Poisson { rate: ASKED * share / sum * 1e9 / each_ns };
    let vms = shares.iter().map(|share| vm("zipf", Kind::Net, len_bytes, source(share))).collect();
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
        let base = setup(options, vec![vm("request", Kind::Net, 64, source)]);
        for (spin, spin_ns, adapts) in spins {
            let one = Setup { spin_ns, adapts, ..base.clone() };
            runs.push(simulate(&format!("{load}: {spin}"), &one));
        }
    }
    Report::new("sleep", options, runs)
}

/// A recording, as [`consolidate`] does it with its own loads.
pub fn replay(options: &Options, vms: Vec<Vm>) -> Report {
    Report::new("replay", options, against_threads(options, vms))
}

#[cfg(test)]
#[path = "scenario_tests.rs"]
mod tests;
