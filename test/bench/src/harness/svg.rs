//! Plots written by hand as SVG, light and dark.
//!
//! Each plot is a complete file of its own and may also stand inside an HTML page: its style
//! classes all begin with `mr-`.

use crate::harness::results::{Results, Row, Stand};
use crate::harness::table::{number, quantity};

pub(crate) const WIDTH: f64 = 860.0;
const ROW_HEIGHT: f64 = 54.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 40.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 150.0;

/// Colours of series: `mr-sN` of lines, `mr-cN` of what is filled.
pub(crate) const SERIES: usize = 10;

const STYLE: &str = "<style>
.mr-bg{fill:#ffffff}.mr-text{fill:#1b2328;font-family:system-ui,'DejaVu Sans',sans-serif;font-size:13px}
.mr-small{fill:#5c6870;font-family:system-ui,'DejaVu Sans',sans-serif;font-size:11px}
.mr-title{font-size:16px;font-weight:600}.mr-strong{font-weight:600}
.mr-end{text-anchor:end}.mr-mid{text-anchor:middle}
.mr-grid{stroke:#dde3e7;stroke-width:1}.mr-one{stroke:#5c6870;stroke-width:1.5}
.mr-whisker{stroke:#1b2328;stroke-width:1.5}.mr-dot{fill:#1b2328}.mr-interval{stroke:#1b2328;stroke-width:4}
.mr-floor{stroke:#c2410c;stroke-width:2.5}.mr-aim{stroke:#c2410c;stroke-width:1.5;stroke-dasharray:3 3}
.mr-good{fill:#2f9e8f}.mr-bad{fill:#d9634c}.mr-level,.mr-peer{fill:#a9b4bb}
.mr-f0{fill:#2f9e8f}.mr-f1{fill:#8fd0c6}.mr-f2{fill:#d97706}.mr-f3{fill:#6366f1}.mr-f4{fill:#d9634c}.mr-f5{fill:#a9b4bb}
.mr-s0,.mr-s1,.mr-s2,.mr-s3,.mr-s4,.mr-s5,.mr-s6,.mr-s7,.mr-s8,.mr-s9{fill:none;stroke-width:1.5}
.mr-s0{stroke:#2f9e8f}.mr-s1{stroke:#d97706}.mr-s2{stroke:#6366f1}.mr-s3{stroke:#d9634c}.mr-s4{stroke:#a9b4bb}
.mr-s5{stroke:#8fd0c6}.mr-s6{stroke:#1f6f9e}.mr-s7{stroke:#a855a0}.mr-s8{stroke:#8a7a2c}.mr-s9{stroke:#5b4bb0}
.mr-c0{fill:#2f9e8f}.mr-c1{fill:#d97706}.mr-c2{fill:#6366f1}.mr-c3{fill:#d9634c}.mr-c4{fill:#a9b4bb}
.mr-c5{fill:#8fd0c6}.mr-c6{fill:#1f6f9e}.mr-c7{fill:#a855a0}.mr-c8{fill:#8a7a2c}.mr-c9{fill:#5b4bb0}
@media(prefers-color-scheme:dark){.mr-bg{fill:#151a1e}.mr-text{fill:#e6ebee}.mr-small{fill:#9aa7af}
.mr-grid{stroke:#2b343a}.mr-one{stroke:#9aa7af}.mr-whisker,.mr-interval{stroke:#e6ebee}.mr-dot{fill:#e6ebee}
.mr-floor,.mr-aim{stroke:#fb923c}.mr-good{fill:#2a8f81}.mr-bad{fill:#c4553f}.mr-level,.mr-peer{fill:#5f6b73}}
</style>";

/// Escapes text for XML and HTML, attributes included.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

pub(crate) struct Canvas {
    pub(crate) body: String,
}

impl Canvas {
    /// A drawing with a title and, below it, a note.
    pub(crate) fn titled(title: &str, note: &str) -> Canvas {
        let mut canvas = Canvas { body: String::new() };
        canvas.text(16.0, 26.0, "mr-text mr-title", title);
        canvas.text(16.0, 44.0, "mr-small", note);
        canvas
    }

    pub(crate) fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let text = escape(text);
        self.body.push_str(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{text}</text>\n"
        ));
    }

    pub(crate) fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        self.body.push_str(&format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>\n"
        ));
    }

    /// Grid of ratios up to `most`, from `left` on, between `top` and `bottom`, and the line of 1.
    pub(crate) fn ratio_grid(
        &mut self,
        left: f64,
        (top, bottom): (f64, f64),
        scale: f64,
        most: f64,
    ) {
        let step = grid_step(most);
        let mut at = 0.0;
        while at <= most {
            let x = left + at * scale;
            self.line((x, top), (x, bottom), "mr-grid");
            self.text(x, bottom + 16.0, "mr-small mr-mid", &format!("{}×", trimmed(at)));
            at += step;
        }
        self.line((left + scale, top), (left + scale, bottom), "mr-one");
    }

    pub(crate) fn bar(&mut self, (x, y): (f64, f64), (w, h): (f64, f64), class: &str) {
        let w = w.max(0.5);
        self.body.push_str(&format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" rx=\"2\" class=\"{class}\"/>\n"
        ));
    }

    /// A line through many points, in one of the colours of series.
    pub(crate) fn path(&mut self, points: &[(f64, f64)], series: usize) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let class = series % SERIES;
        let points = points.join(" ");
        self.body.push_str(&format!("<polyline points=\"{points}\" class=\"mr-s{class}\"/>\n"));
    }

    fn dot(&mut self, x: f64, y: f64) {
        self.body
            .push_str(&format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" class=\"mr-dot\"/>\n"));
    }

    pub(crate) fn finish(self, height: f64, title: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" \
             width=\"{WIDTH:.0}\" height=\"{height:.0}\" role=\"img\" aria-label=\"{}\">\n{STYLE}\n\
             <rect width=\"{WIDTH:.0}\" height=\"{height:.0}\" class=\"mr-bg\"/>\n{}</svg>\n",
            escape(title),
            self.body
        )
    }
}

/// Distance between grid lines: 1, 2 or 5 times a power of ten, at most eight lines.
fn grid_step(most: f64) -> f64 {
    let mut step = 10f64.powf((most / 8.0).log10().floor());
    for factor in [2.0, 2.5, 2.0] {
        if most / step <= 8.0 {
            break;
        }
        step *= factor;
    }
    step
}

/// Bars of the median ratio per case, whiskers from the smallest to the largest round with the
/// interval of the median as a thick part of them, the floor as a thick tick and the aim as a
/// dashed one. A line marks 1: equal to the peer.
pub fn ratios(results: &Results) -> String {
    let rows = &results.rows;
    let most =
        rows.iter().flat_map(|r| [r.ratio_max, r.target.unwrap_or(0.0), r.aim.unwrap_or(0.0)]);
    let most = most.fold(1.0, f64::max) * 1.05;
    let scale = (WIDTH - LEFT - RIGHT) / most;
    let height = TOP + BOTTOM + rows.len() as f64 * ROW_HEIGHT;
    let interval = if results.has_intervals() {
        "; thick line: 95 % interval of the median; grey: level"
    } else {
        ""
    };
    let note = "median of the rounds' own ratios, right is better; thin line: slowest to fastest";
    let mut c = Canvas::titled("Millrace against its peers", &format!("{note} round{interval}"));
    let bottom = height - BOTTOM;
    c.ratio_grid(LEFT, (TOP - 6.0, bottom), scale, most);
    for (i, row) in rows.iter().enumerate() {
        ratio_row(&mut c, row, TOP + i as f64 * ROW_HEIGHT, scale);
    }
    c.line((LEFT, height - 12.0), (LEFT + 18.0, height - 12.0), "mr-floor");
    c.text(LEFT + 24.0, height - 8.0, "mr-small", "floor");
    c.line((LEFT + 70.0, height - 12.0), (LEFT + 88.0, height - 12.0), "mr-aim");
    c.text(LEFT + 94.0, height - 8.0, "mr-small", "aim");
    c.finish(height, "Ratio of Millrace to its peer for each case")
}

fn trimmed(v: f64) -> String {
    let text = format!("{v:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn ratio_row(c: &mut Canvas, row: &Row, top: f64, scale: f64) {
    let (bar_top, bar_height) = (top + 10.0, 26.0);
    let mid = bar_top + bar_height / 2.0;
    c.text(LEFT - 12.0, mid, "mr-text mr-end", &row.case);
    c.text(LEFT - 12.0, mid + 14.0, "mr-small mr-end", &format!("against {}", row.peer.name));
    let class = match row.stand() {
        _ if row.is_behind() => "mr-bad",
        Some(Stand::Level) => "mr-level",
        _ => "mr-good",
    };
    c.bar((LEFT, bar_top), (row.ratio * scale, bar_height), class);
    let (low, high) = (LEFT + row.ratio_min * scale, LEFT + row.ratio_max * scale);
    c.line((low, mid), (high, mid), "mr-whisker");
    for x in [low, high] {
        c.line((x, mid - 5.0), (x, mid + 5.0), "mr-whisker");
    }
    if let Some((low, high)) = row.ratio_interval {
        c.line((LEFT + low * scale, mid), (LEFT + high * scale, mid), "mr-interval");
    }
    c.dot(LEFT + row.ratio * scale, mid);
    for (at, class) in [(row.target, "mr-floor"), (row.aim, "mr-aim")] {
        if let Some(at) = at {
            let x = LEFT + at * scale;
            c.line((x, bar_top - 5.0), (x, bar_top + bar_height + 5.0), class);
        }
    }
    let stand = row.stand().map_or(String::new(), |stand| format!(" {}", stand.word()));
    c.text(WIDTH - RIGHT + 14.0, mid, "mr-text mr-strong", &format!("{:.2}×{stand}", row.ratio));
    let value = quantity(row.ours.value, &row.ours.unit);
    c.text(WIDTH - RIGHT + 14.0, mid + 14.0, "mr-small", &value);
}

/// Host CPU per operation: for each case two bars, the longer one filling the width, because the
/// cases' operations are too different for one scale.
pub fn cpu(results: &Results) -> String {
    let rows: Vec<&Row> = results.rows.iter().filter(|r| r.host_cpu_us_per_op.is_some()).collect();
    let height = TOP + BOTTOM / 2.0 + rows.len() as f64 * ROW_HEIGHT;
    let mut c = Canvas::titled(
        "Host CPU per operation",
        "QEMU and daemon, microseconds; shorter is better; each case has its own scale",
    );
    for (i, row) in rows.iter().enumerate() {
        let Some(cpu) = row.host_cpu_us_per_op else { continue };
        let top = TOP + i as f64 * ROW_HEIGHT + 8.0;
        let scale = (WIDTH - LEFT - RIGHT - 60.0) / cpu.ours.max(cpu.peer).max(f64::MIN_POSITIVE);
        c.text(LEFT - 12.0, top + 21.0, "mr-text mr-end", &row.case);
        let ours = if cpu.ours <= cpu.peer { "mr-good" } else { "mr-bad" };
        for (name, value, class, y) in
            [("Millrace", cpu.ours, ours, top), (&row.peer.name, cpu.peer, "mr-peer", top + 18.0)]
        {
            c.bar((LEFT, y), (value * scale, 15.0), class);
            let label = format!("{} {name}", number(value));
            c.text(LEFT + value * scale + 6.0, y + 12.0, "mr-small", &label);
        }
        if let Some(ratio) = row.cpu_ratio() {
            c.text(WIDTH - 16.0, top + 21.0, "mr-text mr-strong mr-end", &format!("{ratio:.2}×"));
        }
    }
    c.finish(height, "Host CPU per operation of Millrace and its peer for each case")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;

    /// Every tag that opens also closes: good enough for what we write, and no parser needed.
    fn assert_balanced(svg: &str) {
        let mut open = Vec::new();
        for piece in svg.split('<').skip(1) {
            let (tag, _) = piece.split_once('>').unwrap();
            let name = tag.split([' ', '/']).find(|s| !s.is_empty()).unwrap();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "closes what is not open");
            } else if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "left open: {open:?}");
    }

    #[test]
    fn both_plots_are_well_formed() {
        for svg in [ratios(&samples::results()), cpu(&samples::results())] {
            assert_balanced(&svg);
            assert!(svg.starts_with("<svg xmlns="));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn a_row_is_drawn_as_expected() {
        let mut r = samples::results();
        r.rows.truncate(1);
        r.rows[0].ratio_max = 2.0;
        let svg = ratios(&r);
        // Scale: 560 points for 2.0 × 1.05, so 1× is at 150 + 266.7.
        for golden in [
            "<rect x=\"150.0\" y=\"74.0\" width=\"477.3\" height=\"26.0\" rx=\"2\" class=\"mr-good\"/>",
            "<line x1=\"523.3\" y1=\"87.0\" x2=\"683.3\" y2=\"87.0\" class=\"mr-whisker\"/>",
            "<line x1=\"416.7\" y1=\"69.0\" x2=\"416.7\" y2=\"105.0\" class=\"mr-floor\"/>",
            "<circle cx=\"627.3\" cy=\"87.0\" r=\"4\" class=\"mr-dot\"/>",
            "<text x=\"724.0\" y=\"87.0\" class=\"mr-text mr-strong\">1.79×</text>",
            "<text x=\"724.0\" y=\"101.0\" class=\"mr-small\">2,600/s</text>",
        ] {
            assert!(svg.contains(golden), "lacks {golden} in {svg}");
        }
    }

    #[test]
    fn losing_rows_have_their_own_colour_and_no_floor_no_tick() {
        let svg = ratios(&samples::results());
        assert_eq!(svg.matches("class=\"mr-bad\"").count(), 1, "tcp_stream alone loses");
        // Three rows have a floor, and the legend shows one.
        assert_eq!(svg.matches("class=\"mr-floor\"").count(), 3 + 1);
        let cpu = cpu(&samples::results());
        assert_eq!(cpu.matches("class=\"mr-bad\"").count(), 2, "udp_rr and tcp_stream");
        assert!(cpu.contains(">310 Millrace</text>") && cpu.contains(">560 tap-bridge</text>"));
    }

    #[test]
    fn intervals_and_stands_are_drawn() {
        let mut r = samples::with_intervals();
        let svg = ratios(&r);
        assert_balanced(&svg);
        for text in [">1.79× ahead</text>", ">1.01× level</text>", ">0.92× behind</text>"] {
            assert!(svg.contains(text), "lacks {text} in {svg}");
        }
        let count = |class: &str| svg.matches(&format!("class=\"{class}\"/>")).count();
        assert_eq!((count("mr-good"), count("mr-level"), count("mr-bad")), (2, 1, 1));
        assert_eq!(count("mr-interval"), 4);
        r.rows.truncate(1);
        // Scale: 560 points for 2.2 × 1.05, so 1× is at 150 + 242.4.
        let line =
            "<line x1=\"537.9\" y1=\"87.0\" x2=\"610.6\" y2=\"87.0\" class=\"mr-interval\"/>";
        assert!(ratios(&r).contains(line), "lacks {line} in {}", ratios(&r));
    }

    #[test]
    fn hostile_names_cannot_leave_their_text() {
        let mut r = samples::results();
        r.rows[0].case = "<script>&\"'".into();
        let svg = ratios(&r);
        assert!(!svg.contains("<script>"));
        assert!(svg.contains("&lt;script&gt;&amp;&quot;&#39;"));
        assert_balanced(&svg);
    }

    #[test]
    fn an_empty_run_still_draws() {
        let mut r = samples::results();
        r.rows.clear();
        assert_balanced(&ratios(&r));
        assert_balanced(&cpu(&r));
    }

    #[test]
    fn grid_lines_are_few_and_round() {
        for (most, step) in
            [(1.05, 0.2), (2.1, 0.5), (3.0, 0.5), (5.0, 1.0), (9.0, 2.0), (40.0, 5.0)]
        {
            assert!((grid_step(most) - step).abs() < 1e-9, "{most}: {}", grid_step(most));
        }
    }
}
