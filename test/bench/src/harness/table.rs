//! The result table as Markdown, for the terminal, and inside a document between two markers.

use std::path::Path;

use crate::harness::error::BenchError;
use crate::harness::guests;
use crate::harness::results::{Results, Row};

/// A part of a document that is ours: the lines between two markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Section {
    /// Between `<!-- bench:demo -->` and `<!-- /bench:demo -->`: a line for each case.
    Demo,
    /// The same with `bench:peers`: a line for each case with all of its peers; of qcow2 rates
    /// only.
    Peers,
    /// The same with `bench:qcow2`, for a run of `peers` with the rows of images alone.
    Qcow2,
    /// The same with `bench:consolidate`: a line for each value.
    Consolidate,
    /// The same with `bench:events`, in a form of its own ([`crate::suites::events::output`]).
    Events,
    /// The same with `bench:shares`: a line for each case.
    Shares,
    /// The same with `bench:idle`: a line for each case.
    Idle,
    /// The same with `bench:pipes`: a line for each case with all of its peers.
    Pipes,
    /// The same with `bench:channels`: a line for each case and way of ours; latencies left out.
    Channels,
    /// The same with `bench:modules`: a line for each case and way of ours; costs of some sizes
    /// only.
    Modules,
}

impl Section {
    /// First marker line.
    pub fn begin(self) -> &'static str {
        match self {
            Section::Demo => "<!-- bench:demo -->",
            Section::Peers => "<!-- bench:peers -->",
            Section::Qcow2 => "<!-- bench:qcow2 -->",
            Section::Consolidate => "<!-- bench:consolidate -->",
            Section::Events => "<!-- bench:events -->",
            Section::Shares => "<!-- bench:shares -->",
            Section::Idle => "<!-- bench:idle -->",
            Section::Pipes => "<!-- bench:pipes -->",
            Section::Channels => "<!-- bench:channels -->",
            Section::Modules => "<!-- bench:modules -->",
        }
    }

    /// Second marker line; a second first one does as well.
    pub fn end(self) -> &'static str {
        match self {
            Section::Demo => "<!-- /bench:demo -->",
            Section::Peers => "<!-- /bench:peers -->",
            Section::Qcow2 => "<!-- /bench:qcow2 -->",
            Section::Consolidate => "<!-- /bench:consolidate -->",
            Section::Events => "<!-- /bench:events -->",
            Section::Shares => "<!-- /bench:shares -->",
            Section::Idle => "<!-- /bench:idle -->",
            Section::Pipes => "<!-- /bench:pipes -->",
            Section::Channels => "<!-- /bench:channels -->",
            Section::Modules => "<!-- /bench:modules -->",
        }
    }

    /// The table of results in the published format as Markdown.
    pub fn markdown(self, results: &Results) -> String {
        match self {
            Section::Demo | Section::Events => markdown(results),
            Section::Consolidate => by_value(results),
            Section::Shares | Section::Idle => against_due(self, results),
            _ => by_case(self, results),
        }
    }

    /// Sentence about what the values are medians of, and how ratios read.
    fn reading(self, rounds: &str) -> String {
        match self {
            Section::Shares => format!(
                "medians of {rounds} rounds. Weights and ceilings are to be met: their ratio is at most \
                 1, and 1 is exact. Elsewhere a ratio above 1 is better than was due."
            ),
            Section::Idle => {
                "one run. A ratio of 1 is the limit, or as much as before; above 1 is \
                              better."
                    .into()
            }
            _ => format!(
                "medians of {rounds} interleaved rounds. Ratios above 1 are better for Millrace."
            ),
        }
    }
}

const HEAD: [&str; 7] = [
    "Case",
    "Millrace",
    "Peer",
    "Ratio (min–max)",
    "Floor",
    "Host CPU per op, µs: ours / peer’s",
    "How",
];

