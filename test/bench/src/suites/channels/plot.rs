//! The papers' figures: Fido's throughput and latency by message size, PIVOT's comparison of
//! totals, and what each costs the host.

use super::case::{Case, Test};
use super::{Load, Measured, Route, Setup};
use crate::harness::stats::spread;
use crate::harness::svg::{Canvas, SERIES, WIDTH};
use crate::harness::table::number;
use crate::harness::table::size_text;

const TOP: f64 = 84.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 30.0;
/// Height of a panel's title.
const HEAD: f64 = 24.0;
/// Height of a panel of lines.
const PANEL: f64 = 240.0;
const GAP: f64 = 40.0;
/// A lying bar with its distance to the next.
const LINE: f64 = 20.0;
/// Left of lying bars: the names of ways.
const NAMES: f64 = 150.0;
/// Logarithmic axes have a line at each of these, times powers of ten.
const MARKS: [f64; 3] = [1.0, 2.0, 5.0];

/// A panel: its title, and for each way its points.
type Panel = (String, Vec<(Route, Vec<(f64, f64)>)>);

/// Lying bars with a scale of their own: their title, and each one's name, colour and value.
type Group = (String, Vec<(String, usize, f64)>);

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    Some(spread(&values.collect::<Vec<_>>())?.median)
}

/// Median of a value over the rounds that count.
pub fn of(
    measured: &Measured,
    (case, way): (Case, Route),
    value: impl Fn(&Load) -> Option<f64>,
) -> Option<f64> {
    let wanted = |l: &&Load| l.round > 0 && (l.case, l.way) == (case, way);
    median(measured.loads.iter().filter(wanted).filter_map(value))
}

fn lines(
    setup: &Setup,
    measured: &Measured,
    test: Test,
    value: impl Fn(&Load) -> Option<f64> + Copy,
) -> Vec<(Route, Vec<(f64, f64)>)> {
    let line = |&way: &Route| {
        let cases = setup.cases.iter().filter(|case| case.test == test);
        let point = |case: &Case| Some((case.bytes.into(), of(measured, (*case, way), value)?));
        let points: Vec<_> = cases.filter_map(point).collect();
        (!points.is_empty()).then_some((way, points))
    };
    Route::ALL.iter().filter_map(line).collect()
}

/// Round trips per second by message size.
pub fn rates(setup: &Setup, measured: &Measured) -> String {
    let panel = |test: Test| {
        let head = format!("{}: round trips per second", test.name());
        (head, lines(setup, measured, test, |l| Some(l.sample.value)))
    };
    let title = "Round trips by message size";
    let note = "higher is better; medians over the rounds; both axes logarithmic";
    draw(title, note, &[Test::TcpRr, Test::UdpRr].map(panel))
}

/// Latency by message size (Fido's figure 6).
pub fn latencies(setup: &Setup, measured: &Measured) -> String {
    let mut panels = Vec::new();
    for test in [Test::TcpRr, Test::UdpRr] {
        let p50 = lines(setup, measured, test, |l| l.sample.p50_us);
        let p99 = lines(setup, measured, test, |l| l.sample.p99_us);
        panels.push((format!("{}: median, µs", test.name()), p50));
        panels.push((format!("{}: 99th percentile, µs", test.name()), p99));
    }
    let note = "lower is better; medians over the rounds; both axes logarithmic";
    draw("Latency of a round trip by message size (Fido, figure 6)", note, &panels)
}

/// Streams by message size (Fido's figures 4 and 5).
pub fn streams(setup: &Setup, measured: &Measured) -> String {
    let panel = |test: Test| {
        let head = format!("{}: MB received per second", test.name());
        (head, lines(setup, measured, test, |l| Some(l.sample.value)))
    };
    let title = "Throughput by message size (Fido, figures 4 and 5)";
    let note =
        "higher is better; medians over the rounds, with near CPUs and far; both axes logarithmic";
    draw(title, note, &[Test::TcpStream, Test::UdpStream].map(panel))
}

/// One axis of a panel.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    /// Around all values, with a little room.
    fn around(values: impl Iterator<Item = f64>) -> Axis {
        let (low, high) = values
            .filter(|v| *v > 0.0)
            .fold((f64::INFINITY, 0f64), |(low, high), v| (low.min(v), high.max(v)));
        match low.is_finite() {
            true => Axis { low: low / 1.15, high: high * 1.15 },
            false => Axis { low: 1.0, high: 10.0 },
        }
    }

    /// Place of a value on the axis, from 0 to 1.
    fn at(&self, value: f64) -> f64 {
        (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
    }

    /// Round values within it.
    fn marks(&self) -> Vec<f64> {
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        let all = (first..=last).flat_map(|power| MARKS.map(|mark| mark * 10f64.powi(power)));
        all.filter(|mark| (self.low..=self.high).contains(mark)).collect()
    }
}

