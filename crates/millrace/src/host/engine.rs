//! From a port's config to a device of one of the engines.

use std::sync::Arc;

use base::clock::Clock;
use base::counter::QueueStats;
use block::{BackendConfig, BlockPort, BlockPortConfig};
use control::config::{BindMode, DiskConfig, DiskFormat, NetConfig};
use net::{NetPort, NetPortConfig, Switch};
use sidecore::Sidecore;
use vhost_user::Device;
use vsock::VsockPort;

/// A port's device, and the handle of its engine.
#[derive(Clone)]
pub enum Engine {
    /// A network port and its switch.
    Net(Arc<NetPort>, Switch),
    /// A disk.
    Disk(Arc<BlockPort>),
    /// A vsock port.
    Vsock(Arc<VsockPort>),
}

impl Engine {
    /// The device for the session.
    pub fn device(&self) -> Arc<dyn Device> {
        match self {
            Self::Net(port, _) => Arc::clone(port) as Arc<dyn Device>,
            Self::Disk(port) => Arc::clone(port) as Arc<dyn Device>,
            Self::Vsock(port) => Arc::clone(port) as Arc<dyn Device>,
        }
    }

    /// Counters for each queue: the engine's own where it has some.
    pub fn queue_stats(&self) -> Vec<Arc<QueueStats>> {
        match self {
            Self::Net(port, _) => port.stats(),
            Self::Disk(_) | Self::Vsock(_) => {
                (0..self.device().queue_count()).map(|_| Arc::default()).collect()
            }
        }
    }
}

/// A network port on `switch`.
pub fn net(name: &str, config: &NetConfig, switch: &Switch) -> anyhow::Result<Engine> {
    let port = switch.add_port(NetPortConfig {
        mac: config.mac,
        addresses: config.addresses.clone(),
        bind: match config.bind {
            BindMode::Off => net::BindMode::Off,
            BindMode::Mac => net::BindMode::Mac,
            BindMode::MacAndIp => net::BindMode::MacAndIp,
        },
        queue_pairs: config.queue_pairs,
        mtu: config.mtu,
        offloads: config.offloads,
        packed: config.packed,
        ..NetPortConfig::new(name)
    })?;
    Ok(Engine::Net(port, switch.clone()))
}

/// A disk whose first queue runs on the first of `cores`.
pub fn disk(
    name: &str,
    config: &DiskConfig,
    cores: &[Sidecore],
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<Engine> {
    let backend = match config.format.clone() {
        DiskFormat::Raw { path, direct } => BackendConfig::Raw { path, direct },
        DiskFormat::Qcow2 { path, direct, backing_dir } => {
            BackendConfig::Qcow2 { path, backing_dir, direct }
        }
        DiskFormat::Memory { len_bytes } => BackendConfig::Memory { len_bytes },
        DiskFormat::Null { len_bytes } => BackendConfig::Null { len_bytes },
    };
    let config = BlockPortConfig {
        read_only: config.read_only,
        queues: config.queues,
        block_size: config.block_size,
        serial: config.serial.clone(),
        writeback: config.writeback,
        packed: config.packed,
        ..BlockPortConfig::new(name, backend)
    };
    Ok(Engine::Disk(BlockPort::new(config, cores, Arc::clone(clock))?))
}
