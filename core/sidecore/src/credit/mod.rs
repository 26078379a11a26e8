//! Credits: the VM that may move bytes next, and how many.
//!
//! # Theory of operation
//! Every VM has one [`Account`], whatever its devices are and wherever they run; [`Accounts`] names
//! them. Each sidecore has a [`Ledger`] with an entry per account. An engine asks the ledger once
//! before it takes a batch from a VM's queue, stops when the [`Allowance`] is used up, and charges
//! what it took once. The currency is bytes, at least an engine's minimum for each request, so that
//! small ones are not free.
//!
//! **Weights.** A ledger has a *level*: bytes earned per unit of weight since it began. What a VM
//! has earned is its weight times the rise of the level since it was last looked at, capped at its
//! *burst*; so a rise is one addition, whatever the number of VMs, and nobody saves up while idle.
//! A VM in debt is held back until it has earned a *quantum*. When a round over all workers ends in
//! which a VM was held back, and no VM with credit has more to do than it was served, the level
//! rises by what the next of those held back needs. So nothing waits for VMs that are idle, and a
//! VM that was alone in two rounds is not even made to wait for the end of its round.
//!
//! **Turns.** Each VM may take only a *turn* in a round, from all its queues together, so that a
//! round is short for VMs that wait for answers ([`turn`]). A VM that is the only active one has a
//! longer turn. A VM with credit for more goes on in the next round: turns do not change shares.
//!
//! **Devices.** Work that waits for a slow device does not wait for the thread. So a ledger has
//! another ledger for each such device ([`Ledger::device`]), with weights and floors only: a VM has
//! its share of each resource by itself, and of the thread for everything together.
//!
//! **Several ledgers.** About once a millisecond a ledger publishes what it charged, and finds what
//! the same VMs were charged elsewhere. That is *owed*: it is kept back from what the VM earns
//! here, up to [`OWED_SHARE`] of it, so that no queue starves.
//!
//! **Unrequested bytes** (frames from outside) are owed as well. Beyond a burst of debt, and only
//! while others have to wait, they are refused ([`Ledger::may_receive`]).
//!
//! **Floor.** A VM that moved less than its floor within the last 10 ms is never held back by its
//! weight.
//!
//! **Ceiling.** Bytes and requests per second, in token buckets that all ledgers share and draw
//! from once per batch. A VM at its ceiling is held back until a time that is known, so that its
//! sidecore can sleep.
//!
//! **Outside.** Threads that are no sidecores, such as those of pipes, move bytes for a VM, too.
//! They ask the account's ceilings before ([`Account::ask`]), or are charged afterwards
//! ([`Account::charge`]); ledgers owe it as what the VM was charged elsewhere. Their CPU time
//! ([`Account::charge_time`]) is owed apart: it makes the VM yield by weight, and refuses nothing.
//!
//! **Moves.** A worker keeps nothing of a ledger from one round to the next, and a place in a
//! device's depth is its own: so it moves like any other. The ledger that it leaves
//! ([`Ledger::worker_left`]) tells what it has counted, and hands what a ceiling has not paid yet
//! to the shared bucket. Earned credit and debts stay behind: where the worker comes, its VM has
//! what it has there, a burst if it was never seen.

pub mod account;
pub mod bucket;
mod devices;
mod entry;
pub mod ledger;
mod turn;

#[cfg(test)]
mod tests;

pub use account::{Account, AccountStats, Accounts, Grant, Settings};
pub use ledger::Ledger;

/// Names a VM's account in every ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VmId(pub(crate) u32);

impl VmId {
    /// No VM: never charged, never held back.
    pub const NONE: Self = Self(u32::MAX);

    /// Number, which no other open account has.
    pub fn number(self) -> u32 {
        self.0
    }

    pub(crate) fn at(self) -> usize {
        self.0 as usize
    }
}

impl Default for VmId {
    fn default() -> Self {
        Self::NONE
    }
}

/// Bytes and requests that a VM may take now. The last request may go beyond `bytes`: the excess is
/// a debt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes, each request counted with its minimum.
    pub bytes: u64,
    /// Requests.
    pub requests: u32,
}

impl Allowance {
    /// Nothing now.
    pub const NONE: Self = Self { bytes: 0, requests: 0 };
    /// Everything.
    pub const UNLIMITED: Self = Self { bytes: u64::MAX, requests: u32::MAX };

    /// Whether nothing may be taken.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.bytes == 0 || self.requests == 0
    }

    /// Whether one more request may be taken after those in `spent`.
    #[inline]
    pub fn has_more(&self, spent: &Spent) -> bool {
        spent.bytes < self.bytes && spent.requests < self.requests
    }

    /// The allowance, limited to `bytes`.
    #[inline]
    fn within(self, bytes: u64) -> Self {
        Self { bytes: self.bytes.min(bytes), ..self }
    }

    /// Number of requests of about `each` bytes to take from a queue, `max` at most.
    #[inline]
    pub fn batch(&self, each: u64, max: usize) -> usize {
        let each = each.max(1);
        // Most allowances are enough for all: a multiplication, where a division takes ten times
        // as long.
        let by_bytes = match each.saturating_mul(max as u64) {
            all if self.bytes >= all => max,
            _ => (self.bytes / each) as usize + 1,
        };
        by_bytes.min(self.requests as usize).min(max)
    }
}

