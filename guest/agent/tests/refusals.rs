//! Reports of refused requests to the daemon, with their reasons.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use common::*;
use guest_abi::Reason;
use guest_abi::program::op;

mod common;

fn told(daemon: &Daemon) -> BTreeMap<&'static str, u32> {
    let mut sums = BTreeMap::new();
    for (reason, count) in &daemon.refused {
        *sums.entry(reason.key()).or_default() += count;
    }
    sums
}

fn refuse(program: &OwnedFd, count: usize) {
    let (server, _client) = tcp();
    for _ in 0..count {
        let zeroes = File::open("/dev/zero").unwrap();
        assert_eq!(refusal(program, zeroes, &server), Reason::NotAFile);
    }
}

#[test]
fn refusals_are_told_by_reason() {
    let world = World::new(Path::new("/dev/zero"), true);
    let (mut daemon, program) = (world.daemon(), world.program());
    refuse(&program, 3);
    // Of no op that there is, and without ends; and nothing to do is no refusal.
    for (op, len, want) in [
        (77, 1, Reason::Malformed),
        (op::PIPE, 1, Reason::Malformed),
        (op::QUERY, 0, Reason::Complete),
    ] {
        let got = ask(&program, &request(op, 0, len), &[]);
        assert_eq!(got.reason.get(), want as u16);
    }
    daemon.wait_refused(5);
    assert_eq!(told(&daemon), [("malformed", 2), ("not_a_file", 3)].into());
}

/// Reports to a new daemon include refusals from the time without one.
#[test]
fn the_next_daemon_is_told() {
    let world = World::new(Path::new("/dev/zero"), true);
    let (daemon, program) = (world.daemon(), world.program());
    drop(daemon);
    refuse(&program, 2);
    let mut daemon = world.daemon();
    refuse(&program, 1);
    daemon.wait_refused(3);
    assert_eq!(told(&daemon), [("not_a_file", 3)].into());
}
