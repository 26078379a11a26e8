//! The command line of `bench peers` and of its TAP reference.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::harness::daemon::{beside_us, this_program};
use crate::harness::error::BenchError;
use crate::harness::options::seconds;
use crate::harness::options::two_cpus;
use crate::harness::progress::Progress;
use crate::harness::report::Context;
use crate::harness::results::Row;
use crate::harness::suite::{self, Origin, Report, Suite};
use crate::harness::table;
use crate::suites::peers::bed::Setup;
use crate::suites::peers::case::{Case, Ring};
use crate::suites::peers::front_end::Kind;
use crate::suites::peers::output::{self, Outcome};
use crate::suites::peers::reading::Reading;
use crate::suites::peers::rounds::CaseRuns;
use crate::suites::peers::window::{Plan, Window};
use crate::suites::peers::{self, case, tap, virtio_user};

#[derive(Args)]
pub struct PeersArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "1", value_parser = seconds)]
    secs: Duration,
    /// Seconds before it counts (0.2 to 60).
    #[arg(long, default_value = "0.2", value_parser = seconds)]
    warmup: Duration,
    /// Only these cases, each by name (flood64_split) or by whole words of its beginning (qcow2).
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Only these peers, each by name or the start of it (ovs).
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// Folder for results, plots and the report.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Three rounds of 0.3 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs"])]
    quick: bool,
    /// CPUs of the back ends and of the front end.
    #[arg(long, value_delimiter = ',', num_args = 1.., default_values_t = [0, 1])]
    cpus: Vec<usize>,
    /// Do without huge pages.
    #[arg(long)]
    no_hugepages: bool,
    /// The daemon; beside this program when left out.
    #[arg(long)]
    millrace: Option<PathBuf>,
    /// Front end that drives the rings; virtio-user (DPDK) knows frames up to 1,500 bytes, one
    /// direction.
    #[arg(long, value_enum, default_value_t = Kind::Ours)]
    front: Kind,
    /// The program of our front end; beside this program when left out.
    #[arg(long)]
    frontend: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TapMode {
    Flood,
    Rr,
}

#[derive(Args)]
pub struct TapArgs {
    #[arg(long, value_enum)]
    mode: TapMode,
    #[arg(long)]
    a: String,
    #[arg(long)]
    b: String,
    #[arg(long, value_parser = clap::value_parser!(u32).range(64..=65_535))]
    frame_bytes: u32,
    #[arg(long, value_delimiter = ',', num_args = 1..)]
    cpus: Vec<usize>,
    #[arg(long, value_parser = seconds)]
    secs: Duration,
    #[arg(long, value_parser = seconds)]
    warmup: Duration,
}

#[derive(Args)]
pub struct VirtioUserArgs {
    #[arg(long, value_enum)]
    ring: Ring,
    #[arg(long)]
    a: PathBuf,
    #[arg(long)]
    b: PathBuf,
    #[arg(long,
        value_parser = clap::value_parser!(u32).range(60..=virtio_user::MAX_FRAME_BYTES as i64))]
    frame_bytes: u32,
    #[arg(long)]
    cpu: usize,
    #[arg(long, value_parser = seconds)]
    secs: Duration,
    #[arg(long, value_parser = seconds)]
    warmup: Duration,
    #[arg(long)]
    hugepages: bool,
}

impl Suite for PeersArgs {
    type Setup = Setup;
    /// Samples, and how the bed was set up.
    type Measured = (Vec<CaseRuns>, Vec<String>);
    const HAS_GUESTS: bool = false;

    fn setup(&self) -> Result<Setup, BenchError> {
        let cases = self.chosen()?;
        let beside = |given: &Option<PathBuf>, name| match given {
            Some(path) => Ok(path.clone()),
            None => beside_us(name),
        };
        let (rounds, length) =
            if self.quick { (3, Duration::from_millis(300)) } else { (self.rounds, self.secs) };
        Ok(Setup {
            cases,
            peers: self.peers.clone(),
            plan: Plan { rounds, window: Window { warm_up: self.warmup, length } },
            cpus: two_cpus(&self.cpus)?,
            millrace: beside(&self.millrace, "millrace")?,
            kind: self.front,
            front: match self.front {
                Kind::Ours => beside(&self.frontend, "frontend")?,
                Kind::VirtioUser => this_program()?,
            },
            out: self.out.clone(),
            hugepages: !self.no_hugepages,
        })
    }
    fn measure(
        &self,
        setup: &Setup,
        progress: &mut Progress,
    ) -> Result<Self::Measured, BenchError> {
        peers::run(setup, progress)
    }

