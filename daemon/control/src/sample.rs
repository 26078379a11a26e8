//! Counters and times of the daemon, as the engines hand them over to be shown.

use std::sync::Arc;

use base::counter::QueueStats;
use base::histogram::Snapshot;

use crate::plane::status::{PortKind, SidecoreStatus, WorkerStatus};

/// Everything that `GET /v1/metrics` shows.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Version of the daemon.
    pub version: String,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// Polling threads.
    pub sidecores: Vec<SidecoreStatus>,
    /// Workers that the sidecores poll.
    pub workers: Vec<WorkerStatus>,
    /// Ports.
    pub ports: Vec<PortMetrics>,
    /// Uplinks of switches: switch, counters.
    pub uplinks: Vec<(String, Arc<QueueStats>)>,
    /// Counters of single engines.
    pub families: Vec<Family>,
    /// Histograms of times, in nanoseconds.
    pub times: Vec<Family<Snapshot>>,
}

/// One port's counters.
#[derive(Debug)]
pub struct PortMetrics {
    /// VM.
    pub vm: String,
    /// Port.
    pub port: String,
    /// Kind.
    pub kind: PortKind,
    /// Whether a VMM is connected.
    pub connected: bool,
    /// Whether it works.
    pub healthy: bool,
    /// Connections since the start.
    pub connections: u64,
    /// One per queue, in order.
    pub queues: Vec<Arc<QueueStats>>,
}

/// Names and values.
pub type Labels = Vec<(&'static str, String)>;

/// One metric of an engine with all its samples.
#[derive(Debug)]
pub struct Family<V = u64> {
    /// Full name, `_total` at the end of counters.
    pub name: String,
    /// Help text.
    pub help: &'static str,
    /// Labels and value of each sample.
    pub samples: Vec<(Labels, V)>,
}

impl Metrics {
    /// Adds one sample to the family `name`, which is made when it is new.
    pub fn sample(&mut self, name: &str, help: &'static str, labels: Labels, value: u64) {
        add(&mut self.families, name, help, (labels, value));
    }

    /// Adds times in nanoseconds to the family `name`, which is shown as a histogram.
    pub fn time(&mut self, name: &str, help: &'static str, labels: Labels, times: Snapshot) {
        add(&mut self.times, name, help, (labels, times));
    }
}

fn add<V>(families: &mut Vec<Family<V>>, name: &str, help: &'static str, sample: (Labels, V)) {
    match families.iter_mut().find(|family| family.name == name) {
        Some(family) => family.samples.push(sample),
        None => families.push(Family { name: name.into(), help, samples: vec![sample] }),
    }
}
