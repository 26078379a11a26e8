//! A plane without engines, served on a real Unix socket.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::counter::{DropReason, QueueStats};
use base::histogram::{Histogram, Snapshot};
use config::{Config, CreditConfig, PortConfig, SocketMode, parse};
use control::api::ApiServer;
use control::client::Client;
use control::plane::{
    ChannelLink, ChannelState, ChannelStatus, CopyWork, CreditUsage, Detached, DiskStatus, Health,
    HolderStatus, ImageStatus, IoStatus, LogFilter, MacStatus, ModuleCounts, ModuleState,
    ModuleStatus, NetStatus, PipeStatus, PlacementStatus, Plane, PlaneError, PortKind, PortStatus,
    Restored, SidecoreStatus, Status, SwitchStatus, VmStatus, VsockStatus, WorkerStatus,
};
use control::sample::{Metrics, PortMetrics};
use serde_json::Value;
use tokio::sync::oneshot;

/// Bytes of the fake's copies: more than all buffers on the way hold.
pub const COPY_BYTES: u64 = 8 << 20;

/// A plane without engines: the requests it got, and the config it has.
pub struct Fake {
    pub config: Mutex<Config>,
    pub asked: Mutex<Vec<String>>,
}

impl Fake {
    fn new() -> Self {
        let text = "[[switch]]\nname='lan'\n[[vm]]\nname='web'\ntrust_domain='t'\n[[vm.net]]\n\
                    name='net0'\nswitch='lan'\n[[vm.disk]]\nname='root'\nformat='memory'\n\
                    size='1MiB'\n[vm.vsock]\ncid=3\npath='/v'\n";
        Self {
            config: Mutex::new(parse(Path::new("m.toml"), text).unwrap()),
            asked: Mutex::default(),
        }
    }

    fn note(&self, what: String) {
        self.asked.lock().unwrap().push(what);
    }

    fn known(&self, what: &'static str, vm: &str, port: &str) -> Result<PortConfig, PlaneError> {
        let config = self.config.lock().unwrap();
        let found = config.vms.iter().find(|v| v.name == vm);
        found
            .and_then(|v| v.ports().find(|p| p.name() == port))
            .ok_or(PlaneError::NotFound { what, name: format!("{vm}/{port}") })
    }
}

fn port(vm: &str, config: &PortConfig) -> PortStatus {
    let (mut net, mut disk, mut vsock) = (None, None, None);
    let kind = match config {
        PortConfig::Net(c) => {
            let addresses = vec!["10.0.0.1".parse().unwrap()];
            net = Some(NetStatus { switch: c.switch.clone(), mac: None, addresses, link: true });
            PortKind::Net
        }
        PortConfig::Disk(c) => {
            let path = c.format.path().cloned();
            let format = c.format.name().into();
            let (len_bytes, read_only) = (1 << 20, c.read_only);
            let latency = Some((&latency()).into());
            let (io_status, held_requests) = (IoStatus::Nospace, 2);
            disk = Some(DiskStatus {
                format,
                path,
                len_bytes,
                block_size: 512,
                read_only,
                io_status,
                held_requests,
                image: Some(ImageStatus {
                    was_checked: true,
                    mended_counts: 1,
                    freed_leaks: 2,
                    is_damaged: false,
                    map_len_bytes: 4096,
                }),
                latency,
            });
            PortKind::Disk
        }
        PortConfig::Vsock(c) => {
            vsock = Some(VsockStatus { cid: c.cid, path: c.path.clone(), open_connections: 0 });
            PortKind::Vsock
        }
    };
    PortStatus {
        vm: vm.into(),
        port: config.name().into(),
        kind,
        socket: config.endpoint().socket.clone(),
        mode: SocketMode::Listen,
        connected: false,
        health: Health::Broken,
        reason: Some("not started".into()),
        last_error: Some("cut".into()),
        held: false,
        sessions: 2,
        resumed: 1,
        features: "0x130000000".into(),
        queues: 2,
        queues_running: 0,
        memory_regions: 0,
        requests: 5,
        bytes: 6,
        drops: 0,
        net,
        disk,
        vsock,
    }
}

