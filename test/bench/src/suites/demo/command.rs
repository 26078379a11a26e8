//! Command line of `bench demo`.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use super::output::write_all;
use super::{Bed, Setup, cases};
use crate::harness::error::BenchError;
use crate::harness::options::{VmArgs, seconds};
use crate::harness::progress::Progress;
use crate::harness::report::{self, Context};
use crate::harness::results::{Row, Stand};
use crate::harness::runner::{Outcome, Plan, VHOST, compare};
use crate::harness::suite::{self, Origin, Report, Suite};
use crate::harness::table::{self, Section};

#[derive(Args)]
pub struct DemoArgs {
    /// Rounds that count, at most; one more is run first and thrown away.
    #[arg(long, default_value_t = 17, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Rounds after which a case ends that is clear: by a twentieth ahead of its peer and floor, or
    /// behind. As many as `--rounds`: no case ends early.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(5..=99))]
    least_rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "0.7", value_parser = seconds)]
    secs: Duration,
    /// Only these cases. An ending `*` stands for all that begin so: `disk_read*` and `disk_write*`
    /// are sequential loads of three sizes, which do not run unless named.
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Three rounds of 0.8 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "least_rounds", "secs"])]
    quick: bool,
    /// End with 3 where Millrace is behind its peer or below a floor.
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    vms: VmArgs,
}

impl DemoArgs {
    fn plan(&self) -> Plan {
        if self.quick {
            return Plan::fixed(3, Duration::from_millis(800));
        }
        Plan { rounds: self.rounds, least_rounds: self.least_rounds, length: self.secs }
    }

    /// The names asked for, in the order in which cases run; all when none is.
    fn names(&self) -> Result<Vec<&'static str>, BenchError> {
        if self.cases.is_empty() {
            return Ok(cases::NAMES.to_vec());
        }
        let known = cases::known();
        let is_meant = |wanted: &str, name: &str| match wanted.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == wanted,
        };
        if let Some(name) = self.cases.iter().find(|c| !known.iter().any(|n| is_meant(c, n))) {
            return Err(BenchError::UnknownCase { name: name.clone(), known: known.join(", ") });
        }
        Ok(known.into_iter().filter(|n| self.cases.iter().any(|c| is_meant(c, n))).collect())
    }

    /// Exit code. A row that is behind is what was measured, and a failure only for those who say
    /// so.
    fn exit_code(&self, outcome: &Outcome) -> u8 {
        let missed = self.strict && outcome.rows.iter().any(Row::is_behind);
        suite::exit_code(!outcome.failed().is_empty(), missed)
    }
}

impl Suite for DemoArgs {
    /// Names of cases, and the VMs to boot.
    type Setup = (Vec<&'static str>, Setup);
    /// Outcome, and how both sides were set up.
    type Measured = (Outcome, Vec<String>);
    const HAS_GUESTS: bool = true;

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
            rounds_text(&outcome.rows),
            plan.length.as_secs_f64()
        ));
        if plan.least_rounds < plan.rounds {
            text.push(format!(
                "A case that is clear after {} rounds or more, a twentieth ahead of its peer and its \
                 floor or behind, has no more of them.",
                plan.least_rounds
            ));
        }
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
        let code = self.exit_code(&outcome);
        let summary = summary(&results.rows, &self.vms.out.join("report.html"));
        Ok(Report { table, losses: losses(&outcome), written, summary, code })
    }
}

/// Three sentences on what the run has shown.
fn summary(rows: &[Row], page: &Path) -> String {
    let rounds = rounds_text(rows);
    let has_vhost = rows.iter().any(|r| r.peer.name == VHOST);
    let vhost = if has_vhost { ", and two on those with vhost-net," } else { "" };
    let part = |stand: Stand| {
        let those: Vec<String> = rows
            .iter()
            .filter(|r| r.stand() == Some(stand))
            .map(|r| format!("{} {:.2}×", name(r), r.ratio))
            .collect();
        let word = stand.word();
        match those.len() {
            0 => format!("{word} in none"),
            count => format!("{word} in {count} ({})", those.join(", ")),
        }
    };
    format!(
        "Two VMs on Millrace and two on QEMU's own devices{vhost} did the same work in turns, {rounds} \
         times for each case.\nMillrace was {}, {} and {}.\nEvery round, CPU time and losses are in {}.",
        part(Stand::Ahead),
        part(Stand::Level),
        part(Stand::Behind),
        page.display()
    )
}

