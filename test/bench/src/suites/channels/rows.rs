//! Rows in the published format: medians over the rounds.

use super::case::{Case, Test};
use super::{
    HookLoad, Load, Measured, OthersLoad, ProgramLoad, Route, Sample, Setup, others, programs,
};
use crate::harness::distance::{FAR_NS, is_far};
use crate::harness::output::RowSource;
use crate::harness::paired::{About, Goal, NONE, row};
use crate::harness::repeat::{Failure, lost};
use crate::harness::results::{Missing, Row};
use crate::harness::stats::{Better, spread};

/// Message size of the floors: a request that fits into one cache line.
const FLOOR_BYTES: u32 = 64;
/// Round trips against TAP and bridge, as the module is shipped, and with sockets that poll.
const POLL: Goal = Goal { target: Some(2.0), aim: Some(2.5) };
const BUSY: Goal = Goal { target: Some(2.5), aim: Some(4.0) };
/// A stream against the guest's own loopback, at the size at which it is fastest.
const STREAM: Goal = Goal { target: Some(1.0), aim: Some(1.5) };
/// Real programs against TAP and bridge.
const PROGRAM: Goal = Goal { target: Some(1.5), aim: Some(2.0) };

/// Routes of ours, each with those that it is compared with.
type Pairs = &'static [(Route, &'static [Route])];

/// Pairs of routes that are compared in round trips.
const RR: Pairs = &[
    (
        Route::ChannelPoll,
        &[Route::TapBridge, Route::TapVhost, Route::Switch, Route::OvsNormal, Route::Loopback],
    ),
    (Route::ChannelBusy, &[Route::TapBridge, Route::TapBridgeBusy]),
    (
        Route::Channel,
        &[Route::TapBridge, Route::Switch, Route::OvsNormal, Route::ChannelCopy, Route::Loopback],
    ),
    (Route::ChannelCopy, &[Route::TapBridge]),
];
/// The same in latency.
const LATENCY: Pairs = &[
    (Route::ChannelPoll, &[Route::TapBridge, Route::TapVhost]),
    (Route::ChannelBusy, &[Route::TapBridge, Route::TapBridgeBusy]),
    (Route::Channel, &[Route::TapBridge]),
];
/// The same in streams.
const STREAMS: Pairs = &[
    (
        Route::Channel,
        &[Route::Loopback, Route::TapBridge, Route::Switch, Route::OvsNormal, Route::ChannelCopy],
    ),
    (Route::ChannelPoll, &[Route::Loopback, Route::TapBridge, Route::TapVhost]),
    (Route::ChannelCopy, &[Route::Loopback, Route::TapBridge]),
];
/// Routes whose best size is compared with the loopback at the same size. As with all goals, the
/// one that counts is the channel as it is shipped.
const BEST: [(Route, Goal); 2] = [(Route::Channel, NONE), (Route::ChannelPoll, STREAM)];

/// All pairs, one by one: ours, and the peer.
fn each(pairs: Pairs) -> impl Iterator<Item = (Route, Route)> {
    pairs.iter().flat_map(|(ours, peers)| peers.iter().map(|peer| (*ours, *peer)))
}

impl RowSource<Setup> for Measured {
    fn rows(&self, setup: &Setup) -> Vec<Row> {
        let mut rows = Vec::new();
        for case in &setup.cases {
            let pairs = if case.test.is_rr() { RR } else { STREAMS };
            rows.extend(each(pairs).filter_map(|pair| rate_row(setup, self, *case, pair)));
            if case.test.is_rr() {
                for percentile in PERCENTILES {
                    let row = |pair| latency_row(setup, self, (*case, percentile), pair);
                    rows.extend(each(LATENCY).filter_map(row));
                }
            }
        }
        for test in [Test::TcpStream, Test::UdpStream] {
            for (way, goal) in BEST {
                let best = best_row(setup, self, (test, way), goal);
                rows.extend(best.iter().flat_map(|(case, _)| apart_rows(setup, self, *case, way)));
                rows.extend(best.map(|(_, row)| row));
            }
        }
        for test in [Test::TcpRr, Test::UdpRr] {
            rows.extend(others_row(setup, self, test));
        }
        rows.extend(hook_row(setup, self));
        for job in setup.programs.iter().flat_map(|program| program.jobs()) {
            for way in [Route::ChannelPoll, Route::Channel] {
                rows.extend(program_rows(setup, self, job, way));
            }
            rows.extend(own_work_row(setup, self, job));
        }
        rows
    }

    fn failed(&self) -> &[Failure] {
        &self.failed
    }

