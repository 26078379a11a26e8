//! The command line of `bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::cases;
use crate::demo;
use crate::error::BenchError;
use crate::events::output::Results as EventsResults;
use crate::machine;
use crate::output::write_all;
use crate::progress::Progress;
use crate::report::{self, Context};
use crate::results::Results;
use crate::runner::{Outcome, Plan, compare};
use crate::summary;
use crate::table::{self, Section};

mod channels;
mod consolidate;
mod events;
mod modules;
mod peers;
mod pipes;
mod shares;
mod vms;

use vms::VmArgs;

/// Exit code of a run that completed with a case below its floor.
pub const EXIT_MISSED: u8 = 3;

#[derive(Parser)]
#[command(name = "bench", version, about = "Compares Millrace with its peers on this machine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Boot four VMs, two on Millrace and two on QEMU's own devices, and compare them.
    ///
    /// Exit code: 0 complete, 1 something failed, 2 usage, 3 complete and a floor was missed.
    Demo(DemoArgs),
    /// Run our back end and its peers in turns under one front end, without VMs.
    ///
    /// Exit code: as `demo`.
    Peers(peers::PeersArgs),
    /// Count exits, interrupts, wake-ups and system calls per request on real VMs.
    ///
    /// Exit code: 0 complete, 1 something failed, 2 usage; there are no floors.
    Events(events::EventsArgs),
    /// Load eight VMs unevenly, on one sidecore and on QEMU's main loops and disk threads, and compare.
    ///
    /// Exit code: as `events`.
    Consolidate(consolidate::ConsolidateArgs),
    /// Many VMs on one sidecore: does each get what is due to it?
    ///
    /// Exit code: as `demo`.
    Shares(shares::SharesArgs),
    /// What ports cost that do nothing, and what remains of those that go.
    ///
    /// Exit code: as `demo`.
    Idle(shares::IdleArgs),
    /// Files from a VM that shares its CPU, by pipes, sendfile and read-write, and from web servers.
    ///
    /// Exit code: as `demo`.
    Pipes(pipes::PipesArgs),
    /// Two guests of one host, by the channel and by everything else.
    ///
    /// Exit code: as `demo`.
    Channels(channels::ChannelsArgs),
    /// A database in a guest inserts rows: its table store in the host, in the guest, and other engines.
    ///
    /// Exit code: as `demo`.
    Modules(modules::ModulesArgs),
    /// The load of the TAP and bridge reference.
    #[command(hide = true)]
    Tap(peers::TapArgs),
    /// DPDK's virtio-user driver as the front end of `peers`.
    #[command(hide = true)]
    VirtioUser(peers::VirtioUserArgs),
    /// Print the table of an earlier run, or put it into a document.
    Table {
        /// Result file.
        #[arg(long, default_value = "out/demo.json")]
        from: PathBuf,
        /// Document whose part between `<!-- bench:SECTION -->` and `<!-- /bench:SECTION -->` is
        /// rewritten.
        #[arg(long, alias = "readme")]
        document: Option<PathBuf>,
        /// Which section, and so which kind of table.
        #[arg(long, value_enum, default_value_t = Section::Demo)]
        section: Section,
        /// Print Markdown.
        #[arg(long)]
        markdown: bool,
    },
    /// Write the README's summary and its plot from the tables of the document of results.
    Summary {
        /// Document with the tables.
        #[arg(long, default_value = "docs/results.md")]
        results: PathBuf,
        /// Document whose part between `<!-- bench:summary -->` and `<!-- /bench:summary -->` is
        /// rewritten.
        #[arg(long, default_value = "README.md")]
        readme: PathBuf,
        /// Plot to write.
        #[arg(long, default_value = "docs/results.svg")]
        plot: PathBuf,
    },
}

#[derive(Args)]
struct DemoArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 17, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "0.7", value_parser = seconds)]
    secs: Duration,
    /// Only these cases.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Three rounds of 0.8 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let secs: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if !(0.2..=60.0).contains(&secs) {
        return Err(format!("{secs} s; 0.2 to 60 allowed"));
    }
    Ok(Duration::from_secs_f64(secs))
}

impl DemoArgs {
    fn plan(&self) -> Plan {
        let (rounds, length) =
            if self.quick { (3, Duration::from_millis(800)) } else { (self.rounds, self.secs) };
        Plan { rounds, length }
    }

    /// The names asked for, in the order in which cases run; all when none is.
    fn names(&self) -> Result<Vec<&'static str>, BenchError> {
        let known = cases::NAMES;
        if let Some(name) = self.cases.iter().find(|n| !known.contains(&n.as_str())) {
            return Err(BenchError::UnknownCase { name: name.clone(), known: known.join(", ") });
        }
        let wanted = |n: &&str| self.cases.is_empty() || self.cases.iter().any(|c| c == n);
        Ok(known.into_iter().filter(wanted).collect())
    }
}

