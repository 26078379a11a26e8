//! Results, as JSON.

use base::histogram::Snapshot;
use serde::Serialize;
use sidecore::placement::Reason;

use crate::load::Source;
use crate::setup::{Options, Outcome, Setup};

/// All runs of a scenario.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the scenario.
    pub scenario: String,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Virtual seconds counted.
    pub seconds: u64,
    /// Runs that were compared.
    pub runs: Vec<Run>,
}

/// One run.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// Name of the run: the setting that was different.
    pub name: String,
    /// Threads.
    pub cores: usize,
    /// Requests a second.
    pub requests_per_s: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// CPUs used on average: service, polling and wake-ups.
    pub cpus: f64,
    /// CPUs of these that were spent on polling without work.
    pub spin_cpus: f64,
    /// Wake-ups a second.
    pub wakeups_per_s: f64,
    /// Moves, by reason.
    pub moves: Vec<(&'static str, u64)>,
    /// When the number of active sidecores changed, in milliseconds, with the new number.
    pub active: Vec<(u64, usize)>,
    /// VMs that ask alike.
    pub classes: Vec<Class>,
}

/// VMs that ask alike.
#[derive(Debug, Clone, Serialize)]
pub struct Class {
    /// Name of the class.
    pub class: &'static str,
    /// How many.
    pub vms: usize,
    /// Requests a second, together.
    pub requests_per_s: f64,
    /// Requests dropped because a queue was full.
    pub dropped: u64,
    /// Half of the latencies are below, in microseconds.
    pub p50_us: f64,
    /// 99 of 100 are below.
    pub p99_us: f64,
    /// Bytes a second, together.
    pub bytes_per_s: f64,
    /// Furthest that what a VM was charged is from its weight's part of the class's; 0 where not
    /// all have the same closed source, which asks for as much as it gets.
    pub share_error: f64,
}

/// Rounded, so that no last digit differs between machines.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

impl Report {
    /// Report of these runs.
    pub fn new(scenario: &str, options: &Options, runs: Vec<Run>) -> Self {
        let Options { seed, seconds, .. } = *options;
        Self { scenario: scenario.into(), seed, seconds, runs }
    }

    /// With a line feed at the end.
    pub fn to_json(&self) -> String {
        // Numbers and text cannot fail to be written.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

impl Run {
    /// Run with the outcome of `setup`.
    pub fn new(name: &str, setup: &Setup, out: &Outcome) -> Self {
        let seconds = setup.length_ns as f64 / 1e9;
        let per_s = |count: u64| rounded(count as f64 / seconds);
        let cpus = |ns: u64| rounded(ns as f64 / setup.length_ns as f64);
        let mut names: Vec<&'static str> = setup.vms.iter().map(|vm| vm.class).collect();
        names.sort_unstable();
        names.dedup();
        Self {
            name: name.into(),
            cores: setup.cores,
            requests_per_s: per_s(out.vms.iter().map(|v| v.requests).sum()),
            bytes_per_s: per_s(out.vms.iter().map(|v| v.bytes).sum()),
            cpus: cpus(out.busy_ns + out.spin_ns + out.waking_ns),
            spin_cpus: cpus(out.spin_ns),
            wakeups_per_s: per_s(out.wakeups),
            moves: Reason::ALL.iter().map(|r| (r.name(), out.moves[*r as usize])).collect(),
            active: out.active.iter().map(|(at_ns, n)| (at_ns / 1_000_000, *n)).collect(),
            classes: names.into_iter().map(|class| Class::new(class, setup, out)).collect(),
        }
    }
}

impl Class {
    fn new(class: &'static str, setup: &Setup, out: &Outcome) -> Self {
        let all = setup.vms.iter().zip(&out.vms).filter(|(vm, _)| vm.class == class);
        let mut latency_ns = Snapshot::default();
        let (mut vms, mut requests, mut dropped) = (0, 0, 0);
        let (mut bytes, mut charged) = (0, 0.0);
        let mut parts: Vec<(f64, f64)> = Vec::new();
        for (asked, vm) in all {
            latency_ns.add(&vm.latency_ns.snapshot());
            vms += 1;
            requests += vm.requests;
            dropped += vm.dropped;
            bytes += vm.bytes;
            charged += vm.charged_bytes as f64;
            parts.push((vm.charged_bytes as f64, f64::from(asked.grant.weight)));
        }
        let weights: f64 = parts.iter().map(|(_, weight)| weight).sum();
        let off = |(part, weight): &(f64, f64)| {
            let due = (charged * weight / weights).max(1.0);
            (part / due - 1.0).abs()
        };
        let furthest = parts.iter().map(off).fold(0.0, f64::max);
        let mut sources = setup.vms.iter().filter(|vm| vm.class == class).map(|vm| &vm.source);
        let first = sources.next().filter(|s| matches!(s, Source::Closed { .. }));
        let is_alike = first.is_some_and(|first| sources.all(|source| source == first));
        Self {
            class,
            vms: vms as usize,
            requests_per_s: rounded(requests as f64 * 1e9 / setup.length_ns as f64),
            dropped,
            p50_us: rounded(latency_ns.quantile(0.5) as f64 / 1000.0),
            p99_us: rounded(latency_ns.quantile(0.99) as f64 / 1000.0),
            bytes_per_s: rounded(bytes as f64 * 1e9 / setup.length_ns as f64),
            share_error: if is_alike { rounded(furthest) } else { 0.0 },
        }
    }
}
