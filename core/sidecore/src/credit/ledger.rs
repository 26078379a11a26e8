//! The ledger of one sidecore: the credits of every VM there.

use std::collections::VecDeque;
use std::sync::Arc;

use super::account::Account;
use super::devices::Devices;
use super::entry::Entry;
use super::turn::Turn;
use super::{Allowance, LONE_TURN_BYTES, LOOK_INTERVAL_NS, LOOK_VMS, Spent, VmId};

/// VMs that took part in a round.
#[derive(Debug, Clone, Copy)]
struct Crowd {
    /// First VM of the round.
    first: VmId,
    /// Whether there was another VM.
    many: bool,
}

impl Crowd {
    const NOBODY: Self = Self { first: VmId::NONE, many: false };

    #[inline]
    fn join(&mut self, vm: VmId) {
        if self.first == VmId::NONE {
            self.first = vm;
        }
        self.many |= self.first != vm;
    }

    #[inline]
    fn is_only(&self, vm: VmId) -> bool {
        !self.many && (self.first == vm || self.first == VmId::NONE)
    }
}

/// State of the round so far.
#[derive(Debug, Clone, Copy)]
struct Round {
    crowd: Crowd,
    /// VMs with credit that have more to do than they were served.
    backlogged: usize,
    /// Least rise of the level that lets a held-back VM go on; 0: none was held back.
    needed: u64,
}

impl Round {
    const EMPTY: Self = Self { crowd: Crowd::NOBODY, backlogged: 0, needed: 0 };

    #[inline]
    fn want(&mut self, rise: u64) {
        if self.needed == 0 || rise < self.needed {
            self.needed = rise;
        }
    }
}

/// Ledger of one sidecore: the credits of every VM there. It belongs to one thread, which hands it
/// to its workers.
#[derive(Debug)]
pub struct Ledger {
    /// Bytes earned per unit of weight, with fraction bits; wraps around, which costs a VM that
    /// was idle for that long its saved burst.
    level: u64,
    /// Boxed: a ledger of a device knows few of many VMs.
    entries: Vec<Option<Box<Entry>>>,
    round: Round,
    /// Number of the round.
    number: u64,
    last: Crowd,
    /// Largest weight of the VMs that were active at the last look.
    top: u32,
    /// Largest weight of the VMs that were active since the last look.
    top_seen: u32,
    /// VMs had to wait for others in the last round.
    contended: bool,
    turn: Turn,
    lot: u64,
    /// Active VMs, to be looked at in turn.
    listed: VecDeque<VmId>,
    looked_ns: u64,
    rises: u64,
    /// Ledger of a device: it only knows weights.
    is_device: bool,
    pub(super) devices: Devices,
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            level: 0,
            entries: Vec::new(),
            round: Round::EMPTY,
            number: 1,
            last: Crowd::NOBODY,
            top: 0,
            top_seen: 0,
            contended: false,
            turn: Turn::default(),
            lot: 0,
            listed: VecDeque::new(),
            looked_ns: 0,
            rises: 0,
            is_device: false,
            devices: Devices::default(),
        }
    }
}

impl Ledger {
    /// Takes an account in, or updates its settings. Not for the data path: it allocates,
    /// and looks at every account.
    pub fn enrol(&mut self, account: Arc<Account>) {
        let id = account.id();
        self.devices.of(id).for_each(|device| device.enrol(Arc::clone(&account)));
        if self.entries.len() <= id.at() {
            self.entries.resize_with(id.at() + 1, || None);
            self.listed.reserve(self.entries.len());
        }
        match &mut self.entries[id.at()] {
            Some(entry) if Arc::ptr_eq(&entry.account, &account) => {}
            place => *place = Some(Box::new(Entry::new(account, self.level, self.is_device))),
        }
        self.rescale();
    }

    /// Forgets an account.
    pub fn expel(&mut self, vm: VmId) {
        self.devices.of(vm).for_each(|device| device.expel(vm));
        self.devices.drop_idle();
        self.listed.retain(|&listed| listed != vm);
        if let Some(mut entry) = self.entries.get_mut(vm.at()).and_then(Option::take) {
            entry.look(self.looked_ns);
        }
        self.rescale();
    }

    fn rescale(&mut self) {
        let weights = self.entries.iter().flatten().map(|e| e.account.weight());
        let top = weights.max().unwrap_or(1);
        let level = self.level;
        self.entries.iter_mut().flatten().for_each(|e| e.scale(top, level));
    }

