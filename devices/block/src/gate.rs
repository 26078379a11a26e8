//! Gates of devices: a limit of requests in a device that several VMs share.
//!
//! Requests that were given to a disk are out of our hands: whatever the weights of their VMs, it
//! serves them as it likes. So while several VMs use one device, a limited number of requests is in
//! it; the rest waits in the rings, and the VM that has credit goes next (SFQ(D): Jin, Chase and
//! Kaur, SIGMETRICS 2004). That is credit of the device's own ledger: see [`Ledger::device`]. A VM
//! that is alone on a device is not limited. A gate is shared by all disks on a device and by all
//! sidecores: one atomic addition for each poll that changes anything.

use std::fs::File;
use std::os::linux::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use base::sync::lock;
use sidecore::{Allowance, Ledger, Spent, VmId};

/// Most requests in a device while several VMs use it: an SSD needs as many for its full rate.
const SHARED_DEPTH: u32 = 64;

/// Requests that every queue may have in the device, however full it is: a queue with few at a time
/// does not wait for those with many.
const MIN_PER_QUEUE: u32 = 2;

/// Time for which a device counts as shared after another VM used it.
const SHARED_NS: u64 = 100_000_000;

/// Gate of one device.
#[derive(Debug)]
pub struct Gate {
    /// The device's number.
    device: u64,
    in_flight: AtomicU32,
    /// VM that used the device last ([`VmId::number`]). Stores of several threads to this and the
    /// next field may cross: then the device counts as shared a poll later.
    user: AtomicU32,
    /// Time until which the device counts as shared.
    shared_until_ns: AtomicU64,
}

/// The gates of devices in use, by device number. A process has one kernel below it, and so one
/// such list.
static GATES: Mutex<Vec<(u64, Weak<Gate>)>> = Mutex::new(Vec::new());

impl Gate {
    /// The gate of the device that a file is on, or is.
    pub fn of(file: &File) -> std::io::Result<Arc<Self>> {
        let meta = file.metadata()?;
        let is_device = meta.st_mode() & libc::S_IFMT == libc::S_IFBLK;
        let device = if is_device { meta.st_rdev() } else { meta.st_dev() };
        let mut gates = lock(&GATES);
        gates.retain(|(_, gate)| gate.strong_count() > 0);
        let known = gates.iter().find(|(number, _)| *number == device);
        if let Some(gate) = known.and_then(|(_, gate)| gate.upgrade()) {
            return Ok(gate);
        }
        let gate = Arc::new(Self::new(device));
        gates.push((device, Arc::downgrade(&gate)));
        Ok(gate)
    }

    /// Requests in the device.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn new(device: u64) -> Self {
        Self {
            device,
            in_flight: AtomicU32::new(0),
            user: AtomicU32::new(VmId::NONE.number()),
            shared_until_ns: AtomicU64::new(0),
        }
    }
}

/// Place of one queue at a gate. Dropping it gives back its part of the gate's limit.
#[derive(Debug)]
pub(crate) struct GatePass {
    gate: Option<Arc<Gate>>,
    vm: VmId,
    held: u32,
}

impl GatePass {
    /// `gate`: `None` where requests wait in no device.
    pub fn new(gate: Option<Arc<Gate>>, vm: VmId) -> Self {
        Self { gate, vm, held: 0 }
    }

    /// Number of requests that may still be given to the device.
    fn room(&self, now_ns: u64) -> u32 {
        let Some(gate) = &self.gate else { return u32::MAX };
        if now_ns >= gate.shared_until_ns.load(Ordering::Relaxed) {
            return u32::MAX;
        }
        let room = SHARED_DEPTH.saturating_sub(gate.in_flight.load(Ordering::Relaxed));
        room.max(MIN_PER_QUEUE.saturating_sub(self.held))
    }

    /// Allowance of the VM on the device: its credit, and the gate's room.
    pub fn allowance(&self, ledger: &mut Ledger, now_ns: u64) -> Allowance {
        let credit = self.credit(ledger, now_ns);
        Allowance { requests: credit.requests.min(self.room(now_ns)), ..credit }
    }

    /// Credit of the VM on the device, for requests that have their place in it already.
    pub fn credit(&self, ledger: &mut Ledger, now_ns: u64) -> Allowance {
        let Some(gate) = &self.gate else { return Allowance::UNLIMITED };
        ledger.device(gate.device, self.vm).allowance(self.vm, now_ns)
    }

    /// Notes that work waits which [`GatePass::allowance`] does not allow.
    pub fn wait(&self, ledger: &mut Ledger, now_ns: u64) {
        let Some(gate) = &self.gate else { return };
        self.note_use(gate, now_ns);
        let ledger = ledger.device(gate.device, self.vm);
        match ledger.allowance(self.vm, now_ns).is_none() {
            true => ledger.held_back(self.vm, now_ns),
            false => ledger.blocked(self.vm),
        }
    }

    /// Charges the VM for requests that are given to the device.
    pub fn charge(&self, ledger: &mut Ledger, spent: Spent, more: bool, now_ns: u64) {
        let Some(gate) = &self.gate else { return };
        self.note_use(gate, now_ns);
        ledger.device(gate.device, self.vm).charge(self.vm, spent, more, now_ns);
    }

    fn note_use(&self, gate: &Gate, now_ns: u64) {
        let (before, now) = (gate.user.load(Ordering::Relaxed), self.vm.number());
        if before != now {
            gate.user.store(now, Ordering::Relaxed);
            if before != VmId::NONE.number() {
                gate.shared_until_ns.store(now_ns + SHARED_NS, Ordering::Relaxed);
            }
        }
    }

    /// Sets the number of the queue's requests that are with the device.
    pub fn hold(&mut self, count: usize) {
        let Some(gate) = &self.gate else { return };
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count != self.held {
            gate.in_flight.fetch_add(count.wrapping_sub(self.held), Ordering::Relaxed);
            self.held = count;
        }
    }
}

impl Drop for GatePass {
    fn drop(&mut self) {
        self.hold(0);
    }
}

#[cfg(test)]
mod tests {
    use sidecore::{Accounts, Settings};

    use super::*;

    #[test]
    fn who_is_alone_is_not_limited_and_who_has_little_does_not_wait() {
        let accounts = Accounts::default();
        let vm = |name| accounts.open(name, Settings::default()).id();
        let gate = Arc::new(Gate::new(1));
        let [mut a, mut b] = ["a", "b"].map(|name| GatePass::new(Some(gate.clone()), vm(name)));
        a.note_use(&gate, 0);
        a.hold(200);
        assert_eq!(a.room(0), u32::MAX);
        b.note_use(&gate, 10);
        assert_eq!((a.room(10), b.room(10)), (0, 2));
        b.hold(1);
        assert_eq!(b.room(10), 1);
        a.hold(60);
        assert_eq!((a.room(10), b.room(10)), (3, 3));
        b.hold(0);
        assert_eq!(a.room(10 + SHARED_NS), u32::MAX);
        drop(a);
        assert_eq!(gate.in_flight.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_device_has_one_gate_while_it_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(dir.path().join(name)).unwrap();
        let (a, b) = (Gate::of(&file("a")).unwrap(), Gate::of(&file("b")).unwrap());
        assert!(Arc::ptr_eq(&a, &b));
    }
}
