//! Engine of one virtqueue of a disk, on its sidecore: takes requests, drives them through the
//! disk, completes them in any order.
//!
//! [`QueueEngine`] has the turns on the sidecore, the sleep, and what is taken when; the requests
//! themselves are in [`Requests`].

mod at_once;
mod credit;
mod flushes;
mod held_requests;
mod placeholders;
mod requests;

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use base::io::Disk;
use queue::{Batch, Coalescing, Vring};
use sidecore::{Arm, Ledger, Spent, Watcher, Worker, least_charge_bytes};

use crate::cost;
use crate::error::BlockError;
use crate::gate::GatePass;
use crate::in_flight::InFlight;
use crate::limits::{BATCH_CHAINS, MAX_IN_FLIGHT, MIN_CHARGE_BYTES, POLL_BUDGET_BYTES};
use crate::metrics::BlockStats;
use crate::placeholder::{Answers, PlaceholderConfig};
use crate::port_state::PortState;
use crate::slab::{Bounces, Slab};

use credit::QueueCredit;
use placeholders::PlaceholderQueue;
use requests::Requests;

/// Limits of gathering completions while other requests are in the disk: the driver would only be
/// notified again when those finish.
const GATHERING: Coalescing = Coalescing { max_pending: 16, max_wait_ns: 100_000 };

/// Limits of gathering completions while the driver has slack, see
/// [`DriverPace`](crate::driver_pace::DriverPace).
const fn gather_within(slack_ns: u64) -> Coalescing {
    Coalescing { max_wait_ns: slack_ns, ..GATHERING }
}

/// Least requests in the disk of a busy queue: its completions gather, and its driver need not
/// kick, since new requests are found when one of those finishes.
const BUSY_DEPTH: usize = 2;

/// Most requests taken at once for a disk that finishes them within the call: there is no system
/// call to share, and the driver works through one batch while the next one is done.
const IMMEDIATE_BATCH: usize = 16;

/// Longest time for which new requests of a busy queue go unseen.
const LOOK_AGAIN_NS: u64 = 50_000;

/// The worker of one queue.
pub(crate) struct QueueEngine {
    pub(crate) requests: Requests,
    credit: QueueCredit,
    batch: Batch,
    /// Most requests taken at once.
    batch_max: usize,
    /// Bytes of requests that are taken for one of a poll's budget.
    take_share: u64,
    /// Whether the next request waits for a segment list that has room for it.
    is_waiting_for_list: bool,
    /// Whether new requests go before those that wait for their next step, the next time.
    takes_new_first: bool,
    /// Gets a message when the last request is done. While it is set, no request is taken.
    drain_notice: Option<Sender<()>>,
}

impl Worker for QueueEngine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        let tried = self.requests.begin_turn(now_ns);
        self.credit.is_waiting = false;
        let mut work = tried + self.take_and_issue(now_ns, ledger);
        work += self.requests.collect();
        if work > 0 {
            self.publish();
        }
        self.notify(now_ns);
        work
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        let arm = self.until_next(now_ns, ledger);
        self.requests.held().bound(arm)
    }

    fn disarm(&mut self) {
        self.requests.set_wakeups(false);
        self.requests.vring.disarm();
    }

    fn fired(&mut self, fd: RawFd) {
        if self.requests.vring.kick_fd() == Some(fd) {
            self.requests.vring.count_kick();
        }
    }
}

impl QueueEngine {
    /// An engine with everything allocated that the queue will ever need.
    pub fn new(
        vring: Vring,
        port: Arc<PortState>,
        stats: Arc<BlockStats>,
        disk: Box<dyn Disk>,
    ) -> Result<Self, BlockError> {
        let depth = Self::depth(&vring);
        let bounce = port.has_stages || port.demands.is_direct();
        let take_share = cost::budget_share(&port.demands, port.has_stages);
        let pass = GatePass::new(port.gate.clone(), port.vm);
        let credit = QueueCredit::new(port.vm, pass);
        let bounces = Bounces::new(bounce).map_err(BlockError::resource("bounce buffers"))?;
        let in_flight = InFlight::new(disk, Slab::new(depth), bounces, Arc::clone(&port.orphans));
        let batch_max = if in_flight.is_immediate { IMMEDIATE_BATCH } else { BATCH_CHAINS };
        Ok(Self {
            requests: Requests::new(vring, in_flight, depth, port, stats),
            credit,
            batch: Batch::new(BATCH_CHAINS, BATCH_CHAINS * 8),
            batch_max,
            take_share,
            is_waiting_for_list: false,
            takes_new_first: false,
            drain_notice: None,
        })
    }