    /// The ledger of a device below, for what waits for that device and not for this thread: who
    /// has used up its share of a slow disk may still use the network. Made when it is first asked
    /// for, and it gets to know `vm`.
    #[inline]
    pub fn device(&mut self, number: u64, vm: VmId) -> &mut Self {
        let device = self.devices.wake(number);
        if !device.knows(vm)
            && let Some(Some(entry)) = self.entries.get(vm.at())
        {
            device.enrol(Arc::clone(&entry.account));
        }
        device
    }

    pub(super) fn of_device() -> Self {
        Self { is_device: true, ..Self::default() }
    }

    #[inline]
    pub(super) fn knows(&self, vm: VmId) -> bool {
        matches!(self.entries.get(vm.at()), Some(Some(_)))
    }

    pub(super) fn knows_any(&self) -> bool {
        self.entries.iter().any(Option::is_some)
    }

    /// Whether no VM was active in the last round, or waits, or has counts to report.
    pub(super) fn is_idle(&self) -> bool {
        self.last.first == VmId::NONE && self.listed.is_empty()
    }

    #[inline]
    fn entry(&mut self, vm: VmId) -> Option<&mut Entry> {
        self.entries.get_mut(vm.at())?.as_deref_mut()
    }

    /// Allowance of `vm` now. Asked once before a batch is taken from one of its queues. A worker
    /// that finds work while nothing is allowed calls [`Ledger::held_back`]. A VM that is not
    /// enrolled may take everything.
    #[inline]
    pub fn allowance(&mut self, vm: VmId, now_ns: u64) -> Allowance {
        let is_alone = self.last.is_only(vm) && self.round.crowd.is_only(vm);
        let (mut level, top, number) = (self.level, self.top, self.number);
        let is_device = self.is_device;
        let most = if self.is_crowded() { self.turn.most_bytes() } else { LONE_TURN_BYTES };
        let Some(entry) = self.entry(vm) else { return Allowance::UNLIMITED };
        let turn = if is_device { u64::MAX } else { entry.turn_left(most, number) };
        entry.refill(level, top);
        if !is_alone {
            return entry.allowance(now_ns).within(turn);
        }
        // No other VM wants anything: none has to be waited for.
        if entry.is_short() {
            level = level.wrapping_add(entry.need_for_burst());
            entry.refill(level, top);
        }
        let allowance = entry.allowance_alone(now_ns).within(turn);
        self.level = level;
        allowance
    }

    /// Whether more than one VM is active. A device has its own order.
    #[inline]
    pub fn is_crowded(&self) -> bool {
        self.listed.len() > 1 && !self.is_device
    }

    /// Notes that work of `vm` waits which [`Ledger::allowance`] does not allow.
    pub fn held_back(&mut self, vm: VmId, now_ns: u64) {
        let top = self.top;
        let Some(entry) = self.entry(vm) else { return };
        if entry.hold(now_ns) {
            let (need, weight) = (entry.need(top), entry.weight());
            self.round.crowd.join(vm);
            self.round.want(need);
            self.top_seen = self.top_seen.max(weight);
        } else if !entry.is_at_ceiling(now_ns) {
            // Its turn is over.
            self.blocked(vm);
        }
        self.list(vm);
    }

    /// Charges a batch that was taken. `more`: the queue has, or may have, more than was taken.
    #[inline]
    pub fn charge(&mut self, vm: VmId, spent: Spent, more: bool, now_ns: u64) {
        let (top, number) = (self.top, self.number);
        self.turn.charge(spent.bytes);
        let Some(entry) = self.entry(vm) else { return };
        entry.charge(spent, number, now_ns);
        let (listed, weight) = (entry.listed, entry.weight());
        // Another of its queues may have said so before this one took the rest of its credit.
        let was = entry.backlogged_in == number;
        let more = (more || was) && !entry.is_at_ceiling(now_ns);
        let need = if more && entry.is_low() { entry.need(top) } else { 0 };
        let is = more && need == 0;
        entry.backlogged_in = if is { number } else { 0 };
        self.round.backlogged = self.round.backlogged + usize::from(is) - usize::from(was);
        self.round.crowd.join(vm);
        self.top_seen = self.top_seen.max(weight);
        if need > 0 {
            self.round.want(need);
        }
        if !listed {
            self.list(vm);
        }
    }

    /// Notes that work of `vm` waits for something else than credit, such as the device below: a VM
    /// without credit must not get some for that.
    pub fn blocked(&mut self, vm: VmId) {
        let (level, top, number) = (self.level, self.top, self.number);
        let Some(entry) = self.entry(vm) else { return };
        entry.refill(level, top);
        let is_new = !entry.is_low() && entry.backlogged_in != number;
        if is_new {
            entry.backlogged_in = number;
        }
        self.round.crowd.join(vm);
        self.round.backlogged += usize::from(is_new);
    }

