//! Settings of channels, and their limits.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use base::limits::MAX_NAME_LEN_BYTES;
use guest_abi::channel::{MAX_ADDRESSES, MAX_EXCLUDES, MAX_MACS, MAX_VECTORS, NAME_LEN};

use crate::ceiling::Ceiling;
use crate::error::ChannelError;
use crate::memory::MemberMemory;

/// Doorbells of a member: control and four queues.
pub const DEFAULT_VECTORS: u32 = 5;
/// Interval at which heartbeats are counted up.
pub const DEFAULT_HEARTBEAT_MS: u32 = 500;
/// Time after which a heartbeat that stands still means death.
pub const DEFAULT_DEAD_AFTER_MS: u32 = 2_000;
/// Time for a member to leave.
pub const DEFAULT_DRAIN_TIMEOUT_MS: u64 = 10_000;
/// Time for a member to say that it keeps flows off the channel.
pub const DEFAULT_EXCLUDE_TIMEOUT_MS: u64 = 2_000;
/// Prefix of the ids of root ports for channels.
pub const DEFAULT_ROOT_PORTS: &str = "millrace";
/// Name of the registry's file in `run_dir`.
pub(crate) const REGISTRY_FILE: &str = "channels.json";
/// Longest path of a Unix socket.
const MAX_PATH_LEN_BYTES: usize = crate::registry::MAX_PATH_LEN_BYTES;
/// Longest time that can be set: an hour.
const MAX_TIMEOUT_MS: u64 = 3_600_000;

/// Settings of all channels of a daemon.
#[derive(Debug, Clone)]
pub struct ChannelsConfig {
    /// Folder of the registry; should be on a `tmpfs`.
    pub run_dir: PathBuf,
    /// Doorbells of each member, 2 to [`MAX_VECTORS`]: 0 is for control, the others for queues.
    pub vectors: u32,
    /// Interval at which heartbeats are counted up, 10 to 60,000.
    pub heartbeat_ms: u32,
    /// Time after which a heartbeat that stands still means death: at least twice `heartbeat_ms`.
    pub dead_after_ms: u32,
    /// Time for a member to leave.
    pub drain_timeout_ms: u64,
    /// Time for a member to say that it keeps flows off the channel.
    pub exclude_timeout_ms: u64,
}

impl ChannelsConfig {
    /// Makes the default settings, with the registry in `run_dir`.
    pub fn new(run_dir: impl Into<PathBuf>) -> Self {
        Self {
            run_dir: run_dir.into(),
            vectors: DEFAULT_VECTORS,
            heartbeat_ms: DEFAULT_HEARTBEAT_MS,
            dead_after_ms: DEFAULT_DEAD_AFTER_MS,
            drain_timeout_ms: DEFAULT_DRAIN_TIMEOUT_MS,
            exclude_timeout_ms: DEFAULT_EXCLUDE_TIMEOUT_MS,
        }
    }

    pub(crate) fn check(&self) -> Result<(), ChannelError> {
        let within = |what, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            let (value, rule) = (value.to_string(), format!("{low} to {high} are allowed"));
            Err(ChannelError::BadConfig { what, value, rule })
        };
        within("vectors", self.vectors.into(), 2, MAX_VECTORS.into())?;
        within("heartbeat_ms", self.heartbeat_ms.into(), 10, 60_000)?;
        let least = 2 * u64::from(self.heartbeat_ms);
        within("dead_after_ms", self.dead_after_ms.into(), least, MAX_TIMEOUT_MS)?;
        within("drain_timeout_ms", self.drain_timeout_ms, 1, MAX_TIMEOUT_MS)?;
        within("exclude_timeout_ms", self.exclude_timeout_ms, 1, MAX_TIMEOUT_MS)
    }
}

