//! Output of a run: its files.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::case::{Case, Test};
use super::rows::hook_ns;
use super::{Load, Measured, Route, Setup, others, plot};
use crate::harness::distance::{FAR_NS, is_far};
use crate::harness::error::BenchError;
use crate::harness::output::write_run;
use crate::harness::repeat::Failure;
use crate::harness::report::{self, Context, FOREIGN_LIMIT};
use crate::harness::results::Results;
use crate::harness::stats::spread;
use crate::harness::svg::escape;
use crate::harness::table::{floor_text, number};

/// Message size of PIVOT's tables.
const TABLE_BYTES: u32 = 64;

/// Names of a run's files begin so.
fn stem(setup: &Setup) -> &'static str {
    if setup.programs.is_empty() { "bench-channels" } else { "bench-channels-programs" }
}

/// Writes the published format (`.json`), every load (`-rounds.json`), the plots and the page into
/// `folder`, making it if needed. Returns what was written.
pub fn write_all(
    folder: &Path,
    setup: &Setup,
    results: &Results,
    measured: &Measured,
    context: &Context,
) -> Result<Vec<PathBuf>, BenchError> {
    let mut texts = plots(setup, measured);
    texts.push((".html", page(setup, results, measured, context, &texts)));
    write_run(folder, stem(setup), results, measured, &texts)
}

fn plots(setup: &Setup, measured: &Measured) -> Vec<(&'static str, String)> {
    if !setup.programs.is_empty() {
        return vec![(".svg", plot::programs(setup, measured))];
    }
    let mut plots = vec![
        ("-rr.svg", plot::rates(setup, measured)),
        ("-latency.svg", plot::latencies(setup, measured)),
        ("-stream.svg", plot::streams(setup, measured)),
        ("-cpu.svg", plot::cpu(setup, measured)),
    ];
    if setup.hook_packets > 0 {
        plots.push(("-hook.svg", plot::hook(measured)));
    }
    plots
}

fn page(
    setup: &Setup,
    results: &Results,
    measured: &Measured,
    context: &Context,
    plots: &[(&str, String)],
) -> String {
    let floors = results.rows.iter().filter(|r| r.target.is_some()).count();
    let missed = results.rows.iter().filter(|r| r.missed()).count();
    let headline = format!(
        "Two guests of one host, by the channel and by other ways: {} of {floors} floors reached.",
        floors - missed
    );
    let mut page = report::head(results, context.took_s, &headline);
    if setup.programs.is_empty() {
        page.push_str(&pivot(setup, measured));
    }
    plots.iter().for_each(|(_, plot)| page.push_str(plot));
    page.push_str("<h2>All rows</h2>\n");
    page.push_str(&report::table(results));
    page.push_str(&report::list("What was lost", losses(results, measured)));
    page.push_str(&report::list("How it was measured", &context.setup));
    page.push_str(report::TAIL);
    page
}

/// PIVOT's tables I to IV: transactions per second and mean latency of each round.
fn pivot(setup: &Setup, measured: &Measured) -> String {
    let ways: Vec<Route> = Route::ALL.into_iter().filter(|way| setup.ways.contains(way)).collect();
    let names: Vec<&str> = ways.iter().map(|way| way.name()).collect();
    let sides = [true, false];
    let mut out = String::new();
    for (numeral, test) in [("I", Test::TcpRr), ("II", Test::UdpRr)] {
        let case = Case::new(test, TABLE_BYTES);
        let find = |round, at: usize| {
            let mut loads = measured.loads.iter();
            let load = loads.find(|l| (l.round, l.case, l.way) == (round, case, ways[at]))?;
            Some((load.sample.value, load.sample.mean_us?))
        };
        let head = format!("{} between guests (PIVOT, table {numeral})", case.name());
        out.push_str(&pivot_table(&head, &names, setup.rounds, find));
    }
    for (numeral, test) in [("III", Test::TcpRr), ("IV", Test::UdpRr)] {
        let find = |round, at: usize| {
            let mut loads = measured.others.iter();
            let load = loads.find(|l| (l.round, l.test, l.hook) == (round, test, sides[at]))?;
            Some((load.sample.value, load.sample.mean_us?))
        };
        let head = format!("{}, guest and host (PIVOT, table {numeral})", test.name());
        let names = sides.map(others::side);
        if setup.hook_packets > 0 {
            out.push_str(&pivot_table(&head, &names, setup.rounds, find));
        }
    }
    out
}

