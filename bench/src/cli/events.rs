//! The command line of `bench events`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::seconds;
use crate::daemon;
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
    /// Folder for the results.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// One round of 0.5 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs"])]
    quick: bool,
    /// Guest kernel: 6.1 or 6.12.
    #[arg(long, default_value = "6.1")]
    kernel: String,
    /// The daemon; beside this program when left out.
    #[arg(long)]
    millrace: Option<PathBuf>,
}

/// Runs the comparison.
pub fn run(args: &EventsArgs) -> Result<(), BenchError> {
    let (rounds, length) =
        if args.quick { (1, Duration::from_millis(500)) } else { (args.rounds, args.secs) };
    let setup = Setup {
        rounds,
        length,
        kernel: args.kernel.parse().map_err(|e| BenchError::lab("--kernel", e))?,
        millrace: daemon::program(args.millrace.as_deref())?,
        out: args.out.clone(),
    };
    let mut progress = Progress::stderr();
    let samples = events::run(&setup, &mut progress)?;
    let results = Results::new(machine::machine(), machine::commit(Path::new(".")), &samples);
    print!("\n{}", results.markdown());
    for path in write_all(&args.out, &results, &samples)? {
        progress.step(&format!("wrote {}", path.display()));
    }
    Ok(())
}
