//! The command line of `bench consolidate`.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use super::seconds;
use super::vms::VmArgs;
use crate::consolidate::{self, Setup, output};
use crate::error::BenchError;
use crate::machine;
use crate::progress::Progress;
use crate::report::Context;
use crate::table;

#[derive(Args)]
pub struct ConsolidateArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "4", value_parser = seconds)]
    secs: Duration,
    /// Microseconds that the sidecore polls before it sleeps; the daemon's default when left out.
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    spin_us: Option<u32>,
    /// Two rounds of 1 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

/// Runs the comparison.
pub fn run(args: &ConsolidateArgs) -> Result<(), BenchError> {
    let (rounds, length) =
        if args.quick { (2, Duration::from_secs(1)) } else { (args.rounds, args.secs) };
    let setup = Setup {
        rounds,
        length,
        kernel: args.vms.kernel()?,
        millrace: args.vms.millrace()?,
        sidecore: args.spin_us.map_or(String::new(), |us| format!("spin_us = {us}")),
        out: args.vms.out.clone(),
    };
    let mut progress = Progress::stderr();
    let all = consolidate::run(&setup, &mut progress)?;
    let results = output::results(machine::machine(), machine::commit(Path::new(".")), &all)?;
    let context = Context { setup: text(&setup), took_s: progress.elapsed().as_secs_f64() };
    println!("\n{}", table::terminal(table::Section::Consolidate, &results));
    for line in output::disturbed(&all) {
        progress.step(&line);
    }
    for path in output::write_all(&args.vms.out, &results, &all, &context)? {
        progress.step(&format!("wrote {}", path.display()));
    }
    Ok(())
}

fn text(setup: &Setup) -> Vec<String> {
    let spin = if setup.sidecore.is_empty() { "spin_us by default" } else { &setup.sidecore };
    vec![
        "Sixteen VMs run at once, eight a side; only one side is loaded at a time. Each: TCG, \
         1 vCPU, 128 MB. Two make round trips, two a stream, two read their disks, two are nearly \
         idle, all at the same time."
            .into(),
        format!("Millrace: one daemon with one sidecore ({spin}), raw disks with O_DIRECT."),
        "Peer: virtio-net on TAP and bridge in each QEMU’s main loop, virtio-blk with a thread of \
         its own (cache=none, aio=io_uring)."
            .into(),
        format!(
            "{} rounds of {:.1} s, after one thrown away.",
            setup.rounds,
            setup.length.as_secs_f64()
        ),
    ]
}
