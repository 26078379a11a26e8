//! Saved sessions, which outlive the daemon, and the interface of the stores that have them.

use std::os::fd::{BorrowedFd, OwnedFd};

use base::peer_fd::PeerFd;

use serde::{Deserialize, Serialize};

use crate::error::VhostUserError;

/// Version of [`SavedSession`]; a session of another version is not taken over.
pub const SAVED_VERSION: u32 = 1;

/// State of a session for the next daemon. Its descriptors come beside it, in the order that
/// [`SavedSession::fd_count`] describes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedSession {
    /// Version of this structure, [`SAVED_VERSION`].
    pub version: u32,
    /// Protocol features negotiated.
    pub protocol_features: u64,
    /// Features negotiated, with the session's own bits.
    pub features: Option<u64>,
    /// Whether `SET_OWNER` was seen.
    pub owned: bool,
    /// Device status as last set.
    pub status: u8,
    /// MTU as last set.
    pub mtu: Option<u16>,
    /// Whether a slots file is there (one position slot per queue).
    pub has_slots: bool,
    /// Memory regions.
    pub regions: Vec<SavedRegion>,
    /// Size and offset of the dirty log.
    pub log: Option<(u64, u64)>,
    /// Inflight region.
    pub inflight: Option<SavedInflight>,
    /// Whether a back-end channel is there.
    pub has_backend: bool,
    /// Whether the driver switched the write cache off (see [`crate::Device::writes_through`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub write_through: bool,
    /// Queues, in the order of their indices.
    pub vrings: Vec<SavedVring>,
}

/// Saved memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedRegion {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// First address in the front end.
    pub user_addr: u64,
    /// Length.
    pub len_bytes: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
}

/// Saved inflight region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedInflight {
    /// Length of the region in the file.
    pub mmap_size: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
    /// Number of queues.
    pub num_queues: u16,
    /// Descriptors per queue.
    pub queue_size: u16,
    /// Whether the rings are packed.
    pub packed: bool,
    /// Whether the region is ours alone: the front end knows nothing of it.
    pub private: bool,
}

/// Saved queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedVring {
    /// Number of descriptors.
    pub size: Option<u16>,
    /// Ring addresses as the front end gave them.
    pub addrs: Option<SavedAddrs>,
    /// Position at which the queue starts (or stopped), as in `SET_VRING_BASE`.
    pub base: u32,
    /// Whether `base` comes from the front end or from a stop. Earlier daemons did not save it.
    #[serde(default = "yes")]
    pub has_base: bool,
    /// `SET_VRING_ENABLE` as last seen.
    pub enabled: Option<bool>,
    /// Whether the kick was set without a descriptor.
    pub polled: bool,
    /// Whether a kick descriptor is there.
    pub has_kick: bool,
    /// Whether a call descriptor is there.
    pub has_call: bool,
    /// Whether an err descriptor is there.
    pub has_err: bool,
    /// Whether the queue was on a sidecore: its position is then in the slot, the inflight region
    /// or the ring, not in `base`.
    pub running: bool,
}

fn yes() -> bool {
    true
}

/// Saved ring addresses, in the front end's address space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedAddrs {
    /// Flags: `VHOST_VRING_F_LOG` or none.
    pub flags: u32,
    /// Descriptor table or ring.
    pub desc: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub avail: u64,
    /// Guest address at which writes to the used ring are logged.
    pub log: u64,
}

impl SavedSession {
    /// Number of descriptors that belong to this state. Their order: the session's socket, the
    /// slots file, one per memory region, the dirty log, the inflight region, the back-end channel,
    /// then each queue's kick, call and err, as far as they are there.
    pub fn fd_count(&self) -> usize {
        let fixed = 1
            + usize::from(self.has_slots)
            + self.regions.len()
            + usize::from(self.log.is_some())
            + usize::from(self.inflight.is_some())
            + usize::from(self.has_backend);
        let bells = |v: &SavedVring| {
            usize::from(v.has_kick) + usize::from(v.has_call) + usize::from(v.has_err)
        };
        fixed + self.vrings.iter().map(bells).sum::<usize>()
    }
}

/// Store of sessions that outlives the daemon.
pub trait SessionStore: Send + Sync {
    /// Whether the store saves anything at all. A session spares itself the work when not.
    fn is_persistent(&self) -> bool;

    /// Replaces the session saved for `port`, wholly or not at all.
    fn save(
        &self,
        port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError>;

    /// Loads the session saved for `port`; the store still has it afterwards.
    fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError>;

    /// Drops the session saved for `port`.
    fn forget(&self, port: &str) -> Result<(), VhostUserError>;

    /// Saves a file of the device of `port`, with or without a session: the memory of a disk. A
    /// store without room for such files saves none.
    fn save_file(&self, _port: &str, _file: BorrowedFd<'_>) -> Result<(), VhostUserError> {
        Ok(())
    }

    /// Loads the file saved for the device of `port`.
    fn load_file(&self, _port: &str) -> Result<Option<OwnedFd>, VhostUserError> {
        Ok(None)
    }

    /// Drops the file saved for the device of `port`.
    fn forget_file(&self, port: &str) -> Result<(), VhostUserError> {
        self.forget(&file_key(port))
    }
}

/// Name under which the holder has the file of a port's device. No port has such a name.
pub fn file_key(port: &str) -> String {
    format!("{port}#file")
}

/// Store that saves nothing: front ends see a disconnect when the daemon ends.
#[derive(Debug, Default, Clone, Copy)]
pub struct NullStore;

impl SessionStore for NullStore {
    fn is_persistent(&self) -> bool {
        false
    }

    fn save(
        &self,
        _port: &str,
        _state: &SavedSession,
        _fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError> {
        Ok(())
    }

    fn load(&self, _port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError> {
        Ok(None)
    }

    fn forget(&self, _port: &str) -> Result<(), VhostUserError> {
        Ok(())
    }
}
