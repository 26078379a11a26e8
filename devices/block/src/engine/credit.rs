//! Credit of a queue: its VM's with the sidecore's thread, and with the device below.

use sidecore::{Allowance, Ledger, Spent, VmId};

use crate::gate::GatePass;
use crate::limits::MIN_CHARGE_BYTES;

/// Credit of a queue, which its requests and their further steps are paid from.
pub(super) struct QueueCredit {
    vm: VmId,
    pass: GatePass,
    /// Mean charge of a request of the last batch.
    mean_cost: u64,
    /// Whether requests wait for credit, or for room in the device.
    pub is_waiting: bool,
}

/// Credit of one turn.
pub(super) struct TurnCredit {
    /// The VM's credit with the thread.
    thread: Allowance,
    /// The VM's credit with the device, and room there.
    device: Allowance,
}

/// Limits of a batch, in requests.
pub(super) struct BatchLimits {
    /// Limit by the thread's credit and the queue's free slots.
    by_thread: usize,
    /// Limit by the device's credit, too.
    pub most: usize,
}

impl TurnCredit {
    /// Whether nothing may be taken.
    #[inline]
    pub fn is_none(&self) -> bool {
        self.thread.is_none() || self.device.is_none()
    }

    /// Bytes that may be taken.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.thread.bytes.min(self.device.bytes)
    }

    /// Limits the bytes to what is left of a poll's share.
    #[inline]
    pub fn limit_bytes(&mut self, budget: u64) {
        self.thread.bytes = self.thread.bytes.min(budget);
    }
}

impl QueueCredit {
    /// Credit of `vm`, whose requests pass a device's gate with `pass`.
    pub fn new(vm: VmId, pass: GatePass) -> Self {
        Self { vm, pass, mean_cost: MIN_CHARGE_BYTES, is_waiting: false }
    }

    /// Credit for further steps of requests, which have their place in the device already.
    #[inline]
    pub fn for_steps(&self, ledger: &mut Ledger, now_ns: u64) -> TurnCredit {
        let thread = ledger.allowance(self.vm, now_ns);
        TurnCredit { thread, device: self.pass.credit(ledger, now_ns) }
    }

    /// Credit for new requests.
    #[inline]
    pub fn for_requests(&self, ledger: &mut Ledger, now_ns: u64) -> TurnCredit {
        let thread = ledger.allowance(self.vm, now_ns);
        TurnCredit { thread, device: self.pass.allowance(ledger, now_ns) }
    }

    /// Limits of a batch of new requests. `free`: slots for them.
    #[inline]
    pub fn batch(&self, credit: &TurnCredit, free: usize) -> BatchLimits {
        let by_thread = credit.thread.batch(self.mean_cost, free);
        BatchLimits { by_thread, most: credit.device.batch(self.mean_cost, by_thread) }
    }

    /// Charges a batch: `popped` requests came within `limits`, of which those in `spent` began.
    #[inline]
    pub fn charge_batch(
        &mut self,
        ledger: &mut Ledger,
        spent: Spent,
        popped: usize,
        limits: &BatchLimits,
        now_ns: u64,
    ) {
        // A queue that waits for the device does not wait for this thread.
        let is_cut = (spent.requests as usize) < popped;
        ledger.charge(self.vm, spent, popped == limits.by_thread || is_cut, now_ns);
        self.pass.charge(ledger, spent, popped == limits.most, now_ns);
        // One at a time needs no division, which takes as long as all the rest of this.
        self.mean_cost = match spent.requests {
            0 | 1 => spent.bytes,
            many => spent.bytes / u64::from(many),
        };
    }

    /// Charges steps of requests. `more`: others wait.
    #[inline]
    pub fn charge_steps(&self, ledger: &mut Ledger, due: Spent, more: bool, now_ns: u64) {
        ledger.charge(self.vm, due, more, now_ns);
        self.pass.charge(ledger, due, more, now_ns);
    }

    /// Tells the ledger that requests wait for the thread, or for the device: `credit` is none.
    pub fn wait(&mut self, credit: &TurnCredit, ledger: &mut Ledger, now_ns: u64) {
        self.is_waiting = true;
        match credit.thread.is_none() {
            true => ledger.held_back(self.vm, now_ns),
            false => self.pass.wait(ledger, now_ns),
        }
    }

    /// Time at which waiting requests have credit again, see [`Ledger::until_ns`].
    pub fn until_ns(&self, ledger: &mut Ledger, now_ns: u64) -> Option<u64> {
        ledger.until_ns(self.vm, now_ns)
    }

    /// Sets the number of the queue's requests that are with the device.
    #[inline]
    pub fn hold(&mut self, count: usize) {
        self.pass.hold(count);
    }
}