    /// Most requests in flight.
    pub fn depth(vring: &Vring) -> u16 {
        vring.queue.size().clamp(1, MAX_IN_FLIGHT)
    }

    /// Takes no more requests; sends to `notice` when those in flight are done. `stays_inflight`:
    /// held requests stay in the inflight region, see [`held_requests`].
    pub fn drain(&mut self, notice: Sender<()>, stays_inflight: bool) {
        self.drain_notice = Some(notice);
        if self.requests.end_all_held(stays_inflight) {
            self.publish();
            self.requests.vring.notify();
        }
        self.check_drained();
    }

    /// Wakes the thread that waits for the end of a drain.
    pub fn wake_drain(&self) {
        if let Some(notice) = &self.drain_notice {
            let _ = notice.send(());
        }
    }

    fn check_drained(&mut self) {
        if self.requests.in_flight.slab.taken() == 0
            && let Some(notice) = &self.drain_notice
        {
            // A second notice finds no receiver, or one that reads once.
            let _ = notice.send(());
        }
    }

    /// Lets all held requests go on. Returns their number.
    pub fn resume_held(&mut self) -> usize {
        self.requests.resume_held()
    }

    /// Offers placeholder requests to a handler from now on. Returns the former config and the
    /// answers that are not needed, to be dropped outside of the sidecore.
    pub fn set_placeholders(
        &mut self,
        config: Arc<PlaceholderConfig>,
        answers: Arc<Answers>,
        watcher: Option<&Watcher<'_>>,
    ) -> io::Result<Option<(Arc<PlaceholderConfig>, Arc<Answers>)>> {
        if let Some(queue) = &mut self.requests.placeholders {
            return Ok(Some((queue.replace_config(config), answers)));
        }
        let queue = PlaceholderQueue::new(config, answers);
        if let Some(watcher) = watcher {
            watcher.watch(queue.event_fd())?;
        }
        self.requests.placeholders = Some(queue);
        Ok(None)
    }

    /// Moves the queue to a changed memory table. Requests in flight keep theirs.
    pub fn set_memory(&mut self, memory: Arc<queue::GuestMemory>) {
        // The batch is empty between polls, but holds the table of its last chains.
        self.batch = Batch::new(BATCH_CHAINS, BATCH_CHAINS * 8);
        self.requests.in_flight.forget_tables();
        if let Err(e) = self.requests.vring.queue.set_memory(memory) {
            self.requests.vring.fail(&e);
        }
    }

    /// Moves the queue to a changed memory table and, in the same step, to a disk that knows it:
    /// see [`crate::registered_memory`].
    pub fn move_to(
        &mut self,
        memory: Arc<queue::GuestMemory>,
        disk: Option<Box<dyn Disk>>,
        watcher: &Watcher<'_>,
    ) -> io::Result<()> {
        let mut watched = Ok(());
        if let Some(disk) = disk {
            self.requests.in_flight.disk.event_fd().into_iter().for_each(|fd| watcher.unwatch(fd));
            self.replace_disk(disk);
            watched =
                self.requests.in_flight.disk.event_fd().map_or(Ok(()), |fd| watcher.watch(fd));
        }
        self.set_memory(memory);
        watched
    }

    /// Sends all further operations to another disk.
    fn replace_disk(&mut self, mut disk: Box<dyn Disk>) {
        // We are awake; before a sleep it is told otherwise.
        disk.set_wakeups(false);
        self.requests.in_flight.disk.replace(disk, self.requests.in_flight.in_disk);
    }

    /// Descriptors that wake this worker.
    pub fn watched_fds(&self) -> Vec<RawFd> {
        let answers = self.requests.placeholders.as_ref().map(PlaceholderQueue::event_fd);
        let vring = self.requests.vring.kick_fd();
        vring.into_iter().chain(self.requests.in_flight.disk.event_fd()).chain(answers).collect()
    }

    /// Switches the write cache, as a driver does.
    #[cfg(test)]
    pub fn set_writeback(&self, on: bool) {
        self.requests.port.writeback.store(on, std::sync::atomic::Ordering::SeqCst);
    }