/// Heads of the columns: where there are intervals, they are what counts.
fn head(results: &Results) -> [&'static str; 7] {
    let mut head = HEAD;
    if results.has_intervals() {
        (head[3], head[4]) = ("Ratio (95 % interval)", "Verdict");
    }
    head
}

/// A number for people: at most four significant digits, thousands separated.
pub fn number(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.1 || v == 0.0 => 2,
        _ => 4,
    };
    let plain = format!("{value:.decimals$}");
    let (whole, fraction) = plain.split_once('.').unwrap_or((&plain, ""));
    let digits = whole.trim_start_matches('-');
    let mut out = String::from(if whole.starts_with('-') { "-" } else { "" });
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    if !fraction.is_empty() {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// A size in bytes for names: `4k`, `1m`.
pub fn size_text(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{}m", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{}k", b >> 10),
        b => b.to_string(),
    }
}

/// A number with its unit: `2,600/s`, `1.10 Gbit/s`.
pub fn quantity(value: f64, unit: &str) -> String {
    match unit.strip_prefix('1') {
        Some(per) => format!("{}{per}", number(value)),
        None => format!("{} {unit}", number(value)),
    }
}

/// Verdict on where the row stands against its floor, in few words.
pub fn verdict(row: &Row) -> &'static str {
    match (row.missed(), row.target, row.aim) {
        (true, ..) => "below floor",
        (_, _, Some(aim)) if row.ratio >= aim => "aim reached",
        (_, Some(_), _) => "floor reached",
        _ => "no floor",
    }
}

/// A floor: one decimal where that says it all, otherwise two.
pub fn floor_text(floor: f64) -> String {
    let one = (floor * 10.0).round() / 10.0;
    if (one - floor).abs() < 1e-9 { format!("{floor:.1}×") } else { format!("{floor:.2}×") }
}

/// Value of our side, with the name of the one of us where several take part.
fn ours(section: Section, row: &Row) -> String {
    let value = quantity(row.ours.value, &row.ours.unit);
    match section {
        Section::Channels | Section::Modules => format!("{}: {value}", row.ours.name),
        _ => value,
    }
}

/// Stand against the peer, where it is known, and against the floor.
pub(crate) fn judgement(row: &Row) -> String {
    let floor = row.target.map(|floor| {
        let met = if row.missed() { "missed" } else { "reached" };
        format!("{}, {met}", floor_text(floor))
    });
    match (row.stand(), floor) {
        (Some(stand), Some(floor)) => format!("{}; floor {floor}", stand.word()),
        (Some(stand), None) => stand.word().into(),
        (None, floor) => floor.unwrap_or_else(|| "none".into()),
    }
}

/// The ratio with the bounds of its interval, or else with the smallest and largest of a round.
fn ratio_text(row: &Row) -> String {
    let (low, high) = row.ratio_interval.unwrap_or((row.ratio_min, row.ratio_max));
    format!("{:.2}× ({low:.2}–{high:.2})", row.ratio)
}

fn cells(row: &Row) -> [String; 7] {
    let cpu = match (row.host_cpu_us_per_op, row.cpu_ratio()) {
        (Some(c), Some(r)) => {
            format!("{} / {} ({r:.2}×)", number(c.ours), number(c.peer))
        }
        _ => "not measured".into(),
    };
    [
        row.title(),
        quantity(row.ours.value, &row.ours.unit),
        format!("{} ({})", quantity(row.peer.value, &row.peer.unit), row.peer.name),
        ratio_text(row),
        judgement(row),
        cpu,
        row.mode.clone().unwrap_or_default(),
    ]
}

/// The table as Markdown, with a line that says where the numbers come from.
pub fn markdown(results: &Results) -> String {
    let head = head(results);
    let mut out = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    for row in &results.rows {
        let line: Vec<String> = cells(row).iter().map(|c| c.replace('|', "\\|")).collect();
        out.push_str(&format!("| {} |\n", line.join(" | ")));
    }
    out.push_str(&format!("\n{}\n", origin(Section::Demo, results)));
    out
}

