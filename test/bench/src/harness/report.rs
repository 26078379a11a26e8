//! The report: one HTML file that needs nothing else, readable in light and dark.

use std::fmt::Write as _;

use crate::harness::results::{Results, Row, Stand};
use crate::harness::runner::{CaseRounds, Outcome, Round, Sample, VHOST};
use crate::harness::stats::{Better, interval, ratio, spread};
use crate::harness::svg::{self, escape};
use crate::harness::table::{floor_text, judgement, number, quantity, verdict};

/// Share of the machine used by strangers above which a round is called disturbed.
pub const FOREIGN_LIMIT: f64 = 0.15;

const STYLE: &str = "
:root{color-scheme:light dark;--fg:#1b2328;--bg:#fff;--soft:#5c6870;--line:#dde3e7;--bad:#b3261e;--good:#1d7a6c}
@media(prefers-color-scheme:dark){:root{--fg:#e6ebee;--bg:#151a1e;--soft:#9aa7af;--line:#2b343a;--bad:#f2917f;--good:#5cc8b8}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2rem}
p.soft,td.soft,.soft{color:var(--soft)}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{text-align:left;padding:.35rem .7rem;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}.bad{color:var(--bad)}.good{color:var(--good)}
svg{max-width:100%;height:auto;margin:.5rem 0}code{font-size:.92em}";

/// Context that the report says beside the numbers.
#[derive(Debug, Clone, Default)]
pub struct Context {
    /// How both sides were built, one sentence each.
    pub setup: Vec<String>,
    /// How long the whole run took, seconds.
    pub took_s: f64,
}

/// The whole page.
pub fn html(results: &Results, outcome: &Outcome, context: &Context) -> String {
    let mut page = head(results, context.took_s, &headline(results, outcome));
    page.push_str(&table(results));
    page.push_str(&svg::ratios(results));
    page.push_str(&svg::cpu(results));
    page.push_str(&lost(results, outcome));
    page.push_str(&how(context));
    page.push_str(&all_rounds(&outcome.rounds));
    page.push_str(TAIL);
    page
}

/// The end of every page.
pub(crate) const TAIL: &str = "</body></html>\n";

/// The start of every page, down to its first sentence.
pub(crate) fn head(results: &Results, took_s: f64, headline: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>Millrace comparison</title><style>{STYLE}</style></head><body>\n\
         <h1>Millrace against its peers</h1>\n\
         <p class=\"soft\">{}, commit <code>{}</code>, {:.0} s</p>\n<p>{}</p>\n",
        escape(&results.machine.line()),
        escape(&results.commit),
        took_s,
        escape(headline),
    )
}

/// A heading and a list of sentences.
pub(crate) fn list<S: AsRef<str>>(title: &str, items: impl IntoIterator<Item = S>) -> String {
    let mut out = format!("<h2>{}</h2>\n<ul>\n", escape(title));
    for item in items {
        let _ = writeln!(out, "<li>{}</li>", escape(item.as_ref()));
    }
    out.push_str("</ul>\n");
    out
}

/// Rows below their floors, a sentence each, which begins with `name`.
pub(crate) fn below_floors(results: &Results, name: impl Fn(&Row) -> String) -> Vec<String> {
    let missed = results.rows.iter().filter(|r| r.missed());
    let sentence = |r: &Row| {
        let floor = floor_text(r.target.unwrap_or_default());
        format!("{} {:.2}× of {}, floor {floor}", name(r), r.ratio, r.peer.name)
    };
    missed.map(sentence).collect()
}

/// How many loads strangers disturbed, by the part of the machine that they used in each.
pub(crate) fn disturbed(foreign: &[f64]) -> Option<String> {
    above_limit(("strangers used", "the machine"), FOREIGN_LIMIT, foreign)
}

/// How many loads had a share above `limit`; none where none had. The cause is for example
/// "strangers used" and "the machine".
pub(crate) fn above_limit(
    (cause, whole): (&str, &str),
    limit: f64,
    shares: &[f64],
) -> Option<String> {
    let (count, all) = (shares.iter().filter(|s| **s > limit).count(), shares.len());
    let limit = limit * 100.0;
    (count > 0)
        .then(|| format!("{cause} more than {limit:.0} % of {whole} in {count} of {all} loads"))
}

/// A heading, and the head of a table of numbers.
pub(crate) fn numbers_head<'a>(title: &str, heads: impl Iterator<Item = &'a str>) -> String {
    let mut out = format!("<h2>{}</h2>\n<div class=\"scroll\"><table><tr>", escape(title));
    for head in heads {
        let _ = write!(out, "<th>{}</th>", escape(head));
    }
    out + "</tr>\n"
}

/// A row of such a table: texts, then numbers, with a dash for each that is not known.
pub(crate) fn numbers_row(texts: &[&str], values: impl Iterator<Item = Option<f64>>) -> String {
    let mut out = String::from("<tr>");
    for text in texts {
        let _ = write!(out, "<td>{}</td>", escape(text));
    }
    for value in values {
        let text = value.map_or("–".into(), number);
        let _ = write!(out, "<td class=\"n\">{text}</td>");
    }
    out + "</tr>\n"
}

/// The end of such a table.
pub(crate) const NUMBERS_END: &str = "</table></div>\n";

fn headline(results: &Results, outcome: &Outcome) -> String {
    let (rows, (reached, floors)) = (results.rows.len(), results.floors());
    let [ahead, level, behind] =
        [Stand::Ahead, Stand::Level, Stand::Behind].map(|stand| results.count(stand));
    let mut text = format!(
        "{reached} of {floors} floors reached; of {rows} comparisons {ahead} ahead of the peer, {level} \
         level with it and {behind} behind it."
    );
    if !outcome.failed().is_empty() {
        let _ = write!(text, " {} did not complete.", outcome.failed().len());
    }
    text
}

pub(crate) fn table(results: &Results) -> String {
    let mut out = String::from(
        "<div class=\"scroll\"><table><thead><tr><th>Case</th><th class=\"n\">Millrace</th>\
         <th class=\"n\">Peer</th><th></th><th class=\"n\">Ratio</th>",
    );
    let has_intervals = results.has_intervals();
    let interval = if has_intervals { "<th class=\"n\">95 % interval</th>" } else { "" };
    let verdicts = if has_intervals { "Verdict" } else { "Floor" };
    let _ = writeln!(
        out,
        "{interval}<th class=\"n\">min–max</th><th class=\"n\">CPU µs/op</th>\
         <th class=\"n\">peer’s</th><th>{verdicts}</th><th>How</th></tr></thead>\n<tbody>"
    );
    // Who of us it is, where several take part.
    let several = results.rows.windows(2).any(|rows| rows[0].ours.name != rows[1].ours.name);
    for row in &results.rows {
        let name = if several { format!("{}: ", row.ours.name) } else { String::new() };
        let class = match row.stand() {
            _ if row.is_behind() => "bad",
            Some(Stand::Level) => "soft",
            _ => "good",
        };
        let cpu = row.host_cpu_us_per_op.map(|c| (number(c.ours), number(c.peer)));
        let (cpu_ours, cpu_peer) = cpu.unwrap_or_default();
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"soft\">{}</td>\
             <td class=\"n {class}\"><strong>{:.2}×</strong></td>{}<td class=\"n\">{:.2}–{:.2}</td>\
             <td class=\"n\">{cpu_ours}</td><td class=\"n\">{cpu_peer}</td><td>{}</td>\
             <td class=\"soft\">{}</td></tr>",
            escape(&row.title()),
            escape(&format!("{name}{}", quantity(row.ours.value, &row.ours.unit))),
            escape(&quantity(row.peer.value, &row.peer.unit)),
            escape(&row.peer.name),
            row.ratio,
            if has_intervals { interval_cell(row) } else { String::new() },
            row.ratio_min,
            row.ratio_max,
            if has_intervals { judgement(row) } else { floor_and_verdict(row) },
            escape(row.mode.as_deref().unwrap_or("")),
        );
    }
    out.push_str("</tbody></table></div>\n");
    out
}

