//! The C library, the shim, `mrpipe` and the Python binding with all pairs of ends, over an agent
//! that moves the bytes itself. Needs a C compiler, make and Python.

#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use built::built;
use fake::{Asked, FakeAgent, Say};
use guest_abi::Reason;
use guest_abi::program::op;
use tempfile::TempDir;

mod built;
#[path = "../../bindings/rust/tests/fake/mod.rs"]
mod fake;

/// Length that is no multiple of any single step.
const LEN: usize = 300_001;
/// Length that `copy-check.c` uses.
const LARGE: u64 = 100_000;
/// Most bytes that the shim asks for.
const MAX_COUNT: u64 = 0x7fff_f000;

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

fn folder_with(name: &str, content: &[u8]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), content).unwrap();
    folder
}

/// Makes a command for a program of ours, or of the machine.
fn program(name: &str, agent: &FakeAgent) -> Command {
    let ours = built().join(name);
    let mut command = if ours.exists() { Command::new(ours) } else { Command::new(name) };
    command.env("LD_LIBRARY_PATH", built()).env("MILLRACE_AGENT_SOCKET", &agent.socket);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Makes a command like [`program`], with the shim.
fn shimmed(name: &str, agent: &FakeAgent) -> Command {
    let mut command = program(name, agent);
    command.env("LD_PRELOAD", built().join("libmillrace-preload.so"));
    command
}

fn succeed(command: &mut Command) -> String {
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the offsets and lengths of pipes.
fn places(asked: &[Asked]) -> Vec<(Option<u64>, Option<u64>, u64)> {
    asked.iter().map(|asked| (asked.source, asked.sink, asked.len_bytes)).collect()
}

/// Running `mrpipe` that listens.
struct Listening {
    child: Child,
    address: SocketAddr,
    told: BufReader<ChildStdout>,
}

impl Listening {
    fn start(command: &mut Command) -> Self {
        // Nobody listens there now, nor does a test beside this one take the port at this address.
        let address = TcpListener::bind("127.0.0.77:0").unwrap().local_addr().unwrap();
        let mut child = command.args(["-l", &address.to_string()]).spawn().unwrap();
        let mut told = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        assert_eq!(line, "listening\n");
        Self { child, address, told }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).unwrap()
    }

    fn report(mut self) -> String {
        let mut report = String::new();
        self.told.read_to_string(&mut report).unwrap();
        assert!(self.child.wait().unwrap().success());
        report
    }
}

/// Runs `mrpipe -g` for two rounds. Returns its report, and the file that it leaves.
fn get(agent: &FakeAgent, options: &[&str], want: &[u8]) -> (String, Vec<u8>) {
    let folder = folder_with("got", b"before");
    let path = folder.path().join("got");
    let mut command = program("mrpipe", agent);
    let server = Listening::start(command.args(["-g", "-n", "2"]).args(options).arg(&path));
    let mut peer = server.connect();
    for round in 0..2 {
        writeln!(peer, "MRPIPE {round} {}", want.len()).unwrap();
        peer.write_all(want).unwrap();
        writeln!(peer, "END {round}").unwrap();
    }
    // Its end comes when it has told.
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    drop(peer);
    (server.report(), std::fs::read(path).unwrap())
}

#[test]
fn mrpipe_gets_files() {
    let (agent, want) = (FakeAgent::start(), bytes(LEN));
    let (told, got) = get(&agent, &["-p", "-o", "5"], &want);
    assert!(told.contains("\"piped\": 600002, \"sent\": 0, \"whole\": true"), "{told}");
    assert!(got[..5] == [0; 5] && got[5..] == want);
    let round = (None, Some(5), LEN as u64);
    assert_eq!(places(&agent.asked()), [round, round]);

    for mode in ["-s", "-w"] {
        let (told, got) = get(&agent, &[mode, "-e", "-o", "2"], &want);
        assert!(got[..2] == *b"be" && got[2..] == want);
        assert!(told.contains("\"piped\": 0, \"sent\": 600002, \"whole\": true"), "{told}");
    }
    assert_eq!(agent.asked(), []);
}

#[test]
fn mrpipe_gets_the_rest_by_other_means_or_not_at_all() {
    let (agent, want) = (FakeAgent::start(), bytes(LEN));
    let parts = [Say::AtMost(1000, Reason::TimedOut), Say::Refuse(Reason::FlowBusy)];
    let asked = [(None, Some(0), LEN as u64), (None, Some(1000), LEN as u64 - 1000)];
    agent.say([parts, parts].concat());
    let (told, got) = get(&agent, &["-b"], &want);
    assert!(told.contains("\"piped\": 2000, \"sent\": 598002, \"whole\": true"), "{told}");
    assert!(got == want);
    assert_eq!(places(&agent.asked()), [asked, asked].concat());

    agent.say(parts);
    let (told, got) = get(&agent, &["-p"], &want);
    assert!(
        told.contains("\"piped\": 1000, \"sent\": 0, \"whole\": false, \"reason\": 18"),
        "{told}"
    );
    assert!(got == want[..1000]);
    assert_eq!(places(&agent.asked()), asked);

    // Nobody knows how much has come: nothing else may be tried.
    agent.say([Say::Die(7)]);
    let (told, _) = get(&agent, &["-b"], &want);
    assert!(told.contains("\"piped\": 0, \"sent\": 0, \"whole\": false, \"reason\": 53"), "{told}");
}

/// Runs `mrpipe -x` between two of our connections. Returns its report, and the bytes that came
/// out.
fn pass_on(agent: &FakeAgent, options: &[&str], want: &[u8]) -> (String, Vec<u8>) {
    let onward = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = program("mrpipe", agent);
    command.args(["-x", &onward.local_addr().unwrap().to_string()]).args(options);
    let server = Listening::start(&mut command);
    let mut first = server.connect();
    let (mut last, mut got) = (onward.accept().unwrap().0, Vec::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            first.write_all(want).unwrap();
            first.shutdown(std::net::Shutdown::Write).unwrap();
        });
        last.read_to_end(&mut got).unwrap();
    });
    drop(last);
    (server.report(), got)
}

