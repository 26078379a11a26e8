//! A sidecore with small workers on real threads and real eventfds.

#![allow(non_snake_case)]

mod moves;

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use base::clock::MonotonicClock;
use base::event::Event;

use crate::{Arm, Ledger, Sidecore, SidecoreConfig, Worker, WorkerRef};

/// Longer than anything takes that is not stuck.
const PATIENCE: Duration = Duration::from_secs(20);

/// Counts the rings of an event; tells the test of everything that happens to it.
struct Counting {
    event: Event,
    rung: usize,
    armed: bool,
    told: SyncSender<Told>,
    panic_on_ring: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Told {
    Polled,
    Slept,
    Called,
    Fired(RawFd),
}

impl Worker for Counting {
    fn poll(&mut self, _now_ns: u64, _: &mut Ledger) -> usize {
        assert!(!self.armed, "polled while armed");
        if !self.event.drain() {
            return 0;
        }
        assert!(!self.panic_on_ring, "as the test wants");
        self.rung += 1;
        let _ = self.told.try_send(Told::Polled);
        1
    }

    fn arm(&mut self, _now_ns: u64, _: &mut Ledger) -> Arm {
        self.armed = true;
        let _ = self.told.try_send(Told::Slept);
        Arm::Idle
    }

    fn disarm(&mut self) {
        self.armed = false;
    }

    fn fired(&mut self, fd: RawFd) {
        let _ = self.told.try_send(Told::Fired(fd));
    }
}

fn sidecore(spin_us: u32) -> Sidecore {
    let config = SidecoreConfig { spin_us, yield_when_idle: true, ..SidecoreConfig::default() };
    Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap()
}

fn counting(panic_on_ring: bool) -> (Counting, Event, Receiver<Told>) {
    let event = Event::new().unwrap();
    let bell = event.try_clone().unwrap();
    let (told, tells) = sync_channel(1024);
    (Counting { event, rung: 0, armed: false, told, panic_on_ring }, bell, tells)
}

fn wait_for(tells: &Receiver<Told>, wanted: &Told) {
    while tells.recv().unwrap() != *wanted {}
}

/// Waits until the worker is armed after this; what was told before is read away.
fn sleeps_again(worker: &WorkerRef<Counting>, tells: &Receiver<Told>) {
    worker.call(|w, _| w.told.try_send(Told::Called).unwrap()).unwrap();
    wait_for(tells, &Told::Called);
    wait_for(tells, &Told::Slept);
}

#[test]
fn a_kick_wakes_a_sleeping_sidecore() {
    let core = sidecore(0);
    let (worker, bell, tells) = counting(false);
    let fd = worker.event.as_raw_fd();
    let worker = core.add(worker).unwrap();
    worker.call(move |_, watcher| watcher.watch(fd)).unwrap().unwrap();
    // A kick before that is found by the round that follows the call, and fires nothing.
    sleeps_again(&worker, &tells);
    for _ in 0..100 {
        bell.signal().unwrap();
        wait_for(&tells, &Told::Fired(fd));
        wait_for(&tells, &Told::Polled);
        wait_for(&tells, &Told::Slept);
    }
    assert_eq!(worker.call(|w, _| w.rung).unwrap(), 100);
    core.shutdown();
    let stats = core.stats();
    assert!(stats.sleeps.get() >= 100 && stats.wakeups.get() >= 100);
    assert!(stats.asleep_ns.get() > 0);
}

#[test]
fn while_spinning_work_is_found_without_a_kick() {
    let core = sidecore(u32::MAX);
    let (worker, bell, tells) = counting(false);
    let worker = core.add(worker).unwrap();
    // Polling has begun: what comes now is found by it.
    while core.stats().spin_ns.get() == 0 {
        std::thread::yield_now();
    }
    bell.signal().unwrap();
    wait_for(&tells, &Told::Polled);
    assert_eq!(worker.call(|w, _| w.rung).unwrap(), 1);
    core.shutdown();
    let stats = core.stats();
    assert_eq!((stats.sleeps.get(), stats.asleep_ns.get()), (0, 0));
    assert!(stats.spin_hits.get() >= 1 && stats.spin_ns.get() > 0);
}

#[test]
fn a_worker_comes_back_when_removed_and_its_handle_is_dead() {
    let core = sidecore(0);
    let (worker, _bell, _tells) = counting(false);
    let handle = core.add(worker).unwrap();
    assert_eq!(core.stats().workers.get(), 1);
    let worker = handle.remove().unwrap();
    assert_eq!(worker.rung, 0);
    assert_eq!(core.stats().workers.get(), 0);
    assert!(handle.call(|w, _| w.rung).unwrap_err().to_string().contains("no longer"));
    core.shutdown();
}

#[test]
fn a_panicking_worker_goes_and_the_others_stay() {
    let core = sidecore(0);
    let (bad, bad_bell, bad_tells) = counting(true);
    let (good, good_bell, good_tells) = counting(false);
    let (bad_fd, good_fd) = (bad.event.as_raw_fd(), good.event.as_raw_fd());
    let bad = core.add(bad).unwrap();
    let good = core.add(good).unwrap();
    bad.call(move |_, watcher| watcher.watch(bad_fd)).unwrap().unwrap();
    good.call(move |_, watcher| watcher.watch(good_fd)).unwrap().unwrap();
    bad_bell.signal().unwrap();
    // The channel closes when the panicked worker is dropped.
    while bad_tells.recv().is_ok() {}
    good_bell.signal().unwrap();
    wait_for(&good_tells, &Told::Polled);
    assert!(bad.call(|w, _| w.rung).is_err());
    assert_eq!(good.call(|w, _| w.rung).unwrap(), 1);
    assert_eq!(core.stats().panics.get(), 1);
    core.shutdown();
}

/// Place where a [`Panicking`] worker panics, besides its drop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Where {
    Poll,
    Arm,
    Disarm,
    Fired,
    Call,
}

