//! What the control API asks of the daemon. The binary implements it on top of the engines; this
//! crate knows none of them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use base::histogram::Snapshot;
use config::{AttachError, CreditConfig, Problems, SocketMode};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use thiserror::Error;

use crate::sample::Metrics;

mod channel;
mod module;
mod pipe;

pub use channel::{ChannelLink, ChannelState, ChannelStatus};
pub use module::{CopyWork, ModuleCounts, ModuleState, ModuleStatus, Restored};
pub use pipe::PipeStatus;

/// The daemon, as the API sees it. Methods may block for as long as a device takes to answer.
pub trait Plane: Send + Sync + 'static {
    /// Everything worth showing.
    fn status(&self) -> Status;

    /// All ports, in the order of the config.
    fn ports(&self) -> Vec<PortStatus>;

    /// The pipes under way, in no order that means anything.
    fn pipes(&self) -> Vec<PipeStatus>;

    /// The VMs that take part in channels or may, in the order of the config.
    fn channels(&self) -> Vec<ChannelStatus>;

    /// Makes a VM a member of its trust domain's channels, and lets it be one again by itself. One
    /// that is a member stays as it is.
    fn join_channel(&self, vm: &str) -> Result<ChannelStatus, PlaneError>;

    /// Ends a VM's membership; it does not join by itself again until its front end reconnects.
    fn leave_channel(&self, vm: &str) -> Result<(), PlaneError>;

    /// The modules of all VMs, or of one, in the order of the config.
    fn modules(&self, vm: Option<&str>) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// Replaces a VM's modules by those of the config's files, which are read again. On error the old
    /// ones stay.
    fn load_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// Begins a copy of a module's files, which is taken while it serves. One VM has one at a time.
    fn back_up(&self, vm: &str, module: &str) -> Result<CopyWork, PlaneError>;

    /// Puts a copy in the place of a module's files, once it is checked and durable; VM's modules end and begin
    /// for it, unless they are drained. Files that are there are replaced only if it says so.
    fn restore(
        &self,
        vm: &str,
        module: &str,
        replace: bool,
        from: &mut dyn std::io::Read,
    ) -> Result<Restored, PlaneError>;

    /// Ends a VM's modules, durably, until [`Plane::resume_modules`]: also across a restart, and wherever their
    /// folder goes.
    fn drain_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// Has modules that were drained serve again.
    fn resume_modules(&self, vm: &str) -> Result<Vec<ModuleStatus>, PlaneError>;

    /// The counters.
    fn metrics(&self) -> Metrics;

    /// What is logged.
    fn log_filter(&self) -> LogFilter;

    /// Changes what is logged until the daemon ends.
    fn set_log_filter(&self, filter: &str) -> Result<LogFilter, PlaneError>;

    /// Makes a port and serves it. `body` is as in [`config::Config::attach`].
    fn attach(&self, vm: &str, body: &Json) -> Result<PortStatus, PlaneError>;

    /// Starts a port that does not run: one that failed to start, or one of the config file that was
    /// detached. It is as the config file says now, or as it was attached.
    fn start(&self, vm: &str, port: &str) -> Result<PortStatus, PlaneError>;

    /// Stops a port, and drops it. It waits for requests in its disk for a bounded time only.
    fn detach(&self, vm: &str, port: &str) -> Result<Detached, PlaneError>;

    /// Has the requests of a disk go on that wait for their storage. Returns how many.
    fn resume(&self, vm: &str, port: &str) -> Result<usize, PlaneError>;

    /// Takes over a disk's new size: that of the file, or `len_bytes` where there is none. Returns
    /// the size in bytes. [`PlaneError::Conflict`]: the disk has it, but the guest could not be told.
    fn resize(&self, vm: &str, port: &str, len_bytes: Option<u64>) -> Result<u64, PlaneError>;

    /// Plugs the cable in or out. Returns whether a connected guest can see it at its carrier.
    fn set_link(&self, vm: &str, port: &str, up: bool) -> Result<bool, PlaneError>;

    /// Changes what a VM is granted: the settings that `body` names. Returns what holds now.
    fn set_credit(&self, vm: &str, body: &Json) -> Result<CreditConfig, PlaneError>;

    /// Begins to stop the daemon, and returns. `forget`: sessions in the holder are dropped too.
    fn shutdown(&self, forget: bool);
}

