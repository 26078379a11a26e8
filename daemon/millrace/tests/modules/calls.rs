//! The list of allowed system calls against what a process really uses.

use std::collections::BTreeSet;

use modules::sandbox::CALLS;
use rustix::process::{Pid, Signal, kill_process};

use crate::client::hello;
use crate::world::{World, command};

/// Calls of all threads after the last fence was put up, as strace wrote them.
fn used(trace: &str) -> BTreeSet<String> {
    let lines: Vec<&str> = trace.lines().collect();
    let fence = lines.iter().position(|line| line.contains("SECCOMP_SET_MODE_FILTER")).unwrap();
    let name = |line: &&str| {
        // "1234  pread64(5, ..." or "1234  <... pread64 resumed>...".
        let (_, call) = line.trim_start().split_once(' ')?;
        let call = call.trim_start();
        let name = match call.strip_prefix("<... ") {
            Some(rest) => rest.split(' ').next()?,
            None => call.split_once('(')?.0,
        };
        name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_').then(|| name.to_owned())
    };
    lines[fence + 1..].iter().filter_map(name).filter(|name| name != "seccomp").collect()
}

#[test]
fn abuse_M_what_is_allowed_is_used_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let mut traced: Vec<String> = ["strace", "-f", "-qq", "-o"].map(String::from).to_vec();
    traced.push(trace.to_str().unwrap().into());
    traced.extend(command());
    let world = World::with_command(traced);
    let mut client = world.client(1, "a");
    client.ask(1, b"dkept");
    client.ask(2, b"m123");
    client.request(3, 0, b"s");
    client.reply(3).failure();
    assert_eq!(client.ask(4, b"p"), b"dkept");
    assert_eq!(client.ask(5, b"f"), b"log\0");
    let mut list = world.connect();
    list.send(&hello([0; 16], ""));
    list.welcome();
    assert_eq!(world.modules.stats().len(), 2);
    world.modules.stop();
    let used = used(&std::fs::read_to_string(trace).unwrap());
    let allowed = |name: &str| CALLS.iter().any(|call| call.name == name);
    let stray: Vec<&String> = used.iter().filter(|name| !allowed(name)).collect();
    assert!(stray.is_empty(), "used and not allowed: {stray:?}");
    let unused: Vec<&str> = CALLS
        .iter()
        .filter(|call| !call.rare && !used.contains(call.name))
        .map(|c| c.name)
        .collect();
    assert!(unused.is_empty(), "allowed, not rare and not used: {unused:?}; used: {used:?}");
}

#[test]
fn a_process_says_what_it_is_confined_to() {
    let world = World::start();
    let pid = world.pid();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
    assert_eq!(u64::from_str_radix(&field("CapEff:"), 16).unwrap(), 0);
    assert_eq!(u64::from_str_radix(&field("CapPrm:"), 16).unwrap(), 0);
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        assert!(status.contains("Seccomp:\t2\n"), "{status}");
    }
    // It still listens to its daemon.
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    assert_ne!(world.pid(), pid);
}
