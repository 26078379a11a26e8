//! One pipe as a job of the pool, from the agent's request to the last answer. What a pipe does is
//! its [`Work`]; the job has what all pipes have in common. Its steps run on the pool's threads,
//! one at a time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use base::sync::lock;
use block::BlockPort;
use guest_abi::Reason;

use crate::epoll_set::EpollSet;
use crate::limits::{
    CANCEL_TIMEOUT, DRAIN_TIMEOUT, MAX_ANSWER_BYTES, MAX_ANSWERS, RELEASE_TIMEOUT,
};
use crate::line::Line;
use crate::message::Answer;
use crate::metrics::PipeStats;
use crate::purse::Purse;

/// Outcome of a step: when the next one is due.
pub(crate) enum StepOutcome {
    /// The next step is due after those of other pipes.
    Again,
    /// The next step is due when something happens, and at that time at the latest.
    Wait(Instant),
    /// No step is due any more. The answer can be given: bytes moved, and why not more.
    Over(u64, Reason),
}

/// Steps of a pipe. A step never waits, and closes both ends before it returns
/// [`StepOutcome::Over`].
pub(crate) trait Work: Send {
    /// Does one step.
    fn step(&mut self, job: &Job, epoll: &EpollSet) -> StepOutcome;
    /// Name of the stage, for listings.
    fn state(&self) -> &'static str;
}

/// One end of a pipe, in the lowest bit of the tokens of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Source = 0,
    Sink = 1,
}

impl Side {
    /// Token of this end of a job, in events.
    pub fn token(self, job: u64) -> u64 {
        job | self as u64
    }

    /// Token of the job whose end an event is about.
    pub fn job(token: u64) -> u64 {
        token & !1
    }

    /// The end that an event is about.
    pub fn of(token: u64) -> Self {
        if token & 1 == 0 { Self::Source } else { Self::Sink }
    }
}

/// Distance between the tokens of two jobs.
pub(crate) const TOKEN_STEP: u64 = 2;

/// Bits of [`Job::marks`]: events that the next step looks at.
mod mark {
    /// The connection at that [`super::Side`] was reset.
    pub const RESET: [u32; 2] = [1, 2];
    pub const CANCELLED: u32 = 4;
    pub const ENDED: u32 = 8;
}

/// One pipe.
pub(crate) struct Job {
    /// Unique in this daemon, and even.
    pub token: u64,
    /// Id of the pipe in the agent's messages.
    pub id: u64,
    /// Line to the agent that asked for it.
    pub line: Arc<Line>,
    /// Names of source and sink, for listings.
    pub ends: [String; 2],
    pub len_bytes: u64,
    begun: Instant,
    pub moved_bytes: AtomicU64,
    marks: AtomicU32,
    /// Reason and time of its cancelling.
    cancelled: Mutex<Option<(Reason, Instant)>>,
    /// Answers of the agent that no step has seen.
    answers: Mutex<VecDeque<Answer>>,
    work: Mutex<Option<Box<dyn Work>>>,
    /// Disks of its files.
    pub disks: Vec<Weak<BlockPort>>,
    is_answered: AtomicBool,
    pub stats: Arc<PipeStats>,
    /// Pays for its steps.
    pub purse: Arc<Purse>,
}

impl Job {
    /// A pipe that has not begun.
    pub fn new(
        token: u64,
        (id, line): (u64, Arc<Line>),
        (ends, len_bytes): ([String; 2], u64),
        (work, disks): (Box<dyn Work>, Vec<Weak<BlockPort>>),
        purse: Arc<Purse>,
    ) -> Self {
        Self {
            token,
            id,
            line,
            ends,
            len_bytes,
            begun: Instant::now(),
            moved_bytes: AtomicU64::default(),
            marks: AtomicU32::default(),
            cancelled: Mutex::default(),
            answers: Mutex::default(),
            work: Mutex::new(Some(work)),
            disks,
            is_answered: AtomicBool::new(false),
            stats: Arc::clone(&purse.stats),
            purse,
        }
    }

    /// Whether it is the pipe of that agent, and of that id (none: any). One that was answered is
    /// nobody's: its id may be another's.
    pub fn is_of(&self, line: &Line, id: Option<u64>) -> bool {
        let is_its_own = std::ptr::eq(&*self.line, line) && id.is_none_or(|id| id == self.id);
        is_its_own && !self.is_answered.load(Ordering::Relaxed)
    }

