//! Faults that QEMU 7.2, Debian 12's own, has under emulation, and the ways round them.
//!
//! Nothing here is done with a QEMU that has them mended.
//!
//! - A network card of a vhost-user back end with MSI-X ends QEMU as its driver starts
//!   (vhost_net_start): it gets no vectors.
//! - With several pairs of queues, guests of several CPUs hang in every second or third run: they
//!   get one pair.
//! - A CPU may use the memory map that another one has just changed with what it remembers of the
//!   old one (`tcg_commit()`, mended in 8.2). An access goes to the wrong device, and QEMU ends by
//!   an assertion. Such a boot is done once more.
//! - A CPU may keep its translation of an int3 that Linux has put into its code for the time of a
//!   patch (mended in 8.1 by `deba78709ae8`), and the guest's kernel dies of it, or its CPUs go
//!   round in its handler. A boot that ends so is done once more; later, see [`hold_hooks`].

use crate::{LabError, Qemu};

/// First version without these faults.
const FIRST_SOUND: (u32, u32) = (8, 2);

/// Whether a QEMU has these faults; none has them under KVM.
#[must_use]
pub fn has_faults(qemu: &Qemu) -> bool {
    qemu.accelerator().is_emulator() && qemu.version() < FIRST_SOUND
}

/// Properties that a network card of a vhost-user back end needs.
pub(crate) fn net_properties(qemu: &Qemu) -> &'static str {
    if has_faults(qemu) { ",vectors=0" } else { "" }
}

/// Pairs of queues for a guest of so many CPUs: as many, or one.
#[must_use]
pub fn queue_pairs(qemu: &Qemu, vcpus: u32) -> u16 {
    if has_faults(qemu) { 1 } else { vcpus as u16 }
}

/// CPUs for a guest whose test has hung or ended 7.2 with several: so many, or one.
#[must_use]
pub fn vcpus(qemu: &Qemu, vcpus: u32) -> u32 {
    if has_faults(qemu) { 1 } else { vcpus }
}

/// Whether a guest that was still booting has died or hung by one of these faults. No guest, and no
/// other end of a device, can make QEMU end or hang so.
#[must_use]
pub(crate) fn has_ended_boot(qemu: &Qemu, error: &LabError) -> bool {
    has_faults(qemu)
        && match error {
            LabError::GuestDied { why, stderr, .. } => {
                why.starts_with("Oops: int3")
                    || stderr.contains("msix_table_mmio_write: Assertion `addr + size <=")
            }
            _ => false,
        }
}

/// Script that switches a guest's calls of packet filters on for good, by rules in a network
/// namespace that nobody uses; none where that is not needed. What packets meet stays as it was.
/// The guest's image must have the packet filter.
///
/// Linux patches these calls in and out of its code (`nf_hooks_needed`) with the first and the last
/// filter of all namespaces: about one in 20 loads of our kernel modules under load ended by the
/// int3, and as many of `nft` without them.
#[must_use]
pub fn hold_hooks(qemu: &Qemu) -> Option<String> {
    let chain = |hook: &str| format!("chain {hook} {{ type filter hook {hook} priority 0; }};");
    let chains: String = ["output", "postrouting"].map(chain).concat();
    has_faults(qemu).then(|| {
        format!("touch /tmp/held && unshare --net=/tmp/held nft 'table inet held {{ {chains} }}'")
    })
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case)]

    use super::*;

    const OLD: (u32, u32) = (7, 2);

    fn qemu((major, minor): (u32, u32)) -> Qemu {
        Qemu::of_version(major, minor)
    }

    #[test]
    fn newer_ones_get_what_users_have() {
        assert!(has_faults(&qemu(OLD)) && has_faults(&qemu((8, 1))) && !has_faults(&qemu((8, 2))));
        assert_eq!(
            (net_properties(&qemu(OLD)), net_properties(&qemu((10, 0)))),
            (",vectors=0", "")
        );
        assert_eq!((queue_pairs(&qemu(OLD), 2), queue_pairs(&qemu((10, 0)), 2)), (1, 2));
        assert_eq!((vcpus(&qemu(OLD), 2), vcpus(&qemu((10, 0)), 2)), (1, 2));
        assert!(hold_hooks(&qemu(OLD)).is_some() && hold_hooks(&qemu((10, 0))).is_none());
        assert!(!has_faults(&qemu(OLD).under(crate::Accelerator::Kvm)));
    }

    #[test]
    fn abuse_G2_the_emulators_own_faults_are_known() {
        let death = |why: &str, stderr: &str| LabError::GuestDied {
            name: "a".into(),
            why: why.into(),
            console: String::new(),
            stderr: stderr.into(),
        };
        let is_known = |error: &LabError| has_ended_boot(&qemu(OLD), error);
        let died = |stderr: &str| death("QEMU ended: signal: 6 (SIGABRT)", stderr);
        let wrong = "qemu-system-x86_64: ../../hw/pci/msix.c:218: msix_table_mmio_write: Assertion \
                     `addr + size <= dev->msix_entries_nr * PCI_MSIX_ENTRY_SIZE' failed.";
        assert!(is_known(&died(wrong)));
        let other = "vhost_user_set_mem_table: Assertion `r >= 0' failed.";
        assert!(!is_known(&died(other)));
        assert!(!is_known(&LabError::Refused(wrong.into())));
        let ended = "(QEMU ended: exit status: 0)";
        let patched = format!("Oops: int3: 0000 [#1] PREEMPT SMP NOPTI {ended}");
        assert!(is_known(&death(&patched, "")));
        assert!(!is_known(&death(&patched.replace("int3", "0002"), "")));
        // What is mended is a fault of somebody else.
        assert!(!has_ended_boot(&qemu((10, 0)), &died(wrong)));
    }
}
