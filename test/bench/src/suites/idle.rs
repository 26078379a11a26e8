//! Cost of ports that do nothing, and what remains of those that come and go.
//!
//! A daemon with many VMs, a network port and a disk each, and one front end that attaches them all
//! and leaves them alone: CPU time and memory before, while and after. Then two ports of one VM are
//! attached through the control API, used by a session and detached, many times. Last, what the
//! pause of an idle sidecore that polls on costs the next request ([`pause`]).

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use control::client::Client;
use frontend::idle::Idle;
use serde_json::json;

use crate::harness::daemon;
use crate::harness::error::BenchError;
use crate::harness::process::{self, Process};
use crate::harness::progress::Progress;
use crate::harness::results::{Measured, Row};
use crate::harness::stats::{Better, significant};
use crate::harness::table::number;
use crate::harness::usage;

pub(crate) mod command;
mod pause;

/// Looks for memory that is still moved, and time between two: several moves at their usual pace.
const SETTLE_LOOKS: u32 = 12;
const SETTLE_PAUSE: Duration = Duration::from_secs(10);
/// Floor: part of a core that idle ports may use.
const CPU_LIMIT_PERCENT: f64 = 1.0;
/// CPU time has a resolution; no value of a row may be 0.
const LEAST_PERCENT: f64 = 0.001;
/// Attachments before anything is compared: what allocator and thread pool keep.
const WARM_UP: u32 = 100;
/// Memory may grow by so much over all attachments: an allocator's arena.
const MEMORY_RATIO: f64 = 0.9;
/// The API's helper threads end 11 s after the last request, and what sessions have freed is given
/// back 20 s after the last of many.
const REST: Duration = Duration::from_secs(22);

/// Setup of a run.
#[derive(Debug)]
pub struct Setup {
    /// Ports, half of them network ports.
    pub ports: u32,
    /// How long CPU time is counted.
    pub length: Duration,
    /// Attachments of each kind.
    pub times: u32,
    /// CPU of the sidecore.
    pub cpu: usize,
    /// Path of Millrace's daemon.
    pub millrace: PathBuf,
    /// The front end.
    pub front: PathBuf,
    /// Sockets and logs.
    pub folder: PathBuf,
}

/// Resources that a process holds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Holdings {
    fds: f64,
    mappings: f64,
    threads: f64,
    /// Proportional set size without shared memory: the guests' is not the daemon's.
    own_bytes: f64,
}

fn holdings(pid: u32) -> Result<Holdings, BenchError> {
    let path = |what: &str| PathBuf::from(format!("/proc/{pid}/{what}"));
    let count = |what: &str| {
        let entries = std::fs::read_dir(path(what));
        entries.map(|e| e.count() as f64).map_err(|e| BenchError::file("list", &path(what), e))
    };
    let text = |what: &str| {
        std::fs::read_to_string(path(what)).map_err(|e| BenchError::file("read", &path(what), e))
    };
    let of_file = |line: &&str| line.split_whitespace().nth(4).is_some_and(|inode| inode != "0");
    Ok(Holdings {
        fds: count("fd")?,
        mappings: text("maps")?.lines().filter(of_file).count() as f64,
        threads: count("task")?,
        own_bytes: own_bytes(&text("smaps_rollup")?),
    })
}

