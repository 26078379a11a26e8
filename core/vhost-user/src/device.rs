//! Interface of a device engine for its session. A session never sees a packet; a device never sees
//! a socket.

use std::fmt;
use std::sync::Arc;

use queue::{GuestMemory, Vring};
use thiserror::Error;

/// Kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Network device: virtio-net (device id 1).
    Net,
    /// Disk: virtio-blk (device id 2).
    Block,
    /// Socket device: virtio-vsock (device id 19).
    Vsock,
}

impl DeviceKind {
    /// Name in metrics, listings and the vhost-user back-end description.
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
    ///
    /// Remedy: change the VM monitor's command line or the port's setting so that it is within the
    /// limit.
    #[error("{what}: {value} is outside the limit {limit}")]
    OutOfRange {
        /// Argument.
        what: &'static str,
        /// Value that was given.
        value: u64,
        /// Limit of the value.
        limit: u64,
    },
    /// The device cannot do it.
    ///
    /// Remedy: none by settings: the VM monitor asks for what the device does not offer.
    #[error("{0} is not supported by this device")]
    Unsupported(&'static str),
    /// The sidecore is gone, or a system call failed.
    ///
    /// Remedy: do as the text says; look into the log for a panic.
    #[error("{0}")]
    Failed(String),
}

impl DeviceError {
    /// Makes [`DeviceError::Failed`] with the text of `error`.
    pub fn failed(error: impl fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Tells the VMM that the device's config space changed (disk resized, link state). Given to the
/// device by the session; a no-op while no front end with a back-end channel is connected.
pub trait ConfigNotifier: Send + Sync {
    /// Sends `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`; never blocks.
    fn config_changed(&self) -> Result<(), ConfigNotifyError>;
}

/// Reason why a config change was not announced to the VMM.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum ConfigNotifyError {
    /// The VMM sent no `SET_BACKEND_REQ_FD`, or did not negotiate config space.
    ///
    /// Remedy: none by settings: this VM monitor takes no such messages. Restart the VM to show it
    /// the change.
    #[error("its VMM set up no back-end channel for config changes (SET_BACKEND_REQ_FD)")]
    NoChannel,
    /// The back-end channel is full.
    ///
    /// Remedy: look at the VM monitor: it is stopped or overloaded. Repeat the command later.
    #[error("its VMM does not read its back-end channel, which is full")]
    Full,
    /// The back-end channel is gone, or no socket.
    ///
    /// Remedy: restart the VM to show it the change.
    #[error(
        "the back-end channel of its VMM takes no message: {}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    Dead {
        /// Error number of the send.
        errno: i32,
    },
}

/// Device behind a port, for its session. Methods are called from the session's thread, one at a
/// time; none may block longer than it takes a sidecore to answer and in-flight I/O to finish.
///
/// Order: `activate`, then any mix of `start_queue`/`stop_queue`/`update_memory`, finally `reset`.
/// The session starts a queue when it has addresses, a kick (or polling) and is enabled, and stops
/// it on `GET_VRING_BASE`, on disable, before a memory region under its rings goes, and at the end.
pub trait Device: Send + Sync {
    /// Kind of the device.
    fn kind(&self) -> DeviceKind;

    /// Virtio feature bits offered (device bits and ring bits: VERSION_1, RING_PACKED, EVENT_IDX,
    /// INDIRECT_DESC, IN_ORDER as far as the device keeps order). The session adds
    /// `VHOST_USER_F_PROTOCOL_FEATURES` and `VHOST_F_LOG_ALL`.
    fn features(&self) -> u64;

    /// Number of queues of this port.
    fn queue_count(&self) -> u16;

    /// Whether requests finish out of order, so that inflight tracking is offered.
    fn wants_inflight(&self) -> bool {
        false
    }

    /// Whether the device has a config space to serve over vhost-user (`PROTOCOL_F_CONFIG`).
    fn has_config(&self) -> bool;

    /// Feature bits offered in addition to a front end that leaves control queue and config
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

    /// Sets the MTU that the front end announces to its guest (`NET_SET_MTU`).
    fn set_mtu(&self, mtu: u16) -> Result<(), DeviceError> {
        let _ = mtu;
        Err(DeviceError::Unsupported("setting the MTU"))
    }

    /// Announces a VM that came from another host and cannot do so itself (`SEND_RARP`): a network
    /// may tell its surroundings where `mac` is now.
    fn announce(&self, mac: [u8; 6]) {
        let _ = mac;
    }

    /// Fills `out` from config space at `offset`.
    fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes config space for the driver.
    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError>;

    /// Whether a driver was promised that each write is durable when it completes. The session
    /// saves it before the driver has the answer.
    fn writes_through(&self) -> bool {
        false
    }

    /// Restores the promise of an earlier daemon. Comes before `activate`, and holds until the
    /// driver itself takes it back: it does not ask again.
    fn keep_writing_through(&self) {}

    /// Sets the driver's features (a subset of those offered). May come again after a
    /// reset.
    fn activate(&self, features: u64) -> Result<(), DeviceError>;

    /// Runs a queue on its sidecore from now on.
    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError>;

    /// Stops a queue: on return nothing of it is in flight. None when it was not running.
    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError>;

    /// Moves all running queues to a changed memory table; requests in flight keep the old one.
    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError>;

    /// Sets the notifier for config changes; none when the front end is gone.
    fn set_notifier(&self, notifier: Option<Arc<dyn ConfigNotifier>>);

    /// Announces that the session will stop all queues for good and reset the device.
    /// `is_taken_again`: the next back end of this front end takes the requests of the inflight
    /// region again, so requests that cannot be done now need not be answered.
    fn session_ends(&self, is_taken_again: bool) {
        let _ = is_taken_again;
    }

    /// Stops and drops all queues, and forgets the features.
    fn reset(&self);

    /// Sets the link state. Called
    /// when the session is up (true) and when the front end is gone (false). Disks ignore it.
    fn connected(&self, up: bool) {
        let _ = up;
    }
}
