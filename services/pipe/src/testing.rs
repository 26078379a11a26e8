//! Helpers of this crate's tests: the switch's side of a namespace's TAP, a peer for twins, both by
//! hand, and content for files.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::clock::ManualClock;
use base::io::{IoSlice, Wire};
use etherparse::{PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};
use flow::TWIN_MAC;
use net::tap::Tap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore::{Account, Accounts, Settings};

use crate::namespace::Namespace;
use crate::purse::Purse;
use crate::twin::scoped;

/// A virtio-net header of zeroes in front of an Ethernet frame.
const VNET_LEN: usize = 12;

/// Time that a test waits for what must come, before it fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A TCP segment (or super-packet) as the TAP handed it up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub macs: [u8; 12],
    pub seq: u32,
    pub ack: u32,
    pub window: u16,
    /// ACK, and whatever else but PSH.
    pub flags: Flags,
    pub timestamps: Option<(u32, u32)>,
    pub first_sack: Option<(u32, u32)>,
    /// Payload bytes of each segment of a super-packet; 0: it is one.
    pub gso_size: u16,
    pub payload: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags {
    pub ack: bool,
    pub syn: bool,
    pub fin: bool,
    pub rst: bool,
}

/// Flags of a mere acknowledgement.
pub const ONLY_ACK: Flags = Flags { ack: true, syn: false, fin: false, rst: false };

/// A segment that a peer sends.
#[derive(Debug, Clone, Default)]
pub struct Say {
    pub seq: u32,
    pub ack: u32,
    pub window: u16,
    pub timestamps: Option<(u32, u32)>,
    pub sack: Option<(u32, u32)>,
    pub payload: Vec<u8>,
}

/// A purse from which nobody pays.
pub fn nobody() -> Arc<Purse> {
    Arc::new(Purse::new(None, Arc::default(), Arc::new(ManualClock::default())))
}

/// A VM with that ceiling in bytes per second (0: none), whose account goes by the clock.
pub fn vm_with(ceiling_bytes_per_s: u64) -> (Arc<Purse>, Arc<Account>, ManualClock) {
    let settings = Settings { ceiling_bytes_per_s, ..Settings::default() };
    let account = Accounts::default().open("vm", settings);
    let clock = ManualClock::default();
    clock.advance_ns(1_000_000_000);
    let purse = Purse::new(Some(account.clone()), Arc::default(), Arc::new(clock.clone()));
    (Arc::new(purse), account, clock)
}

/// Content of a file, in which no block is like its neighbours.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 13 + n / 255) as u8).collect()
}

pub struct TapEnd(pub Tap);

