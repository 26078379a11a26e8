//! The thread that measures sidecores and moves workers between them.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use base::clock::Clock;
use base::counter::Counter;

use crate::core::{Sidecore, Unit};
use crate::placement::{CoreLoad, History, Limits, Meter, Plan, Reason, UnitReading, plan};
use crate::unit_nodes::UnitNodes;
use crate::worker::SidecoreError;

/// Time between two looks at loads: ten small wake-ups a second for the whole daemon, and two while
/// all sidecores sleep. Sidecores are not woken for it, only their counters are read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Time between two looks, in those of [`LOOK_EVERY`], while all sidecores sleep: a wake-up of this
/// thread costs more than the look. A load that begins then has its second sidecore so much later.
const QUIET_EVERY: u32 = 5;

/// Looks in a row without a sign of life of any sidecore, after which loads have faded, every
/// condition has held or not, and no unit has to stay where it is: the next look would decide what
/// the last one did. Longer than any number of looks in [`Limits`].
const QUIET_LOOKS: u32 = 100;

/// Counters of the placer's decisions. Written by the placer's thread.
#[derive(Debug, Default)]
pub struct PlacerStats {
    /// Units moved, by [`Reason`].
    pub moves: [Counter; Reason::ALL.len()],
    /// Moves that failed; the unit stayed where it was.
    pub failed_moves: Counter,
    /// Sidecores that were activated.
    pub activations: Counter,
    /// Sidecores that were parked.
    pub parks: Counter,
    /// Active sidecores now.
    pub active: Counter,
}

/// Moves workers by measured load, and lets the number of active sidecores follow it, until
/// dropped. See [`crate::placement`] for the rules.
///
/// It has a thread of its own: a move waits for two sidecores, and only the [`crate::Watchdog`]
/// frees one that hangs.
#[derive(Debug)]
pub struct Placer {
    stats: Arc<PlacerStats>,
    /// Never used; its drop tells the thread to end.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Placer {
    /// Starts it for `cores`, of which the first `limits.min_active` are active from now on. Add
    /// workers to active ones: they leave parked ones at the next look.
    pub fn start(
        cores: Vec<Sidecore>,
        limits: Limits,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, SidecoreError> {
        Self::with_interval(cores, limits, clock, LOOK_EVERY)
    }

    fn with_interval(
        cores: Vec<Sidecore>,
        limits: Limits,
        clock: Arc<dyn Clock>,
        every: Duration,
    ) -> Result<Self, SidecoreError> {
        let stats = Arc::new(PlacerStats::default());
        let (stop, stopped) = mpsc::channel();
        let mut looks = Looks::new(cores, limits, clock, Arc::clone(&stats));
        looks.show_active();
        let run = move || {
            let mut pause = every;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                looks.look();
                pause = if looks.is_quiet() { every * QUIET_EVERY } else { every };
            }
        };
        let thread = std::thread::Builder::new()
            .name("placer".into())
            .spawn(run)
            .map_err(|source| SidecoreError::Io { what: "starting the placer's thread", source })?;
        Ok(Self { stats, stop: Some(stop), thread: Some(thread) })
    }

    /// Counters of the decisions so far.
    pub fn stats(&self) -> &PlacerStats {
        &self.stats
    }
}

impl Drop for Placer {
    fn drop(&mut self) {
        self.stop = None;
        // It ends at once, or with the move that it makes; one that panicked has ended already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Times of a sidecore at the last look.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    busy_ns: u64,
    cpu_ns: u64,
    /// Sum over looks of the lesser of the two.
    load_ns: u64,
}

/// Signs of life of a sidecore. Everything that it does changes them, be it a job for it: while
/// they stay, so do its load and its workers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Signs {
    rounds: u64,
    sleeps: u64,
    is_stalled: bool,
}

impl Signs {
    fn of(core: &Sidecore) -> Self {
        let stats = core.stats();
        let (rounds, sleeps) = (stats.rounds.get(), stats.sleeps.get());
        Self { rounds, sleeps, is_stalled: core.is_stalled() }
    }
}

struct Looks {
    cores: Vec<Sidecore>,
    limits: Limits,
    clock: Arc<dyn Clock>,
    history: History,
    meter: Meter,
    nodes: UnitNodes,
    times: Vec<Times>,
    signs: Vec<Signs>,
    /// Looks in a row in which no sign had changed.
    quiet_looks: u32,
    last_ns: u64,
    stats: Arc<PlacerStats>,
}

impl Looks {
    fn new(
        cores: Vec<Sidecore>,
        limits: Limits,
        clock: Arc<dyn Clock>,
        stats: Arc<PlacerStats>,
    ) -> Self {
        Self {
            history: History::new(cores.len(), &limits),
            meter: Meter::default(),
            nodes: UnitNodes::default(),
            times: vec![Times::default(); cores.len()],
            signs: vec![Signs::default(); cores.len()],
            quiet_looks: 0,
            last_ns: clock.now_ns(),
            stats,
            cores,
            limits,
            clock,
        }
    }

