//! The client's side of the protocol, as plainly as can be: it may send what no client should.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use guest_abi::module::{
    FRAME_BYTES, Failure, Frame, Hello, MAGIC, ModuleInfo, VERSION, Welcome, flag, kind,
};
use guest_abi::module_ring::{RingGranted, RingWanted};
use modules::ring::{Region, Ring};
use rustix::net::SendFlags;
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// After this a test has failed; nothing waits for it in the good case.
const LIMIT: Duration = Duration::from_secs(60);

/// A connection.
pub struct Client {
    socket: UnixStream,
    ring: Option<Ring>,
    /// Bytes that came by the ring and were not taken.
    came: Vec<u8>,
    /// Whether it polls the ring and never sleeps.
    pub looks: bool,
}

/// A frame that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Got {
    pub kind: u16,
    pub flags: u16,
    pub seq: u64,
    pub body: Vec<u8>,
}

impl Got {
    /// The code and the text of one that failed.
    pub fn failure(&self) -> (u32, String) {
        assert!(self.flags & flag::FAILED != 0, "{self:?}");
        let (failure, text) = Failure::read_from_prefix(&self.body).unwrap();
        (failure.code.get(), String::from_utf8(text.to_vec()).unwrap())
    }
}

/// A frame as it should be.
pub fn frame(kind: u16, flags: u16, seq: u64, body: &[u8]) -> Vec<u8> {
    let mut frame = Frame::new(kind, flags, seq, body.len());
    frame.check = U64::new(xxh3_64_with_seed(body, frame.seed()));
    [frame.as_bytes(), body].concat()
}

pub fn hello(client: [u8; 16], module: &str) -> Vec<u8> {
    let mut name = [0; 32];
    name[..module.len()].copy_from_slice(module.as_bytes());
    let hello = Hello {
        magic: U64::new(MAGIC),
        lowest: U16::new(VERSION),
        highest: U16::new(VERSION),
        reserved: U32::ZERO,
        client,
        module: name,
    };
    frame(kind::HELLO, 0, 0, hello.as_bytes())
}

impl Client {
    pub fn new(fd: OwnedFd) -> Self {
        let stream = UnixStream::from(fd);
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self { socket: stream, ring: None, came: Vec::new(), looks: false }
    }

    /// The same connection, which must not go by a ring.
    pub fn twin(&self) -> Self {
        assert!(self.ring.is_none());
        Self::new(self.socket.try_clone().unwrap().into())
    }

    /// Asks for a ring of this region: the answer.
    pub fn ask_ring(&mut self, id: [u8; 16]) -> Got {
        self.send(&frame(kind::RING, 0, 0, RingWanted { id }.as_bytes()));
        let got = self.next().unwrap();
        assert_eq!((got.kind, got.seq), (kind::RING, 0), "{got:?}");
        got
    }

    /// Goes on by a ring of this region. False: the connection ended meanwhile.
    pub fn change_over(&mut self, region: &Arc<Region>) -> bool {
        self.send(&frame(kind::RING, 0, 0, &region.head().id));
        let Some(got) = self.next() else { return false };
        assert_eq!((got.kind, got.flags), (kind::RING, 0), "{:?}", got.failure());
        self.take_ring(region, &got)
    }

    fn take_ring(&mut self, region: &Arc<Region>, got: &Got) -> bool {
        let granted = RingGranted::read_from_bytes(&got.body).unwrap();
        self.ring = Ring::of_client(region, granted.slot.get(), granted.stamp.get());
        self.ring.is_some()
    }

    /// The same, unless it is refused.
    pub fn change_over_if(&mut self, region: &Arc<Region>) -> bool {
        let got = self.ask_ring(region.head().id);
        got.flags == 0 && self.take_ring(region, &got)
    }

    pub fn bell(&self) {
        // A host that has gone is told by what comes next.
        let _ = rustix::net::send(&self.socket, &[0], SendFlags::NOSIGNAL);
    }

    /// Sleeps until the host rings. False: the connection has ended.
    pub fn sleep(&mut self) -> bool {
        match self.socket.read(&mut [0; 64]) {
            Ok(n) => n > 0,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => false,
            Err(e) => panic!("{e}"),
        }
    }

