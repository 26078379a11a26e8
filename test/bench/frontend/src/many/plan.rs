//! Plan of a run with many VMs: its input.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::disk::Op;
use crate::error::FrontendError;
use crate::frame::{MAX_FRAME, MIN_FRAME};

/// Most loads of one thread: beyond, a round over all of them takes longer than their rings last.
pub const MAX_LOADS: usize = 256;
/// Longest run; what is counted for each window is kept in memory.
pub const MAX_LENGTH_MS: u64 = 60_000;
/// Windows of a run.
pub const MAX_WINDOWS: u64 = 10_000;

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// How long it takes, in milliseconds.
    pub length_ms: u64,
    /// Operations and bytes are counted for each window of so many milliseconds.
    #[serde(default = "ten")]
    pub window_ms: u64,
    /// Latencies are told for each window of so many milliseconds.
    #[serde(default = "ten")]
    pub latency_window_ms: u64,
    /// Descriptors of each queue.
    #[serde(default = "queue_size")]
    pub queue_size: u16,
    /// Guest memory of huge pages.
    #[serde(default)]
    pub hugepages: bool,
    /// Loads of the run.
    pub loads: Vec<LoadPlan>,
}

/// One device of a VM, or two connected ones, and what it does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadPlan {
    /// The VM's name; several loads may be of one VM.
    pub vm: String,
    /// On what.
    pub device: DevicePlan,
    /// Behaviour of the VM.
    pub behaviour: Behaviour,
    /// When it begins, in milliseconds from the run's start.
    #[serde(default)]
    pub start_ms: u64,
    /// When it ends; at the run's end when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_ms: Option<u64>,
}

/// Behaviour of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Behaviour {
    /// Keeps its ring full.
    Saturate,
    /// One frame to and fro, or what a disk does at its depth: latency counts.
    RoundTrip,
    /// Keeps sending to a port that posts no receive buffer; a disk's driver fills its ring and
    /// takes no completion.
    Stall,
    /// Broadcasts, multicasts and frames to unknown addresses, and a kick with every turn, wanted
    /// or not.
    HostileFlood,
    /// Attacks the sessions of its device: see [`crate::hostile`].
    HostileSession,
}

/// Devices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum DevicePlan {
    /// Frames from one port to another.
    Net(NetPlan),
    /// Requests to a disk.
    Disk(DiskPlan),
}

/// Two network ports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetPlan {
    /// The sender, of this load alone.
    pub from: PortPlan,
    /// The receiver, which other senders may have too. A hostile flood needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<PortPlan>,
    /// Length of frames, with Ethernet header.
    pub frame_bytes: usize,
}

/// One network port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortPlan {
    /// Socket of the port.
    pub socket: PathBuf,
    /// Number `n` has the addresses 02:00:00:00:hi:lo and 10.99.hi.lo, of the bytes of `n`.
    pub station: u16,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskPlan {
    /// Socket of the disk.
    pub socket: PathBuf,
    /// At random places.
    pub op: Op,
    /// Length of a request.
    pub block_bytes: usize,
    /// Requests under way.
    pub depth: usize,
}

fn ten() -> u64 {
    10
}

fn queue_size() -> u16 {
    256
}

impl LoadPlan {
    /// Whether it works at a time in nanoseconds from the start.
    pub(super) fn span_ns(&self, length_ms: u64) -> std::ops::Range<u64> {
        let stop_ms = self.stop_ms.unwrap_or(length_ms).min(length_ms);
        self.start_ms * 1_000_000..stop_ms * 1_000_000
    }

    /// The sockets of its device.
    pub(super) fn sockets(&self) -> Vec<&PathBuf> {
        match &self.device {
            DevicePlan::Net(net) => {
                let to = net.to.iter().map(|port| &port.socket);
                std::iter::once(&net.from.socket).chain(to).collect()
            }
            DevicePlan::Disk(disk) => vec![&disk.socket],
        }
    }

    fn check(&self, length_ms: u64) -> Result<(), String> {
        if self.span_ns(length_ms).is_empty() {
            return Err("it ends before it begins".into());
        }
        match &self.device {
            DevicePlan::Net(net) => {
                if !(MIN_FRAME..=MAX_FRAME).contains(&net.frame_bytes) {
                    let bytes = net.frame_bytes;
                    return Err(format!("frames of {bytes} bytes: {MIN_FRAME} to {MAX_FRAME}"));
                }
                if net.to.is_none() && self.behaviour != Behaviour::HostileFlood {
                    return Err("a receiver is missing: \"to\"".into());
                }
            }
            DevicePlan::Disk(_) if self.behaviour == Behaviour::HostileFlood => {
                return Err("hostile-flood is for the network".into());
            }
            DevicePlan::Disk(_) => {}
        }
        Ok(())
    }
}

impl Plan {
    /// Refuses what makes no sense.
    pub fn check(&self) -> Result<(), FrontendError> {
        let usage = |text: String| Err(FrontendError::Usage(text));
        if !(1..=MAX_LENGTH_MS).contains(&self.length_ms) {
            return usage(format!("length_ms {}: 1 to {MAX_LENGTH_MS}", self.length_ms));
        }
        for window_ms in [self.window_ms, self.latency_window_ms] {
            if window_ms == 0 || self.length_ms.div_ceil(window_ms) > MAX_WINDOWS {
                return usage(format!("windows of {window_ms} ms: at most {MAX_WINDOWS} of them"));
            }
        }
        if !(1..=MAX_LOADS).contains(&self.loads.len()) {
            return usage(format!("{} loads: 1 to {MAX_LOADS}", self.loads.len()));
        }
        for (i, load) in self.loads.iter().enumerate() {
            if let Err(why) = load.check(self.length_ms) {
                return usage(format!("load {i} of VM {}: {why}", load.vm));
            }
        }
        self.check_ports().or_else(usage)
    }

