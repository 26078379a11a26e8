//! Rig for pipes from a file to a file, on a disk that replaces placeholders by bytes.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::Reason;
use guest_abi::pipe::SECTOR_BYTES;
use guest_abi::program::{Answer, OWN_POSITION, op};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::{Asked, Daemon, Disk, Mounted, World, answer, request, send};

pub const EXT4: &str = "mke2fs -q -F -t ext4";
pub const XFS: &str = "mkfs.xfs -q -f -K";
pub const MIB: u64 = 1 << 20;

/// File system with a source, a disk, and an agent.
pub struct Rig {
    pub served: (Mounted, Arc<Disk>),
    pub world: World,
    pub daemon: Daemon,
    pub program: OwnedFd,
    /// Content of the source.
    pub bytes: Vec<u8>,
}

pub fn content(len: u64) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 977) as u8 | 1).collect()
}

impl Rig {
    pub fn new(make: &str, len: u64) -> Self {
        let served = Mounted::served(make);
        let bytes = content(len);
        File::create(served.0.path("source")).unwrap().write_all(&bytes).unwrap();
        let world = World::served(&served);
        let (daemon, program) = (world.daemon(), world.program());
        Self { served, world, daemon, program, bytes }
    }

    pub fn disk(&self) -> &Disk {
        &self.served.1
    }

    pub fn source(&self) -> File {
        File::open(self.served.0.path("source")).unwrap()
    }

    /// Makes a new file to write to.
    pub fn sink(&self) -> File {
        self.open(File::options().create(true).truncate(true).write(true))
    }

    pub fn open(&self, options: &std::fs::OpenOptions) -> File {
        options.open(self.served.0.path("sink")).unwrap()
    }

    /// Reads the content of the sink from the disk.
    pub fn read(&self) -> Vec<u8> {
        let path = self.served.0.path("sink");
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        std::fs::read(path).unwrap()
    }

    /// Asks for a pipe from the source's beginning; the disk knows its placeholders.
    pub fn pipe(&mut self, sink: &File, sink_offset: u64, len: u64) -> Asked {
        let mut request = request(op::PIPE, 0, len);
        request.sink_offset = U64::new(sink_offset);
        let source = self.source();
        send(&self.program, request.as_bytes(), &[source.as_fd(), sink.as_fd()]);
        let asked = self.daemon.pipe();
        assert_eq!(asked.bytes, self.bytes[..asked.len_bytes as usize]);
        self.disk().know(asked.places.tag, asked.bytes.clone());
        asked
    }

    pub fn take(&mut self, asked: &Asked, at: u64, len: u64) -> u32 {
        self.daemon.take_places(asked.id, at, len as u32);
        self.daemon.taken(at, len as u32)
    }

    pub fn take_bytes(&mut self, asked: &Asked, at: u64, len: u64) -> u32 {
        let bytes = &asked.bytes[at as usize..][..len as usize];
        self.daemon.take_bytes(asked.id, at, bytes);
        self.daemon.taken(at, len as u32)
    }

    /// Serves all of a pipe, as a daemon does.
    pub fn serve(&mut self, asked: &Asked) {
        let (mut at, len) = (0, asked.len_bytes);
        let before = self.disk().replaced.load(Ordering::Acquire);
        let (mut errno, mut placed) = (0, 0);
        while at < len && errno == 0 {
            let behind = (u64::from(asked.places.skew_bytes) + at) % 4096;
            let whole = (len - at).min(4 * MIB) / 4096 * 4096;
            let part = match (behind, whole) {
                (0, 0) => len - at,
                (0, whole) => whole,
                (behind, _) => (4096 - behind).min(len - at),
            };
            errno = if behind == 0 && whole > 0 {
                placed += part;
                self.take(asked, at, part)
            } else {
                self.take_bytes(asked, at, part)
            };
            at += part;
        }
        assert_eq!(errno, 0);
        let replaced = self.disk().replaced.load(Ordering::Acquire) - before;
        assert_eq!(replaced * SECTOR_BYTES as u64, placed);
        self.daemon.done(asked.id, len, Reason::Complete);
    }

    pub fn answer(&self) -> (u64, Reason, u32) {
        told(answer(&self.program))
    }

    /// Expects an answer without a pipe. Returns its reason.
    pub fn refused(&self, source: impl AsFd, sink: impl AsFd) -> Reason {
        self.refused_at(source, sink, (OWN_POSITION, OWN_POSITION))
    }

    pub fn refused_at(&self, source: impl AsFd, sink: impl AsFd, offsets: (u64, u64)) -> Reason {
        let mut request = request(op::PIPE, offsets.0, MIB);
        request.sink_offset = U64::new(offsets.1);
        send(&self.program, request.as_bytes(), &[source.as_fd(), sink.as_fd()]);
        let (moved, reason, _) = self.answer();
        assert_eq!(moved, 0);
        reason
    }
}

pub fn told(answer: Answer) -> (u64, Reason, u32) {
    (answer.moved_bytes.get(), Reason::from_number(answer.reason.get()), answer.errno.get())
}
