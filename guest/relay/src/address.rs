//! Addresses of the host, and of the relay's sockets.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::str::FromStr;

use guest_abi::module::{MAX_NAME_BYTES, PORT};
use rustix::net::sockopt::socket_error;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::error::RelayError;

/// The host's CID, for its guests.
const HOST_CID: u32 = 2;
/// `AF_VSOCK`.
const VSOCK: i32 = rustix::net::AddressFamily::VSOCK.as_raw() as i32;

/// Address of the host's WebAssembly modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Context id and port of vsock.
    Vsock(u32, u32),
    /// Unix socket in the place of vsock.
    Unix(PathBuf),
}

impl Address {
    /// The host of this VM.
    pub const HOST: Self = Self::Vsock(HOST_CID, PORT);

    /// Begins to connect, without waiting: once the socket can be written, [`outcome`] returns the
    /// result.
    ///
    /// # Errors
    /// No listener is there.
    pub fn dial(&self) -> io::Result<OwnedFd> {
        let (domain, address) = match self {
            Self::Vsock(cid, port) => (Domain::from(VSOCK), SockAddr::vsock(*cid, *port)),
            Self::Unix(path) => (Domain::UNIX, SockAddr::unix(path)?),
        };
        let socket = Socket::new(domain, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address) {
            Err(error) if error.raw_os_error() != Some(in_progress()) => Err(error),
            _ => Ok(socket.into()),
        }
    }
}

fn in_progress() -> i32 {
    rustix::io::Errno::INPROGRESS.raw_os_error()
}

/// Result of connecting.
///
/// # Errors
/// No listener is there.
pub fn outcome(socket: impl AsFd) -> io::Result<()> {
    Ok(socket_error(socket)??)
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vsock(cid, port) => write!(f, "vsock:{cid}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = RelayError;

    fn from_str(text: &str) -> Result<Self, RelayError> {
        let wrong = || RelayError::Address(text.into());
        if let Some(path) = unix_path(text) {
            return Ok(Self::Unix(path));
        }
        let (cid, port) =
            text.strip_prefix("vsock:").and_then(|t| t.split_once(':')).ok_or_else(wrong)?;
        let number = |digits: &str| digits.parse().map_err(|_| wrong());
        Ok(Self::Vsock(number(cid)?, number(port)?))
    }
}

/// Address at which programs connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP address of this machine.
    Tcp(SocketAddr),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl FromStr for Listen {
    type Err = RelayError;

    fn from_str(text: &str) -> Result<Self, RelayError> {
        if let Some(path) = unix_path(text) {
            return Ok(Self::Unix(path));
        }
        let tcp = text.strip_prefix("tcp:").and_then(|t| t.parse().ok());
        tcp.map(Self::Tcp).ok_or_else(|| RelayError::Listen(text.into()))
    }
}

fn unix_path(text: &str) -> Option<PathBuf> {
    let path = text.strip_prefix("unix:")?;
    path.starts_with('/').then(|| path.into())
}

/// Converts a module's name for a hello.
///
/// # Errors
/// It is no valid name.
pub fn module_name(name: &str) -> Result<[u8; MAX_NAME_BYTES], RelayError> {
    let wrong = || RelayError::Name(name.into());
    let fine = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b);
    let mut bytes = [0; MAX_NAME_BYTES];
    let place = bytes.get_mut(..name.len()).ok_or_else(wrong)?;
    if name.is_empty() || !name.bytes().all(fine) {
        return Err(wrong());
    }
    place.copy_from_slice(name.as_bytes());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        assert_eq!("vsock:2:28019".parse::<Address>().unwrap(), Address::HOST);
        for text in ["vsock:2:28019", "unix:/run/x.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "vsock:2", "vsock:a:1", "vsock:1:4294967296", "unix:x", "tcp:1.2.3.4:5"] {
            assert!(
                text.parse::<Address>().unwrap_err().to_string().contains("vsock:CID"),
                "{text}"
            );
        }
        for text in ["tcp:127.0.0.1:11211", "tcp:[::1]:80", "unix:/a"] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), text);
        }
        for text in ["tcp:localhost:1", "tcp:127.0.0.1", "unix:", "vsock:1:2"] {
            assert!(text.parse::<Listen>().is_err(), "{text}");
        }
    }

    #[test]
    fn names_of_modules() {
        assert_eq!(&module_name("table-2_b").unwrap()[..10], b"table-2_b\0");
        assert!(module_name(&"a".repeat(32)).is_ok());
        for wrong in ["", "Kv", "a b", "a.b", "\u{e9}", &"a".repeat(33)] {
            assert!(module_name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nobody_there_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Address::Unix(folder.path().join("none")).dial().is_err());
    }
}
