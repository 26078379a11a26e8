//! The daemon with some VMs, and a front end that plays all of them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use frontend::disk::Op;
use frontend::many::ManyReport;
use frontend::many::plan::{Behaviour, DevicePlan, DiskPlan, LoadPlan, NetPlan, Plan, PortPlan};

use crate::harness::daemon::{self, POLLS_ON_US};
use crate::harness::error::BenchError;
use crate::harness::process;
use crate::harness::steal_time::{self, STEAL_LIMIT};
use crate::harness::usage;
use crate::harness::usage::DELAY_LIMIT;

/// Share of turns with an empty ring above which the front end was too slow.
const DRY_LIMIT: f64 = 0.03;
/// Latencies are told for so long windows.
pub const LATENCY_WINDOW_MS: u64 = 100;
/// Bytes and operations for so long ones.
pub const WINDOW_MS: u64 = 10;
/// Bytes in front of each frame that are charged too.
const VNET_BYTES: u64 = 12;
/// Seconds that a front end may take beyond its load.
const GRACE_S: u64 = 15;

/// Bed that all cases run in: CPUs, programs and files.
#[derive(Debug)]
pub struct Bed {
    /// CPUs of the sidecore and of the front end.
    pub cpus: (usize, usize),
    /// Path of Millrace's daemon.
    pub millrace: PathBuf,
    /// The front end.
    pub front: PathBuf,
    /// Sockets and logs.
    pub folder: PathBuf,
    /// Daemons started so far.
    pub next: AtomicU32,
}

/// A VM as the daemon's config has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vm {
    /// Share under contention.
    pub weight: u32,
    /// Further settings, as lines of TOML.
    pub settings: &'static str,
}

/// Behaviour of one device of a VM, from some time on.
#[derive(Debug, Clone, PartialEq)]
pub struct Action {
    /// Number of the VM.
    pub vm: usize,
    /// Network or disk.
    pub device: Device,
    /// Behaviour on that device.
    pub behaviour: Behaviour,
    /// From when on.
    pub start_ms: u64,
}

/// A device of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// Frames of so many bytes from its first port to its second.
    Net(usize),
    /// Random reads of 4 KiB at this depth.
    Disk(usize),
}

/// One start of the daemon with one load.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// All VMs.
    pub vms: Vec<Vm>,
    /// Deeds of the VMs that do anything.
    pub actions: Vec<Action>,
    /// How long.
    pub length_ms: u64,
}

/// Counts and disturbances of a load.
#[derive(Debug)]
pub struct Load {
    /// By the front end, in the order of the actions.
    pub report: ManyReport,
    /// Bytes that an operation of each action is charged.
    pub op_bytes: Vec<u64>,
    /// Part of the time that the sidecore waited for its CPU.
    pub back_delay: Option<f64>,
    /// Part of the time that a hypervisor took from one of the CPUs.
    pub stolen: f64,
    /// Whether empty rings matter.
    pub saturates: Vec<bool>,
}

impl Bed {
    /// Runs one load on a daemon of its own.
    pub fn run(&self, setting: &Setting) -> Result<Load, BenchError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.join(number.to_string());
        std::fs::create_dir(&folder).map_err(|e| BenchError::file("make folder", &folder, e))?;
        let text = serde_json::to_string(&plan(setting, &folder))
            .map_err(|e| BenchError::lab("write the plan", e))?;
        let plan = folder.join("plan.json");
        std::fs::write(&plan, text).map_err(|e| BenchError::file("write", &plan, e))?;
        let sockets: Vec<PathBuf> =
            (0..setting.vms.len()).flat_map(|vm| sockets(&folder, vm)).collect();
        let sockets: Vec<&Path> = sockets.iter().map(PathBuf::as_path).collect();
        let config = config(setting, &folder, self.cpus.0);
        let mut daemon = daemon::start(&self.millrace, &config, &folder, &sockets)?;
        let cpus = [self.cpus.0, self.cpus.1];
        let before = (usage::snapshot(&[daemon.pid()]), steal_time::read(&cpus));
        let limit_s = setting.length_ms.div_ceil(1000) + GRACE_S;
        let mut command = process::command("timeout", None);
        command.arg(limit_s.to_string()).arg(&self.front).args(["many", "--plan"]).arg(plan);
        let said = process::run(command.args(["--cpu", &self.cpus.1.to_string()]))?;
        let back_delay = usage::snapshot(&[daemon.pid()]).since(&before.0).map(|u| u.delay);
        let stolen = steal_time::read(&cpus).since(&before.1);
        daemon.alive()?;
        drop(daemon);
        let report = serde_json::from_str(said.trim())
            .map_err(|e| BenchError::lab("read the front end's answer", e))?;
        // What is left goes with the whole folder.
        let _ = std::fs::remove_dir_all(&folder);
        let op_bytes = setting.actions.iter().map(|d| d.device.op_bytes()).collect();
        let full = |d: &Action| d.behaviour == Behaviour::Saturate;
        let saturates = setting.actions.iter().map(full).collect();
        Ok(Load { report, op_bytes, back_delay, stolen, saturates })
    }
}

