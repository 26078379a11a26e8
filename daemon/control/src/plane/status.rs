//! Status of the daemon, its sidecores, switches, VMs and ports, as it is listed.

use std::net::IpAddr;
use std::path::PathBuf;

use config::{CreditConfig, SocketMode};
use serde::{Deserialize, Serialize};

use super::latency::LatencyStatus;
use super::module::ModuleStatus;

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
    /// Holder of the sessions across a restart.
    pub holder: HolderStatus,
    /// Polling threads.
    pub sidecores: Vec<SidecoreStatus>,
    /// Workers that the sidecores poll.
    pub workers: Vec<WorkerStatus>,
    /// Decisions of the placer.
    pub placement: PlacementStatus,
    /// Switches.
    pub switches: Vec<SwitchStatus>,
    /// VMs.
    pub vms: Vec<VmStatus>,
}

/// The holder of sessions.
#[derive(Debug, Clone, Serialize)]
pub struct HolderStatus {
    /// Whether there is one.
    pub enabled: bool,
    /// Socket of the holder.
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

/// Worker that a sidecore polls: a switch, a disk queue, a vsock domain.
#[derive(Debug, Clone, Serialize)]
pub struct WorkerStatus {
    /// Name: `switch lan`, `disk web/root queue 0`, `vsock shop`.
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

/// Decisions of the placer since the start.
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
    /// Nanoseconds that senders were held, summed over their queues.
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
    /// Credit settings; left out while a change of the config is under way.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub credit: Option<CreditConfig>,
    /// Use of the credit; left out when the VM has no account.
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

/// Use of a VM's credit since its first port was made.
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
    /// Nanoseconds held back by its weight, of all sidecores together.
    pub held_by_weight_ns: u64,
    /// Times it was held back at its ceiling.
    pub held_by_ceiling: u64,
    /// Nanoseconds held back at its ceiling.
    pub held_by_ceiling_ns: u64,
    /// Nanoseconds of CPU time of its pipes' threads.
    pub thread_ns: u64,
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
    /// The port works.
    Ok,
    /// The guest or the VMM broke a rule: it works again after a reset of the device. Or its
    /// storage failed: see [`DiskStatus::io_status`].
    Broken,
    /// The port does not work yet: its image is being checked.
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
    /// Side of the socket that the daemon is.
    pub mode: SocketMode,
    /// Whether a VMM is connected.
    pub connected: bool,
    /// Whether it works.
    pub health: Health,
    /// Reason why it does not work.
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
    /// Reason why the last session ended, when it did not end well.
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
    /// Payload bytes of all queues.
    pub bytes: u64,
    /// Drops and refusals.
    pub drops: u64,
    /// Part of a network port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net: Option<NetStatus>,
    /// Part of a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskStatus>,
    /// Part of a vsock port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockStatus>,
}

/// Status that only a network port has.
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

/// State of a disk's storage, in QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum IoStatus {
    /// The storage works.
    Ok,
    /// Requests wait for space.
    Nospace,
    /// Requests wait after another error, or a flush failed.
    Failed,
}

/// Status that only a disk has.
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
    /// State of its storage.
    pub io_status: IoStatus,
    /// Requests that wait for the storage, see [`config::OnError`].
    pub held_requests: u64,
    /// State of its image; left out where there is no map.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageStatus>,
    /// Times of requests since the start; left out for a disk that was not started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyStatus>,
}

/// State of an image with a map (qcow2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ImageStatus {
    /// Whether the image was not closed before this opening, and so was checked.
    pub was_checked: bool,
    /// Reference counts that the check found too low.
    pub mended_counts: u64,
    /// Clusters that the check found counted too often: freed, or their count lowered.
    pub freed_leaks: u64,
    /// Whether its tables contradict each other: nothing is written any more.
    pub is_damaged: bool,
    /// Bytes of memory that the map takes now.
    pub map_len_bytes: u64,
}

/// Status that only a vsock port has.
#[derive(Debug, Clone, Serialize)]
pub struct VsockStatus {
    /// Context id.
    pub cid: u64,
    /// Base of the host's Unix sockets.
    pub path: PathBuf,
    /// Open connections.
    pub open_connections: u64,
}
