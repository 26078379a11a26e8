//! Rounds: every cell on all sides, in turns.

use super::bed::Bed;
use super::{Cell, Counted, Load, Measured, Setup, Side};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::{order_for_round, with_repeats};

/// Failures of a load after which it is not put on any more: those of one round.
const GIVEN_UP: usize = 2;
/// Boots everything and measures.
pub fn run(setup: &Setup, progress: &mut Progress) -> Result<Measured, BenchError> {
    let bed = Bed::boot(setup, progress)?;
    let mut measured = Measured::default();
    bed.probes(true)?;
    for round in 0..=setup.rounds {
        progress.step(&format!("round {round} of {}", setup.rounds));
        for cell in setup.cells() {
            measure_cell(&bed, setup, (round, cell), &mut measured, progress);
        }
        if round == 0 {
            bed.probes(false)?;
        }
    }
    Ok(measured)
}

/// One cell of one round, all sides.
fn measure_cell(
    bed: &Bed,
    setup: &Setup,
    (round, cell): (u32, Cell),
    measured: &mut Measured,
    progress: &mut Progress,
) {
    let sides: Vec<Side> = setup.sides.iter().copied().filter(|s| s.can(cell.form)).collect();
    let case = format!("insert_{}", cell.name(setup));
    let mut told = Vec::new();
    for side in order_for_round(&sides, round) {
        let failed = &mut measured.failed;
        let load = |_| bed.load(side, cell, cell.rows(setup), round == 0);
        let Some((sample, events)) =
            with_repeats(GIVEN_UP, (&case, side.name()), round, failed, progress, load)
        else {
            continue;
        };
        told.push(format!("{} {:.0}", side.name(), sample.us));
        measured.loads.push(Load { round, cell, side, sample });
        measured.counted.extend(events.map(|events| Counted { cell, side, events }));
    }
    progress.step(&format!("{case} (µs a row): {}", told.join(", ")));
}
