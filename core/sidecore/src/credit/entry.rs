//! Entry of one VM in one ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::account::Account;
use super::{
    Allowance, BURST_BYTES, BYTES_PER_NS, MIN_BURST_BYTES, MIN_QUANTUM_BYTES, OWED_SHARE, PACE_NS,
    QUANTUM_BYTES, Spent, UNSETTLED_BYTES, UNSETTLED_REQUESTS,
};

/// Fraction bits of the level: a VM of the largest weight earns less than two bytes of a quantum
/// for each unit of it.
const LEVEL_BITS: u32 = 8;

/// Largest rise of the level that counts: it fills every debt there can be.
const MAX_RISE: u64 = 1 << 44;

/// Counts that were not reported to the account yet.
#[derive(Debug, Default)]
struct Unreported {
    bytes: u64,
    requests: u64,
    refills: u64,
    held_by_weight: u64,
    held_by_weight_ns: u64,
    held_by_ceiling: u64,
    held_by_ceiling_ns: u64,
}

/// Debts to the ceilings: bytes and requests that their buckets have not given yet.
#[derive(Debug, Default, Clone, Copy)]
struct Debts {
    bytes: u64,
    requests: u64,
}

impl Debts {
    fn add(&mut self, spent: Spent) {
        self.bytes = self.bytes.saturating_add(spent.bytes);
        self.requests = self.requests.saturating_add(spent.requests.into());
    }
}

/// Wait of a VM's work for one reason, with its start.
#[derive(Debug, Default, Clone, Copy)]
struct Wait {
    since_ns: Option<u64>,
    /// A worker found it waiting since the last look.
    seen: bool,
}

impl Wait {
    /// Notes that it waits. True when it did not wait before.
    fn go_on(&mut self, now_ns: u64) -> bool {
        self.seen = true;
        let is_new = self.since_ns.is_none();
        self.since_ns = self.since_ns.or(Some(now_ns));
        is_new
    }

    fn is_on(&self) -> bool {
        self.since_ns.is_some()
    }

    /// Ends the wait; returns its time.
    fn end(&mut self, now_ns: u64) -> u64 {
        self.since_ns.take().map_or(0, |since_ns| now_ns.saturating_sub(since_ns))
    }

    /// Returns the time that it has waited since the last look. A wait that no worker found since
    /// then is over: its queue was stopped.
    fn look(&mut self, now_ns: u64) -> u64 {
        let waits = std::mem::take(&mut self.seen) && self.is_on();
        let waited_ns = self.end(now_ns);
        self.since_ns = waits.then_some(now_ns);
        if waits { waited_ns } else { 0 }
    }
}

/// Part of `of` in proportion of `weight` to `top`.
fn part(of: i64, weight: i64, top: u32) -> i64 {
    (of * weight / i64::from(top.max(1))).min(of)
}

/// Credit of one VM in one ledger.
#[derive(Debug)]
pub(super) struct Entry {
    weight: i64,
    burst: i64,
    /// Level of the ledger at the last refill.
    seen: u64,
    balance: i64,
    /// Whether the VM ran out of credit, and has not earned a quantum since.
    low: bool,
    has_floor: bool,
    has_ceiling: bool,
    /// Bytes that it was charged elsewhere, and bytes that it did not request.
    owed: i64,
    /// Bytes for CPU time of threads that are no sidecores. Apart, since nothing is refused for it.
    owed_time: i64,
    /// Bytes beyond the floor's last allowance.
    floor_debt: u64,
    /// Time until which it is at its ceiling.
    until_ns: u64,
    /// Bytes and requests that the ceilings' buckets have not given yet.
    debts: Debts,
    by_weight: Wait,
    by_ceiling: Wait,
    unreported: Unreported,
    /// Total of the account at the last look.
    seen_total: u64,
    /// CPU time of the account at the last look.
    seen_thread_ns: u64,
    /// Whether the VM was active since the last look.
    pub(super) active: bool,
    /// Last round in which it had more to do than it was served, with credit left.
    pub(super) backlogged_in: u64,
    /// Last round in which it was charged, and the bytes charged in it.
    turn: (u64, u64),
    /// Whether the VM is in the list of those to look at.
    pub(super) listed: bool,
    /// Whether the entry is in the ledger of a device, beside that of the sidecore.
    is_device: bool,
    pub(super) account: Arc<Account>,
}

