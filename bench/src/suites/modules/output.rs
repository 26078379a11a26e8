//! Output of a run: its files.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::meter::PARTS;
use super::plot::{self, cpu_of, median_of};
use super::{Measured, Setup, Shape, size_text};
use crate::harness::error::BenchError;
use crate::harness::output::write_run;
use crate::harness::repeat::Failure;
use crate::harness::report::{self, Context, FOREIGN_LIMIT};
use crate::harness::results::Results;
use crate::harness::svg;
use crate::harness::table::{floor_text, number};

/// Writes `bench-modules.json` (the published format), `bench-modules-rounds.json` (every load),
/// the paper's figures and `bench-modules.html` into `folder`, making it if needed. Returns what
/// was written.
pub fn write_all(
    folder: &Path,
    setup: &Setup,
    results: &Results,
    measured: &Measured,
    context: &Context,
) -> Result<Vec<PathBuf>, BenchError> {
    let mut plots = vec![("-improvement.svg".to_owned(), plot::improvements(setup, measured))];
    for form in setup.forms.iter().filter(|form| form.shape == Shape::One) {
        let end = format!("-cpu-{}.svg", form.name(setup.batch));
        plots.push((end, plot::cpu(setup, measured, *form)));
    }
    let page = page(setup, results, measured, context, &plots);
    plots.push((".html".into(), page));
    write_run(folder, "bench-modules", results, measured, &plots)
}

fn page(
    setup: &Setup,
    results: &Results,
    measured: &Measured,
    context: &Context,
    plots: &[(String, String)],
) -> String {
    let floors = results.rows.iter().filter(|r| r.target.is_some()).count();
    let missed = results.rows.iter().filter(|r| r.missed()).count();
    let headline = format!(
        "Inserts with the table store in the host against the same store in the guest: {} of {floors} floors \
         reached.",
        floors - missed
    );
    let mut page = report::head(results, context.took_s, &headline);
    plots.iter().for_each(|(_, plot)| page.push_str(plot));
    page.push_str(&report::table(results));
    page.push_str(&everything(setup, measured));
    page.push_str(&report::list("What was lost", losses(results, measured)));
    page.push_str(&report::list("How it was measured", &context.setup));
    page.push_str(report::TAIL);
    page
}

/// All sides in numbers.
fn everything(setup: &Setup, measured: &Measured) -> String {
    let mut out = String::from(
        "<h2>Of a row: µs, CPU time by component in µs, events</h2>\n<div class=\"scroll\"><table><tr>",
    );
    let heads = ["rows", "form", "side", "run time"].into_iter().chain(PARTS);
    for head in heads.chain(["exits", "interrupts", "system calls in the host"]) {
        let _ = write!(out, "<th>{}</th>", svg::escape(head));
    }
    out.push_str("</tr>\n");
    for cell in setup.cells() {
        for &side in &setup.sides {
            let Some(us) = median_of(measured, (cell, side), |s| s.us) else { continue };
            let _ = write!(
                out,
                "<tr><td>{}</td><td>{}</td><td>{}</td>",
                size_text(cell.size_bytes),
                svg::escape(&cell.form.text(setup.batch)),
                side.name()
            );
            let parts = cpu_of(measured, cell, side).map_or([None; 5], |c| c.parts().map(Some));
            let counted = measured.counted.iter().find(|c| (c.cell, c.side) == (cell, side));
            let calls = median_of(measured, (cell, side), |s| s.system_calls.unwrap_or(f64::NAN));
            let events =
                [counted.map(|c| c.events.exits), counted.map(|c| c.events.interrupts), calls];
            for value in std::iter::once(Some(us)).chain(parts).chain(events) {
                let text = value.map_or("–".into(), number);
                let _ = write!(out, "<td class=\"n\">{text}</td>");
            }
            out.push_str("</tr>\n");
        }
    }
    out.push_str("</table></div>\n");
    out
}

/// Floors missed, loads that failed or were disturbed.
pub fn losses(results: &Results, measured: &Measured) -> Vec<String> {
    let missed = results.rows.iter().filter(|r| r.missed()).map(|r| {
        let floor = floor_text(r.target.unwrap_or_default());
        let (ours, peer) = (&r.ours.name, &r.peer.name);
        format!("{}: {ours} {:.2}× of {peer}, floor {floor}", r.case, r.ratio)
    });
    let mut out: Vec<String> = missed.collect();
    out.extend(measured.failed.iter().map(Failure::text));
    let loads = || measured.loads.iter().filter(|l| l.round > 0);
    let disturbed = loads().filter(|l| l.sample.foreign > FOREIGN_LIMIT).count();
    if disturbed > 0 {
        out.push(format!(
            "strangers used more than {:.0} % of the machine in {disturbed} of {} loads",
            FOREIGN_LIMIT * 100.0,
            loads().count()
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;
    use crate::suites::modules::rows;
    use crate::suites::modules::testing::{measured, setup};

    #[test]
    fn a_run_leaves_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let (setup, measured) = (setup(), measured());
        let rows = rows::rows(&setup, &measured);
        let results = Results { rows, ..samples::results() };
        let folder = dir.path().join("deep");
        let written = write_all(&folder, &setup, &results, &measured, &Context::default()).unwrap();
        let names: Vec<_> =
            written.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "bench-modules.json",
                "bench-modules-rounds.json",
                "bench-modules-improvement.svg",
                "bench-modules-cpu-durable.svg",
                "bench-modules-cpu-relaxed.svg",
                "bench-modules.html",
            ]
        );
        assert_eq!(Results::read(&written[0]).unwrap(), results);
        let read: Measured = serde_json::from_slice(&std::fs::read(&written[1]).unwrap()).unwrap();
        assert_eq!(read, measured);
        let page = std::fs::read_to_string(&written[5]).unwrap();
        assert!(page.contains("18 of 18 floors reached") && page.contains("<td>guest-ide</td>"));
    }

    #[test]
    fn what_was_lost_is_told() {
        let (setup, mut measured) = (setup(), measured());
        let of = |l: &&mut super::super::Load| {
            l.side == super::super::Side::ModuleBatched && l.cell == setup.cells()[0]
        };
        for load in measured.loads.iter_mut().filter(of) {
            load.sample.us = 3200.0;
            load.sample.foreign = 0.5;
        }
        let rows = rows::rows(&setup, &measured);
        let told = losses(&Results { rows, ..samples::results() }, &measured);
        assert_eq!(
            told[0],
            "insert_1k_durable: module-batched 1.25× of guest-virtio-blk, floor 2.0×"
        );
        assert!(told[1].starts_with("strangers used more than"), "{told:?}");
    }
}