/// Cost of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// Bytes, each request counted with its minimum.
    pub bytes: u64,
    /// Requests.
    pub requests: u32,
}

impl Spent {
    /// Counts a request of `bytes`, at least `min`.
    #[inline]
    pub fn add(&mut self, bytes: u64, min: u64) {
        self.bytes = self.bytes.saturating_add(bytes.max(min));
        self.requests = self.requests.saturating_add(1);
    }
}

/// Least charge of each segment of a request, of the sender's and of the receiver's: a descriptor
/// takes about 4 ns to walk, where a frame that is charged 512 bytes takes 50. Rounded down to what
/// no driver notices: the 19 pieces that Linux sends at most for a frame are 608 bytes, and so are
/// usual frames of up to 16. A turn (40 KiB) is then at most 1,280 segments, and those are 5 µs.
pub const SEG_CHARGE_BYTES: u64 = 32;

/// Least charge of a request of `segs` segments, where its engine charges `min_bytes` for the
/// smallest.
#[inline]
pub fn least_charge_bytes(min_bytes: u64, segs: u64) -> u64 {
    min_bytes.max(segs * SEG_CHARGE_BYTES)
}

/// Lowest weight of a VM.
pub const MIN_WEIGHT: u32 = 1;
/// Highest weight of a VM.
pub const MAX_WEIGHT: u32 = 10_000;
/// Usual weight of a VM.
pub const DEFAULT_WEIGHT: u32 = 100;

/// Quantum: bytes that a VM that ran out of credit must earn to go on. This is for the largest
/// weight among the active VMs, in proportion for others. One super-packet, or two batches of small
/// frames: large enough for full batches, small enough that three VMs take turns in well under 0.1
/// ms at the speed of a core.
const QUANTUM_BYTES: i64 = 64 << 10;

/// Least quantum, for VMs of small weight: batches of 10 frames still pay.
const MIN_QUANTUM_BYTES: i64 = 16 << 10;

/// Turn: bytes that a VM may take in one round while others are active, and less where that takes
/// long ([`turn`]). A VM that waits for an answer waits for the turns of all others, on each way.
/// 26 frames of the usual MTU, 4 µs of a fast core; one super-packet goes beyond it. Measured
/// there, beside a sender that saturates and one that floods: with 64 KiB the tails of others are
/// half as long again, with 32 KiB the sender loses a seventh of its throughput.
const TURN_BYTES: u64 = 40 << 10;

/// Turn of a VM that is the only active one. The first request of another VM waits for it, 30 µs,
/// and the cost of a round is small beside it.
const LONE_TURN_BYTES: u64 = 256 << 10;

/// Burst: bytes that the VM of the largest weight can save; others in proportion. It bridges the
/// time in which a driver has not refilled its ring: 100 µs at the 10 GB/s of a fast core.
const BURST_BYTES: i64 = 1 << 20;

/// Least burst: a few super-packets.
const MIN_BURST_BYTES: i64 = 256 << 10;

/// Share of its earnings that a VM keeps whatever it owes: one part in 16.
const OWED_SHARE: i64 = 16;

/// Time between two looks of a ledger at the others.
const LOOK_INTERVAL_NS: u64 = 1_000_000;

/// VMs looked at each time, so that a look costs a few microseconds at most: with 1,000 busy VMs on
/// a sidecore each is looked at every 16 ms.
const LOOK_VMS: usize = 64;

/// Bytes that a VM with a ceiling may receive before its buckets are asked: they are shared with
/// other threads, and frames from outside come one by one.
const UNSETTLED_BYTES: u64 = 32 << 10;
/// Requests that a VM with a ceiling may receive before its buckets are asked.
const UNSETTLED_REQUESTS: u64 = 32;

/// Pace of a VM at its ceiling: it goes on when there are tokens for this time, and not for each
/// single request, since each time may be a wake-up. Half a burst, where that is less.
const PACE_NS: u64 = 500_000;

/// Least bytes that are granted outside of sidecores to a VM at its ceiling, where they are at most
/// half a second of it: reads of a few bytes each would cost more than they move.
const LEAST_GRANT_BYTES: u64 = 64 << 10;

/// Bytes that a nanosecond of a thread outside of all sidecores weighs: as one of a sidecore, which
/// moves 6 bytes in it (frames of 1,500 bytes) to 10 (super-packets).
pub const BYTES_PER_NS: u64 = 8;

/// Burst of a floor: bytes that were not used within this time are lost.
const FLOOR_BURST_NS: u64 = 10_000_000;
