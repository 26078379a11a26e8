//! Gates of devices: a limit of requests in a device that several VMs share.
//!
//! Requests that were given to a disk are out of our hands: whatever the weights of their VMs, it
//! serves them as it likes. So while several VMs use one device, a limited number of requests is in
//! it; the rest waits in the rings, and the VM that has credit goes next (SFQ(D): Jin, Chase and
//! Kaur, SIGMETRICS 2004). That is credit of the device's own ledger: see [`Ledger::device`]. A VM
//! that is alone on a device is not limited. A gate is shared by all disks on a device and by all
//! sidecores: one atomic addition for each poll that changes anything.
//!
//! Threads that read a disk in place ([`InPlacePass`]) have a place each while they do, as a queue
//! has for its first request. What they have read is owed by the VM's queues on that device: the
//! next one that asks for credit has its ledger keep it back.

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
    /// Bytes of each VM that uses the device.
    readers: Mutex<Vec<(VmId, Weak<AtomicU64>)>>,
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
            readers: Mutex::default(),
        }
    }

    /// Bytes that a VM has read in place, and that no queue has found yet.
    fn unpaid(&self, vm: VmId) -> Arc<AtomicU64> {
        let mut readers = lock(&self.readers);
        readers.retain(|(_, unpaid)| unpaid.strong_count() > 0);
        let known = readers.iter().find(|(reader, _)| *reader == vm);
        known.and_then(|(_, unpaid)| unpaid.upgrade()).unwrap_or_else(|| {
            let unpaid = Arc::default();
            readers.push((vm, Arc::downgrade(&unpaid)));
            unpaid
        })
    }

    /// Notes that a VM uses the device.
    fn note_use(&self, vm: VmId, now_ns: u64) {
        let (before, now) = (self.user.load(Ordering::Relaxed), vm.number());
        if before != now {
            self.user.store(now, Ordering::Relaxed);
            if before != VmId::NONE.number() {
                self.shared_until_ns.store(now_ns + SHARED_NS, Ordering::Relaxed);
            }
        }
    }
}

/// Pass of a VM for reads of a disk in place, past its queues: see [`crate::BlockPort::image`].
#[derive(Debug, Clone)]
pub struct InPlacePass {
    vm: VmId,
    /// None where requests wait in no device.
    gate: Option<(Arc<Gate>, Arc<AtomicU64>)>,
}

/// A read in place that is under way. Dropping it gives its place back.
#[derive(Debug)]
pub struct InPlaceRead<'a>(Option<&'a Gate>);

impl InPlacePass {
    pub(crate) fn new(gate: Option<Arc<Gate>>, vm: VmId) -> Self {
        let with_bytes = |gate: Arc<Gate>| {
            let unpaid = gate.unpaid(vm);
            (gate, unpaid)
        };
        Self { vm, gate: gate.map(with_bytes) }
    }

