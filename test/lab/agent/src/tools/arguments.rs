//! Arguments of the tools.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use crate::AgentError;

const USAGE: &str = "\
rr-server [PORT] | rr tcp|udp ADDR[:PORT] SECS [BYTES [PAUSE_MS]] | sink [PORT] | \
tcp-stream ADDR[:PORT] SECS [BYTES] | udp-small ADDR[:PORT] SECS [BYTES] | \
udp-send ADDR[:PORT] COUNT [BYTES] | \
disk-read PATH SECS [BYTES [SEED]] | fill PATH BYTES [SEED] | compare PATH PATH [OFFSET OFFSET] | \
fetch ADDR[:PORT] ROUNDS BYTES | order recv ADDR | order send ADDR STOP_FILE | \
pipe listen|connect ADDR PATH [mptcp] [tls] [end] [path-only|write-only] [wait=FIFO] | \
relay CID:PORT OWN_PORT ADDR | service UNIT [DROP_IN]... [-- PROGRAM [ARGUMENT]...] | \
xfer send|recv tcp|udp|vsock|unix connect|listen ADDR BYTES [SEED]";

/// The error that tells all tools' arguments.
pub(super) fn usage() -> AgentError {
    AgentError::Usage(USAGE.into())
}

/// Parses a number at a position; `default` where there are fewer words.
pub(super) fn number<T: std::str::FromStr>(
    rest: &[&str],
    at: usize,
    default: T,
) -> Result<T, AgentError> {
    match rest.get(at) {
        None => Ok(default),
        Some(text) => text.parse().map_err(|_| usage()),
    }
}

/// Parses a time in seconds.
pub(super) fn seconds(text: &str) -> Result<Duration, AgentError> {
    let secs: f64 = text.parse().map_err(|_| usage())?;
    Duration::try_from_secs_f64(secs).map_err(|_| usage())
}

/// Parses an address with or without a port: `10.0.0.1`, `10.0.0.1:80`, `fd00::1`, `[fd00::1]:80`
/// or `[fe80::1%2]:80`.
pub(super) fn address(text: &str, port: u16) -> Result<SocketAddr, AgentError> {
    if let Ok(ip) = text.parse::<std::net::IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    text.to_socket_addrs()
        .ok()
        .and_then(|mut all| all.next())
        .ok_or_else(|| AgentError::Usage(format!("{text:?} is no address; {USAGE}")))
}

/// Parses an address of vsock, `CID:PORT`.
pub(super) fn vsock_address(text: &str) -> Result<(u32, u32), AgentError> {
    text.split_once(':')
        .and_then(|(cid, port)| Some((cid.parse().ok()?, port.parse().ok()?)))
        .ok_or_else(|| AgentError::Usage(format!("{text:?} is not CID:PORT")))
}
