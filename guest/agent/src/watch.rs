//! Watch over a running pipe: reasons to end it, besides the daemon's messages.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::ends::Source;
use crate::line::Call;
use crate::shared::Shared;
use crate::wake::Wake;

/// Watch over one request.
pub struct Watch<'a> {
    /// State that all requests share.
    pub shared: &'a Shared,
    /// Socket of the program that made the request.
    pub program: BorrowedFd<'a>,
    /// Event that wakes the calling thread.
    pub wake: &'a Arc<Wake>,
    /// Time at which the request ends at the latest.
    pub deadline: Option<Instant>,
    /// Time that the request outlives its program; none: it ends with it.
    background_time: Option<Duration>,
    /// Time at which the program exited.
    program_exit: Cell<Option<Instant>>,
}

impl<'a> Watch<'a> {
    /// Watch over a request that ends with its program.
    pub fn new(
        shared: &'a Shared,
        program: BorrowedFd<'a>,
        wake: &'a Arc<Wake>,
        deadline: Option<Instant>,
    ) -> Self {
        Self {
            shared,
            program,
            wake,
            deadline,
            background_time: None,
            program_exit: Cell::new(None),
        }
    }

    /// Makes it a watch over a background request: one that outlives its program by `time`, and has
    /// no other limit.
    pub fn in_background(mut self, time: Duration) -> Self {
        (self.background_time, self.deadline) = (Some(time), None);
        self
    }

    /// Whether the program has exited.
    pub fn has_program_exited(&self) -> bool {
        self.program_exit.get().is_some()
    }

    /// Restarts the time without a program: the peer has taken bytes.
    pub fn restart_time(&self) {
        if self.has_program_exited() {
            self.program_exit.set(Some(Instant::now()));
        }
    }

    /// Whether the program has exited, and the time after that is over.
    pub fn is_time_over(&self) -> bool {
        let patience = self.background_time.unwrap_or_default();
        self.program_exit.get().is_some_and(|exit| exit.elapsed() >= patience)
    }

    /// Whether the request is to be cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.is_time_over() || self.shared.stopping.load(Ordering::Acquire)
    }

    /// Reason for which the pipe is to end, if there is one.
    pub fn end_reason(&self, source: &Source) -> Option<Reason> {
        if self.is_cancelled() {
            return Some(Reason::Cancelled);
        }
        let is_late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        source.end_reason().or(is_late.then_some(Reason::TimedOut))
    }

    /// Sleeps until an event, or for `at_most`. Without `interested`, ignores the program and the
    /// deadline, and waits for the daemon alone. `also` is a further descriptor to wait for.
    pub fn wait(
        &self,
        interested: bool,
        call: &Call,
        also: Option<(BorrowedFd<'_>, PollFlags)>,
        at_most: Option<Duration>,
    ) {
        self.wait_for(interested, also, [at_most, Some(call.beat())].into_iter().flatten().min());
    }

    /// Waits like [`Watch::wait`], without a daemon.
    pub fn wait_for(
        &self,
        interested: bool,
        also: Option<(BorrowedFd<'_>, PollFlags)>,
        at_most: Option<Duration>,
    ) {
        // A program that has exited sends no more events.
        let listens = interested && self.program_exit.get().is_none();
        let mut fds = Vec::with_capacity(3);
        fds.push(PollFd::new(self.wake, PollFlags::IN));
        if listens {
            fds.push(PollFd::from_borrowed_fd(self.program, PollFlags::RDHUP));
        }
        fds.extend(also.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)));
        let left = self.deadline.filter(|_| interested);
        let left = left.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // One millisecond more, so that it does not wake before the time.
        let left = left.map(|left| left + Duration::from_millis(1));
        let alone = self.program_exit.get().zip(self.background_time).filter(|_| interested);
        let alone = alone.map(|(exit, patience)| patience.saturating_sub(exit.elapsed()));
        let time = [left, at_most, alone].into_iter().flatten().min();
        // The caller's loop covers an interrupted poll.
        let _ = poll(&mut fds, time.and_then(|time| Timespec::try_from(time).ok()).as_ref());
        if !fds[0].revents().is_empty() {
            self.wake.clear();
        }
        let hung_up = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        if listens && fds[1].revents().intersects(hung_up) {
            self.program_exit.set(Some(Instant::now()));
        }
    }
}
