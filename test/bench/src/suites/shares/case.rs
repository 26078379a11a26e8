//! The questions: what runs for each, and how the answer is found in what was counted.

use frontend::many::plan::Behaviour;

use crate::harness::stats::{Better, spread};

use super::bed::{Action, Device, LATENCY_WINDOW_MS, Load, Setting, Vm, WINDOW_MS};
use super::{Finding, Trace};

/// Before anything counts: longer than a ceiling's burst.
const WARM_UP_MS: u64 = 300;
/// Before anything counts beside attackers: what a VM may have done at once is used up after 4
/// to 6 s.
const ATTACK_WARM_UP_MS: u64 = 7000;
/// Shares and rates are taken over so long.
const MEASURED_MS: u64 = 1000;
/// When the newcomer comes.
const NEWCOMER_MS: u64 = 500;
/// Longest time until the newcomer has its share.
const NEWCOMER_LIMIT_MS: f64 = 100.0;
/// Number of windows over which the newcomer's share is looked at.
const SLIDING: usize = 2;
/// Part of what is due that the newcomer's share has to reach.
const NEARLY: f64 = 0.9;
/// Windows of a victim's latency.
const LATENCY_WINDOWS: usize = 9;
/// Factor by which a victim's tail may grow, unless `TAIL_US` allows more.
const TAIL_SHARE: f64 = 1.2;
/// Microseconds by which a victim's tail may grow, whatever its size.
const TAIL_US: f64 = 50.0;
/// Length of frames of a usual MTU.
const FRAME_BYTES: usize = 1500;
/// Length of the smallest frames.
const SMALL_BYTES: usize = 64;
/// Requests of a disk that saturates.
const DEPTH: usize = 32;
/// Ceiling and floor in bytes per second, far below what a core moves.
const RATE: f64 = (200u64 << 20) as f64;
/// Ceiling and floor of requests per second.
const OPS: f64 = 50_000.0;

/// Medium that saturates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// Network ports.
    Net,
    /// Memory disks.
    Disk,
    /// Both of each VM.
    Both,
}

/// One question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    /// Weights 1:2:4.
    Weights(Medium),
    /// A third VM joins two.
    Newcomer(Medium),
    /// One VM at work among idle ones against the same one alone.
    Alone(Medium),
    /// One VM at work beside one whose front ends attack, against the same one beside an idle one.
    Attacked(Medium),
    /// VM that waits for answers, beside a neighbour.
    Victim(Medium, Behaviour),
    /// Limits of a VM.
    Ceiling,
    /// Share that a VM of small weight has in any case.
    Floor,
}

/// How a row reads.
pub struct Question {
    /// Unit of both values.
    pub unit: &'static str,
    /// Name of the value on the other side.
    pub due: &'static str,
    /// Direction in which values are good.
    pub better: Better,
    /// Ratio that must be reached.
    pub target: f64,
    /// For the column "how".
    pub how: &'static str,
}

/// All cases.
pub fn all() -> Vec<Case> {
    use Behaviour::{HostileFlood, Saturate, Stall};
    let media = [Medium::Net, Medium::Disk, Medium::Both];
    let mut all: Vec<Case> = media.into_iter().map(Case::Weights).collect();
    all.extend([Medium::Net, Medium::Disk].map(Case::Newcomer));
    all.extend([Medium::Net, Medium::Disk].map(Case::Alone));
    all.extend([Medium::Net, Medium::Disk].map(Case::Attacked));
    for medium in [Medium::Net, Medium::Disk] {
        all.extend([Saturate, HostileFlood, Stall].map(|b| Case::Victim(medium, b)));
    }
    all.extend([Case::Ceiling, Case::Floor]);
    all
}

