//! What a connection is fed with: a file, or another connection. No byte is copied then: a file's pages,
//! or those of received segments, become the twin's. A file without a lease is copied.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use guest_abi::Reason;
use rustix::pipe::{SpliceFlags, splice};

use crate::file::Source;
use crate::given::Given;
use crate::job::Job;
use crate::limits::SPLICE_BYTES;
use crate::pool::Pool;
use crate::receiving::Receiving;

/// See the module's text.
pub(crate) enum Feed {
    /// A file.
    File(Source),
    /// A connection.
    Socket(Splice),
    /// A file that the guest reads.
    Given(Box<Given>),
}

/// What came of a try to move bytes.
pub(crate) enum Fed {
    /// So many went.
    Bytes(usize),
    /// All have gone.
    End,
    /// The source has nothing at the moment.
    Empty,
    /// The sink takes nothing at the moment.
    Full,
    /// One of both does not work.
    Failed(io::Error),
}

impl From<io::Error> for Fed {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock => Self::Full,
            io::ErrorKind::Interrupted => Self::Bytes(0),
            _ => Self::Failed(error),
        }
    }
}

impl Feed {
    /// Moves some bytes, at most `max_bytes`.
    pub fn give(&mut self, sink: BorrowedFd<'_>, max_bytes: usize, job: &Job) -> Fed {
        match self {
            Self::File(file) => match file.send(sink, max_bytes) {
                Ok(0) => Fed::End,
                Ok(n) => Fed::Bytes(n),
                Err(error) => error.into(),
            },
            Self::Socket(splice) => splice.give(sink, max_bytes),
            Self::Given(given) => {
                given.turn(job);
                given.give(sink, max_bytes)
            }
        }
    }

    /// Why all have gone although more were wanted, if the source knows it.
    pub fn ended(&self) -> Option<Reason> {
        match self {
            Self::Given(given) => given.ended(),
            Self::File(_) | Self::Socket(_) => None,
        }
    }

    /// The pipe goes on when the source has something again. False: it always has.
    pub fn arm(&self, pool: &Pool) -> bool {
        match self {
            Self::File(_) => false,
            Self::Socket(splice) => splice.source.arm(pool),
            // Whatever it waits for nudges the pipe.
            Self::Given(given) => !given.has_more(),
        }
    }

    /// Whether it has something to do while the sink takes nothing.
    pub fn has_more(&self) -> bool {
        matches!(self, Self::Given(given) if given.has_more())
    }
}

/// A connection's bytes on their way to another, through one of the kernel's pipes.
pub(crate) struct Splice {
    pub source: Receiving,
    read_end: OwnedFd,
    write_end: OwnedFd,
    /// Bytes in the kernel's pipe: they are the sink's, whatever becomes of the source.
    held_bytes: usize,
}

impl Splice {
    /// With an empty pipe, of which no end waits.
    pub fn new(source: Receiving, (read_end, write_end): (OwnedFd, OwnedFd)) -> Self {
        Self { source, read_end, write_end, held_bytes: 0 }
    }

    fn give(&mut self, sink: BorrowedFd<'_>, max_bytes: usize) -> Fed {
        if self.held_bytes == 0 {
            match self.fill(max_bytes) {
                Ok(true) => {}
                Ok(false) => return Fed::End,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Fed::Empty,
                Err(error) => return error.into(),
            }
        }
        let want = self.held_bytes.min(max_bytes);
        match splice(&self.read_end, None, sink, None, want, FLAGS) {
            Ok(n) => {
                self.held_bytes -= n;
                Fed::Bytes(n)
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

    /// Bytes that were taken out of the source and have not gone.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes as u64
    }
}

/// Neither end is waited for.
const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);