    /// State that it shares with the port's other queues.
    #[cfg(test)]
    pub fn port_state(&self) -> Arc<PortState> {
        Arc::clone(&self.requests.port)
    }

    /// The vring, after a drain.
    pub fn into_vring(self) -> Vring {
        self.requests.vring
    }

    /// Begins next steps of requests and takes new requests. The two go first in turns, so that a
    /// request behind a large one waits for a step and not for all of it. Returns the work done.
    fn take_and_issue(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        self.requests.in_flight.choose_step(ledger.is_crowded());
        let mut budget = POLL_BUDGET_BYTES;
        let goes_on = !self.requests.in_flight.slab.ready.is_empty();
        let new_first = goes_on && self.takes_new_first;
        let mut work = 0;
        if goes_on && !new_first {
            work = self.issue_steps(&mut budget, now_ns, ledger);
            self.takes_new_first = work > 0;
        }
        if budget > 0 {
            let waiting = self.requests.in_flight.slab.ready.len();
            let taken = self.take(budget, now_ns, ledger);
            budget = budget.saturating_sub(self.requests.take_moved_bytes());
            if taken > 0 {
                self.takes_new_first &= !new_first;
                self.requests.in_flight.slab.ready.rotate_left(waiting);
                work += taken + self.issue(&mut budget, 0, now_ns, ledger);
            }
        }
        if new_first {
            work += self.issue_steps(&mut budget, now_ns, ledger);
        }
        work
    }

    /// Begins further steps of requests, as far as there is credit. Each step needs credit anew:
    /// else the steps of all queues would run beside the VM's turn.
    fn issue_steps(&mut self, budget: &mut u64, now_ns: u64, ledger: &mut Ledger) -> usize {
        let credit = self.credit.for_steps(ledger, now_ns);
        let is_held = credit.is_none();
        let credit_bytes = if is_held { 0 } else { credit.bytes() };
        // A queue that ends does so soon, at a ceiling too: a step in each poll, which is owed.
        let ends = self.drain_notice.is_some();
        let work = self.issue(budget, credit_bytes.max(ends.into()), now_ns, ledger);
        if is_held && !ends && !self.requests.in_flight.slab.ready.is_empty() {
            self.credit.wait(&credit, ledger, now_ns);
        }
        work
    }

    /// Takes requests from the ring whose first steps fit into `budget`; the last one may exceed
    /// it.
    fn take(&mut self, budget: u64, now_ns: u64, ledger: &mut Ledger) -> usize {
        let free = self.requests.in_flight.slab.free.len().min(self.batch_max);
        if free == 0 || self.drain_notice.is_some() {
            return 0;
        }
        // Before anything is reckoned: most polls find nothing.
        if !self.requests.vring.has_chains() {
            self.is_waiting_for_list = false;
            self.batch.release();
            return 0;
        }
        let mut credit = self.credit.for_requests(ledger, now_ns);
        if credit.is_none() {
            self.credit.wait(&credit, ledger, now_ns);
            return 0;
        }
        credit.limit_bytes(budget * self.take_share);
        let limits = self.credit.batch(&credit, free);
        let bytes = credit.bytes();
        let popped = self.requests.vring.pop(&mut self.batch, limits.most);
        self.is_waiting_for_list = false;
        self.requests.begin_batch(popped);
        for index in 0..popped {
            queue::seg::prefetch_head(self.batch.get(index).readable);
        }
        let mut spent = Spent::default();
        while (spent.requests as usize) < popped && spent.bytes < bytes {
            let index = spent.requests as usize;
            if !self.requests.in_flight.slab.has_room(&self.batch, index) {
                self.is_waiting_for_list = true;
                break;
            }
            // Read before the request may end: its segments were walked in any case.
            let segs = self.batch.get(index).segs();
            let least = least_charge_bytes(MIN_CHARGE_BYTES, segs);
            spent.add(self.requests.start(&self.batch, index, now_ns), least);
        }
        let taken = spent.requests as usize;
        if taken < popped {
            self.requests.vring.unpop(&mut self.batch, popped - taken);
        }
        if taken > 0 {
            self.batch.clear();
            // The driver is told of what is done already, and then it is accounted for: with one
            // request at a time, it waits.
            if self.requests.has_completions() {
                self.publish();
            }
            self.credit.charge_batch(ledger, spent, popped, &limits, now_ns);
            let outstanding = self.requests.outstanding();
            self.requests.pace.note_batch(now_ns, taken, outstanding);
        }
        taken
    }