fn interval_cell(row: &Row) -> String {
    let bounds = row.ratio_interval.map(|(low, high)| format!("{low:.2}–{high:.2}"));
    format!("<td class=\"n\">{}</td>", bounds.unwrap_or_else(|| "–".into()))
}

fn floor_and_verdict(row: &Row) -> String {
    row.target.map_or("none".into(), |t| format!("{}: {}", floor_text(t), verdict(row)))
}

/// Section about what we lost, what broke and what disturbed.
fn lost(results: &Results, outcome: &Outcome) -> String {
    let mut items = Vec::new();
    for row in results.rows.iter().filter(|r| r.is_behind()) {
        let (case, ratio, peer) = (&row.case, row.ratio, &row.peer.name);
        items.push(format!("{case}: {ratio:.2}× of {peer} ({})", judgement(row)));
    }
    for row in &results.rows {
        if let Some(more) = more_cpu(row, outcome) {
            let (case, peer) = (&row.case, &row.peer.name);
            items.push(format!("{case}: {more:.0} % more host CPU per operation than {peer}"));
        }
    }
    items.extend(outcome.failed().iter().map(|(case, why)| format!("{case} failed: {why}")));
    items.extend(outcome.rounds.iter().flat_map(losses_of));
    if items.is_empty() {
        items.push(
            "Nothing: no case behind its peer, no failure, no lost packets, no disturbed round."
                .into(),
        );
    }
    list("What was lost", items)
}

