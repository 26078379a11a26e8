//! From a port's config to a device of one of the engines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::clock::Clock;
use base::counter::QueueStats;
use block::{BackendConfig, BlockError, BlockPort, BlockPortConfig};
use control::config::{BindMode, DiskConfig, DiskFormat, NetConfig, OnError};
use net::{NetPort, NetPortConfig, Switch};
use sidecore::{Sidecore, VmId};
use vhost_user::Device;
use vsock::VsockPort;

/// How long the lock (or the TAP) of a killed daemon may outlive it. The kernel takes its io_uring apart in the
/// background, finishes the writes in it, and only then closes the image: until that has happened
/// the lock rightly keeps us out. It takes milliseconds, unless the disk is slow.
const LOCK_LINGER: Duration = Duration::from_secs(2);

/// How often we look. The kernel tells nobody without waiting for ever.
const LOCK_POLL: Duration = Duration::from_millis(2);

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
pub fn net(name: &str, vm: VmId, config: &NetConfig, switch: &Switch) -> anyhow::Result<Engine> {
    let port = switch.add_port(NetPortConfig {
        vm,
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
    vm: VmId,
    config: &DiskConfig,
    cores: &[Sidecore],
    clock: &Arc<dyn Clock>,
) -> anyhow::Result<Engine> {
    let backend = match config.format.clone() {
        DiskFormat::Raw { path, direct, registered_memory_bytes } => {
            BackendConfig::Raw { path, direct, registered_memory_bytes }
        }
        DiskFormat::Qcow2 { path, direct, backing_dir } => {
            BackendConfig::Qcow2 { path, backing_dir, direct }
        }
        DiskFormat::Memory { len_bytes } => BackendConfig::Memory { len_bytes },
        DiskFormat::Null { len_bytes } => BackendConfig::Null { len_bytes },
    };
    let open = || {
        let config = BlockPortConfig {
            vm,
            read_only: config.read_only,
            queues: config.queues,
            block_size: config.block_size,
            serial: config.serial.clone(),
            writeback: config.writeback,
            on_error: match config.on_error {
                OnError::Report => block::OnError::Report,
                OnError::Hold => block::OnError::Hold,
                OnError::Enospc => block::OnError::Enospc,
            },
            packed: config.packed,
            ..BlockPortConfig::new(name, backend.clone())
        };
        BlockPort::new(config, cores, Arc::clone(clock))
    };
    Ok(Engine::Disk(once_free(open, |e| matches!(e, BlockError::Locked { .. }))?))
}

/// Opens something as soon as a killed daemon has let go of it, for [`LOCK_LINGER`] at most.
pub fn once_free<T, E>(
    mut open: impl FnMut() -> Result<T, E>,
    is_held: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let begin = Instant::now();
    loop {
        match open() {
            Err(error) if is_held(&error) && begin.elapsed() < LOCK_LINGER => {
                std::thread::sleep(LOCK_POLL);
            }
            other => return other,
        }
    }
}
