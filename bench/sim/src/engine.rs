//! The event queue, sidecores and VMs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use sidecore::Spin;
use sidecore::placement::{History, Limits, Meter, Reason, UnitReading, plan};

use crate::histogram::Histogram;
use crate::load::{Draw, Kind, Source, Vm};

/// Requests of one batch, as the engines of the product take them.
pub const BATCH: usize = 32;

/// Requests that a queue holds: the largest virtqueue.
const QUEUE_LEN: usize = 1024;

/// Between two looks of the placer, as in the product.
const LOOK_NS: u64 = 100_000_000;

/// What things cost, in nanoseconds.
#[derive(Debug, Clone)]
pub struct Cost {
    /// A frame.
    pub net_ns: u64,
    /// A KiB of it.
    pub net_kib_ns: u64,
    /// A disk request.
    pub disk_ns: u64,
    /// From a kick to a running thread.
    pub wake_ns: u64,
    /// A move, in which the VM is not served.
    pub move_ns: u64,
}

impl Default for Cost {
    fn default() -> Self {
        Self { net_ns: 80, net_kib_ns: 30, disk_ns: 200, wake_ns: 5_000, move_ns: 20_000 }
    }
}

impl Cost {
    fn of(&self, kind: Kind, len_bytes: u32) -> u64 {
        match kind {
            Kind::Net => self.net_ns + u64::from(len_bytes) * self.net_kib_ns / 1024,
            Kind::Disk => self.disk_ns,
        }
    }
}

/// Who may be served, and how much. One account per VM, whatever sidecore it is on.
pub trait Credits {
    /// Most requests that `vm` may be served now; 0: none before [`Credits::retry_ns`].
    fn grant(&mut self, vm: usize, now_ns: u64) -> usize;
    /// It was served.
    fn charge(&mut self, vm: usize, now_ns: u64, bytes: u64, requests: u64);
    /// When to ask again after nobody got any.
    fn retry_ns(&self, now_ns: u64) -> u64;
}

/// Everybody may always be served.
#[derive(Debug, Default)]
pub struct NoCredits;

impl Credits for NoCredits {
    fn grant(&mut self, _vm: usize, _now_ns: u64) -> usize {
        BATCH
    }
    fn charge(&mut self, _vm: usize, _now_ns: u64, _bytes: u64, _requests: u64) {}
    fn retry_ns(&self, now_ns: u64) -> u64 {
        now_ns + 1
    }
}

/// What is simulated.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The VMs; number *i* begins on sidecore *i* modulo `begin_on`.
    pub vms: Vec<Vm>,
    /// Sidecores.
    pub cores: usize,
    /// How many of them have VMs at the start.
    pub begin_on: usize,
    /// Moves and activations; none: VMs stay where they begin.
    pub limits: Option<Limits>,
    /// Longest poll before a sleep, in nanoseconds.
    pub spin_ns: u64,
    /// Whether the polling adapts.
    pub adapts: bool,
    /// What things cost.
    pub cost: Cost,
    /// Of all random numbers.
    pub seed: u64,
    /// Not counted, in nanoseconds.
    pub warm_up_ns: u64,
    /// Counted, in nanoseconds.
    pub length_ns: u64,
    /// From when on open sources ask for so many times their rate.
    pub factors: Vec<(u64, f64)>,
}

/// What came out for one VM.
#[derive(Debug, Clone, Default)]
pub struct VmOut {
    /// From arrival to completion.
    pub latency_ns: Histogram,
    /// Requests completed.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that found the queue full.
    pub dropped: u64,
}

/// What came out.
#[derive(Debug, Default)]
pub struct Outcome {
    /// By VM.
    pub vms: Vec<VmOut>,
    /// Nanoseconds of service, over all sidecores.
    pub busy_ns: u64,
    /// Nanoseconds of polling without work.
    pub spin_ns: u64,
    /// Nanoseconds of waking up.
    pub waking_ns: u64,
    /// Wake-ups.
    pub wakeups: u64,
    /// Moves by [`Reason`].
    pub moves: [u64; Reason::ALL.len()],
    /// When the number of active sidecores changed, from the beginning of the warm-up.
    pub active: Vec<(u64, usize)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival { vm: usize, len_bytes: u32, is_disk: bool },
    Step { core: usize },
    Look,
    Count,
}

struct VmState {
    draw: Draw,
    queue: VecDeque<(u64, u32, Kind)>,
    core: usize,
    /// In its sidecore's list.
    is_ready: bool,
    /// On the way to another sidecore until then.
    free_at_ns: u64,
    busy_ns: u64,
}

struct Core {
    ready: VecDeque<usize>,
    /// Since when it has nothing to do; none while it serves.
    idle_since_ns: Option<u64>,
    spin: Spin,
    busy_ns: u64,
}

/// A run.
pub struct Engine<'a> {
    setup: &'a Setup,
    credits: &'a mut dyn Credits,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    count: u64,
    now_ns: u64,
    vms: Vec<VmState>,
    cores: Vec<Core>,
    meter: Meter,
    history: History,
    out: Outcome,
}

