//! Ports that come and go, each with a session, leave nothing behind.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{Daemon, Place};
use frontend::idle::Idle;
use serde_json::json;

/// Until allocator and thread pool have what they keep.
const WARM_UP: usize = 100;
const TIMES: usize = 200;
/// A leak grows each time; the allocator takes another arena now and then, when threads meet.
const ROUNDS: usize = 3;
/// Growth of the daemon's own memory that is no leak: an arena of the allocator, not a page each
/// time.
const SLACK_BYTES: u64 = 512 << 10;
/// After this it has failed.
const LIMIT: Duration = Duration::from_secs(60);
/// Pause between two looks at /proc, which has no event to wait for.
const LOOK: Duration = Duration::from_millis(20);

/// Resources that a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holdings {
    fds: usize,
    /// Mappings of files and memory files. The allocator makes anonymous ones as it likes, and
    /// whoever forgets one of those (a stack, say) has touched more of it than the slack.
    mappings: usize,
    threads: usize,
}

fn holdings(pid: u32) -> Holdings {
    let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let of_file = |line: &&str| line.split_whitespace().nth(4).is_some_and(|inode| inode != "0");
    let mappings = maps.lines().filter(of_file).count();
    Holdings { fds: count("fd"), mappings, threads: count("task") }
}

fn anonymous_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("Pss_Anon:")).unwrap();
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}

fn once(daemon: &Daemon, sockets: &[PathBuf; 2], i: usize) {
    let net = json!({"net": {"name": "n", "switch": "lan", "mac": "02:00:00:00:00:01"}});
    let disk = json!({"disk": {"name": "d", "format": "memory", "size": "1MiB"}});
    for body in [net, disk] {
        let answer = daemon.ask("POST", "/v1/vms/v/ports", Some(body));
        assert_eq!(answer.status, 201, "{}", answer.body);
    }
    let idle = Idle::attach(&sockets[..1], &sockets[1..]).unwrap();
    // Every second time the sessions still run when their ports go.
    let idle = if i.is_multiple_of(2) { idle.detach().map(|()| None).unwrap() } else { Some(idle) };
    for port in ["n", "d"] {
        let answer = daemon.ask("DELETE", &format!("/v1/vms/v/ports/{port}"), None);
        assert_eq!(answer.status, 204, "{}", answer.body);
    }
    drop(idle);
}

/// Holdings when nothing is under way: the API's helper threads end some seconds after the last
/// request, and a thread that has ended is in /proc for a moment longer.
fn at_rest(pid: u32, threads: usize) -> Holdings {
    let begin = Instant::now();
    loop {
        let now = holdings(pid);
        if now.threads == threads {
            return now;
        }
        assert!(begin.elapsed() < LIMIT, "{threads} threads in the beginning, now {now:?}");
        std::thread::sleep(LOOK);
    }
}

#[test]
fn ports_that_come_and_go_leave_nothing() {
    let place = Place::new("[sidecore]\ncount=1\n[[switch]]\nname='lan'\n");
    let daemon = place.start();
    let pid = daemon.pid();
    let threads = holdings(pid).threads;
    let sockets = [place.socket("v-n.sock"), place.socket("v-d.sock")];
    (0..WARM_UP).for_each(|i| once(&daemon, &sockets, i));
    let before = at_rest(pid, threads);
    let mut grew = Vec::new();
    for _ in 0..ROUNDS {
        let before_bytes = anonymous_bytes(pid);
        (0..TIMES).for_each(|i| once(&daemon, &sockets, i));
        assert_eq!(at_rest(pid, threads), before);
        let after_bytes = anonymous_bytes(pid);
        if after_bytes <= before_bytes + SLACK_BYTES {
            return;
        }
        grew.push(after_bytes - before_bytes);
    }
    panic!("the daemon's memory grew by {grew:?} bytes, each time in {TIMES} attachments");
}