/// A line for each value, for runs where all of them belong to one load, as Markdown.
pub fn by_value(results: &Results) -> String {
    let [_, ours, peer, ratio, ..] = head(results);
    let has_verdicts = results.has_intervals();
    let verdict = |text: &str| if has_verdicts { format!(" {text} |") } else { String::new() };
    let mut out =
        format!("| Value | {ours} | {peer} | {ratio} |{} Of what |\n", verdict("Verdict"));
    out.push_str(&format!("|---|---|---|---|{}---|\n", if has_verdicts { "---|" } else { "" }));
    for row in &results.rows {
        let [case, ours, peer, ratio, stand, _, how] = cells(row).map(|c| c.replace('|', "\\|"));
        let stand = verdict(&stand);
        out.push_str(&format!("| {case} | {ours} | {peer} | {ratio} |{stand} {how} |\n"));
    }
    out.push_str(&format!("\n{}\n", origin(Section::Consolidate, results)));
    out
}

/// A line for each case with the ratios to all of its peers, as Markdown.
pub fn by_case(section: Section, results: &Results) -> String {
    let mut out = String::from(
        "| Case | Millrace | Ratio to each peer (its own value) | Floors |\n|---|---|---|---|\n",
    );
    let listed = |r: &&Row| match section {
        Section::Channels => !r.case.ends_with("_p50") && !r.case.ends_with("_p99"),
        Section::Peers | Section::Qcow2 => {
            !(r.case.starts_with("qcow2_") && r.case.ends_with("_p99"))
        }
        Section::Modules => r.case.starts_with("insert_") || r.case.ends_with("_durable"),
        _ => true,
    };
    let rows: Vec<Row> = results.rows.iter().filter(listed).cloned().collect();
    for rows in rows.chunk_by(|a, b| a.case == b.case && a.ours.name == b.ours.name) {
        let Some(first) = rows.first() else { continue };
        let peer = |r: &Row| {
            let value = quantity(r.peer.value, &r.peer.unit);
            format!("{} **{:.2}×** ({value})", r.peer.name, r.ratio)
        };
        let floor = |r: &Row| {
            let met = if r.missed() { "**missed**" } else { "reached" };
            Some(format!("{} {} {met}", r.peer.name, floor_text(r.target?)))
        };
        let peers: Vec<String> = rows.iter().map(peer).collect();
        let floors: Vec<String> = rows.iter().filter_map(floor).collect();
        let cells = [first.title(), ours(section, first), peers.join(", "), floors.join(", ")];
        out.push_str(&format!("| {} |\n", cells.map(|c| c.replace('|', "\\|")).join(" | ")));
    }
    for line in not_measured(results) {
        out.push_str(&format!("\n{line}\n"));
    }
    out.push_str(&format!("\n{}\n", origin(section, results)));
    out
}

/// A line for each case with what was due, as Markdown.
fn against_due(section: Section, results: &Results) -> String {
    let mut out = String::from(
        "| Case | Measured | Due | Ratio (min–max) | Floor | How |\n|---|---|---|---|---|---|\n",
    );
    for row in &results.rows {
        let [case, ours, peer, ratio, floor, _, how] = cells(row);
        let line = [case, ours, peer, ratio, floor, how].map(|c| c.replace('|', "\\|"));
        out.push_str(&format!("| {} |\n", line.join(" | ")));
    }
    out.push_str(&format!("\n{}\n", origin(section, results)));
    out
}

/// Sides that were not measured and why, a sentence for each.
pub fn not_measured(results: &Results) -> Vec<String> {
    let mut all: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for m in &results.missing {
        match all.iter_mut().find(|(name, why, _)| *name == m.name && *why == m.why) {
            Some((.., cases)) => cases.push(&m.case),
            None => all.push((&m.name, &m.why, vec![&m.case])),
        }
    }
    all.iter().map(|(name, why, cases)| format!("{name}: {why} ({}).", cases.join(", "))).collect()
}

