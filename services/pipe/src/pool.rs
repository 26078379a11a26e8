//! The threads of a VM's pipes. A pipe that has nothing to do costs no thread: it waits for its
//! twin (in the pool's epoll set), for an event of the switch, or for a time.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::cpu::thread_time;
use base::sync::lock;
use flow::{FlowEvent, FlowWatch};
use guest_abi::Reason;
use rustix::event::{EventfdFlags, Timespec, eventfd};

use crate::epoll_set::EpollSet;
use crate::job::{Job, Side, StepOutcome};
use crate::line::Line;

/// Token of the wake-up in the epoll set; tokens of pipes count from 2.
const WAKE: u64 = 0;

/// A task that is no pipe's step.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    entries: HashMap<u64, Entry>,
    /// Pipes whose next step is due because something happened: each once.
    ready: VecDeque<u64>,
    /// Pipes whose next step is due at a time, the next one first.
    timers: BTreeSet<(Instant, u64)>,
    /// New pipes and tasks are dropped.
    is_closed: bool,
}

/// A pipe, with whose turn it is.
struct Entry {
    job: Arc<Job>,
    turn: Turn,
    timer: Option<Instant>,
}

/// Turn of a pipe. By it one thread at a time works for a pipe, the others do not wait for it, and
/// nothing that happens meanwhile is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The pipe waits for an event.
    Idle,
    /// The pipe is among those that are ready.
    Ready,
    /// A thread does a step.
    Running,
    /// A thread does a step, and something has happened since that began.
    RunningAgain,
}

/// Next thing for a thread to do.
enum Due {
    Pipe(Arc<Job>),
    Task(Task),
}

impl Queue {
    /// Notes that something happened to a pipe. True: a thread is to look.
    fn wake(&mut self, token: u64) -> bool {
        let Some(entry) = self.entries.get_mut(&token) else { return false };
        match entry.turn {
            Turn::Idle => {
                entry.turn = Turn::Ready;
                self.ready.push_back(token);
                return true;
            }
            Turn::Running => entry.turn = Turn::RunningAgain,
            Turn::Ready | Turn::RunningAgain => {}
        }
        false
    }

    /// Hands the pipe's next step to the caller; none: another thread does it, or will.
    fn begin(&mut self, token: u64, from: Turn) -> Option<Due> {
        let entry = self.entries.get_mut(&token)?;
        match entry.turn {
            turn if turn == from => {
                entry.turn = Turn::Running;
                return Some(Due::Pipe(Arc::clone(&entry.job)));
            }
            Turn::Running => entry.turn = Turn::RunningAgain,
            _ => {}
        }
        None
    }

    /// Takes the first pipe whose time has come.
    fn due(&mut self) -> Option<Due> {
        let now = Instant::now();
        while let Some(&(at, token)) = self.timers.first().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, token));
            if let Some(entry) = self.entries.get_mut(&token) {
                entry.timer = None;
            }
            let due = self.begin(token, Turn::Idle);
            if due.is_some() {
                return due;
            }
        }
        None
    }

    /// Ends a step; the next one is due at `at`, if not before. True: a thread is to look again.
    fn end_step(&mut self, token: u64, at: Option<Instant>) -> bool {
        let Some(entry) = self.entries.get_mut(&token) else { return false };
        let goes_on = entry.turn == Turn::RunningAgain || at.is_none();
        entry.turn = Turn::Idle;
        if let Some(at) = at {
            let previous = entry.timer.replace(at);
            previous.into_iter().for_each(|at| _ = self.timers.remove(&(at, token)));
            self.timers.insert((at, token));
        }
        goes_on && self.wake(token)
    }

    fn remove(&mut self, token: u64) -> bool {
        let Some(entry) = self.entries.remove(&token) else { return false };
        entry.timer.into_iter().for_each(|at| _ = self.timers.remove(&(at, token)));
        true
    }
}

/// The threads of a VM's pipes, and the queue of their steps.
pub(crate) struct Pool {
    queue: Mutex<Queue>,
    epoll: EpollSet,
    /// Semaphore (eventfd): one for each entry of `ready`, and for each task.
    wake: OwnedFd,
    /// Signalled when a pipe has ended.
    pipe_ended: Condvar,
    stop: AtomicBool,
}

impl Pool {
    /// Starts the threads.
    pub fn start(vm: &str, threads: u16) -> io::Result<(Arc<Self>, Vec<JoinHandle<()>>)> {
        let epoll = EpollSet::new()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let wake = eventfd(0, flags)?;
        epoll.add_waker(WAKE, &wake)?;
        let (pipe_ended, stop) = (Condvar::new(), AtomicBool::new(false));
        let pool = Self { queue: Mutex::default(), epoll, wake, pipe_ended, stop };
        let pool = Arc::new(pool);
        let mut handles = Vec::new();
        for index in 0..threads {
            let own = Arc::clone(&pool);
            let builder = std::thread::Builder::new().name(format!("pipe{index} {vm}"));
            let handle = builder.spawn(move || own.work()).inspect_err(|_| pool.stop())?;
            handles.push(handle);
        }
        Ok((pool, handles))
    }