/// Percent more host CPU per operation than the peer, where the rounds show a difference.
fn more_cpu(row: &Row, outcome: &Outcome) -> Option<f64> {
    let case = outcome.rounds.iter().find(|case| case.case == row.case)?;
    let counted = case.rounds.iter().filter(|r| r.round > 0);
    let pairs = counted.filter_map(|r| Some((r.ours, r.of_peer(&row.peer.name)?)));
    let own = pairs.map(|(ours, peer)| {
        ratio(ours.cpu_us_per_op, peer.cpu_us_per_op, Better::Lower).unwrap_or(f64::NAN)
    });
    let (_, high) = interval(&own.collect::<Vec<f64>>())?;
    let is_more = high < 1.0;
    row.cpu_ratio().filter(|cpu| is_more && *cpu < 1.0).map(|cpu| (1.0 / cpu - 1.0) * 100.0)
}

/// Lost packets and disturbed rounds of a case, one sentence each.
pub fn losses_of(case: &CaseRounds) -> Vec<String> {
    let counted: Vec<_> = case.rounds.iter().filter(|r| r.round > 0).collect();
    let mut out = Vec::new();
    let lost = |pick: &dyn Fn(&Round) -> Option<f64>| {
        spread(&counted.iter().filter_map(|r| pick(r)).collect::<Vec<f64>>())
    };
    if let (Some(ours), Some(peer)) = (lost(&|r| r.ours.lost), lost(&|r| r.peer.lost))
        && (ours.max > 0.0 || peer.max > 0.0)
    {
        out.push(format!(
            "{}: packets sent and not received, median: Millrace {:.1} %, peer {:.1} %",
            case.case,
            ours.median * 100.0,
            peer.median * 100.0
        ));
    }
    let noisy = |r: &&&Round| r.foreign() > FOREIGN_LIMIT;
    let disturbed = counted.iter().filter(noisy).count();
    if disturbed > 0 {
        let most = counted.iter().map(|r| r.foreign()).fold(0.0, f64::max);
        out.push(format!(
            "{}: {disturbed} of {} rounds disturbed by other programs (up to {:.0} % of the machine)",
            case.case,
            counted.len(),
            most * 100.0
        ));
    }
    out.extend(case.repeated.iter().map(|why| {
        format!("{}: a load failed and was put on again, on new guests: {why}", case.case)
    }));
    out
}

