//! Made-up measurements for this module's own tests.

use super::counts::Events;
use super::meter::Cpu;
use super::{Counted, Form, Load, Measured, Sample, Setup, Shape, Side};

/// A run of two rounds.
pub fn setup() -> Setup {
    Setup {
        rounds: 2,
        sizes_bytes: vec![1 << 10, 16 << 10, 128 << 10],
        rows: 160,
        batch: 16,
        sides: Side::ALL.into(),
        forms: Form::all(&[Shape::One, Shape::Rows]),
        kernel: lab::KernelChoice::default(),
        millrace: "millrace".into(),
        plugin: "ha_millrace.so".into(),
        module: "table.wasm".into(),
        spin_us: 1000,
        direct: false,
        out: "out".into(),
    }
}

/// The batched module takes 2 ms for a durable row and 1 ms for another, by vsock and by memory,
/// the others more, in their order. The first round is nonsense.
pub fn measured() -> Measured {
    let (setup, mut all) = (setup(), Measured::default());
    for round in 0..=setup.rounds {
        let nonsense = if round == 0 { 77.0 } else { 1.0 };
        for cell in setup.cells() {
            for (place, side) in Side::ALL.into_iter().enumerate() {
                if !side.can(cell.form) {
                    continue;
                }
                let times = if side == Side::ModuleRing { 1.0 } else { 1.0 + place as f64 };
                let us = nonsense * times * if cell.form.durable { 2000.0 } else { 1000.0 };
                let cpu = Cpu {
                    guest: 100.0 * times,
                    qemu: 10.0 * times,
                    daemon: 20.0,
                    module: 30.0,
                    kernel: 40.0,
                };
                let sample = Sample { us, cpu, system_calls: Some(times), foreign: 0.0 };
                all.loads.push(Load { round, cell, side, sample });
                if round == 0 {
                    let events = Events { exits: 3.0 * times, interrupts: 2.0 * times };
                    all.counted.push(Counted { cell, side, events });
                }
            }
        }
    }
    all
}