/// A line for each round and one for the medians; nothing if nothing was measured.
fn pivot_table(
    head: &str,
    names: &[&str],
    rounds: u32,
    find: impl Fn(u32, usize) -> Option<(f64, f64)>,
) -> String {
    let any = (1..=rounds).any(|round| (0..names.len()).any(|at| find(round, at).is_some()));
    if !any {
        return String::new();
    }
    let mut out =
        format!("<h2>{}</h2>\n<div class=\"scroll\"><table><tr><th>Round</th>", escape(head));
    for name in names {
        let _ =
            write!(out, "<th class=\"n\">{}: 1/s</th><th class=\"n\">mean, µs</th>", escape(name));
    }
    out.push_str("</tr>\n");
    let mut line = |name: &str, of: &dyn Fn(usize) -> Option<(f64, f64)>| {
        let _ = write!(out, "<tr><td>{name}</td>");
        for at in 0..names.len() {
            let (rate, mean) = of(at)
                .map_or(("–".into(), "–".into()), |(rate, mean)| (number(rate), number(mean)));
            let _ = write!(out, "<td class=\"n\">{rate}</td><td class=\"n\">{mean}</td>");
        }
        out.push_str("</tr>\n");
    };
    for round in 1..=rounds {
        line(&round.to_string(), &|at| find(round, at));
    }
    line("median", &|at| {
        let all: Vec<_> = (1..=rounds).filter_map(|round| find(round, at)).collect();
        let middle = |of: fn(&(f64, f64)) -> f64| {
            Some(spread(&all.iter().map(of).collect::<Vec<_>>())?.median)
        };
        Some((middle(|p| p.0)?, middle(|p| p.1)?))
    });
    out.push_str("</table></div>\n");
    out
}

/// Floors missed, loads that failed or were disturbed, datagrams lost, and what the hook costs.
pub fn losses(results: &Results, measured: &Measured) -> Vec<String> {
    let missed = results.rows.iter().filter(|r| r.missed()).map(|r| {
        let floor = floor_text(r.target.unwrap_or_default());
        format!("{}, {}: {:.2}× of {}, floor {floor}", r.case, r.ours.name, r.ratio, r.peer.name)
    });
    let mut out: Vec<String> = missed.collect();
    out.extend(measured.failed.iter().map(Failure::text));
    out.extend(disturbed(measured));
    out.extend(apart(measured));
    out.extend(lost(measured));
    if let Some(added) = spread(&hook_ns(measured)) {
        out.push(format!(
            "the hook adds {:.0} ns ({:.0} to {:.0}) to a packet that it does not take",
            added.median, added.min, added.max
        ));
    }
    out
}

/// How many loads strangers disturbed.
fn disturbed(measured: &Measured) -> Option<String> {
    let loads = measured.loads.iter().filter(|l| l.round > 0).map(|l| l.sample.foreign);
    let others = measured.others.iter().filter(|l| l.round > 0).map(|l| l.sample.foreign);
    let programs = measured.programs.iter().filter(|l| l.round > 0).map(|l| l.foreign);
    let all: Vec<f64> = loads.chain(others).chain(programs).collect();
    let count = all.iter().filter(|foreign| **foreign > FOREIGN_LIMIT).count();
    (count > 0).then(|| {
        let limit = FOREIGN_LIMIT * 100.0;
        format!(
            "strangers used more than {limit:.0} % of the machine in {count} of {} loads",
            all.len()
        )
    })
}

/// Streams between guests whose CPUs were far from each other, and how long they had waited.
fn apart(measured: &Measured) -> Option<String> {
    let is_stream = |l: &&Load| l.round > 0 && !l.case.test.is_rr() && l.way != Route::Loopback;
    let streams = measured.loads.iter().filter(is_stream);
    let all: Vec<f64> = streams.filter_map(|l| l.sample.apart_ns).flatten().collect();
    let of = spread(&all)?;
    let far = all.iter().filter(|ns| is_far(**ns)).count();
    (far > 0 || measured.waited_s > 0.0).then(|| {
        format!(
            "streams waited {:.0} s for near CPUs; a cache line then took {:.0} ns ({:.0} to {:.0}) from one \
             guest’s CPU to the other’s and back, and more than {FAR_NS} ns in {far} of {} measurements",
            measured.waited_s,
            of.median,
            of.min,
            of.max,
            all.len()
        )
    })
}

