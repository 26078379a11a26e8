//! Doorbells of a front end that wants to block us.
#![allow(non_snake_case)]
// Helpers of tests may unwrap as the tests themselves do.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd;
use std::os::unix::thread::JoinHandleExt;
use std::time::Duration;

use base::event::Event;
use queue::testing::ModelDriver;
use queue::{Batch, Completion, Layout, Vring};
use rustix::fs::OFlags;

extern "C" fn nothing(_signal: libc::c_int) {}

/// A handler without SA_RESTART: system calls that it interrupts fail with EINTR.
fn interrupt_by(signal: libc::c_int) {
    // SAFETY: all zeroes is a valid `struct sigaction`, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// Fills the eventfd and makes it blocking, as its other owner can at any time.
fn block(event: &Event) {
    rustix::io::write(event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let flags = rustix::fs::fcntl_getfl(event).unwrap();
    rustix::fs::fcntl_setfl(event, flags - OFlags::NONBLOCK).unwrap();
}

fn complete_one(driver: &mut ModelDriver, vring: &mut Vring) {
    let buffer = driver.buffer(b"x");
    driver.offer(&[buffer], &[]);
    let mut batch = Batch::new(8, 8);
    assert_eq!(vring.pop(&mut batch, 8), 1);
    let (id, ndesc) = (batch.get(0).id, batch.get(0).ndesc);
    vring.push(&[Completion { id, ndesc, written: 0 }]);
}

/// Whoever interrupts the sleeper gets it back: the port is broken, and its call is not rung again.
#[test]
fn abuse_P1_a_call_that_sleeps_is_interrupted_and_breaks_its_port() {
    interrupt_by(libc::SIGUSR1);
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = driver.vring(0);
    complete_one(&mut driver, &mut vring);
    block(driver.call_event());
    let sleeper = std::thread::spawn(move || {
        vring.notify();
        vring
    });
    let thread = sleeper.as_pthread_t();
    while !sleeper.is_finished() {
        // SAFETY: the thread is not joined yet, so its id is valid.
        unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
        std::thread::sleep(Duration::from_millis(1));
    }
    let vring = sleeper.join().unwrap();
    let reason = driver.health().reason().unwrap();
    assert!(reason.contains("queue 0") && reason.contains("call event"), "{reason}");
    assert!(vring.parts.call.is_none());
}

/// Full but not blocking: the driver was told already.
#[test]
fn abuse_P1_a_saturated_call_is_a_rung_one() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = driver.vring(0);
    complete_one(&mut driver, &mut vring);
    rustix::io::write(driver.call_event().as_fd(), &(u64::MAX - 1).to_ne_bytes()).unwrap();
    vring.notify();
    assert!(driver.health().is_live());
    assert!(vring.parts.call.is_some());
}
