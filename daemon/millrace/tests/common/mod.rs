//! A real daemon in a folder of its own, and disk requests of a scripted front end.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use control::client::{Answer, Client};
use queue::Layout;
use queue::testing::{ModelDriver, ModelOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

pub use vhost_user::testing::{BASIC, FrontEnd};

/// A guest of a network port.
#[path = "net_guest.rs"]
pub mod net_guest;

/// Strace on a daemon.
#[path = "strace.rs"]
pub mod strace;

/// A switch with a port of each of two VMs, and a disk in memory of the second: what the front end
/// of the benchmarks drives. A `[sidecore]` table goes before it. Receivers are waited for as long
/// as can be: a driver that a busy machine keeps from its CPU is not one that stalls.
pub const TWO_VMS: &str = "
[[switch]]
name='lan'
hold_us=1000000
[[vm]]
name='a'
[[vm.net]]
name='n'
switch='lan'
mac='02:00:00:00:00:0a'
addresses=['10.99.0.10']
mtu=65535
[[vm]]
name='b'
[[vm.net]]
name='n'
switch='lan'
mac='02:00:00:00:00:0b'
addresses=['10.99.0.11']
mtu=65535
[[vm.disk]]
name='d'
format='memory'
size='4MiB'
";

/// After this a test has failed; nothing waits for it in the good case.
const LIMIT: Duration = Duration::from_secs(60);

pub fn millrace() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command.env_remove("MILLRACE_SOCKET").env_remove("NOTIFY_SOCKET");
    command
}