/// Why the daemon did not do what was asked.
#[derive(Debug, Error)]
pub enum PlaneError {
    /// There is no such VM or port.
    ///
    /// Remedy: check the name: `millrace ports` lists VMs and ports.
    #[error("there is no {what} {name}")]
    NotFound {
        /// `VM`, `port`, `disk` or `net`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The port cannot be attached as described.
    ///
    /// Remedy: see `AttachError`.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Settings of a VM are wrong.
    ///
    /// Remedy: mend each setting as its line says.
    #[error(transparent)]
    Settings(#[from] Problems),
    /// A value of the request is wrong.
    ///
    /// Remedy: write a value within the limit that the text names.
    #[error("{field}: {what}")]
    Invalid {
        /// Which.
        field: &'static str,
        /// What is wrong with it, and the limit.
        what: String,
        /// The limit.
        limit: Option<String>,
    },
    /// The request does not go with the daemon's state.
    ///
    /// Remedy: do as the text says; `millrace ports` and `millrace status` show the state that it
    /// contradicts.
    #[error("{0}")]
    Conflict(String),
    /// The request is good, but the engine or the operating system cannot do it: no such file, a
    /// lock on the image, a socket in use.
    ///
    /// Remedy: do as the text says; it is one of the errors of the port's kind on this page.
    #[error("{0}")]
    Refused(String),
    /// Something of the daemon is gone.
    ///
    /// Remedy: look into the log for a panic, restart the daemon, and report it.
    #[error("{0}")]
    Failed(String),
}

/// A port is detached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Detached {
    /// Requests that its disk has not answered: the image stays locked until they are over. The memory
    /// of its VM may still be written by those that read.
    pub requests_in_disk: usize,
}

/// What is logged: a level, or directives such as `info,net=debug`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LogFilter {
    /// What holds now.
    pub filter: String,
    /// What the config file said at the start, and holds again after a restart.
    pub configured: String,
}

/// Answer of `GET /v1/status`.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Seconds since the start.
    pub uptime_s: u64,
    /// Config file.
    pub config: Option<PathBuf>,
    /// Who keeps the sessions across a restart.
    pub holder: HolderStatus,
    /// Polling threads.
    pub sidecores: Vec<SidecoreStatus>,
    /// What they poll.
    pub workers: Vec<WorkerStatus>,
    /// What was decided about where workers run.
    pub placement: PlacementStatus,
    /// Switches.
    pub switches: Vec<SwitchStatus>,
    /// VMs.
    pub vms: Vec<VmStatus>,
}

/// The holder.
#[derive(Debug, Clone, Serialize)]
pub struct HolderStatus {
    /// Whether there is one.
    pub enabled: bool,
    /// Its socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
}

/// One polling thread.
#[derive(Debug, Clone, Serialize)]
pub struct SidecoreStatus {
    /// Number.
    pub index: usize,
    /// CPU it is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    /// NUMA node of the CPUs that it may run on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Whether it takes workers; false while it is parked.
    pub active: bool,
    /// Most microseconds it polls without work before it sleeps.
    pub spin_us: u32,
    /// Nanoseconds it polls now.
    pub spin_limit_ns: u64,
    /// Workers on it.
    pub workers: u64,
    /// Rounds over all workers.
    pub rounds: u64,
    /// Rounds in which something was done.
    pub busy_rounds: u64,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Times that a watched descriptor or a call woke it.
    pub wakeups: u64,
    /// Times that polling on found work.
    pub spin_hits: u64,
    /// Nanoseconds spent in busy rounds.
    pub busy_ns: u64,
    /// Nanoseconds spent in rounds that found nothing.
    pub spin_ns: u64,
    /// Nanoseconds asleep.
    pub asleep_ns: u64,
    /// Workers lost to a panic.
    pub panics: u64,
    /// Times it hung for a second or more.
    pub stalls: u64,
}

