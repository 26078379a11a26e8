//! The report as an SVG: bars for each run, and the active sidecores over time.

use std::fmt::Write;

use crate::report::{Report, Run};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 150.0;
const ROW: f64 = 20.0;
const PANEL_TOP: f64 = 34.0;
const TIME_HEIGHT: f64 = 160.0;

const STYLE: &str = "<style>
.bg{fill:#fff}.t{fill:#1b2328;font:13px system-ui,'DejaVu Sans',sans-serif}
.s{fill:#5c6870;font:11px system-ui,'DejaVu Sans',sans-serif}.e{text-anchor:end}
.b{fill:#2f9e8f}.g{stroke:#dde3e7}.l{fill:none;stroke-width:1.8}
@media(prefers-color-scheme:dark){.bg{fill:#151a1e}.t{fill:#e6ebee}.s{fill:#9aa7af}.g{stroke:#2b343a}}
</style>";

const COLOURS: [&str; 6] = ["#a9b4bb", "#d9634c", "#c08a2d", "#2f9e8f", "#4a7fc1", "#8d5fb3"];

/// A panel: its title, its unit's digits, and what it shows of a run.
type Panel = (&'static str, usize, fn(&Run) -> f64);

const PANELS: [Panel; 4] = [
    ("Gbit/s", 2, |run| run.bytes_per_s * 8.0 / 1e9),
    ("p50 µs, worst class", 1, |run| worst(run, |c| c.p50_us)),
    ("p99 µs, worst class", 1, |run| worst(run, |c| c.p99_us)),
    ("CPUs used", 2, |run| run.cpus),
];

fn worst(run: &Run, of: fn(&crate::report::Class) -> f64) -> f64 {
    run.classes.iter().map(of).fold(0.0, f64::max)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// Draws it.
pub fn svg(report: &Report) -> String {
    let rows = report.runs.len() as f64 * ROW;
    let time_top = PANEL_TOP + 24.0 + rows + 40.0;
    let height = time_top + TIME_HEIGHT + 30.0;
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" role=\"img\" aria-label=\"{name}\">\n{STYLE}\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" class=\"bg\"/>\n\
         <text x=\"12\" y=\"22\" class=\"t\">{name}, seed {}, {} virtual seconds</text>\n",
        report.seed,
        report.seconds,
        name = escape(&report.scenario),
    );
    for (i, run) in report.runs.iter().enumerate() {
        let y = PANEL_TOP + 38.0 + i as f64 * ROW;
        let name = escape(&run.name);
        let _ =
            writeln!(out, "<text x=\"{}\" y=\"{y:.1}\" class=\"s e\">{name}</text>", LEFT - 8.0);
    }
    let width = (WIDTH - LEFT) / PANELS.len() as f64;
    for (i, panel) in PANELS.iter().enumerate() {
        bars(&mut out, report, panel, LEFT + i as f64 * width, width - 70.0);
    }
    over_time(&mut out, report, time_top);
    out.push_str("</svg>\n");
    out
}

fn bars(out: &mut String, report: &Report, (title, digits, of): &Panel, x: f64, width: f64) {
    let most = report.runs.iter().map(of).fold(f64::MIN_POSITIVE, f64::max);
    let _ =
        writeln!(out, "<text x=\"{x:.1}\" y=\"{}\" class=\"t\">{title}</text>", PANEL_TOP + 14.0);
    for (i, run) in report.runs.iter().enumerate() {
        let (value, y) = (of(run), PANEL_TOP + 26.0 + i as f64 * ROW);
        let bar = (value / most * width).max(0.5);
        let (label_x, label_y) = (x + bar + 5.0, y + 12.0);
        let _ = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{bar:.1}\" height=\"14\" class=\"b\"/>\
             <text x=\"{label_x:.1}\" y=\"{label_y:.1}\" class=\"s\">{value:.digits$}</text>",
        );
    }
}

/// Runs whose number of active sidecores ever changes.
fn over_time(out: &mut String, report: &Report, top: f64) {
    let changing: Vec<&Run> = report.runs.iter().filter(|r| r.active.len() > 1).collect();
    if changing.is_empty() {
        return;
    }
    let end_ms = 1000.0 * (report.seconds + 1) as f64;
    let most = changing.iter().flat_map(|r| r.active.iter().map(|(_, n)| *n)).max().unwrap_or(1);
    let x = |ms: f64| LEFT + ms / end_ms * (WIDTH - LEFT - 150.0);
    let y = |n: usize| top + TIME_HEIGHT - n as f64 / most as f64 * (TIME_HEIGHT - 10.0);
    let _ = writeln!(out, "<text x=\"12\" y=\"{top:.1}\" class=\"t\">active sidecores</text>");
    for n in [0, most] {
        let _ = writeln!(
            out,
            "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" class=\"g\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" class=\"s e\">{n}</text>",
            x(0.0),
            x(end_ms),
            LEFT - 8.0,
            y(n) + 4.0,
            y = y(n),
        );
    }
    for (i, run) in changing.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let mut path = String::new();
        for (at, (ms, n)) in run.active.iter().enumerate() {
            let _ = match at {
                0 => write!(path, "M{:.1} {:.1}", x(*ms as f64), y(*n)),
                _ => write!(path, "H{:.1}V{:.1}", x(*ms as f64), y(*n)),
            };
        }
        let _ = writeln!(
            out,
            "<path d=\"{path}H{:.1}\" class=\"l\" stroke=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\" style=\"font:11px sans-serif\">{}</text>",
            x(end_ms),
            x(end_ms) + 8.0,
            top + 14.0 + i as f64 * 14.0,
            escape(&run.name),
        );
    }
}
