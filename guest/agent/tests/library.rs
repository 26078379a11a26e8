//! The C library, the shim and `mrpipe`, compiled and run against the agent. Needs a C compiler,
//! make, and root for the file system.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use built::built;
use common::{Mounted, Seen, World};
use fake::FakeAgent;
use guest_abi::Reason;

mod built;
mod common;
#[path = "../../bindings/rust/tests/fake/mod.rs"]
mod fake;

const LEN: usize = 1_000_000;

fn program(name: &str, world: &World) -> Command {
    let mut command = Command::new(built().join(name));
    command.env("LD_LIBRARY_PATH", built()).env("MILLRACE_AGENT_SOCKET", &world.socket);
    command.stdout(Stdio::piped());
    command
}

fn mounted() -> Mounted {
    let mounted = Mounted::new("mke2fs -q -F -t ext4", "rw", None);
    File::create(mounted.path("f")).unwrap().write_all(&vec![7; LEN]).unwrap();
    mounted
}

#[test]
fn reasons_of_the_header_are_those_of_the_daemon() {
    let mut want =
        "/* Made from core/guest-abi/src/reason.rs; a test of guest/agent compares them. */\n"
            .to_owned();
    for &reason in Reason::ALL {
        let (key, number) = (reason.key().to_uppercase(), reason as u16);
        writeln!(want, "REASON({key}, {number}, {}, \"{}\")", reason.errno(), reason.text())
            .unwrap();
    }
    let got = include_str!("../../libmillrace/millrace-reasons.h");
    assert!(got == want, "millrace-reasons.h should be:\n{want}");
}

#[test]
fn the_library_does_what_its_manual_says() {
    let mounted = mounted();
    let world = World::new(&mounted.image, true);
    let asked = world.obliging_daemon();
    let status = program("check", &world).arg(mounted.path("f")).status().unwrap();
    assert!(status.success());
    assert!(asked.try_iter().count() > 200);
}

#[test]
fn interrupted_pipes_are_cancelled() {
    let mounted = mounted();
    let world = World::new(&mounted.image, true);
    let mut daemon = world.daemon();
    let mut check = program("check", &world);
    check.arg(mounted.path("f")).arg("hold").stdin(Stdio::piped());
    let mut check = check.spawn().unwrap();
    for want in [Reason::Cancelled, Reason::TimedOut, Reason::Cancelled] {
        let asked = daemon.pipe();
        let Seen::Cancel(reason) = daemon.next().unwrap() else { panic!() };
        assert_eq!(reason, want);
        daemon.done(asked.id, 0, Reason::Cancelled);
    }
    drop(check.stdin.take());
    assert!(check.wait().unwrap().success());
}

fn shimmed(name: &str, world: &World, min_bytes: u32) -> Command {
    let mut command = program(name, world);
    command.env("LD_PRELOAD", built().join("libmillrace-preload.so"));
    command.env("MILLRACE_MIN_BYTES", min_bytes.to_string());
    command
}

fn shim_check(world: &World, mounted: &Mounted) -> Command {
    let mut command = shimmed("shim-check", world, 65_536);
    command.arg(mounted.path("f"));
    command
}

/// Runs a check that tells the daemon its answers.
fn direct(check: &mut Command, world: &World) {
    let (mut daemon, mut held) = (world.daemon(), None);
    let mut check = check.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = check.stdin.take().unwrap();
    for line in BufReader::new(check.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let asked = held.take().unwrap_or_else(|| daemon.pipe());
        if words[0] == "asked" {
            held = Some(asked);
            stdin.write_all(b"\n").unwrap();
            continue;
        }
        assert_eq!(asked.len_bytes, number(1), "{line}");
        if words[0] == "cancelled" {
            assert!(matches!(daemon.next().unwrap(), Seen::Cancel(Reason::Cancelled)));
            daemon.done(asked.id, 0, Reason::Cancelled);
            stdin.write_all(b"\n").unwrap();
        } else {
            daemon.done(asked.id, number(2), Reason::from_number(number(3) as u16));
        }
    }
    assert!(check.wait().unwrap().success());
}

#[test]
fn the_shim_keeps_event_loops_going() {
    let mounted = mounted();
    let world = World::new(&mounted.image, true);
    direct(&mut shim_check(&world, &mounted), &world);
}

#[test]
fn the_shim_keeps_to_what_epoll_promises() {
    let mounted = mounted();
    let world = World::new(&mounted.image, true);
    let mut check = shimmed("corner-check", &world, 65_536);
    direct(check.arg(mounted.path("f")), &world);
}

