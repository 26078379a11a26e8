//! The twin of a guest's TCP connection: a socket of the host that goes on where the connection is.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use guest_abi::pipe::option;
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, socket_with, sockopt,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::error::PipeError;
use crate::namespace::{tap_index, window_mark};
use crate::sockopt::{TCP_RTO_MAX_MS, get_tcp, knows_rto_max, queued_bytes, set, set_tcp};

/// State of a connection with which a twin begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TwinState {
    /// The guest's end.
    pub local: SocketAddr,
    /// The peer's end.
    pub remote: SocketAddr,
    /// [`option`] bits; of these timestamps, selective acknowledgements and window scaling count.
    pub options: u8,
    /// The peer's window scale.
    pub send_scale: u8,
    /// The guest's window scale.
    pub receive_scale: u8,
    /// Most payload bytes of a segment, beside its options.
    pub mss: u16,
    /// The first byte to be sent.
    pub send_seq: u32,
    /// The peer's next byte.
    pub receive_seq: u32,
    /// Bytes that the peer takes.
    pub send_window_bytes: u32,
    /// Bytes that the guest takes.
    pub receive_window_bytes: u32,
    /// The last timestamp that was sent: those of the twin begin here.
    pub timestamp: u32,
    /// Name of the congestion control, zero-filled. One that the host does not have ready is not
    /// loaded: the twin uses the host's own.
    pub congestion: [u8; 16],
    /// The congestion window in segments. A window of at most this is taken.
    pub cwnd: u32,
    /// The smoothed round trip time in microseconds.
    pub rtt_us: u32,
    /// Whether it is to receive: then its buffer is as large as the window that the peer was told.
    pub reads: bool,
}

/// Smallest buffer of a twin that receives, with what the kernel adds for itself: that with which
/// an ordinary socket begins.
const LOWEST_BUFFER_BYTES: u32 = 256 << 10;

/// Largest buffer of a twin that receives: that which the kernel gives ordinary sockets.
const HIGHEST_BUFFER_BYTES: u32 = 6 << 20;

/// Bytes of the timestamp option with its padding, which count as payload for the kernel's MSS.
const TIMESTAMP_OPTION_BYTES: u32 = 12;

/// The kernel's codes for [`libc::TCP_REPAIR`].
mod repair {
    pub const ON: i32 = 1;
    /// Off, and no window probe is sent.
    pub const OFF_SILENTLY: i32 = -1;
    /// [`libc::TCP_REPAIR_QUEUE`].
    pub const NO_QUEUE: i32 = 0;
    pub const RECEIVE_QUEUE: i32 = 1;
    pub const SEND_QUEUE: i32 = 2;
}

/// Kinds of TCP options (RFC 9293, 3.2).
mod kind {
    pub const MSS: u32 = 2;
    pub const WINDOW_SCALE: u32 = 3;
    pub const SACK_PERMITTED: u32 = 4;
    pub const TIMESTAMPS: u32 = 8;
}

/// The kernel's limit of [`libc::TCP_MAXSEG`] (`MAX_TCP_WINDOW`). Longer segments are possible on
/// an MTU of 64 KiB; these are long enough.
const HIGHEST_MAXSEG_BYTES: u32 = 32_767;

/// Lowest bound of a twin's retransmission timeout. That begins with 3 s, since a twin has not
/// measured a round trip yet; the kernel's bound of it brings it down, not below 1 s (RFC 6298,
/// 2.1; and the kernel refuses less).
const LOWEST_RTO_MAX_MS: u32 = 1_000;

/// The kernel's own bound of the retransmission timeout.
const HIGHEST_RTO_MAX_MS: u32 = 120_000;

/// Lowest bound of the retransmission timeout in round trips: the timeout is above two of them.
const RTO_MAX_ROUND_TRIPS: u32 = 4;

/// A twin: a socket that is closed without a packet, as if it had never been there.
#[derive(Debug)]
pub struct Twin {
    socket: OwnedFd,
}

/// A twin's state, from `TCP_INFO`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TwinInfo {
    /// The kernel's number of the state.
    pub state: u8,
    /// Retransmissions in a row that were not answered.
    pub retransmits: u8,
    /// The smoothed round trip time in microseconds; 0 until it was measured.
    pub rtt_us: u32,
    /// The congestion window in segments.
    pub cwnd: u32,
    /// Most payload bytes of a segment.
    pub mss: u32,
    /// Milliseconds since the last acknowledgement, or its beginning.
    pub silent_ms: u32,
}

