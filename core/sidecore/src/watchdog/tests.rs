//! Real threads, real eventfds that block.

#![allow(non_snake_case)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use base::clock::MonotonicClock;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::*;
use crate::{Arm, Ledger, SidecoreConfig, Worker};

/// Longer than anything takes that is not stuck.
const PATIENCE: Duration = Duration::from_secs(20);

/// Between two looks: twice this is more than a busy machine keeps a thread waiting.
const SOON: Duration = Duration::from_millis(100);

fn sidecore(index: usize, spin_us: u32) -> Sidecore {
    let config =
        SidecoreConfig { index, spin_us, yield_when_idle: true, ..SidecoreConfig::default() };
    Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap()
}

/// Rings a doorbell in each poll until that fails.
struct Ringing {
    bell: Option<OwnedFd>,
    told: SyncSender<Result<usize, Errno>>,
}

impl Worker for Ringing {
    fn poll(&mut self, _now_ns: u64, _: &mut Ledger) -> usize {
        if let Some(bell) = &self.bell {
            let rung = rustix::io::write(bell, &1u64.to_ne_bytes());
            self.bell = None;
            let _ = self.told.try_send(rung);
        }
        0
    }
    fn arm(&mut self, _now_ns: u64, _: &mut Ledger) -> Arm {
        Arm::Idle
    }
    fn disarm(&mut self) {}
}

/// An eventfd that takes no more and blocks who rings it.
fn full() -> OwnedFd {
    let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    bell
}

#[test]
fn abuse_P1_a_doorbell_that_blocks_is_interrupted() {
    let (stuck, other) = (sidecore(0, 0), sidecore(1, 0));
    let _watchdog = Watchdog::with_interval(vec![stuck.clone(), other.clone()], SOON).unwrap();
    for times in 1..=3 {
        let (told, tells) = sync_channel(1);
        let worker = stuck.add(Ringing { bell: Some(full()), told }).unwrap();
        assert_eq!(tells.recv_timeout(PATIENCE), Ok(Err(Errno::INTR)));
        // It answers, and is seen to.
        worker.call(|_, _| ()).unwrap();
        assert!(stuck.stats().stalls.get() >= times);
        while stuck.is_stalled() {
            std::thread::sleep(SOON / 10);
        }
    }
    assert_eq!(other.stats().stalls.get(), 0);
    stuck.shutdown();
    other.shutdown();
}

#[test]
fn it_is_interrupted_though_whoever_started_us_blocked_the_signal() {
    let blocked = std::thread::spawn(|| {
        // SAFETY: fills a set that lives here, and blocks a signal for this thread only.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut set);
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        }
        sidecore(0, 0)
    });
    let core = blocked.join().unwrap();
    let _watchdog = Watchdog::with_interval(vec![core.clone()], SOON).unwrap();
    let (told, tells) = sync_channel(1);
    let _worker = core.add(Ringing { bell: Some(full()), told }).unwrap();
    assert_eq!(tells.recv_timeout(PATIENCE), Ok(Err(Errno::INTR)));
    core.shutdown();
}

#[test]
fn what_no_signal_ends_is_stalled_until_it_ends_by_itself() {
    let core = sidecore(0, 0);
    let _watchdog = Watchdog::with_interval(vec![core.clone()], SOON).unwrap();
    let (go, start) = sync_channel::<()>(0);
    core.post(Box::new(move |_| start.recv().unwrap())).unwrap();
    while !core.is_stalled() {
        std::thread::sleep(SOON / 10);
    }
    go.send(()).unwrap();
    while core.is_stalled() {
        std::thread::sleep(SOON / 10);
    }
    assert!(core.stats().stalls.get() >= 1);
    core.shutdown();
}

#[test]
fn who_sleeps_polls_or_has_ended_is_not_stalled() {
    let (asleep, awake, ended) = (sidecore(0, 0), sidecore(1, u32::MAX), sidecore(2, 0));
    ended.shutdown();
    let all = vec![asleep.clone(), awake.clone(), ended.clone()];
    asleep.add(Ringing { bell: None, told: sync_channel(1).0 }).unwrap();
    awake.add(Ringing { bell: None, told: sync_channel(1).0 }).unwrap();
    let watchdog = Watchdog::with_interval(all.clone(), 3 * SOON).unwrap();
    std::thread::sleep(15 * SOON);
    for core in &all {
        assert_eq!((core.stats().stalls.get(), core.is_stalled()), (0, false), "{}", core.index());
    }
    drop(watchdog);
    asleep.shutdown();
    awake.shutdown();
}