/// Settings of a VM that is to join.
#[derive(Debug)]
pub struct MemberConfig {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain: all its members see the VM's memory.
    pub domain: String,
    /// Socket of the VM's monitor, on which QEMU listens and to which no one else is connected.
    pub qmp: PathBuf,
    /// Prefix of the ids of its root ports for channels: one for the doorbell, one for each peer.
    pub root_ports: String,
    /// Memory of the VM.
    pub memory: MemberMemory,
    /// Whether its memory file may be one that is not sealed against shrinking: whoever shortens it
    /// ends the VMs of its peers.
    pub allow_unsealed: bool,
    /// Hardware addresses, at most [`MAX_MACS`].
    pub macs: Vec<[u8; 6]>,
    /// IP addresses, at most [`MAX_ADDRESSES`].
    pub addresses: Vec<IpAddr>,
    /// Flows that stay off the channel from the start until [`crate::Channels::exclude`] names
    /// others, at most [`MAX_EXCLUDES`].
    pub excludes: Vec<Flow>,
    /// Most that it may send, until [`crate::Channels::set_ceiling`] says otherwise.
    pub ceiling: Ceiling,
}

impl MemberConfig {
    /// Checks all settings but the memory.
    pub(crate) fn check(&self) -> Result<(), ChannelError> {
        let bad = |what, value: String, rule: String| {
            Err(ChannelError::BadMember { vm: self.vm.clone(), what, value, rule })
        };
        // With its zero it has to fit into the table.
        let most = MAX_NAME_LEN_BYTES.min(NAME_LEN - 1);
        let names = [
            ("the length of its name", &self.vm),
            ("the length of its domain's name", &self.domain),
            ("the length of its root ports' prefix", &self.root_ports),
        ];
        for (what, name) in names {
            if name.is_empty() || name.len() > most || name.contains('\0') {
                let rule = format!("1 to {most} bytes without a zero are allowed");
                return bad(what, name.len().to_string(), rule);
            }
        }
        let path = self.qmp.as_os_str().as_bytes().len();
        if path == 0 || path > MAX_PATH_LEN_BYTES {
            let rule = format!("1 to {MAX_PATH_LEN_BYTES} bytes are allowed");
            return bad("the length of its monitor's path", path.to_string(), rule);
        }
        check_flows(&self.vm, &self.excludes)?;
        check_addresses(&self.vm, &self.macs, &self.addresses)
    }
}

/// Checks that the table holds the addresses.
pub(crate) fn check_addresses(
    vm: &str,
    macs: &[[u8; 6]],
    addresses: &[IpAddr],
) -> Result<(), ChannelError> {
    check_count(vm, "the number of hardware addresses", macs.len(), MAX_MACS)?;
    check_count(vm, "the number of IP addresses", addresses.len(), MAX_ADDRESSES)
}

/// Checks that the mailbox holds the flows.
pub(crate) fn check_flows(vm: &str, flows: &[Flow]) -> Result<(), ChannelError> {
    check_count(vm, "the number of flows to exclude", flows.len(), MAX_EXCLUDES)
}

fn check_count(
    vm: &str,
    what: &'static str,
    count: usize,
    most: usize,
) -> Result<(), ChannelError> {
    if count <= most {
        return Ok(());
    }
    let (value, rule) = (count.to_string(), format!("at most {most} are allowed"));
    Err(ChannelError::BadMember { vm: vm.into(), what, value, rule })
}

/// TCP connection, from a member's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// End of the member.
    pub local: SocketAddr,
    /// End of its peer.
    pub remote: SocketAddr,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_their_limits_are_refused() {
        ChannelsConfig::new("/run").check().unwrap();
        let change = |change: fn(&mut ChannelsConfig)| {
            let mut config = ChannelsConfig::new("/run");
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        for (error, text) in [
            (change(|c| c.vectors = 1), "vectors is 1; 2 to 9 are allowed"),
            (change(|c| c.vectors = 10), "vectors is 10; 2 to 9 are allowed"),
            (change(|c| c.heartbeat_ms = 9), "heartbeat_ms is 9; 10 to 60000"),
            (change(|c| c.dead_after_ms = 999), "dead_after_ms is 999; 1000 to 3600000"),
            (change(|c| c.drain_timeout_ms = 0), "drain_timeout_ms is 0; 1 to"),
            (change(|c| c.exclude_timeout_ms = u64::MAX), "exclude_timeout_ms is 1844"),
        ] {
            assert!(error.contains(text), "{error}");
        }
    }
}
