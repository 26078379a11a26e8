//! Real sidecores under measured load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use base::clock::MonotonicClock;

use super::*;
use crate::{Arm, Ledger, SidecoreConfig, Worker, WorkerRef};

/// Longer than anything takes that is not stuck.
const PATIENCE: Duration = Duration::from_secs(30);

/// Has something to do in so many of 100 polls.
struct Loaded(Arc<AtomicU64>, u64);

impl Worker for Loaded {
    fn poll(&mut self, now_ns: u64, _ledger: &mut Ledger) -> usize {
        self.1 += 1;
        if self.1 % 100 >= self.0.load(Ordering::Relaxed) {
            return 0;
        }
        while MonotonicClock.now_ns() < now_ns + 1000 {}
        1
    }
    fn arm(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> Arm {
        if self.0.load(Ordering::Relaxed) > 0 { Arm::Busy } else { Arm::Idle }
    }
    fn disarm(&mut self) {}
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "not {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn workers_spread_under_load_and_come_together_without() {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock);
    let core = |index| {
        let config = SidecoreConfig { index, yield_when_idle: true, ..SidecoreConfig::default() };
        Sidecore::spawn(config, Arc::clone(&clock)).unwrap()
    };
    let cores = vec![core(0), core(1)];
    // Two threads on a shared CPU each get half of it: that, too, is to count as saturated here.
    let limits = Limits { saturated: 0.2, room: 0.1, even_above: 0.2, ..Limits::new(1, 2) };
    let every = Duration::from_millis(20);
    let placer = Placer::with_interval(cores.clone(), limits, clock, every).unwrap();
    assert_eq!((cores[0].is_active(), cores[1].is_active()), (true, false));
    let load = Arc::new(AtomicU64::new(100));
    let add = |_| cores[0].add_named("load", Loaded(Arc::clone(&load), 0)).unwrap();
    let workers: Vec<WorkerRef<Loaded>> = (0..4).map(add).collect();
    until("spread", || cores.iter().all(|c| c.stats().workers.get() > 0));
    until("active", || placer.stats().active.get() == 2);
    assert!(placer.stats().moves[Reason::Saturated as usize].get() > 0);
    load.store(0, Ordering::Relaxed);
    for worker in &workers {
        // Wakes a sleeper, which sees that there is nothing to do.
        worker.call(|_, _| ()).unwrap();
    }
    until("together", || placer.stats().active.get() == 1);
    until("parked", || cores.iter().filter(|c| c.is_active()).count() == 1);
    let busy = cores.iter().find(|c| c.is_active()).unwrap();
    assert_eq!(busy.stats().workers.get(), 4);
    let shown = busy.workers();
    assert!(shown.len() == 4 && shown.iter().all(|w| w.name == "load" && !w.is_pinned));
    let moved: u64 = workers.iter().map(|w| w.stats().moves.get()).sum();
    assert_eq!(shown.iter().map(|w| w.moves).sum::<u64>(), moved);
    assert_eq!((placer.stats().activations.get(), placer.stats().parks.get()), (1, 1));
    assert_eq!(placer.stats().failed_moves.get(), 0);
    drop(placer);
    cores.iter().for_each(Sidecore::shutdown);
}

#[test]
fn sidecores_that_sleep_are_looked_at_again_when_something_changes() {
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock);
    let core = |index| {
        let config = SidecoreConfig { index, ..SidecoreConfig::default() };
        Sidecore::spawn(config, Arc::clone(&clock)).unwrap()
    };
    let cores = vec![core(0), core(1)];
    let limits = Limits::new(1, 2);
    assert!(u64::from(QUIET_LOOKS) > limits.min_stay_looks);
    assert!(QUIET_LOOKS > limits.park_looks && QUIET_LOOKS > limits.window_looks);
    let mut looks = Looks::new(cores.clone(), limits, clock, Arc::default());
    let idle = || Loaded(Arc::default(), 0);
    let _first = cores[0].add_named("first", idle()).unwrap();
    looks.show_active();
    until("quiet", || {
        looks.look();
        looks.is_quiet()
    });
    // One that comes to a parked sidecore leaves it.
    let _late = cores[1].add_named("late", idle()).unwrap();
    until("moved", || {
        looks.look();
        cores[0].stats().workers.get() == 2
    });
    cores.iter().for_each(Sidecore::shutdown);
}