/// What a sidecore polls: a switch, a disk queue, a vsock domain.
#[derive(Debug, Clone, Serialize)]
pub struct WorkerStatus {
    /// Such as `switch lan`, `disk web/root queue 0`, `vsock shop`.
    pub name: String,
    /// Sidecore it is on.
    pub sidecore: usize,
    /// Whether it stays there.
    pub pinned: bool,
    /// Nanoseconds spent in its polls that did something, extrapolated from samples.
    pub busy_ns: u64,
    /// Times it was moved.
    pub moves: u64,
}

/// What the placer did since the start.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PlacementStatus {
    /// Workers (or groups that move together) moved to another sidecore.
    pub moves: u64,
    /// Moves that failed.
    pub failed_moves: u64,
    /// Parked sidecores activated.
    pub activations: u64,
    /// Sidecores parked.
    pub parks: u64,
}

/// One switch.
#[derive(Debug, Clone, Serialize)]
pub struct SwitchStatus {
    /// Name.
    pub name: String,
    /// Sidecore it runs on.
    pub sidecore: usize,
    /// The TAP it goes out through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uplink: Option<String>,
    /// Times a sender was held because its receiver had no buffers.
    pub holds: u64,
    /// Nanoseconds of that, summed over the senders' queues.
    pub held_ns: u64,
    /// Addresses it knows.
    pub macs: Vec<MacStatus>,
}

/// One line of a switch's table.
#[derive(Debug, Clone, Serialize)]
pub struct MacStatus {
    /// MAC address.
    pub mac: String,
    /// Port, or `uplink`.
    pub port: String,
    /// Configured or bound: does not age.
    pub fixed: bool,
    /// Seconds since it was last seen.
    pub age_s: u64,
}

/// One VM.
#[derive(Debug, Clone, Serialize)]
pub struct VmStatus {
    /// Name.
    pub name: String,
    /// What it is granted; left out while a change of the config is under way.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub credit: Option<CreditConfig>,
    /// What it used; left out when it has no account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<CreditUsage>,
    /// Trust domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_domain: Option<String>,
    /// Ports.
    pub ports: Vec<PortStatus>,
    /// Modules.
    pub modules: Vec<ModuleStatus>,
}

/// What a VM used of what it is granted, since its first port was made.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct CreditUsage {
    /// Bytes charged, each request counted with its minimum.
    pub charged_bytes: u64,
    /// Requests charged.
    pub charged_requests: u64,
    /// Times it came to new credit after it had run out.
    pub refills: u64,
    /// Times it was held back by its weight.
    pub held_by_weight: u64,
    /// Nanoseconds of that, of all sidecores together.
    pub held_by_weight_ns: u64,
    /// Times it was held back at its ceiling.
    pub held_by_ceiling: u64,
    /// Nanoseconds of that.
    pub held_by_ceiling_ns: u64,
}

/// The kinds of port, as the API names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortKind {
    /// A network port.
    Net,
    /// A disk.
    Disk,
    /// A vsock port.
    Vsock,
}

impl PortKind {
    /// The name in listings and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Disk => "disk",
            Self::Vsock => "vsock",
        }
    }
}

/// Whether a port works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// It does.
    Ok,
    /// The guest or the VMM broke a rule: it works again after a reset of the device. Or its storage
    /// failed: see [`DiskStatus::io_status`].
    Broken,
    /// Not yet: its image is being checked.
    Starting,
}

