//! Rate of chains through a queue: pop, push, notify check, against a driver in the same
//! thread. Prints nanoseconds per chain on the device's side (the driver's time is not counted).
//!
//! `cargo run --release -p millrace-queue --features testing --example ring_rate`

use std::time::{Duration, Instant};

use queue::testing::{ModelDriver, ModelOptions, RawDesc};
use queue::{Batch, Completion, Layout};

const SIZE: u16 = 256;
const BATCH: usize = 32;
const ROUNDS: usize = 200_000;

fn run(layout: Layout, event_idx: bool, indirect: bool) -> Duration {
    let options = ModelOptions { event_idx, indirect: true, ..ModelOptions::default() };
    let mut driver = ModelDriver::with_options(layout, SIZE, options);
    driver.set_interrupts(false);
    let buffers: Vec<u64> = (0..BATCH).map(|_| driver.alloc(2048)).collect();
    let tables: Vec<u64> = buffers
        .iter()
        .map(|&addr| driver.ram().table(layout, &[RawDesc { addr, len: 64, flags: 0, tail: 0 }]))
        .collect();
    let mut queue = driver.queue();
    let mut batch = Batch::new(BATCH, BATCH);
    let mut done = Vec::with_capacity(BATCH);
    let mut spent = Duration::ZERO;
    for _ in 0..ROUNDS {
        for i in 0..BATCH {
            let (addr, len, flags) =
                if indirect { (tables[i], 16, 4) } else { (buffers[i], 64, 0) };
            driver.stage_raw(&[RawDesc { addr, len, flags, tail: 0 }]);
        }
        driver.publish();
        let start = Instant::now();
        let popped = queue.pop(&mut batch, BATCH);
        assert_eq!(popped, Ok(BATCH));
        done.clear();
        for i in 0..batch.len() {
            let chain = batch.get(i);
            done.push(Completion { id: chain.id, ndesc: chain.ndesc, written: 0 });
        }
        queue.push(&done);
        std::hint::black_box(queue.take_notify());
        spent += start.elapsed();
        while driver.used().is_some() {}
    }
    spent
}

fn main() {
    for layout in [Layout::Split, Layout::Packed] {
        for event_idx in [false, true] {
            for indirect in [false, true] {
                let spent = run(layout, event_idx, indirect);
                let ns = spent.as_nanos() as f64 / (ROUNDS * BATCH) as f64;
                println!(
                    "{layout:?} event_idx={event_idx} indirect={indirect}: {ns:.1} ns/chain, \
                     {:.1} M chains/s",
                    1e3 / ns
                );
            }
        }
    }
}
