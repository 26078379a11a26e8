//! Setup of a run, and its outcome.

use base::histogram::Histogram;
use sidecore::placement::{Limits, Reason};

use crate::load::{Kind, Vm};

/// Costs in the simulation, in nanoseconds.
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
    /// Cost of one request.
    pub fn of(&self, kind: Kind, len_bytes: u32) -> u64 {
        match kind {
            Kind::Net => self.net_ns + u64::from(len_bytes) * self.net_kib_ns / 1024,
            Kind::Disk => self.disk_ns,
        }
    }
}

/// Options of a scenario that can be set from outside.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Virtual seconds that are counted.
    pub seconds: u64,
    /// Costs of requests and other work.
    pub cost: Cost,
}

/// Setup of a simulated run.
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
    /// Costs of requests and other work.
    pub cost: Cost,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Time at the start that is not counted, in nanoseconds.
    pub warm_up_ns: u64,
    /// Counted, in nanoseconds.
    pub length_ns: u64,
    /// From when on open sources ask for so many times their rate.
    pub factors: Vec<(u64, f64)>,
    /// NUMA nodes; none: one.
    pub nodes: Option<Nodes>,
}

/// NUMA nodes of sidecores and VMs, by number.
#[derive(Debug, Clone)]
pub struct Nodes {
    /// Nodes of the sidecores.
    pub cores: Vec<u32>,
    /// Nodes of the VMs' memory.
    pub vms: Vec<u32>,
    /// Cost of requests of a VM on another node than its sidecore, as a multiple.
    pub far: f64,
    /// Whether the placer knows of them.
    pub known: bool,
}

/// Outcome for one VM.
#[derive(Debug, Default)]
pub struct VmOut {
    /// From arrival to completion.
    pub latency_ns: Histogram,
    /// Requests completed.
    pub requests: u64,
    /// Bytes of these requests.
    pub bytes: u64,
    /// The same, small requests with the least that they cost.
    pub charged_bytes: u64,
    /// Requests that found the queue full.
    pub dropped: u64,
}

/// Outcome of a run.
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
