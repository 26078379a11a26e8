//! TCP socket as the end of a pipe.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{SocketEnd, family, option};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, getpeername, getsockname, socket_with, sockopt,
};
use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::sys::{self, TcpInfo};

/// Time that bytes may stay unsent before a pipe.
pub const UNSENT_TIME: Duration = Duration::from_millis(200);
/// Pause between two checks of unsent bytes: no event of the socket reports them without a change
/// of its settings.
pub const UNSENT_PAUSE: Duration = Duration::from_millis(1);
/// Most readings of the counters of received and unread bytes, until no byte came in between. One
/// takes a microsecond.
const LOOKS: usize = 64;

const IPPROTO_TCP: u32 = 6;
const IPPROTO_MPTCP: u32 = 262;
/// `TCP_ESTABLISHED`.
const ESTABLISHED: u8 = 1;

/// Role of a descriptor in a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Bytes are read from it.
    Source,
    /// Bytes are written to it.
    Sink,
}

/// Checks that a program's descriptor is a TCP socket, also one with a protocol above it in the
/// kernel.
pub fn check_tcp(program: BorrowedFd<'_>) -> Result<(), Reason> {
    match check(program, Role::Sink) {
        Err(Reason::Ulp) => Ok(()),
        other => other,
    }
}

/// Checks that a program's descriptor is a TCP socket that may have this role. Whether it is
/// connected is checked later, with the rest of its state.
pub fn check(program: BorrowedFd<'_>, role: Role) -> Result<(), Reason> {
    let mode = fcntl_getfl(program).map_err(|_| Reason::NotPermitted)?;
    let refused = if role == Role::Sink { OFlags::RDONLY } else { OFlags::WRONLY };
    if mode.contains(OFlags::PATH) || mode & OFlags::RWMODE == refused {
        return Err(Reason::NotPermitted);
    }
    let protocol = sockopt::socket_protocol(program).map_err(|_| Reason::NotTcp)?;
    match protocol.map(|protocol| protocol.as_raw().get()) {
        Some(IPPROTO_TCP) => {}
        Some(IPPROTO_MPTCP) => return Err(Reason::Mptcp),
        _ => return Err(Reason::NotTcp),
    }
    // Addresses and ports identify a connection in its own namespace only. In another, which every
    // user can make, a socket may have those of another program's connection: the pipe would move
    // that one's bytes.
    let own = own_network().ok_or(Reason::OtherNetwork)?;
    if sys::network_cookie(program).ok() != Some(own) {
        return Err(Reason::OtherNetwork);
    }
    // Other protocols with that number have no such options.
    if sys::has_ulp(program).map_err(|_| Reason::NotTcp)? { Err(Reason::Ulp) } else { Ok(()) }
}

/// Cookie of the agent's network namespace, where the daemon's network ports are; none: the kernel
/// does not have cookies.
fn own_network() -> Option<u64> {
    static OWN: OnceLock<u64> = OnceLock::new();
    if let Some(own) = OWN.get() {
        return Some(*own);
    }
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    let own = sys::network_cookie(socket.as_fd()).ok()?;
    Some(*OWN.get_or_init(|| own))
}

fn established(socket: BorrowedFd<'_>) -> Result<TcpInfo, Reason> {
    let info = sys::tcp_info(socket).map_err(|_| Reason::NotTcp)?;
    if info.state == ESTABLISHED { Ok(info) } else { Err(Reason::NotEstablished) }
}

/// Connection that a pipe reads. Holds the descriptor while it lives.
#[derive(Debug)]
pub struct SocketSource {
    program: OwnedFd,
}

impl SocketSource {
    /// Source, with its description for the daemon.
    ///
    /// # Errors
    /// Reason why it cannot be piped from. One is a peer that has closed its side: the ordinary
    /// read gets the rest.
    pub fn new(program: OwnedFd) -> Result<(Self, SocketEnd), Reason> {
        // An urgent byte is not where the counters say.
        if has_urgent(program.as_fd()) {
            return Err(Reason::FlowOptions);
        }
        let (info, unread) = at_one_moment(
            || established(program.as_fd()),
            || rustix::io::ioctl_fionread(&program).map_err(|_| Reason::NotTcp),
        )?;
        // The twin does not echo congestion marks (ECN).
        if info.options & option::ECN != 0 {
            return Err(Reason::FlowOptions);
        }
        let mut end = describe(program.as_fd(), &info)?;
        end.unread_bytes = U32::new(u32::try_from(unread).map_err(|_| Reason::NotTcp)?);
        Ok((Self { program }, end))
    }
}

