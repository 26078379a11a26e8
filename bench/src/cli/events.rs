//! The command line of `bench events`.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use super::seconds;
use super::vms::VmArgs;
use crate::error::BenchError;
use crate::events::output::{Results, write_all};
use crate::events::{self, Setup};
use crate::machine;
use crate::progress::Progress;

#[derive(Args)]
pub struct EventsArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "2", value_parser = seconds)]
    secs: Duration,
    /// One round of 0.5 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

/// Runs the comparison.
pub fn run(args: &EventsArgs) -> Result<(), BenchError> {
    let (rounds, length) =
        if args.quick { (1, Duration::from_millis(500)) } else { (args.rounds, args.secs) };
    let setup = Setup {
        rounds,
        length,
        kernel: args.vms.kernel()?,
        millrace: args.vms.millrace()?,
        out: args.vms.out.clone(),
    };
    let mut progress = Progress::stderr();
    let samples = events::run(&setup, &mut progress)?;
    let results = Results::new(machine::machine(), machine::commit(Path::new(".")), &samples);
    print!("\n{}", results.markdown());
    for path in write_all(&args.vms.out, &results, &samples)? {
        progress.step(&format!("wrote {}", path.display()));
    }
    Ok(())
}
