//! Errors of setting up a switch, a port or an uplink. Bad frames are not errors: they
//! are dropped and counted (see [`base::counter::DropReason`]).

use std::io;

use sidecore::SidecoreError;
use thiserror::Error;

/// Why a switch did not do what it was asked.
#[derive(Debug, Error)]
pub enum NetError {
    /// A number of the configuration is outside its limits.
    ///
    /// Remedy: write a value within the limits that the text names.
    #[error("{what}: {value} is outside {min}..={max}")]
    OutOfRange {
        /// Setting.
        what: &'static str,
        /// Value that was given.
        value: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// The switch has as many ports as it can have.
    ///
    /// Remedy: put the port on another `[[switch]]`.
    #[error("switch {switch}: no room for another port; the limit is {limit}")]
    TooManyPorts {
        /// Switch name.
        switch: String,
        /// Limit.
        limit: usize,
    },
    /// A configured MAC address that cannot be one port's own.
    ///
    /// Remedy: give the port an address of its own, or name the shared one in `bind_also` of all
    /// ports that use it.
    #[error("port {port}: MAC address {mac} is {why}")]
    BadMac {
        /// Port name.
        port: String,
        /// The address.
        mac: String,
        /// "a group address", "bound to another port, or shared by others" or "one more than the
        /// table holds".
        why: &'static str,
    },
    /// A configured IP address that cannot be one port's own.
    ///
    /// Remedy: give the port an address of its own, or name the shared one in `bind_also` of all
    /// ports that use it.
    #[error("port {port}: address {address} is {why}")]
    BadAddress {
        /// Port name.
        port: String,
        /// The address.
        address: std::net::IpAddr,
        /// "bound to another port" or "one more than the table holds".
        why: &'static str,
    },
    /// A TAP could not be opened or set up.
    ///
    /// Remedy: mend what the cause says: CAP_NET_ADMIN of the daemon, /dev/net/tun, or another
    /// program that has the interface.
    #[error("TAP {name}: {what}: {source}")]
    Tap {
        /// Interface name.
        name: String,
        /// Operation that failed.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The uplink could not be watched.
    ///
    /// Remedy: raise the limit that the cause names, or restart the daemon.
    #[error("uplink of switch {switch}: {source}")]
    Uplink {
        /// Switch name.
        switch: String,
        /// The cause.
        source: io::Error,
    },
    /// The sidecore is gone.
    ///
    /// Remedy: see `SidecoreError`.
    #[error(transparent)]
    Sidecore(#[from] SidecoreError),
}