    /// Ends the threads; they finish what they do.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&self.wake, &1024u64.to_ne_bytes());
    }

    /// Takes nothing more in, cancels all pipes for that reason, and waits until they have ended,
    /// but not longer than `timeout`.
    pub fn drain(&self, reason: Reason, timeout: Duration) {
        lock(&self.queue).is_closed = true;
        for job in self.jobs() {
            job.cancel(reason);
            self.nudge(job.token);
        }
        let queue = lock(&self.queue);
        // Those that are left lose their connections.
        let some = |queue: &mut Queue| !queue.entries.is_empty();
        let _ = self.pipe_ended.wait_timeout_while(queue, timeout, some);
    }

    /// Drops pipes and tasks that are left when the threads have ended: pipes keep ports, and
    /// guests' writes that wait for them must not wait for ever.
    pub fn clear(&self) {
        let left = {
            let mut queue = lock(&self.queue);
            std::mem::replace(&mut *queue, Queue { is_closed: true, ..Queue::default() })
        };
        drop(left);
    }

    /// Number of pipes.
    pub fn len(&self) -> usize {
        lock(&self.queue).entries.len()
    }

    /// The agent's pipe of that id.
    pub fn find(&self, line: &Line, id: u64) -> Option<Arc<Job>> {
        let queue = lock(&self.queue);
        let mut jobs = queue.entries.values().map(|entry| &entry.job);
        jobs.find(|job| job.is_of(line, Some(id))).cloned()
    }

    /// All pipes.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        lock(&self.queue).entries.values().map(|entry| Arc::clone(&entry.job)).collect()
    }

    /// Adds a pipe; its first step comes soon. False: it is dropped, as the pool takes no more.
    pub fn add(&self, job: Job) -> bool {
        let token = job.token;
        let mut queue = lock(&self.queue);
        if queue.is_closed {
            // Its end may take locks of others.
            drop(queue);
            return false;
        }
        let entry = Entry { job: Arc::new(job), turn: Turn::Idle, timer: None };
        queue.entries.insert(token, entry);
        let is_new = queue.wake(token);
        drop(queue);
        self.ring_if(is_new);
        true
    }

    /// Wakes a pipe: something happened to it.
    pub fn nudge(&self, token: u64) {
        let is_new = lock(&self.queue).wake(token);
        self.ring_if(is_new);
    }

    fn ring_if(&self, is_new: bool) {
        if is_new {
            self.ring();
        }
    }

    fn ring(&self) {
        // Fails only when it is rung 2^64 times.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Has a thread of the pool do a task that waits for a disk. It is dropped if the pool takes no
    /// more.
    pub fn run(&self, task: Task) {
        let mut queue = lock(&self.queue);
        if queue.is_closed {
            // Its end may take locks of others.
            drop(queue);
            return;
        }
        queue.tasks.push_back(task);
        drop(queue);
        self.ring();
    }

    fn work(&self) {
        let mut charged = thread_time();
        while !self.stop.load(Ordering::Relaxed) {
            match self.next() {
                Some(Due::Pipe(job)) => {
                    self.step(&job);
                    // All of the thread's time, also what it took to find the step.
                    let now = thread_time();
                    job.purse.charge_time((now - charged).as_nanos() as u64);
                    charged = now;
                }
                Some(Due::Task(task)) => _ = catch_panic(task),
                None => {}
            }
        }
    }

    /// Waits for the next thing to do. Pipes whose time has come go before those that are ready: of
    /// these there may always be some.
    fn next(&self) -> Option<Due> {
        let until = {
            let mut queue = lock(&self.queue);
            let due = queue.due();
            if due.is_some() {
                return due;
            }
            queue.timers.first().map(|(at, _)| *at)
        };
        let left = until.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let token = self.epoll.wait(timeout.as_ref())?;
        if token != WAKE {
            return lock(&self.queue).begin(Side::job(token), Turn::Idle);
        }
        // Another thread may have taken it: the queue tells.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        let mut queue = lock(&self.queue);
        if let Some(task) = queue.tasks.pop_front() {
            return Some(Due::Task(task));
        }
        let token = queue.ready.pop_front()?;
        queue.begin(token, Turn::Ready)
    }

    fn step(&self, job: &Job) {
        // The other pipes keep their thread.
        let outcome = catch_panic(|| job.advance(&self.epoll)).unwrap_or_else(|| {
            catch_panic(|| job.drop_work());
            StepOutcome::Over(job.moved_bytes.load(Ordering::Relaxed), Reason::Lost)
        });
        let again = match outcome {
            StepOutcome::Again => lock(&self.queue).end_step(job.token, None),
            StepOutcome::Wait(at) => lock(&self.queue).end_step(job.token, Some(at)),
            StepOutcome::Over(moved_bytes, reason) => {
                if lock(&self.queue).remove(job.token) {
                    job.answer(moved_bytes, reason);
                    self.pipe_ended.notify_all();
                }
                false
            }
        };
        self.ring_if(again);
    }
}

/// Calls a function; none when it panicked, which is logged.
fn catch_panic<R>(step: impl FnOnce() -> R) -> Option<R> {
    let done = catch_unwind(AssertUnwindSafe(step)).ok();
    if done.is_none() {
        tracing::error!("a step of a pipe panicked; its connection is lost");
    }
    done
}

impl FlowWatch for Pool {
    fn flow_event(&self, token: u64, event: FlowEvent) {
        let is_new = {
            let mut queue = lock(&self.queue);
            let Some(entry) = queue.entries.get(&Side::job(token)) else { return };
            match event {
                FlowEvent::Reset => entry.job.note_reset(Side::of(token)),
                FlowEvent::Ended => entry.job.note_end(),
                FlowEvent::Settled | FlowEvent::Acknowledged => {}
            }
            queue.wake(Side::job(token))
        };
        self.ring_if(is_new);
    }
}

#[cfg(test)]
mod tests;
