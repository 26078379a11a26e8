//! The client's side of the protocol, as plainly as can be: it may send what no client should.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use guest_abi::module::{
    FRAME_BYTES, Failure, Frame, Hello, MAGIC, ModuleInfo, VERSION, Welcome, flag, kind,
};
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// After this a test has failed; nothing waits for it in the good case.
const LIMIT: Duration = Duration::from_secs(60);

/// A connection.
pub struct Client(UnixStream);

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
        Self(stream)
    }

    /// The same connection.
    pub fn twin(&self) -> Self {
        Self(self.0.try_clone().unwrap())
    }

    pub fn send(&mut self, bytes: &[u8]) {
        match self.0.write_all(bytes) {
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
        let mut head = [0; FRAME_BYTES];
        match self.0.read_exact(&mut head) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return None,
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
            Err(e) => panic!("{e}"),
        }
        let head = Frame::read_from_bytes(&head).unwrap();
        let mut body = vec![0; head.len_bytes.get() as usize];
        self.0.read_exact(&mut body).unwrap();
        assert_eq!(head.check.get(), xxh3_64_with_seed(&body, head.seed()));
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