/// Panels below each other, with one legend.
fn draw(title: &str, note: &str, panels: &[Panel]) -> String {
    let height = TOP + panels.len() as f64 * (HEAD + PANEL + GAP);
    let mut canvas = Canvas::titled(title, note);
    let mut ways: Vec<Route> = panels.iter().flat_map(|p| p.1.iter().map(|line| line.0)).collect();
    ways.sort_unstable_by_key(|way| series(*way));
    ways.dedup();
    legend(&mut canvas, &ways, 56.0);
    for (i, panel) in panels.iter().enumerate() {
        draw_panel(&mut canvas, panel, TOP + i as f64 * (HEAD + PANEL + GAP));
    }
    canvas.finish(height, title)
}

fn draw_panel(canvas: &mut Canvas, (head, lines): &Panel, top: f64) {
    canvas.text(16.0, top + 14.0, "mr-text mr-strong", head);
    let (begin, bottom, right) = (top + HEAD, top + HEAD + PANEL, WIDTH - RIGHT);
    let points = || lines.iter().flat_map(|(_, points)| points.iter().copied());
    let (across, up) = (Axis::around(points().map(|p| p.0)), Axis::around(points().map(|p| p.1)));
    let x = |value: f64| LEFT + across.at(value) * (right - LEFT);
    let y = |value: f64| bottom - up.at(value) * (bottom - begin);
    for mark in up.marks() {
        canvas.line((LEFT, y(mark)), (right, y(mark)), "mr-grid");
        canvas.text(LEFT - 8.0, y(mark) + 4.0, "mr-small mr-end", &number(mark));
    }
    let mut sizes: Vec<f64> = points().map(|p| p.0).collect();
    sizes.sort_unstable_by(f64::total_cmp);
    sizes.dedup();
    for size in sizes {
        canvas.line((x(size), begin), (x(size), bottom), "mr-grid");
        canvas.text(x(size), bottom + 16.0, "mr-small mr-mid", &size_text(size as u64));
    }
    for (way, points) in lines {
        let points: Vec<_> = points.iter().map(|p| (x(p.0), y(p.1))).collect();
        canvas.path(&points, series(*way));
        let class = format!("mr-c{}", series(*way));
        for (x, y) in points {
            canvas.bar((x - 3.0, y - 3.0), (6.0, 6.0), &class);
        }
    }
}

/// A way has the same colour in each plot.
fn series(way: Route) -> usize {
    Route::ALL.iter().position(|w| *w == way).unwrap_or(0) % SERIES
}

fn legend(canvas: &mut Canvas, ways: &[Route], y: f64) {
    let mut x = 16.0;
    for way in ways {
        canvas.bar((x, y), (10.0, 10.0), &format!("mr-c{}", series(*way)));
        canvas.text(x + 14.0, y + 9.0, "mr-small", way.name());
        x += 30.0 + 6.0 * way.name().chars().count() as f64;
    }
}

/// Lying bars of some cases, each with a scale of its own.
fn bars(title: &str, note: &str, groups: &[Group]) -> String {
    let lines = |group: &Group| HEAD + group.1.len() as f64 * LINE + 12.0;
    let height = TOP - 20.0 + groups.iter().map(lines).sum::<f64>();
    let mut canvas = Canvas::titled(title, note);
    let mut top = TOP - 20.0;
    for group in groups {
        canvas.text(16.0, top + 14.0, "mr-text mr-strong", &group.0);
        let most = group.1.iter().map(|bar| bar.2).fold(f64::MIN_POSITIVE, f64::max);
        for (i, (name, series, value)) in group.1.iter().enumerate() {
            let y = top + HEAD + i as f64 * LINE;
            let width = value / most * (WIDTH - NAMES - 120.0);
            canvas.text(NAMES - 10.0, y + 11.0, "mr-small mr-end", name);
            canvas.bar((NAMES, y), (width, LINE - 6.0), &format!("mr-c{series}"));
            canvas.text(NAMES + width + 6.0, y + 11.0, "mr-small", &number(*value));
        }
        top += lines(group);
    }
    canvas.finish(height, title)
}

