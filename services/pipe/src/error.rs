//! Errors of a VM's pipes: every text names what, where and the limit.

use std::io;
use std::net::{IpAddr, SocketAddr};

use net::NetError;
use thiserror::Error;
use vhost_user::DeviceError;

/// Error of a VM's pipes.
///
/// Remedy: none is needed for a single pipe: the guest moves these bytes itself.
#[derive(Debug, Error)]
pub enum PipeError {
    /// A system call failed.
    ///
    /// Remedy: mend what the cause says; docs/operate/pipes.md names what the daemon's unit must
    /// allow.
    #[error("pipes of VM {vm}: {what}: {source}")]
    Io {
        /// The VM.
        vm: String,
        /// Step that failed.
        what: &'static str,
        /// The error.
        source: io::Error,
    },
    /// A setting of the namespace was not taken.
    ///
    /// Remedy: use a kernel that has this setting, and the unit's drop-in
    /// `packaging/millrace-pipes.conf`.
    #[error("pipes of VM {vm}: writing {value} to /proc/sys/net/{name}: {source}")]
    Sysctl {
        /// The VM.
        vm: String,
        /// The setting, below `/proc/sys/net`.
        name: String,
        /// Value that was written.
        value: &'static str,
        /// The error.
        source: io::Error,
    },
    /// The namespace's interface could not be made.
    ///
    /// Remedy: use the unit's drop-in `packaging/millrace-pipes.conf`, which allows the namespace
    /// its interface.
    #[error("pipes of VM {vm}: {source}")]
    Tap {
        /// The VM.
        vm: String,
        /// The error.
        source: NetError,
    },
    /// An address that no VM can have.
    #[error("pipes of VM {vm}: {address} cannot be an address of a VM")]
    BadAddress {
        /// The VM.
        vm: String,
        /// The address.
        address: IpAddr,
    },
    /// The namespace has as many addresses as it may have.
    #[error("pipes of VM {vm}: {address} is one address too many; the limit is {limit}")]
    TooManyAddresses {
        /// The VM.
        vm: String,
        /// The address that found no room.
        address: IpAddr,
        /// Most addresses.
        limit: usize,
    },
    /// A twin could not be made, or asked.
    #[error("the twin of {local} to {remote}: {what}: {source}")]
    Twin {
        /// The guest's end.
        local: SocketAddr,
        /// The peer's end.
        remote: SocketAddr,
        /// Step that failed.
        what: &'static str,
        /// The error.
        source: io::Error,
    },
    /// Bytes of a file that cannot be where the agent says.
    #[error("extent {index} of {offset}+{len_bytes} bytes: {what} ({limit})")]
    BadExtent {
        /// Index of the extent.
        index: usize,
        /// Offset from the beginning of the disk.
        offset: u64,
        /// Length of the extent.
        len_bytes: u64,
        /// Fault of the extent.
        what: &'static str,
        /// The limit that it breaks.
        limit: u64,
    },
    /// A network port does not take pipes.
    #[error("port {port}: {source}")]
    Port {
        /// The port.
        port: String,
        /// Error of the port.
        source: DeviceError,
    },
}
