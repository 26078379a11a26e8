//! Doorbells of a front end that wants to block us.
#![allow(non_snake_case)]
// Helpers of tests may unwrap as the tests themselves do.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd;

use base::testing::fill_and_block;
use queue::testing::ModelDriver;
use queue::{Batch, Completion, Layout, Queue, RingError, RingSetup, Vring};

fn complete_one(driver: &mut ModelDriver, vring: &mut Vring) {
    let buffer = driver.buffer(b"x");
    driver.offer(&[buffer], &[]);
    let mut batch = Batch::new(8, 8);
    assert_eq!(vring.pop(&mut batch, 8), 1);
    let (id, ndesc) = (batch.get(0).id, batch.get(0).ndesc);
    vring.push(&[Completion { id, ndesc, written: 0 }]);
}

/// The driver was told already, and nobody waits for it.
#[test]
fn abuse_V2_a_full_blocking_call_holds_up_nobody() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut driver = ModelDriver::new(layout, 32);
        let mut vring = driver.vring(0);
        fill_and_block(driver.call_event());
        for _ in 0..20 {
            complete_one(&mut driver, &mut vring);
            vring.notify();
        }
        assert!(driver.health().is_live());
        assert!(vring.parts.call.is_some());
    }
}

/// A queue that does not begin fresh rings its driver at the start.
#[test]
fn abuse_V2_a_full_blocking_call_does_not_hold_up_a_start() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = driver.vring(0);
    complete_one(&mut driver, &mut vring);
    let start = vring.queue.position();
    fill_and_block(driver.call_event());
    let setup = RingSetup { start, ..driver.setup() };
    let queue = Queue::new(driver.memory(), setup).unwrap();
    let vring = Vring::new(queue, driver.parts(0)).unwrap();
    assert!(driver.health().is_live() && vring.parts.call.is_some());
}

#[test]
fn abuse_V2_a_full_blocking_err_does_not_hold_up_a_break() {
    let driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = driver.vring(0);
    fill_and_block(driver.err_event());
    vring.fail(&RingError::BadInflight("a test".into()));
    assert!(!driver.health().is_live() && vring.parts.err.is_some());
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
