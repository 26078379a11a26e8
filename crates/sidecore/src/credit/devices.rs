//! The ledgers of the devices below a sidecore.
//!
//! There may be one for each disk (a logical volume is a device of its own), so nothing here is
//! for each device and each VM: a ledger knows the VMs that used its device, and one that nobody
//! uses is passed over in every round, and dropped when a worker or a VM goes.

use super::{Ledger, VmId};

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Devices {
    /// By number.
    list: Vec<Device>,
}

#[derive(Debug)]
struct Device {
    number: u64,
    /// Asked since it was found idle.
    awake: bool,
    ledger: Box<Ledger>,
}

impl Devices {
    /// The ledger of a device. Allocates the first time.
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

    /// Those that know a VM.
    pub fn of(&mut self, vm: VmId) -> impl Iterator<Item = &mut Ledger> {
        self.list.iter_mut().map(|d| &mut *d.ledger).filter(move |ledger| ledger.knows(vm))
    }

    /// Those that are in use.
    pub fn awake(&mut self) -> impl Iterator<Item = &mut Ledger> {
        self.list.iter_mut().filter(|d| d.awake).map(|d| &mut *d.ledger)
    }

    /// Ends a round; whether somebody who was held back may go on.
    pub fn end_round(&mut self, now_ns: u64) -> bool {
        let mut goes_on = false;
        for device in self.list.iter_mut().filter(|d| d.awake) {
            let on = device.ledger.end_round(now_ns);
            device.awake = on || !device.ledger.is_idle();
            goes_on |= on;
        }
        goes_on
    }

    /// Drops those that nobody uses. Whoever comes back begins anew, with a burst.
    pub fn drop_idle(&mut self) {
        self.list.retain(|d| d.awake && d.ledger.knows_any());
    }

    /// How many there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.list.len()
    }
}