/// Runs the command; what `main` does.
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Demo(args) => run_demo(&args),
        Command::Peers(args) => peers::run(&args),
        Command::Events(args) => events::run(&args).map(|()| 0),
        Command::Consolidate(args) => consolidate::run(&args).map(|()| 0),
        Command::Shares(args) => shares::run(&args),
        Command::Idle(args) => shares::idle(&args),
        Command::Pipes(args) => pipes::run(&args),
        Command::Channels(args) => channels::run(&args),
        Command::Modules(args) => modules::run(&args),
        Command::Tap(args) => peers::tap(&args).map(|()| 0),
        Command::VirtioUser(args) => peers::virtio_user(&args).map(|()| 0),
        Command::Table { from, document, section, markdown } => {
            print_table(&from, document.as_deref(), section, markdown).map(|()| 0)
        }
        Command::Summary { results, readme, plot } => {
            summary::write(&results, &readme, &plot).map(|()| 0)
        }
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("bench: {e}");
            ExitCode::FAILURE
        }
    }
}

fn print_table(
    from: &Path,
    document: Option<&Path>,
    section: Section,
    markdown: bool,
) -> Result<(), BenchError> {
    let (text, plain) = match section {
        Section::Events => {
            let text = EventsResults::read(from)?.markdown();
            (text.clone(), text)
        }
        _ => {
            let results = Results::read(from)?;
            (section.markdown(&results), table::terminal(section, &results))
        }
    };
    match document {
        Some(path) => table::rewrite_file(path, section, &text)?,
        None if markdown => print!("{text}"),
        None => print!("{plain}"),
    }
    Ok(())
}

fn run_demo(args: &DemoArgs) -> Result<u8, BenchError> {
    let (names, plan) = (args.names()?, args.plan());
    let commit = machine::commit(Path::new("."));
    let mut progress = Progress::stderr();
    let setup = demo::Setup::new(args.vms.kernel()?, args.vms.millrace()?, &args.vms.out);
    let bed = demo::Bed::boot(&setup, &mut progress)?;
    let modes = bed.modes();
    let mut all = Vec::new();
    for name in names {
        all.push(cases::make(name, &bed, &modes)?);
    }
    let outcome = compare(&mut all, &bed, plan, &mut progress);
    drop(all);
    let mut setup = bed.setup_text();
    setup.push(format!(
        "{} rounds of {:.1} s each, after one thrown away.",
        plan.rounds,
        plan.length.as_secs_f64()
    ));
    drop(bed);
    let context = Context { setup, took_s: progress.elapsed().as_secs_f64() };
    let (results, written) =
        write_all(&args.vms.out, machine::machine(), commit, &outcome, &context)?;
    println!("\n{}", table::terminal(Section::Demo, &results));
    for path in written {
        progress.step(&format!("wrote {}", path.display()));
    }
    Ok(verdict(&outcome, &mut progress))
}

/// Says what was lost, what failed and what was missed; returns the exit code.
fn verdict(outcome: &Outcome, progress: &mut Progress) -> u8 {
    for loss in outcome.rounds.iter().flat_map(report::losses_of) {
        progress.step(&loss);
    }
    for (case, why) in outcome.failed() {
        progress.step(&format!("FAILED {case}: {why}"));
    }
    for row in outcome.rows.iter().filter(|r| r.missed()) {
        let floor = row.target.unwrap_or_default();
        progress.step(&format!("BELOW FLOOR {}: {:.2}× of {floor:.1}×", row.case, row.ratio));
    }
    match (outcome.failed().is_empty(), outcome.missed().is_empty()) {
        (false, _) => 1,
        (true, false) => EXIT_MISSED,
        (true, true) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::CaseRounds;
    use crate::samples;

    fn demo(args: &[&str]) -> Result<DemoArgs, String> {
        let all = ["bench", "demo"].iter().chain(args);
        match Cli::try_parse_from(all).map_err(|e| e.to_string())?.command {
            Command::Demo(args) => Ok(args),
            _ => unreachable!(),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn limits_are_kept_and_told() {
        let e = |args: &[&str]| demo(args).err().unwrap();
        assert!(e(&["--rounds", "0"]).contains("1..=99"));
        assert!(e(&["--secs", "0.1"]).contains("0.2 to 60 allowed"));
        assert!(e(&["--secs", "NaN"]).contains("allowed"));
        assert!(e(&["--quick", "--rounds", "3"]).contains("cannot be used with"));
        assert_eq!(demo(&["--quick"]).unwrap().plan().rounds, 3);
        assert_eq!(demo(&[]).unwrap().plan().rounds, 17);
    }

    #[test]
    fn cases_run_in_their_own_order_and_unknown_ones_are_told() {
        let names = |list: &str| demo(&["--cases", list]).unwrap().names();
        assert_eq!(names("udp_rr,tcp_rr").unwrap(), ["tcp_rr", "udp_rr"]);
        assert_eq!(demo(&[]).unwrap().names().unwrap(), cases::NAMES);
        assert!(names("tcp_rr,nope").unwrap_err().to_string().contains("named nope"));
    }

    #[test]
    fn exit_codes_tell_complete_missed_and_failed() {
        let mut quiet = Progress::to(Box::new(std::io::sink()), false);
        let mut rows = samples::results().rows;
        let mut code = |rows: &[crate::results::Row], failed: Option<&str>| {
            let case = "x".to_string();
            let failed = failed.map(Into::into);
            let rounds = vec![CaseRounds { case, failed, ..Default::default() }];
            verdict(&Outcome { rows: rows.to_vec(), rounds }, &mut quiet)
        };
        assert_eq!(code(&rows, None), EXIT_MISSED);
        assert_eq!(code(&rows, Some("guest died")), 1);
        rows.retain(|r| !r.missed());
        assert_eq!(code(&rows, None), 0);
    }
}
