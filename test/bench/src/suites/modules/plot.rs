//! The paper's figures 4 and 5.

use super::meter::{Cpu, PARTS};
use super::{Cell, Form, Load, Measured, Sample, Setup, Side, size_text};
use crate::harness::stats::spread;
use crate::harness::svg::{Canvas, WIDTH};
use crate::harness::table::number;

const TOP: f64 = 82.0;
const LEFT: f64 = 150.0;
const RIGHT: f64 = 40.0;
const HEAD: f64 = 26.0;
/// Height of a panel of upright bars.
const PANEL: f64 = 170.0;
const GAP: f64 = 46.0;
/// A lying bar with its distance to the next.
const LINE: f64 = 24.0;
/// Slower by more than that is drawn as that.
const WORST: f64 = -1.0;
/// Sides of figure 4, which are compared with IDE, and their colours.
const BARS: [(Side, &str); 8] = [
    (Side::Virtio, "mr-c4"),
    (Side::Disk, "mr-c5"),
    (Side::Module, "mr-c1"),
    (Side::ModuleBatched, "mr-c0"),
    (Side::ModuleRing, "mr-c6"),
    (Side::Innodb, "mr-c2"),
    (Side::Aria, "mr-c7"),
    (Side::Myisam, "mr-c8"),
];
/// Sides of figure 5.
const STACKS: [Side; 6] =
    [Side::Ide, Side::Virtio, Side::Disk, Side::Module, Side::ModuleBatched, Side::ModuleRing];

/// Median of some value over the rounds that count.
pub fn median_of(
    measured: &Measured,
    (cell, side): (Cell, Side),
    value: impl Fn(&Sample) -> f64,
) -> Option<f64> {
    let wanted = |l: &&Load| l.round > 0 && (l.cell, l.side) == (cell, side);
    let values = measured.loads.iter().filter(wanted).map(|l| value(&l.sample));
    Some(spread(&values.collect::<Vec<_>>())?.median)
}

/// Medians of CPU time by component.
pub fn cpu_of(measured: &Measured, cell: Cell, side: Side) -> Option<Cpu> {
    let part = |at: usize| median_of(measured, (cell, side), |s| s.cpu.parts()[at]);
    let mut parts = [0.0; PARTS.len()];
    for (at, value) in parts.iter_mut().enumerate() {
        *value = part(at)?;
    }
    Some(Cpu::from_parts(parts))
}

/// How much less time a side takes than the baseline: 0.5 is half.
fn improvement(measured: &Measured, cell: Cell, side: Side) -> Option<f64> {
    let us = |side| median_of(measured, (cell, side), |s| s.us);
    Some(1.0 - us(side)? / us(Side::Ide).filter(|us| *us > 0.0)?)
}

/// Figure 4: run time improvement against the IDE baseline by row size, a panel for each form.
pub fn improvements(setup: &Setup, measured: &Measured) -> String {
    let title = "Run time improvement against IDE emulation by row size (figure 4)";
    let note = "inserts; the same table store in the guest on three disks and in the host, and \
                other engines on virtio-blk; below the line: slower";
    let mut canvas = Canvas::titled(title, note);
    let names: Vec<_> = BARS.iter().map(|(side, class)| (side.name(), *class)).collect();
    legend(&mut canvas, &names, 56.0);
    for (i, form) in setup.forms.iter().enumerate() {
        let top = TOP + i as f64 * (HEAD + PANEL + GAP);
        canvas.text(16.0, top + 12.0, "mr-text mr-strong", &form.text(setup.batch));
        panel(&mut canvas, setup, measured, (*form, top + HEAD));
    }
    canvas.finish(TOP + setup.forms.len() as f64 * (HEAD + PANEL + GAP), title)
}

fn panel(canvas: &mut Canvas, setup: &Setup, measured: &Measured, (form, top): (Form, f64)) {
    let cells = setup.sizes_bytes.iter().map(|&size_bytes| Cell { size_bytes, form });
    let values: Vec<(Cell, Vec<Option<f64>>)> = cells
        .map(|cell| {
            let of = |(side, _): &(Side, &str)| improvement(measured, cell, *side);
            (cell, BARS.iter().map(of).collect())
        })
        .collect();
    let all = || values.iter().flat_map(|(_, bars)| bars.iter().flatten().copied());
    let low = all().fold(0.0, f64::min).max(WORST);
    let high = all().fold(0.0, f64::max).max(0.1);
    let scale = PANEL / (high - low);
    let zero = top + high * scale;
    for mark in [low, 0.0, 0.5, high] {
        let near = |other: f64| (mark - other).abs() * scale < 12.0;
        if (low..=high).contains(&mark)
            && (mark == 0.0 || !near(0.0))
            && !(mark == 0.5 && near(high))
        {
            let (y, class) = (zero - mark * scale, if mark == 0.0 { "mr-one" } else { "mr-grid" });
            canvas.line((LEFT, y), (WIDTH - RIGHT, y), class);
            canvas.text(LEFT - 8.0, y + 4.0, "mr-small mr-end", &format!("{:.0} %", mark * 100.0));
        }
    }
    let width = (WIDTH - LEFT - RIGHT) / values.len().max(1) as f64;
    let bar = width * 0.84 / BARS.len() as f64;
    for (k, (cell, bars)) in values.iter().enumerate() {
        let x = LEFT + k as f64 * width + width * 0.08;
        for (i, value) in bars.iter().enumerate() {
            let Some(value) = value.map(|v| v.max(low)) else { continue };
            let at = (x + i as f64 * bar, zero - value.max(0.0) * scale);
            canvas.bar(at, (bar - 1.5, value.abs() * scale), BARS[i].1);
        }
        let name = size_text(cell.size_bytes);
        canvas.text(x + width * 0.42, top + PANEL + 15.0, "mr-small mr-mid", &name);
    }
}