impl Medium {
    fn name(self) -> &'static str {
        match self {
            Medium::Net => "net",
            Medium::Disk => "disk",
            Medium::Both => "both",
        }
    }

    fn saturated(self, vm: usize, start_ms: u64) -> Vec<Action> {
        let action = |device| Action { vm, device, behaviour: Behaviour::Saturate, start_ms };
        match self {
            Medium::Net => vec![action(Device::Net(FRAME_BYTES))],
            Medium::Disk => vec![action(Device::Disk(DEPTH))],
            Medium::Both => vec![action(Device::Net(FRAME_BYTES)), action(Device::Disk(DEPTH))],
        }
    }

    fn devices(self) -> usize {
        if self == Medium::Both { 2 } else { 1 }
    }
}

fn vm(weight: u32) -> Vm {
    Vm { weight, settings: "" }
}

impl Case {
    /// Name of the case; rows begin with it.
    pub fn name(&self) -> String {
        match self {
            Case::Weights(m) => format!("weights_{}", m.name()),
            Case::Newcomer(m) => format!("newcomer_{}", m.name()),
            Case::Alone(m) => format!("alone_{}", m.name()),
            Case::Attacked(m) => format!("attacked_{}", m.name()),
            Case::Victim(m, by) => {
                let by = match by {
                    Behaviour::Saturate => "flood",
                    Behaviour::HostileFlood => "hostile",
                    _ => "stall",
                };
                format!("victim_{}_{by}", m.name())
            }
            Case::Ceiling => "ceiling".into(),
            Case::Floor => "floor".into(),
        }
    }

    /// How its rows read.
    pub fn question(&self) -> Question {
        let q = |unit, due, better, target, how| Question { unit, due, better, target, how };
        let (higher, lower) = (Better::Higher, Better::Lower);
        match self {
            Case::Weights(_) => {
                q("%", "by weight", higher, 0.95, "weights 1:2:4, saturating, share of 1 s")
            }
            Case::Newcomer(_) => {
                let how = "time until a newcomer has 0.9 of its half, over 20 ms";
                q("ms", "limit", lower, 1.0, how)
            }
            Case::Alone(_) => {
                q("MB/s", "no others", higher, 0.95, "one VM at work, two configured and idle")
            }
            Case::Attacked(_) => {
                let how = "one VM at work, three ports of another are attacked in all ways";
                q("MB/s", "no attack", higher, 0.95, how)
            }
            Case::Victim(..) => {
                let how = "p99 beside a neighbour, median of nine windows; allowed: 20 % or 50 µs \
                           more than alone";
                q("µs", "allowed", lower, 1.0, how)
            }
            Case::Ceiling => q("/s", "ceiling", higher, 0.98, "a VM that saturates, over 1 s"),
            Case::Floor => q("/s", "floor", higher, 0.98, "weight 1 beside weight 1,000, over 1 s"),
        }
    }