    fn report(
        &self,
        setup: &Setup,
        (runs, mut text): Self::Measured,
        origin: Origin,
    ) -> Result<Report, BenchError> {
        let window = setup.plan.window;
        text.push(format!(
            "{} rounds of {:.1} s each, after one thrown away; each load runs {:.1} s before it \
             counts.",
            setup.plan.rounds,
            window.length.as_secs_f64(),
            window.warm_up.as_secs_f64()
        ));
        let context = Context { setup: text, took_s: origin.took_s };
        let outcome = Outcome::new(origin.machine, origin.commit, runs, setup.kind);
        let written = output::write_all(&setup.out, &outcome, &context)?;
        let mut table = table::terminal(table::Section::Peers, &outcome.results);
        for line in table::not_measured(&outcome.results) {
            table.push('\n');
            table.push_str(&line);
        }
        let code = exit_code(&outcome);
        let (losses, summary) = (output::losses(&outcome), String::new());
        Ok(Report { table, losses, written, summary, code })
    }
}

/// Exit code of a run.
fn exit_code(outcome: &Outcome) -> u8 {
    let missed = outcome.results.rows.iter().any(Row::missed);
    suite::exit_code(!outcome.failed.is_empty(), missed)
}

impl PeersArgs {
    /// The cases asked for; of all cases those that the front end can do.
    fn chosen(&self) -> Result<Vec<Case>, BenchError> {
        let mut cases = case::select(&self.cases).map_err(|name| {
            let known: Vec<String> = case::ALL.iter().map(Case::name).collect();
            BenchError::UnknownCase { name, known: known.join(", ") }
        })?;
        if self.cases.is_empty() {
            cases.retain(|c| self.front.refuses(c).is_none());
        }
        if let Some((case, why)) = cases.iter().find_map(|c| Some((c, self.front.refuses(c)?))) {
            let what = format!("run {} with --front {}", case.name(), self.front.name());
            return Err(BenchError::lab(what, why));
        }
        Ok(cases)
    }
}

/// Puts load on two TAP devices and prints what a front end prints.
pub fn tap(args: &TapArgs) -> Result<(), BenchError> {
    let cpus = two_cpus(&args.cpus)?;
    let setup = tap::Setup {
        taps: [args.a.clone(), args.b.clone()],
        frame_bytes: args.frame_bytes as usize,
        cpus: [cpus.0, cpus.1],
        warm_up: args.warmup,
        length: args.secs,
    };
    let reading = match args.mode {
        TapMode::Flood => tap::flood(&setup),
        TapMode::Rr => tap::round_trips(&setup),
    };
    print(&reading.map_err(|e| BenchError::lab("load on TAP devices", e))?)
}

/// Puts load on two ports with DPDK's driver and prints what a front end prints.
pub fn virtio_user(args: &VirtioUserArgs) -> Result<(), BenchError> {
    print(&virtio_user::run(&virtio_user::Setup {
        sockets: [args.a.clone(), args.b.clone()],
        ring: args.ring,
        frame_bytes: args.frame_bytes,
        cpu: args.cpu,
        hugepages: args.hugepages,
        window: Window { warm_up: args.warmup, length: args.secs },
    })?)
}

fn print(reading: &Reading) -> Result<(), BenchError> {
    let text = serde_json::to_string(reading).map_err(|e| BenchError::lab("print", e))?;
    println!("{text}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options;
    use crate::harness::samples;
    use crate::harness::suite::EXIT_MISSED;

    fn setup(args: &[&str]) -> Result<Setup, String> {
        let args: PeersArgs = options::parse(args)?;
        args.setup().map_err(|e| e.to_string())
    }

    #[test]
    fn nine_rounds_of_a_second_on_all_cases_unless_told() {
        if base::cpu::allowed_cpus().unwrap().len() < 2 {
            return;
        }
        let s = setup(&[]).unwrap();
        assert_eq!((s.plan.rounds, s.cases.len(), s.cpus), (9, case::ALL.len(), (0, 1)));
        assert!(s.front.ends_with("frontend") && s.hugepages);
        let s = setup(&["--quick", "--cases", "null", "--cpus", "1,0"]).unwrap();
        assert_eq!((s.plan.rounds, s.cases.len(), s.cpus), (3, 2, (1, 0)));
        let s = setup(&["--front", "virtio-user"]).unwrap();
        assert_eq!((s.kind, s.cases.len()), (Kind::VirtioUser, 6));
        assert_eq!(s.front, std::env::current_exe().unwrap());
    }

    #[test]
    fn mistakes_are_told() {
        let e = |args: &[&str]| setup(args).err().unwrap();
        assert!(e(&["--cases", "flod"]).starts_with("no case is named flod; there are: flood64_"));
        assert!(e(&["--cpus", "0"]).contains("two different ones of"));
        assert!(e(&["--cpus", "0,0"]).contains("two different ones of"));
        let refused = e(&["--front", "virtio-user", "--cases", "flood64,rr64"]);
        assert_eq!(
            refused,
            "run rr64_split with --front virtio-user: testpmd times no round trips"
        );
    }

    #[test]
    fn exit_codes_tell_complete_missed_and_failed() {
        let mut outcome =
            Outcome::new(samples::results().machine, "c".into(), Vec::new(), Kind::Ours);
        assert_eq!(exit_code(&outcome), 0);
        outcome.results.rows = samples::results().rows;
        assert_eq!(exit_code(&outcome), EXIT_MISSED);
        outcome.failed.push("tmpfs_d1 millrace: died".into());
        assert_eq!(exit_code(&outcome), 1);
    }
}