#[test]
fn mrpipe_passes_streams_on() {
    let (agent, want) = (FakeAgent::start(), bytes(LEN));
    let (told, got) = pass_on(&agent, &["-p", "-z", "300001", "-t", "9000"], &want);
    assert!(told.contains("\"piped\": 300001, \"sent\": 0, \"whole\": true"), "{told}");
    assert!(got == want);
    let asked = agent.asked();
    assert_eq!(places(&asked), [(None, None, LEN as u64)]);
    assert_eq!(asked[0].timeout_ms, 9000);

    agent.say([Say::AtMost(999, Reason::TimedOut), Say::Refuse(Reason::NoFlow)]);
    let (told, got) = pass_on(&agent, &["-b"], &want);
    assert!(told.contains("\"piped\": 999, \"sent\": 299002, \"whole\": true"), "{told}");
    assert!(got == want);
    for mode in ["-s", "-w"] {
        let (told, got) = pass_on(&agent, &[mode, "-z", "300000"], &want);
        assert!(got == want[..300_000] && told.contains("\"sent\": 300000, \"whole\": true"));
    }
}

#[test]
fn mrpipe_copies_files() {
    let (agent, want) = (FakeAgent::start(), bytes(LEN));
    let folder = folder_with("a", &want);
    let copy = |options: &[&str]| {
        let mut command = program("mrpipe", &agent);
        let told = succeed(command.arg("-f").args(options).args(["a", "b"]).current_dir(&folder));
        (told, std::fs::read(folder.path().join("b")).unwrap())
    };
    let (told, got) = copy(&["-p", "-n", "2"]);
    assert!(got == want && told.contains("\"piped\": 600002, \"sent\": 0"), "{told}");
    let all = (Some(0), Some(0), LEN as u64);
    assert_eq!(places(&agent.asked()), [all, all]);
    agent.say([Say::AtMost(1, Reason::NoLease), Say::Refuse(Reason::NoLease)]);
    let (told, got) = copy(&["-o", "2", "-O", "3", "-e"]);
    assert!(got[..3] == want[..3] && got[3..LEN + 1] == want[2..]);
    assert!(told.contains("\"piped\": 1, \"sent\": 299998, \"whole\": true"), "{told}");
    assert_eq!(places(&agent.asked())[1], (Some(3), Some(4), LEN as u64 - 3));
    for mode in ["-s", "-w"] {
        let (told, got) = copy(&[mode]);
        assert!(got == want && told.contains("\"piped\": 0, \"sent\": 300001"), "{told}");
    }
}

#[test]
fn the_shim_copies_files() {
    let (agent, folder) = (FakeAgent::start(), folder_with("a", &bytes(300_000)));
    agent.say([Say::Move; 4]);
    agent.say([Say::AtMost(1000, Reason::TimedOut), Say::Refuse(Reason::NotPermitted)]);
    agent.say([Say::Move, Say::Move, Say::Die(500)]);
    let mut command = shimmed("copy-check", &agent);
    succeed(command.env("MILLRACE_MIN_BYTES", "65536").arg(folder.path()).arg("all"));
    let want = [
        (0, 0, LARGE + 1),
        (5, 7, LARGE + 2),
        (100_001, 9, LARGE + 3),
        (200_004, 100_001, MAX_COUNT),
        (0, 199_997, LARGE + 4),
        (0, 0, LARGE + 5),
        (11, 0, LARGE + 6),
        (3, LARGE + 6, LARGE + 7),
        (1, 0, LARGE + 8),
    ];
    let want = want.map(|(source, sink, len)| (Some(source), Some(sink), len));
    assert_eq!(places(&agent.everything_asked()), want);
}