impl Load {
    /// Bytes charged to a load in a range of windows.
    pub fn charged(&self, action: usize, windows: std::ops::Range<usize>) -> f64 {
        let ops = self.report.loads.get(action).and_then(|l| l.window_ops.get(windows));
        let bytes = self.op_bytes.get(action).copied().unwrap_or_default();
        (ops.map_or(0, |o| o.iter().sum::<u64>()) * bytes) as f64
    }

    /// Why this load says little, if something disturbed it.
    pub fn complaint(&self) -> Option<String> {
        let front_delay = self.report.cpu_delay_ns as f64 / 1e9 / self.report.seconds.max(1e-9);
        let both = self.report.loads.iter().zip(&self.saturates);
        let dry = both.filter(|(_, s)| **s).map(|(l, _)| l.dry_share).fold(0.0, f64::max);
        let percent = |v: f64| format!("{:.1} %", v * 100.0);
        let mut out = Vec::new();
        if front_delay > DELAY_LIMIT {
            out.push(format!("the front end waited for its CPU for {}", percent(front_delay)));
        }
        if let Some(delay) = self.back_delay.filter(|d| *d > DELAY_LIMIT) {
            out.push(format!("the sidecore waited for its CPU for {}", percent(delay)));
        }
        if self.stolen > STEAL_LIMIT {
            out.push(format!("the hypervisor had a CPU for {}", percent(self.stolen)));
        }
        if dry > DRY_LIMIT {
            out.push(format!("a ring was empty in {} of the turns", percent(dry)));
        }
        if out.is_empty() { None } else { Some(out.join(", ")) }
    }
}

impl Device {
    fn op_bytes(self) -> u64 {
        match self {
            Device::Net(frame_bytes) => frame_bytes as u64 + VNET_BYTES,
            Device::Disk(_) => 4096,
        }
    }
}

/// Sockets of a VM: both network ports, then the disk.
fn sockets(folder: &Path, vm: usize) -> [PathBuf; 3] {
    ["a", "b", "d"].map(|port| folder.join(format!("v{vm}{port}.sock")))
}

/// Numbers of a VM's two network ports.
fn stations(vm: usize) -> [u16; 2] {
    let first = vm as u16 * 2 + 1;
    [first, first + 1]
}

/// The daemon's config.
fn config(setting: &Setting, folder: &Path, cpu: usize) -> String {
    let mut text = daemon::head(folder, cpu, Some(POLLS_ON_US)) + "[[switch]]\nname = \"lan\"\n";
    for (vm, Vm { weight, settings }) in setting.vms.iter().enumerate() {
        let _ = write!(text, "[[vm]]\nname = \"v{vm}\"\nweight = {weight}\n{settings}");
        let [a, b, disk] = sockets(folder, vm);
        for (station, (name, socket)) in stations(vm).iter().zip([("a", a), ("b", b)]) {
            let [high, low] = station.to_be_bytes();
            let _ = write!(
                text,
                "[[vm.net]]\nname = \"{name}\"\nswitch = \"lan\"\nbind = \"mac-and-ip\"\n\
                 mac = \"02:00:00:00:{high:02x}:{low:02x}\"\naddresses = [\"10.99.{high}.{low}\"]\n\
                 socket = {socket:?}\n"
            );
        }
        let _ = write!(
            text,
            "[[vm.disk]]\nname = \"d\"\nformat = \"memory\"\nsize = \"64MiB\"\nsocket = {disk:?}\n"
        );
    }
    text
}

/// The front end's plan.
fn plan(setting: &Setting, folder: &Path) -> Plan {
    let load = |action: &Action| {
        let [a, b, disk] = sockets(folder, action.vm);
        let [from, to] = stations(action.vm);
        let device = match action.device {
            Device::Net(frame_bytes) => DevicePlan::Net(NetPlan {
                from: PortPlan { socket: a, station: from },
                to: Some(PortPlan { socket: b, station: to }),
                frame_bytes,
            }),
            Device::Disk(depth) => {
                DevicePlan::Disk(DiskPlan { socket: disk, op: Op::Read, block_bytes: 4096, depth })
            }
        };
        let Action { behaviour, start_ms, .. } = *action;
        LoadPlan { vm: format!("v{}", action.vm), device, behaviour, start_ms, stop_ms: None }
    };
    Plan {
        length_ms: setting.length_ms,
        window_ms: WINDOW_MS,
        latency_window_ms: LATENCY_WINDOW_MS,
        queue_size: 256,
        hugepages: false,
        loads: setting.actions.iter().map(load).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::shares::case;

    #[test]
    fn every_setting_is_a_config_and_a_plan_that_fit_together() {
        let folder = Path::new("/t/0");
        for setting in case::all().iter().flat_map(case::Case::settings) {
            let (config, plan) = (config(&setting, folder, 0), plan(&setting, folder));
            plan.check().unwrap();
            if setting.vms.iter().all(|vm| vm.settings.is_empty()) {
                let parsed = config::parse(Path::new("m.toml"), &config);
                assert!(parsed.is_ok(), "{parsed:?}\n{config}");
            }
            let text = serde_json::to_string(&plan).unwrap();
            for socket in text.split('"').filter(|t| t.ends_with(".sock")) {
                assert!(config.contains(socket), "{socket} is not in {config}");
            }
        }
    }
}
