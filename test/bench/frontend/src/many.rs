//! Many VMs' ports from one thread.
//!
//! A [`Plan`] names loads: two connected network ports, or a disk, of a VM, and what it does when.
//! [`run`] connects them all and gives each its turn ([`actor`]), over and over; no turn waits, so
//! that each keeps its rings full as long as the thread is faster than the back end (the share of
//! turns that found a ring empty is told). Who waits for an answer has a turn after every other's.
//! [`tally`] counts in windows.
//!
//! Limits: split rings, one queue pair, no offloads; see [`plan`] for the numbers.

mod actor;
mod attackers;
pub mod plan;
pub mod tally;

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::disk::{DiskLoad, DiskRun};
use crate::driver::{Asked, Driver, VNET_LEN};
use crate::error::FrontendError;
use crate::frame::Station;
use crate::net::greet;
use crate::port::Reach;
use crate::report::run_delay_ns;
use crate::ring::RingShape;

use attackers::Attackers;

use actor::{Actor, Disk, NetPort, RoundTrip, Sender, Senders, Sink, Stage};
use plan::{Behaviour, DevicePlan, DiskPlan, LoadPlan, NetPlan, Plan, PortPlan};
use tally::{LoadReport, Tally};

/// A disk with no more requests under way waits for them, as a round trip does.
const WAITING_DEPTH: usize = 2;

/// Report of a run with many VMs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ManyReport {
    /// Window length of rates, as in the plan.
    pub window_ms: u64,
    /// Window length of latencies, as in the plan.
    pub latency_window_ms: u64,
    /// Length of the run.
    pub seconds: f64,
    /// Time that this thread waited for its CPU.
    pub cpu_delay_ns: u64,
    /// In the plan's order.
    pub loads: Vec<LoadReport>,
}

/// Everything connected.
struct Many {
    stage: Stage,
    actors: Vec<Actor>,
    /// Indices of the `actors` that wait for answers.
    waiting: Vec<usize>,
    /// Number of each socket's port.
    by_socket: HashMap<std::path::PathBuf, usize>,
}

/// Runs a plan to its end.
pub fn run(plan: &Plan) -> Result<ManyReport, FrontendError> {
    plan.check()?;
    let mut many = Many::connect(plan)?;
    let attackers = Attackers::start(plan)?;
    let length_ns = plan.length_ms * 1_000_000;
    let delay_before_ns = run_delay_ns()?;
    let kicks_before = many.kicks(plan);
    many.go(length_ns)?;
    let rounds = attackers.stop()?;
    for (load, count) in rounds {
        many.stage.tallies[load].add(0, count, 0);
    }
    let cpu_delay_ns = run_delay_ns()?.saturating_sub(delay_before_ns);
    let seconds = many.stage.start.elapsed().as_secs_f64();
    let loads = many.finish(plan, &kicks_before)?;
    let Plan { window_ms, latency_window_ms, .. } = *plan;
    Ok(ManyReport { window_ms, latency_window_ms, seconds, cpu_delay_ns, loads })
}

impl Many {
    fn connect(plan: &Plan) -> Result<Self, FrontendError> {
        let length_ns = plan.length_ms * 1_000_000;
        let stage = Stage { start: Instant::now(), ports: Vec::new(), tallies: Vec::new() };
        let mut many =
            Self { stage, actors: Vec::new(), waiting: Vec::new(), by_socket: HashMap::new() };
        for (load, entry) in plan.loads.iter().enumerate() {
            let mut tally = Tally::new(length_ns, plan.window_ms * 1_000_000);
            if entry.has_latency() {
                tally = tally.with_latencies(length_ns, plan.latency_window_ms * 1_000_000);
            }
            many.stage.tallies.push(tally);
            if entry.behaviour == Behaviour::HostileSession {
                continue;
            }
            match &entry.device {
                DevicePlan::Net(net) => many.add_net(plan, load, entry, net)?,
                DevicePlan::Disk(disk) => many.add_disk(plan, load, entry, disk)?,
            }
        }
        Ok(many)
    }

