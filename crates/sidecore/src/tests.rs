//! A sidecore with small workers on real threads and real eventfds.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use base::clock::MonotonicClock;
use base::event::Event;

use crate::{Arm, Sidecore, SidecoreConfig, Worker};

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
    Fired(RawFd),
}

impl Worker for Counting {
    fn poll(&mut self, _now_ns: u64) -> usize {
        assert!(!self.armed, "polled while armed");
        if !self.event.drain() {
            return 0;
        }
        assert!(!self.panic_on_ring, "as the test wants");
        self.rung += 1;
        let _ = self.told.try_send(Told::Polled);
        1
    }

    fn arm(&mut self, _now_ns: u64) -> Arm {
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
    let config = SidecoreConfig { index: 0, cpu: None, spin_us, yield_when_idle: true };
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

#[test]
fn a_kick_wakes_a_sleeping_sidecore() {
    let core = sidecore(0);
    let (worker, bell, tells) = counting(false);
    let fd = worker.event.as_raw_fd();
    let worker = core.add(worker).unwrap();
    worker.call(move |_, watcher| watcher.watch(fd)).unwrap().unwrap();
    for _ in 0..100 {
        wait_for(&tells, &Told::Slept);
        bell.signal().unwrap();
        wait_for(&tells, &Told::Fired(fd));
        wait_for(&tells, &Told::Polled);
    }
    assert_eq!(worker.call(|w, _| w.rung).unwrap(), 100);
    assert!(core.stats().sleeps.get() >= 100);
    core.shutdown();
}

#[test]
fn while_spinning_work_is_found_without_a_kick() {
    let core = sidecore(u32::MAX);
    let (worker, bell, tells) = counting(false);
    let worker = core.add(worker).unwrap();
    bell.signal().unwrap();
    wait_for(&tells, &Told::Polled);
    assert_eq!(worker.call(|w, _| w.rung).unwrap(), 1);
    assert_eq!(core.stats().sleeps.get(), 0);
    core.shutdown();
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
    let config =
        SidecoreConfig { index: 3, cpu: Some(1 << 20), spin_us: 0, yield_when_idle: false };
    let text = Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap_err().to_string();
    assert!(text.contains("pinning"), "{text}");
}

/// Wants to be woken at a time of its own.
struct Timed(SyncSender<u64>, u64);

impl Worker for Timed {
    fn poll(&mut self, now_ns: u64) -> usize {
        if self.1 != 0 && now_ns >= self.1 {
            let _ = self.0.try_send(now_ns);
            self.1 = u64::MAX;
        }
        0
    }

    fn arm(&mut self, now_ns: u64) -> Arm {
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
