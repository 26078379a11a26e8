//! Command line of `bench demo`.

use std::time::Duration;

use clap::Args;

use super::output::write_all;
use super::{Bed, Setup, cases};
use crate::harness::error::BenchError;
use crate::harness::options::{VmArgs, seconds};
use crate::harness::progress::Progress;
use crate::harness::report::{self, Context};
use crate::harness::runner::{Outcome, Plan, compare};
use crate::harness::suite::{self, Origin, Report, Suite};
use crate::harness::table::{self, Section};

#[derive(Args)]
pub struct DemoArgs {
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

impl Suite for DemoArgs {
    /// Names of cases, and the VMs to boot.
    type Setup = (Vec<&'static str>, Setup);
    /// Outcome, and how both sides were set up.
    type Measured = (Outcome, Vec<String>);

    fn setup(&self) -> Result<Self::Setup, BenchError> {
        let names = self.names()?;
        Ok((names, Setup::new(self.vms.kernel()?, self.vms.millrace()?, &self.vms.out)))
    }

    fn measure(
        &self,
        (names, setup): &Self::Setup,
        progress: &mut Progress,
    ) -> Result<Self::Measured, BenchError> {
        let plan = self.plan();
        let bed = Bed::boot(setup, progress)?;
        let modes = bed.modes();
        let mut all = Vec::new();
        for name in names {
            all.push(cases::make(name, &bed, &modes)?);
        }
        let outcome = compare(&mut all, &bed, plan, progress);
        drop(all);
        let mut text = bed.setup_text();
        text.push(format!(
            "{} rounds of {:.1} s each, after one thrown away.",
            plan.rounds,
            plan.length.as_secs_f64()
        ));
        Ok((outcome, text))
    }

    fn report(
        &self,
        _: &Self::Setup,
        (outcome, text): Self::Measured,
        origin: Origin,
    ) -> Result<Report, BenchError> {
        let context = Context { setup: text, took_s: origin.took_s };
        let (machine, commit) = (origin.machine, origin.commit);
        let (results, written) = write_all(&self.vms.out, machine, commit, &outcome, &context)?;
        let table = table::terminal(Section::Demo, &results);
        let code = exit_code(&outcome);
        Ok(Report { table, losses: losses(&outcome), written, code })
    }
}

/// Sentences on what was lost, what failed and what was missed.
fn losses(outcome: &Outcome) -> Vec<String> {
    let mut lines: Vec<String> = outcome.rounds.iter().flat_map(report::losses_of).collect();
    lines.extend(outcome.failed().iter().map(|(case, why)| format!("FAILED {case}: {why}")));
    lines.extend(outcome.rows.iter().filter(|r| r.missed()).map(|row| {
        let floor = row.target.unwrap_or_default();
        format!("BELOW FLOOR {}: {:.2}× of {floor:.1}×", row.case, row.ratio)
    }));
    lines
}

fn exit_code(outcome: &Outcome) -> u8 {
    suite::exit_code(!outcome.failed().is_empty(), &outcome.rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::runner::CaseRounds;
    use crate::harness::suite::EXIT_MISSED;
    use crate::harness::{options, samples};

    fn demo(args: &[&str]) -> Result<DemoArgs, String> {
        options::parse(args)
    }

    #[test]
    fn seventeen_rounds_unless_told() {
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
        let mut rows = samples::results().rows;
        let code = |rows: &[crate::harness::results::Row], failed: Option<&str>| {
            let case = "x".to_string();
            let failed = failed.map(Into::into);
            let rounds = vec![CaseRounds { case, failed, ..Default::default() }];
            exit_code(&Outcome { rows: rows.to_vec(), rounds })
        };
        assert_eq!(code(&rows, None), EXIT_MISSED);
        assert_eq!(code(&rows, Some("guest died")), 1);
        rows.retain(|r| !r.missed());
        assert_eq!(code(&rows, None), 0);
    }
}
