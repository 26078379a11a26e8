//! Tests of the turns that pipes take.

use super::*;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::job::Work;
use crate::testing::{nobody, vm_with};

/// A pipe whose steps a test does.
struct Step<F>(F);

impl<F: FnMut() -> StepOutcome + Send> Work for Step<F> {
    fn step(&mut self, _: &Job, _: &EpollSet) -> StepOutcome {
        (self.0)()
    }

    fn state(&self) -> &'static str {
        "tested"
    }
}

struct World {
    pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
    line: Arc<Line>,
    _stream: UnixStream,
}

impl World {
    fn new(threads: u16) -> Self {
        let (stream, own) = UnixStream::pair().unwrap();
        let (pool, threads) = Pool::start("t", threads).unwrap();
        let line = Arc::new(Line::new(&own).unwrap());
        Self { pool, threads, line, _stream: stream }
    }

    fn add(&self, token: u64, step: impl FnMut() -> StepOutcome + Send + 'static) -> bool {
        let (line, ends) = ((token, Arc::clone(&self.line)), ["a".into(), "b".into()]);
        let work = Box::new(Step(step));
        self.pool.add(Job::new(token, line, (ends, 1), (work, Vec::new()), nobody()))
    }

    fn end(&mut self) {
        self.pool.stop();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end();
    }
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// A step that tells that it runs, and ends when it is told.
fn gate() -> (impl FnMut() -> StepOutcome + Send + 'static, Receiver<()>, Sender<()>) {
    let ((begun, has_begun), (go_on, goes_on)) = (channel(), channel());
    let step = move || {
        begun.send(()).unwrap();
        goes_on.recv().unwrap();
        StepOutcome::Wait(far())
    };
    (step, has_begun, go_on)
}

#[test]
fn a_pipe_that_is_busy_holds_one_thread() {
    let world = World::new(2);
    let (step, has_begun, go_on) = gate();
    world.add(2, step);
    has_begun.recv().unwrap();
    (0..100).for_each(|_| world.pool.nudge(2));
    let (told, heard) = channel();
    world.add(4, move || {
        told.send(()).unwrap();
        StepOutcome::Wait(far())
    });
    heard.recv().unwrap();
    go_on.send(()).unwrap();
    // What happened meanwhile is looked at, once.
    has_begun.recv().unwrap();
    go_on.send(()).unwrap();
    world.pool.nudge(4);
    heard.recv().unwrap();
    assert!(has_begun.try_recv().is_err());
    assert!(lock(&world.pool.queue).ready.is_empty());
}

#[test]
fn what_is_due_comes_before_what_is_ready() {
    let world = World::new(1);
    let (steps, is_over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let seen = Arc::clone(&is_over);
    world.add(2, move || match seen.load(Ordering::Relaxed) {
        true => StepOutcome::Over(0, Reason::Complete),
        false => StepOutcome::Again,
    });
    let (told, heard) = channel();
    let own = Arc::clone(&steps);
    world.add(4, move || {
        if own.fetch_add(1, Ordering::Relaxed) == 3 {
            told.send(()).unwrap();
        }
        StepOutcome::Wait(Instant::now() + Duration::from_millis(1))
    });
    heard.recv().unwrap();
    is_over.store(true, Ordering::Relaxed);
}

/// Tells when it is dropped.
struct Told(Sender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
#[allow(non_snake_case)]
fn abuse_S1_a_step_that_panics_ends_its_pipe_alone() {
    let mut world = World::new(1);
    let (told, heard) = channel();
    let (own, kept) = (Told(told.clone()), Told(told));
    world.add(2, move || {
        let _own = &own;
        panic!("a pipe's step");
    });
    heard.recv().unwrap();
    world.pool.run(Box::new(|| panic!("a pipe's task")));
    let (step, has_begun, go_on) = gate();
    world.add(4, step);
    has_begun.recv().unwrap();
    assert_eq!((world.pool.len(), world.pool.find(&world.line, 2).is_none()), (1, true));
    go_on.send(()).unwrap();
    // No thread panicked.
    world.end();
    drop(kept);
}

#[test]
fn a_pool_that_has_ended_keeps_nothing() {
    let mut world = World::new(2);
    let (told, heard) = channel();
    let (first, second) = (Told(told.clone()), Told(told));
    world.add(2, move || {
        let _own = &first;
        StepOutcome::Wait(far())
    });
    world.pool.drain(Reason::HostGone, Duration::ZERO);
    assert!(!world.add(4, || StepOutcome::Wait(far())), "it takes nothing in");
    world.end();
    assert!(heard.try_recv().is_err());
    world.pool.clear();
    heard.try_recv().unwrap();
    world.pool.run(Box::new(move || drop(second)));
    heard.try_recv().unwrap();
    assert_eq!(world.pool.len(), 0);
}

#[test]
fn pipes_that_were_answered_are_nobodys() {
    let world = World::new(1);
    world.add(2, || StepOutcome::Wait(far()));
    let job = world.pool.find(&world.line, 2).unwrap();
    job.answer(0, Reason::LeaseBroken);
    assert!(world.pool.find(&world.line, 2).is_none());
    assert_eq!(world.pool.len(), 1);
}

/// The step works for 20 ms by its thread's own clock, not by the wall's.
#[test]
fn the_cpu_time_of_a_step_is_its_vms() {
    let mut world = World::new(1);
    let (purse, account, _clock) = vm_with(0);
    let (told, heard) = channel();
    let step = move || {
        let begun = thread_time();
        while thread_time() - begun < Duration::from_millis(20) {}
        told.send(()).unwrap();
        StepOutcome::Over(0, Reason::Complete)
    };
    let (line, ends) = ((2, Arc::clone(&world.line)), ["a".into(), "b".into()]);
    let work = Box::new(Step(step));
    let others = vm_with(0);
    assert!(world.pool.add(Job::new(2, line, (ends, 1), (work, Vec::new()), purse)));
    heard.recv().unwrap();
    world.end();
    let worked = account.stats.thread_ns.load(Ordering::Relaxed);
    assert!(worked >= 20_000_000, "{worked}");
    assert_eq!(account.stats.charged_bytes.load(Ordering::Relaxed), 0, "no ceiling knows it");
    assert_eq!(others.1.stats.thread_ns.load(Ordering::Relaxed), 0);
}
