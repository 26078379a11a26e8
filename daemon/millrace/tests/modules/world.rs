//! A VM's modules without a VM: connections are pairs of sockets.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use modules::ring::Region;
use modules::{Charge, DiskUse, ModuleConfig, RingConfig, RingSetup, VmModules, VmModulesConfig};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sha2::{Digest, Sha256};

use crate::client::{Client, hello};

/// Answers each request with what it was asked, after doing what its first byte says: `s` spins,
/// `t` traps, `g` takes memory until it gets no more, `r` calls itself for ever, `n` answers
/// nothing, `d` appends the body to a file and answers once that is durable, `l` reads that file's
/// length, `p` its first 16 bytes, `f` the names of all files, `m` answers with how many pages it
/// got; `x` answers twice; `e` returns an error.
pub const MODULE: &str = include_str!("module.wat");

pub struct World {
    /// Removed with it.
    _folder: tempfile::TempDir,
    pub modules: Arc<VmModules>,
    config: VmModulesConfig,
    used: Mutex<Receiver<DiskUse>>,
    /// The memory for rings, as a guest has it.
    pub region: Arc<Region>,
    /// Clients go by rings.
    by_ring: bool,
}

/// Bytes of that: three rings.
const REGION_BYTES: u64 = 1 << 20;

/// How long modules look at rings.
const SPIN_US: u32 = 20;

pub fn command() -> Vec<String> {
    let log = std::env::var("MILLRACE_TEST_LOG").unwrap_or_else(|_| "error".into());
    vec![
        env!("CARGO_BIN_EXE_millrace").into(),
        "module-process".into(),
        "vm".into(),
        "--log".into(),
        log,
    ]
}

/// A module's file in this folder.
pub fn write(folder: &Path, name: &str, text: &str) -> ModuleConfig {
    let wasm = wat::parse_str(text).unwrap();
    let path = folder.join(format!("{name}.wasm"));
    std::fs::write(&path, &wasm).unwrap();
    ModuleConfig {
        name: name.into(),
        path,
        hash: Sha256::digest(&wasm).into(),
        deadline_ms: 100,
        cpu_percent: 100,
        memory_bytes: 16 << 20,
        disk_bytes: 1 << 20,
    }
}

impl World {
    /// With modules `a` and `b`, both the same.
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let modules = ["a", "b"].map(|name| write(folder.path(), name, MODULE)).to_vec();
        Self::with(folder, modules)
    }

    /// The same, and clients go by rings: at most three at a time.
    pub fn by_ring() -> Self {
        Self { by_ring: true, ..Self::start() }
    }

    /// The same, and the guest's requests are not taken otherwise.
    pub fn by_ring_alone() -> Self {
        let world = Self::by_ring();
        let config = VmModulesConfig { needs_ring: true, ..world.config.clone() };
        Self { config, ..world }.again()
    }

    /// The same, run by another command.
    pub fn with_command(command: Vec<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let modules = ["a", "b"].map(|name| write(folder.path(), name, MODULE)).to_vec();
        Self::run(folder, modules, command)
    }

    pub fn with(folder: tempfile::TempDir, modules: Vec<ModuleConfig>) -> Self {
        Self::run(folder, modules, command())
    }

    fn run(folder: tempfile::TempDir, modules: Vec<ModuleConfig>, command: Vec<String>) -> Self {
        let (sender, used) = channel();
        let file = modules::ring::open(&folder.path().join("ring"), REGION_BYTES, 0o600).unwrap();
        let region = Region::map(file.try_clone().unwrap(), REGION_BYTES).unwrap();
        let setup = RingSetup { bytes: REGION_BYTES, spin_us: SPIN_US };
        let config = VmModulesConfig {
            vm: "vm".into(),
            modules,
            state_dir: folder.path().join("state"),
            // One for all tests: what is compiled once is not compiled again.
            code_dir: code_dir(),
            command,
            drained: false,
            ring: Some(RingConfig { file: Arc::new(file), setup }),
            needs_ring: false,
            charge: Charge(Arc::new(move |used| {
                // A world that has ended hears nothing.
                let _ = sender.send(used);
            })),
        };
        let modules = VmModules::start(config.clone()).unwrap();
        let (used, region) = (Mutex::new(used), Arc::new(region));
        Self { _folder: folder, modules, config, used, region, by_ring: false }
    }

    /// Another VM's modules, with the same files.
    pub fn neighbour(&self) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::with(folder, self.config.modules.clone())
    }

    /// The same files, after its end, run as usual.
    pub fn again(self) -> Self {
        self.modules.stop();
        let config = VmModulesConfig { command: command(), ..self.config.clone() };
        let modules = VmModules::start(config.clone()).unwrap();
        Self { modules, config, ..self }
    }

    /// Configs of its modules.
    pub fn configs(&self) -> Vec<ModuleConfig> {
        self.config.modules.clone()
    }

    /// The module's own file.
    pub fn file(&self, module: &str) -> PathBuf {
        self.config.state_dir.join(module).join("log")
    }

    /// The file of the memory for rings.
    pub fn ring_path(&self) -> PathBuf {
        self._folder.path().join("ring")
    }

    /// Next charge of the VM.
    pub fn charged(&self) -> DiskUse {
        self.used.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap()
    }

    /// A connection of the guest that has said nothing.
    pub fn connect(&self) -> Client {
        self.connect_as(true)
    }

    /// The same, of the guest or else of a program of the host.
    pub fn connect_as(&self, of_guest: bool) -> Client {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs): (OwnedFd, OwnedFd) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        self.modules.connect(theirs, of_guest);
        Client::new(ours)
    }

    /// A client of a module. As every client must, it connects again if the process ends before it
    /// is welcomed.
    pub fn client(&self, id: u8, module: &str) -> Client {
        loop {
            let mut client = self.connect();
            client.send(&hello([id; 16], module));
            let welcomed = client.welcomed().is_some();
            if welcomed && (!self.by_ring || client.change_over(&self.region)) {
                return client;
            }
        }
    }

    /// A client of module `a` by its socket; none: the process ended meanwhile.
    pub fn by_socket(&self, id: u8) -> Option<Client> {
        let mut client = self.connect();
        client.send(&hello([id; 16], "a"));
        client.welcomed().map(|_| client)
    }

    /// The process, once there is one that is ready.
    pub fn pid(&self) -> i32 {
        while self.by_socket(255).is_none() {}
        children_of(std::process::id(), self.config.state_dir.parent().unwrap())
    }
}

fn code_dir() -> PathBuf {
    let target = Path::new(env!("CARGO_BIN_EXE_millrace")).parent().unwrap();
    target.join("tests-of-modules")
}

/// The child of this process that has a file of this folder open.
fn children_of(parent: u32, folder: &Path) -> i32 {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).unwrap();
    let children = tasks.flat_map(|task| {
        std::fs::read_to_string(task.unwrap().path().join("children"))
            .unwrap_or_default()
            .split_whitespace()
            .map(|pid| pid.parse::<i32>().unwrap())
            .collect::<Vec<_>>()
    });
    let has = |pid: &i32| {
        std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|fds| {
            fds.flatten()
                .any(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path.starts_with(folder)))
        })
    };
    let all: Vec<i32> = children.filter(has).collect();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0]
}