/// Figure 5: CPU time of a row, in the guest and in the host.
pub fn cpu(setup: &Setup, measured: &Measured, form: Form) -> String {
    let title =
        format!("CPU time of a row in guest and host (figure 5): {}", form.text(setup.batch));
    let mut canvas = Canvas::titled(
        &title,
        "microseconds of host CPU; the guest’s CPU also emulates IDE, without KVM",
    );
    let classes = ["mr-f0", "mr-f2", "mr-f3", "mr-f4", "mr-f5"];
    let names: Vec<_> = PARTS.into_iter().zip(classes).collect();
    legend(&mut canvas, &names, 56.0);
    let mut top = TOP;
    for &size_bytes in &setup.sizes_bytes {
        let cell = Cell { size_bytes, form };
        canvas.text(
            16.0,
            top + 12.0,
            "mr-text mr-strong",
            &format!("rows of {}", size_text(size_bytes)),
        );
        top += HEAD;
        let found: Vec<_> =
            STACKS.iter().filter_map(|&s| Some((s, cpu_of(measured, cell, s)?))).collect();
        let most = found.iter().map(|(_, cpu)| cpu.total()).fold(f64::MIN_POSITIVE, f64::max);
        for (side, cpu) in &found {
            let scale = (WIDTH - LEFT - RIGHT - 60.0) / most;
            canvas.text(LEFT - 8.0, top + 13.0, "mr-text mr-end", side.name());
            let mut x = LEFT;
            for (part, class) in cpu.parts().iter().zip(classes) {
                canvas.bar((x, top), (part * scale, LINE - 7.0), class);
                x += part * scale;
            }
            canvas.text(x + 8.0, top + 13.0, "mr-small", &number(cpu.total()));
            top += LINE;
        }
        top += GAP / 3.0;
    }
    canvas.finish(top, &title)
}

fn legend(canvas: &mut Canvas, series: &[(&str, &str)], y: f64) {
    let mut x = 16.0;
    for (name, class) in series {
        canvas.bar((x, y), (10.0, 10.0), class);
        canvas.text(x + 14.0, y + 9.0, "mr-small", name);
        x += 30.0 + 6.0 * name.chars().count() as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::modules::Shape;
    use crate::suites::modules::testing::{measured, setup};

    #[test]
    fn bars_are_as_high_as_the_improvement() {
        let svg = improvements(&setup(), &measured());
        // IDE takes 4 times as long as the batched module: 75 %, the whole panel but what InnoDB's
        // 50 % more, and others', goes below the line (Aria 75 %).
        let scale = PANEL / (0.75 + 0.75);
        let bar = format!("height=\"{:.1}\" rx=\"2\" class=\"mr-c0\"", 0.75 * scale);
        assert!(svg.contains(&bar), "{svg}");
        assert!(svg.contains(">75 %</text>") && svg.contains(">-75 %</text>"), "{svg}");
        assert!(svg.contains("not durable, 16 rows a statement") && svg.contains(">128k</text>"));
    }

    #[test]
    fn parts_stand_side_by_side() {
        let svg = cpu(&setup(), &measured(), Form { durable: true, shape: Shape::One });
        // IDE is the fourth: 400 of 530 µs in the guest; Millrace's disk, the fifth, 640 in all.
        let scale = (WIDTH - LEFT - RIGHT - 60.0) / 640.0;
        let bar =
            format!("width=\"{:.1}\" height=\"17.0\" rx=\"2\" class=\"mr-f0\"", 400.0 * scale);
        assert!(svg.contains(&bar), "{svg}");
        assert!(svg.contains(">200</text>") && svg.contains("rows of 16k"), "{svg}");
    }

    #[test]
    fn nothing_measured_still_draws() {
        let nothing = Measured::default();
        for svg in [
            improvements(&setup(), &nothing),
            cpu(&setup(), &nothing, Form { durable: true, shape: Shape::One }),
        ] {
            assert!(
                svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"),
                "{svg}"
            );
        }
    }
}