/// Simulates.
pub fn run(setup: &Setup, credits: &mut dyn Credits) -> Outcome {
    Engine::new(setup, credits).run()
}

impl<'a> Engine<'a> {
    fn new(setup: &'a Setup, credits: &'a mut dyn Credits) -> Self {
        let vm = |vm: usize| VmState {
            draw: Draw::new(setup.seed, vm),
            queue: VecDeque::new(),
            core: vm % setup.begin_on,
            is_ready: false,
            free_at_ns: 0,
            busy_ns: 0,
        };
        let core = |_| Core {
            ready: VecDeque::new(),
            idle_since_ns: Some(0),
            spin: Spin::new(setup.spin_ns, setup.adapts),
            busy_ns: 0,
        };
        let fixed = Limits::new(setup.begin_on, setup.begin_on);
        let history = History::new(setup.cores, setup.limits.as_ref().unwrap_or(&fixed));
        let active = history.active().iter().filter(|a| **a).count();
        let vms = vec![VmOut::default(); setup.vms.len()];
        let out = Outcome { vms, active: vec![(0, active)], ..Outcome::default() };
        let mut engine = Self {
            setup,
            credits,
            events: BinaryHeap::new(),
            count: 0,
            now_ns: 0,
            vms: (0..setup.vms.len()).map(vm).collect(),
            cores: (0..setup.cores).map(core).collect(),
            meter: Meter::default(),
            history,
            out,
        };
        engine.at(setup.warm_up_ns, Event::Count);
        if setup.limits.is_some() {
            engine.at(LOOK_NS, Event::Look);
        }
        for vm in 0..engine.vms.len() {
            for _ in 0..Draw::parallel(&setup.vms[vm]) {
                engine.ask(vm);
            }
        }
        engine
    }

    fn at(&mut self, at_ns: u64, event: Event) {
        // The number makes the order of simultaneous events that of their making.
        self.count += 1;
        self.events.push(Reverse((at_ns, self.count, event)));
    }

    fn run(mut self) -> Outcome {
        let end_ns = self.setup.warm_up_ns + self.setup.length_ns;
        while let Some(Reverse((at_ns, _, event))) = self.events.pop() {
            if at_ns >= end_ns {
                break;
            }
            self.now_ns = at_ns;
            match event {
                Event::Arrival { vm, len_bytes, is_disk } => {
                    let kind = if is_disk { Kind::Disk } else { Kind::Net };
                    self.arrive(vm, len_bytes, kind);
                }
                Event::Step { core } => self.step(core),
                Event::Look => self.look(),
                Event::Count => self.begin_to_count(),
            }
        }
        self.now_ns = end_ns;
        self.count_polling();
        self.out
    }

    /// Draws the next arrival of a VM.
    fn ask(&mut self, vm: usize) {
        let source = &self.setup.vms[vm];
        let Some((at_ns, len_bytes, kind)) = self.vms[vm].draw.next(source, self.now_ns) else {
            return;
        };
        let at_ns = match source.source {
            Source::Poisson { .. } => {
                let gap_ns = (at_ns - self.now_ns) as f64 / self.factor();
                self.now_ns + gap_ns as u64
            }
            _ => at_ns,
        };
        self.at(at_ns, Event::Arrival { vm, len_bytes, is_disk: kind == Kind::Disk });
    }

    fn factor(&self) -> f64 {
        let past = self.setup.factors.iter().rev().find(|(from_ns, _)| *from_ns <= self.now_ns);
        past.map_or(1.0, |(_, factor)| *factor)
    }

    fn arrive(&mut self, vm: usize, len_bytes: u32, kind: Kind) {
        if !matches!(self.setup.vms[vm].source, Source::Closed { .. }) {
            self.ask(vm);
        }
        if self.vms[vm].queue.len() == QUEUE_LEN {
            self.out.vms[vm].dropped += 1;
            return;
        }
        self.vms[vm].queue.push_back((self.now_ns, len_bytes, kind));
        self.make_ready(vm);
    }

    fn make_ready(&mut self, vm: usize) {
        let state = &mut self.vms[vm];
        if state.is_ready || state.queue.is_empty() {
            return;
        }
        state.is_ready = true;
        let core = state.core;
        self.cores[core].ready.push_back(vm);
        self.wake(core);
    }

    /// An idle sidecore begins: at once while it polls, later when it slept.
    fn wake(&mut self, core: usize) {
        let Some(since_ns) = self.cores[core].idle_since_ns.take() else { return };
        let idle_ns = self.now_ns - since_ns;
        let limit_ns = self.cores[core].spin.limit_ns();
        let mut begin_ns = self.now_ns;
        self.out.spin_ns += idle_ns.min(limit_ns);
        if idle_ns > limit_ns {
            self.cores[core].spin.woke_to_work(idle_ns);
            begin_ns += self.setup.cost.wake_ns;
            self.out.waking_ns += self.setup.cost.wake_ns;
            self.out.wakeups += 1;
        }
        self.at(begin_ns, Event::Step { core });
    }