/// How many rounds rows have: `9`, `9 to 17`.
fn rounds_text(rows: &[Row]) -> String {
    let rounds = || rows.iter().map(|r| r.rounds);
    let (least, most) = (rounds().min().unwrap_or(0), rounds().max().unwrap_or(0));
    if least == most { most.to_string() } else { format!("{least} to {most}") }
}

/// Name of a row: that of its case, with the peer where that is not QEMU alone.
fn name(row: &Row) -> String {
    match row.peer.name.as_str() {
        VHOST => format!("{} against {VHOST}", row.case),
        _ => row.case.clone(),
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
    let behind = outcome.rows.iter().filter(|r| !r.missed() && r.is_behind());
    lines.extend(behind.map(|row| format!("BEHIND {}: {:.2}×", name(row), row.ratio)));
    lines
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
    fn nine_to_seventeen_rounds_unless_told() {
        let rounds = |args: &[&str]| {
            let plan = demo(args).unwrap().plan();
            (plan.least_rounds, plan.rounds)
        };
        assert_eq!((rounds(&["--quick"]), rounds(&[])), ((3, 3), (9, 17)));
        assert_eq!(rounds(&["--rounds", "25", "--least-rounds", "11"]), (11, 25));
        assert!(demo(&["--least-rounds", "4"]).is_err());
    }

    #[test]
    fn cases_run_in_their_own_order_and_unknown_ones_are_told() {
        let names = |list: &str| demo(&["--cases", list]).unwrap().names();
        assert_eq!(names("udp_rr,tcp_rr").unwrap(), ["tcp_rr", "udp_rr"]);
        assert_eq!(demo(&[]).unwrap().names().unwrap(), cases::NAMES);
        let reads = ["disk_read_4m_d1", "disk_read_4m_d8"];
        assert_eq!(names("disk_read_4m*").unwrap(), reads);
        assert!(names("tcp_rr,nope").unwrap_err().to_string().contains("named nope"));
    }

    #[test]
    fn a_complete_run_fails_only_where_it_is_strict() {
        let mut rows = samples::results().rows;
        let code = |rows: &[Row], failed: Option<&str>, strict| {
            let case = "x".to_string();
            let failed = failed.map(Into::into);
            let rounds = vec![CaseRounds { case, failed, ..Default::default() }];
            let args = demo(if strict { &["--strict"] } else { &[] }).unwrap();
            args.exit_code(&Outcome { rows: rows.to_vec(), rounds })
        };
        assert_eq!((code(&rows, None, false), code(&rows, None, true)), (0, EXIT_MISSED));
        assert_eq!(code(&rows, Some("guest died"), false), 1);
        rows.retain(|r| !r.is_behind());
        assert_eq!(code(&rows, None, true), 0);
    }

    #[test]
    fn the_end_says_what_was_shown() {
        let mut rows = samples::results().rows;
        rows[0].ratio_interval = Some((1.6, 1.9));
        rows[1].ratio_interval = Some((0.95, 1.08));
        let text = summary(&rows[..2], Path::new("out/report.html"));
        assert!(text.contains("in turns, 5 times for each case.\n"), "{text}");
        let mut two = rows.clone();
        two[0].rounds = 3;
        let text_of_two = summary(&two[..2], Path::new("out/report.html"));
        assert!(text_of_two.contains("3 to 5 times for each case"), "{text_of_two}");
        let shown =
            "was ahead in 1 (tcp_rr 1.79×), level in 1 (udp_rr 1.01×) and behind in none.\n";
        assert!(text.contains(shown), "{text}");
        assert!(text.ends_with("are in out/report.html."), "{text}");
        rows[1].peer.name = VHOST.into();
        let text = summary(&rows[..2], Path::new("out/report.html"));
        assert!(text.contains("own devices, and two on those with vhost-net, did the same work"));
        assert!(text.contains("level in 1 (udp_rr against tap-vhost 1.01×)"), "{text}");
    }
}