    /// Frames with the ring's stamp in their checks.
    fn stamped(&self, bytes: &[u8]) -> Vec<u8> {
        let (mut all, mut at) = (bytes.to_vec(), 0);
        while let Some(rest) = all.get_mut(at..).filter(|rest| rest.len() >= FRAME_BYTES) {
            let mut head = Frame::read_from_bytes(&rest[..FRAME_BYTES]).unwrap();
            head.check ^= U64::new(self.stamp());
            rest[..FRAME_BYTES].copy_from_slice(head.as_bytes());
            at += FRAME_BYTES + head.len_bytes.get() as usize;
        }
        all
    }

    fn stamp(&self) -> u64 {
        self.ring.as_ref().map_or(0, |ring| ring.stamp)
    }

    fn send_by_ring(&mut self, bytes: &[u8]) {
        let bytes = self.stamped(bytes);
        let mut bytes = &bytes[..];
        while !bytes.is_empty() {
            let Some(ring) = &mut self.ring else { return };
            // Somebody else wrote there: told by what comes next.
            let Ok(n) = ring.writer.write(bytes) else { return };
            bytes = &bytes[n..];
            let full = n == 0 && ring.writer.wait().unwrap();
            if ring.writer.must_ring() {
                self.bell();
            }
            if full && !self.sleep() {
                return;
            }
        }
    }

    /// Takes bytes of the ring; none when the connection has ended before them.
    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        while self.came.len() < len {
            let ring = self.ring.as_mut().filter(|ring| ring.is_mine())?;
            let n = ring.reader.read(&mut self.came, usize::MAX).unwrap();
            if ring.reader.must_ring() {
                self.bell();
            }
            let Some(ring) = &self.ring else { return None };
            if n > 0 || self.looks || !ring.reader.sleep() {
                continue;
            }
            let goes_on = self.sleep();
            let Some(ring) = &self.ring else { return None };
            ring.reader.wake();
            if !goes_on && !ring.reader.has_some() {
                return None;
            }
        }
        Some(self.came.drain(..len).collect())
    }

    fn receive(&mut self, len: usize) -> Option<Vec<u8>> {
        if self.ring.is_some() {
            return self.take(len);
        }
        let mut bytes = vec![0; len];
        match self.socket.read_exact(&mut bytes) {
            Ok(()) => Some(bytes),
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => None,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(e) => panic!("{e}"),
        }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        if self.ring.is_some() {
            return self.send_by_ring(bytes);
        }
        match self.socket.write_all(bytes) {
            // Told by what comes next, or does not.
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
            done => done.unwrap(),
        }
    }

    pub fn request(&mut self, seq: u64, flags: u16, body: &[u8]) {
        self.send(&frame(kind::REQUEST, flags, seq, body));
    }

    /// The next frame; none: the connection has ended.
    pub fn next(&mut self) -> Option<Got> {
        let head = self.receive(FRAME_BYTES)?;
        let head = Frame::read_from_bytes(&head).unwrap();
        let body = self.receive(head.len_bytes.get() as usize).unwrap();
        assert_eq!(head.check.get() ^ self.stamp(), xxh3_64_with_seed(&body, head.seed()));
        let (kind, flags, seq) = (head.kind.get(), head.flags.get(), head.seq.get());
        Some(Got { kind, flags, seq, body })
    }

    /// The answer to a hello.
    pub fn welcome(&mut self) -> (Welcome, Vec<ModuleInfo>) {
        self.welcomed().unwrap()
    }

    /// The same; none: the process ended meanwhile.
    pub fn welcomed(&mut self) -> Option<(Welcome, Vec<ModuleInfo>)> {
        let got = self.next()?;
        assert_eq!(got.kind, kind::WELCOME, "{got:?}");
        let (welcome, rest) = Welcome::read_from_prefix(&got.body).unwrap();
        let modules = rest.chunks(size_of::<ModuleInfo>());
        Some((welcome, modules.map(|m| ModuleInfo::read_from_bytes(m).unwrap()).collect()))
    }

    /// The reply to a request.
    pub fn reply(&mut self, seq: u64) -> Got {
        let got = self.next().unwrap();
        assert_eq!((got.kind, got.seq), (kind::REPLY, seq), "{got:?}");
        got
    }

    /// One request and its reply's body.
    pub fn ask(&mut self, seq: u64, body: &[u8]) -> Vec<u8> {
        self.request(seq, 0, body);
        let got = self.reply(seq);
        assert_eq!(got.flags, 0, "{:?}", got.failure());
        got.body
    }
}