    /// Settings that are started, one after the other.
    pub fn settings(&self) -> Vec<Setting> {
        let length_ms = WARM_UP_MS + MEASURED_MS;
        match *self {
            Case::Weights(m) => {
                let actions = (0..3).flat_map(|vm| m.saturated(vm, 0)).collect();
                vec![Setting { vms: [100, 200, 400].map(vm).to_vec(), actions, length_ms }]
            }
            Case::Newcomer(m) => {
                let come = |vm| if vm == 2 { NEWCOMER_MS } else { 0 };
                let actions = (0..3).flat_map(|vm| m.saturated(vm, come(vm))).collect();
                let vms = [100, 100, 200].map(vm).to_vec();
                vec![Setting { vms, actions, length_ms: 2 * NEWCOMER_MS }]
            }
            Case::Alone(m) => [1, 3]
                .map(|n| Setting { vms: vec![vm(100); n], actions: m.saturated(0, 0), length_ms })
                .to_vec(),
            Case::Attacked(m) => {
                let attack = |device| Action {
                    vm: 1,
                    device,
                    behaviour: Behaviour::HostileSession,
                    start_ms: 0,
                };
                let attacks = [Device::Net(FRAME_BYTES), Device::Disk(1)].map(attack).to_vec();
                let length_ms = ATTACK_WARM_UP_MS + MEASURED_MS;
                [Vec::new(), attacks]
                    .map(|attacks| Setting {
                        vms: vec![vm(100); 2],
                        actions: [m.saturated(0, 0), attacks].concat(),
                        length_ms,
                    })
                    .to_vec()
            }
            Case::Victim(m, by) => {
                let device =
                    if m == Medium::Disk { Device::Disk(1) } else { Device::Net(SMALL_BYTES) };
                let victim = Action { vm: 0, device, behaviour: Behaviour::RoundTrip, start_ms: 0 };
                // A disk's neighbour is a disk, where there is such a thing.
                let device = match (m, by) {
                    (Medium::Disk, Behaviour::Saturate | Behaviour::Stall) => Device::Disk(DEPTH),
                    _ => Device::Net(FRAME_BYTES),
                };
                let neighbour = Action { vm: 1, device, behaviour: by, start_ms: 0 };
                let vms = vec![vm(100); 2];
                let length_ms = WARM_UP_MS + LATENCY_WINDOWS as u64 * LATENCY_WINDOW_MS;
                [vec![victim.clone()], vec![victim, neighbour]]
                    .map(|actions| Setting { vms: vms.clone(), actions, length_ms })
                    .to_vec()
            }
            Case::Ceiling => {
                let limited = |settings| Vm { weight: 100, settings };
                let vms = vec![
                    limited("ceiling_bytes_per_s = \"200MiB\"\n"),
                    limited("ceiling_ops_per_s = 50000\n"),
                    vm(100),
                ];
                let mut actions = Medium::Net.saturated(0, 0);
                actions.extend(Medium::Disk.saturated(1, 0));
                actions.extend(Medium::Net.saturated(2, 0));
                vec![Setting { vms, actions, length_ms }]
            }
            Case::Floor => {
                let poor = Vm { weight: 1, settings: "floor_bytes_per_s = \"200MiB\"\n" };
                let actions = (0..2).flat_map(|vm| Medium::Net.saturated(vm, 0)).collect();
                vec![Setting { vms: vec![poor, vm(1000)], actions, length_ms }]
            }
        }
    }

    /// The answer; nothing when nothing was counted.
    pub fn judge(&self, loads: &[Load]) -> Vec<Finding> {
        let name = self.name();
        let found = |suffix: &str, value: f64, due: f64, ratio: f64| Finding {
            row: format!("{name}{suffix}"),
            value,
            due,
            ratio,
        };
        let met = |v: f64, due: f64| (v / due).min(due / v);
        let mut out = match (self, loads) {
            (Case::Weights(m), [load]) => {
                let due = [1.0, 2.0, 4.0].map(|w| w / 7.0 * 100.0);
                let share = shares(load, m.devices(), measured());
                let rows = ["_1", "_2", "_4"].into_iter().zip(share).zip(due);
                rows.map(|((row, s), d)| found(row, s * 100.0, d, met(s * 100.0, d))).collect()
            }
            (Case::Newcomer(m), [load]) => {
                let ms = newcomer_ms(load, m.devices());
                vec![found("", ms, NEWCOMER_LIMIT_MS, NEWCOMER_LIMIT_MS / ms)]
            }
            (Case::Alone(_) | Case::Attacked(_), [alone, among]) => {
                let is_attacked = matches!(self, Case::Attacked(_));
                let windows =
                    measured_after(if is_attacked { ATTACK_WARM_UP_MS } else { WARM_UP_MS });
                let [alone, among] = [alone, among].map(|l| l.charged(0, windows.clone()) / 1e6);
                vec![found("", among, alone, among / alone)]
            }
            (Case::Victim(..), [alone, beside]) => match (tail_us(alone), tail_us(beside)) {
                (Some(alone), Some(beside)) => {
                    let allowed = (alone * TAIL_SHARE).max(alone + TAIL_US);
                    vec![found("", beside, allowed, allowed / beside)]
                }
                _ => Vec::new(),
            },
            (Case::Ceiling, [load]) => {
                let bytes = load.charged(0, measured());
                let ops = load.charged(1, measured()) / 4096.0;
                vec![
                    found("_bytes", bytes, RATE, met(bytes, RATE)),
                    found("_ops", ops, OPS, met(ops, OPS)),
                ]
            }
            (Case::Floor, [load]) => {
                let bytes = load.charged(0, measured());
                vec![found("", bytes, RATE, bytes / RATE)]
            }
            _ => Vec::new(),
        };
        out.retain(|f| f.ratio.is_finite() && f.ratio > 0.0);
        out
    }