fn how(context: &Context) -> String {
    let fixed = [
        "A round is both sides within seconds of each other, in turns Millrace first and the peer \
         first. The first round of each case is longer and thrown away. The ratio \
         is the median of the rounds’ own ratios, turned so that above 1 is better for Millrace; \
         the values are medians over the rounds. The interval holds that median with 95 %: ahead is \
         a row whose whole interval is above 1, behind one whose whole interval is below, level \
         any other.",
        "Host CPU per operation is user and system time of the side’s QEMU processes (and the \
         daemon) in the middle of the load, divided by its rate. What the kernel does for TAP and \
         bridge runs in QEMU’s own threads and is counted; kernel threads are not. The \
         whole-machine figure below has those too: everything but idle time and spinners.",
        "During round-trip cases an idle-priority loop keeps every host CPU awake on both sides; \
         its time is left out.",
        "Foreign is the part of the machine that neither side nor the measuring program used.",
    ];
    list("How it was measured", context.setup.iter().map(String::as_str).chain(fixed))
}

fn all_rounds(cases: &[CaseRounds]) -> String {
    let mut out = String::from(
        "<h2>All rounds</h2>\n<div class=\"scroll\"><table><thead><tr><th>Case</th><th class=\"n\">Round</th>\
         <th class=\"n\">Millrace</th><th class=\"n\">Peer</th><th class=\"n\">CPU µs/op</th>\
         <th class=\"n\">peer’s</th><th class=\"n\">machine µs/op</th><th class=\"n\">peer’s</th>\
         <th class=\"n\">foreign</th><th>One operation</th></tr></thead>\n<tbody>\n",
    );
    for case in cases {
        for r in &case.rounds {
            round_line(&mut out, case, r, ("", &r.peer));
            if let Some(vhost) = &r.vhost {
                round_line(&mut out, case, r, (VHOST, vhost));
            }
        }
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// One round against a peer; its name where it is not the only one's.
fn round_line(out: &mut String, case: &CaseRounds, r: &Round, (name, peer): (&str, &Sample)) {
    let round = if r.round == 0 { "warm-up".into() } else { r.round.to_string() };
    let _ = writeln!(
        out,
        "<tr><td>{}</td><td class=\"n\">{round}</td><td class=\"n\">{}</td><td class=\"n\">{}{}</td>\
         <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
         <td class=\"n\">{:.0} % / {:.0} %</td><td class=\"soft\">{}</td></tr>",
        escape(&case.case),
        number(r.ours.value),
        number(peer.value),
        if name.is_empty() { String::new() } else { format!(" {name}") },
        number(r.ours.cpu_us_per_op),
        number(peer.cpu_us_per_op),
        number(r.ours.machine_cpu_us_per_op),
        number(peer.machine_cpu_us_per_op),
        r.ours.foreign * 100.0,
        peer.foreign * 100.0,
        escape(&case.operation),
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;

    fn side(foreign: f64, lost: Option<f64>) -> Sample {
        let (cpu_us_per_op, machine_cpu_us_per_op) = (310.0, 340.0);
        Sample { value: 2600.0, cpu_us_per_op, machine_cpu_us_per_op, foreign, lost }
    }

    fn page(foreign: f64, lost: Option<f64>) -> String {
        let results = samples::with_intervals();
        let round = |round| {
            let (ours, peer) = (side(foreign, lost), side(0.0, lost));
            Round { round, ours, peer, vhost: None }
        };
        let case = |name: &str, failed: Option<&str>| CaseRounds {
            case: name.into(),
            operation: "round trip".into(),
            rounds: vec![round(0), round(1), round(2)],
            failed: failed.map(Into::into),
            ..Default::default()
        };
        let mut rounds = vec![case("tcp_rr", None), case("disk_seq_1m", Some("guest c: <gone>"))];
        // Of CPU time both are level in one and behind in the other.
        for (name, peers) in [("udp_rr", [300.0, 320.0]), ("tcp_stream", [290.0, 280.0])] {
            let mut of = case(name, None);
            for (round, cpu) in of.rounds.iter_mut().skip(1).zip(peers) {
                round.peer.cpu_us_per_op = cpu;
            }
            rounds.push(of);
        }
        let outcome = Outcome { rows: results.rows.clone(), rounds };
        let context = Context { setup: vec!["Both sides boot Linux 6.1.".into()], took_s: 300.0 };
        html(&results, &outcome, &context)
    }

    #[test]
    fn says_machine_floors_losses_and_how() {
        let text = page(0.0, None);
        for golden in [
            "Test &lt;CPU&gt; &amp; Co, 2 cores, Linux 6.1.0, commit <code>0123abc</code>, 300 s",
            "2 of 3 floors reached; of 4 comparisons 2 ahead of the peer, 1 level with it and 1 behind it. \
             1 did not complete.",
            "<li>tcp_stream: 0.92× of tap-bridge (behind; floor 1.2×, missed)</li>",
            "<li>tcp_stream: 11 % more host CPU per operation than tap-bridge</li>",
            "<th class=\"n\">95 % interval</th>",
            "<td class=\"n soft\"><strong>1.01×</strong></td><td class=\"n\">0.95–1.08</td>",
            "<td>level; floor 1.0×, reached</td>",
            "<td class=\"n bad\"><strong>0.92×</strong></td><td class=\"n\">0.88–0.97</td>",
            "<li>disk_seq_1m failed: guest c: &lt;gone&gt;</li>",
            "<li>Both sides boot Linux 6.1.</li>",
            "prefers-color-scheme:dark",
        ] {
            assert!(text.contains(golden), "lacks {golden}");
        }
        assert!(!text.contains("disturbed by"), "a quiet run is not called disturbed");
    }

    #[test]
    fn a_level_row_below_1_is_no_loss() {
        let mut results = samples::with_intervals();
        results.rows.truncate(2);
        results.rows[1].ratio = 0.99;
        let outcome = Outcome { rows: results.rows.clone(), rounds: Vec::new() };
        let text = html(&results, &outcome, &Context::default());
        assert!(text.contains("<li>Nothing: no case behind its peer"), "{text}");
        assert!(text.contains(">0.99× level</text>"), "{text}");
    }

    #[test]
    fn a_third_side_has_rows_and_rounds_of_its_own() {
        let mut results = samples::with_intervals();
        let mut vhost = results.rows[2].clone();
        (vhost.case, vhost.peer.name, vhost.target) = ("tcp_rr".into(), VHOST.into(), None);
        results.rows.insert(1, vhost);
        let round = |round| {
            let vhost = Some(Sample { value: 7777.0, ..side(0.3, None) });
            Round { round, ours: side(0.0, None), peer: side(0.0, None), vhost }
        };
        let case =
            CaseRounds { case: "tcp_rr".into(), rounds: vec![round(1)], ..Default::default() };
        let outcome = Outcome { rows: results.rows.clone(), rounds: vec![case] };
        let text = html(&results, &outcome, &Context::default());
        for golden in [
            "<td class=\"soft\">tap-vhost</td>",
            "<li>tcp_rr: 0.92× of tap-vhost (behind)</li>",
            ">against tap-vhost</text>",
            "<td class=\"n\">7,777 tap-vhost</td>",
            "of 5 comparisons 2 ahead of the peer, 1 level with it and 2 behind it.",
            "1 of 1 rounds disturbed by other programs (up to 30 %",
        ] {
            assert!(text.contains(golden), "lacks {golden}");
        }
    }

    #[test]
    fn needs_nothing_from_elsewhere() {
        let text = page(0.0, None);
        for outside in ["<script", "src=", "href=", "@import", "url("] {
            assert!(!text.contains(outside), "has {outside}");
        }
        assert_eq!(text.matches("<svg").count(), 2);
    }

    #[test]
    fn disturbed_rounds_and_lost_packets_are_told() {
        let text = page(0.3, Some(0.25));
        assert!(text.contains("tcp_rr: 2 of 2 rounds disturbed by other programs (up to 30 %"));
        assert!(text.contains("median: Millrace 25.0 %, peer 25.0 %"));
    }

    #[test]
    fn a_run_without_losses_says_so() {
        let mut results = samples::results();
        results.rows.truncate(1);
        let outcome = Outcome { rows: results.rows.clone(), rounds: Vec::new() };
        let text = html(&results, &outcome, &Context::default());
        assert!(text.contains("<li>Nothing: no case behind its peer"));
    }
}
