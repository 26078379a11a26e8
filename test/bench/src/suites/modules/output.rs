//! Output of a run: its files.

use super::meter::PARTS;
use super::plot::{self, cpu_of, median_of};
use super::{Measured, Setup, Shape, size_text};
use crate::harness::output::{Page, PageSource};
use crate::harness::repeat::Failure;
use crate::harness::report;
use crate::harness::results::Results;

impl PageSource<Setup> for Measured {
    fn stem(&self, _: &Setup) -> &'static str {
        "bench-modules"
    }

    /// The paper's figures.
    fn plots(&self, setup: &Setup) -> Vec<(String, String)> {
        let mut plots = vec![("-improvement.svg".to_owned(), plot::improvements(setup, self))];
        for form in setup.forms.iter().filter(|form| form.shape == Shape::One) {
            let end = format!("-cpu-{}.svg", form.name(setup.batch));
            plots.push((end, plot::cpu(setup, self, *form)));
        }
        plots
    }

    fn page(&self, setup: &Setup, results: &Results, plots: &str) -> Page {
        Page {
            headline: "Inserts with the table store in the host against the same store in the \
                       guest",
            above: [plots, &report::table(results), &everything(setup, self)].concat(),
            below: String::new(),
        }
    }

    fn losses(&self, results: &Results) -> Vec<String> {
        let mut out = report::below_floors(results, |r| format!("{}: {}", r.case, r.ours.name));
        out.extend(self.failed.iter().map(Failure::text));
        let loads = self.loads.iter().filter(|l| l.round > 0);
        out.extend(report::disturbed(&loads.map(|l| l.sample.foreign).collect::<Vec<_>>()));
        out
    }
}

/// All sides in numbers.
fn everything(setup: &Setup, measured: &Measured) -> String {
    let heads = ["rows", "form", "side", "run time"].into_iter().chain(PARTS);
    let heads = heads.chain(["exits", "interrupts", "system calls in the host"]);
    let title = "Of a row: µs, CPU time by component in µs, events";
    let mut out = report::numbers_head(title, heads);
    for cell in setup.cells() {
        let (size, form) = (size_text(cell.size_bytes), cell.form.text(setup.batch));
        for &side in &setup.sides {
            let Some(us) = median_of(measured, (cell, side), |s| s.us) else { continue };
            let parts = cpu_of(measured, cell, side).map_or([None; 5], |c| c.parts().map(Some));
            let counted = measured.counted.iter().find(|c| (c.cell, c.side) == (cell, side));
            let calls = median_of(measured, (cell, side), |s| s.system_calls.unwrap_or(f64::NAN));
            let events =
                [counted.map(|c| c.events.exits), counted.map(|c| c.events.interrupts), calls];
            let values = std::iter::once(Some(us)).chain(parts).chain(events);
            out.push_str(&report::numbers_row(&[&size, &form, side.name()], values));
        }
    }
    out + report::NUMBERS_END
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::output::{RowSource, write_and_read};
    use crate::harness::samples;
    use crate::suites::modules::testing::{measured, setup};

    #[test]
    fn a_run_leaves_its_files() {
        let (ends, page) = write_and_read(&setup(), &measured());
        assert_eq!(ends, ["-improvement.svg", "-cpu-durable.svg", "-cpu-relaxed.svg", ".html"]);
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
        let rows = measured.rows(&setup);
        let told = measured.losses(&Results { rows, ..samples::results() });
        assert_eq!(
            told[0],
            "insert_1k_durable: module-batched 1.25× of guest-virtio-blk, floor 2.0×"
        );
        assert!(told[1].starts_with("strangers used more than"), "{told:?}");
    }
}
