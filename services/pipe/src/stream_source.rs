//! Sources of a pipe into a connection: a file, a connection, or a file that the guest reads. They
//! give their bytes in order. Of the first two no byte is copied: a file's pages, or those of
//! received segments, become the twin's. A file without a lease is copied.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use guest_abi::Reason;
use rustix::pipe::{SpliceFlags, splice};

use crate::epoll_set::EpollSet;
use crate::gated_file::GatedFile;
use crate::job::Job;
use crate::limits::SPLICE_BYTES;
use crate::placed_source::PlacedSource;
use crate::socket_source::SocketSource;
use crate::transfer::Transfer;

/// A source that gives its bytes in order.
pub(crate) enum StreamSource {
    /// A file with a lease.
    File(GatedFile),
    /// A connection.
    Socket(SplicedSocket),
    /// A file without a lease, which the guest reads.
    Placed(Box<PlacedSource>),
}

impl StreamSource {
    /// Moves some bytes, at most `max_bytes`.
    pub fn send(&mut self, sink: BorrowedFd<'_>, max_bytes: usize, job: &Job) -> Transfer {
        match self {
            Self::File(file) => file.send(sink, max_bytes),
            Self::Socket(socket) => socket.send(sink, max_bytes),
            Self::Placed(source) => {
                source.turn(job);
                source.send(sink, max_bytes)
            }
        }
    }

    /// Reason why the bytes ended although more were wanted, if the source knows it.
    pub fn end_reason(&self) -> Option<Reason> {
        match self {
            Self::Placed(source) => source.end_reason(),
            Self::File(_) | Self::Socket(_) => None,
        }
    }

    /// Wakes the pipe when the source has something again. False: it always has.
    pub fn arm(&self, epoll: &EpollSet) -> bool {
        match self {
            Self::File(_) => false,
            Self::Socket(socket) => socket.source.arm(epoll),
            // Whatever it waits for wakes the pipe.
            Self::Placed(source) => !source.has_more(),
        }
    }

    /// Whether it waits at the VM's ceiling.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::File(file) if file.is_held())
    }

    /// Waits no more: nothing more is read of it.
    pub fn end_hold(&mut self) {
        if let Self::File(file) = self {
            file.end_hold();
        }
    }

    /// Whether it has something to do while the sink takes nothing.
    pub fn has_more(&self) -> bool {
        matches!(self, Self::Placed(source) if source.has_more())
    }
}

/// A connection whose bytes go to another through a pipe(2) of the kernel.
pub(crate) struct SplicedSocket {
    pub source: SocketSource,
    read_end: OwnedFd,
    write_end: OwnedFd,
    /// Bytes in the kernel's pipe: they are the sink's, whatever becomes of the source.
    held_bytes: usize,
}

impl SplicedSocket {
    /// A connection, with an empty pipe(2) of which neither end waits.
    pub fn new(source: SocketSource, (read_end, write_end): (OwnedFd, OwnedFd)) -> Self {
        Self { source, read_end, write_end, held_bytes: 0 }
    }

    fn send(&mut self, sink: BorrowedFd<'_>, max_bytes: usize) -> Transfer {
        if self.held_bytes == 0 {
            match self.fill(max_bytes) {
                Ok(true) => {}
                Ok(false) => return Transfer::End,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Transfer::Empty,
                Err(error) => return error.into(),
            }
        }
        let want = self.held_bytes.min(max_bytes);
        match splice(&self.read_end, None, sink, None, want, FLAGS) {
            Ok(n) => {
                self.held_bytes -= n;
                Transfer::Bytes(n)
            }
            Err(error) => io::Error::from(error).into(),
        }
    }

    /// Takes bytes out of the source; false when there will be none.
    fn fill(&mut self, max_bytes: usize) -> io::Result<bool> {
        let left = usize::try_from(self.source.left_bytes()).unwrap_or(usize::MAX);
        let want = left.min(max_bytes).min(SPLICE_BYTES);
        let Some(twin) = self.source.fd().filter(|_| want > 0) else { return Ok(false) };
        let got = splice(twin, None, self.write_end.as_fd(), None, want, FLAGS)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.held_bytes = got;
        self.source.taken_bytes += got as u64;
        Ok(true)
    }

    /// Bytes that were taken out of the source and have not gone to the sink.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes as u64
    }
}

/// Flags of both splices: neither end is waited for.
const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);