impl Entry {
    pub(super) fn new(account: Arc<Account>, level: u64, is_device: bool) -> Self {
        Self {
            weight: 1,
            burst: BURST_BYTES,
            seen: level,
            balance: BURST_BYTES,
            low: false,
            has_floor: false,
            has_ceiling: false,
            owed: 0,
            owed_time: 0,
            floor_debt: 0,
            until_ns: 0,
            debts: Debts::default(),
            by_weight: Wait::default(),
            by_ceiling: Wait::default(),
            unreported: Unreported::default(),
            seen_total: 0,
            seen_thread_ns: 0,
            active: false,
            backlogged_in: 0,
            turn: (0, 0),
            listed: false,
            is_device,
            account,
        }
    }

    /// Applies the account's settings. `top`: the largest weight in the ledger.
    pub(super) fn scale(&mut self, top: u32, level: u64) {
        self.refill(level, top);
        let weight = i64::from(self.account.weight());
        self.weight = weight;
        self.burst = part(BURST_BYTES, weight, top).max(MIN_BURST_BYTES);
        self.balance = self.balance.min(self.burst);
        let Account { floor, bytes, requests, .. } = &*self.account;
        self.has_floor = floor.rate().is_some();
        // Counted once, by the sidecore's ledger.
        self.has_ceiling = !self.is_device && (bytes.rate().is_some() || requests.rate().is_some());
        // Set anew by the next settlement, by the new rate.
        self.until_ns = 0;
        if !self.has_ceiling {
            self.debts = Debts::default();
        }
    }

    /// Adds the credit that was earned since the last refill. `top`: see [`Entry::quantum`].
    #[inline]
    pub(super) fn refill(&mut self, level: u64, top: u32) {
        let rise = level.wrapping_sub(self.seen);
        if rise == 0 {
            return;
        }
        self.seen = level;
        // Both factors are bounded: 2^44 * 10,000 is below 2^58.
        let earned = (rise.min(MAX_RISE) as i64 * self.weight) >> LEVEL_BITS;
        let most = earned - earned / OWED_SHARE;
        let kept_back = self.owed.min(most);
        self.owed -= kept_back;
        let kept_for_time = self.owed_time.min(most - kept_back);
        self.owed_time -= kept_for_time;
        self.balance = (self.balance + earned - kept_back - kept_for_time).min(self.burst);
        if self.low && self.balance >= self.quantum(top) {
            self.low = false;
            self.unreported.refills += 1;
        }
    }

    fn rise_for(&self, earned: i64) -> u64 {
        ((earned.max(1) as u64) << LEVEL_BITS).div_ceil(self.weight as u64)
    }

    /// Rise of the level that brings it up to `balance`, with the part that is kept back.
    fn rise_to(&self, balance: i64) -> u64 {
        let short = (balance - self.balance).max(1);
        self.rise_for(short + (self.owed + self.owed_time).min(short * (OWED_SHARE - 1)))
    }

    /// Balance that it needs to go on after it ran out. `top`: the largest weight of the active
    /// VMs.
    fn quantum(&self, top: u32) -> i64 {
        part(QUANTUM_BYTES, self.weight, top).max(MIN_QUANTUM_BYTES)
    }

    /// Rise of the level that lets it go on.
    pub(super) fn need(&self, top: u32) -> u64 {
        self.rise_to(self.quantum(top))
    }

    /// Rise of the level that fills it up to its burst.
    pub(super) fn need_for_burst(&self) -> u64 {
        self.rise_to(self.burst)
    }

    /// Rise of the level after which it may receive again.
    pub(super) fn need_to_receive(&self) -> u64 {
        let over = (self.owed - self.burst).max(1);
        self.rise_for(over + over / (OWED_SHARE - 1) + 1)
    }