    /// Shares over time, where they are what is asked for.
    pub fn trace(&self, loads: &[Load]) -> Option<Trace> {
        let (medium, due) = match self {
            Case::Weights(m) => (m, [1.0, 2.0, 4.0].map(|w| w / 7.0)),
            Case::Newcomer(m) => (m, [0.25, 0.25, 0.5]),
            _ => return None,
        };
        let load = loads.first()?;
        let count = load.report.loads.first()?.window_ops.len() / SLIDING;
        let at = |k: usize| shares(load, medium.devices(), k * SLIDING..(k + 1) * SLIDING);
        let steps: Vec<Vec<f64>> = (0..count).map(at).collect();
        let vm = |i: usize| {
            let share = steps.iter().map(|s| s.get(i).copied().unwrap_or_default()).collect();
            (format!("v{i}"), due[i], share)
        };
        let step_ms = WINDOW_MS * SLIDING as u64;
        Some(Trace { case: self.name(), step_ms, vms: (0..3).map(vm).collect() })
    }
}

fn measured() -> std::ops::Range<usize> {
    measured_after(WARM_UP_MS)
}

fn measured_after(warm_up_ms: u64) -> std::ops::Range<usize> {
    (warm_up_ms / WINDOW_MS) as usize..((warm_up_ms + MEASURED_MS) / WINDOW_MS) as usize
}

/// The part of all bytes that each VM has, each with so many devices.
fn shares(load: &Load, devices: usize, windows: std::ops::Range<usize>) -> Vec<f64> {
    let charged: Vec<f64> =
        (0..load.op_bytes.len()).map(|d| load.charged(d, windows.clone())).collect();
    let all: f64 = charged.iter().sum();
    let of_vm = |d: &[f64]| if all > 0.0 { d.iter().sum::<f64>() / all } else { 0.0 };
    charged.chunks(devices).map(of_vm).collect()
}

/// How long the newcomer had to wait; the rest of the run when it never came to its share.
fn newcomer_ms(load: &Load, devices: usize) -> f64 {
    let (first, last) =
        ((NEWCOMER_MS / WINDOW_MS) as usize, (2 * NEWCOMER_MS / WINDOW_MS) as usize);
    let due = 0.5 * NEARLY;
    let has = |k: &usize| {
        shares(load, devices, *k..k + SLIDING).get(2).is_some_and(|share| *share >= due)
    };
    let end = (first..=last - SLIDING).find(has).map_or(last, |k| k + SLIDING);
    ((end - first) as u64 * WINDOW_MS) as f64
}

/// The median of the windows' 99th percentiles.
fn tail_us(load: &Load) -> Option<f64> {
    let windows = &load.report.loads.first()?.window_latency;
    let windows = windows.get(windows.len().checked_sub(LATENCY_WINDOWS)?..)?;
    let tails: Vec<f64> =
        windows.iter().filter(|w| w.count > 0).map(|w| w.p99_ns as f64 / 1e3).collect();
    spread(&tails).map(|s| s.median)
}

#[cfg(test)]
mod tests;