fn link(state: &str) -> ChannelLink {
    ChannelLink {
        vm: "db".into(),
        state: state.into(),
        memory: "failed".into(),
        reason: Some("no root port".into()),
        held_pages: 3,
        lent_messages: 1,
        sent: 4,
        received: 5,
        sent_bytes: 6,
        received_bytes: u64::MAX,
        referred_bytes: 2,
        refused: 0,
    }
}

fn module(vm: &str) -> ModuleStatus {
    ModuleStatus {
        vm: vm.into(),
        module: "table".into(),
        state: ModuleState::Busy,
        reason: Some("no socket".into()),
        counts: ModuleCounts { requests: 7, ..ModuleCounts::default() },
        latency: Some((&latency()).into()),
    }
}

fn sidecore() -> SidecoreStatus {
    SidecoreStatus {
        index: 0,
        cpu: Some(1),
        node: Some(0),
        active: true,
        spin_us: 50,
        spin_limit_ns: 20_000,
        workers: 3,
        rounds: 10,
        busy_rounds: 4,
        sleeps: 2,
        wakeups: 1,
        spin_hits: 3,
        busy_ns: 1000,
        spin_ns: 500,
        asleep_ns: 7000,
        panics: 0,
        stalls: 0,
    }
}

fn worker() -> WorkerStatus {
    let name = "disk we\"b/root queue 0".into();
    WorkerStatus { name, sidecore: 0, pinned: false, busy_ns: 700, moves: 1 }
}

/// One request of a microsecond and one of three.
fn latency() -> Snapshot {
    let times = Histogram::default();
    times.record(1000);
    times.record(3000);
    times.snapshot()
}

impl Plane for Fake {
    fn status(&self) -> Status {
        let macs = vec![MacStatus {
            mac: "02:00:00:00:00:01".into(),
            port: "uplink".into(),
            fixed: false,
            age_s: 7,
        }];
        let config = self.config.lock().unwrap();
        let vms = config.vms.iter().map(|vm| VmStatus {
            name: vm.name.clone(),
            credit: Some(vm.credit),
            usage: Some(CreditUsage::default()),
            trust_domain: vm.trust_domain.clone(),
            ports: vm.ports().map(|p| port(&vm.name, &p)).collect(),
            modules: vec![module(&vm.name)],
        });
        Status {
            version: "0.0.0".into(),
            pid: 1,
            uptime_s: 3,
            config: None,
            holder: HolderStatus { enabled: true, socket: Some("/h".into()) },
            sidecores: vec![sidecore()],
            workers: vec![worker()],
            placement: PlacementStatus::default(),
            switches: vec![SwitchStatus {
                name: "lan".into(),
                sidecore: 0,
                uplink: Some("mr0".into()),
                holds: 2,
                held_ns: 900,
                macs,
            }],
            vms: vms.collect(),
        }
    }

    fn ports(&self) -> Vec<PortStatus> {
        self.status().vms.into_iter().flat_map(|vm| vm.ports).collect()
    }

    fn pipes(&self) -> Vec<PipeStatus> {
        let pipe = |id| PipeStatus {
            vm: "web".into(),
            id,
            source: "disk root, 3 extents".into(),
            sink: "192.0.2.10:80 to 198.51.100.7:40000".into(),
            len_bytes: 1 << 30,
            moved_bytes: 7,
            state: "moving".into(),
            age_ms: 12,
        };
        vec![pipe(1), pipe(u64::MAX)]
    }