    /// Gives waiting requests to the disk, see [`Requests::issue`], and charges for it.
    fn issue(&mut self, budget: &mut u64, credit: u64, now_ns: u64, ledger: &mut Ledger) -> usize {
        let (issued, due_bytes) = self.requests.issue(budget, credit);
        if due_bytes > 0 {
            let due = Spent { bytes: due_bytes, ..Spent::default() };
            let more =
                !self.requests.in_flight.slab.ready.is_empty() || self.requests.vring.has_work();
            self.credit.charge_steps(ledger, due, more, now_ns);
        }
        issued
    }

    /// Longest sleep of the queue, held requests aside.
    fn until_next(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        if self.requests.begin_sleep(now_ns) > 0 {
            self.publish();
            self.notify(now_ns);
            return Arm::Busy;
        }
        if !self.requests.in_flight.slab.ready.is_empty()
            && self.requests.in_flight.in_disk == 0
            && !self.credit.is_waiting
        {
            return Arm::Busy;
        }
        let slack_ns = self.slack_ns(now_ns);
        if slack_ns > 0 {
            let due_ns = self.requests.vring.notify_due_ns(gather_within(slack_ns));
            // The timer finds what finishes meanwhile.
            self.requests.set_wakeups(false);
            let look_ns = now_ns + slack_ns / 2;
            return Arm::Until(due_ns.map_or(look_ns, |due_ns| due_ns.clamp(now_ns, look_ns)));
        }
        let due_ns = self.requests.vring.notify_due_ns(GATHERING);
        if self.requests.in_flight.disk.has_former() {
            let look_ns = now_ns + LOOK_AGAIN_NS;
            return Arm::Until(due_ns.map_or(look_ns, |due_ns| due_ns.min(look_ns)));
        }
        // With every slot taken the next event is a completion, not a kick, or credit.
        let is_full = self.requests.in_flight.slab.free.is_empty() || self.is_waiting_for_list;
        if (is_full && !self.credit.is_waiting) || self.drain_notice.is_some() {
            return due_ns.map_or(Arm::Idle, Arm::Until);
        }
        if let Some(until_ns) = self.credit.until_ns(ledger, now_ns) {
            return Arm::Until(due_ns.map_or(until_ns, |due_ns| due_ns.min(until_ns)));
        }
        if self.is_busy() || self.credit.is_waiting {
            let look_ns = now_ns + LOOK_AGAIN_NS;
            return Arm::Until(due_ns.map_or(look_ns, |due_ns| due_ns.min(look_ns)));
        }
        // The slack may have ended since the poll, which left completions to a later one.
        self.requests.vring.notify();
        if self.requests.vring.arm() { Arm::Busy } else { Arm::Idle }
    }

    fn is_busy(&self) -> bool {
        self.requests.in_flight.in_disk >= BUSY_DEPTH
            && self.drain_notice.is_none()
            && !self.requests.pace.is_large()
    }

    /// Makes this poll's completions visible.
    fn publish(&mut self) {
        self.credit.hold(self.requests.active_count());
        self.requests.publish();
    }

    /// Notifies the driver of completions: at once, or together with later ones.
    fn notify(&mut self, now_ns: u64) {
        match self.gathering(now_ns) {
            Some(lazy) => self.requests.vring.notify_coalesced(now_ns, lazy),
            None => self.requests.vring.notify(),
        }
        self.check_drained();
    }

    /// Limits of gathering completions now; `None`: they do not gather.
    fn gathering(&mut self, now_ns: u64) -> Option<Coalescing> {
        let slack_ns = self.slack_ns(now_ns);
        if slack_ns > 0 {
            return Some(gather_within(slack_ns));
        }
        self.is_busy().then_some(GATHERING)
    }

    /// Slack of the driver, see [`DriverPace`](crate::driver_pace::DriverPace).
    fn slack_ns(&mut self, now_ns: u64) -> u64 {
        if self.drain_notice.is_some() {
            return 0;
        }
        let outstanding = self.requests.outstanding();
        self.requests.pace.slack_ns(now_ns, outstanding)
    }
}
