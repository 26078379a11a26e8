//! Rows in the published format: medians over the rounds.

use super::{Cell, Measured, Sample, Setup, Shape, Side, size_text};
use crate::harness::output::RowSource;
use crate::harness::paired::{About, Goal, NONE, row};
use crate::harness::repeat::Failure;
use crate::harness::results::Row;
use crate::harness::stats::Better;

/// Sides of ours. Those in `BATCHED` are compared with all peers, the other with stores in the
/// guest only.
const OURS: [Side; 3] = [Side::ModuleBatched, Side::ModuleRing, Side::Module];
/// Sides with a request for each statement.
const BATCHED: [Side; 2] = [Side::ModuleBatched, Side::ModuleRing];
/// Stores in the guest.
const STORES: [Side; 3] = [Side::Virtio, Side::Ide, Side::Disk];
/// The server's own engines.
const ENGINES: [Side; 3] = [Side::Innodb, Side::Aria, Side::Myisam];
/// Half the time at every size.
const AIM: f64 = 2.0;
/// Largest rows of which that is the floor.
const SMALL_BYTES: u32 = 4 << 10;
/// Largest rows of which the next is.
const MIDDLE_BYTES: u32 = 16 << 10;
/// 30 % less time, and 20 %.
const MIDDLE: f64 = 1.4286;
const LARGE: f64 = 1.25;

/// Value that a row of the results is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Insert,
    GuestCpu,
    HostCpu,
    Exits,
    Interrupts,
    Calls,
}

impl Value {
    const COSTS: [Value; 5] =
        [Value::GuestCpu, Value::HostCpu, Value::Exits, Value::Interrupts, Value::Calls];

    fn name(self) -> &'static str {
        match self {
            Value::Insert => "insert",
            Value::GuestCpu => "guest_cpu",
            Value::HostCpu => "host_cpu",
            Value::Exits => "exits",
            Value::Interrupts => "interrupts",
            Value::Calls => "calls",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Value::Insert | Value::GuestCpu | Value::HostCpu => "µs",
            _ => "1/row",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Value::Insert => "run time of a row",
            Value::GuestCpu => "CPU time of the guest’s CPU for a row",
            Value::HostCpu => {
                "CPU time of a row: QEMU’s other threads, daemon, module, kernel threads"
            }
            Value::Exits => "the guest’s accesses to registers for a row",
            Value::Interrupts => "interrupts of disk and vsock in the guest for a row",
            Value::Calls => "system calls for a row: QEMU but the guest’s CPU, daemon, module",
        }
    }
}

impl RowSource<Setup> for Measured {
    fn rows(&self, setup: &Setup) -> Vec<Row> {
        let mut rows = Vec::new();
        for cell in setup.cells() {
            for ours in OURS {
                let engines = ENGINES.iter().filter(|_| BATCHED.contains(&ours));
                let vsock = (ours == Side::ModuleRing).then_some(&Side::ModuleBatched);
                for peer in STORES.iter().chain(engines).chain(vsock) {
                    rows.extend(made(setup, self, (Value::Insert, cell), (ours, *peer)));
                }
            }
        }
        for cell in setup.cells().into_iter().filter(|cell| cell.form.shape == Shape::One) {
            for value in Value::COSTS {
                for ours in BATCHED {
                    for peer in [Side::Virtio, Side::Ide] {
                        rows.extend(made(setup, self, (value, cell), (ours, peer)));
                    }
                }
            }
        }
        rows
    }

    fn failed(&self) -> &[Failure] {
        &self.failed
    }
}

/// The floors of the issue: of rows committed one by one.
fn goal((value, cell): (Value, Cell), (ours, peer): (Side, Side)) -> Goal {
    if (value, peer) != (Value::Insert, Side::Virtio) || !BATCHED.contains(&ours) {
        return NONE;
    }
    let target = match (cell.form.durable, cell.form.shape, cell.size_bytes) {
        (false, ..) => 1.0,
        (true, Shape::One, ..=SMALL_BYTES) => AIM,
        (true, Shape::One, ..=MIDDLE_BYTES) => MIDDLE,
        (true, Shape::One, _) => LARGE,
        _ => return NONE,
    };
    Goal { target: Some(target), aim: cell.form.durable.then_some(AIM) }
}

fn made(
    setup: &Setup,
    measured: &Measured,
    (value, cell): (Value, Cell),
    (ours, peer): (Side, Side),
) -> Option<Row> {
    let sample = |round, side| {
        let wanted = |l: &&super::Load| (l.round, l.cell, l.side) == (round, cell, side);
        Some(measured.loads.iter().find(wanted)?.sample)
    };
    let counted = |side| {
        let wanted = |c: &&super::Counted| (c.cell, c.side) == (cell, side);
        Some(measured.counted.iter().find(wanted)?.events)
    };
    let of = |round, side| -> Option<(f64, Option<f64>)> {
        let of_sample = |get: fn(&Sample) -> f64| Some((get(&sample(round, side)?), None));
        match value {
            Value::Insert => {
                let sample = sample(round, side)?;
                Some((sample.us, Some(sample.cpu.total())))
            }
            Value::GuestCpu => of_sample(|s| s.cpu.guest),
            Value::HostCpu => of_sample(|s| s.cpu.host()),
            Value::Calls => Some((sample(round, side)?.system_calls?, None)),
            Value::Exits => Some((counted(side)?.exits, None)),
            Value::Interrupts => Some((counted(side)?.interrupts, None)),
        }
    };
    // Events are counted once.
    let once = matches!(value, Value::Exits | Value::Interrupts);
    let about = About {
        case: format!("{}_{}", value.name(), cell.name(setup)),
        ours: ours.name(),
        peer: peer.name(),
        unit: value.unit(),
        better: Better::Lower,
        goal: goal((value, cell), (ours, peer)),
        mode: format!(
            "{}; rows of {}, {}",
            value.what(),
            size_text(cell.size_bytes),
            cell.form.text(setup.batch)
        ),
    };
    row(about, if once { 1 } else { setup.rounds }, |round| {
        Some((of(round, ours)?, of(round, peer)?))
    })
}

#[cfg(test)]
mod tests;
