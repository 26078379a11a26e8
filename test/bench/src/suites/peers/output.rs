//! Output of a comparison: its files.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::harness::error::BenchError;
use crate::harness::output::write_run;
use crate::harness::report::{self, Context};
use crate::harness::results::{Machine, Results};
use crate::harness::svg::{self, escape};
use crate::harness::table::{self, number, quantity};

use super::case::{self, Metric};
use super::front_end::Kind;
use super::plot;
use super::trial::OURS;
use crate::harness::usage::DELAY_LIMIT;

use super::rounds::{CaseRuns, Sample};
use super::rows;

/// Everything that there is to say of a run.
pub struct Outcome {
    /// Kind of the front end.
    pub front: Kind,
    /// In the published format.
    pub results: Results,
    /// Every round.
    pub runs: Vec<CaseRuns>,
    /// Failures, a sentence each.
    pub failed: Vec<String>,
}

impl Outcome {
    /// Makes rows out of the rounds.
    pub fn new(machine: Machine, commit: String, runs: Vec<CaseRuns>, front: Kind) -> Outcome {
        let (rows, missing) = rows::rows(&runs, front);
        let failed = rows::failed(&runs, &missing);
        Outcome { front, results: Results { machine, commit, rows, missing }, runs, failed }
    }
}

/// Writes `bench-peers.json` (the published format), `bench-peers-rounds.json` (every round), two
/// plots and `bench-peers.html` into `folder`, making it if needed. Another front end than ours has
/// its name after `peers`, so that neither's results replace the other's. Returns what was written.
pub fn write_all(
    folder: &Path,
    outcome: &Outcome,
    context: &Context,
) -> Result<Vec<PathBuf>, BenchError> {
    let mark = outcome.front.mark().map_or(String::new(), |m| format!("-{m}"));
    let texts = [
        ("-ratios.svg", svg::ratios(&outcome.results)),
        ("-values.svg", plot::values(&outcome.results)),
        (".html", html(outcome, context)),
    ];
    write_run(folder, &format!("bench-peers{mark}"), &outcome.results, &outcome.runs, &texts)
}

fn html(outcome: &Outcome, context: &Context) -> String {
    let results = &outcome.results;
    let mut page = report::head(results, context.took_s, &headline(results));
    page.push_str(&report::table(results));
    page.push_str(&report::list("What was lost", losses(outcome)));
    page.push_str(&report::list("What was not measured", table::not_measured(results)));
    page.push_str(&plot::values(results));
    page.push_str(&svg::ratios(results));
    page.push_str(&report::list("How it was measured", how(context)));
    page.push_str(&all_rounds(&outcome.runs));
    page.push_str(report::TAIL);
    page
}

fn headline(results: &Results) -> String {
    let (reached, floors) = results.floors();
    let aims: Vec<_> = results.rows.iter().filter(|r| r.aim.is_some()).collect();
    let ahead = aims.iter().filter(|r| r.aim.is_some_and(|a| r.ratio >= a)).count();
    format!(
        "{reached} of {floors} floors reached; the aim in {ahead} of {} comparisons.",
        aims.len()
    )
}

/// Floors missed, loads that failed, and rounds that were disturbed.
pub fn losses(outcome: &Outcome) -> Vec<String> {
    let mut out = report::below_floors(&outcome.results, |r| format!("{}:", r.case));
    out.extend(outcome.failed.iter().cloned());
    for run in &outcome.runs {
        let samples = run.rounds.iter().filter(|r| r.round > 0).flat_map(|r| &r.samples);
        let (mut all, mut disturbed, mut wrong, mut repeats) = (0, 0, 0.0, 0);
        for s in samples {
            all += 1;
            disturbed += usize::from(s.disturbed);
            wrong += s.reading.errors;
            repeats += s.repeats;
        }
        if disturbed > 0 {
            let limit = DELAY_LIMIT * 100.0;
            out.push(format!(
                "{}: in {disturbed} of {all} loads a busy thread waited for its CPU, or the \
                 hypervisor had it, for more than {limit:.0} % of the time",
                run.case
            ));
        }
        if repeats > 0 {
            out.push(format!(
                "{}: {repeats} times a load was run again for the hypervisor’s sake",
                run.case
            ));
        }
        if wrong > 0.0 {
            out.push(format!("{}: {wrong} frames or requests came back wrong", run.case));
        }
    }
    out
}

fn how(context: &Context) -> Vec<String> {
    let fixed = [
        "A round is one load on each back end; the order moves on by one from round to round and \
         turns round after each lap. The first round of each case is thrown away. The ratio is the \
         median of the rounds’ own ratios, turned so that above 1 is better for Millrace; values \
         are medians over the rounds.",
        "Frames per second are those received; round trips are timed one by one in the front end.",
        "CPU per operation is the back end’s time alone, all its threads; one that polls uses its \
         whole core whatever it does.",
        "Delay is the part of the time that the busiest thread of the back end, or the front end, \
         was ready to run and did not; stolen is the part that the hypervisor kept one of their \
         CPUs. A load with more than 3 % stolen is run again, right away and at most twice, whoever \
         ran and whatever came out; the last one stands. In a case there are half as many repeats as \
         loads at most, and none in the round that is thrown away.",
    ];
    context.setup.iter().cloned().chain(fixed.map(Into::into)).collect()
}