/// State of a connection and its number of unread bytes, with no byte received in between.
fn at_one_moment(
    info: impl Fn() -> Result<TcpInfo, Reason>,
    unread: impl Fn() -> Result<u64, Reason>,
) -> Result<(TcpInfo, u64), Reason> {
    let mut now = info()?;
    for _ in 0..LOOKS {
        let unread = unread()?;
        let before = std::mem::replace(&mut now, info()?);
        if before.bytes_received == now.bytes_received {
            return Ok((now, unread));
        }
    }
    Err(Reason::NotSettled)
}

impl AsFd for SocketSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }
}

fn has_urgent(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::PRI)];
    poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().contains(PollFlags::PRI)
}

/// Connection that a pipe writes to. Uncorked while bytes wait, and corked again at the end if it
/// was before.
#[derive(Debug)]
pub struct SocketSink {
    program: OwnedFd,
    corked: bool,
}

impl SocketSink {
    /// Waits until the socket has no unsent bytes, at most `unsent_time`. Returns a sink, with its
    /// description for the daemon.
    ///
    /// # Errors
    /// Reason why it cannot be piped to.
    pub fn new(program: OwnedFd, unsent_time: Duration) -> Result<(Self, SocketEnd), Reason> {
        let mut sink = Self { program, corked: false };
        let until = Instant::now() + unsent_time;
        loop {
            if let Some(end) = sink.try_settle()? {
                return Ok((sink, end));
            }
            if Instant::now() >= until {
                return Err(Reason::Unsent);
            }
            std::thread::sleep(UNSENT_PAUSE);
        }
    }

    /// Pushes unsent bytes. Returns the description for the daemon when there are none.
    ///
    /// # Errors
    /// Reason why it cannot be piped to.
    pub fn try_settle(&mut self) -> Result<Option<SocketEnd>, Reason> {
        let mut info = established(self.program.as_fd())?;
        if info.not_sent_bytes > 0 {
            self.push().map_err(|_| Reason::NotTcp)?;
            info = established(self.program.as_fd())?;
        }
        match info.not_sent_bytes {
            0 => describe(self.program.as_fd(), &info).map(Some),
            _ => Ok(None),
        }
    }

    /// Makes the kernel send the bytes that Nagle's algorithm or the cork holds back: a header
    /// often waits there for the bytes of this pipe.
    fn push(&mut self) -> rustix::io::Result<()> {
        if sockopt::tcp_cork(&self.program)? {
            self.corked = true;
            sockopt::set_tcp_cork(&self.program, false)?;
        }
        if !sockopt::tcp_nodelay(&self.program)? {
            sockopt::set_tcp_nodelay(&self.program, true)?;
            sockopt::set_tcp_nodelay(&self.program, false)?;
        }
        Ok(())
    }
}

impl AsFd for SocketSink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }
}

impl Drop for SocketSink {
    fn drop(&mut self) {
        if self.corked {
            // Fails when the connection has ended: then no bytes are held back.
            let _ = sockopt::set_tcp_cork(&self.program, true);
        }
    }
}

fn describe(socket: BorrowedFd<'_>, info: &TcpInfo) -> Result<SocketEnd, Reason> {
    let local = getsockname(socket).map_err(|_| Reason::NotEstablished)?;
    let local = SocketAddr::try_from(local).map_err(|_| Reason::NotTcp)?;
    let remote = getpeername(socket).map_err(|_| Reason::NotEstablished)?;
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
    let name = sockopt::tcp_congestion(socket).unwrap_or_default();
    let len = name.len().min(end.congestion.len() - 1);
    end.congestion[..len].copy_from_slice(&name.as_bytes()[..len]);
    Ok(end)
}

/// Family and bytes of an address: IPv4 inside of IPv6 is IPv4 on the wire.
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
