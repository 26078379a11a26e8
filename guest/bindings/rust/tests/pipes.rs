//! Pipes between all pairs of ends, over an agent that moves the bytes itself. One process has one
//! agent: the environment names it.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fake::{FakeAgent, Say};
use millrace_guest::{Options, Pipe, Reason, pipe, query};
use rustix::event::{PollFd, PollFlags, poll};

mod fake;

/// Length that is no multiple of any single step.
const LEN: usize = 300_001;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0, client)
}

fn at(in_offset: Option<u64>, out_offset: Option<u64>) -> Options {
    Options { in_offset, out_offset, timeout: None }
}

/// False where the environment names no agent: all ignored tests are run.
fn is_inner() -> bool {
    std::env::var_os("MILLRACE_AGENT_SOCKET").is_some()
}

/// Runs one check in a process of its own, with this agent.
fn with_agent(name: &str, agent: &FakeAgent) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command.env("MILLRACE_AGENT_SOCKET", &agent.socket).output().unwrap()
}

#[track_caller]
fn passes(name: &str, agent: &FakeAgent) {
    let output = with_agent(name, agent);
    let told = format!("{}{}", String::from_utf8_lossy(&output.stdout), {
        String::from_utf8_lossy(&output.stderr)
    });
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
}

fn file(folder: &Path, name: &str, content: &[u8]) -> (PathBuf, File) {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    (path.clone(), File::options().read(true).write(true).open(path).unwrap())
}

#[test]
#[ignore = "run by all_pairs"]
fn inner_pairs() {
    if !is_inner() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let want = bytes(LEN);
    let (_, mut source) = file(folder.path(), "a", &want);
    let (path, mut sink) = file(folder.path(), "b", b"");

    // File to file, at given places and at their own.
    assert_eq!(pipe(&sink, &source, 1000, &at(Some(5), Some(7))).unwrap(), 1000);
    assert_eq!((source.stream_position().unwrap(), sink.stream_position().unwrap()), (0, 0));
    assert_eq!(std::fs::read(&path).unwrap()[7..], want[5..1005]);
    assert_eq!(pipe(&sink, &source, u64::MAX >> 1, &Options::default()).unwrap(), LEN as u64);
    assert_eq!(source.stream_position().unwrap(), LEN as u64);
    assert_eq!(sink.stream_position().unwrap(), LEN as u64);
    assert!(std::fs::read(&path).unwrap() == want);
    assert_eq!(pipe(&sink, &source, 1, &Options::default()).unwrap(), 0);

    // File to socket, socket to socket, socket to file, in a row.
    let ((server, client), (onward, mut last)) = (tcp(), tcp());
    let len = 50_000;
    assert_eq!(pipe(&server, &source, len, &at(Some(1), None)).unwrap(), len);
    assert_eq!(pipe(&onward, &client, 20_000, &Options::default()).unwrap(), 20_000);
    assert_eq!(pipe(&sink, &client, 30_000, &at(None, Some(3))).unwrap(), 30_000);
    let mut got = vec![0; 20_000];
    last.read_exact(&mut got).unwrap();
    assert!(got == want[1..20_001]);
    assert!(std::fs::read(&path).unwrap()[3..30_003] == want[20_001..50_001]);
}

#[test]
fn all_pairs() {
    let agent = FakeAgent::start();
    passes("inner_pairs", &agent);
    let asked = agent.asked();
    let sides: Vec<_> = asked.iter().map(|asked| (asked.source, asked.sink)).collect();
    let (own, first) = ((None, None), (Some(5), Some(7)));
    assert_eq!(sides, [first, own, own, (Some(1), None), own, (None, Some(3))]);
}