impl TwinInfo {
    /// Whether it can send and be acknowledged.
    pub fn is_established(&self) -> bool {
        const ESTABLISHED: u8 = 1;
        self.state == ESTABLISHED
    }
}

impl Twin {
    /// Makes the twin in the calling thread's network namespace ([`crate::namespace::Namespace`]),
    /// which must have the local address. No packet leaves, also if it fails.
    pub fn create(state: &TwinState) -> Result<Self, PipeError> {
        Self::create_with(state, &[])
    }

    /// Makes the twin like [`Twin::create`], with bytes that were sent before and that the peer has
    /// not acknowledged: sequence numbers begin with the first of them. If the window is closed for
    /// them by now, the answer to what is sent again tells: with one that begins closed the kernel
    /// would send nothing, and give up.
    pub fn create_with(state: &TwinState, sent: &[u8]) -> Result<Self, PipeError> {
        let failed = |(what, source)| {
            let &TwinState { local, remote, .. } = state;
            PipeError::Twin { local, remote, what, source }
        };
        let family = match state.local {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))
            .map_err(|e| failed(("making a socket", e.into())))?;
        // Closes silently from here on, whatever happens.
        let twin = Self { socket };
        twin.connect(state).and_then(|()| twin.fill(state, sent)).map_err(failed)?;
        twin.wake(state).map_err(failed)?;
        Ok(twin)
    }

    /// Lifts the bound of the retransmission timeout: once it has an answer, a twin measures, and
    /// waits as long as any socket before it sends again. With the bound the kernel would also give
    /// up a peer whose window is closed, and which does not answer for twice that time.
    pub fn wait_as_usual(&self) -> io::Result<()> {
        match knows_rto_max() {
            true => set_tcp(&self.socket, TCP_RTO_MAX_MS, &HIGHEST_RTO_MAX_MS),
            false => Ok(()),
        }
    }

    /// Makes room for `len_bytes`: all of them can be given at once.
    pub fn make_room(&self, len_bytes: usize) -> io::Result<()> {
        // The kernel doubles it, for what it needs beside them.
        let bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX).max(LOWEST_BUFFER_BYTES);
        set(&self.socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &bytes)
    }

    /// Gives it all of these bytes; there must be room.
    pub fn give_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        while !bytes.is_empty() {
            match rustix::net::send(&self.socket, bytes, flags) {
                Ok(n) => bytes = &bytes[n..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Gives the connection its place in the kernel. The sequence numbers are set first: a
    /// connection that has begun takes none.
    fn connect(&self, state: &TwinState) -> Step {
        let fd = &self.socket;
        sockopt::set_socket_reuseaddr(fd, true).map_err(|e| ("SO_REUSEADDR", e.into()))?;
        set_tcp(fd, libc::TCP_REPAIR, &repair::ON).map_err(|e| ("TCP_REPAIR", e))?;
        if let Some(name) = congestion(&state.congestion) {
            // Refused: it stays with the host's own.
            let _ = sockopt::set_tcp_congestion(fd, name);
        }
        if state.reads {
            let bytes = buffer_bytes(state);
            set(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &bytes)
                .map_err(|e| ("SO_RCVBUFFORCE", e))?;
        }
        let mark = window_mark(state.cwnd);
        set(fd, libc::SOL_SOCKET, libc::SO_MARK, &mark).map_err(|e| ("SO_MARK", e))?;
        // The kernel goes by it when it connects; the one among the repair options changes nothing
        // by itself. Segments of less than 88 bytes it does not make: no twin then.
        let mss = whole_mss(state).min(HIGHEST_MAXSEG_BYTES);
        set_tcp(fd, libc::TCP_MAXSEG, &mss).map_err(|e| ("TCP_MAXSEG", e))?;
        for (queue, seq) in
            [(repair::SEND_QUEUE, state.send_seq), (repair::RECEIVE_QUEUE, state.receive_seq)]
        {
            set_tcp(fd, libc::TCP_REPAIR_QUEUE, &queue).map_err(|e| ("TCP_REPAIR_QUEUE", e))?;
            set_tcp(fd, libc::TCP_QUEUE_SEQ, &seq).map_err(|e| ("TCP_QUEUE_SEQ", e))?;
        }
        let local = scoped(state.local).map_err(|e| ("looking for the TAP", e))?;
        let remote = scoped(state.remote).map_err(|e| ("looking for the TAP", e))?;
        rustix::net::bind(fd, &local).map_err(|e| ("bind", e.into()))?;
        rustix::net::connect(fd, &remote).map_err(|e| ("connect", e.into()))
    }

    /// Sets what was negotiated, and what has happened since.
    fn fill(&self, state: &TwinState, sent: &[u8]) -> Step {
        let fd = &self.socket;
        let has = |bit| state.options & bit != 0;
        let scales = u32::from(state.send_scale) | u32::from(state.receive_scale) << 16;
        // No scaling is scales of 0; without the option the kernel would use the one it likes best.
        let scales = if has(option::WINDOW_SCALE) { scales } else { 0 };
        let options = [
            has(option::SACK).then_some([kind::SACK_PERMITTED, 0]),
            Some([kind::WINDOW_SCALE, scales]),
            has(option::TIMESTAMPS).then_some([kind::TIMESTAMPS, 0]),
            Some([kind::MSS, whole_mss(state)]),
        ];
        let options: Vec<[u32; 2]> = options.into_iter().flatten().collect();
        set_tcp(fd, libc::TCP_REPAIR_OPTIONS, options.as_slice())
            .map_err(|e| ("TCP_REPAIR_OPTIONS", e))?;
        if has(option::TIMESTAMPS) {
            // Bit 0 asks for microseconds on some kernels. Up, since time does not go back.
            let timestamp = state.timestamp.wrapping_add(1) & !1;
            set_tcp(fd, libc::TCP_TIMESTAMP, &timestamp).map_err(|e| ("TCP_TIMESTAMP", e))?;
        }
        if !sent.is_empty() {
            // Under repair they count as sent, and nothing is.
            self.make_room(sent.len()).map_err(|e| ("SO_SNDBUFFORCE", e))?;
            set_tcp(fd, libc::TCP_REPAIR_QUEUE, &repair::SEND_QUEUE)
                .map_err(|e| ("TCP_REPAIR_QUEUE", e))?;
            self.give_all(sent).map_err(|e| ("filling its queue", e))?;
        }
        set_tcp(fd, libc::TCP_REPAIR_QUEUE, &repair::NO_QUEUE)
            .map_err(|e| ("TCP_REPAIR_QUEUE", e))?;
        let snd_wnd = state.send_window_bytes.max(sent.len() as u32);
        let window = RepairWindow {
            snd_wl1: state.receive_seq,
            snd_wnd,
            // Segments are at most half of this: one that is small at the moment says nothing.
            max_window: snd_wnd.max(2 * whole_mss(state)),
            rcv_wnd: match state.reads {
                // A window that its buffer has room for: half of it is the kernel's own.
                true => state.receive_window_bytes.min(buffer_bytes(state) / 2),
                false => state.receive_window_bytes,
            },
            rcv_wup: state.receive_seq,
        };
        set_tcp(fd, libc::TCP_REPAIR_WINDOW, &window).map_err(|e| ("TCP_REPAIR_WINDOW", e))
    }

    /// Has the kernel run the connection. (Buffers were not touched, so they need not be unlocked.)
    fn wake(&self, state: &TwinState) -> Step {
        let fd = &self.socket;
        sockopt::set_tcp_nodelay(fd, true).map_err(|e| ("TCP_NODELAY", e.into()))?;
        if knows_rto_max() {
            set_tcp(fd, TCP_RTO_MAX_MS, &rto_max_ms(state.rtt_us))
                .map_err(|e| ("TCP_RTO_MAX_MS", e))?;
        }
        set_tcp(fd, libc::TCP_REPAIR, &repair::OFF_SILENTLY).map_err(|e| ("TCP_REPAIR off", e))?;
        // The end of the repair takes it away, and the next twin of this port needs it.
        sockopt::set_socket_reuseaddr(fd, true).map_err(|e| ("SO_REUSEADDR", e.into()))
    }

    /// Bytes that the peer has not acknowledged.
    pub fn unacked_bytes(&self) -> io::Result<u32> {
        queued_bytes(&self.socket, false)
    }

    /// Bytes that were not even sent, among those that the peer has not acknowledged.
    pub fn unsent_bytes(&self) -> io::Result<u32> {
        queued_bytes(&self.socket, true)
    }

    /// State of the socket.
    pub fn info(&self) -> io::Result<TwinInfo> {
        let info: TcpInfo = get_tcp(&self.socket, libc::TCP_INFO)?;
        Ok(TwinInfo {
            state: info.state,
            retransmits: info.retransmits,
            rtt_us: info.rtt,
            cwnd: info.snd_cwnd,
            mss: info.snd_mss,
            silent_ms: info.last_ack_recv,
        })
    }

    /// Ends it without a packet: no FIN, no RST. What was not acknowledged is forgotten. Dropping a
    /// twin does the same.
    pub fn close_silently(self) {
        drop(self);
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        // A socket under repair says nothing when it is closed.
        if let Err(error) = set_tcp(&self.socket, libc::TCP_REPAIR, &repair::ON) {
            tracing::error!("a twin ends with a FIN or RST: {error}");
        }
    }
}

impl AsFd for Twin {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Result of a system call: its name, and how it failed.
type Step = Result<(), (&'static str, io::Error)>;

/// `struct tcp_repair_window`.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct RepairWindow {
    snd_wl1: u32,
    snd_wnd: u32,
    max_window: u32,
    rcv_wnd: u32,
    rcv_wup: u32,
}

/// The beginning of `struct tcp_info`.
#[derive(FromBytes, IntoBytes)]
#[repr(C)]
struct TcpInfo {
    state: u8,
    ca_state: u8,
    retransmits: u8,
    probes: u8,
    backoff: u8,
    options: u8,
    scales: u8,
    flags: u8,
    rto: u32,
    ato: u32,
    snd_mss: u32,
    rcv_mss: u32,
    /// Counters (the second: segments acknowledged selectively) and times.
    others: [u32; 8],
    last_ack_recv: u32,
    pmtu: u32,
    rcv_ssthresh: u32,
    rtt: u32,
    rttvar: u32,
    snd_ssthresh: u32,
    snd_cwnd: u32,
}

/// The MSS as the kernel counts it: with the options of every segment.
fn whole_mss(state: &TwinState) -> u32 {
    let has_timestamps = state.options & option::TIMESTAMPS != 0;
    u32::from(state.mss) + if has_timestamps { TIMESTAMP_OPTION_BYTES } else { 0 }
}

/// Adds the TAP's link to a link-local address.
pub(crate) fn scoped(address: SocketAddr) -> io::Result<SocketAddr> {
    match (address, address.ip()) {
        (SocketAddr::V6(v6), IpAddr::V6(ip)) if ip.is_unicast_link_local() => {
            Ok(SocketAddrV6::new(ip, v6.port(), 0, tap_index()?).into())
        }
        _ => Ok(address),
    }
}

fn buffer_bytes(state: &TwinState) -> u32 {
    let twice = state.receive_window_bytes.saturating_mul(2);
    twice.clamp(LOWEST_BUFFER_BYTES, HIGHEST_BUFFER_BYTES)
}

fn rto_max_ms(rtt_us: u32) -> u32 {
    let rtt_ms = rtt_us.div_ceil(1000);
    rtt_ms.saturating_mul(RTO_MAX_ROUND_TRIPS).clamp(LOWEST_RTO_MAX_MS, HIGHEST_RTO_MAX_MS)
}

/// The guest's congestion control, if the host has it ready. (For a name that it does not know the
/// kernel would look for a kernel module of that name: not at a guest's wish.)
fn congestion(name: &[u8; 16]) -> Option<&'static str> {
    static READY: OnceLock<String> = OnceLock::new();
    let ready = READY.get_or_init(|| {
        let list = "/proc/sys/net/ipv4/tcp_available_congestion_control";
        std::fs::read_to_string(list).unwrap_or_default()
    });
    let name = name.split(|byte| *byte == 0).next()?;
    ready.split_whitespace().find(|ready| ready.as_bytes() == name)
}

#[cfg(test)]
mod tests;