/// One port.
#[derive(Debug, Clone, Serialize)]
pub struct PortStatus {
    /// VM.
    pub vm: String,
    /// Port.
    pub port: String,
    /// Kind.
    pub kind: PortKind,
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// Who listens on it.
    pub mode: SocketMode,
    /// Whether a VMM is connected.
    pub connected: bool,
    /// Whether it works.
    pub health: Health,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Virtio features that the driver took, in hexadecimal.
    pub features: String,
    /// Queues it has.
    pub queues: u16,
    /// Queues that run.
    pub queues_running: u16,
    /// Regions of guest memory.
    pub memory_regions: usize,
    /// Why the last session ended, when it did not end well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Whether the holder has the session, so that a restart does not disconnect the VMM.
    pub held: bool,
    /// Sessions since the start; each above the first is a reconnect.
    pub sessions: u64,
    /// Sessions taken over from an earlier daemon.
    pub resumed: u64,
    /// Requests, frames or packets of all queues.
    pub requests: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// Drops and refusals.
    pub drops: u64,
    /// What only a network port has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net: Option<NetStatus>,
    /// What only a disk has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskStatus>,
    /// What only a vsock port has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockStatus>,
}

/// What only a network port has.
#[derive(Debug, Clone, Serialize)]
pub struct NetStatus {
    /// Switch.
    pub switch: String,
    /// MAC address, configured or learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// IP addresses bound to the port, configured or learned.
    pub addresses: Vec<IpAddr>,
    /// Whether the cable is in.
    pub link: bool,
}

/// How a disk's storage does, with QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum IoStatus {
    /// Well.
    Ok,
    /// Requests wait for space.
    Nospace,
    /// Requests wait after another error, or a flush failed.
    Failed,
}

/// What only a disk has.
#[derive(Debug, Clone, Serialize)]
pub struct DiskStatus {
    /// Format.
    pub format: String,
    /// Image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Size.
    pub len_bytes: u64,
    /// Bytes of a block; 0 for a disk that was not started.
    pub block_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// How its storage does.
    pub io_status: IoStatus,
    /// Requests that wait for the storage, see [`config::OnError`].
    pub held_requests: u64,
    /// How its image is; left out where there is no map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageStatus>,
    /// How long requests took since the start; left out for a disk that was not started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyStatus>,
}

/// How an image with a map is (qcow2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageStatus {
    /// It was not closed before this opening, and was checked.
    pub was_checked: bool,
    /// Reference counts that were too low then.
    pub mended_counts: u64,
    /// Clusters that were counted too often then: freed, or their count lowered.
    pub freed_leaks: u64,
    /// Its tables contradict each other: nothing is written any more.
    pub is_damaged: bool,
    /// Memory that the map takes now.
    pub map_len_bytes: u64,
}

/// How long requests took: of a disk, from the poll that took them to the poll after their completion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LatencyStatus {
    /// Requests.
    pub count: u64,
    /// Sum of their times.
    pub sum_ns: u64,
    /// Half of them were faster, to within 1/32.
    pub p50_ns: u64,
    /// 99 of 100 were faster, to within 1/32.
    pub p99_ns: u64,
    /// Smallest time of a bucket and requests in it, see [`Snapshot::coarse`]. Those of two answers
    /// subtract to what came between.
    pub buckets: BTreeMap<u64, u64>,
}

impl From<&Snapshot> for LatencyStatus {
    fn from(times: &Snapshot) -> Self {
        Self {
            count: times.count(),
            sum_ns: times.sum(),
            p50_ns: times.quantile(0.5),
            p99_ns: times.quantile(0.99),
            buckets: times.coarse().collect(),
        }
    }
}

/// What only a vsock port has.
#[derive(Debug, Clone, Serialize)]
pub struct VsockStatus {
    /// Context id.
    pub cid: u64,
    /// Base of the host's Unix sockets.
    pub path: PathBuf,
    /// Open connections.
    pub open_connections: u64,
}
