//! State notifications to the service manager, as `sd_notify(3)` sends them.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends a state to the service manager that `NOTIFY_SOCKET` names, if there is one.
///
/// # Errors
/// The service manager does not listen there.
pub fn tell(state: &str) -> io::Result<()> {
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(socket) => tell_at(&socket, state),
        None => Ok(()),
    }
}

/// Sends a state to the service manager at `socket`: a path, or `@` and an abstract name.
///
/// # Errors
/// The service manager does not listen there.
pub fn tell_at(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_names_are_reached() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let name = format!("millrace-notify-test-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        for (socket, told) in [
            (UnixDatagram::bind(&path).unwrap(), path.into_os_string()),
            (UnixDatagram::bind_addr(&abstract_name).unwrap(), format!("@{name}").into()),
        ] {
            tell_at(&told, "READY=1").unwrap();
            let mut bytes = [0; 16];
            let len = socket.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..len], b"READY=1");
        }
    }
}