fn own_bytes(rollup: &str) -> f64 {
    let kib = |key: &str| {
        let line = rollup.lines().find_map(|l| l.strip_prefix(key));
        line.and_then(|l| l.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or_default()
    };
    (kib("Pss:") - kib("Pss_Shmem:")) * 1024.0
}

/// Runs all parts; one row for each figure.
pub fn run(setup: &Setup, progress: &mut Progress) -> Result<Vec<Row>, BenchError> {
    let control = setup.folder.join("control.sock");
    let last = setup.folder.join(format!("v{}-d.sock", setup.ports / 2 - 1));
    let (config, sockets): (_, [&Path; 2]) = (config_text(setup), [&control, &last]);
    let mut daemon = daemon::start(&setup.millrace, &config, &setup.folder, &sockets)?;
    progress.step(&format!("{} ports attached and left alone", setup.ports));
    let client = Client::new(&control);
    let mut rows = idle(setup, &daemon, &client)?;
    progress.step(&format!("two ports attached and detached {} times", setup.times));
    rows.extend(come_and_go(setup, &daemon, &client)?);
    daemon.alive()?;
    // The next ones want the sidecore's CPU.
    drop(daemon);
    rows.extend(pause::rows(setup, progress)?);
    Ok(rows)
}

fn config_text(setup: &Setup) -> String {
    let mut text = daemon::head(&setup.folder, setup.cpu, None) + "[[switch]]\nname = \"lan\"\n";
    for vm in 0..setup.ports / 2 {
        let _ = write!(
            text,
            "[[vm]]\nname = \"v{vm}\"\n[[vm.net]]\nname = \"n\"\nswitch = \"lan\"\n\
             [[vm.disk]]\nname = \"d\"\nformat = \"null\"\nsize = \"1GiB\"\n"
        );
    }
    text
}

fn idle(setup: &Setup, daemon: &Process, client: &Client) -> Result<Vec<Row>, BenchError> {
    let bare = holdings(daemon.pid())?;
    let pattern = |port: &str| setup.folder.join(format!("v{{}}-{port}.sock"));
    let mut command = process::command(&setup.front, None);
    command.args(["idle", "--count", &setup.ports.to_string()]);
    command.arg("--net").arg(pattern("n")).arg("--disk").arg(pattern("d"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let failed = |e: std::io::Error| BenchError::lab("run the idle front end", e);
    let mut front = command.spawn().map_err(failed)?;
    let mut line = String::new();
    if let Some(stdout) = front.stdout.take() {
        BufReader::new(stdout).read_line(&mut line).map_err(failed)?;
    }
    let measured = if line.contains("attached") {
        settle(client)?;
        let before = usage::snapshot(&[daemon.pid()]);
        std::thread::sleep(setup.length);
        let usage = usage::snapshot(&[daemon.pid()]).since(&before);
        usage.zip(holdings(daemon.pid()).ok())
    } else {
        None
    };
    // Its input ends, and so does it.
    drop(front.stdin.take());
    let status = front.wait().map_err(failed)?;
    let why = || BenchError::lab("the idle front end", format!("ended with {status}: {line}"));
    let (usage, busy) = measured.filter(|_| status.success()).ok_or_else(why)?;
    let own_kib = (bare.own_bytes / 1024.0, busy.own_bytes / 1024.0);
    Ok(attached_rows(setup.ports, usage.cpu * 100.0, own_kib))
}

/// Waits until the daemon moves no memory into huge pages any more: that is work of the minute
/// after a VM came. What has not ended then is measured with the rest.
fn settle(client: &Client) -> Result<(), BenchError> {
    let moved = || {
        let answer = client.request("GET", "/v1/metrics", None);
        let answer = answer.map_err(|e| BenchError::lab("read the daemon's metrics", e))?;
        if !answer.is_success() {
            return Err(BenchError::lab("read the daemon's metrics", answer.error()));
        }
        Ok(lab::metric_sum(&answer.body, "millrace_vm_huge_bytes", &[]))
    };
    let mut before: f64 = moved()?;
    for _ in 0..SETTLE_LOOKS {
        std::thread::sleep(SETTLE_PAUSE);
        let now = moved()?;
        if now.total_cmp(&before).is_eq() {
            break;
        }
        before = now;
    }
    Ok(())
}

/// Rows about the cost of attached ports. `own_kib`: the daemon's memory before and with them.
fn attached_rows(ports: u32, percent: f64, (bare_kib, with_kib): (f64, f64)) -> Vec<Row> {
    let how = format!("{ports} ports, attached by front ends that do nothing");
    let percent = percent.max(LEAST_PERCENT);
    let limit = CPU_LIMIT_PERCENT / percent;
    let each = number((with_kib - bare_kib).max(0.0) / f64::from(ports));
    let cpu = row("idle_cpu", "% of a core", (percent, CPU_LIMIT_PERCENT), "limit", limit);
    let memory = row("idle_memory", "KiB", (with_kib, bare_kib), "no session", bare_kib / with_kib);
    vec![
        Row { target: Some(1.0), mode: Some(how.clone()), ..cpu },
        Row { mode: Some(format!("{how}; {each} KiB a port, without guest memory")), ..memory },
    ]
}

fn come_and_go(setup: &Setup, daemon: &Process, client: &Client) -> Result<Vec<Row>, BenchError> {
    let many = |times: u32| (0..times).try_for_each(|_| once(setup, client));
    many(WARM_UP)?;
    std::thread::sleep(REST);
    let before = holdings(daemon.pid())?;
    many(setup.times)?;
    std::thread::sleep(REST);
    let after = holdings(daemon.pid())?;
    let how =
        format!("a network port and a disk, attached, used and detached {} times", setup.times);
    let figure = |name: &str, unit, target, (before, after): (f64, f64)| Row {
        target: Some(target),
        mode: Some(how.clone()),
        ..row(name, unit, (after, before), "before", before / after)
    };
    Ok(vec![
        figure("detached_fds", "descriptors", 1.0, (before.fds, after.fds)),
        figure("detached_mappings", "mappings", 1.0, (before.mappings, after.mappings)),
        figure("detached_threads", "threads", 1.0, (before.threads, after.threads)),
        figure(
            "detached_memory",
            "KiB",
            MEMORY_RATIO,
            (before.own_bytes / 1024.0, after.own_bytes / 1024.0),
        ),
    ])
}

fn once(setup: &Setup, client: &Client) -> Result<(), BenchError> {
    let ask = |method: &str, path: &str, body: Option<serde_json::Value>| {
        let answer = client.request(method, path, body.as_ref());
        match answer.map_err(|e| BenchError::lab(path, e))? {
            a if a.is_success() => Ok(()),
            a => Err(BenchError::lab(format!("{method} {path}"), a.error())),
        }
    };
    let net = json!({"net": {"name": "n", "switch": "lan"}});
    let disk = json!({"disk": {"name": "d", "format": "memory", "size": "1MiB"}});
    ask("POST", "/v1/vms/guest/ports", Some(net))?;
    ask("POST", "/v1/vms/guest/ports", Some(disk))?;
    let socket = |port: &str| [setup.folder.join(format!("guest-{port}.sock"))];
    let session = Idle::attach(&socket("n"), &socket("d")).and_then(Idle::detach);
    session.map_err(|e| BenchError::lab("a session of a port", e))?;
    ask("DELETE", "/v1/vms/guest/ports/n", None)?;
    ask("DELETE", "/v1/vms/guest/ports/d", None)
}

fn row(case: &str, unit: &str, (ours, due): (f64, f64), name: &str, ratio: f64) -> Row {
    let side = |name: &str, value| Measured {
        name: name.into(),
        value: significant(value, 4),
        unit: unit.into(),
    };
    let ratio = significant(ratio, 4);
    Row {
        case: case.into(),
        ours: side("millrace", ours),
        peer: side(name, due),
        better: Better::Lower,
        ratio,
        ratio_min: ratio,
        ratio_max: ratio,
        ratio_interval: None,
        rounds: 1,
        host_cpu_us_per_op: None,
        target: None,
        aim: None,
        front: None,
        mode: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_not_the_daemons() {
        let text = "Rss:    9 kB\nPss:     100 kB\nPss_Anon:   20 kB\nPss_Shmem:   70 kB\n";
        assert_eq!(own_bytes(text), 30.0 * 1024.0);
        assert!(holdings(std::process::id()).unwrap().threads >= 1.0);
    }

    #[test]
    fn memory_is_compared_with_the_same_daemons() {
        let rows = attached_rows(64, 0.0, (10_000.0, 16_400.0));
        assert_eq!((rows[0].ours.value, rows[0].ratio), (LEAST_PERCENT, 1000.0));
        let memory = &rows[1];
        assert_eq!((memory.ours.value, memory.peer.value, memory.ratio), (16_400.0, 1e4, 0.6098));
        assert!(memory.mode.as_ref().unwrap().contains("; 100 KiB a port"), "{memory:?}");
        assert_eq!((memory.target, memory.missed()), (None, false));
    }

    #[test]
    fn the_config_has_a_net_and_a_disk_for_each_vm() {
        let setup = Setup {
            ports: 64,
            length: Duration::ZERO,
            times: 0,
            cpu: 0,
            millrace: PathBuf::new(),
            front: PathBuf::new(),
            folder: "/t".into(),
        };
        let text = config_text(&setup);
        assert_eq!(
            (text.matches("[[vm.net]]").count(), text.matches("[[vm.disk]]").count()),
            (32, 32)
        );
    }
}