pub fn run(args: &[&str]) -> Output {
    millrace().args(args).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A folder with a config, in which daemons run one after the other.
pub struct Place {
    pub dir: tempfile::TempDir,
    notify: UnixDatagram,
}

impl Place {
    /// `config` with `@` for the folder.
    pub fn new(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display().to_string();
        let text = format!("[daemon]\nrun_dir='{at}/run'\n{}", config.replace('@', &at));
        std::fs::write(dir.path().join("m.toml"), text).unwrap();
        let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
        notify.set_read_timeout(Some(LIMIT)).unwrap();
        Self { dir, notify }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.path("run").join(name)
    }

    /// Starts a daemon and waits until it says that it is ready.
    pub fn start(&self) -> Daemon {
        self.start_with(&[])
    }

    /// The same with more in its environment.
    pub fn start_with(&self, env: &[(&str, &Path)]) -> Daemon {
        let log =
            std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        self.start_to(env, log.into())
    }

    /// The same with its log elsewhere.
    pub fn start_to(&self, env: &[(&str, &Path)], log: Stdio) -> Daemon {
        self.start_command(&[], env, log)
    }

    /// The same with more on its command line.
    pub fn start_command(&self, args: &[&OsStr], env: &[(&str, &Path)], log: Stdio) -> Daemon {
        let mut child = millrace()
            .args(["serve", "-c"])
            .arg(self.path("m.toml"))
            .args(args)
            .env("NOTIFY_SOCKET", self.path("notify"))
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.wait_for("READY=1", &mut child);
        Daemon { child: Some(child), client: Client::new(&self.socket("control.sock")) }
    }

    /// Waits for a message to the service manager.
    pub fn wait_for(&self, wanted: &str, child: &mut Child) -> String {
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
            let mut buffer = [0u8; 1024];
            match self.notify.recv(&mut buffer) {
                Ok(n) => {
                    let message = text(&buffer[..n]);
                    if message.contains(wanted) {
                        return message;
                    }
                }
                Err(e) => panic!("no {wanted} from the daemon: {e}\n{}", self.log()),
            }
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

/// A running daemon; killed when it goes.
pub struct Daemon {
    child: Option<Child>,
    pub client: Client,
}

impl Daemon {
    pub fn ask(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        self.client.request(method, path, body.as_ref()).unwrap()
    }

    /// The answer's JSON, which must be a success.
    pub fn get(&self, path: &str) -> Value {
        let answer = self.ask("GET", path, None);
        assert!(answer.is_success(), "{path}: {}", answer.body);
        answer.json()
    }

    /// The status of one port.
    pub fn port(&self, vm: &str, port: &str) -> Value {
        let ports = self.get("/v1/ports");
        let all = ports.as_array().unwrap();
        all.iter().find(|p| p["vm"] == vm && p["port"] == port).cloned().unwrap_or(Value::Null)
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Processes of modules: all children of the daemon but the one that moves memory.
    pub fn module_processes(&self) -> Vec<i32> {
        let is_of_modules = |pid: &u32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            !line.contains("huge-pages-process")
        };
        let children = lab::process::children(self.pid()).into_iter().filter(is_of_modules);
        children.map(|pid| pid as i32).collect()
    }

    /// Asks until a port's status is as `wanted`: a session tells it shortly after its answer.
    pub fn wait_port(&self, vm: &str, port: &str, wanted: &[(&str, Value)]) {
        let begin = std::time::Instant::now();
        loop {
            let status = self.port(vm, port);
            if wanted.iter().all(|(key, value)| status[*key] == *value) {
                return;
            }
            assert!(begin.elapsed() < LIMIT, "not {wanted:?}: {status:#}");
            std::thread::yield_now();
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().unwrap().id() as i32;
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    pub fn terminate(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.child.take().unwrap().wait().unwrap()
    }

    /// Waits until it has ended by itself.
    pub fn ended(mut self) -> ExitStatus {
        self.child.take().unwrap().wait().unwrap()
    }

    /// SIGKILL: it cannot clean up.
    pub fn kill(mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Ends the holder that a test has started, however the test ends.
pub struct EndHolder<'a>(pub &'a Place);

impl Drop for EndHolder<'_> {
    fn drop(&mut self) {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let address = SocketAddrUnix::new(self.0.socket("holder.sock")).unwrap();
        if connect(&socket, &address).is_ok() {
            kill_process(socket_peercred(&socket).unwrap().pid, Signal::TERM).unwrap();
        }
    }
}

/// Ends a program and returns how it ended.
pub fn terminate(mut child: Child) -> ExitStatus {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::TERM).unwrap();
    child.wait().unwrap()
}

/// Reads to the end what a program prints.
pub fn all_of(mut stream: impl Read) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// A driver with a small memory.
pub fn driver(layout: Layout) -> ModelDriver {
    ModelDriver::with_options(
        layout,
        16,
        ModelOptions { mem_bytes: 4 << 20, ..ModelOptions::default() },
    )
}

/// Waits until `driver` has a used buffer.
pub fn wait_used(driver: &mut ModelDriver) -> (u16, u32) {
    loop {
        if let Some(used) = driver.used() {
            return used;
        }
        let call = driver.call_event();
        let mut set = [PollFd::new(call, PollFlags::IN)];
        let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        assert_ne!(poll(&mut set, Some(&limit)).unwrap(), 0, "nothing used");
        call.drain();
    }
}

/// Types of disk requests (virtio 1.2, 5.2.6).
pub const IN: u32 = 0;
pub const OUT: u32 = 1;

/// A disk request under way.
pub struct Request {
    data: u64,
    status: u64,
}

/// Offers a request of one sector. The driver has to be kicked.
pub fn offer_sector(driver: &mut ModelDriver, kind: u32, sector: u64, fill: u8) -> Request {
    let mut header = Vec::new();
    header.extend_from_slice(&kind.to_le_bytes());
    header.extend_from_slice(&0u32.to_le_bytes());
    header.extend_from_slice(&sector.to_le_bytes());
    let header = driver.buffer(&header);
    let data = driver.buffer(&[fill; 512]);
    let status = driver.buffer(&[0xff]);
    match kind {
        OUT => driver.offer(&[header, data], &[status]),
        _ => driver.offer(&[header], &[data, status]),
    };
    Request { data: data.0, status: status.0 }
}

impl Request {
    /// The sector's first byte, once the request has been done well.
    pub fn byte(&self, driver: &ModelDriver) -> u8 {
        assert_eq!(driver.read(self.status, 1), [0], "the request failed");
        let data = driver.read(self.data, 512);
        assert!(data.iter().all(|b| *b == data[0]), "a sector in pieces");
        data[0]
    }
}

/// One request from begin to end.
pub fn sector(driver: &mut ModelDriver, kind: u32, sector: u64, fill: u8) -> u8 {
    let request = offer_sector(driver, kind, sector, fill);
    driver.kick();
    wait_used(driver);
    request.byte(driver)
}

/// A descriptor for a child, without close-on-exec.
pub fn inheritable(fd: impl AsFd) -> std::os::fd::RawFd {
    use std::os::fd::AsRawFd;
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).unwrap();
    fd.as_fd().as_raw_fd()
}

/// Whether a path is a socket that somebody listens on.
pub fn listens(path: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(path).is_ok()
}
