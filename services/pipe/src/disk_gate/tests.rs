//! Reads that pass the gate, by the account's clock.
#![allow(non_snake_case)]

use std::sync::atomic::Ordering;

use super::*;
use crate::testing::vm_with;

const MIB: u64 = 1 << 20;

/// Reads as much as may be read now, at most `most_bytes` at a time.
fn drain(gate: &mut DiskGate, most_bytes: u64) -> u64 {
    let mut read = 0;
    while let Ok(n) = gate.read(most_bytes, |may_move| (may_move, may_move)) {
        read += n;
    }
    read
}

#[test]
fn abuse_R10_a_ceiling_holds_for_all_pipes_of_a_vm_together() {
    let (purse, account, clock) = vm_with(100 * MIB);
    let mut gates = [0, 1, 2].map(|_| DiskGate::new(Arc::clone(&purse), None));
    let mut read = 0;
    for step in 0..1000 {
        read += drain(&mut gates[step % 3], MIB);
        assert!(gates[step % 3].is_held());
        clock.advance_ns(1_000_000);
    }
    // A burst of 100 ms and what came in within the second, and what was borrowed last.
    assert!((110 * MIB - MIB..=110 * MIB + 64 * 1024).contains(&read), "{read}");
    assert_eq!(account.stats.charged_bytes.load(Ordering::Relaxed), read);
    assert_eq!(purse.held(), 3);
    drop(gates);
    assert_eq!(purse.held(), 0);
    assert!(account.stats.held_by_ceiling_ns.load(Ordering::Relaxed) > 2_900_000_000);
}

#[test]
fn without_a_ceiling_nothing_waits_and_all_is_charged() {
    let (purse, account, _clock) = vm_with(0);
    let mut gate = DiskGate::new(Arc::clone(&purse), None);
    for _ in 0..1000 {
        assert_eq!(gate.read(MIB, |may_move| (may_move, may_move)), Ok(MIB));
    }
    assert_eq!(gate.read(100, |_| (100, ())), Ok(()));
    // A socket that takes nothing.
    assert_eq!(gate.read(MIB, |_| (0, ())), Ok(()));
    let counted = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let stats = &account.stats;
    assert_eq!(counted(&stats.charged_bytes), 1000 * MIB + 4096, "with its minimum");
    assert_eq!((counted(&stats.charged_requests), counted(&stats.held_by_ceiling)), (1001, 0));
    assert_eq!(counted(&purse.stats.read_bytes), 1000 * MIB + 100);
}

#[test]
fn what_was_not_read_costs_nothing() {
    let (purse, _, clock) = vm_with(10 * MIB);
    let mut gate = DiskGate::new(Arc::clone(&purse), None);
    // Again and again a burst is asked for, and little of it is moved.
    for _ in 0..15 {
        assert_eq!(gate.read(MIB, |_| (64 << 10, ())), Ok(()));
        assert_eq!(gate.read(MIB, |_| (0, ())), Ok(()));
    }
    assert_eq!(gate.read(64 << 10, |_| (64 << 10, ())), Ok(()));
    assert!(gate.read(MIB, |_| (0, ())).is_err());
    // What cannot wait is read, and owed.
    gate.read_at_once(|| (MIB, ()));
    clock.advance_ns(50_000_000);
    assert!(gate.read(MIB, |_| (0, ())).is_err());
    clock.advance_ns(60_000_000);
    assert!(gate.read(MIB, |_| (0, ())).is_ok());
    assert_eq!(purse.stats.held.load(Ordering::Relaxed), 2);
}

/// The more pipes wait, the more seldom each of them looks.
#[test]
fn a_pipe_that_waits_is_due_when_there_are_bytes_again() {
    let (purse, account, _clock) = vm_with(10 * MIB);
    let mut gates: Vec<_> = (0..64).map(|_| DiskGate::new(Arc::clone(&purse), None)).collect();
    drain(&mut gates[0], MIB);
    let now_ns = purse.now_ns();
    let Err(at_ns) = account.ask(1, now_ns) else { panic!("not at its ceiling") };
    let before = Instant::now();
    let mut waits = Vec::new();
    for gate in &mut gates {
        let Err(at) = gate.read(MIB, |_| (0, ())) else { panic!("not held") };
        waits.push(at - before);
    }
    let soonest = Duration::from_nanos(at_ns - now_ns);
    assert!(waits.iter().all(|wait| *wait >= soonest));
    let pause = waits.iter().sum::<Duration>() / 64 - soonest;
    assert!(pause > 8 * HELD_PAUSE, "{pause:?}");
    // A ceiling of nearly nothing: it is looked at again soon, as it may have been raised.
    let (purse, ..) = vm_with(100);
    let mut gate = DiskGate::new(purse, None);
    drain(&mut gate, MIB);
    gate.read_at_once(|| (MIB, ()));
    let before = Instant::now();
    let Err(at) = gate.read(1, |_| (0, ())) else { panic!("not held") };
    assert!(at <= Instant::now() + RECHECK_PERIOD && at > before);
}
