//! One pipe: from the agent's words to the answer. What it does is its [`Work`]; here is what all pipes
//! have in common. Its steps run on the pool's threads, one at a time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use block::BlockPort;
use guest_abi::Reason;
use net::flow::FlowEvent;

use crate::agent::Agent;
use crate::limits::{CANCEL_TIMEOUT, DRAIN_TIMEOUT, MAX_SAID, MAX_SAID_BYTES, RELEASE_TIMEOUT};
use crate::message::Said;
use crate::metrics::PipeStats;
use crate::pool::Pool;

/// What a step asks for.
pub(crate) enum Next {
    /// The next step, after those of others.
    Again,
    /// Something will happen; then at the latest.
    Wait(Instant),
    /// The answer can be given: so many bytes were moved, and why not more.
    Over(u64, Reason),
}

/// What a pipe does, step by step. A step never waits, and ends both ends before it says
/// [`Next::Over`].
pub(crate) trait Work: Send {
    /// One step.
    fn step(&mut self, job: &Job, pool: &Pool) -> Next;
    /// One word about where it is.
    fn state(&self) -> &'static str;
}

/// The end of a pipe that an event is about: in the token's lowest bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Source = 0,
    Sink = 1,
}

impl Side {
    /// What the end is called in events.
    pub fn token(self, job: u64) -> u64 {
        job | self as u64
    }

    /// The pipe that an event's token is of.
    pub fn job(token: u64) -> u64 {
        token & !1
    }

    fn of(token: u64) -> Self {
        if token & 1 == 0 { Self::Source } else { Self::Sink }
    }
}

/// Tokens of pipes differ by so much.
pub(crate) const TOKEN_STEP: u64 = 2;

/// Events that wait for the next step.
mod mark {
    /// By the [`super::Side`].
    pub const RESET: [u32; 2] = [1, 2];
    pub const CANCELLED: u32 = 4;
    pub const ENDED: u32 = 8;
}

/// See the module's text.
pub(crate) struct Job {
    /// Unique in this daemon, and even.
    pub token: u64,
    /// What the agent calls it.
    pub id: u64,
    pub agent: Arc<Agent>,
    /// For people.
    pub ends: [String; 2],
    pub len_bytes: u64,
    begun: Instant,
    pub moved_bytes: AtomicU64,
    marks: AtomicU32,
    cancelled: Mutex<Option<(Reason, Instant)>>,
    said: Mutex<VecDeque<Said>>,
    work: Mutex<Option<Box<dyn Work>>>,
    /// Its files' disks.
    pub disks: Vec<Weak<BlockPort>>,
    is_answered: AtomicBool,
    pub stats: Arc<PipeStats>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    /// A pipe that has not begun.
    pub fn new(
        token: u64,
        (id, agent): (u64, Arc<Agent>),
        (ends, len_bytes): ([String; 2], u64),
        (work, disks): (Box<dyn Work>, Vec<Weak<BlockPort>>),
        stats: Arc<PipeStats>,
    ) -> Self {
        Self {
            token,
            id,
            agent,
            ends,
            len_bytes,
            begun: Instant::now(),
            moved_bytes: AtomicU64::default(),
            marks: AtomicU32::default(),
            cancelled: Mutex::default(),
            said: Mutex::default(),
            work: Mutex::new(Some(work)),
            disks,
            is_answered: AtomicBool::new(false),
            stats,
        }
    }

    /// Whether it is that agent's, and what that one calls it. One that was answered is nobody's: its
    /// name may be another's.
    pub fn is_of(&self, agent: &Agent, id: Option<u64>) -> bool {
        let is_its_own = std::ptr::eq(&*self.agent, agent) && id.is_none_or(|id| id == self.id);
        is_its_own && !self.is_answered.load(Ordering::Relaxed)
    }

    /// One word about where it is; none while a step runs.
    pub fn state(&self) -> Option<&'static str> {
        let work = self.work.try_lock().ok()?;
        Some(work.as_ref().map_or("over", |work| work.state()))
    }

    /// An event of the switch.
    pub fn note(&self, token: u64, event: FlowEvent) {
        let mark = match event {
            FlowEvent::Reset => mark::RESET[Side::of(token) as usize],
            FlowEvent::Ended => mark::ENDED,
            FlowEvent::Settled | FlowEvent::Acknowledged => return,
        };
        self.marks.fetch_or(mark, Ordering::Release);
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

    /// It shall end soon.
    pub fn cancel(&self, reason: Reason) {
        lock(&self.cancelled).get_or_insert_with(|| (reason, Instant::now()));
        self.marks.fetch_or(mark::CANCELLED, Ordering::Release);
    }

    /// Whether nobody wants more of it, and why.
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

    /// Whether a file that is read may have other bytes by now, and why: its lease went with the agent, or
    /// the disk is the guest's no more.
    pub fn has_lost_file(&self) -> Option<Reason> {
        let is_closed = self.agent.is_closed().then_some(Reason::NoAgent);
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

    /// What the agent says. False: it says too much.
    pub fn say(&self, said: Said) -> bool {
        let mut all = lock(&self.said);
        all.push_back(said);
        let len_bytes: usize = all.iter().map(Said::len_bytes).sum();
        all.len() <= MAX_SAID && len_bytes <= MAX_SAID_BYTES
    }

    /// What the agent has said next.
    pub fn heard(&self) -> Option<Said> {
        lock(&self.said).pop_front()
    }

    /// One step.
    pub fn advance(&self, pool: &Pool) -> Next {
        let mut work = lock(&self.work);
        let Some(doing) = work.as_mut() else { return Next::Wait(Instant::now()) };
        let next = doing.step(self, pool);
        if matches!(next, Next::Over(..)) {
            *work = None;
        }
        next
    }

    /// Drops what it works with, in whatever state that is; its connection is lost.
    pub fn give_up(&self) {
        drop(lock(&self.work).take());
    }

    /// Tells the agent, when it is over or nothing more is needed of the guest; only the first time.
    pub fn answer(&self, moved_bytes: u64, reason: Reason) {
        if self.is_answered.swap(true, Ordering::Relaxed) {
            return;
        }
        self.moved_bytes.store(moved_bytes, Ordering::Relaxed);
        self.stats.end(reason, moved_bytes, self.begun.elapsed());
        self.agent.done(self.id, moved_bytes, reason);
    }

    /// How long it has been there.
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }
}