/// Panics as soon as its event was rung. The channel closes when it is dropped.
struct Panicking {
    place: Where,
    event: Event,
    _alive: SyncSender<()>,
}

impl Panicking {
    fn at(&self, here: Where) {
        assert!(self.place != here || !self.event.drain(), "as the test wants");
    }
}

impl Worker for Panicking {
    fn poll(&mut self, _now_ns: u64, _: &mut Ledger) -> usize {
        self.at(Where::Poll);
        0
    }
    fn arm(&mut self, _now_ns: u64, _: &mut Ledger) -> Arm {
        self.at(Where::Arm);
        Arm::Idle
    }
    fn disarm(&mut self) {
        self.at(Where::Disarm);
    }
    fn fired(&mut self, _fd: RawFd) {
        self.at(Where::Fired);
    }
}

impl Drop for Panicking {
    fn drop(&mut self) {
        panic!("in its drop, too: as the test wants");
    }
}

#[test]
fn a_panic_anywhere_takes_off_its_worker_only() {
    for place in [Where::Poll, Where::Arm, Where::Disarm, Where::Fired, Where::Call] {
        let core = sidecore(0);
        let (first, first_bell, first_tells) = counting(false);
        let first_fd = first.event.as_raw_fd();
        let first = core.add(first).unwrap();
        let event = Event::new().unwrap();
        let (bell, fd) = (event.try_clone().unwrap(), event.as_raw_fd());
        let (alive, dropped) = sync_channel(1);
        let bad = core.add(Panicking { place, event, _alive: alive }).unwrap();
        let (last, last_bell, last_tells) = counting(false);
        let last_fd = last.event.as_raw_fd();
        let last = core.add(last).unwrap();
        for (worker, fd) in [(&first, first_fd), (&last, last_fd)] {
            worker.call(move |_, watcher| watcher.watch(fd)).unwrap().unwrap();
        }
        bad.call(move |_, watcher| watcher.watch(fd)).unwrap().unwrap();
        bell.signal().unwrap();
        if place == Where::Call {
            let answer = bad.call(|worker, _| worker.at(Where::Call));
            assert!(matches!(answer, Err(crate::SidecoreError::NoWorker(0))), "{answer:?}");
        }
        while dropped.recv().is_ok() {}
        // `assert!(!self.armed)` in their poll: both are disarmed as often as they were armed.
        for (bell, tells) in [(first_bell, first_tells), (last_bell, last_tells)] {
            bell.signal().unwrap();
            wait_for(&tells, &Told::Polled);
        }
        assert!(bad.call(|_, _| ()).is_err(), "{place:?}");
        assert_eq!(last.call(|w, _| w.rung).unwrap(), 1);
        assert_eq!((core.stats().panics.get(), core.stats().workers.get()), (1, 2), "{place:?}");
        core.shutdown();
    }
}

