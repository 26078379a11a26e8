//! One VM in one ledger.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::account::Account;
use super::{
    Allowance, BURST_BYTES, MIN_BURST_BYTES, MIN_QUANTUM_BYTES, OWED_SHARE, PACE_NS, QUANTUM_BYTES,
    Spent, UNSETTLED_BYTES, UNSETTLED_REQUESTS,
};

/// Fraction bits of the level: a VM of the largest weight earns less than two bytes of a quantum
/// for each unit of it.
const LEVEL_BITS: u32 = 8;

/// Largest rise of the level that is told from a larger one: it fills every debt there can be.
const MAX_RISE: u64 = 1 << 44;

/// What happened here and was not told to the account yet.
#[derive(Debug, Default)]
struct Untold {
    bytes: u64,
    requests: u64,
    refills: u64,
    held_by_weight: u64,
    held_by_weight_ns: u64,
    held_by_ceiling: u64,
    held_by_ceiling_ns: u64,
}

/// Where one ceiling stands.
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

/// Work that waits for the same reason, and since when.
#[derive(Debug, Default, Clone, Copy)]
struct Wait {
    since_ns: Option<u64>,
    /// Somebody found it waiting since the last look.
    seen: bool,
}

impl Wait {
    /// It waits. True when it did not before.
    fn go_on(&mut self, now_ns: u64) -> bool {
        self.seen = true;
        let is_new = self.since_ns.is_none();
        self.since_ns = self.since_ns.or(Some(now_ns));
        is_new
    }

    fn is_on(&self) -> bool {
        self.since_ns.is_some()
    }

    /// It waits no longer: for how long it did.
    fn end(&mut self, now_ns: u64) -> u64 {
        self.since_ns.take().map_or(0, |since_ns| now_ns.saturating_sub(since_ns))
    }

    /// How long it has waited since the last look. One that nobody found waiting since then is over:
    /// its queue was stopped.
    fn look(&mut self, now_ns: u64) -> u64 {
        let waits = std::mem::take(&mut self.seen) && self.is_on();
        let waited_ns = self.end(now_ns);
        self.since_ns = waits.then_some(now_ns);
        if waits { waited_ns } else { 0 }
    }
}

