//! Words that the tracker and pipes have in common: names, numbers, events and errors.

use std::net::IpAddr;

use thiserror::Error;

/// Connections of a port; see the limits of the crate.
pub const MAX_FLOWS: usize = 8192;

/// Name of a connection: its addresses, as its guest sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// The guest's address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The guest's port.
    pub local_port: u16,
    /// The peer's port.
    pub remote_port: u16,
}

impl FlowKey {
    /// Name of the same connection at the peer.
    pub(crate) fn mirror(&self) -> Self {
        let &Self { local, remote, local_port, remote_port } = self;
        Self { local: remote, remote: local, local_port: remote_port, remote_port: local_port }
    }
}

/// Numbers that a twin begins with. Sequence numbers are the wire's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowSnapshot {
    /// The twin's first byte.
    pub send_seq: u32,
    /// The peer's next byte.
    pub receive_seq: u32,
    /// The peer has acknowledged everything before.
    pub acked_seq: u32,
    /// The peer's window, as it stood in its header.
    pub send_window: u16,
    /// The guest's window, as it stood in its header.
    pub receive_window: u16,
    /// The last timestamp that was sent.
    pub timestamp: u32,
}

/// Beginning of a receiving twin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveStart {
    /// Bytes that come to the guest itself, behind those that it had counted as received.
    pub own_bytes: u32,
    /// Bytes that come to the twin then; 0: nothing has begun.
    pub twin_bytes: u32,
}

/// News of a connection for its pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowEvent {
    /// The guest's last bytes have passed: ask for the snapshot again.
    Settled,
    /// The peer seems to have acknowledged all that the twin was to send.
    Acknowledged,
    /// The connection was reset, by either side.
    Reset,
    /// The peer has closed its direction within the twin's bytes, and all in front of that have
    /// arrived at the twin.
    Ended,
}

/// Takes the events of all connections of a port; on the sidecore, so it must not wait.
pub trait FlowWatch: Send + Sync {
    /// Takes one event; `token` is that of the pipe.
    fn flow_event(&self, token: u64, event: FlowEvent);
}

/// Why a connection cannot be taken over.
///
/// Remedy: none is needed: the guest sends these bytes itself. Counters by reason:
/// docs/operate/pipes.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FlowError {
    /// The connection was not seen from its beginning on this port.
    #[error("the connection was not seen from its beginning")]
    Unknown,
    /// Closing, or reset.
    #[error("the connection is closing")]
    Closing,
    /// Another pipe has it.
    #[error("another pipe has the connection")]
    Busy,
    /// The guest sent bytes that the agent has not told of.
    #[error("the guest goes on sending")]
    Changed,
    /// Bytes of a twin are lost: the connection is reset.
    ///
    /// Remedy: none: the program sees a reset connection, and has to connect again. Report it if it
    /// repeats.
    #[error("bytes that were sent for the guest are lost")]
    Broken,
    /// The port has no pipes, or has gone.
    #[error("the port has no pipes")]
    Off,
}

/// The hardware address of a twin's TAP, in every namespace the same: its kernel takes no frames
/// but those that are for it.
pub const TWIN_MAC: [u8; 6] = [2, 0x4d, 0x52, 0x54, 0x57, 0x4e];
