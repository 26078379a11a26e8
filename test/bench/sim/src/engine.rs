//! The event queue, sidecores and VMs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use sidecore::placement::{History, Limits, Meter, UnitReading, plan};
use sidecore::{Account, Accounts, Allowance, Ledger, Spent, Spin};

use crate::load::{Draw, Kind, Source, Vm};
use crate::setup::{Outcome, Setup, VmOut};

/// Requests of one batch, and their bytes, as the engines of the product take them.
const BATCH: usize = 64;
const BATCH_BYTES: u64 = 256 << 10;

/// Requests that a queue holds: the largest virtqueue.
const QUEUE_LEN: usize = 1024;

/// Between two looks of the placer, as in the product.
const LOOK_NS: u64 = 100_000_000;

/// Least bytes that a request is charged, as in the product.
fn least_bytes(kind: Kind) -> u64 {
    match kind {
        Kind::Net => 512,
        Kind::Disk => 4096,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival { vm: usize, len_bytes: u32, is_disk: bool },
    Step { core: usize, turn: u64 },
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
    /// Since when it has nothing that it may do; none while it serves.
    idle_since_ns: Option<u64>,
    /// The last step that was planned: an earlier one does not count any more.
    turn: u64,
    ledger: Ledger,
    /// By VM: the ledger knows it.
    knows: Vec<bool>,
    round: Round,
    spin: Spin,
    busy_ns: u64,
}

/// A round over the VMs that had something to do when it began.
#[derive(Default)]
struct Round {
    /// To be asked yet.
    left: usize,
    did: bool,
    /// Time from which a VM that waits may go on.
    later_ns: Option<u64>,
}

/// A run.
pub struct Engine<'a> {
    setup: &'a Setup,
    accounts: Vec<Arc<Account>>,
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
pub fn run(setup: &Setup) -> Outcome {
    Engine::new(setup).run()
}

impl<'a> Engine<'a> {
    fn new(setup: &'a Setup) -> Self {
        let accounts = Accounts::default();
        let open = |(n, vm): (usize, &Vm)| accounts.open(&n.to_string(), vm.grant);
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
            turn: 0,
            ledger: Ledger::default(),
            knows: vec![false; setup.vms.len()],
            round: Round::default(),
            spin: Spin::new(setup.spin_ns, setup.adapts),
            busy_ns: 0,
        };
        let fixed = Limits::new(setup.begin_on, setup.begin_on);
        let history = History::new(setup.cores, setup.limits.as_ref().unwrap_or(&fixed));
        let active = history.active().iter().filter(|a| **a).count();
        let vms = setup.vms.iter().map(|_| VmOut::default()).collect();
        let out = Outcome { vms, active: vec![(0, active)], ..Outcome::default() };
        let mut engine = Self {
            setup,
            accounts: setup.vms.iter().enumerate().map(open).collect(),
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
            engine.enrol(vm);
            engine.now_ns = setup.vms[vm].from_ns;
            for _ in 0..Draw::parallel(&setup.vms[vm]) {
                engine.ask(vm);
            }
        }
        engine.now_ns = 0;
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
                Event::Step { core, turn } if turn == self.cores[core].turn => self.step(core),
                Event::Step { .. } => {}
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
        // The round that ends was one that found nothing.
        self.cores[core].round = Round { did: true, ..Round::default() };
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
        self.plan_step(core, begin_ns);
    }

    fn plan_step(&mut self, core: usize, at_ns: u64) {
        self.cores[core].turn += 1;
        let turn = self.cores[core].turn;
        self.at(at_ns, Event::Step { core, turn });
    }

    /// A batch of the VM whose turn it is.
    fn step(&mut self, core: usize) {
        if self.cores[core].idle_since_ns.is_some() {
            // Somebody who waited may go on.
            return self.wake(core);
        }
        loop {
            if self.cores[core].round.left == 0 && !self.next_round(core) {
                return;
            }
            let c = &mut self.cores[core];
            c.round.left -= 1;
            // Who left meanwhile is not asked.
            let Some(vm) = c.ready.pop_front() else { continue };
            match self.allowance(core, vm) {
                Some(allowance) => return self.serve(core, vm, allowance),
                None => self.cores[core].ready.push_back(vm),
            }
        }
    }

    /// Ends a round. False when there is nothing to do now: the sidecore idles, until the time when
    /// somebody who waits may go on.
    fn next_round(&mut self, core: usize) -> bool {
        let c = &mut self.cores[core];
        let goes_on = c.ledger.end_round(self.now_ns);
        let Round { did, later_ns, .. } = std::mem::take(&mut c.round);
        if !c.ready.is_empty() && (goes_on || did) {
            c.round.left = c.ready.len();
            return true;
        }
        c.ledger.settle(self.now_ns);
        c.idle_since_ns = Some(self.now_ns);
        if let Some(later_ns) = later_ns.filter(|_| !c.ready.is_empty()) {
            self.plan_step(core, later_ns.max(self.now_ns + 1));
        }
        false
    }

    /// Allowance of a VM now; none: it waits.
    fn allowance(&mut self, core: usize, vm: usize) -> Option<Allowance> {
        let (now_ns, free_at_ns) = (self.now_ns, self.vms[vm].free_at_ns);
        let Core { ledger, round, .. } = &mut self.cores[core];
        let mut wait = |at_ns: u64| {
            round.later_ns = Some(round.later_ns.map_or(at_ns, |other_ns| other_ns.min(at_ns)));
        };
        if free_at_ns > now_ns {
            wait(free_at_ns);
            return None;
        }
        let id = self.accounts[vm].id();
        let allowance = ledger.allowance(id, now_ns);
        if allowance.is_none() {
            ledger.held_back(id, now_ns);
            ledger.until_ns(id, now_ns).into_iter().for_each(wait);
            return None;
        }
        Some(allowance)
    }

    fn serve(&mut self, core: usize, vm: usize, allowance: Allowance) {
        let begin_ns = self.now_ns;
        let mut end_ns = begin_ns;
        let mut spent = Spent::default();
        let mut arrivals_ns = Vec::with_capacity(BATCH);
        let most = allowance.bytes.min(BATCH_BYTES);
        while spent.requests < allowance.requests.min(BATCH as u32) && spent.bytes < most {
            let Some((arrived_ns, len_bytes, kind)) = self.vms[vm].queue.pop_front() else { break };
            spent.add(len_bytes.into(), least_bytes(kind));
            end_ns += self.cost_of(core, vm, kind, len_bytes);
            arrivals_ns.push(arrived_ns);
            self.out.vms[vm].bytes += u64::from(len_bytes);
        }
        let out = &mut self.out.vms[vm];
        arrivals_ns.iter().for_each(|arrived_ns| out.latency_ns.record(end_ns - arrived_ns));
        out.requests += u64::from(spent.requests);
        out.charged_bytes += spent.bytes;
        let spent_ns = end_ns - begin_ns;
        self.out.busy_ns += spent_ns;
        self.vms[vm].busy_ns += spent_ns;
        self.vms[vm].free_at_ns = end_ns;
        let more = !self.vms[vm].queue.is_empty();
        let c = &mut self.cores[core];
        c.busy_ns += spent_ns;
        c.round.did = true;
        c.ledger.charge(self.accounts[vm].id(), spent, more, begin_ns);
        if matches!(self.setup.vms[vm].source, Source::Closed { .. }) {
            self.now_ns = end_ns;
            arrivals_ns.iter().for_each(|_| self.ask(vm));
            self.now_ns = begin_ns;
        }
        self.vms[vm].is_ready = more;
        if more {
            self.cores[core].ready.push_back(vm);
        }
        self.plan_step(core, end_ns);
    }

    fn cost_of(&self, core: usize, vm: usize, kind: Kind, len_bytes: u32) -> u64 {
        let cost_ns = self.setup.cost.of(kind, len_bytes);
        match &self.setup.nodes {
            Some(nodes) if nodes.cores[core] != nodes.vms[vm] => {
                (cost_ns as f64 * nodes.far) as u64
            }
            _ => cost_ns,
        }
    }

    /// Tells the sidecore of a VM about its account.
    fn enrol(&mut self, vm: usize) {
        let core = &mut self.cores[self.vms[vm].core];
        if !std::mem::replace(&mut core.knows[vm], true) {
            core.ledger.enrol(Arc::clone(&self.accounts[vm]));
        }
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
        let (mut cores, mut units) = self.meter.read(LOOK_NS, &busy_ns, &units);
        if let Some(nodes) = self.setup.nodes.as_ref().filter(|nodes| nodes.known) {
            cores.iter_mut().zip(&nodes.cores).for_each(|(core, node)| core.node = Some(*node));
            units.iter_mut().zip(&nodes.vms).for_each(|(unit, node)| unit.node = Some(*node));
        }
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
        self.cores[from].ledger.worker_left(self.now_ns);
        let state = &mut self.vms[vm];
        state.core = to;
        state.is_ready = false;
        state.free_at_ns = state.free_at_ns.max(self.now_ns) + self.setup.cost.move_ns;
        self.enrol(vm);
        self.make_ready(vm);
    }

    /// Counts polling of sidecores that are idle now.
    fn count_polling(&mut self) {
        for core in &mut self.cores {
            if let Some(since_ns) = core.idle_since_ns {
                self.out.spin_ns += (self.now_ns - since_ns).min(core.spin.limit_ns());
            }
        }
    }

    fn begin_to_count(&mut self) {
        let active = std::mem::take(&mut self.out.active);
        let vms = self.vms.iter().map(|_| VmOut::default()).collect();
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
mod tests;