    fn channels(&self) -> Vec<ChannelStatus> {
        let reason = Some("no front end is connected".into());
        let out = ChannelStatus { reason, ..ChannelStatus::out("db", "t", false) };
        let links = ["none", "up"].map(link).to_vec();
        let web = ChannelStatus {
            state: ChannelState::Active,
            id: Some(1),
            window_len_bytes: 1 << 28,
            macs: vec!["02:00:00:00:00:01".into()],
            addresses: vec!["10.0.0.1".parse().unwrap(), "fe80::1".parse().unwrap()],
            links,
            ..ChannelStatus::out("web", "t", true)
        };
        vec![web, out]
    }

    fn join_channel(&self, vm: &str) -> Result<ChannelStatus, PlaneError> {
        let found = self.channels().into_iter().find(|channel| channel.vm == vm);
        self.note(format!("join {vm}"));
        found.ok_or(PlaneError::NotFound { what: "VM", name: vm.into() })
    }

    fn leave_channel(&self, vm: &str) -> Result<(), PlaneError> {
        match vm {
            "web" => Err(PlaneError::Refused("db has 3 pages of web in use".into())),
            "db" => {
                self.note(format!("leave {vm}"));
                Ok(())
            }
            _ => Err(PlaneError::NotFound { what: "VM", name: vm.into() }),
        }
    }

    fn modules(&self, vm: Option<&str>) -> Result<Vec<ModuleStatus>, PlaneError> {
        match vm {
            None | Some("web") => Ok(vec![module("web")]),
            Some(vm) => Err(PlaneError::NotFound { what: "VM", name: vm.into() }),
        }
    }

    fn load_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError> {
        let list = self.modules(Some(vm))?;
        self.note(format!("load {vm}"));
        Ok(list)
    }

    fn back_up(&self, vm: &str, module: &str) -> Result<CopyWork, PlaneError> {
        self.modules(Some(vm))?;
        self.note(format!("back up {vm} {module}"));
        let len_bytes = COPY_BYTES;
        Ok(Box::new(move |to| {
            // Whoever reads it may go.
            let _ = std::io::copy(&mut std::io::repeat(7).take(len_bytes), to);
        }))
    }

    fn restore(
        &self,
        vm: &str,
        module: &str,
        replace: bool,
        from: &mut dyn Read,
    ) -> Result<Restored, PlaneError> {
        self.modules(Some(vm))?;
        if module == "full" {
            return Err(PlaneError::Refused("there is no room".into()));
        }
        let read = std::io::copy(from, &mut std::io::sink());
        let files_bytes = read.map_err(|e| PlaneError::Refused(format!("reading: {e}")))?;
        self.note(format!("restore {vm} {module} {replace}"));
        Ok(Restored {
            vm: vm.into(),
            module: module.into(),
            of_vm: "db".into(),
            sha256: "00".repeat(32),
            begun_s: 1,
            files: 2,
            files_bytes,
        })
    }

    fn drain_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError> {
        let mut list = self.modules(Some(vm))?;
        self.note(format!("drain {vm}"));
        list[0].state = ModuleState::Drained;
        Ok(list)
    }

    fn resume_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError> {
        let list = self.modules(Some(vm))?;
        self.note(format!("resume {vm}"));
        Ok(list)
    }

    fn metrics(&self) -> Metrics {
        let stats = Arc::new(QueueStats::default());
        stats.requests.add(42);
        stats.drop_one(DropReason::Spoofed);
        let mut metrics = Metrics {
            version: "0.0.0".into(),
            uptime_s: 3,
            sidecores: vec![sidecore()],
            workers: vec![worker()],
            ports: vec![PortMetrics {
                vm: "we\"b\\\n".into(),
                port: "net0".into(),
                kind: PortKind::Net,
                connected: true,
                healthy: true,
                connections: 1,
                queues: vec![Arc::default(), Arc::clone(&stats)],
            }],
            uplinks: vec![("lan".into(), stats)],
            families: Vec::new(),
            times: Vec::new(),
        };
        let labels = vec![("vm", "web".into()), ("queue", "0".into())];
        metrics.time("millrace_disk_latency_nanoseconds", "Time.", labels, latency());
        metrics.sample("millrace_disk_size_bytes", "Size.", vec![("vm", "web".into())], 9);
        metrics.sample("millrace_disk_size_bytes", "Size.", vec![("vm", "db".into())], 8);
        metrics
    }