impl TapEnd {
    /// The next frame, without its virtio-net header; none by then.
    fn frame(&mut self, until: Instant) -> Option<(u16, Vec<u8>)> {
        loop {
            self.0.refill().unwrap();
            if let Some(frame) = self.0.receive() {
                let gso_size = u16::from_le_bytes([frame[4], frame[5]]);
                let found = (gso_size, frame[VNET_LEN..].to_vec());
                self.0.release();
                return Some(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            // SAFETY: the ring is open as long as the TAP is.
            let fd = unsafe { BorrowedFd::borrow_raw(self.0.event_fd().unwrap()) };
            let timeout = Timespec::try_from(left).unwrap();
            match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => panic!("poll: {e}"),
            }
        }
    }

    /// The next frame, whatever it is.
    pub fn any(&mut self) -> Vec<u8> {
        self.frame(Instant::now() + PATIENCE).expect("a frame").1
    }

    /// The next frame, which is TCP.
    pub fn tcp(&mut self) -> Seen {
        let (gso_size, frame) = self.frame(Instant::now() + PATIENCE).expect("a segment");
        see(gso_size, &frame).unwrap_or_else(|| panic!("not TCP: {frame:02x?}"))
    }

    /// Segments until they have so many payload bytes, put together; empty ones do not count.
    pub fn bytes(&mut self, len: usize) -> Seen {
        let mut whole = self.tcp();
        while whole.payload.len() < len {
            let next = self.tcp();
            if whole.payload.is_empty() || next.payload.is_empty() {
                whole = if whole.payload.is_empty() { next } else { whole };
                continue;
            }
            assert_eq!(next.seq, whole.seq.wrapping_add(whole.payload.len() as u32), "in order");
            whole.payload.extend(next.payload);
        }
        whole
    }

    /// Writes a frame into the TAP.
    pub fn inject(&mut self, frame: &[u8]) {
        let frame = [&[0; VNET_LEN], frame].concat();
        let slice = IoSlice { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() };
        // SAFETY: the frame outlives the flush.
        unsafe { self.0.send(&[slice]).unwrap() };
        assert_eq!(self.0.flush().unwrap(), 0);
    }

    /// A segment of the peer's to a twin.
    pub fn say(&mut self, (from, to): (SocketAddr, SocketAddr), say: &Say) {
        self.inject(&segment(from, to, say));
    }

    /// Asserts that nothing was sent so far: what comes next is a datagram sent now.
    pub fn nothing_before(&mut self, namespace: &Namespace, local: IpAddr, remote: IpAddr) {
        assert_eq!(self.before(namespace, local, remote), []);
    }

    /// Segments that were sent so far: all that come before a datagram sent now.
    pub fn before(&mut self, namespace: &Namespace, local: IpAddr, remote: IpAddr) -> Vec<Seen> {
        inside(namespace, || {
            let on_link = |ip, port| scoped((ip, port).into()).unwrap();
            let socket = std::net::UdpSocket::bind(on_link(local, 0)).unwrap();
            socket.send_to(b"fence", on_link(remote, 9)).unwrap();
        });
        let mut found = Vec::new();
        loop {
            let frame = self.any();
            if frame.ends_with(b"fence") {
                return found;
            }
            found.push(see(0, &frame).unwrap_or_else(|| panic!("not TCP: {frame:02x?}")));
        }
    }
}

/// Runs in a thread that is in the namespace.
pub fn inside<T: Send>(namespace: &Namespace, f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            namespace.enter().unwrap();
            f()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn see(gso_size: u16, frame: &[u8]) -> Option<Seen> {
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    let Some(TransportSlice::Tcp(tcp)) = packet.transport else { return None };
    let (from, to) = match packet.net? {
        etherparse::NetSlice::Ipv4(ip) => {
            (ip.header().source_addr().into(), ip.header().destination_addr().into())
        }
        etherparse::NetSlice::Ipv6(ip) => {
            (ip.header().source_addr().into(), ip.header().destination_addr().into())
        }
        _ => return None,
    };
    let (mut timestamps, mut first_sack) = (None, None);
    for option in tcp.options_iterator() {
        match option.unwrap() {
            TcpOptionElement::Timestamp(value, echo) => timestamps = Some((value, echo)),
            TcpOptionElement::SelectiveAcknowledgement(first, _) => first_sack = Some(first),
            TcpOptionElement::Noop => {}
            other => panic!("{other:?} after the handshake"),
        }
    }
    Some(Seen {
        from: SocketAddr::new(from, tcp.source_port()),
        to: SocketAddr::new(to, tcp.destination_port()),
        macs: frame[..12].try_into().unwrap(),
        seq: tcp.sequence_number(),
        ack: tcp.acknowledgment_number(),
        window: tcp.window_size(),
        flags: Flags { ack: tcp.ack(), syn: tcp.syn(), fin: tcp.fin(), rst: tcp.rst() },
        timestamps,
        first_sack,
        gso_size,
        payload: tcp.payload().to_vec(),
    })
}

fn segment(from: SocketAddr, to: SocketAddr, say: &Say) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 7], TWIN_MAC);
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
        _ => panic!("two families"),
    };
    let mut options = Vec::new();
    if let Some((value, echo)) = say.timestamps {
        options.push(TcpOptionElement::Timestamp(value, echo));
    }
    if let Some(block) = say.sack {
        options.push(TcpOptionElement::SelectiveAcknowledgement(block, [None; 3]));
    }
    let tcp = ip.tcp(from.port(), to.port(), say.seq, say.window).ack(say.ack);
    let tcp = tcp.options(&options).unwrap();
    let mut frame = Vec::new();
    tcp.write(&mut frame, &say.payload).unwrap();
    frame
}
