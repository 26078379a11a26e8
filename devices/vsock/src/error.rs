//! Errors of a domain, a port or a packet: every text names the value, its place and its limit.

use std::io;
use std::path::PathBuf;

use base::socket::SocketError;
use sidecore::SidecoreError;
use thiserror::Error;

/// Reason why a domain or a port could not be made or changed.
#[derive(Debug, Error)]
pub enum VsockError {
    /// The CID is reserved or above 32 bits (virtio 1.2, 5.10.4).
    ///
    /// Remedy: write a `cid` within the limits that the text names.
    #[error("port {name}: CID {cid} is outside {lowest}..={highest}")]
    BadCid {
        /// Port.
        name: String,
        /// CID that was asked for.
        cid: u64,
        /// Lowest allowed.
        lowest: u64,
        /// Highest allowed.
        highest: u64,
    },
    /// Another port of the domain has this CID.
    ///
    /// Remedy: give one of the two VMs another `cid`.
    #[error("port {name}: CID {cid} is taken by port {taken_by}")]
    CidTaken {
        /// Port.
        name: String,
        /// CID that was asked for.
        cid: u64,
        /// Name of the port that has it.
        taken_by: String,
    },
    /// A number in the configuration is outside its limits.
    ///
    /// Remedy: write a value within the limits that the text names.
    #[error("{name}: {what} {value} is outside {lowest}..={highest}")]
    OutOfRange {
        /// Domain or port.
        name: String,
        /// Name of the number.
        what: &'static str,
        /// Value that was given.
        value: u64,
        /// Lowest allowed.
        lowest: u64,
        /// Highest allowed.
        highest: u64,
    },
    /// The socket's path leaves no room for `_<port>`.
    ///
    /// Remedy: shorten `path` of the VM's `[vm.vsock]`.
    #[error("port {name}: socket path of {len} bytes; the limit is {limit}")]
    PathTooLong {
        /// Port.
        name: String,
        /// Length that was given.
        len: usize,
        /// Limit of the length.
        limit: usize,
    },
    /// Two services of a port have the same number.
    ///
    /// Remedy: none by settings; report it as a fault.
    #[error("port {name}: service port {port} is given twice")]
    ServiceTwice {
        /// Port.
        name: String,
        /// The service's number.
        port: u32,
    },
    /// The port cannot listen on its socket: the path is in use, or the operating system refused.
    ///
    /// Remedy: do as the cause says; see `SocketError` of base.
    #[error("port {name}: its Unix socket {path}: {source}")]
    Socket {
        /// Port.
        name: String,
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        source: SocketError,
    },
    /// The operating system refused.
    ///
    /// Remedy: raise the limit that the cause names: open files (LimitNOFILE=), memory.
    #[error("{name}: {what}: {source}")]
    Io {
        /// Domain or port.
        name: String,
        /// Action that failed.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The port is not (or no longer) in this domain.
    ///
    /// Remedy: check the name: `millrace ports` lists them.
    #[error("port {0} is not in this vsock domain")]
    NoPort(String),
    /// The sidecore does not answer.
    ///
    /// Remedy: see `SidecoreError`.
    #[error(transparent)]
    Sidecore(#[from] SidecoreError),
}

/// Reason why a packet of a guest is refused. The port goes on; the packet's connection, if it can
/// be named, is reset.
///
/// Remedy: none by settings: the guest's driver broke a rule of virtio. Its packet was dropped and
/// counted (`millrace_vsock_malformed_total`, `millrace_queue_drops_total`); the port goes on.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum PacketError {
    /// The chain is too short for a header.
    #[error("packet of {len} bytes; a header has {header}")]
    Short {
        /// Readable bytes in the chain.
        len: u32,
        /// Bytes in a header.
        header: u32,
    },
    /// The source is not this guest (spoofed).
    #[error("source CID {cid} is not this guest's ({expected})")]
    ForeignSource {
        /// CID that the packet claims.
        cid: u64,
        /// CID of the port.
        expected: u32,
    },
    /// The destination cannot be a CID.
    #[error("destination CID {cid} is above the limit {limit}")]
    BadDestination {
        /// Value that was given.
        cid: u64,
        /// Limit.
        limit: u32,
    },
    /// More payload announced than the chain has.
    #[error("payload of {len} bytes announced, the chain has {have}")]
    BeyondChain {
        /// Length that the header announces.
        len: u32,
        /// Length in the chain after the header.
        have: u32,
    },
    /// More payload than a packet may have.
    #[error("payload of {len} bytes; the limit is {limit}")]
    TooLong {
        /// Length that the header announces.
        len: u32,
        /// Limit.
        limit: u32,
    },
    /// The socket type is not one that we serve.
    #[error("socket type {0} is not served (1, stream, is)")]
    UnknownType(u16),
    /// The operation does not exist.
    #[error("operation {0} does not exist (1 to 7 do)")]
    UnknownOp(u16),
}

impl PacketError {
    /// Whether the header was whole and honest about its source, so that a reset can be sent to
    /// the connection it names.
    pub fn names_connection(self) -> bool {
        !matches!(
            self,
            Self::Short { .. } | Self::ForeignSource { .. } | Self::BadDestination { .. }
        )
    }
}