    /// Name of its stage; none while a step runs.
    pub fn state(&self) -> Option<&'static str> {
        let work = self.work.try_lock().ok()?;
        Some(work.as_ref().map_or("over", |work| work.state()))
    }

    /// Notes that the connection at that end was reset.
    pub fn note_reset(&self, side: Side) {
        self.marks.fetch_or(mark::RESET[side as usize], Ordering::Release);
    }

    /// Notes that the source's peer has sent all that it will ever send.
    pub fn note_end(&self) {
        self.marks.fetch_or(mark::ENDED, Ordering::Release);
    }

    fn has(&self, mark: u32) -> bool {
        self.marks.load(Ordering::Acquire) & mark != 0
    }

    /// Whether the connection at that end was reset.
    pub fn is_reset(&self, side: Side) -> bool {
        self.has(mark::RESET[side as usize])
    }

    /// Whether the source's peer has sent all that it will ever send.
    pub fn has_ended(&self) -> bool {
        self.has(mark::ENDED)
    }

    /// Asks it to end soon, if nobody has asked before.
    pub fn cancel(&self, reason: Reason) {
        lock(&self.cancelled).get_or_insert_with(|| (reason, Instant::now()));
        self.marks.fetch_or(mark::CANCELLED, Ordering::Release);
    }

    /// Reason why nobody wants more of it; none: somebody does.
    pub fn cancelled(&self) -> Option<Reason> {
        match self.has(mark::CANCELLED) {
            true => lock(&self.cancelled).map(|(reason, _)| reason),
            false => None,
        }
    }

    /// Whether nobody has wanted more of it for too long.
    pub fn is_overdue(&self) -> bool {
        lock(&self.cancelled).is_some_and(|(_, since)| since.elapsed() > DRAIN_TIMEOUT)
    }

    /// Reason why a file that is read may have other bytes by now, if it may: its lease went with
    /// the agent, or the disk is the guest's no more.
    pub fn has_lost_file(&self) -> Option<Reason> {
        let is_closed = self.line.is_closed().then_some(Reason::NoAgent);
        is_closed.or_else(|| self.cancelled().filter(|reason| *reason == Reason::NoDisk))
    }

    /// Whether a file that is read should be let go, although not all of it is acknowledged.
    pub fn wants_release(&self) -> bool {
        lock(&self.cancelled).is_some_and(|(reason, since)| {
            let patience = match reason {
                // Somebody waits to write to it.
                Reason::LeaseBroken => RELEASE_TIMEOUT,
                Reason::Cancelled => CANCEL_TIMEOUT,
                _ => DRAIN_TIMEOUT,
            };
            since.elapsed() > patience
        })
    }

    /// Adds an answer of the agent. False: too many wait.
    pub fn push_answer(&self, answer: Answer) -> bool {
        let mut all = lock(&self.answers);
        all.push_back(answer);
        let len_bytes: usize = all.iter().map(Answer::len_bytes).sum();
        all.len() <= MAX_ANSWERS && len_bytes <= MAX_ANSWER_BYTES
    }

    /// Takes the oldest answer of the agent.
    pub fn next_answer(&self) -> Option<Answer> {
        lock(&self.answers).pop_front()
    }

    /// Does one step.
    pub fn advance(&self, epoll: &EpollSet) -> StepOutcome {
        let mut work = lock(&self.work);
        let Some(doing) = work.as_mut() else { return StepOutcome::Wait(Instant::now()) };
        let next = doing.step(self, epoll);
        if matches!(next, StepOutcome::Over(..)) {
            *work = None;
        }
        next
    }

    /// Drops its work, in whatever state that is; its connection is lost.
    pub fn drop_work(&self) {
        drop(lock(&self.work).take());
    }

    /// Tells the agent, when it is over or nothing more is needed of the guest; only the first
    /// time.
    pub fn answer(&self, moved_bytes: u64, reason: Reason) {
        if self.is_answered.swap(true, Ordering::Relaxed) {
            return;
        }
        self.moved_bytes.store(moved_bytes, Ordering::Relaxed);
        self.stats.end(reason, moved_bytes, self.begun.elapsed());
        self.line.send_done(self.id, moved_bytes, reason);
    }

    /// Time since it began.
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }
}