    /// Takes a place in the device for one read. It is never waited for, as a queue does not wait
    /// for its first one.
    pub fn begin(&self, now_ns: u64) -> InPlaceRead<'_> {
        let gate = self.gate.as_ref().map(|(gate, _)| &**gate);
        if let Some(gate) = gate {
            gate.note_use(self.vm, now_ns);
            gate.in_flight.fetch_add(1, Ordering::Relaxed);
        }
        InPlaceRead(gate)
    }

    /// Has the VM's queues on the device owe bytes that were read.
    pub fn charge(&self, bytes: u64) {
        if let Some((_, unpaid)) = &self.gate {
            unpaid.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for InPlaceRead<'_> {
    fn drop(&mut self) {
        self.0.into_iter().for_each(|gate| _ = gate.in_flight.fetch_sub(1, Ordering::Relaxed));
    }
}

/// Place of one queue at a gate. Dropping it gives back its part of the gate's limit.
#[derive(Debug)]
pub(crate) struct GatePass {
    gate: Option<Arc<Gate>>,
    vm: VmId,
    held: u32,
    /// Bytes that the VM has read in place, and that no queue has found yet.
    unpaid: Arc<AtomicU64>,
}

impl GatePass {
    /// `gate`: `None` where requests wait in no device.
    pub fn new(gate: Option<Arc<Gate>>, vm: VmId) -> Self {
        let unpaid = gate.as_ref().map_or_else(Arc::default, |gate| gate.unpaid(vm));
        Self { gate, vm, held: 0, unpaid }
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
        let ledger = ledger.device(gate.device, self.vm);
        if self.unpaid.load(Ordering::Relaxed) > 0 {
            // The account has been charged already, and so has the sidecore's ledger.
            let bytes = self.unpaid.swap(0, Ordering::Relaxed);
            ledger.debit(self.vm, Spent { bytes, requests: 0 }, now_ns);
        }
        ledger.allowance(self.vm, now_ns)
    }

    /// Notes that work waits which [`GatePass::allowance`] does not allow.
    pub fn wait(&self, ledger: &mut Ledger, now_ns: u64) {
        let Some(gate) = &self.gate else { return };
        gate.note_use(self.vm, now_ns);
        let ledger = ledger.device(gate.device, self.vm);
        match ledger.allowance(self.vm, now_ns).is_none() {
            true => ledger.held_back(self.vm, now_ns),
            false => ledger.blocked(self.vm),
        }
    }

    /// Charges the VM for requests that are given to the device.
    pub fn charge(&self, ledger: &mut Ledger, spent: Spent, more: bool, now_ns: u64) {
        let Some(gate) = &self.gate else { return };
        gate.note_use(self.vm, now_ns);
        ledger.device(gate.device, self.vm).charge(self.vm, spent, more, now_ns);
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
        gate.note_use(a.vm, 0);
        a.hold(200);
        assert_eq!(a.room(0), u32::MAX);
        gate.note_use(b.vm, 10);
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
    fn a_read_in_place_has_a_place_and_makes_the_device_shared() {
        let accounts = Accounts::default();
        let vm = |name| accounts.open(name, Settings::default()).id();
        let gate = Arc::new(Gate::new(2));
        let mut queue = GatePass::new(Some(gate.clone()), vm("a"));
        gate.note_use(queue.vm, 0);
        queue.hold(SHARED_DEPTH as usize - 1);
        let pass = InPlacePass::new(Some(gate.clone()), vm("b"));
        assert_eq!(queue.room(10), u32::MAX);
        let read = pass.begin(10);
        assert_eq!((gate.in_flight(), queue.room(10)), (SHARED_DEPTH, 0));
        drop(read);
        assert_eq!(queue.room(10), 1);
        // Where there is no device, nothing is counted.
        let pass = InPlacePass::new(None, queue.vm);
        pass.charge(5);
        let _read = pass.begin(20);
        assert_eq!(gate.in_flight(), SHARED_DEPTH - 1);
    }

    /// Found by one of the queues, and once.
    #[test]
    fn what_was_read_in_place_is_owed_on_the_device_by_the_same_vm() {
        let accounts = Accounts::default();
        let mut ledger = Ledger::default();
        let all = ["a", "b"].map(|name| accounts.open(name, Settings::default()));
        all.iter().for_each(|account| ledger.enrol(account.clone()));
        let gate = Arc::new(Gate::new(3));
        let queue = |n: usize| GatePass::new(Some(gate.clone()), all[n].id());
        let queues = [queue(0), queue(0), queue(1)];
        let pass = InPlacePass::new(Some(gate.clone()), all[0].id());
        pass.charge(7 << 20);
        queues[2].credit(&mut ledger, 0);
        assert_eq!(pass.gate.as_ref().unwrap().1.load(Ordering::Relaxed), 7 << 20);
        let has_debt = |ledger: &mut Ledger, n: usize| {
            // More than a burst while another VM waits: see `Ledger::may_receive`.
            let device = ledger.device(3, all[n].id());
            device.charge(all[1 - n].id(), Spent { bytes: 1, requests: 1 }, true, 0);
            device.charge(all[n].id(), Spent { bytes: 16 << 20, requests: 1 }, true, 0);
            device.held_back(all[n].id(), 0);
            device.end_round(0);
            !device.may_receive(all[n].id(), 0)
        };
        queues[0].credit(&mut ledger, 0);
        assert_eq!(pass.gate.as_ref().unwrap().1.load(Ordering::Relaxed), 0);
        assert!(has_debt(&mut ledger, 0));
        assert!(!has_debt(&mut ledger, 1));
        // Nothing of it is counted a second time.
        ledger.settle(0);
        assert_eq!(all[0].stats.charged_bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_device_has_one_gate_while_it_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(dir.path().join(name)).unwrap();
        let (a, b) = (Gate::of(&file("a")).unwrap(), Gate::of(&file("b")).unwrap());
        assert!(Arc::ptr_eq(&a, &b));
    }
}
