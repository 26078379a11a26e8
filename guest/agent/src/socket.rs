//! A TCP socket as the end of a pipe.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{SocketEnd, family};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::{AddressFamily, SocketType, getpeername, getsockname, sockopt};
use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::sys::{self, TcpInfo};

/// Bytes that wait to be sent for the first time are waited for so long.
pub const UNSENT_TIME: Duration = Duration::from_millis(200);
/// Between two looks at them: nothing of the socket's tells it without being set.
const UNSENT_PAUSE: Duration = Duration::from_millis(1);

const IPPROTO_TCP: u32 = 6;
const IPPROTO_MPTCP: u32 = 262;
/// `TCP_ESTABLISHED`.
const ESTABLISHED: u8 = 1;

/// What a pipe writes to. It is uncorked, and corked again at the end if it was.
#[derive(Debug)]
pub struct SocketSink {
    program: OwnedFd,
    corked: bool,
}

/// A program's descriptor that may be written, of an established connection.
pub fn check(program: BorrowedFd<'_>) -> Result<(), Reason> {
    let mode = fcntl_getfl(program).map_err(|_| Reason::NotPermitted)?;
    if mode.contains(OFlags::PATH) || mode & OFlags::RWMODE == OFlags::RDONLY {
        return Err(Reason::NotPermitted);
    }
    let domain = sockopt::socket_domain(program).map_err(|_| Reason::NotTcp)?;
    let kind = sockopt::socket_type(program).map_err(|_| Reason::NotTcp)?;
    let protocol = sockopt::socket_protocol(program).map_err(|_| Reason::NotTcp)?;
    let ip = domain == AddressFamily::INET || domain == AddressFamily::INET6;
    match protocol.map(|protocol| protocol.as_raw().get()) {
        Some(IPPROTO_TCP) if ip && kind == SocketType::STREAM => {}
        Some(IPPROTO_MPTCP) if ip => return Err(Reason::Mptcp),
        _ => return Err(Reason::NotTcp),
    }
    if sys::has_ulp(program).map_err(|_| Reason::NotTcp)? {
        return Err(Reason::Ulp);
    }
    established(program).map(|_| ())
}

fn established(socket: BorrowedFd<'_>) -> Result<TcpInfo, Reason> {
    let info = sys::tcp_info(socket).map_err(|_| Reason::NotTcp)?;
    if info.state == ESTABLISHED { Ok(info) } else { Err(Reason::NotEstablished) }
}

impl SocketSink {
    /// Uncorks the socket and waits until nothing of it is unsent; what the daemon must know.
    ///
    /// # Errors
    /// Why it cannot be piped to.
    pub fn new(program: OwnedFd) -> Result<(Self, SocketEnd), Reason> {
        let corked = sockopt::tcp_cork(&program).map_err(|_| Reason::NotTcp)?;
        let sink = Self { program, corked };
        sink.push().map_err(|_| Reason::NotTcp)?;
        let info = sink.wait_sent()?;
        let end = sink.end(&info)?;
        Ok((sink, end))
    }

    /// Lets go of what Nagle's algorithm or the cork holds back: a header often waits so for the bytes
    /// of this pipe.
    fn push(&self) -> rustix::io::Result<()> {
        if self.corked {
            sockopt::set_tcp_cork(&self.program, false)?;
        }
        if !sockopt::tcp_nodelay(&self.program)? {
            sockopt::set_tcp_nodelay(&self.program, true)?;
            sockopt::set_tcp_nodelay(&self.program, false)?;
        }
        Ok(())
    }

    fn wait_sent(&self) -> Result<TcpInfo, Reason> {
        let until = Instant::now() + UNSENT_TIME;
        loop {
            let info = established(self.program.as_fd())?;
            if info.not_sent_bytes == 0 {
                return Ok(info);
            }
            if Instant::now() >= until {
                return Err(Reason::Unsent);
            }
            sleep(UNSENT_PAUSE);
        }
    }

    fn end(&self, info: &TcpInfo) -> Result<SocketEnd, Reason> {
        let local = getsockname(&self.program).map_err(|_| Reason::NotEstablished)?;
        let local = SocketAddr::try_from(local).map_err(|_| Reason::NotTcp)?;
        let remote = getpeername(&self.program).map_err(|_| Reason::NotEstablished)?;
        let remote = remote.ok_or(Reason::NotEstablished)?;
        let remote = SocketAddr::try_from(remote).map_err(|_| Reason::NotTcp)?;
        let (family, local_bytes) = address(local.ip());
        let (remote_family, remote_bytes) = address(remote.ip());
        if family != remote_family {
            return Err(Reason::NotTcp);
        }
        let mut end = SocketEnd::new_zeroed();
        (end.family, end.local, end.remote) = (family, local_bytes, remote_bytes);
        end.local_port = U16::new(local.port());
        end.remote_port = U16::new(remote.port());
        end.options = info.options;
        (end.send_scale, end.receive_scale) = (info.scales & 15, info.scales >> 4);
        end.mss = U16::new(u16::try_from(info.send_mss).unwrap_or(u16::MAX));
        end.cwnd = U32::new(info.send_cwnd);
        end.rtt_us = U32::new(info.rtt_us);
        end.sent_bytes = U64::new(info.bytes_sent.saturating_sub(info.bytes_retransmitted));
        end.received_bytes = U64::new(info.bytes_received);
        let name = sockopt::tcp_congestion(&self.program).unwrap_or_default();
        let len = name.len().min(end.congestion.len() - 1);
        end.congestion[..len].copy_from_slice(&name.as_bytes()[..len]);
        Ok(end)
    }
}

impl Drop for SocketSink {
    fn drop(&mut self) {
        if self.corked {
            // Fails when the connection has ended: then nothing is left to be held back.
            let _ = sockopt::set_tcp_cork(&self.program, true);
        }
    }
}

/// IPv4 inside of IPv6 is IPv4 on the wire.
fn address(ip: IpAddr) -> (u8, [u8; 16]) {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            (family::V4, bytes)
        }
        IpAddr::V6(ip) => (family::V6, ip.octets()),
    }
}

#[cfg(test)]
mod tests;
