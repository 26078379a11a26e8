//! The threads of a VM's pipes. A pipe that has nothing to do costs no thread: it waits in the pool's
//! epoll set for its twin, for an event of the switch, or for a time.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use net::flow::{FlowEvent, FlowWatch};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::agent::Agent;
use crate::job::{Job, Next, Side};

/// The wake-up's place in the epoll set; tokens of pipes count from 2.
const WAKE: u64 = 0;

/// Something that is no pipe's step.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

struct Queue {
    tasks: VecDeque<Task>,
    jobs: HashMap<u64, Arc<Job>>,
    /// Pipes that something happened to.
    ready: VecDeque<u64>,
    /// Pipes to be looked at again, the next one first.
    timers: BTreeSet<(Instant, u64)>,
}

/// What a thread is to do.
enum Due {
    Pipe(u64),
    Task(Task),
}

/// See the module's text.
pub(crate) struct Pool {
    queue: Mutex<Queue>,
    epoll: OwnedFd,
    /// A semaphore: one for each entry of `ready`.
    wake: OwnedFd,
    /// A pipe has gone.
    gone: Condvar,
    stop: AtomicBool,
}

impl Pool {
    /// Starts the threads.
    pub fn start(vm: &str, threads: u16) -> io::Result<(Arc<Self>, Vec<JoinHandle<()>>)> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let wake = eventfd(0, flags)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let queue = Queue {
            tasks: VecDeque::new(),
            jobs: HashMap::new(),
            ready: VecDeque::new(),
            timers: BTreeSet::new(),
        };
        let stop = AtomicBool::new(false);
        let pool =
            Arc::new(Self { queue: Mutex::new(queue), epoll, wake, gone: Condvar::new(), stop });
        let mut handles = Vec::new();
        for index in 0..threads {
            let own = Arc::clone(&pool);
            let builder = std::thread::Builder::new().name(format!("pipe{index} {vm}"));
            let handle = builder.spawn(move || own.work()).inspect_err(|_| pool.stop())?;
            handles.push(handle);
        }
        Ok((pool, handles))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the threads; they finish what they do.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&self.wake, &1024u64.to_ne_bytes());
    }

    /// Ends all pipes for that reason, and waits until they have ended, for so long at most.
    pub fn drain(&self, reason: Reason, time: Duration) {
        for job in self.jobs() {
            job.cancel(reason);
            self.nudge(job.token);
        }
        let queue = self.lock();
        // Those that are left lose their connections.
        let _ = self.gone.wait_timeout_while(queue, time, |queue| !queue.jobs.is_empty());
    }

    /// How many pipes there are.
    pub fn len(&self) -> usize {
        self.lock().jobs.len()
    }

    /// The agent's pipe of that id.
    pub fn find(&self, agent: &Agent, id: u64) -> Option<Arc<Job>> {
        self.lock().jobs.values().find(|job| job.is_of(agent, Some(id))).cloned()
    }

    /// All pipes.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        self.lock().jobs.values().cloned().collect()
    }

    /// A new pipe; its first step comes soon.
    pub fn add(&self, job: Job) {
        let token = job.token;
        let mut queue = self.lock();
        queue.jobs.insert(token, Arc::new(job));
        queue.ready.push_back(token);
        drop(queue);
        self.ring();
    }

    /// Something happened to a pipe.
    pub fn nudge(&self, token: u64) {
        self.lock().ready.push_back(token);
        self.ring();
    }

    fn ring(&self) {
        // Fails only when it is rung 2^64 times.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Has the pool look at the descriptor for its pipe; at nothing until [`Pool::arm`].
    pub fn watch(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = epoll::EventFlags::ONESHOT;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// The pipe goes on when the descriptor takes bytes, or fails.
    pub fn arm_for_output(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.arm(token, fd, epoll::EventFlags::OUT)
    }

    /// The pipe goes on when the descriptor has bytes, or fails.
    pub fn arm_for_input(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.arm(token, fd, epoll::EventFlags::IN)
    }

    /// The pipe goes on when the descriptor fails.
    pub fn arm_for_failure(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.arm(token, fd, epoll::EventFlags::empty())
    }

    fn arm(&self, token: u64, fd: BorrowedFd<'_>, flags: epoll::EventFlags) -> io::Result<()> {
        let flags = epoll::EventFlags::ONESHOT | flags;
        Ok(epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Has a thread of the pool do something that waits for a disk.
    pub fn run(&self, task: Task) {
        self.lock().tasks.push_back(task);
        self.ring();
    }

    fn work(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            match self.next() {
                Some(Due::Pipe(token)) => self.step(token),
                Some(Due::Task(task)) => task(),
                None => {}
            }
        }
    }

    /// Waits for the next thing to do.
    fn next(&self) -> Option<Due> {
        let until = self.lock().timers.first().map(|(at, _)| *at);
        let left = until.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        let found = epoll::wait(&self.epoll, &mut events, timeout.as_ref()).unwrap_or(0);
        let mut queue = self.lock();
        if found > 0 && events[0].data.u64() != WAKE {
            return Some(Due::Pipe(Side::job(events[0].data.u64())));
        }
        if found > 0 {
            // Another thread may have taken it: the queue tells.
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        }
        if let Some(task) = queue.tasks.pop_front() {
            return Some(Due::Task(task));
        }
        if let Some(token) = queue.ready.pop_front() {
            return Some(Due::Pipe(token));
        }
        let (at, token) = *queue.timers.first()?;
        (at <= Instant::now()).then(|| {
            queue.timers.pop_first();
            Due::Pipe(token)
        })
    }

    fn step(&self, token: u64) {
        let Some(job) = self.lock().jobs.get(&token).cloned() else { return };
        match job.advance(self) {
            Next::Again => self.nudge(token),
            Next::Wait(at) => {
                let mut queue = self.lock();
                // It may have ended meanwhile in another thread.
                if queue.jobs.contains_key(&token) {
                    let previous = job.timer().replace(at);
                    previous.into_iter().for_each(|at| _ = queue.timers.remove(&(at, token)));
                    queue.timers.insert((at, token));
                }
            }
            Next::Over(moved_bytes, reason) => {
                let mut queue = self.lock();
                if queue.jobs.remove(&token).is_some() {
                    let timer = job.timer().take();
                    timer.into_iter().for_each(|at| _ = queue.timers.remove(&(at, token)));
                    drop(queue);
                    job.answer(moved_bytes, reason);
                    self.gone.notify_all();
                }
            }
        }
    }
}

impl FlowWatch for Pool {
    fn flow_event(&self, token: u64, event: FlowEvent) {
        if let Some(job) = self.lock().jobs.get(&Side::job(token)) {
            job.note(token, event);
        }
        self.nudge(Side::job(token));
    }
}
