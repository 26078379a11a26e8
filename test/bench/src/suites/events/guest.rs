//! Events that a guest's own kernel counts: doorbells written and interrupts taken.
//!
//! A probe on `vp_notify` counts every write to a virtio doorbell, which under a hypervisor is an
//! exit; one on `vp_interrupt` every interrupt that is acknowledged by reading a register, another
//! exit, which devices with MSI-X do not need. Probes count for all virtio devices of the guest;
//! besides the one under load only the agent's console moves, a few times per load.

use std::time::Duration;

use lab::Guest;
use serde_json::Value;

use crate::harness::error::BenchError;
use crate::harness::guest_events::{ENTER_TRACING, devices, failed, interrupts, set_probes};

/// Adds the probes and switches them on.
const PROBES: &str = "echo 'p:kick vp_notify' >> kprobe_events \
     && echo 'p:acknowledge vp_interrupt' >> kprobe_events && echo 1 > events/kprobes/enable";
/// Prints all counters, and which virtio devices are network card and disk.
const COUNTERS: &str = "for d in /sys/class/net/eth0/device /sys/block/vda/device; do \
     [ -e $d ] && echo \"device $(basename $(readlink $d))\"; done; \
     cat /sys/kernel/tracing/kprobe_profile /proc/interrupts";
/// Stands between counters and load.
const MARK: &str = "=load=";

/// Counters of a guest, or what they grew by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// Doorbells written.
    pub kicks: u64,
    /// Interrupts of network card and disk.
    pub interrupts: u64,
    /// Interrupts acknowledged by reading a register.
    pub acknowledged: u64,
}

impl Seen {
    /// Growth since `earlier`.
    pub fn since(&self, earlier: &Seen) -> Seen {
        Seen {
            kicks: self.kicks.saturating_sub(earlier.kicks),
            interrupts: self.interrupts.saturating_sub(earlier.interrupts),
            acknowledged: self.acknowledged.saturating_sub(earlier.acknowledged),
        }
    }

    /// Two guests together.
    pub fn and(&self, other: &Seen) -> Seen {
        Seen {
            kicks: self.kicks + other.kicks,
            interrupts: self.interrupts + other.interrupts,
            acknowledged: self.acknowledged + other.acknowledged,
        }
    }
}

/// Sets the probes, once per guest.
pub fn prepare(guest: &Guest) -> Result<(), BenchError> {
    set_probes(guest, &format!("{ENTER_TRACING} && {PROBES}"))
}

/// Reads the counters.
pub fn read(guest: &Guest) -> Result<Seen, BenchError> {
    let text = guest.sh(COUNTERS).map_err(|e| failed(guest, e))?;
    parse(&text).ok_or_else(|| failed(guest, format!("no counters in: {text}")))
}

/// Runs a tool and counts around it, in one command, so that little else happens between. Returns
/// the tool's JSON and the growth.
pub fn around(guest: &Guest, tool: &str, time: Duration) -> Result<(Value, Seen), BenchError> {
    let script = format!("{COUNTERS}; echo {MARK}; {tool} || exit 1; echo {MARK}; {COUNTERS}");
    let text = guest.run_for(&script, time).and_then(lab::Output::ok);
    let text = text.map_err(|e| failed(guest, e))?;
    split(&text).ok_or_else(|| failed(guest, format!("{tool} and counters printed: {text}")))
}

fn split(text: &str) -> Option<(Value, Seen)> {
    let mut parts = text.split(MARK);
    let (before, load, after) = (parts.next()?, parts.next()?, parts.next()?);
    let answer = serde_json::from_str(load.trim().lines().next_back()?).ok()?;
    Some((answer, parse(after)?.since(&parse(before)?)))
}

/// The sum of the devices' lines of `/proc/interrupts`, and the probes' hits.
fn parse(text: &str) -> Option<Seen> {
    let devices = devices(text);
    let hits = |probe: &str| {
        let mut lines = text.lines().map(|l| l.split_ascii_whitespace());
        lines.find_map(|mut l| (l.next()? == probe).then(|| l.next()?.parse::<u64>().ok())?)
    };
    let interrupts = interrupts(text, &devices);
    let (kicks, acknowledged) = (hits("kick")?, hits("acknowledge")?);
    (!devices.is_empty()).then_some(Seen { kicks, interrupts, acknowledged })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::guest_events::INTERRUPTS;

    fn counters() -> String {
        let probes = "kick 120 0\nacknowledge 30 0\n";
        format!("device virtio1\ndevice virtio2\n{probes}{INTERRUPTS}")
    }

    #[test]
    fn only_the_devices_own_lines_count() {
        let got = parse(&counters()).unwrap();
        assert_eq!(got, Seen { kicks: 120, interrupts: 507, acknowledged: 30 });
        assert_eq!(parse("device virtio1\n"), None, "no probes");
        assert_eq!(parse(&counters().replace("device", "")), None, "no device");
    }

    #[test]
    fn the_load_stands_between_two_readings() {
        let later = counters().replace(" 120 ", " 150 ").replace("  500 ", "  510 ");
        let text = format!("{}{MARK}\nnoise\n{{\"count\":3}}\n{MARK}\n{later}", counters());
        let (answer, seen) = split(&text).unwrap();
        assert_eq!(answer["count"], 3);
        assert_eq!(seen, Seen { kicks: 30, interrupts: 10, acknowledged: 0 });
        assert_eq!(seen.and(&seen), Seen { kicks: 60, interrupts: 20, acknowledged: 0 });
        assert!(split(&counters()).is_none());
    }
}