    /// A sender is used once; a port is one station, and a station one port.
    fn check_ports(&self) -> Result<(), String> {
        let (mut stations, mut used) = (HashMap::new(), HashMap::new());
        for (i, load) in self.loads.iter().enumerate() {
            let alone = matches!(load.behaviour, Behaviour::RoundTrip | Behaviour::Stall);
            let mut sockets = Vec::new();
            match &load.device {
                DevicePlan::Net(net) => {
                    for port in [Some(&net.from), net.to.as_ref()].into_iter().flatten() {
                        let known = stations.entry(port.station).or_insert(&port.socket);
                        if *known != &port.socket {
                            return Err(format!("station {} has two ports", port.station));
                        }
                    }
                    sockets.push((&net.from.socket, true));
                    sockets.extend(net.to.iter().map(|p| (&p.socket, alone)));
                }
                DevicePlan::Disk(disk) => sockets.push((&disk.socket, true)),
            }
            for (socket, alone) in sockets {
                if let Some((other, shared)) = used.insert(socket, (i, !alone))
                    && (alone || !shared)
                {
                    let at = socket.display();
                    return Err(format!("{at} is used by the loads {other} and {i}"));
                }
            }
        }
        let mut ports: Vec<_> = stations.values().collect();
        ports.sort();
        match ports.windows(2).find(|w| w[0] == w[1]) {
            Some(w) => Err(format!("{} has two stations", w[0].display())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = r#"{"length_ms": 100, "loads": [
        {"vm": "a", "behaviour": "saturate", "stop_ms": 50, "device": {"net": {
            "from": {"socket": "/a", "station": 1}, "to": {"socket": "/s", "station": 9},
            "frame_bytes": 64}}},
        {"vm": "b", "behaviour": "saturate", "device": {"net": {
            "from": {"socket": "/b", "station": 2}, "to": {"socket": "/s", "station": 9},
            "frame_bytes": 1500}}},
        {"vm": "b", "behaviour": "stall", "device": {"disk": {
            "socket": "/d", "op": "read", "block_bytes": 4096, "depth": 4}}}]}"#;

    fn plan() -> Plan {
        serde_json::from_str(PLAN).unwrap()
    }

    fn complaint(change: impl FnOnce(&mut Plan)) -> String {
        let mut plan = plan();
        change(&mut plan);
        plan.check().unwrap_err().to_string()
    }

    fn net(load: &mut LoadPlan) -> &mut NetPlan {
        let DevicePlan::Net(net) = &mut load.device else { unreachable!() };
        net
    }

    #[test]
    fn a_plan_is_read_with_its_defaults_and_a_sink_may_be_shared() {
        let p = plan();
        p.check().unwrap();
        assert_eq!((p.window_ms, p.latency_window_ms, p.queue_size), (10, 10, 256));
        assert_eq!(p.loads[0].span_ns(100), 0..50_000_000);
        assert_eq!(p.loads[1].span_ns(100), 0..100_000_000);
        let again = serde_json::to_string(&p).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&again).unwrap(), p);
        assert!(serde_json::from_str::<Plan>(r#"{"length_ms": 1, "loads": [], "x": 1}"#).is_err());
    }

    #[test]
    fn mistakes_are_told() {
        assert!(complaint(|p| p.length_ms = 0).contains("length_ms 0"));
        assert!(complaint(|p| p.latency_window_ms = 0).contains("windows of 0 ms"));
        assert!(complaint(|p| p.loads.clear()).contains("0 loads: 1 to 256"));
        assert!(complaint(|p| p.loads[0].start_ms = 50).contains("ends before it begins"));
        assert!(complaint(|p| net(&mut p.loads[0]).to = None).contains("receiver is missing"));
        let text = complaint(|p| net(&mut p.loads[1]).frame_bytes = 49);
        assert_eq!(text, "load 1 of VM b: frames of 49 bytes: 50 to 65549");
        assert!(complaint(|p| p.loads[2].behaviour = Behaviour::HostileFlood).contains("network"));
    }

    #[test]
    fn ports_are_not_used_twice() {
        let two = |p: &mut Plan| {
            let port = PortPlan { socket: "/s".into(), station: 8 };
            net(&mut p.loads[1]).to = Some(port);
        };
        assert!(complaint(two).contains("has two stations"));
        let two = |p: &mut Plan| net(&mut p.loads[1]).from.station = 9;
        assert!(complaint(two).contains("station 9 has two ports"));
        let sender = |p: &mut Plan| p.loads[1] = p.loads[0].clone();
        assert!(complaint(sender).contains("/a is used by the loads 0 and 1"));
        let alone = |p: &mut Plan| p.loads[1].behaviour = Behaviour::RoundTrip;
        assert!(complaint(alone).contains("/s is used by the loads 0 and 1"));
    }
}