    /// Whether `vm` may be given bytes that it did not request, such as frames from outside. False
    /// when it owes more than a burst while others have to wait, or is at its ceiling.
    #[inline]
    pub fn may_receive(&mut self, vm: VmId, now_ns: u64) -> bool {
        let (level, top, contended) = (self.level, self.top, self.contended);
        let Some(entry) = self.entry(vm) else { return true };
        entry.refill(level, top);
        if entry.is_at_ceiling(now_ns) {
            return false;
        }
        if !entry.owes_much() {
            return true;
        }
        let need = entry.need_to_receive();
        self.round.crowd.join(vm);
        self.round.want(need);
        !contended
    }

    /// Charges bytes that the VM did not request, such as frames from outside.
    #[inline]
    pub fn debit(&mut self, vm: VmId, spent: Spent, now_ns: u64) {
        self.turn.charge(spent.bytes);
        let Some(entry) = self.entry(vm) else { return };
        entry.debit(spent, now_ns);
        let listed = entry.listed;
        self.round.crowd.join(vm);
        if !listed {
            self.list(vm);
        }
    }

    /// Time until which `vm` is held back by its ceiling: its queues need not be looked at before.
    pub fn until_ns(&mut self, vm: VmId, now_ns: u64) -> Option<u64> {
        let entry = self.entry(vm)?;
        entry.is_at_ceiling(now_ns).then(|| entry.until_ns())
    }

    /// A number below `count` (0 for none) that differs from draw to draw without a pattern: where
    /// to begin, when not all queues of a VM can be served. Each draw advances the generator: a
    /// core draws among its workers, then each worker among its queues, and with one number for
    /// both, some queues would never come first. Without a division: idle rounds draw, too.
    #[inline]
    pub fn draw_below(&mut self, count: usize) -> usize {
        // Knuth's linear congruential generator (MMIX); of its state the upper half is random.
        self.lot = self.lot.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (((self.lot >> 32) * count as u64) >> 32) as usize
    }

    /// Times that the level rose because the VMs with credit had nothing to do.
    pub fn rises(&self) -> u64 {
        self.rises
    }

    /// Ends a round, after every worker was polled once. True when a VM that was held back may go
    /// on: the next round has work.
    pub fn end_round(&mut self, now_ns: u64) -> bool {
        let Round { crowd, backlogged, needed } = std::mem::replace(&mut self.round, Round::EMPTY);
        let rise = needed > 0 && backlogged == 0;
        self.contended = needed > 0 && backlogged > 0;
        if rise {
            self.level = self.level.wrapping_add(needed);
            self.rises += 1;
        }
        self.last = crowd;
        self.number += 1;
        self.top = self.top.max(self.top_seen);
        if now_ns.saturating_sub(self.looked_ns) >= LOOK_INTERVAL_NS {
            self.looked_ns = now_ns;
            self.top = std::mem::take(&mut self.top_seen);
            self.turn.look();
            self.look(LOOK_VMS, now_ns);
        }
        self.devices.end_round(now_ns) || rise
    }

    /// Measures the time of a round for [`super::turn`]; none when a pause, a sleep or a call is in
    /// it.
    #[inline]
    pub(crate) fn round_took(&mut self, took_ns: Option<u64>) {
        self.turn.end_round(took_ns);
    }

    /// Reports all counts to the accounts, before the sidecore sleeps.
    pub fn settle(&mut self, now_ns: u64) {
        self.devices.awake().for_each(|device| device.settle(now_ns));
        self.look(usize::MAX, now_ns);
    }

    /// Notes, between two rounds, that a worker went away, maybe to another sidecore, with requests
    /// in flight or held back. It may have had all the work of its VMs here. Not for the data path:
    /// it looks at every account.
    pub fn worker_left(&mut self, now_ns: u64) {
        self.devices.awake().for_each(|device| device.worker_left(now_ns));
        self.devices.drop_idle();
        self.entries.iter_mut().flatten().for_each(|entry| entry.leave(now_ns));
        self.look(usize::MAX, now_ns);
    }

    fn list(&mut self, vm: VmId) {
        let Some(entry) = self.entry(vm) else { return };
        if !std::mem::replace(&mut entry.listed, true) {
            entry.begin_looks();
            // There is room for every entry: see `enrol`.
            self.listed.push_back(vm);
        }
    }

    /// Looks at the next `max` of the listed VMs; one that was not active since the last look is
    /// taken off.
    fn look(&mut self, max: usize, now_ns: u64) {
        for _ in 0..self.listed.len().min(max) {
            let Some(vm) = self.listed.pop_front() else { return };
            let Some(entry) = self.entry(vm) else { continue };
            let stays = entry.active;
            entry.look(now_ns);
            entry.listed = stays;
            if stays {
                self.listed.push_back(vm);
            }
        }
    }
}
