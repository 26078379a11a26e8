//! From a port's config to a device of one of the engines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use base::clock::Clock;
use base::counter::QueueStats;
use block::memory::MemoryBackend;
use block::{BackendConfig, BlockError, BlockPort, BlockPortConfig, CheckProgress};
use config::{Allowed, BindMode, BlockSize, DiskConfig, DiskFormat, NetConfig, OnError};
use net::{NetPort, NetPortConfig, Switch};
use sidecore::{Sidecore, VmId};
use vhost_user::{Device, SessionStore};
use vsock::VsockPort;

/// How long the lock (or the TAP) of a killed daemon may outlive it. The kernel takes its io_uring
/// apart in the background, finishes the writes in it, and only then closes the image: until that
/// has happened the lock rightly keeps us out. It takes milliseconds, unless the disk is slow.
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
        shared_macs: config.bind_also.macs.clone(),
        shared_addresses: config.bind_also.addresses.clone(),
        allow: allow(&config.allow),
        queue_pairs: config.queue_pairs,
        broadcasts_per_s: config.broadcasts_per_s,
        mtu: config.mtu,
        offloads: config.offloads,
        packed: config.packed,
        whole_device: config.whole_device,
        ..NetPortConfig::new(name)
    })?;
    Ok(Engine::Net(port, switch.clone()))
}

/// Frames that a bound port may send besides ARP and IP.
fn allow(entries: &[Allowed]) -> net::Allow {
    let mut allow = net::Allow::default();
    for entry in entries {
        match entry {
            Allowed::DhcpServer => allow.dhcp_server = true,
            Allowed::Router => allow.router = true,
            Allowed::Tunnel => allow.tunnel = true,
            Allowed::Llc => allow.llc = true,
            Allowed::Any => allow.any_ether_type = true,
            Allowed::EtherType(kind) => allow.ether_types.push(*kind),
        }
    }
    allow
}

/// Arguments for opening a disk.
pub struct Opening<'a> {
    /// Sidecores of its queues: the first queue runs on the first of them.
    pub cores: &'a [Sidecore],
    /// Clock of the daemon.
    pub clock: &'a Arc<dyn Clock>,
    /// Session store, which also has the memory of a memory disk.
    pub session_store: &'a dyn SessionStore,
    /// Progress of the check of its image.
    pub progress: CheckProgress,
}

/// A disk.
pub fn disk(
    name: &str,
    vm: VmId,
    config: &DiskConfig,
    opening: Opening<'_>,
) -> anyhow::Result<Engine> {
    let Opening { cores, clock, session_store, progress } = opening;
    let backend = match config.format.clone() {
        DiskFormat::Raw { path, direct, registered_memory_bytes } => {
            BackendConfig::Raw { path, direct, registered_memory_bytes }
        }
        DiskFormat::Qcow2 { path, direct, backing_dir, data_file, map_cache_bytes } => {
            let cache_len_bytes = map_cache_bytes.unwrap_or(0);
            BackendConfig::Qcow2 { path, backing_dir, data_file, cache_len_bytes, direct }
        }
        DiskFormat::Memory { len_bytes } => BackendConfig::Memory { len_bytes },
        DiskFormat::Null { len_bytes } => BackendConfig::Null { len_bytes },
    };
    let port_config = || BlockPortConfig {
        vm,
        read_only: config.read_only,
        queues: config.queues,
        seg_max: config.seg_max,
        block_size: config.block_size.least_bytes(),
        auto_block_size: config.block_size == BlockSize::AUTO,
        serial: config.serial.clone(),
        writeback: config.writeback,
        on_error: match config.on_error {
            OnError::Report => block::OnError::Report,
            OnError::Hold => block::OnError::Hold,
            OnError::Enospc => block::OnError::Enospc,
        },
        packed: config.packed,
        check_progress: progress.clone(),
        ..BlockPortConfig::new(name, backend.clone())
    };
    if let BackendConfig::Memory { len_bytes } = backend {
        let memory = Arc::new(memory_disk(name, len_bytes, session_store)?);
        return Ok(Engine::Disk(BlockPort::with_backend(port_config(), memory, cores)?));
    }
    let open = || BlockPort::new(port_config(), cores, Arc::clone(clock));
    let port = once_free(open, |e| matches!(e, BlockError::Locked { .. }));
    Ok(Engine::Disk(port.map_err(BlockError::naming_holders)?))
}

/// Memory of a disk: an earlier daemon's, if the session store has it, else a new one, saved from
/// now on.
fn memory_disk(
    name: &str,
    len_bytes: u64,
    session_store: &dyn SessionStore,
) -> anyhow::Result<MemoryBackend> {
    match session_store.load_file(name) {
        Ok(Some(file)) => match MemoryBackend::from_file(file, len_bytes) {
            Ok(memory) => {
                tracing::info!(port = %name, "going on with the memory disk of an earlier daemon");
                return Ok(memory);
            }
            Err(e) => tracing::error!(port = %name, "the disk begins empty: {e}"),
        },
        Ok(None) => {}
        // It may have the disk's content, and a driver under whose file systems that would be gone.
        Err(e) => {
            return Err(e).context("whether the holder has the disk's memory is not known");
        }
    }
    let memory = MemoryBackend::new(len_bytes)?;
    if let Err(e) = session_store.save_file(name, memory.file()) {
        tracing::warn!(port = %name, "a restart of the daemon will lose this memory disk: {e}");
    }
    Ok(memory)
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

#[cfg(test)]
mod tests {
    use std::os::fd::{BorrowedFd, OwnedFd};

    use base::peer_fd::PeerFd;
    use vhost_user::session_store::SavedSession;
    use vhost_user::{NullStore, VhostUserError};

    use super::*;

    /// A holder that cannot be asked.
    struct Unanswered;

    impl SessionStore for Unanswered {
        fn is_persistent(&self) -> bool {
            true
        }

        fn save(
            &self,
            port: &str,
            state: &SavedSession,
            fds: &[BorrowedFd<'_>],
        ) -> Result<(), VhostUserError> {
            NullStore.save(port, state, fds)
        }

        fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError> {
            NullStore.load(port)
        }

        fn forget(&self, port: &str) -> Result<(), VhostUserError> {
            NullStore.forget(port)
        }

        fn load_file(&self, _port: &str) -> Result<Option<OwnedFd>, VhostUserError> {
            let source = std::io::ErrorKind::TimedOut.into();
            Err(VhostUserError::Io { what: "asking the holder", source })
        }
    }

    #[test]
    #[allow(non_snake_case)]
    fn abuse_D3_a_memory_disk_does_not_begin_empty_because_the_holder_is_silent() {
        let error = memory_disk("v/d", 1 << 20, &Unanswered).err().unwrap();
        assert!(format!("{error:#}").contains("asking the holder"), "{error:#}");
        assert!(memory_disk("v/d", 1 << 20, &NullStore).is_ok());
    }
}