/// The part of `of` that falls to `weight` beside `top`.
fn part(of: i64, weight: i64, top: u32) -> i64 {
    (of * weight / i64::from(top.max(1))).min(of)
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Entry {
    weight: i64,
    burst: i64,
    /// The level at which it was last looked at.
    seen: u64,
    balance: i64,
    /// Ran out of credit, and has not earned a quantum since.
    low: bool,
    has_floor: bool,
    has_ceiling: bool,
    /// What it was charged elsewhere, and what came by itself.
    owed: i64,
    /// What went beyond the floor's last allowance.
    floor_debt: u64,
    /// At its ceiling until then.
    until_ns: u64,
    /// What the ceilings' buckets have not given yet.
    debts: Debts,
    by_weight: Wait,
    by_ceiling: Wait,
    untold: Untold,
    /// The account's total when it was last looked at.
    seen_total: u64,
    /// Did anything since the last look.
    pub(super) active: bool,
    /// The last round in which it had more to do than it was served, with credit left.
    pub(super) backlogged_in: u64,
    /// The last round in which it was charged, and how much then.
    turn: (u64, u64),
    /// In the list of those to look at.
    pub(super) listed: bool,
    /// In the ledger of a device, beside that of the sidecore.
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
            floor_debt: 0,
            until_ns: 0,
            debts: Debts::default(),
            by_weight: Wait::default(),
            by_ceiling: Wait::default(),
            untold: Untold::default(),
            seen_total: 0,
            active: false,
            backlogged_in: 0,
            turn: (0, 0),
            listed: false,
            is_device,
            account,
        }
    }

    /// Takes over the account's settings. `top`: the largest weight in the ledger.
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
        // Found again below, from what is owed by the new rate.
        self.until_ns = 0;
        if !self.has_ceiling {
            self.debts = Debts::default();
        }
    }

    /// Takes in what was earned since the level was last looked at. `top`: see
    /// [`Entry::quantum`].
    #[inline]
    pub(super) fn refill(&mut self, level: u64, top: u32) {
        let rise = level.wrapping_sub(self.seen);
        if rise == 0 {
            return;
        }
        self.seen = level;
        // Both factors are bounded: 2^44 * 10,000 is below 2^58.
        let earned = (rise.min(MAX_RISE) as i64 * self.weight) >> LEVEL_BITS;
        let kept_back = self.owed.min(earned - earned / OWED_SHARE);
        self.owed -= kept_back;
        self.balance = (self.balance + earned - kept_back).min(self.burst);
        if self.low && self.balance >= self.quantum(top) {
            self.low = false;
            self.untold.refills += 1;
        }
    }

    fn rise_for(&self, earned: i64) -> u64 {
        ((earned.max(1) as u64) << LEVEL_BITS).div_ceil(self.weight as u64)
    }

    /// The rise of the level that brings it up to `balance`, with what is kept back.
    fn rise_to(&self, balance: i64) -> u64 {
        let short = (balance - self.balance).max(1);
        self.rise_for(short + self.owed.min(short * (OWED_SHARE - 1)))
    }

    /// What it must have to go on after it ran out. `top`: the largest weight of those that do
    /// anything.
    fn quantum(&self, top: u32) -> i64 {
        part(QUANTUM_BYTES, self.weight, top).max(MIN_QUANTUM_BYTES)
    }

    /// The rise of the level that lets it go on.
    pub(super) fn need(&self, top: u32) -> u64 {
        self.rise_to(self.quantum(top))
    }

    /// The rise of the level that fills it up.
    pub(super) fn need_for_burst(&self) -> u64 {
        self.rise_to(self.burst)
    }

    /// The rise of the level after which it may receive again.
    pub(super) fn need_to_receive(&self) -> u64 {
        let over = (self.owed - self.burst).max(1);
        self.rise_for(over + over / (OWED_SHARE - 1) + 1)
    }

    /// Whether it has used up the better part of what it can have saved.
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

    /// Whether it owes so much that nothing more should come by itself.
    #[inline]
    pub(super) fn owes_much(&self) -> bool {
        self.owed > self.burst
    }

    /// What it may take now, as the only one that wants anything.
    pub(super) fn allowance_alone(&mut self, now_ns: u64) -> Allowance {
        if self.by_weight.is_on() {
            self.let_go_by_weight(now_ns);
        }
        if self.has_ceiling { self.below_ceiling(now_ns) } else { Allowance::UNLIMITED }
    }

    /// What it may take now by weight, floor and ceiling; it was refilled.
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
        self.untold.held_by_weight_ns += self.by_weight.end(now_ns);
    }

    fn let_go_by_ceiling(&mut self, now_ns: u64) {
        self.untold.held_by_ceiling_ns += self.by_ceiling.end(now_ns);
    }

    /// What its floor gives: worth a batch, or nothing.
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
                // What comes in beyond a burst is lost: a long debt is paid second by second.
                let enough = if *debt > 0 { 1 } else { bucket.pace(PACE_NS) };
                self.until_ns = self.until_ns.max(bucket.when_ns(enough, now_ns));
            }
        }
    }

    /// What is left of its turn of `most` bytes in round `number`.
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

    /// Uses up what there is of the floor, whether it was needed or not. It is charged as well, but
    /// makes no more than a burst of debt: what is granted need not be paid back later. Returns
    /// what was charged.
    fn pay_from_floor(&mut self, bytes: u64, now_ns: u64) -> i64 {
        let due = bytes.saturating_add(self.floor_debt);
        let floor = &self.account.floor;
        // Counted once, by the sidecore's ledger; what the device's lets through is covered by it.
        let paid =
            if self.is_device { due.min(floor.available(now_ns)) } else { floor.take(due, now_ns) };
        // Only what the floor let through is its debt.
        self.floor_debt = if self.low { due - paid } else { 0 };
        let paid = paid.min(bytes) as i64;
        let lowest = self.balance.min(-self.burst);
        self.balance = (self.balance - paid).max(lowest);
        paid
    }

    /// Charges what came by itself.
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
            self.untold.bytes += spent.bytes;
            self.untold.requests += u64::from(spent.requests);
        }
    }

    /// It has work and may not do it. True when that is for want of credit.
    pub(super) fn hold(&mut self, now_ns: u64) -> bool {
        self.active = true;
        if self.is_at_ceiling(now_ns) {
            self.untold.held_by_ceiling += u64::from(self.by_ceiling.go_on(now_ns));
            return false;
        }
        if self.low {
            self.untold.held_by_weight += u64::from(self.by_weight.go_on(now_ns));
        }
        self.low
    }

    /// It may have no work here any more: it does not wait until it is found waiting again, and
    /// whoever is charged next, here or elsewhere, finds what the ceilings' buckets have not given
    /// yet.
    pub(super) fn leave(&mut self, now_ns: u64) {
        self.let_go_by_weight(now_ns);
        self.let_go_by_ceiling(now_ns);
        let Debts { bytes, requests } = std::mem::take(&mut self.debts);
        self.account.bytes.owe(bytes, now_ns);
        self.account.requests.owe(requests, now_ns);
    }

    /// Begins to count what others charge it.
    pub(super) fn begin_looks(&mut self) {
        self.seen_total = self.account.stats.charged_bytes.load(Ordering::Relaxed);
    }

    /// Tells the account what happened here, and owes what it was charged elsewhere meanwhile.
    pub(super) fn look(&mut self, now_ns: u64) {
        self.active = false;
        self.untold.held_by_weight_ns += self.by_weight.look(now_ns);
        self.untold.held_by_ceiling_ns += self.by_ceiling.look(now_ns);
        let untold = std::mem::take(&mut self.untold);
        let stats = &self.account.stats;
        let add = |counter: &AtomicU64, n: u64| {
            if n > 0 {
                counter.fetch_add(n, Ordering::Relaxed);
            }
        };
        add(&stats.charged_requests, untold.requests);
        add(&stats.refills, untold.refills);
        add(&stats.held_by_weight, untold.held_by_weight);
        add(&stats.held_by_weight_ns, untold.held_by_weight_ns);
        add(&stats.held_by_ceiling, untold.held_by_ceiling);
        add(&stats.held_by_ceiling_ns, untold.held_by_ceiling_ns);
        if self.is_device {
            return;
        }
        // Not a counter of one writer: every ledger adds, once in a look.
        let before = stats.charged_bytes.fetch_add(untold.bytes, Ordering::Relaxed);
        let elsewhere = before.wrapping_sub(self.seen_total);
        self.seen_total = before.wrapping_add(untold.bytes);
        let elsewhere = i64::try_from(elsewhere).unwrap_or(0).min(i64::MAX / 4);
        // What could not be kept back within two looks is forgotten, so that a VM that is busy
        // elsewhere while nobody competes here does not pay for it for long.
        self.owed = (self.owed + elsewhere).min((2 * elsewhere).max(4 * self.burst));
    }
}
