//! What a session asks of a device engine. A session never sees a packet; a device never sees a
//! socket.

use std::fmt;
use std::sync::Arc;

use queue::{GuestMemory, Vring};
use thiserror::Error;

/// The kinds of device we serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// virtio-net (device id 1).
    Net,
    /// virtio-blk (device id 2).
    Block,
    /// virtio-vsock (device id 19).
    Vsock,
}

impl DeviceKind {
    /// The name used in metrics, listings and the vhost-user back-end description.
    pub fn name(self) -> &'static str {
        match self {
            Self::Net => "net",
            Self::Block => "block",
            Self::Vsock => "vsock",
        }
    }
}

/// Why a device refuses something.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// An argument is outside what the device allows.
    #[error("{what}: {value} is outside the limit {limit}")]
    OutOfRange {
        /// Which.
        what: &'static str,
        /// Given.
        value: u64,
        /// Limit.
        limit: u64,
    },
    /// The device cannot do it.
    #[error("{0} is not supported by this device")]
    Unsupported(&'static str),
    /// The sidecore is gone, or the world below failed.
    #[error("{0}")]
    Failed(String),
}

impl DeviceError {
    /// [`DeviceError::Failed`] with what `error` says.
    pub fn failed(error: impl fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Tells the VMM that the device's config space changed (disk resized, link state). Given to the
/// device by the session; a no-op while no front end with a back-end channel is connected.
pub trait ConfigNotifier: Send + Sync {
    /// Sends `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`; never blocks.
    fn config_changed(&self) -> Result<(), NotTold>;
}

/// Why a VMM was not told of a config change.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum NotTold {
    /// It sent no `SET_BACKEND_REQ_FD`, or did not negotiate config space.
    #[error("its VMM set up no back-end channel for config changes (SET_BACKEND_REQ_FD)")]
    NoChannel,
    /// The channel is full.
    #[error("its VMM does not read its back-end channel, which is full")]
    Full,
    /// The channel is gone, or no socket.
    #[error("the back-end channel of its VMM takes no message: {}", std::io::Error::from_raw_os_error(*.errno))]
    Dead {
        /// What sending gave.
        errno: i32,
    },
}

/// One port as its session sees it. Methods are called from the session's thread, one at a time;
/// none may block longer than it takes a sidecore to answer and in-flight I/O to finish.
///
/// Order: `activate`, then any mix of `start_queue`/`stop_queue`/`update_memory`, finally `reset`.
/// The session starts a queue when it has addresses, a kick (or polling) and is enabled, and stops
/// it on `GET_VRING_BASE`, on disable, before a memory region under its rings goes, and at the end.
pub trait Device: Send + Sync {
    /// Which kind.
    fn kind(&self) -> DeviceKind;

    /// Virtio feature bits offered (device bits and ring bits: VERSION_1, RING_PACKED, EVENT_IDX,
    /// INDIRECT_DESC, IN_ORDER as far as the device keeps order). The session adds
    /// `VHOST_USER_F_PROTOCOL_FEATURES` and `VHOST_F_LOG_ALL`.
    fn features(&self) -> u64;

    /// Most queues of this port.
    fn queue_count(&self) -> u16;

    /// Whether requests finish out of order, so that inflight tracking is offered.
    fn wants_inflight(&self) -> bool {
        false
    }

    /// Whether the device has a config space to serve over vhost-user (`PROTOCOL_F_CONFIG`).
    fn has_config(&self) -> bool;

    /// Feature bits that are offered besides, to a front end that leaves control queue and config
    /// space of a network device to the port.
    fn whole_device_features(&self) -> u64 {
        0
    }

    /// Whether config space and all queues of a network device are offered even to a front end that
    /// seems to keep them to itself, as QEMU's network device does: QEMU's generic
    /// `vhost-user-device` cannot be told from it.
    fn is_whole_to_any_front_end(&self) -> bool {
        false
    }

    /// Network MTU to announce (`PROTOCOL_F_NET_MTU` is offered when some).
    fn set_mtu(&self, mtu: u16) -> Result<(), DeviceError> {
        let _ = mtu;
        Err(DeviceError::Unsupported("setting the MTU"))
    }

    /// The VM came from another host and cannot announce itself (`SEND_RARP`): a network may tell
    /// its surroundings where `mac` is now.
    fn announce(&self, mac: [u8; 6]) {
        let _ = mac;
    }

    /// Fills `out` from config space at `offset`.
    fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DeviceError>;

    /// The driver writes config space.
    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError>;

    /// Whether a driver was promised that each write is durable when it completes. The session
    /// saves it before the driver has the answer.
    fn writes_through(&self) -> bool {
        false
    }

    /// An earlier daemon made that promise. Comes before `activate`, and holds until the driver
    /// itself takes it back: it does not ask again.
    fn keep_writing_through(&self) {}

    /// The driver's features are known (a subset of what was offered). May come again after a
    /// reset.
    fn activate(&self, features: u64) -> Result<(), DeviceError>;

    /// Runs a queue on its sidecore from now on.
    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError>;

    /// Stops a queue: on return nothing of it is in flight. None when it was not running.
    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError>;

    /// Moves all running queues to a changed memory table; requests in flight keep the old one.
    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError>;

    /// Where to report config changes; none when the front end is gone.
    fn set_notifier(&self, notifier: Option<Arc<dyn ConfigNotifier>>);

    /// The session is about to stop all queues for good, and to reset the device. `is_taken_again`:
    /// whoever serves the front end next takes again what the inflight region says is in flight, so
    /// requests that cannot be done now need not be answered.
    fn session_ends(&self, is_taken_again: bool) {
        let _ = is_taken_again;
    }

    /// All queues stopped and dropped, features forgotten.
    fn reset(&self);

    /// vhost-vsock front ends name no CID over vhost-user; disks ignore this. Called
    /// when the session is up (true) and when the front end is gone (false): link state.
    fn connected(&self, up: bool) {
        let _ = up;
    }
}
