//! `sim SCENARIO`: simulates, and writes `sim-SCENARIO.json` and `.svg`.

use std::error::Error;
use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use sim::report::Report;
use sim::scenario;
use sim::setup::{Cost, Options};
use sim::{load, plot};

#[derive(Parser)]
#[command(name = "sim", version, about = "Simulates placement, credits and sleep of sidecores")]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Args)]
struct Common {
    /// Seed of all random numbers: the same seed, the same output
    #[arg(long, default_value_t = 1, global = true)]
    seed: u64,
    /// Virtual seconds
    #[arg(long, default_value_t = 12, global = true,
        value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Folder of the results
    #[arg(long, default_value = "out", global = true)]
    out: PathBuf,
    /// Cost of a frame, in nanoseconds
    #[arg(long, default_value_t = Cost::default().net_ns, global = true)]
    net_ns: u64,
    /// Cost of a KiB of a frame, in nanoseconds
    #[arg(long, default_value_t = Cost::default().net_kib_ns, global = true)]
    net_kib_ns: u64,
    /// Cost of a disk request, in nanoseconds
    #[arg(long, default_value_t = Cost::default().disk_ns, global = true)]
    disk_ns: u64,
    /// Cost of a wake-up, in nanoseconds
    #[arg(long, default_value_t = Cost::default().wake_ns, global = true)]
    wake_ns: u64,
}

#[derive(Subcommand)]
enum Scenario {
    /// 8 VMs with uneven load: an I/O thread for each against 1, 2 and 4 sidecores
    Consolidate,
    /// 1,000 VMs on up to 64 sidecores, with a load that falls and rises
    Scale,
    /// One sidecore, asked for more than it can do: weights, a newcomer, one alone, a ceiling
    Shares,
    /// 8 VMs on 2 NUMA nodes with 2 sidecores each: the placer knows of them, or not
    Nodes,
    /// Polling times against latency and CPU
    Sleep,
    /// A recorded load, as in consolidate: JSON lines with t_ns, vm, bytes, kind (net, disk)
    Replay {
        /// The recording
        file: PathBuf,
    },
}

fn run(cli: &Cli) -> Result<Report, Box<dyn Error>> {
    let c = &cli.common;
    let cost = Cost {
        net_ns: c.net_ns,
        net_kib_ns: c.net_kib_ns,
        disk_ns: c.disk_ns,
        wake_ns: c.wake_ns,
        ..Cost::default()
    };
    let options = Options { seed: c.seed, seconds: c.seconds, cost };
    let report = match &cli.scenario {
        Scenario::Consolidate => scenario::consolidate(&options),
        Scenario::Scale => scenario::scale(&options),
        Scenario::Shares => scenario::shares(&options),
        Scenario::Nodes => scenario::nodes(&options),
        Scenario::Sleep => scenario::sleep(&options),
        Scenario::Replay { file } => {
            let input = File::open(file).map_err(|e| format!("{}: {e}", file.display()))?;
            scenario::replay(&options, load::recorded(BufReader::new(input))?)
        }
    };
    std::fs::create_dir_all(&c.out).map_err(|e| format!("{}: {e}", c.out.display()))?;
    for (ending, text) in [("json", report.to_json()), ("svg", plot::svg(&report))] {
        let path = c.out.join(format!("sim-{}.{ending}", report.scenario));
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(report)
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(report) => {
            for run in &report.runs {
                let moves: u64 = run.moves.iter().map(|(_, n)| n).sum();
                let active = run.active.last().map_or(0, |(_, n)| *n);
                println!(
                    "{:24} {:>8.2} Gbit/s {:>6.2} CPUs {moves:>5} moves, {active} active at the end",
                    run.name,
                    run.bytes_per_s * 8.0 / 1e9,
                    run.cpus,
                );
                for c in &run.classes {
                    println!(
                        "    {:10} p50 {:>9.1} p99 {:>9.1} µs, shares off by {:.1} % at most",
                        c.class,
                        c.p50_us,
                        c.p99_us,
                        c.share_error * 100.0,
                    );
                }
            }
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("sim: {e}");
            ExitCode::FAILURE
        }
    }
}