    /// Whether it has less than half of its burst.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.balance < self.burst / 2
    }

    pub(super) fn weight(&self) -> u32 {
        self.weight as u32
    }

    #[inline]
    pub(super) fn is_low(&self) -> bool {
        self.low
    }

    #[inline]
    pub(super) fn is_at_ceiling(&self, now_ns: u64) -> bool {
        self.has_ceiling && now_ns < self.until_ns
    }

    pub(super) fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// Whether it owes more than a burst: it should not be given bytes that it did not request.
    #[inline]
    pub(super) fn owes_much(&self) -> bool {
        self.owed > self.burst
    }

    /// Allowance now, of the only VM that wants anything.
    pub(super) fn allowance_alone(&mut self, now_ns: u64) -> Allowance {
        if self.by_weight.is_on() {
            self.let_go_by_weight(now_ns);
        }
        if self.has_ceiling { self.below_ceiling(now_ns) } else { Allowance::UNLIMITED }
    }

    /// Allowance now by weight, floor and ceiling; the entry was refilled.
    #[inline]
    pub(super) fn allowance(&mut self, now_ns: u64) -> Allowance {
        let mut allowance = Allowance::UNLIMITED;
        if self.has_ceiling {
            allowance = self.below_ceiling(now_ns);
            if allowance.is_none() {
                return Allowance::NONE;
            }
        }
        let bytes = match self.low {
            false => self.balance as u64,
            true if self.has_floor => self.below_floor(now_ns),
            true => return Allowance::NONE,
        };
        if self.by_weight.is_on() && bytes > 0 {
            self.let_go_by_weight(now_ns);
        }
        Allowance { bytes: allowance.bytes.min(bytes), ..allowance }
    }

    #[cold]
    fn let_go_by_weight(&mut self, now_ns: u64) {
        self.unreported.held_by_weight_ns += self.by_weight.end(now_ns);
    }

    fn let_go_by_ceiling(&mut self, now_ns: u64) {
        self.unreported.held_by_ceiling_ns += self.by_ceiling.end(now_ns);
    }

    /// Bytes that the floor allows: worth a batch, or none.
    fn below_floor(&self, now_ns: u64) -> u64 {
        let floor = &self.account.floor;
        let here = floor.available(now_ns).saturating_sub(self.floor_debt);
        let worth = floor.pace(PACE_NS).min(MIN_QUANTUM_BYTES as u64);
        if here >= worth { here.min(QUANTUM_BYTES as u64) } else { 0 }
    }

    fn below_ceiling(&mut self, now_ns: u64) -> Allowance {
        if now_ns < self.until_ns {
            return Allowance::NONE;
        }
        self.settle_ceiling(now_ns);
        if now_ns < self.until_ns {
            return Allowance::NONE;
        }
        self.let_go_by_ceiling(now_ns);
        let Account { bytes, requests, .. } = &*self.account;
        let left = |bucket: &super::bucket::Bucket| match bucket.rate() {
            Some(_) => bucket.available(now_ns),
            None => u64::MAX,
        };
        let requests = u32::try_from(left(requests)).unwrap_or(u32::MAX);
        Allowance { bytes: left(bytes), requests }
    }

    /// Pays debts to the ceilings' buckets. One that cannot be paid, or an empty bucket, holds it
    /// back until there is enough for some time.
    fn settle_ceiling(&mut self, now_ns: u64) {
        let Account { bytes, requests, .. } = &*self.account;
        let pairs = [(bytes, &mut self.debts.bytes), (requests, &mut self.debts.requests)];
        for (bucket, debt) in pairs {
            if bucket.rate().is_none() {
                *debt = 0;
                continue;
            }
            *debt -= bucket.owe(*debt, now_ns);
            if *debt > 0 || bucket.available(now_ns) == 0 {
                // Tokens beyond a burst are lost: a long debt is paid second by second.
                let enough = if *debt > 0 { 1 } else { bucket.pace(PACE_NS) };
                self.until_ns = self.until_ns.max(bucket.when_ns(enough, now_ns));
            }
        }
    }

    /// Bytes left of its turn of `most` bytes in round `number`.
    #[inline]
    pub(super) fn turn_left(&self, most: u64, number: u64) -> u64 {
        let (charged_in, bytes) = self.turn;
        if charged_in == number { most.saturating_sub(bytes) } else { most }
    }

    /// Charges a batch of round `number`.
    #[inline]
    pub(super) fn charge(&mut self, spent: Spent, number: u64, now_ns: u64) {
        self.count(spent);
        let (charged_in, before) = self.turn;
        let before = if charged_in == number { before } else { 0 };
        self.turn = (number, before.saturating_add(spent.bytes));
        let mut bytes = i64::try_from(spent.bytes).unwrap_or(i64::MAX);
        if self.has_floor {
            bytes -= self.pay_from_floor(spent.bytes, now_ns);
        }
        self.balance = self.balance.saturating_sub(bytes);
        self.low |= self.balance <= 0;
        if self.has_ceiling {
            self.debts.add(spent);
            self.settle_ceiling(now_ns);
        }
    }

    /// Uses up the bytes of the floor, whether they were needed or not. They are charged as well,
    /// but make no more than a burst of debt: granted bytes need not be paid back later. Returns
    /// the bytes charged.
    fn pay_from_floor(&mut self, bytes: u64, now_ns: u64) -> i64 {
        let due = bytes.saturating_add(self.floor_debt);
        let floor = &self.account.floor;
        // Counted once, by the sidecore's ledger, which also covers the bytes that the device's
        // allows.
        let paid =
            if self.is_device { due.min(floor.available(now_ns)) } else { floor.take(due, now_ns) };
        // Only bytes that the floor allowed are its debt.
        self.floor_debt = if self.low { due - paid } else { 0 };
        let paid = paid.min(bytes) as i64;
        let lowest = self.balance.min(-self.burst);
        self.balance = (self.balance - paid).max(lowest);
        paid
    }

    /// Charges bytes that it did not request.
    #[inline]
    pub(super) fn debit(&mut self, spent: Spent, now_ns: u64) {
        self.count(spent);
        let most = 4 * self.burst;
        let bytes = i64::try_from(spent.bytes).unwrap_or(most).min(most);
        self.owed = self.owed.max((self.owed + bytes).min(most));
        if self.has_ceiling {
            self.debts.add(spent);
            if self.debts.bytes > UNSETTLED_BYTES || self.debts.requests > UNSETTLED_REQUESTS {
                self.settle_ceiling(now_ns);
            }
        }
    }

    #[inline]
    fn count(&mut self, spent: Spent) {
        self.active = true;
        if !self.is_device {
            self.unreported.bytes += spent.bytes;
            self.unreported.requests += u64::from(spent.requests);
        }
    }

    /// Notes that it has work which it may not do. True when that is for want of credit.
    pub(super) fn hold(&mut self, now_ns: u64) -> bool {
        self.active = true;
        if self.is_at_ceiling(now_ns) {
            self.unreported.held_by_ceiling += u64::from(self.by_ceiling.go_on(now_ns));
            return false;
        }
        if self.low {
            self.unreported.held_by_weight += u64::from(self.by_weight.go_on(now_ns));
        }
        self.low
    }

    /// Notes that it may have no work here any more. It does not wait until it is found waiting
    /// again, and its debts to the ceilings go to the shared buckets, for the next charge, here or
    /// elsewhere.
    pub(super) fn leave(&mut self, now_ns: u64) {
        self.let_go_by_weight(now_ns);
        self.let_go_by_ceiling(now_ns);
        let Debts { bytes, requests } = std::mem::take(&mut self.debts);
        self.account.bytes.owe(bytes, now_ns);
        self.account.requests.owe(requests, now_ns);
    }

    /// Begins to count the charges of other ledgers.
    pub(super) fn begin_looks(&mut self) {
        self.seen_total = self.account.stats.charged_bytes.load(Ordering::Relaxed);
        self.seen_thread_ns = self.account.stats.thread_ns.load(Ordering::Relaxed);
    }

    /// Reports the counts to the account, and owes the bytes that it was charged elsewhere
    /// meanwhile.
    pub(super) fn look(&mut self, now_ns: u64) {
        self.active = false;
        self.unreported.held_by_weight_ns += self.by_weight.look(now_ns);
        self.unreported.held_by_ceiling_ns += self.by_ceiling.look(now_ns);
        let unreported = std::mem::take(&mut self.unreported);
        let stats = &self.account.stats;
        let add = |counter: &AtomicU64, n: u64| {
            if n > 0 {
                counter.fetch_add(n, Ordering::Relaxed);
            }
        };
        add(&stats.charged_requests, unreported.requests);
        add(&stats.refills, unreported.refills);
        add(&stats.held_by_weight, unreported.held_by_weight);
        add(&stats.held_by_weight_ns, unreported.held_by_weight_ns);
        add(&stats.held_by_ceiling, unreported.held_by_ceiling);
        add(&stats.held_by_ceiling_ns, unreported.held_by_ceiling_ns);
        if self.is_device {
            return;
        }
        // Not a counter of one writer: every ledger adds, once in a look.
        let before = stats.charged_bytes.fetch_add(unreported.bytes, Ordering::Relaxed);
        let elsewhere = before.wrapping_sub(self.seen_total);
        self.seen_total = before.wrapping_add(unreported.bytes);
        let elsewhere = i64::try_from(elsewhere).unwrap_or(0).min(i64::MAX / 4);
        // Bytes that could not be kept back within two looks are forgotten, so that a VM that is
        // busy elsewhere while no other competes here does not pay for it for long.
        self.owed = (self.owed + elsewhere).min((2 * elsewhere).max(4 * self.burst));
        let thread_ns = stats.thread_ns.load(Ordering::Relaxed);
        let new_ns = thread_ns.wrapping_sub(self.seen_thread_ns);
        self.seen_thread_ns = thread_ns;
        let weighs = i64::try_from(new_ns.saturating_mul(BYTES_PER_NS)).unwrap_or(i64::MAX / 4);
        let weighs = weighs.min(i64::MAX / 4);
        self.owed_time = (self.owed_time + weighs).min((2 * weighs).max(4 * self.burst));
    }
}