#[test]
#[ignore = "run by results_and_reasons"]
fn inner_results() {
    if !is_inner() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_, source) = file(folder.path(), "a", &bytes(LEN));
    let (path, sink) = file(folder.path(), "b", b"");
    let options = Options { timeout: Some(Duration::from_micros(1)), ..at(Some(0), Some(0)) };
    let ask = || pipe(&sink, &source, 1000, &options);

    assert_eq!(query().unwrap().min_bytes, Some(192 << 10));
    assert_eq!(ask().unwrap(), 10);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 10);
    let error = ask().unwrap_err();
    assert_eq!((error.reason, error.errno, error.may_fall_back()), (Reason::NoLease, 11, true));
    assert_eq!(ask().unwrap(), 0);
    let error = ask().unwrap_err();
    assert_eq!((error.reason, error.errno, error.may_fall_back()), (Reason::Lost, 5, false));
    // The dead agent's connection is not used again.
    assert_eq!(ask().unwrap(), 1000);
}

#[test]
fn results_and_reasons() {
    let agent = FakeAgent::start();
    agent.set_min_kib(192);
    let refusals = [Reason::NoLease, Reason::EndOfFile].map(Say::Refuse);
    agent.say([Say::AtMost(10, Reason::TimedOut)]);
    agent.say(refusals);
    agent.say([Say::Die(3)]);
    passes("inner_results", &agent);
    let asked = agent.asked();
    assert_eq!(asked.len(), 5);
    assert!(asked.iter().all(|asked| asked.timeout_ms == 1 && asked.len_bytes == 1000));
}

#[test]
#[ignore = "run by pipes_beside_the_program"]
fn inner_beside() {
    if !is_inner() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_, source) = file(folder.path(), "a", &bytes(LEN));
    let (path, sink) = file(folder.path(), "b", b"");
    let mut held = Pipe::start(&sink, &source, 1000, &Options::default()).unwrap();
    assert_eq!(held.status(), None);
    let mut done = Pipe::start(&sink, &source, LEN as u64, &at(Some(0), Some(0))).unwrap();
    poll(&mut [PollFd::new(&done, PollFlags::IN)], None).unwrap();
    for _ in 0..2 {
        assert_eq!(done.status(), Some(Ok(LEN as u64)));
    }
    drop(done);
    drop(held);
    assert!(std::fs::read(&path).unwrap() == bytes(LEN));
    let pipe = Pipe::start(&sink, &source, 5, &at(Some(0), Some(0))).unwrap();
    assert_eq!(pipe.wait().unwrap(), 5);
}

#[test]
fn pipes_beside_the_program() {
    let agent = FakeAgent::start();
    agent.hold(1000);
    passes("inner_beside", &agent);
    agent.wait_cancelled(1);
    assert_eq!(agent.asked().len(), 3);
}

#[test]
#[ignore = "run by connections_are_kept"]
fn inner_kept() {
    if !is_inner() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_, source) = file(folder.path(), "a", &bytes(LEN));
    let (_, sink) = file(folder.path(), "b", b"");
    let mut told = std::io::stdin().lock();
    for _ in 0..50 {
        assert_eq!(pipe(&sink, &source, 10, &at(Some(0), None)).unwrap(), 10);
    }
    // All are closed under it.
    println!("ready");
    told.read_exact(&mut [0]).unwrap();
    assert_eq!(pipe(&sink, &source, 10, &at(Some(0), None)).unwrap(), 10);
    println!("ready");
    told.read_exact(&mut [0]).unwrap();
    let error = pipe(&sink, &source, 10, &at(Some(0), None)).unwrap_err();
    assert_eq!((error.reason, error.errno, error.may_fall_back()), (Reason::NoAgent, 95, true));
    assert_eq!(query().unwrap_err().reason, Reason::NoAgent);
}

#[test]
fn connections_are_kept() {
    let agent = FakeAgent::start();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "inner_kept", "--ignored", "--nocapture"]);
    command.env("MILLRACE_AGENT_SOCKET", &agent.socket);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let mut stdin = child.stdin.take().unwrap();
    let mut ready = || assert!(lines.any(|line| line.unwrap().ends_with("ready")));
    ready();
    assert_eq!((agent.accepted(), agent.asked().len()), (1, 50));
    agent.close_all();
    stdin.write_all(b"\n").unwrap();
    ready();
    assert_eq!((agent.accepted(), agent.asked().len()), (2, 1));
    drop(agent);
    stdin.write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
}
