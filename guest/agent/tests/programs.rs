//! Programs of all kinds, and the ends of their pipes.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

use agent::serve::MAX_CONNECTIONS;
use common::{Daemon, LONG, Mounted, Seen, World, answer, ask, refusal, request, send, tcp};
use guest_abi::Reason;
use guest_abi::program::{flag, op};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

mod common;

const LEN: u64 = 1 << 20;

fn mounted() -> (Mounted, File) {
    let mounted = Mounted::new("mke2fs -q -F -t ext4", "rw", None);
    let mut file = File::create(mounted.path("f")).unwrap();
    file.write_all(&vec![7; LEN as usize]).unwrap();
    let file = File::open(mounted.path("f")).unwrap();
    (mounted, file)
}

fn canceled(daemon: &mut Daemon, want: Reason) {
    match daemon.next().unwrap() {
        Seen::Cancel(reason) => assert_eq!(reason, want),
        other => panic!("{other:?}"),
    }
}

fn reason(answer: guest_abi::program::Answer) -> Reason {
    Reason::from_number(answer.reason.get())
}

#[test]
fn a_pipe_ends_with_its_program_its_time_or_the_agent() {
    let (mounted, file) = mounted();
    let mut world = World::new(&mounted.image, true);
    let (mut daemon, (server, _client)) = (world.daemon(), tcp());
    let fds = [file.as_fd(), server.as_fd()];

    // It goes.
    let program = world.program();
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &fds);
    let asked = daemon.pipe();
    drop(program);
    canceled(&mut daemon, Reason::Cancelled);
    daemon.done(asked.id, 0, Reason::Cancelled);

    // It has had enough, and wants to know.
    let program = world.program();
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &fds);
    let asked = daemon.pipe();
    rustix::net::shutdown(&program, rustix::net::Shutdown::Write).unwrap();
    canceled(&mut daemon, Reason::Cancelled);
    daemon.done(asked.id, 5, Reason::Cancelled);
    let got = answer(&program);
    assert_eq!((got.moved_bytes.get(), reason(got)), (5, Reason::Cancelled));

    // Its time is over.
    let program = world.program();
    let mut late = request(op::PIPE, 0, LEN);
    late.timeout_ms = U32::new(30);
    send(&program, late.as_bytes(), &fds);
    let asked = daemon.pipe();
    canceled(&mut daemon, Reason::TimedOut);
    daemon.done(asked.id, 0, Reason::Cancelled);
    let got = answer(&program);
    assert_eq!((got.errno.get(), reason(got)), (110, Reason::TimedOut));

    // The agent ends, with one pipe under way and one connection idle.
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &fds);
    let (asked, idle) = (daemon.pipe(), world.program());
    let agent = world.agent.take();
    let ending = std::thread::spawn(move || drop(agent));
    canceled(&mut daemon, Reason::Cancelled);
    daemon.done(asked.id, LEN, Reason::Complete);
    let got = answer(&program);
    assert_eq!((got.moved_bytes.get(), reason(got)), (LEN, Reason::Complete));
    ending.join().unwrap();
    assert!(!world.socket.exists());
    drop(idle);
}

#[test]
fn a_daemon_that_goes_loses_pipes_and_the_next_one_is_found() {
    let (mounted, file) = mounted();
    let world = World::new(&mounted.image, true);
    let (program, (server, _client)) = (world.program(), tcp());
    let got = ask(&program, &request(op::QUERY, 0, 0), &[]);
    assert_eq!(reason(got), Reason::NotOffered);
    assert_eq!(refusal(&program, &file, &server), Reason::NotOffered);
    let mut daemon = world.daemon();
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &[file.as_fd(), server.as_fd()]);
    daemon.pipe();
    drop(daemon);
    let got = answer(&program);
    assert_eq!((got.moved_bytes.get(), got.errno.get(), reason(got)), (0, 5, Reason::Lost));
    assert_eq!(refusal(&program, &file, &server), Reason::HostGone);
    let mut daemon = world.daemon();
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &[file.as_fd(), server.as_fd()]);
    // The file system is tested again.
    assert!(matches!(daemon.next().unwrap(), Seen::Probe));
    let asked = daemon.pipe();
    daemon.done(asked.id, LEN, Reason::Complete);
    assert_eq!(answer(&program).moved_bytes.get(), LEN);
    // The daemon's own refusals pass through.
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &[file.as_fd(), server.as_fd()]);
    let asked = daemon.pipe();
    daemon.done(asked.id, 0, Reason::NoFlow);
    let got = answer(&program);
    assert_eq!((got.errno.get(), reason(got)), (95, Reason::NoFlow));
}