    fn add_disk(
        &mut self,
        plan: &Plan,
        load: usize,
        entry: &LoadPlan,
        disk: &DiskPlan,
    ) -> Result<(), FrontendError> {
        let DiskPlan { op, block_bytes, depth, .. } = *disk;
        let (shape, huge) = (shape(plan), plan.hugepages);
        let seed = load as u64 + 1;
        let run = DiskRun { op, shape, block_bytes, depth, verify: false, wait: false, huge, seed };
        let disk = DiskLoad::start(Reach::Dial(&disk.socket), run)?;
        if depth <= WAITING_DEPTH {
            self.waiting.push(self.actors.len());
        }
        let (span_ns, out) = (entry.span_ns(plan.length_ms), 0);
        let stalls = entry.behaviour == Behaviour::Stall;
        let disk = Disk { load, disk, span_ns, depth, block_bytes, stalls, out };
        self.actors.push(Actor::Disk(Box::new(disk)));
        Ok(())
    }

    fn add_net(
        &mut self,
        plan: &Plan,
        load: usize,
        entry: &LoadPlan,
        net: &NetPlan,
    ) -> Result<(), FrontendError> {
        let span_ns = entry.span_ns(plan.length_ms);
        let sender = Sender { load, port: 0, span_ns, hostile: false, unheard: false };
        // Without a receiver the addresses do not matter: they are written over.
        let to = net.to.as_ref().unwrap_or(&net.from);
        let from = self.port(plan, &net.from, to.station, net.frame_bytes)?;
        if entry.behaviour == Behaviour::HostileFlood {
            make_hostile(&mut self.stage.ports[from].driver);
            self.actors.push(Actor::Sender(Sender { port: from, hostile: true, ..sender }));
            return Ok(());
        }
        self.post_all(from)?;
        let known = self.by_socket.contains_key(&to.socket);
        let at = self.port(plan, to, net.from.station, net.frame_bytes)?;
        if !known {
            self.introduce(at, from)?;
        }
        match entry.behaviour {
            Behaviour::Stall => {
                self.actors.push(Actor::Sender(Sender { port: from, unheard: true, ..sender }));
            }
            Behaviour::RoundTrip => {
                self.post_all(at)?;
                self.waiting.push(self.actors.len());
                let span_ns = sender.span_ns;
                let (ports, seq, asked_ns) = ([from, at], 0, None);
                let round_trip = RoundTrip { load, ports, span_ns, seq, asked_ns };
                self.actors.push(Actor::RoundTrip(round_trip));
            }
            _ => {
                self.actors.push(Actor::Sender(Sender { port: from, ..sender }));
                if !known {
                    self.post_all(at)?;
                }
                self.add_to_sink(at, net.from.station, load);
            }
        }
        Ok(())
    }

    fn post_all(&mut self, port: usize) -> Result<(), FrontendError> {
        self.stage.ports[port].driver.post_all()
    }

    /// The port at a socket, connected when it is not yet.
    fn port(
        &mut self,
        plan: &Plan,
        port: &PortPlan,
        peer: u16,
        frame_bytes: usize,
    ) -> Result<usize, FrontendError> {
        if let Some(at) = self.by_socket.get(&port.socket) {
            return Ok(*at);
        }
        // A shared sink has to take the longest frame of all its senders.
        let longest = plan.loads.iter().filter_map(|l| match &l.device {
            DevicePlan::Net(n) if n.to.as_ref() == Some(port) => Some(n.frame_bytes),
            _ => None,
        });
        let frame_bytes = longest.fold(frame_bytes, usize::max);
        let asked =
            Asked { shape: shape(plan), mergeable: false, frame_bytes, huge: plan.hugepages };
        let (me, peer) = (Station::number(port.station), Station::number(peer));
        let driver = Driver::new(Reach::Dial(&port.socket), asked, me, peer)?;
        self.stage.ports.push(NetPort::new(driver, port.station));
        let at = self.stage.ports.len() - 1;
        self.by_socket.insert(port.socket.clone(), at);
        Ok(at)
    }

    /// A frame from one port to another, so that a learning back end knows the first.
    fn introduce(&mut self, from: usize, to: usize) -> Result<(), FrontendError> {
        match self.stage.ports.get_disjoint_mut([from, to]) {
            Ok([from, to]) => greet(&mut from.driver, &mut to.driver),
            Err(_) => Err(FrontendError::Usage("a port cannot send to itself".into())),
        }
    }

