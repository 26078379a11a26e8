//! Events that the guest's own kernel counts: exits and interrupts.
//!
//! Probes count the functions by which drivers write virtio's doorbells and acknowledge its
//! interrupts, one access to a register each, and those by which libata drives IDE, several each
//! ([`PROBES`], from Linux 6.1, drivers/ata/libata-sff.c; where the number varies the smallest is
//! taken). Each access is an exit under a hypervisor. Interrupts are the kernel's own count. The
//! console's are left out; its doorbells, the few of starting a load and of its first row are in
//! the counts of a load without rows, which are taken off.

use lab::Guest;
use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;

/// Functions, and how many registers each call of them accesses.
const PROBES: [(&str, u32); 10] = [
    ("vp_notify", 1),
    ("vp_interrupt", 1),
    ("ata_sff_check_status", 1),
    ("ata_sff_tf_load", 6),
    ("ata_sff_exec_command", 2),
    ("ata_bmdma_setup", 3),
    ("ata_bmdma_start", 2),
    ("ata_bmdma_stop", 3),
    ("ata_bmdma_status", 1),
    ("ata_bmdma_irq_clear", 2),
];
/// Prints all counters, and which devices are meant.
pub const COUNTERS: &str = "for d in /sys/bus/virtio/devices/virtio*; do \
     [ $(basename $(readlink $d/driver)) = virtio_console ] || echo \"device $(basename $d)\"; done; \
     echo device ata_piix; cat /sys/kernel/tracing/kprobe_profile /proc/interrupts";
/// Stands before and after the load, between two outputs of the counters.
pub const MARK: &str = "=counted=";

/// Events, of a load or for a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Events {
    /// Accesses to registers of devices.
    pub exits: f64,
    /// Interrupts of disks and vsock.
    pub interrupts: f64,
}

impl Events {
    /// Events of each of `rows` rows: those beyond a load with none.
    pub fn per_row(&self, empty: &Events, rows: u32) -> Events {
        let each = |all: f64, none: f64| (all - none).max(0.0) / f64::from(rows.max(1));
        Events {
            exits: each(self.exits, empty.exits),
            interrupts: each(self.interrupts, empty.interrupts),
        }
    }
}

fn failed(guest: &Guest, error: impl std::fmt::Display) -> BenchError {
    BenchError::lab(format!("count events in {}", guest.name()), error)
}

/// Sets the probes, once; they are off.
pub fn prepare(guest: &Guest) -> Result<(), BenchError> {
    let mut script = String::from(
        "cd /sys/kernel/tracing && { [ -e kprobe_events ] || mount -t tracefs none . ; } \
         && cd /sys/kernel/tracing",
    );
    for (function, accesses) in PROBES {
        script.push_str(&format!(
            " && echo 'p:exit_{accesses}_{function} {function}' >> kprobe_events"
        ));
    }
    guest.sh(&script).map(drop).map_err(|e| failed(guest, e))
}

/// Switches them.
pub fn switch(guest: &Guest, on: bool) -> Result<(), BenchError> {
    let script = format!("echo {} > /sys/kernel/tracing/events/kprobes/enable", u8::from(on));
    guest.sh(&script).map(drop).map_err(|e| failed(guest, e))
}

/// The growth between the outputs before and after the load.
pub fn between(text: &str) -> Option<Events> {
    let mut parts = text.split(MARK);
    let (before, _, after) = (parts.next()?, parts.next()?, parts.next()?);
    let (before, after) = (parse(before)?, parse(after)?);
    Some(Events {
        exits: after.exits - before.exits,
        interrupts: after.interrupts - before.interrupts,
    })
}

fn parse(text: &str) -> Option<Events> {
    let devices: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("device ")).collect();
    let (mut exits, mut interrupts, mut probes) = (0, 0, 0);
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some(probe) = first.strip_prefix("exit_") {
            let accesses: u64 = probe.split('_').next()?.parse().ok()?;
            exits += accesses * words.next()?.parse::<u64>().ok()?;
            probes += 1;
        } else if first.ends_with(':') && words.clone().any(|word| is_of(word, &devices)) {
            interrupts += words.map_while(|n| n.parse::<u64>().ok()).sum::<u64>();
        }
    }
    let events = Events { exits: exits as f64, interrupts: interrupts as f64 };
    (probes > 0 && !devices.is_empty()).then_some(events)
}

/// Whether a word of `/proc/interrupts` is a device or a queue of it: not `virtio12` for `virtio1`.
fn is_of(word: &str, devices: &[&str]) -> bool {
    let name = word.trim_end_matches(',');
    devices
        .iter()
        .any(|d| name.strip_prefix(d).is_some_and(|end| end.is_empty() || end.starts_with('-')))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "device virtio1\ndevice ata_piix\n\
        \x20 exit_3_ata_bmdma_stop              10               0\n\
        \x20 exit_1_vp_notify                  120               0\n\
        \x20          CPU0\n\
        \x20 4:          2   IO-APIC   4-edge      ttyS0\n\
        \x2014:        500   IO-APIC  14-edge      ata_piix\n\
        \x2025:         11   PCI-MSI 16385-edge      virtio0-virtqueues\n\
        \x2027:          7   PCI-MSI 32769-edge      virtio1-req.0\n\
        \x2028:       9000   PCI-MSI 32770-edge      virtio12-input.0\n\
        LOC:        667   Local timer interrupts\n";

    #[test]
    fn all_probes_and_only_the_devices_lines_count() {
        assert_eq!(parse(TEXT).unwrap(), Events { exits: 150.0, interrupts: 507.0 });
        assert_eq!(parse(&TEXT.replace("exit_", "x")), None, "no probes");
        assert_eq!(parse(&TEXT.replace("device", "")), None, "no device");
    }

    #[test]
    fn a_row_costs_what_rows_cost_more_than_none() {
        let later = TEXT.replace(" 120 ", " 160 ").replace(" 500 ", " 520 ");
        let grown = between(&format!("{TEXT}{MARK}\nload-took\t1\n{MARK}\n{later}")).unwrap();
        assert_eq!(grown, Events { exits: 40.0, interrupts: 20.0 });
        let row = grown.per_row(&Events { exits: 10.0, interrupts: 30.0 }, 10);
        assert_eq!(row, Events { exits: 3.0, interrupts: 0.0 });
        assert!(between(TEXT).is_none());
    }
}