/// Host CPU time per operation, at the smallest and the largest message.
pub fn cpu(setup: &Setup, measured: &Measured) -> String {
    let mut groups = Vec::new();
    for test in Test::ALL {
        let mut cases: Vec<Case> =
            setup.cases.iter().filter(|case| case.test == test).copied().collect();
        cases.sort_unstable_by_key(|case| case.bytes);
        let ends = cases.first().into_iter().chain(cases.last().filter(|_| cases.len() > 1));
        for case in ends {
            let bar = |&way: &Route| {
                let value = of(measured, (*case, way), |l| Some(l.sample.cpu_us_per_op))?;
                Some((way.name().to_owned(), series(way), value))
            };
            let what = if test.is_rr() { "µs a round trip" } else { "µs a MB" };
            groups.push((
                format!("{}, {what}", case.name()),
                Route::ALL.iter().filter_map(bar).collect(),
            ));
        }
    }
    let note = "lower is better; both QEMUs with their guests, and the daemon or Open vSwitch";
    bars("Host CPU time per operation", note, &groups)
}

/// Plots the hook's cost for those who do not use the channel (PIVOT's tables III and IV).
pub fn hook(measured: &Measured) -> String {
    let mut groups = Vec::new();
    for test in [Test::TcpRr, Test::UdpRr] {
        let bar = |hook| {
            let loads = measured.others.iter().filter(|l| l.round > 0 && l.hook == hook);
            let value = median(loads.filter(|l| l.test == test).map(|l| l.sample.value))?;
            Some((super::others::side(hook).to_owned(), usize::from(!hook), value))
        };
        let bars = [true, false].into_iter().filter_map(bar).collect();
        groups.push((format!("{} with the host, round trips per second", test.name()), bars));
    }
    let bar = |hook| {
        let loads = measured.hook.iter().filter(|l| l.round > 0 && l.hook == hook);
        let value = median(loads.map(|l| l.packet_ns))?;
        Some((super::others::side(hook).to_owned(), usize::from(!hook), value))
    };
    let bars_ns = [true, false].into_iter().filter_map(bar).collect();
    groups.push(("a datagram to nobody, ns".into(), bars_ns));
    let note = "millrace_net loaded and not; its packets are not taken either way";
    bars("Traffic to others (PIVOT, tables III and IV)", note, &groups)
}

/// Real programs: requests or MB per second.
pub fn programs(setup: &Setup, measured: &Measured) -> String {
    let jobs = setup.programs.iter().flat_map(|program| program.jobs());
    let group = |job: &super::programs::Job| {
        let bar = |&way: &Route| {
            let loads = measured.programs.iter().filter(|l| l.round > 0 && l.way == way);
            let value = median(loads.filter(|l| l.case == job.case).map(|l| l.value))?;
            Some((way.name().to_owned(), series(way), value))
        };
        let bars = super::programs::WAYS.iter().filter_map(bar).collect();
        (format!("{}, {}: {}", job.case, job.unit, job.mode), bars)
    };
    let groups: Vec<_> = jobs.map(group).collect();
    bars("Real programs between two guests", "higher is better", &groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::channels::testing::{measured, setup};

    #[test]
    fn each_way_has_its_line_in_both_panels() {
        let svg = rates(&setup(), &measured());
        assert_eq!(svg.matches("<polyline").count(), 2 * Route::ALL.len());
        // Sockets that poll are for round trips only.
        let svg = streams(&setup(), &measured());
        assert_eq!(svg.matches("<polyline").count(), 2 * (Route::ALL.len() - 2));
        assert!(svg.contains(">64k</text>") && svg.contains(">60000</text>"), "{svg}");
        let svg = latencies(&setup(), &measured());
        assert_eq!(svg.matches("<polyline").count(), 4 * Route::ALL.len());
    }

    #[test]
    fn axes_are_logarithmic() {
        let axis = Axis { low: 1.0, high: 100.0 };
        assert!((axis.at(10.0) - 0.5).abs() < 1e-9 && axis.at(0.0) == 0.0);
        assert_eq!(axis.marks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert!(Axis::around([0.0, f64::NAN].into_iter()).at(10.0).is_finite());
    }

    #[test]
    fn bars_show_cpu_hook_and_programs() {
        let svg = cpu(&setup(), &measured());
        assert!(svg.contains(">tcp_rr_64, µs a round trip</text>"), "{svg}");
        assert!(svg.contains(">udp_stream_60000, µs a MB</text>"), "{svg}");
        let svg = hook(&measured());
        assert!(svg.contains(">5,102</text>") && svg.contains(">no-hook</text>"), "{svg}");
        let svg = programs(&setup(), &measured());
        assert!(svg.contains("redis_get_1, 1/s: GET"), "{svg}");
    }

    #[test]
    fn nothing_measured_still_draws() {
        let (setup, nothing) = (setup(), Measured::default());
        let all = [
            rates(&setup, &nothing),
            latencies(&setup, &nothing),
            streams(&setup, &nothing),
            cpu(&setup, &nothing),
            hook(&nothing),
            programs(&setup, &nothing),
        ];
        for svg in all {
            assert!(svg.ends_with("</svg>\n"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