#[test]
fn shutting_down_survives_a_worker_that_panics_in_its_drop() {
    let core = sidecore(0);
    let (alive, dropped) = sync_channel(1);
    let event = Event::new().unwrap();
    let _bad = core.add(Panicking { place: Where::Poll, event, _alive: alive }).unwrap();
    let (good, _bell, tells) = counting(false);
    let _good = core.add(good).unwrap();
    core.shutdown();
    while dropped.recv().is_ok() {}
    while tells.recv().is_ok() {}
}

/// Says whether it was polled.
struct Polled(Arc<AtomicBool>);

impl Worker for Polled {
    fn poll(&mut self, _now_ns: u64, _: &mut Ledger) -> usize {
        self.0.store(true, Ordering::SeqCst);
        0
    }
    fn arm(&mut self, _now_ns: u64, _: &mut Ledger) -> Arm {
        Arm::Idle
    }
    fn disarm(&mut self) {}
}

/// A job that comes again until `polled`.
fn post_again(core: Sidecore, polled: Arc<AtomicBool>, done: SyncSender<()>) {
    let next = core.clone();
    let job = move |_: &mut crate::run::Run| match polled.load(Ordering::SeqCst) {
        true => drop(done.send(())),
        false => post_again(next, polled, done),
    };
    core.post(Box::new(job)).unwrap();
}

#[test]
fn abuse_R10_jobs_without_an_end_leave_the_workers_their_rounds() {
    let core = sidecore(0);
    let polled = Arc::new(AtomicBool::new(false));
    let _worker = core.add(Polled(Arc::clone(&polled))).unwrap();
    polled.store(false, Ordering::SeqCst);
    let (done, wait) = sync_channel(1);
    post_again(core.clone(), polled, done);
    assert!(wait.recv_timeout(PATIENCE).is_ok(), "the worker is never polled");
    core.shutdown();
}

#[test]
fn jobs_that_a_drain_leaves_are_run_though_no_bell_tells_of_them() {
    let core = sidecore(0);
    let (done, wait) = sync_channel(1000);
    // They wait until the last has come: then one ring of the bell is all there is.
    let (go, start) = sync_channel::<()>(0);
    core.post(Box::new(move |_| start.recv().unwrap())).unwrap();
    for _ in 0..10 * crate::run::JOBS_PER_ROUND {
        let done = done.clone();
        core.post(Box::new(move |_| done.send(()).unwrap())).unwrap();
    }
    go.send(()).unwrap();
    for i in 0..10 * crate::run::JOBS_PER_ROUND {
        assert!(wait.recv_timeout(PATIENCE).is_ok(), "job {i} is not run");
    }
    core.shutdown();
}

#[test]
fn after_shutdown_calls_fail() {
    let core = sidecore(0);
    let (worker, _bell, tells) = counting(false);
    let handle = core.add(worker).unwrap();
    core.shutdown();
    // Its worker was dropped on the way out.
    while tells.recv().is_ok() {}
    assert!(handle.call(|w, _| w.rung).is_err());
    assert!(core.add(counting(false).0).is_err());
    core.shutdown();
}

#[test]
fn a_missing_cpu_is_an_error() {
    let config = SidecoreConfig { index: 3, cpu: Some(1 << 20), ..SidecoreConfig::default() };
    let text = Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap_err().to_string();
    assert!(text.contains("pinning"), "{text}");
}

/// Wants to be woken at a time of its own.
struct Timed(SyncSender<u64>, u64);

impl Worker for Timed {
    fn poll(&mut self, now_ns: u64, _: &mut Ledger) -> usize {
        if self.1 != 0 && now_ns >= self.1 {
            let _ = self.0.try_send(now_ns);
            self.1 = u64::MAX;
        }
        0
    }

    fn arm(&mut self, now_ns: u64, _: &mut Ledger) -> Arm {
        match self.1 {
            u64::MAX => Arm::Idle,
            0 => {
                self.1 = now_ns + 5_000_000;
                Arm::Until(self.1)
            }
            at_ns => Arm::Until(at_ns),
        }
    }

    fn disarm(&mut self) {}
}

#[test]
fn a_deadline_wakes_it() {
    let core = sidecore(0);
    let (told, tells) = sync_channel(1);
    let handle = core.add(Timed(told, 0)).unwrap();
    assert!(tells.recv().is_ok());
    drop(handle);
    core.shutdown();
}