fn origin(section: Section, results: &Results) -> String {
    let m = &results.machine;
    let mut rounds: Vec<u32> = results.rows.iter().map(|r| r.rounds).collect();
    rounds.sort_unstable();
    rounds.dedup();
    let rounds = match *rounds {
        // Parts of the rounds have rows of their own.
        [_, _, .., most] => format!("up to {most}"),
        _ => rounds.iter().map(u32::to_string).collect::<Vec<_>>().join(" or "),
    };
    format!("Measured on {}, commit {}; {}", m.line(), results.commit, section.reading(&rounds))
}

/// The table for a terminal, columns aligned.
pub fn terminal(section: Section, results: &Results) -> String {
    let mut lines: Vec<Vec<String>> = vec![head(results).iter().map(|h| h.to_string()).collect()];
    lines.extend(results.rows.iter().map(|row| {
        let mut cells = cells(row).to_vec();
        cells[1] = ours(section, row);
        cells
    }));
    let width = |column: usize| lines.iter().map(|l| l[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        let mut text = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            text.push_str(&format!("{cell:<width$}  "));
        }
        out.push_str(text.trim_end());
        out.push('\n');
        if i == 0 {
            let rule: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
            out.push_str(&rule.join("  "));
            out.push('\n');
        }
    }
    out.push_str(&origin(section, results));
    out.push('\n');
    out
}

/// Puts the table between the section's markers in `document`; the markers stay. `None` without
/// markers.
pub fn replace(document: &str, section: Section, table: &str) -> Option<String> {
    replace_between(document, section.begin(), section.end(), table)
}

/// Puts the table between two marker lines in `document`; a second `first` ends it as well.
pub(crate) fn replace_between(
    document: &str,
    first: &str,
    last: &str,
    table: &str,
) -> Option<String> {
    let is = |line: &str, marker: &str| line.trim() == marker;
    let mut offset = 0;
    let mut begin = None;
    for line in document.split_inclusive('\n') {
        match begin {
            None if is(line, first) => begin = Some(offset + line.len()),
            Some(start) if is(line, last) || is(line, first) => {
                let head = document[..start].trim_end_matches('\n');
                let tail = &document[offset..];
                return Some(format!("{head}\n{}\n{tail}", table.trim_end()));
            }
            _ => {}
        }
        offset += line.len();
    }
    None
}

/// Rewrites the section of the file at `path`.
pub fn rewrite_file(path: &Path, section: Section, table: &str) -> Result<(), BenchError> {
    rewrite_between(path, section.begin(), section.end(), table)
}

