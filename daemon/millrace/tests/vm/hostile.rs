//! Messages of a hostile root of a guest to the daemon, in its agent's place, each as wrong as a
//! test wants it. The guest only hands the bytes on.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use guest_abi::Reason;
use guest_abi::frame::{HEADER_BYTES, Header};
use guest_abi::pipe::{
    Done, Extent, FileEnd, Hello, MAGIC, PROBE_BLOCK_BYTES, Pipe, Probe, Probed, SocketEnd,
    VERSION, Welcome, end, family, kind,
};
use lab::Running;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::pipe_world::{READY, World};

/// A stream to the daemon.
pub struct Hostile {
    stream: TcpStream,
    next_id: u64,
}

/// A pipe from a disk to a connection, right until something is changed in it.
#[derive(Clone)]
pub struct Wish {
    pub source: u8,
    pub sink: u8,
    pub len_bytes: u64,
    pub disk: u32,
    pub extents: Vec<(u64, u64)>,
    pub socket: SocketEnd,
    /// Behind all the rest.
    pub more: Vec<u8>,
}

impl Wish {
    pub fn new(extents: &[(u64, u64)], socket: SocketEnd) -> Self {
        let len_bytes = extents.iter().map(|extent| extent.1).sum();
        let (source, sink, more) = (end::FILE, end::SOCKET, Vec::new());
        Self { source, sink, len_bytes, disk: 0, extents: extents.to_vec(), socket, more }
    }

    /// With a change.
    pub fn but(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    fn bytes(&self) -> Vec<u8> {
        let mut pipe = Pipe::new_zeroed();
        (pipe.source, pipe.sink) = (self.source, self.sink);
        pipe.len_bytes = U64::new(self.len_bytes);
        let extents = U32::new(self.extents.len() as u32);
        let file = FileEnd { disk: U32::new(self.disk), extents };
        let mut bytes = [pipe.as_bytes(), file.as_bytes()].concat();
        for &(offset, len_bytes) in &self.extents {
            let extent = Extent { offset: U64::new(offset), len_bytes: U64::new(len_bytes) };
            bytes.extend_from_slice(extent.as_bytes());
        }
        [&bytes, self.socket.as_bytes(), &self.more].concat()
    }
}

/// A hello as it should be.
pub fn hello() -> Hello {
    let (lowest, highest) = (U16::new(VERSION), U16::new(VERSION));
    Hello { magic: U64::new(MAGIC), lowest, highest, reserved: U32::ZERO }
}

/// The block that a probe with this secret looks for.
pub fn block_of(secret: [u8; 32]) -> Vec<u8> {
    secret.repeat(PROBE_BLOCK_BYTES / secret.len())
}

impl Hostile {
    /// Connects from a port of the first guest.
    pub fn dial(world: &World, own_port: u32) -> (Self, Running<'_>) {
        let listen = || TcpListener::bind("10.0.0.254:0").unwrap();
        let listener = world.lab.net().inside(listen).unwrap();
        let at = listener.local_addr().unwrap();
        let host = guest_abi::pipe::PORT;
        let relay = world.guest.spawn(&format!("agent relay 2:{host} {own_port} {at}")).unwrap();
        let stream = listener.accept().unwrap().0;
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(READY / 4)).unwrap();
        (Self { stream, next_id: 1 }, relay)
    }

    /// Connects and is welcome.
    #[track_caller]
    pub fn welcome(world: &World, own_port: u32) -> (Self, Welcome, Running<'_>) {
        let (mut hostile, relay) = Self::dial(world, own_port);
        hostile.say(kind::HELLO, 0, hello().as_bytes());
        let welcome = hostile.hear(kind::WELCOME, 0);
        (hostile, welcome, relay)
    }

    pub fn say(&mut self, kind: u16, id: u64, body: &[u8]) {
        self.say_bytes(&[Header::new(kind, id, body.len()).as_bytes(), body].concat());
    }

    /// Anything at all. That the daemon has closed the stream is no failure.
    pub fn say_bytes(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// The next message, which must be this one.
    #[track_caller]
    fn hear<T: FromBytes + Immutable + KnownLayout + Unaligned>(
        &mut self,
        kind: u16,
        id: u64,
    ) -> T {
        let mut header = [0; HEADER_BYTES];
        if let Err(error) = self.stream.read_exact(&mut header) {
            panic!("{error} instead of a message of kind {kind}");
        }
        let header: Header = zerocopy::transmute!(header);
        assert_eq!((header.kind.get(), header.id.get()), (kind, id));
        let mut body = vec![0; header.body_len().unwrap()];
        self.stream.read_exact(&mut body).unwrap();
        T::read_from_bytes(&body).unwrap()
    }

    /// Until the daemon has ended the stream; answers to what was asked before may come first.
    #[track_caller]
    pub fn wait_for_end(mut self) {
        let mut rest = Vec::new();
        if let Err(error) = self.stream.read_to_end(&mut rest) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// The disk with a secret at an offset.
    #[track_caller]
    pub fn probe(&mut self, offset: u64, secret: [u8; 32]) -> Probed {
        let id = self.id();
        self.say(kind::PROBE, id, Probe { offset: U64::new(offset), secret }.as_bytes());
        self.hear(kind::PROBED, id)
    }

    /// Begins a pipe; its id.
    pub fn begin(&mut self, wish: &Wish) -> u64 {
        let id = self.id();
        self.say(kind::PIPE, id, &wish.bytes());
        id
    }

    /// A pipe that ends; with how many bytes, and why.
    #[track_caller]
    pub fn pipe(&mut self, wish: &Wish) -> (u64, Reason) {
        let id = self.begin(wish);
        self.done(id)
    }

    /// The end of a pipe.
    #[track_caller]
    pub fn done(&mut self, id: u64) -> (u64, Reason) {
        let done: Done = self.hear(kind::DONE, id);
        (done.moved_bytes.get(), Reason::from_number(done.reason.get()))
    }
}

/// A connection of a guest's that has sent nothing, from its peer's socket.
pub fn socket_end(peer: &TcpStream) -> SocketEnd {
    let mut end = SocketEnd::new_zeroed();
    name(&mut end, peer.peer_addr().unwrap(), peer.local_addr().unwrap());
    let info = tcp_info(peer);
    (end.options, end.mss) = (info[5] & 7, U16::new(1400));
    // What is its send scale is the guest's receive scale.
    (end.send_scale, end.receive_scale) = (info[6] >> 4, info[6] & 15);
    (end.cwnd, end.rtt_us) = (U32::new(10), U32::new(1000));
    end.congestion[..5].copy_from_slice(b"cubic");
    end
}

/// The beginning of a socket's `TCP_INFO`.
fn tcp_info(socket: &TcpStream) -> [u8; 8] {
    let mut info = [0; 8];
    let mut len = info.len() as libc::socklen_t;
    let (level, option) = (libc::IPPROTO_TCP, libc::TCP_INFO);
    // SAFETY: the call writes at most `len` bytes to `info`.
    let got = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, info.as_mut_ptr().cast(), &mut len)
    };
    assert_eq!((got, len), (0, 8));
    info
}

/// Says who talks to whom.
pub fn name(end: &mut SocketEnd, local: SocketAddr, remote: SocketAddr) {
    let bytes = |ip| match ip {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            bytes
        }
        IpAddr::V6(ip) => ip.octets(),
    };
    end.family = if local.is_ipv4() { family::V4 } else { family::V6 };
    (end.local, end.remote) = (bytes(local.ip()), bytes(remote.ip()));
    end.local_port = U16::new(local.port());
    end.remote_port = U16::new(remote.port());
}