fn all_rounds(runs: &[CaseRuns]) -> String {
    let mut out = String::from(
        "<h2>All rounds</h2>\n<div class=\"scroll\"><table><thead><tr><th>Case</th>\
         <th class=\"n\">Round</th><th>Back end</th><th>Values</th><th class=\"n\">10 ms windows, 10–90 %</th>\
         <th class=\"n\">CPU µs/op</th><th class=\"n\">delay, back / front / stolen</th>\
         <th class=\"n\">kicks/op</th></tr></thead>\n<tbody>\n",
    );
    for run in runs {
        let case = case::ALL.into_iter().find(|c| c.name() == run.case);
        let metrics = case.map_or(&[][..], |c| c.metrics());
        for (round, s) in run.rounds.iter().flat_map(|r| r.samples.iter().map(|s| (r.round, s))) {
            out.push_str(&round_line(&run.case, metrics, round, s));
        }
    }
    out.push_str("</tbody></table></div>\n");
    out
}

fn round_line(case: &str, metrics: &[Metric], round: u32, s: &Sample) -> String {
    let mut line = String::new();
    let r = &s.reading;
    let values: Vec<String> =
        metrics.iter().filter_map(|m| Some(quantity((m.of)(r)?, m.unit))).collect();
    let windows = r.window_p10_per_s.zip(r.window_p90_per_s);
    let _ = writeln!(
        line,
        "<tr><td>{}</td><td class=\"n\">{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td>\
         <td class=\"n\">{}</td><td class=\"n{}\">{} / {:.1} / {:.1} %</td><td class=\"n\">{}</td></tr>",
        escape(case),
        if round == 0 { "warm-up".into() } else { round.to_string() },
        if s.back_end == OURS { "<strong>millrace</strong>".into() } else { escape(&s.back_end) },
        escape(&values.join(", ")),
        windows.map_or(String::new(), |(a, b)| format!("{}–{}", number(a), number(b))),
        s.cpu_us_per_op.map_or(String::new(), number),
        if s.disturbed { " bad" } else { "" },
        s.back_delay.map_or("?".into(), |d| format!("{:.1}", d * 100.0)),
        s.front_delay * 100.0,
        s.stolen * 100.0,
        number(r.kicks / r.ops.max(1.0)),
    );
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;
    use crate::suites::peers::reading::Reading;
    use crate::suites::peers::rounds::{Part, Round};

    fn outcome(front: Kind) -> Outcome {
        let sample = |name: &str, ops_per_s: f64, disturbed| Sample {
            back_end: name.into(),
            reading: Reading { ops: 10.0, ops_per_s, seconds: 1.0, ..Reading::default() },
            cpu_us_per_op: Some(1e6 / ops_per_s),
            back_delay: Some(0.04),
            front_delay: 0.0,
            stolen: 0.0,
            disturbed,
            repeats: 1,
        };
        let part = |name: &str, absent: Option<&str>| Part {
            back_end: name.into(),
            reference: false,
            absent: absent.map(Into::into),
        };
        let round = |round| Round {
            round,
            samples: vec![sample("millrace", 9e6, false), sample("ovs-normal", 10e6, true)],
        };
        let run = CaseRuns {
            case: "flood64_split".into(),
            parts: vec![
                part("millrace", None),
                part("ovs-normal", None),
                part("vpp", Some("not installed")),
            ],
            rounds: vec![round(0), round(1), round(2)],
            failures: Vec::new(),
        };
        Outcome::new(samples::results().machine, "abc".into(), vec![run], front)
    }

    #[test]
    fn a_run_leaves_five_files_that_tell_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let context = Context { setup: vec!["Two CPUs.".into()], took_s: 60.0 };
        let written = write_all(dir.path(), &outcome(Kind::Ours), &context).unwrap();
        assert_eq!(written.len(), 5);
        let read = Results::read(&dir.path().join("bench-peers.json")).unwrap();
        assert_eq!((read.rows[0].ratio, read.missing.len()), (0.9, 1));
        let page = std::fs::read_to_string(dir.path().join("bench-peers.html")).unwrap();
        for golden in [
            "0 of 1 floors reached; the aim in 0 of 1 comparisons.",
            "<li>flood64_split: 0.90× of ovs-normal, floor 1.0×</li>",
            "<li>flood64_split: in 2 of 4 loads a busy thread waited",
            "<li>flood64_split: 4 times a load was run again",
            "<li>vpp: not installed (flood64_split).</li>",
            "<li>Two CPUs.</li>",
            "<td class=\"n\">warm-up</td><td><strong>millrace</strong></td><td>9.00 Mpps</td>",
        ] {
            assert!(page.contains(golden), "lacks {golden}: {page}");
        }
    }

    #[test]
    fn the_results_of_another_front_end_say_so_and_replace_none() {
        let dir = tempfile::tempdir().unwrap();
        let context = Context { setup: Vec::new(), took_s: 60.0 };
        let written = write_all(dir.path(), &outcome(Kind::VirtioUser), &context).unwrap();
        assert!(written.iter().all(|w| w.exists()));
        let read = Results::read(&dir.path().join("bench-peers-virtio-user.json")).unwrap();
        assert_eq!(read.rows[0].title(), "flood64_split (virtio-user)");
        assert!(!dir.path().join("bench-peers.json").exists());
    }
}