/// Files and sockets that may behave otherwise for root, as the agent is, are refused.
#[test]
#[allow(non_snake_case)]
fn abuse_R10_the_agent_sends_files_to_connections_only() {
    let (mounted, file) = mounted();
    let world = World::new(&mounted.image, true);
    let (program, (server, mut client)) = (world.program(), tcp());
    let mut behind = request(op::PIPE, 0, LEN);
    behind.flags = U32::new(flag::BEHIND);
    let (listens, tells) = UnixDatagram::pair().unwrap();
    assert_eq!(reason(ask(&program, &behind, &[file.as_fd(), tells.as_fd()])), Reason::NotTcp);
    listens.set_nonblocking(true).unwrap();
    assert!(listens.recv(&mut [0; 8]).is_err());
    for path in ["/proc/self/status", "/dev/zero"] {
        let other = File::open(path).unwrap();
        let told = reason(ask(&program, &behind, &[other.as_fd(), server.as_fd()]));
        assert!(matches!(told, Reason::FileSystem | Reason::NotAFile), "{path}: {told:?}");
    }
    // Without a daemon the agent sends it itself.
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; LEN as usize];
        client.read_exact(&mut got).map(|()| got)
    });
    let got = ask(&program, &behind, &[file.as_fd(), server.as_fd()]);
    assert_eq!((got.moved_bytes.get(), reason(got)), (LEN, Reason::NotOffered));
    assert!(reader.join().unwrap().unwrap().iter().all(|byte| *byte == 7));
}

#[test]
fn requests_without_sense_are_refused_and_descriptors_closed() {
    let (mounted, file) = mounted();
    let world = World::new(&mounted.image, true);
    let (_asked, program, (server, _client)) = (world.obliging_daemon(), world.program(), tcp());
    let good = request(op::PIPE, 0, LEN);
    let (fd, socket) = (file.as_fd(), server.as_fd());
    let mut wrong = [good; 4];
    wrong[0].magic = U32::new(1);
    wrong[1].version = U16::new(2);
    wrong[2].flags = U32::new(2);
    wrong[3].op = U16::new(9);
    for request in wrong {
        assert_eq!(reason(ask(&program, &request, &[fd, socket])), Reason::Malformed);
    }
    // Whatever it gets too much is closed: the pipe's other end notices.
    let (mut told, kept) = std::io::pipe().unwrap();
    let pipe = kept.as_fd();
    for fds in [&[][..], &[pipe], &[fd, socket, pipe], &[pipe; 8]] {
        assert_eq!(reason(ask(&program, &good, fds)), Reason::Malformed, "{}", fds.len());
    }
    let query = request(op::QUERY, 0, 0);
    assert_eq!(reason(ask(&program, &query, &[fd, socket])), Reason::Malformed);
    for bytes in [&good.as_bytes()[..39], &[good.as_bytes(), &[0]].concat()] {
        send(&program, bytes, &[fd, socket]);
        assert_eq!(reason(answer(&program)), Reason::Malformed);
    }
    drop(kept);
    assert_eq!(told.read(&mut [0]).unwrap(), 0);
    assert_eq!(ask(&program, &good, &[fd, socket]).moved_bytes.get(), LEN);
}

#[test]
fn more_connections_than_there_are_threads_are_told_so() {
    let (mounted, file) = mounted();
    let world = World::new(&mounted.image, true);
    let (_asked, (server, _client)) = (world.obliging_daemon(), tcp());
    let mut programs: Vec<_> = (0..MAX_CONNECTIONS).map(|_| world.program()).collect();
    let query = request(op::QUERY, 0, 0);
    let first = &programs[0];
    while reason(ask(first, &query, &[])) != Reason::Complete {}
    let one_more = world.program();
    assert_eq!(reason(answer(&one_more)), Reason::AgentBusy);
    programs.truncate(MAX_CONNECTIONS / 2);
    loop {
        let program = world.program();
        match refusal_or_len(&program, &file, &server) {
            Ok(len) => break assert_eq!(len, LEN),
            Err(reason) => assert_eq!(reason, Reason::AgentBusy),
        }
    }
}

fn refusal_or_len(
    program: &std::os::fd::OwnedFd,
    file: &File,
    server: &std::net::TcpStream,
) -> Result<u64, Reason> {
    let fds = [file.as_fd(), server.as_fd()];
    send(program, request(op::PIPE, 0, LEN).as_bytes(), &fds);
    let got = answer(program);
    match got.moved_bytes.get() {
        0 => Err(reason(got)),
        moved => Ok(moved),
    }
}

#[test]
fn the_service_says_when_it_is_ready_and_ends_at_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, told) = (folder.path().join("a/b/agent"), folder.path().join("notify"));
    let manager = UnixDatagram::bind(&told).unwrap();
    manager.set_read_timeout(Some(LONG)).unwrap();
    let start = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millrace-agent"));
        command.arg("--socket").arg(&socket).arg("--host-socket").arg(folder.path().join("none"));
        command.env("NOTIFY_SOCKET", &told).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let hear = || {
        let mut bytes = [0; 32];
        let len = manager.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..len].to_vec()).unwrap()
    };
    // A socket that a killed agent has left is no obstacle.
    let mut killed = start();
    assert_eq!(hear(), "READY=1");
    killed.kill().unwrap();
    killed.wait().unwrap();
    let mut agent = start();
    assert_eq!(hear(), "READY=1");
    let second = start().wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&second.stderr).contains("another agent"));
    let pid = rustix::process::Pid::from_child(&agent);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(hear(), "STOPPING=1");
    assert!(agent.wait().unwrap().success());
    assert!(!socket.exists());
}