    /// A run with a load that failed for good has not shown that everything went its way.
    fn missing(&self, _rows: &[Row]) -> Vec<Missing> {
        lost(&self.failed)
    }
}

/// A percentile's ending of the row's name, and where it is.
type Percentile = (&'static str, fn(&Sample) -> Option<f64>);
const PERCENTILES: [Percentile; 2] = [("_p50", |s| s.p50_us), ("_p99", |s| s.p99_us)];

fn find(measured: &Measured, round: u32, case: Case, way: Route) -> Option<&Load> {
    measured.loads.iter().find(|l| (l.round, l.case, l.way) == (round, case, way))
}

fn rate_row(
    setup: &Setup,
    measured: &Measured,
    case: Case,
    (ours, peer): (Route, Route),
) -> Option<Row> {
    let side = |round, way| {
        let sample = find(measured, round, case, way)?.sample;
        Some((sample.value, Some(sample.cpu_us_per_op)))
    };
    let goal = match (ours, peer) {
        _ if !case.test.is_rr() || case.bytes != FLOOR_BYTES => NONE,
        (Route::ChannelPoll, Route::TapBridge) => POLL,
        (Route::ChannelBusy, Route::TapBridge) => BUSY,
        _ => NONE,
    };
    let about = About {
        case: case.name(),
        ours: ours.name(),
        peer: peer.name(),
        unit: case.test.unit(),
        better: Better::Higher,
        goal,
        mode: mode(setup, case),
    };
    row(about, setup.rounds, |round| Some((side(round, ours)?, side(round, peer)?)))
}

fn latency_row(
    setup: &Setup,
    measured: &Measured,
    (case, (end, pick)): (Case, Percentile),
    (ours, peer): (Route, Route),
) -> Option<Row> {
    let side = |round, way| Some((pick(&find(measured, round, case, way)?.sample)?, None));
    let about = About {
        case: format!("{}{end}", case.name()),
        ours: ours.name(),
        peer: peer.name(),
        unit: "µs",
        better: Better::Lower,
        goal: NONE,
        mode: mode(setup, case),
    };
    row(about, setup.rounds, |round| Some((side(round, ours)?, side(round, peer)?)))
}

/// The size at which our own median is highest, and both there.
fn best_row(
    setup: &Setup,
    measured: &Measured,
    (test, way): (Test, Route),
    goal: Goal,
) -> Option<(Case, Row)> {
    let peak = |case: &&Case| {
        let loads = measured.loads.iter().filter(|l| l.round > 0 && l.way == way);
        let values = loads.filter(|l| l.case == **case).map(|l| l.sample.value);
        spread(&values.collect::<Vec<_>>()).map_or(0.0, |s| s.median)
    };
    let cases = setup.cases.iter().filter(|case| case.test == test);
    let best = cases.max_by(|a, b| peak(a).total_cmp(&peak(b)))?;
    let row = rate_row(setup, measured, *best, (way, Route::Loopback))?;
    let row = Row {
        case: format!("{}_best", test.name()),
        target: goal.target,
        aim: goal.aim,
        mode: Some(format!("{}: the size at which {} is fastest", mode(setup, *best), way.name())),
        ..row
    };
    Some((*best, row))
}

/// The rounds of a case in which the guests' CPUs were near each other all the time, and those in
/// which they were far. The loopback's bytes stay on one CPU, so these are different questions.
fn apart_rows(setup: &Setup, measured: &Measured, case: Case, way: Route) -> Vec<Row> {
    let row_of = |far: bool| {
        let is_so = |apart_ns: [f64; 2]| apart_ns.iter().all(|ns| is_far(*ns) == far);
        let among = |load: &&Load| load.way != way || load.sample.apart_ns.is_some_and(is_so);
        let loads = measured.loads.iter().filter(|l| l.case == case).filter(among).copied();
        let part = Measured { loads: loads.collect(), ..Measured::default() };
        let row = rate_row(setup, &part, case, (way, Route::Loopback))?;
        let (end, what) = if far { ("far", "more") } else { ("near", "no more") };
        Some(Row {
            case: format!("{}_best_{end}", case.test.name()),
            mode: Some(format!(
                "{}: the {} of {} rounds in which a cache line took {what} than {FAR_NS} ns between the guests’ \
                 CPUs and back, before and after",
                mode(setup, case),
                row.rounds,
                setup.rounds
            )),
            ..row
        })
    };
    [false, true].into_iter().filter_map(row_of).collect()
}

fn others_row(setup: &Setup, measured: &Measured, test: Test) -> Option<Row> {
    let side = |round, hook| {
        let wanted = |l: &&OthersLoad| (l.round, l.test, l.hook) == (round, test, hook);
        let sample = measured.others.iter().find(wanted)?.sample;
        Some((sample.value, Some(sample.cpu_us_per_op)))
    };
    let about = About {
        case: others::case(test),
        ours: others::side(true),
        peer: others::side(false),
        unit: "1/s",
        better: Better::Higher,
        goal: NONE,
        mode: "client and the host’s end of the TAP bridge, millrace_net loaded and not".into(),
    };
    row(about, setup.rounds, |round| Some((side(round, true)?, side(round, false)?)))
}

/// Nanoseconds that the hook adds to a packet, by round.
pub fn hook_ns(measured: &Measured) -> Vec<f64> {
    let with = measured.hook.iter().filter(|l| l.hook && l.round > 0);
    let added = |l: &HookLoad| {
        let without = measured.hook.iter().find(|o| !o.hook && o.round == l.round)?;
        Some(l.packet_ns - without.packet_ns)
    };
    with.filter_map(added).collect()
}

fn hook_row(setup: &Setup, measured: &Measured) -> Option<Row> {
    let side = |round, hook| {
        let wanted = |l: &&HookLoad| (l.round, l.hook) == (round, hook);
        Some((measured.hook.iter().find(wanted)?.packet_ns, None))
    };
    let added = spread(&hook_ns(measured))?;
    let about = About {
        case: others::HOOK_CASE.into(),
        ours: others::side(true),
        peer: others::side(false),
        unit: "ns",
        better: Better::Lower,
        goal: NONE,
        mode: format!(
            "one of {} datagrams to nobody; the hook adds {:.0} ns ({:.0} to {:.0})",
            setup.hook_packets, added.median, added.min, added.max
        ),
    };
    row(about, setup.rounds, |round| Some((side(round, true)?, side(round, false)?)))
}

fn find_program<'a>(
    measured: &'a Measured,
    job: &programs::Job,
    round: u32,
    way: Route,
) -> Option<&'a ProgramLoad> {
    let wanted = |l: &&ProgramLoad| (l.round, l.way) == (round, way) && l.case == job.case;
    measured.programs.iter().find(wanted)
}