    fn look(&mut self) {
        let now_ns = self.clock.now_ns();
        let elapsed_ns = now_ns.saturating_sub(self.last_ns);
        self.last_ns = now_ns;
        self.look_for_signs();
        if self.is_quiet() {
            return;
        }
        let busy_ns = self.busy_ns();
        let units = self.units();
        let readings: Vec<UnitReading> = units.iter().map(|(reading, _)| *reading).collect();
        let (mut loads, mut unit_loads) = self.meter.read(elapsed_ns, &busy_ns, &readings);
        for (load, core) in loads.iter_mut().zip(&self.cores) {
            (load.usable, load.node) = (!core.is_stalled(), core.node());
            core.stats().load_percent.set((load.load * 100.0).round() as u64);
        }
        self.nodes.look(&self.cores, units.iter().map(|(reading, unit)| (unit, reading.core)));
        unit_loads.iter_mut().for_each(|unit| unit.node = self.nodes.of(unit.id));
        let plan = plan(&loads, &unit_loads, &self.limits, &mut self.history);
        if !plan.is_empty() {
            self.quiet_looks = 0;
            self.apply(&plan, &loads, &units);
        }
    }

    /// Counts the looks without a sign of life.
    fn look_for_signs(&mut self) {
        let signs = self.cores.iter().map(Signs::of).zip(&mut self.signs);
        let changed = signs.map(|(new, seen)| std::mem::replace(seen, new) != new);
        // Every one is to be read.
        let is_changed = changed.fold(false, |any, changed| any | changed);
        self.quiet_looks = if is_changed { 0 } else { self.quiet_looks.saturating_add(1) };
    }

    /// Whether all sidecores have been asleep for so long that there is nothing to decide. Counters
    /// of hundreds of workers lie in as many places of memory, which are cold between two looks.
    fn is_quiet(&self) -> bool {
        self.quiet_looks > QUIET_LOOKS
    }

    /// Busy time of each sidecore, less the time that the scheduler gave to other threads: a thread
    /// that waits for its CPU is not relieved by another that waits for one.
    fn busy_ns(&mut self) -> Vec<u64> {
        let load = |(core, last): (&Sidecore, &mut Times)| {
            let busy_ns = core.stats().busy_ns.get();
            let cpu_ns = core.cpu_ns().unwrap_or(last.cpu_ns);
            let ran_ns = cpu_ns.saturating_sub(last.cpu_ns);
            let load_ns = last.load_ns + busy_ns.saturating_sub(last.busy_ns).min(ran_ns);
            *last = Times { busy_ns, cpu_ns, load_ns };
            load_ns
        };
        self.cores.iter().zip(&mut self.times).map(load).collect()
    }

    /// Units with their counters, which are the sums over their workers.
    fn units(&self) -> Vec<(UnitReading, Arc<Unit>)> {
        let mut all: Vec<(UnitReading, Arc<Unit>)> = Vec::new();
        for (core, handle) in self.cores.iter().enumerate() {
            for seat in handle.seats() {
                let busy_ns = seat.stats.busy_ns.get();
                let known = all.iter_mut().find(|(_, unit)| Arc::ptr_eq(unit, &seat.unit));
                match known {
                    Some((reading, _)) => reading.busy_ns += busy_ns,
                    None => {
                        let unit = Arc::clone(&seat.unit);
                        let (id, movable) = (unit.id, !unit.is_pinned());
                        all.push((UnitReading { id, core, busy_ns, movable }, unit));
                    }
                }
            }
        }
        all
    }

    /// Names of a unit's workers, for the log.
    fn names(&self, core: usize, unit: &Arc<Unit>) -> String {
        let seats = self.cores[core].seats();
        let mine = seats.iter().filter(|seat| Arc::ptr_eq(&seat.unit, unit));
        mine.map(|seat| seat.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    fn apply(&mut self, plan: &Plan, loads: &[CoreLoad], units: &[(UnitReading, Arc<Unit>)]) {
        let percent = |core: usize| (loads[core].load * 100.0).round();
        for &core in &plan.activate {
            self.stats.activations.add(1);
            tracing::info!(sidecore = core, "sidecore activated");
        }
        for step in &plan.moves {
            let Some((_, unit)) = units.iter().find(|(u, _)| u.id == step.unit) else { continue };
            let reason = step.reason.name();
            let (from, to) = (step.from, step.to);
            let worker = self.names(from, unit);
            match unit.move_to(&self.cores[to]) {
                Ok(()) => {
                    self.stats.moves[step.reason as usize].add(1);
                    tracing::info!(
                        worker,
                        from,
                        from_percent = percent(from),
                        to,
                        to_percent = percent(to),
                        reason,
                        "worker moved"
                    );
                }
                Err(e) => {
                    self.stats.failed_moves.add(1);
                    tracing::warn!(worker, from, to, reason, "worker not moved: {e}");
                }
            }
        }
        for &core in &plan.park {
            self.stats.parks.add(1);
            tracing::info!(sidecore = core, "sidecore parked");
        }
        self.show_active();
    }

    fn show_active(&self) {
        let active = self.history.active();
        for (core, active) in self.cores.iter().zip(active) {
            core.stats().active.set(u64::from(*active));
        }
        self.stats.active.set(active.iter().filter(|a| **a).count() as u64);
    }
}

#[cfg(test)]
mod tests;
