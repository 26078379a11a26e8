//! The gate that a pipe's own reads of a disk pass: the ceilings of the VM's account, as for the
//! guest's requests, and the gate of the device below.
//!
//! A read takes what it may move from the ceilings before it begins, and gives back what it did not
//! move. A pipe that finds nothing there waits: its next step is due when there are bytes again,
//! and a little later, by chance. Queues of the VM on a sidecore look again at a fixed time, so
//! each of both is the first as often. With more pipes that wait the chance is spread over more
//! time, so they cost no more together than one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::random::{Random, Seeded};
use block::InPlacePass;

use crate::limits::{HELD_PAUSE, RECHECK_PERIOD};
use crate::purse::Purse;

/// Gate of one pipe to the disk that it reads.
pub(crate) struct DiskGate {
    purse: Arc<Purse>,
    /// None: the file is on no device that a gate knows.
    pass: Option<InPlacePass>,
    /// Time since which the pipe waits at the ceiling.
    held_since_ns: Option<u64>,
    random: Seeded,
}

impl DiskGate {
    /// A gate for the reads of a pipe, which pay from that purse.
    pub fn new(purse: Arc<Purse>, pass: Option<InPlacePass>) -> Self {
        let random = Seeded::new(purse.now_ns());
        Self { purse, pass, held_since_ns: None, random }
    }

    /// Whether the pipe waits at the ceiling.
    pub fn is_held(&self) -> bool {
        self.held_since_ns.is_some()
    }

    /// Does a read of at most `most_bytes`. `read` is told how many bytes it may move, and returns
    /// how many it did, with its result. `Err`: the VM is at its ceiling; look again then.
    pub fn read<R>(
        &mut self,
        most_bytes: u64,
        read: impl FnOnce(u64) -> (u64, R),
    ) -> Result<R, Instant> {
        let now_ns = self.purse.now_ns();
        let grant = match self.purse.ask(most_bytes, now_ns) {
            Ok(grant) => grant,
            Err(at_ns) => return Err(self.hold(at_ns, now_ns)),
        };
        self.end_hold_at(now_ns);
        let may_move = grant.as_ref().map_or(most_bytes, |grant| grant.bytes);
        let (moved, result) = self.in_place(now_ns, || read(may_move));
        self.purse.pay(grant, moved, now_ns);
        Ok(result)
    }

    /// Does a read that cannot wait. What the ceiling does not have is owed.
    pub fn read_at_once<R>(&mut self, read: impl FnOnce() -> (u64, R)) -> R {
        let now_ns = self.purse.now_ns();
        self.end_hold_at(now_ns);
        let (moved, result) = self.in_place(now_ns, read);
        self.purse.charge(moved);
        result
    }

    /// Does a read with its place in the device.
    fn in_place<R>(&self, now_ns: u64, read: impl FnOnce() -> (u64, R)) -> (u64, R) {
        let Some(pass) = &self.pass else { return read() };
        let place = pass.begin(now_ns);
        let done = read();
        drop(place);
        pass.charge(done.0);
        done
    }

    /// Notes that the pipe waits. Returns when it looks again: a ceiling may have been raised
    /// meanwhile.
    fn hold(&mut self, at_ns: u64, now_ns: u64) -> Instant {
        let pipes = match self.held_since_ns {
            Some(_) => self.purse.held(),
            None => {
                self.held_since_ns = Some(now_ns);
                self.purse.begin_hold()
            }
        };
        let spread_ns = 2 * HELD_PAUSE.as_nanos() as u64 * pipes;
        let more_ns = self.random.below(u32::try_from(spread_ns).unwrap_or(u32::MAX));
        let pause_ns = at_ns.saturating_sub(now_ns).saturating_add(more_ns.into());
        Instant::now() + Duration::from_nanos(pause_ns).min(RECHECK_PERIOD)
    }

    /// Waits no more.
    pub fn end_hold(&mut self) {
        self.end_hold_at(self.purse.now_ns());
    }

    fn end_hold_at(&mut self, now_ns: u64) {
        if let Some(since_ns) = self.held_since_ns.take() {
            self.purse.end_hold(now_ns.saturating_sub(since_ns));
        }
    }
}

impl Drop for DiskGate {
    fn drop(&mut self) {
        self.end_hold();
    }
}

#[cfg(test)]
mod tests;
