//! What a port says of itself: for `status`, the control API and metrics.

use serde::Serialize;

/// One queue of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct QueueStatus {
    /// Index in the device.
    pub index: u16,
    /// Descriptors; 0 until the front end said.
    pub size: u16,
    /// Whether the driver enabled it.
    pub enabled: bool,
    /// Whether it is on a sidecore.
    pub running: bool,
}

/// One memory region. Addresses of the front end's process are never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RegionStatus {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub len_bytes: u64,
}

/// A port and its session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PortStatus {
    /// The port's name (`vm/port`).
    pub name: String,
    /// `net`, `block` or `vsock`.
    pub kind: &'static str,
    /// Where the front end is found: `listen:PATH`, `dial:PATH` or `fd`.
    pub endpoint: String,
    /// Whether a front end is connected.
    pub connected: bool,
    /// Features that the driver negotiated; none before it did.
    pub features: Option<u64>,
    /// Protocol features that the front end negotiated.
    pub protocol_features: u64,
    /// Packed (true) or split rings.
    pub packed: bool,
    /// The queues.
    pub queues: Vec<QueueStatus>,
    /// The VM's memory.
    pub memory_regions: Vec<RegionStatus>,
    /// Whether a migration logs writes.
    pub logging: bool,
    /// Whether the holder has this session, so that it outlives the daemon.
    pub held: bool,
    /// Why the port is broken; none while it is not.
    pub broken: Option<String>,
    /// Sessions begun so far; each above the first is a reconnect.
    pub sessions: u64,
    /// Sessions taken over from an earlier daemon.
    pub resumed: u64,
    /// Connections closed at once because another one lived.
    pub refused: u64,
    /// Sessions that panicked.
    pub panics: u64,
    /// Times that a front end was made to wait, for having too much done.
    pub slowed: u64,
    /// Log lines that the front end caused and that were left out: there is a limit for each port.
    pub log_lines_left_out: u64,
    /// Why the last session ended; none when it ended well.
    pub last_error: Option<String>,
    /// True when the port serves no more (its `fd` endpoint's session is over, or it was stopped).
    pub finished: bool,
}

impl PortStatus {
    /// What remains when the front end is gone.
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
