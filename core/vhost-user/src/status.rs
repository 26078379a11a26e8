//! Status of a port, for `millrace status`, the control API and metrics.

use serde::Serialize;

/// Status of one queue of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct QueueStatus {
    /// Index in the device.
    pub index: u16,
    /// Number of descriptors; 0 until the front end has set it.
    pub size: u16,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// Whether the queue is on a sidecore.
    pub running: bool,
}

/// Status of one memory region. Addresses of the front end's process are never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RegionStatus {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Length.
    pub len_bytes: u64,
}

/// Status of a port and its session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PortStatus {
    /// The port's name (`vm/port`).
    pub name: String,
    /// `net`, `block` or `vsock`.
    pub kind: &'static str,
    /// Endpoint of the front end: `listen:PATH`, `dial:PATH` or `fd`.
    pub endpoint: String,
    /// Whether a front end is connected.
    pub connected: bool,
    /// Features that the driver negotiated; none before it did.
    pub features: Option<u64>,
    /// Protocol features that the front end negotiated.
    pub protocol_features: u64,
    /// Whether the rings are packed; split otherwise.
    pub packed: bool,
    /// Queues of the device.
    pub queues: Vec<QueueStatus>,
    /// Memory regions of the VM.
    pub memory_regions: Vec<RegionStatus>,
    /// Whether a migration logs writes.
    pub logging: bool,
    /// Whether the holder has this session, so that it outlives the daemon.
    pub held: bool,
    /// Why the port is broken; none while it is not.
    pub broken: Option<String>,
    /// Number of sessions begun; each above the first is a reconnect.
    pub sessions: u64,
    /// Number of sessions taken over from an earlier daemon.
    pub resumed: u64,
    /// Number of connections closed at once because another one was open.
    pub refused: u64,
    /// Number of sessions that panicked.
    pub panics: u64,
    /// Number of times that a front end was made to wait, because its VM was over its budget.
    pub slowed: u64,
    /// Number of log lines that the front end caused and that the port's limit suppressed.
    pub log_lines_left_out: u64,
    /// Why the last session ended; none when it ended well.
    pub last_error: Option<String>,
    /// Whether the port serves no more (its `fd` endpoint's session is over, or it was stopped).
    pub finished: bool,
}

impl PortStatus {
    /// Clears the fields of a session when the front end is gone.
    pub(crate) fn disconnected(&mut self) {
        self.connected = false;
        self.features = None;
        self.protocol_features = 0;
        self.packed = false;
        self.queues.clear();
        self.memory_regions.clear();
        self.logging = false;
    }
}