#[test]
fn the_shim_remembers_who_refused_what() {
    let (agent, folder) = (FakeAgent::start(), folder_with("a", &bytes(300_000)));
    agent.say([Say::Refuse(Reason::NoLease), Say::Move, Say::Move]);
    agent.say([Say::Refuse(Reason::FileSystem)]);
    agent.say([Say::AtMost(10, Reason::TimedOut); 2]);
    let mut command = shimmed("copy-check", &agent);
    succeed(command.env("MILLRACE_MIN_BYTES", "65536").arg(folder.path()).arg("refusals"));
    let lens: Vec<_> = agent.asked().iter().map(|asked| asked.len_bytes - LARGE).collect();
    assert_eq!(lens, [20, 22, 40, 24, 27, 28]);
}

#[test]
fn the_shim_learns_what_pays() {
    let (agent, folder) = (FakeAgent::start(), folder_with("a", &bytes(2 << 20)));
    agent.set_min_kib(32);
    agent.say([Say::AtMost(1, Reason::TimedOut); 3]);
    let mut command = shimmed("break-even-check", &agent);
    command.args(["a", "b"]).current_dir(&folder).env_remove("MILLRACE_MIN_BYTES");
    let mut child = command.spawn().unwrap();
    let mut told = BufReader::new(child.stdout.take().unwrap());
    told.read_line(&mut String::new()).unwrap();
    assert_eq!(agent.everything_asked(), []);
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
    let asked = agent.everything_asked();
    assert_eq!(asked.iter().filter(|asked| asked.op == op::QUERY).count(), 1);
    let pipes: Vec<_> = asked.iter().filter(|asked| asked.op == op::PIPE).collect();
    assert_eq!(
        pipes.iter().map(|asked| asked.len_bytes >> 10).collect::<Vec<_>>(),
        [1024, 200, 32]
    );
}

#[test]
fn programs_of_the_machine_copy_with_the_shim() {
    let (agent, want) = (FakeAgent::start(), bytes(3 << 20));
    let folder = folder_with("a", &want);
    let python = "import shutil; shutil.copyfile('a', 'b')";
    for (number, line) in [&["cp", "a", "b"][..], &["python3", "-c", python]].iter().enumerate() {
        // In parts, of which some are not piped.
        agent.say([Say::AtMost(1 << 20, Reason::TimedOut), Say::AtMost(5, Reason::TimedOut)]);
        agent.say([Say::Refuse(Reason::NoLease)]);
        succeed(shimmed(line[0], &agent).args(&line[1..]).current_dir(&folder));
        assert!(std::fs::read(folder.path().join("b")).unwrap() == want, "{line:?}");
        let sources: Vec<_> = agent.asked().iter().map(|asked| asked.source).collect();
        assert_eq!(sources, [Some(0), Some(1 << 20), Some((1 << 20) + 5)], "{number}");
        std::fs::remove_file(folder.path().join("b")).unwrap();
    }
    // No agent any more.
    agent.end();
    succeed(shimmed("cp", &agent).args(["a", "b"]).current_dir(&folder));
    assert!(std::fs::read(folder.path().join("b")).unwrap() == want);
}

#[test]
fn the_python_binding_does_what_it_says() {
    let agent = FakeAgent::start();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bindings/python");
    let mut command = program("python3", &agent);
    command.args(["-B", "-W", "error", "-m", "unittest", "-q"]).current_dir(sources);
    succeed(&mut command);
}

/// A program outside of this tree finds all installed files by pkg-config alone.
#[test]
fn installed_pieces_are_found() {
    let root = tempfile::tempdir().unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../libmillrace");
    let mut make = Command::new("make");
    make.arg("-s").arg("-C").arg(&sources).arg(format!("O={}", built().display()));
    make.arg(format!("DESTDIR={}", root.path().display())).arg("install");
    assert!(make.status().unwrap().success());
    let mut config = Command::new("pkg-config");
    config.args(["--cflags", "--libs", "millrace"]).env("PKG_CONFIG_SYSROOT_DIR", root.path());
    config.env("PKG_CONFIG_LIBDIR", root.path().join("usr/lib/pkgconfig"));
    config.env("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1").env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1");
    let flags = succeed(&mut config);
    let mut compile = Command::new("cc");
    std::fs::copy(sources.join("check.c"), root.path().join("p.c")).unwrap();
    compile.args(["p.c", "-o", "p", "-pthread"]).args(flags.split_whitespace());
    assert!(compile.current_dir(&root).status().unwrap().success());
    let pages = std::fs::read_dir(root.path().join("usr/share/man/man3")).unwrap();
    let names: Vec<_> = pages.map(|page| page.unwrap().path()).collect();
    let manual = std::fs::read_to_string(sources.join("millrace_pipe.3")).unwrap();
    let header = std::fs::read_to_string(sources.join("millrace.h")).unwrap();
    // Every function of the header is in the manual and has a page.
    let calls = header.split(|c: char| !(c.is_alphanumeric() || "_(".contains(c)));
    let calls: Vec<_> =
        calls.filter_map(|word| word.split_once('(')).map(|(name, _)| name).collect();
    let calls = calls.iter().filter(|name| name.starts_with("millrace_"));
    for name in calls {
        assert!(manual.contains(name), "{name}");
        assert!(names.iter().any(|page| page.ends_with(format!("{name}.3")) && page.exists()));
    }
    assert_eq!(names.len(), 9);
}