/// CPU time that an operation costs without any way between guests, against the peer's: no way can
/// gain more where the CPUs are busy.
fn own_work_row(setup: &Setup, measured: &Measured, job: &programs::Job) -> Option<Row> {
    let side = |round, way| Some((find_program(measured, job, round, way)?.cpu_us_per_op, None));
    let about = About {
        case: format!("{}_own_work", job.case),
        ours: Route::Loopback.name(),
        peer: Route::TapBridge.name(),
        unit: "µs",
        better: Better::Lower,
        goal: NONE,
        mode: format!("CPU time per {}; {}", per(job.unit), job.mode),
    };
    row(about, setup.rounds, |round| {
        Some((side(round, Route::Loopback)?, side(round, Route::TapBridge)?))
    })
}

fn per(unit: &str) -> &str {
    if unit == "1/s" { "request" } else { "MB" }
}

/// Throughput, and latency where the program tells it.
fn program_rows(setup: &Setup, measured: &Measured, job: &programs::Job, way: Route) -> Vec<Row> {
    let find = |round, way| find_program(measured, job, round, way);
    let about = |end: &str, unit, better, goal| About {
        case: format!("{}{end}", job.case),
        ours: way.name(),
        peer: Route::TapBridge.name(),
        unit,
        better,
        goal,
        mode: job.mode.into(),
    };
    let shipped = way == Route::ChannelPoll;
    let goal = if shipped { PROGRAM } else { NONE };
    let rate = row(about("", job.unit, Better::Higher, goal), setup.rounds, |round| {
        let side = |way| find(round, way).map(|l| (l.value, Some(l.cpu_us_per_op)));
        Some((side(way)?, side(Route::TapBridge)?))
    });
    let latency = row(about("_latency", "µs", Better::Lower, NONE), setup.rounds, |round| {
        let side = |way| Some((find(round, way)?.latency_us?, None));
        Some((side(way)?, side(Route::TapBridge)?))
    });
    rate.into_iter().chain(latency).collect()
}

fn mode(setup: &Setup, case: Case) -> String {
    let vcpus = setup.vcpus;
    let plural = if vcpus == 1 { "" } else { "s" };
    format!("messages of {} bytes, {vcpus} vCPU{plural} each", case.bytes)
}

#[cfg(test)]
mod tests;
