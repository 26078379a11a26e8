//! What outlives the daemon, and who keeps it.

use std::os::fd::{BorrowedFd, OwnedFd};

use base::peer_fd::PeerFd;

use serde::{Deserialize, Serialize};

use crate::error::VhostUserError;

/// Version of [`SavedSession`]; a session of another version is not taken over.
pub const SAVED_VERSION: u32 = 1;

/// A session as the next daemon finds it. The descriptors come beside it, in the order of
/// [`SavedSession::fd_count`]'s text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedSession {
    /// [`SAVED_VERSION`].
    pub version: u32,
    /// Protocol features negotiated.
    pub protocol_features: u64,
    /// Features negotiated, with the session's own bits.
    pub features: Option<u64>,
    /// `SET_OWNER` was seen.
    pub owned: bool,
    /// Device status as last set.
    pub status: u8,
    /// MTU as last set.
    pub mtu: Option<u16>,
    /// A slots file is there (one position slot per queue).
    pub has_slots: bool,
    /// Memory regions.
    pub regions: Vec<SavedRegion>,
    /// The dirty log's size and offset.
    pub log: Option<(u64, u64)>,
    /// The inflight region.
    pub inflight: Option<SavedInflight>,
    /// A back-end channel is there.
    pub has_backend: bool,
    /// The driver switched the write cache off (see [`crate::Device::writes_through`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub write_through: bool,
    /// The queues.
    pub vrings: Vec<SavedVring>,
}

/// A memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedRegion {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// First address in the front end.
    pub user_addr: u64,
    /// Bytes.
    pub len_bytes: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
}

/// An inflight region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedInflight {
    /// Bytes.
    pub mmap_size: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
    /// Queues.
    pub num_queues: u16,
    /// Descriptors per queue.
    pub queue_size: u16,
    /// Packed rings.
    pub packed: bool,
    /// Ours alone: the front end knows nothing of it.
    pub private: bool,
}

/// A queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedVring {
    /// Descriptors.
    pub size: Option<u16>,
    /// Ring addresses as the front end gave them.
    pub addrs: Option<SavedAddrs>,
    /// Where it starts (or stopped), as in `SET_VRING_BASE`.
    pub base: u32,
    /// The front end (or the stop) said so. Earlier daemons did not save it.
    #[serde(default = "yes")]
    pub has_base: bool,
    /// `SET_VRING_ENABLE` as last seen.
    pub enabled: Option<bool>,
    /// The kick was set, but without a descriptor.
    pub polled: bool,
    /// A kick descriptor is there.
    pub has_kick: bool,
    /// A call descriptor is there.
    pub has_call: bool,
    /// An err descriptor is there.
    pub has_err: bool,
    /// It was on a sidecore: its position is in the slot, the inflight region or the ring, not in
    /// `base`.
    pub running: bool,
}

fn yes() -> bool {
    true
}

/// Ring addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedAddrs {
    /// `VHOST_VRING_F_LOG`.
    pub flags: u32,
    /// Descriptor table or ring.
    pub desc: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub avail: u64,
    /// Guest address for logging.
    pub log: u64,
}

impl SavedSession {
    /// How many descriptors belong to this state. Their order: the session's socket, the slots
    /// file, one per memory region, the dirty log, the inflight region, the back-end channel, then
    /// each queue's kick, call and err, as far as they are there.
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

/// Keeps sessions beyond the daemon's life.
pub trait Keeper: Send + Sync {
    /// Whether anything is kept at all. A session spares itself the work when not.
    fn is_persistent(&self) -> bool;

    /// Replaces what is kept for `port`, wholly or not at all.
    fn save(
        &self,
        port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError>;

    /// What is kept for `port`.
    fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError>;

    /// Drops what is kept for `port`.
    fn forget(&self, port: &str) -> Result<(), VhostUserError>;

    /// Keeps a file of the device of `port`, with or without a session: the memory of a disk. A keeper
    /// without room for such files keeps none.
    fn save_file(&self, _port: &str, _file: BorrowedFd<'_>) -> Result<(), VhostUserError> {
        Ok(())
    }

    /// The file that is kept for the device of `port`.
    fn load_file(&self, _port: &str) -> Result<Option<OwnedFd>, VhostUserError> {
        Ok(None)
    }

    /// Drops the file that is kept for the device of `port`.
    fn forget_file(&self, port: &str) -> Result<(), VhostUserError> {
        self.forget(&file_key(port))
    }
}

/// What the holder knows the file of a port's device by. No port has such a name.
pub fn file_key(port: &str) -> String {
    format!("{port}#file")
}

/// Keeps nothing: front ends see a disconnect when the daemon ends.
#[derive(Debug, Default, Clone, Copy)]
pub struct NullKeeper;

impl Keeper for NullKeeper {
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