#[test]
fn the_shim_sends_small_parts_together() {
    let mounted = mounted();
    let content: Vec<_> = (0..3_000_000).map(|n: u32| (n * 13 + n / 255) as u8).collect();
    for name in ["g", "cut"] {
        File::create(mounted.path(name)).unwrap().write_all(&content).unwrap();
    }
    let world = World::new(&mounted.image, true);
    let mut check = shimmed("gather-check", &world, 300_000);
    check.args([mounted.path("g"), mounted.path("cut")]);
    direct(&mut check, &world);
}

#[test]
fn the_shim_serves_threads() {
    let mounted = mounted();
    let world = World::new(&mounted.image, true);
    let asked = world.obliging_daemon();
    let status = shim_check(&world, &mounted).arg("threads").status().unwrap();
    assert!(status.success());
    assert_eq!(asked.try_iter().count(), 100);
}

/// Starts `mrpipe` with a connection to us. Returns the bytes that it sends, and its output.
fn mrpipe(world: &World, file: &Path, options: &[&str], preload: bool) -> (Vec<u8>, String) {
    let mut command = program("mrpipe", world);
    if preload {
        command.env("LD_PRELOAD", built().join("libmillrace-preload.so"));
        command.env("MILLRACE_MIN_BYTES", "65536");
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut child: Child = command.args(["-c", &address]).args(options).arg(file).spawn().unwrap();
    let mut stream: TcpStream = listener.accept().unwrap().0;
    let (mut sent, mut told) = (Vec::new(), String::new());
    stream.read_to_end(&mut sent).unwrap();
    drop(stream);
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut told).unwrap();
    assert!(child.wait().unwrap().success());
    (sent, told)
}

#[test]
fn mrpipe_and_the_shim_pipe_when_it_pays_and_else_fall_back() {
    let mounted = mounted();
    let file = mounted.path("f");
    let mut world = World::new(&mounted.image, true);
    let asked = world.obliging_daemon();
    let whole = |bytes: usize| {
        [format!("MRPIPE 0 {bytes}\n").as_bytes(), &vec![7; bytes], b"END 0\n"].concat()
    };
    let around = format!("MRPIPE 0 {LEN}\nEND 0\nMRPIPE 1 {LEN}\nEND 1\n").into_bytes();

    // This daemon moves nothing, so only what is around it arrives.
    let (sent, told) = mrpipe(&world, &file, &["-p", "-n", "2", "-k"], false);
    assert!(sent == around && told.contains("\"piped\": 2000000"), "{told}");
    assert_eq!(asked.try_iter().map(|pipe| pipe.len_bytes).sum::<u64>(), 2 * LEN as u64);
    let (sent, told) = mrpipe(&world, &file, &["-s", "-n", "2"], true);
    assert!(sent == around && told.contains("\"sent\": 2000000"), "{told}");
    assert_eq!(asked.try_iter().count(), 2);

    // Too few bytes, and a file that somebody has open for writing.
    let (sent, _) = mrpipe(&world, &file, &["-s", "-z", "1000"], true);
    assert!(sent == whole(1000));
    let writer = File::options().write(true).open(&file).unwrap();
    let (sent, _) = mrpipe(&world, &file, &["-s"], true);
    assert!(sent == whole(LEN));
    let (sent, told) = mrpipe(&world, &file, &["-b"], false);
    assert!(sent == whole(LEN) && told.contains("open for writing"), "{told}");
    drop(writer);

    // No agent.
    assert_eq!(asked.try_iter().count(), 0);
    drop(world.agent.take());
    let (sent, _) = mrpipe(&world, &file, &["-s"], true);
    assert!(sent == whole(LEN));
    let (sent, told) = mrpipe(&world, &file, &["-b"], false);
    assert!(sent == whole(LEN) && told.contains("no agent"), "{told}");
}

#[test]
fn copies_that_share_blocks_are_the_kernels() {
    for (shares, asked) in [(1, 0), (0, 1)] {
        let mounted = Mounted::new(&format!("mkfs.xfs -q -f -m reflink={shares}"), "rw", None);
        let content: Vec<u8> = (0..3 << 20).map(|at: u32| (at >> 8) as u8 ^ at as u8).collect();
        std::fs::write(mounted.path("a"), &content).unwrap();
        let agent = FakeAgent::start();
        let copy = "import os; a = os.open('a', 0); b = os.open('b', os.O_WRONLY | os.O_CREAT)
assert os.copy_file_range(a, b, 3 << 20) == 3 << 20";
        let mut python = Command::new("python3");
        python.args(["-c", copy]).current_dir(mounted.path(""));
        python.env("MILLRACE_AGENT_SOCKET", &agent.socket);
        python.env("LD_PRELOAD", built().join("libmillrace-preload.so"));
        assert!(python.status().unwrap().success());
        assert!(std::fs::read(mounted.path("b")).unwrap() == content);
        assert_eq!(agent.asked().len(), asked, "reflink={shares}");
    }
}
