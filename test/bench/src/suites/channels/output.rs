//! Output of a run: its files.

use std::fmt::Write as _;

use super::case::{Case, Test};
use super::rows::hook_ns;
use super::{Load, Measured, Route, Setup, others, plot};
use crate::harness::distance::{FAR_NS, is_far};
use crate::harness::output::{Page, PageSource};
use crate::harness::repeat::Failure;
use crate::harness::report;
use crate::harness::results::Results;
use crate::harness::stats::spread;
use crate::harness::svg::escape;
use crate::harness::table::number;

/// Message size of PIVOT's tables.
const TABLE_BYTES: u32 = 64;

impl PageSource<Setup> for Measured {
    fn stem(&self, setup: &Setup) -> &'static str {
        if setup.programs.is_empty() { "bench-channels" } else { "bench-channels-programs" }
    }

    fn plots(&self, setup: &Setup) -> Vec<(String, String)> {
        if !setup.programs.is_empty() {
            return vec![(".svg".into(), plot::programs(setup, self))];
        }
        let mut plots = vec![
            ("-rr.svg".to_owned(), plot::rates(setup, self)),
            ("-latency.svg".into(), plot::latencies(setup, self)),
            ("-stream.svg".into(), plot::streams(setup, self)),
            ("-cpu.svg".into(), plot::cpu(setup, self)),
        ];
        if setup.hook_packets > 0 {
            plots.push(("-hook.svg".into(), plot::hook(self)));
        }
        plots
    }

    fn page(&self, setup: &Setup, results: &Results, plots: &str) -> Page {
        let pivot = if setup.programs.is_empty() { pivot(setup, self) } else { String::new() };
        Page {
            headline: "Two guests of one host, by the channel and by other ways",
            above: [&pivot, plots, "<h2>All rows</h2>\n", &report::table(results)].concat(),
            below: String::new(),
        }
    }

    /// Datagrams lost and the hook's cost are among the sentences.
    fn losses(&self, results: &Results) -> Vec<String> {
        let mut out = report::below_floors(results, |r| format!("{}, {}:", r.case, r.ours.name));
        out.extend(self.failed.iter().map(Failure::text));
        out.extend(disturbed(self));
        out.extend(apart(self));
        out.extend(lost(self));
        if let Some(added) = spread(&hook_ns(self)) {
            out.push(format!(
                "the hook adds {:.0} ns ({:.0} to {:.0}) to a packet that it does not take",
                added.median, added.min, added.max
            ));
        }
        out
    }
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

/// How many loads strangers disturbed.
fn disturbed(measured: &Measured) -> Option<String> {
    let loads = measured.loads.iter().filter(|l| l.round > 0).map(|l| l.sample.foreign);
    let others = measured.others.iter().filter(|l| l.round > 0).map(|l| l.sample.foreign);
    let programs = measured.programs.iter().filter(|l| l.round > 0).map(|l| l.foreign);
    report::disturbed(&loads.chain(others).chain(programs).collect::<Vec<_>>())
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
    use crate::harness::output::{RowSource, write_and_read};
    use crate::harness::samples;
    use crate::suites::channels::testing::{measured, setup};

    #[test]
    fn a_run_leaves_its_files() {
        let setup = Setup { programs: Vec::new(), ..setup() };
        let (ends, page) = write_and_read(&setup, &measured());
        assert_eq!(
            ends,
            ["-rr.svg", "-latency.svg", "-stream.svg", "-cpu.svg", "-hook.svg", ".html"]
        );
        assert_eq!(measured().stem(&setup), "bench-channels");
        assert!(page.contains("6 of 6 floors reached") && page.contains("PIVOT, table IV"));
        assert!(page.contains("<td>median</td><td class=\"n\">9,000</td><td class=\"n\">111</td>"));
    }

    #[test]
    fn programs_have_files_of_their_own() {
        let (ends, _) = write_and_read(&setup(), &measured());
        assert_eq!(ends, [".svg", ".html"]);
        assert_eq!(measured().stem(&setup()), "bench-channels-programs");
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
        let results = Results { rows: measured.rows(&setup), ..samples::results() };
        let is_stream = |l: &&Load| l.round > 0 && !l.case.test.is_rr() && l.way != Route::Loopback;
        let streams = measured.loads.iter().filter(is_stream).count();
        let far = measured.loads.iter().filter(is_stream).filter(|l| l.round == 3).count();
        let all = measured.loads.iter().filter(|l| l.round > 0).count()
            + measured.others.iter().filter(|l| l.round > 0).count()
            + measured.programs.iter().filter(|l| l.round > 0).count();
        assert_eq!(
            measured.losses(&results),
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