/// Rewrites what is between two marker lines of the file at `path`.
pub(crate) fn rewrite_between(
    path: &Path,
    begin: &'static str,
    end: &'static str,
    table: &str,
) -> Result<(), BenchError> {
    let old = std::fs::read_to_string(path).map_err(|e| BenchError::file("read", path, e))?;
    let new = replace_between(&old, begin, end, table).ok_or_else(|| BenchError::Markers {
        path: path.to_owned(),
        begin,
        end,
    })?;
    guests::check_alike(&new, path)?;
    if new == old {
        return Ok(());
    }
    std::fs::write(path, new).map_err(|e| BenchError::file("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;

    #[test]
    fn numbers_are_short_and_separated() {
        for (value, text) in [
            (2600.0, "2,600"),
            (1234567.8, "1,234,568"),
            (999.6, "1,000"),
            (98.76, "98.8"),
            (1.006, "1.01"),
            (0.01234, "0.0123"),
            (0.0, "0.00"),
            (-1500.0, "-1,500"),
        ] {
            assert_eq!(number(value), text);
        }
        assert_eq!((floor_text(0.9), floor_text(1.0 / 1.2)), ("0.9×".into(), "0.83×".into()));
        assert_eq!(quantity(2600.0, "1/s"), "2,600/s");
        assert_eq!(quantity(1.1, "Gbit/s"), "1.10 Gbit/s");
    }

    #[test]
    fn markdown_is_as_expected() {
        let golden = "\
| Case | Millrace | Peer | Ratio (min–max) | Floor | Host CPU per op, µs: ours / peer’s | How |
|---|---|---|---|---|---|---|
| tcp_rr | 2,600/s | 1,450/s (tap-bridge) | 1.79× (1.40–2.20) | 1.0×, reached | 310 / 560 (1.81×) | 1 vCPU each |
| udp_rr | 3,010/s | 2,990/s (tap-bridge) | 1.01× (0.92–1.11) | 1.0×, reached | 260 / 255 (0.98×) | 1 vCPU each |
| tcp_stream | 1.10 Gbit/s | 1.20 Gbit/s (tap-bridge) | 0.92× (0.85–0.99) | 1.2×, missed | 910 / 820 (0.90×) | 1 vCPU each |
| udp_small | 51,234/s | 40,000/s (tap-bridge) | 1.28× (1.20–1.33) | none | 17.2 / 22.4 (1.30×) |  |

Measured on Test <CPU> & Co, 2 cores, Linux 6.1.0, commit 0123abc; medians of 5 interleaved rounds. Ratios above 1 are better for Millrace.
";
        assert_eq!(markdown(&samples::results()), golden);
    }

    #[test]
    fn intervals_are_shown_with_the_verdict_that_they_give() {
        let text = markdown(&samples::with_intervals());
        for golden in [
            "| Peer | Ratio (95 % interval) | Verdict |",
            "| 1.79× (1.60–1.90) | ahead; floor 1.0×, reached |",
            "| 1.01× (0.95–1.08) | level; floor 1.0×, reached |",
            "| 0.92× (0.88–0.97) | behind; floor 1.2×, missed |",
            "| 1.28× (1.20–1.30) | ahead |",
        ] {
            assert!(text.contains(golden), "lacks {golden} in {text}");
        }
    }

    #[test]
    fn terminal_columns_line_up() {
        let text = terminal(Section::Demo, &samples::results());
        let lines: Vec<&str> = text.lines().collect();
        let place = |line: &str, what: &str| {
            line.find(what).map(|byte| line[..byte].chars().count()).unwrap()
        };
        assert_eq!(place(lines[0], "Ratio"), place(lines[2], "1.79×"));
        assert_eq!(place(lines[0], "Floor"), place(lines[4], "1.2×, missed"));
        assert_eq!(lines.len(), 2 + 4 + 1);
    }

    #[test]
    fn only_the_part_between_the_markers_changes() {
        let table = "| new |\n";
        let doc = "# T\n\n<!-- bench:demo -->\nold\nold\n<!-- /bench:demo -->\n\nafter\n";
        let new = "# T\n\n<!-- bench:demo -->\n| new |\n<!-- /bench:demo -->\n\nafter\n";
        assert_eq!(replace(doc, Section::Demo, table).unwrap(), new);
        assert_eq!(
            replace(new, Section::Demo, table).unwrap(),
            new,
            "a second time changes nothing"
        );
        let same = "<!-- bench:demo -->\n<!-- bench:demo -->\n";
        assert_eq!(
            replace(same, Section::Demo, table).unwrap(),
            "<!-- bench:demo -->\n| new |\n<!-- bench:demo -->\n"
        );
        assert!(replace("<!-- bench:demo -->\nno end\n", Section::Demo, table).is_none());
        assert!(replace("text about <!-- bench:demo --> inline\n", Section::Demo, table).is_none());
    }

    #[test]
    fn peers_of_a_case_share_a_line_and_the_absent_are_told() {
        let mut r = samples::results();
        r.rows.truncate(2);
        r.rows[1].case = r.rows[0].case.clone();
        r.rows[1].peer.name = "ovs|normal".into();
        r.rows[1].target = Some(1.3);
        for case in ["tcp_rr", "udp_rr"] {
            let (case, name, why) = (case.into(), "vpp".into(), "not installed".into());
            r.missing.push(crate::harness::results::Missing { case, name, why });
        }
        let golden = "\
| Case | Millrace | Ratio to each peer (its own value) | Floors |
|---|---|---|---|
| tcp_rr | 2,600/s | tap-bridge **1.79×** (1,450/s), ovs\\|normal **1.01×** (2,990/s) \
| tap-bridge 1.0× reached, ovs\\|normal 1.3× **missed** |

vpp: not installed (tcp_rr, udp_rr).

";
        let text = by_case(Section::Peers, &r);
        assert!(text.starts_with(golden), "{text}");
    }

    #[test]
    fn several_of_ours_have_a_line_each_without_percentiles() {
        let mut r = samples::results();
        r.rows.truncate(3);
        r.rows[1].case = r.rows[0].case.clone();
        r.rows[1].ours.name = "channel".into();
        r.rows[2].case = "tcp_rr_p99".into();
        let text = by_case(Section::Channels, &r);
        assert!(text.contains("| tcp_rr | switch: 2,600/s |"), "{text}");
        assert!(text.contains("| tcp_rr | channel: 3,010/s |"), "{text}");
        assert!(!text.contains("p99"), "{text}");
        assert!(terminal(Section::Channels, &r).contains("tcp_rr_p99  switch: 1.10 Gbit/s"));
    }

    #[test]
    fn values_have_no_columns_for_what_they_lack() {
        let text = by_value(&samples::results());
        let line =
            "| tcp_rr | 2,600/s | 1,450/s (tap-bridge) | 1.79× (1.40–2.20) | 1 vCPU each |\n";
        assert!(text.contains(line), "{text}");
        assert!(!text.contains("Floor"), "{text}");
        let text = by_value(&samples::with_intervals());
        assert!(
            text.contains("| 1.79× (1.60–1.90) | ahead; floor 1.0×, reached | 1 vCPU each |\n")
        );
        let columns = |line: &str| line.matches('|').count();
        assert!(text.lines().take(6).all(|line| columns(line) == 7), "{text}");
    }

    #[test]
    fn what_a_ratio_says_is_told_of_each_kind_of_table() {
        let last = |section: Section| {
            let text = section.markdown(&samples::results());
            assert_eq!(text.lines().last(), terminal(section, &samples::results()).lines().last());
            text.lines().last().unwrap().split_once("0123abc; ").unwrap().1.to_owned()
        };
        for section in [Section::Demo, Section::Peers, Section::Consolidate] {
            let text = last(section);
            assert!(text.starts_with("medians of 5 interleaved rounds. Ratios above 1"), "{text}");
        }
        let shares = last(Section::Shares);
        assert!(shares.starts_with("medians of 5 rounds. ") && shares.contains("1 is exact"));
        assert!(last(Section::Idle).starts_with("one run. A ratio of 1 is the limit"));
    }

    #[test]
    fn sections_are_told_apart() {
        let doc = "<!-- bench:demo -->\nd\n<!-- /bench:demo -->\n<!-- bench:peers -->\np\n<!-- /bench:peers -->\n";
        let new = replace(doc, Section::Peers, "new").unwrap();
        assert_eq!(new, doc.replace("\np\n", "\nnew\n"));
    }

    #[test]
    fn a_document_without_markers_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("README.md");
        std::fs::write(&path, "# nothing\n").unwrap();
        let text = rewrite_file(&path, Section::Demo, "t").unwrap_err().to_string();
        assert!(text.contains("README.md") && text.contains(Section::Demo.begin()), "{text}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "# nothing\n");
    }
}
