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
use crate::harness::guest_events::{ENTER_TRACING, devices, interrupts, set_probes};

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

/// Sets the probes, once; they are off.
pub fn prepare(guest: &Guest) -> Result<(), BenchError> {
    let mut script = String::from(ENTER_TRACING);
    for (function, accesses) in PROBES {
        script.push_str(&format!(
            " && echo 'p:exit_{accesses}_{function} {function}' >> kprobe_events"
        ));
    }
    set_probes(guest, &script)
}

/// Switches them.
pub fn switch(guest: &Guest, on: bool) -> Result<(), BenchError> {
    let script = format!("echo {} > /sys/kernel/tracing/events/kprobes/enable", u8::from(on));
    set_probes(guest, &script)
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
    let devices = devices(text);
    let (mut exits, mut probes) = (0, 0);
    for mut words in text.lines().map(str::split_ascii_whitespace) {
        if let Some(probe) = words.next().and_then(|first| first.strip_prefix("exit_")) {
            let accesses: u64 = probe.split('_').next()?.parse().ok()?;
            exits += accesses * words.next()?.parse::<u64>().ok()?;
            probes += 1;
        }
    }
    let interrupts = interrupts(text, &devices) as f64;
    (probes > 0 && !devices.is_empty()).then_some(Events { exits: exits as f64, interrupts })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::guest_events::INTERRUPTS;

    fn counters() -> String {
        let probes = "exit_3_ata_bmdma_stop 10 0\nexit_1_vp_notify 120 0\n";
        format!("device virtio1\ndevice ata_piix\n{probes}{INTERRUPTS}")
    }

    #[test]
    fn all_probes_and_only_the_devices_lines_count() {
        assert_eq!(parse(&counters()).unwrap(), Events { exits: 150.0, interrupts: 507.0 });
        assert_eq!(parse(&counters().replace("exit_", "x")), None, "no probes");
        assert_eq!(parse(&counters().replace("device", "")), None, "no device");
    }

    #[test]
    fn a_row_costs_what_rows_cost_more_than_none() {
        let later = counters().replace(" 120 ", " 160 ").replace(" 500 ", " 520 ");
        let grown =
            between(&format!("{}{MARK}\nload-took\t1\n{MARK}\n{later}", counters())).unwrap();
        assert_eq!(grown, Events { exits: 40.0, interrupts: 20.0 });
        let row = grown.per_row(&Events { exits: 10.0, interrupts: 30.0 }, 10);
        assert_eq!(row, Events { exits: 3.0, interrupts: 0.0 });
        assert!(between(&counters()).is_none());
    }
}
