//! Events that a guest's own kernel counts: calls of its functions, by probes, and interrupts.

use lab::Guest;

use crate::harness::error::BenchError;

/// Goes to the folder of the kernel's tracing, which is mounted if needed.
pub const ENTER_TRACING: &str = "cd /sys/kernel/tracing \
     && { [ -e kprobe_events ] || mount -t tracefs none . ; } && cd /sys/kernel/tracing";

/// Runs a command that sets or switches probes.
pub fn set_probes(guest: &Guest, script: &str) -> Result<(), BenchError> {
    guest.sh(script).map(drop).map_err(|e| failed(guest, e))
}

/// Error of counting in a guest.
pub fn failed(guest: &Guest, error: impl std::fmt::Display) -> BenchError {
    BenchError::lab(format!("count events in {}", guest.name()), error)
}

/// Devices that lines `device NAME` name.
pub fn devices(text: &str) -> Vec<&str> {
    text.lines().filter_map(|l| l.strip_prefix("device ")).collect()
}

/// The sum of these devices' lines of `/proc/interrupts`.
pub fn interrupts(text: &str, devices: &[&str]) -> u64 {
    let of_line = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let words = rest.split_ascii_whitespace();
        let is_theirs = words.clone().any(|word| is_of(word, devices));
        is_theirs.then(|| words.map_while(|n| n.parse::<u64>().ok()).sum::<u64>())
    };
    text.lines().filter_map(of_line).sum()
}

/// Whether a word of `/proc/interrupts` is a device or a queue of it: not `virtio12` for `virtio1`.
fn is_of(word: &str, devices: &[&str]) -> bool {
    let name = word.trim_end_matches(',');
    devices
        .iter()
        .any(|d| name.strip_prefix(d).is_some_and(|end| end.is_empty() || end.starts_with('-')))
}

/// A guest's `/proc/interrupts`, for tests.
#[cfg(test)]
pub const INTERRUPTS: &str = "\
    \x20          CPU0\n\
    \x20 4:          2   IO-APIC   4-edge      ttyS0\n\
    \x2011:        500   IO-APIC  11-fasteoi   uhci, virtio1\n\
    \x2014:          7   IO-APIC  14-edge      ata_piix\n\
    \x2025:         11   PCI-MSI 16385-edge      virtio0-virtqueues\n\
    \x2027:          7   PCI-MSI 32769-edge      virtio2-req.0\n\
    \x2028:       9000   PCI-MSI 32770-edge      virtio12-input.0\n\
    LOC:        667   Local timer interrupts\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_devices_own_lines_count() {
        assert_eq!(interrupts(INTERRUPTS, &["virtio1", "virtio2"]), 507);
        assert_eq!(interrupts(INTERRUPTS, &[]), 0);
        assert_eq!(devices("device virtio1\nx\ndevice ata_piix\n"), ["virtio1", "ata_piix"]);
    }
}