/// Datagrams that did not arrive, by way: the median over its streams.
fn lost(measured: &Measured) -> Vec<String> {
    let share = |way: Route| {
        let streams = measured.loads.iter().filter(|l| l.round > 0 && l.way == way);
        let streams = streams.filter(|l| l.case.test == Test::UdpStream);
        spread(&streams.filter_map(|l| l.sample.lost).collect::<Vec<_>>())
    };
    let shares = Route::ALL.into_iter().filter_map(|way| Some((way, share(way)?)));
    let told = shares.filter(|(_, share)| share.max > 0.0).map(|(way, share)| {
        format!(
            "udp_stream, {}: {:.1} % of the datagrams did not arrive (most {:.1} %)",
            way.name(),
            share.median * 100.0,
            share.max * 100.0
        )
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;
    use crate::suites::channels::rows;
    use crate::suites::channels::testing::{measured, setup};

    fn names(written: &[PathBuf]) -> Vec<&str> {
        written.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect()
    }

    #[test]
    fn a_run_leaves_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let (setup, measured) = (Setup { programs: Vec::new(), ..setup() }, measured());
        let results = Results { rows: rows::rows(&setup, &measured), ..samples::results() };
        let folder = dir.path().join("deep");
        let written = write_all(&folder, &setup, &results, &measured, &Context::default()).unwrap();
        let ends = [
            ".json",
            "-rounds.json",
            "-rr.svg",
            "-latency.svg",
            "-stream.svg",
            "-cpu.svg",
            "-hook.svg",
            ".html",
        ];
        assert_eq!(names(&written), ends.map(|end| format!("bench-channels{end}")));
        assert_eq!(Results::read(&written[0]).unwrap(), results);
        let read: Measured = serde_json::from_slice(&std::fs::read(&written[1]).unwrap()).unwrap();
        assert_eq!(read, measured);
        let page = std::fs::read_to_string(&written[7]).unwrap();
        assert!(page.contains("6 of 6 floors reached") && page.contains("PIVOT, table IV"));
        assert!(page.contains("<td>median</td><td class=\"n\">9,000</td><td class=\"n\">111</td>"));
    }

    #[test]
    fn programs_have_files_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let (setup, measured) = (setup(), measured());
        let results = Results { rows: rows::rows(&setup, &measured), ..samples::results() };
        let context = Context::default();
        let written = write_all(dir.path(), &setup, &results, &measured, &context).unwrap();
        let ends = [".json", "-rounds.json", ".svg", ".html"];
        assert_eq!(names(&written), ends.map(|end| format!("bench-channels-programs{end}")));
    }

    #[test]
    fn what_was_lost_is_told() {
        let (setup, mut measured) = (setup(), measured());
        for load in &mut measured.loads {
            if load.way == Route::ChannelPoll {
                load.sample.value /= 2.0;
            }
            if load.way == Route::OvsNormal && load.case.test == Test::UdpStream {
                load.sample.lost = Some(0.25);
            }
        }
        measured.others[3].sample.foreign = 0.0;
        measured.waited_s = 7.0;
        measured.loads.last_mut().unwrap().sample.foreign = 0.5;
        measured.fail("tcp_rr_64", "ovs-normal", "round 1: gone".into());
        let results = Results { rows: rows::rows(&setup, &measured), ..samples::results() };
        let is_stream = |l: &&Load| l.round > 0 && !l.case.test.is_rr() && l.way != Route::Loopback;
        let streams = measured.loads.iter().filter(is_stream).count();
        let far = measured.loads.iter().filter(is_stream).filter(|l| l.round == 3).count();
        let all = measured.loads.iter().filter(|l| l.round > 0).count()
            + measured.others.iter().filter(|l| l.round > 0).count()
            + measured.programs.iter().filter(|l| l.round > 0).count();
        assert_eq!(
            losses(&results, &measured),
            [
                "tcp_rr_64, channel-poll: 1.50× of tap-bridge, floor 2.0×".to_owned(),
                "udp_rr_64, channel-poll: 1.50× of tap-bridge, floor 2.0×".into(),
                "tcp_stream_best, channel-poll: 0.75× of loopback, floor 1.0×".into(),
                "udp_stream_best, channel-poll: 0.75× of loopback, floor 1.0×".into(),
                "tcp_rr_64, ovs-normal: failed in round 1: gone".into(),
                format!("strangers used more than 15 % of the machine in 1 of {all} loads"),
                format!(
                    "streams waited 7 s for near CPUs; a cache line then took 60 ns (60 to 300) from one \
                     guest’s CPU to the other’s and back, and more than 200 ns in {} of {} measurements",
                    2 * far,
                    2 * streams
                ),
                "udp_stream, ovs-normal: 25.0 % of the datagrams did not arrive (most 25.0 %)"
                    .into(),
                "the hook adds 100 ns (100 to 100) to a packet that it does not take".into(),
            ]
        );
    }
}