    fn add_to_sink(&mut self, port: usize, station: u16, load: usize) {
        for actor in &mut self.actors {
            let Actor::Sink(sink) = actor else { continue };
            if sink.port != port {
                continue;
            }
            if let Senders::Several(loads) = &mut sink.from {
                loads.push((station, load));
                loads.sort_unstable();
            }
            return;
        }
        let from = Senders::Several(vec![(station, load)]);
        self.actors.push(Actor::Sink(Sink { port, from }));
    }

    /// Frames are only looked at where they tell something: a look costs a cache miss each.
    fn settle(&mut self) {
        let has_strangers = self.actors.iter().any(|a| matches!(a, Actor::Sender(s) if s.hostile));
        for actor in &mut self.actors {
            if let Actor::Sink(sink) = actor
                && let Senders::Several(loads) = &sink.from
                && let [(_, only)] = loads[..]
                && !has_strangers
            {
                sink.from = Senders::Only(only);
            }
        }
    }

    fn go(&mut self, length_ns: u64) -> Result<(), FrontendError> {
        self.settle();
        let Self { stage, actors, waiting, .. } = self;
        stage.start = Instant::now();
        let mut now_ns = 0;
        while now_ns < length_ns {
            for i in 0..actors.len() {
                now_ns = stage.now_ns();
                actors[i].turn(stage, now_ns)?;
                for w in waiting.iter().filter(|w| **w != i) {
                    actors[*w].turn(stage, now_ns)?;
                }
            }
        }
        Ok(())
    }

    /// Kicks of each load so far.
    fn kicks(&self, plan: &Plan) -> Vec<u64> {
        let of_port = |socket: &Path| {
            let port = self.by_socket.get(socket).map(|at| &self.stage.ports[*at].driver.port);
            port.map_or(0, |p| p.queues.iter().map(|q| q.kicks).sum::<u64>())
        };
        let of_disk = |load| {
            self.actors.iter().find_map(|a| match a {
                Actor::Disk(d) if d.load == load => Some(d.disk.port.queues[0].kicks),
                _ => None,
            })
        };
        let kicks = |(load, entry): (usize, &LoadPlan)| match &entry.device {
            DevicePlan::Net(net) => of_port(&net.from.socket),
            DevicePlan::Disk(_) => of_disk(load).unwrap_or_default(),
        };
        plan.loads.iter().enumerate().map(kicks).collect()
    }

    /// Stops everything and tells what was counted.
    fn finish(self, plan: &Plan, before: &[u64]) -> Result<Vec<LoadReport>, FrontendError> {
        let kicks = self.kicks(plan);
        let mut errors = vec![0; plan.loads.len()];
        for actor in self.actors {
            if let Actor::Disk(d) = actor {
                errors[d.load] = d.disk.errors;
                d.disk.stop()?;
            }
        }
        for mut port in self.stage.ports {
            port.driver.port.stop()?;
        }
        let all = self.stage.tallies.into_iter().zip(&plan.loads).enumerate();
        let report = |(i, (tally, entry)): (usize, (Tally, &LoadPlan))| {
            let kind = if matches!(entry.device, DevicePlan::Net(_)) { "net" } else { "disk" };
            tally.report(entry.vm.clone(), kind, errors[i], kicks[i] - before[i])
        };
        Ok(all.map(report).collect())
    }
}

fn shape(plan: &Plan) -> RingShape {
    let size = plan.queue_size;
    RingShape { size, packed: false, in_order: false, event_idx: false, indirect: false }
}

/// Writes destinations that concern everybody or nobody over those of all frames.
fn make_hostile(driver: &mut Driver) {
    for k in 0..driver.tx.count {
        let [high, low] = (k as u16).to_be_bytes();
        let to = match k % 3 {
            0 => [0xff; 6],
            1 => [0x33, 0x33, 0, 0, high, low],
            _ => [2, 0x66, 0, 0, high, low],
        };
        driver.tx.bytes(k)[VNET_LEN..VNET_LEN + 6].copy_from_slice(&to);
    }
}

impl LoadPlan {
    fn has_latency(&self) -> bool {
        self.behaviour == Behaviour::RoundTrip
            || (matches!(self.device, DevicePlan::Disk(_)) && self.behaviour != Behaviour::Stall)
    }
}