    /// A batch of the VM whose turn it is.
    fn step(&mut self, core: usize) {
        let mut later_ns = u64::MAX;
        for _ in 0..self.cores[core].ready.len() {
            let Some(vm) = self.cores[core].ready.pop_front() else { break };
            let free_at_ns = self.vms[vm].free_at_ns;
            let most = match free_at_ns > self.now_ns {
                true => {
                    later_ns = later_ns.min(free_at_ns);
                    0
                }
                false => self.credits.grant(vm, self.now_ns).min(BATCH),
            };
            if most > 0 {
                return self.serve(core, vm, most);
            }
            self.cores[core].ready.push_back(vm);
        }
        if self.cores[core].ready.is_empty() {
            self.cores[core].idle_since_ns = Some(self.now_ns);
            return;
        }
        let retry_ns = self.credits.retry_ns(self.now_ns).max(self.now_ns + 1);
        self.at(later_ns.min(retry_ns), Event::Step { core });
    }

    fn serve(&mut self, core: usize, vm: usize, most: usize) {
        let count = self.vms[vm].queue.len().min(most);
        let batch: Vec<(u64, u32, Kind)> = self.vms[vm].queue.drain(..count).collect();
        let cost = |(_, len_bytes, kind): &(u64, u32, Kind)| self.setup.cost.of(*kind, *len_bytes);
        let spent_ns: u64 = batch.iter().map(cost).sum();
        let begin_ns = self.now_ns;
        let end_ns = begin_ns + spent_ns;
        let out = &mut self.out.vms[vm];
        for (arrived_ns, len_bytes, _) in &batch {
            out.latency_ns.add(end_ns - arrived_ns);
            out.bytes += u64::from(*len_bytes);
        }
        out.requests += count as u64;
        let bytes = batch.iter().map(|(_, len_bytes, _)| u64::from(*len_bytes)).sum();
        self.credits.charge(vm, begin_ns, bytes, count as u64);
        self.out.busy_ns += spent_ns;
        self.cores[core].busy_ns += spent_ns;
        self.vms[vm].busy_ns += spent_ns;
        self.vms[vm].free_at_ns = end_ns;
        if matches!(self.setup.vms[vm].source, Source::Closed { .. }) {
            self.now_ns = end_ns;
            (0..count).for_each(|_| self.ask(vm));
            self.now_ns = begin_ns;
        }
        if self.vms[vm].queue.is_empty() {
            self.vms[vm].is_ready = false;
        } else {
            self.cores[core].ready.push_back(vm);
        }
        self.at(end_ns, Event::Step { core });
    }

    fn look(&mut self) {
        let Some(limits) = &self.setup.limits else { return };
        let busy_ns: Vec<u64> = self.cores.iter().map(|c| c.busy_ns).collect();
        let unit = |(id, vm): (usize, &VmState)| UnitReading {
            id: id as u32,
            core: vm.core,
            busy_ns: vm.busy_ns,
            movable: true,
        };
        let units: Vec<UnitReading> = self.vms.iter().enumerate().map(unit).collect();
        let (cores, units) = self.meter.read(LOOK_NS, &busy_ns, &units);
        let decided = plan(&cores, &units, limits, &mut self.history);
        for step in &decided.moves {
            self.out.moves[step.reason as usize] += 1;
            self.shift(step.unit as usize, step.to);
        }
        let active = self.history.active().iter().filter(|a| **a).count();
        if self.out.active.last().is_none_or(|(_, last)| *last != active) {
            self.out.active.push((self.now_ns, active));
        }
        self.at(self.now_ns + LOOK_NS, Event::Look);
    }

    fn shift(&mut self, vm: usize, to: usize) {
        let from = self.vms[vm].core;
        self.cores[from].ready.retain(|other| *other != vm);
        let state = &mut self.vms[vm];
        state.core = to;
        state.is_ready = false;
        state.free_at_ns = state.free_at_ns.max(self.now_ns) + self.setup.cost.move_ns;
        self.make_ready(vm);
    }

    /// What was polled away by sidecores that are idle now.
    fn count_polling(&mut self) {
        for core in &mut self.cores {
            if let Some(since_ns) = core.idle_since_ns {
                self.out.spin_ns += (self.now_ns - since_ns).min(core.spin.limit_ns());
            }
        }
    }

    fn begin_to_count(&mut self) {
        let active = std::mem::take(&mut self.out.active);
        let vms = vec![VmOut::default(); self.vms.len()];
        self.out = Outcome { vms, active, ..Outcome::default() };
        for core in &mut self.cores {
            if let Some(since_ns) = &mut core.idle_since_ns
                && self.now_ns - *since_ns < core.spin.limit_ns()
            {
                *since_ns = self.now_ns;
            }
        }
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
