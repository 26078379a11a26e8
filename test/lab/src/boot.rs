//! Boots of guests, past what the emulator does to some of them.
//!
//! While one CPU of a guest changes the memory map, as Linux does when it sets up PCI devices,
//! another one that is about to access a device may look up the number of the old map's section in
//! the new map. QEMU then ends by an assertion in `iotlb_to_section()`. All versions that emulate
//! several CPUs have that, 10.0 too, of which it ended one of 50 guests of four CPUs here; upstream
//! keeps pointers instead of numbers since. No guest's program and no back end changes the map.
//!
//! An access may also get lost without an assertion. The one that shows is the end of the local
//! timer's interrupt: that CPU halts with the interrupt in service, takes no other, and the guest
//! stands still. 7.2 did so, and 10.0 once in 20 runs of all VM tests beside two busy loops. It is
//! nobody else's fault: Linux writes that end first in the timer's handler, with interrupts off,
//! and between this write and the controller there is QEMU alone.

use std::time::Duration;

use crate::{Guest, GuestBuilder, Lab, LabError, Qemu, qemu72};

/// Boots all guests at once, as [`boot_all`].
///
/// # Errors
/// As [`boot_all`].
pub fn boot<const N: usize>(
    lab: &Lab,
    guests: [GuestBuilder; N],
    time: Duration,
) -> Result<[Guest; N], LabError> {
    let guests = boot_all(lab, guests.into(), time)?;
    guests.try_into().map_err(|_| LabError::Refused("a guest got lost".into()))
}

/// Boots all guests at once and waits for their agents, `time` for each. One that QEMU ends or
/// hangs by a fault of its own (above, and [`crate::qemu72`]) is started once more, which standard
/// error tells.
///
/// # Errors
/// Those of [`GuestBuilder::start`] and [`Guest::wait_ready`].
pub fn boot_all(
    lab: &Lab,
    guests: Vec<GuestBuilder>,
    time: Duration,
) -> Result<Vec<Guest>, LabError> {
    let start = |builder: GuestBuilder| Ok((builder.clone(), builder.start(lab)?));
    let started = guests.into_iter().map(start).collect::<Result<Vec<_>, LabError>>()?;
    let ready = |(builder, guest): (GuestBuilder, Guest)| match guest.wait_ready(time) {
        Err(error) if is_emulators_fault(guest.qemu(), &error) => {
            eprintln!("started once more: {error}");
            drop(guest);
            let guest = builder.start(lab)?;
            guest.wait_ready(time)?;
            Ok(guest)
        }
        ready => ready.map(|()| guest),
    };
    started.into_iter().map(ready).collect()
}

/// Whether an emulator says that it ended since a memory map had changed under a CPU.
pub(crate) fn has_lost_map(stderr: &str) -> bool {
    stderr.contains("iotlb_to_section: Assertion `section_index <")
}

/// Whether a guest that was still booting has died or hung by a fault of QEMU alone.
fn is_emulators_fault(qemu: &Qemu, error: &LabError) -> bool {
    let has_lost_access = match error {
        LabError::GuestDied { stderr, .. } => has_lost_map(stderr),
        LabError::InterruptEndLost { .. } => true,
        _ => false,
    };
    qemu.accelerator().is_emulator() && has_lost_access || qemu72::has_ended_boot(qemu, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Accelerator;

    #[test]
    #[allow(non_snake_case)]
    fn abuse_G2_a_map_that_changes_under_a_cpu_is_the_emulators_fault() {
        let died = |stderr: &str| LabError::GuestDied {
            name: "a".into(),
            why: "QEMU ended: signal: 6 (SIGABRT)".into(),
            console: String::new(),
            stderr: stderr.into(),
        };
        let qemu = Qemu::of_version(10, 0);
        let lost_map = "qemu-system-x86_64: system/physmem.c:2678: iotlb_to_section: Assertion \
                        `section_index < d->map.sections_nb' failed.";
        assert!(is_emulators_fault(&qemu, &died(lost_map)));
        assert!(!is_emulators_fault(&qemu, &died("vhost_user_set_mem_table: Assertion `r >= 0'")));
        assert!(!is_emulators_fault(&qemu, &LabError::Refused(lost_map.into())));
        let hung = LabError::InterruptEndLost {
            name: "a".into(),
            cpu: 1,
            vectors: "236".into(),
            console: String::new(),
        };
        assert!(is_emulators_fault(&qemu, &hung));
        let kvm = qemu.under(Accelerator::Kvm);
        for error in [&died(lost_map), &hung] {
            assert!(!is_emulators_fault(&kvm, error), "there it would be KVM's or ours");
        }
    }
}
