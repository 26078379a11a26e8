//! Configuration of a port, and its checks.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use sidecore::VmId;

use crate::error::VsockError;
use crate::limits::{
    DEFAULT_BUFFER_BYTES, DEFAULT_MAX_CONNECTIONS, DEFAULT_MAX_HALF_OPEN, HIGHEST_BUFFER_BYTES,
    HIGHEST_CID, HIGHEST_MAX_CONNECTIONS, HIGHEST_SERVICE_PORT, LOWEST_BUFFER_BYTES, LOWEST_CID,
    MAX_PATH_BYTES, MAX_SERVICES,
};
use crate::service::HostService;

/// Ports of the host that a guest may connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPorts {
    /// Every port with a listener.
    All,
    /// Ports in these ranges only.
    Only(Vec<RangeInclusive<u32>>),
}

impl HostPorts {
    /// Whether the guest may connect to `port`.
    pub fn allows(&self, port: u32) -> bool {
        match self {
            Self::All => true,
            Self::Only(ranges) => ranges.iter().any(|r| r.contains(&port)),
        }
    }
}

/// Configuration of a port; [`VsockPortConfig::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct VsockPortConfig {
    /// Name of the port (`vm/port`), unique in the domain.
    pub name: String,
    /// Account of the VM.
    pub vm: VmId,
    /// CID of the guest: 3 to 2^32 - 2, unique in the domain.
    pub cid: u64,
    /// Path on which host programs connect with `CONNECT <port>`; they listen at `<socket>_<port>`.
    pub socket: PathBuf,
    /// Most connections at a time.
    pub max_connections: u32,
    /// Most connections that wait for an answer at a time.
    pub max_half_open: u32,
    /// Buffer per connection, which is the credit that the guest sees.
    pub buffer_bytes: u32,
    /// Ports of the host that the guest may connect to, [`Self::services`] aside.
    pub host_ports: HostPorts,
    /// Whether host programs may connect to the guest; without, nothing listens at `socket`.
    pub host_connects: bool,
    /// Ports of the host that the daemon answers itself; at most
    /// [`crate::limits::MAX_SERVICES`].
    pub services: Vec<HostService>,
}

impl VsockPortConfig {
    /// Makes the configuration of a port with default limits that may connect, and be connected to,
    /// freely.
    pub fn new(name: impl Into<String>, cid: u64, socket: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            vm: VmId::NONE,
            cid,
            socket: socket.into(),
            max_connections: DEFAULT_MAX_CONNECTIONS,
            max_half_open: DEFAULT_MAX_HALF_OPEN,
            buffer_bytes: DEFAULT_BUFFER_BYTES,
            host_ports: HostPorts::All,
            host_connects: true,
            services: Vec::new(),
        }
    }
}

/// Checks the numbers and texts of a port's configuration.
pub(crate) fn check(config: &VsockPortConfig) -> Result<(), VsockError> {
    let name = &config.name;
    if !(LOWEST_CID..=HIGHEST_CID).contains(&config.cid) {
        return Err(VsockError::BadCid {
            name: name.clone(),
            cid: config.cid,
            lowest: LOWEST_CID,
            highest: HIGHEST_CID,
        });
    }
    let most = HIGHEST_MAX_CONNECTIONS.into();
    in_range(name, "max_connections", config.max_connections.into(), 1, most)?;
    let most = config.max_connections.into();
    in_range(name, "max_half_open", config.max_half_open.into(), 1, most)?;
    let (least, most) = (LOWEST_BUFFER_BYTES.into(), HIGHEST_BUFFER_BYTES.into());
    in_range(name, "buffer_bytes", config.buffer_bytes.into(), least, most)?;
    check_services(name, &config.services)?;
    let len = config.socket.as_os_str().len();
    if len > MAX_PATH_BYTES {
        return Err(VsockError::PathTooLong { name: name.clone(), len, limit: MAX_PATH_BYTES });
    }
    in_range(
        name,
        "length of the name",
        name.len() as u64,
        1,
        base::limits::MAX_NAME_LEN_BYTES as u64,
    )
}

/// Checks the numbers of a guest's services.
fn check_services(name: &str, services: &[HostService]) -> Result<(), VsockError> {
    in_range(name, "number of services", services.len() as u64, 0, MAX_SERVICES as u64)?;
    for (at, service) in services.iter().enumerate() {
        let port = service.port;
        in_range(name, "service port", port.into(), 1, HIGHEST_SERVICE_PORT.into())?;
        if services[..at].iter().any(|s| s.port == port) {
            return Err(VsockError::ServiceTwice { name: name.to_owned(), port });
        }
    }
    Ok(())
}

/// Checks that a number of the configuration is within its limits.
pub(crate) fn in_range(
    name: &str,
    what: &'static str,
    value: u64,
    lowest: u64,
    highest: u64,
) -> Result<(), VsockError> {
    if (lowest..=highest).contains(&value) {
        return Ok(());
    }
    Err(VsockError::OutOfRange { name: name.to_owned(), what, value, lowest, highest })
}