    fn log_filter(&self) -> LogFilter {
        LogFilter { filter: "info".into(), configured: "warn".into() }
    }

    fn set_log_filter(&self, filter: &str) -> Result<LogFilter, PlaneError> {
        self.note(format!("log {filter}"));
        Ok(LogFilter { filter: filter.into(), ..self.log_filter() })
    }

    fn attach(&self, vm: &str, body: &Value) -> Result<PortStatus, PlaneError> {
        let config = self.config.lock().unwrap().attach(vm, body)?;
        if config.name() == "refused" {
            return Err(PlaneError::Refused("no such file".into()));
        }
        assert_ne!(config.name(), "panic", "a bug of ours");
        Ok(port(vm, &config))
    }

    fn start(&self, vm: &str, name: &str) -> Result<PortStatus, PlaneError> {
        let config = self.known("port", vm, name)?;
        self.note(format!("start {vm}/{name}"));
        Ok(port(vm, &config))
    }

    fn detach(&self, vm: &str, port: &str) -> Result<Detached, PlaneError> {
        self.known("port", vm, port)?;
        self.config.lock().unwrap().detach(vm, port);
        let requests_in_disk = if port == "hanging" { 3 } else { 0 };
        Ok(Detached { requests_in_disk })
    }

    fn resume(&self, vm: &str, port: &str) -> Result<usize, PlaneError> {
        self.known("disk", vm, port)?;
        self.note("resume".into());
        Ok(2)
    }

    fn resize(&self, vm: &str, port: &str, len_bytes: Option<u64>) -> Result<u64, PlaneError> {
        self.known("disk", vm, port)?;
        if len_bytes == Some(0) {
            let limit = Some("1".into());
            return Err(PlaneError::Invalid { field: "size", what: "is 0".into(), limit });
        }
        self.note(format!("resize {len_bytes:?}"));
        Ok(len_bytes.unwrap_or(1 << 20))
    }

    fn set_link(&self, vm: &str, port: &str, up: bool) -> Result<bool, PlaneError> {
        self.known("net", vm, port)?;
        self.note(format!("link {up}"));
        Ok(up)
    }

    fn set_credit(&self, vm: &str, body: &Value) -> Result<CreditConfig, PlaneError> {
        let set = self.config.lock().unwrap().set_credit(vm, body)?;
        set.ok_or(PlaneError::NotFound { what: "VM", name: vm.into() })
    }

    fn shutdown(&self, forget: bool) {
        self.note(format!("shutdown {forget}"));
    }
}

/// A served fake; it stops when this goes.
pub struct Served {
    pub fake: Arc<Fake>,
    pub client: Client,
    pub socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Served {
    pub fn start() -> Self {
        Self::start_by(|path| ApiServer::bind(path).unwrap())
    }

    /// A fake whose socket is bound so.
    pub fn start_by(bind: impl FnOnce(&Path) -> ApiServer) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("control.sock");
        let fake = Arc::new(Fake::new());
        // Bound here, so that a client can connect as soon as this returns.
        let server = bind(&socket);
        let (stop, stopped) = oneshot::channel();
        let plane: Arc<dyn Plane> = fake.clone();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let stopped = async {
                let _ = stopped.await;
            };
            runtime.block_on(server.serve(plane, stopped)).unwrap();
        });
        let client = Client::new(&socket);
        Self { fake, client, socket, stop: Some(stop), thread: Some(thread), _dir: dir }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stop.take());
        let thread = self.thread.take().unwrap();
        if thread.join().is_err() && !std::thread::panicking() {
            panic!("the server panicked");
        }
    }
}
