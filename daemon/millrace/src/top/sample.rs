//! Sample of the control API's status: counters at one moment. Fields that another version's daemon
//! lacks or adds do no harm.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Deserialize;

/// One answer, and when it came.
#[derive(Debug, Clone)]
pub struct Sample {
    /// When it came.
    pub at: Instant,
    /// Status in the answer.
    pub status: Status,
}

/// The daemon.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    pub uptime_s: u64,
    pub sidecores: Vec<Sidecore>,
    pub workers: Vec<Worker>,
    pub placement: Placement,
    pub switches: Vec<Switch>,
    pub vms: Vec<Vm>,
}

/// One polling thread.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Sidecore {
    pub index: usize,
    pub cpu: Option<usize>,
    pub node: Option<u32>,
    pub active: bool,
    pub workers: u64,
    pub rounds: u64,
    pub wakeups: u64,
    pub busy_ns: u64,
    pub spin_ns: u64,
}

/// Worker that a sidecore polls.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Worker {
    pub name: String,
    pub sidecore: usize,
    pub pinned: bool,
    pub busy_ns: u64,
    pub moves: u64,
}

/// Counters of the placer.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Placement {
    pub moves: u64,
}

/// One switch.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Switch {
    pub holds: u64,
    pub held_ns: u64,
}

/// One VM.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Vm {
    pub name: String,
    pub weight: Option<u64>,
    pub usage: Usage,
    pub ports: Vec<Port>,
}

/// Use that a VM made of its grant.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Usage {
    pub charged_bytes: u64,
    pub held_by_weight_ns: u64,
    pub held_by_ceiling_ns: u64,
    pub thread_ns: u64,
}

/// One port.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Port {
    pub port: String,
    pub kind: String,
    pub connected: bool,
    pub health: String,
    pub requests: u64,
    pub bytes: u64,
    pub drops: u64,
    pub disk: Option<Disk>,
}

/// Fields that only a disk has.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Disk {
    pub latency: Option<Latency>,
}

/// Histogram of requests by their time: smallest time of a bucket in nanoseconds, and count.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Latency {
    pub buckets: BTreeMap<u64, u64>,
}

/// Times of requests within an interval.
#[derive(Debug, Clone, Default)]
pub struct Times(BTreeMap<u64, u64>);

impl Times {
    /// Adds the requests of a disk between two answers.
    pub fn add(&mut self, earlier: Option<&Latency>, later: &Latency) {
        for (low_ns, count) in &later.buckets {
            let before = earlier.and_then(|e| e.buckets.get(low_ns)).copied().unwrap_or(0);
            *self.0.entry(*low_ns).or_default() += count.saturating_sub(before);
        }
    }

    /// The time below which `share` (0 to 1) of the requests lie, as if they were spread evenly
    /// over their bucket; none without requests.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let total: u64 = self.0.values().sum();
        let want = total as f64 * share;
        let mut seen = 0.0;
        for (&low_ns, &count) in self.0.iter().filter(|(_, count)| **count > 0) {
            let count = count as f64;
            if seen + count >= want {
                return Some(low_ns + (width_ns(low_ns) * (want - seen) / count) as u64);
            }
            seen += count;
        }
        None
    }
}

/// Width of the bucket that begins at `low_ns`: the API has 8 in each power of two.
fn width_ns(low_ns: u64) -> f64 {
    low_ns.checked_ilog2().map_or(4.0, |bits| ((1u64 << bits) as f64 / 8.0).max(4.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latency(buckets: &[(u64, u64)]) -> Latency {
        Latency { buckets: buckets.iter().copied().collect() }
    }

    #[test]
    fn quantiles_are_those_of_the_interval() {
        let mut times = Times::default();
        let earlier = latency(&[(1024, 1000)]);
        times.add(Some(&earlier), &latency(&[(1024, 1000), (8192, 100)]));
        assert_eq!(times.quantile_ns(0.5), Some(8192 + 512));
        times.add(None, &latency(&[(65536, 1)]));
        assert!(times.quantile_ns(0.5).is_some_and(|ns| (8192..9216).contains(&ns)));
        assert!(times.quantile_ns(1.0).is_some_and(|ns| ns > 65536));
    }

    #[test]
    fn without_requests_there_is_no_time() {
        let mut times = Times::default();
        assert_eq!(times.quantile_ns(0.99), None);
        let same = latency(&[(0, 5), (32, 7)]);
        times.add(Some(&same), &same);
        assert_eq!(times.quantile_ns(0.99), None);
    }

    #[test]
    fn an_answer_of_another_daemon_is_taken_as_far_as_it_goes() {
        let status: Status =
            serde_json::from_str(r#"{"version": "9", "new": [1], "vms": [{"name": "a"}]}"#)
                .unwrap();
        assert_eq!((status.version.as_str(), status.vms[0].name.as_str()), ("9", "a"));
    }
}
