//! The ledgers of the devices below a sidecore.
//!
//! There may be one for each disk (a logical volume is a device of its own), so nothing here is
//! kept for each pair of a device and a VM: a ledger knows the VMs that used its device. An unused
//! ledger is passed over in every round, and dropped when a worker or a VM goes.

use super::{Ledger, VmId};

/// Ledgers of the devices below a sidecore.
#[derive(Debug, Default)]
pub(super) struct Devices {
    /// By number.
    list: Vec<Device>,
}

#[derive(Debug)]
struct Device {
    number: u64,
    /// Used since it was found idle.
    awake: bool,
    ledger: Box<Ledger>,
}

impl Devices {
    /// Ledger of a device, which is in use from now on. Allocates the first time.
    #[inline]
    pub fn wake(&mut self, number: u64) -> &mut Ledger {
        let at = match self.list.binary_search_by_key(&number, |d| d.number) {
            Ok(at) => at,
            Err(at) => {
                let device = Device { number, awake: true, ledger: Box::new(Ledger::of_device()) };
                self.list.insert(at, device);
                at
            }
        };
        let device = &mut self.list[at];
        device.awake = true;
        &mut device.ledger
    }

    /// Ledgers that know a VM.
    pub fn of(&mut self, vm: VmId) -> impl Iterator<Item = &mut Ledger> {
        self.list.iter_mut().map(|d| &mut *d.ledger).filter(move |ledger| ledger.knows(vm))
    }

    /// Ledgers that are in use.
    pub fn awake(&mut self) -> impl Iterator<Item = &mut Ledger> {
        self.list.iter_mut().filter(|d| d.awake).map(|d| &mut *d.ledger)
    }

    /// Ends a round. True when a VM that was held back may go on.
    pub fn end_round(&mut self, now_ns: u64) -> bool {
        let mut goes_on = false;
        for device in self.list.iter_mut().filter(|d| d.awake) {
            let on = device.ledger.end_round(now_ns);
            device.awake = on || !device.ledger.is_idle();
            goes_on |= on;
        }
        goes_on
    }

    /// Drops unused ledgers. A VM that comes back begins anew, with a burst.
    pub fn drop_idle(&mut self) {
        self.list.retain(|d| d.awake && d.ledger.knows_any());
    }

    /// Number of ledgers.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.list.len()
    }
}
