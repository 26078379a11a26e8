//! Sources of a pipe into a file: a file, or a connection whose bytes wait in memory. Ranges of
//! their bytes are put where the guest's file system wants them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::RecvFlags;

use crate::copy::write_all;
use crate::epoll_set::EpollSet;
use crate::gated_file::GatedFile;
use crate::limits::{BUFFER_BYTES, MAX_OPEN_REQUESTS};
use crate::socket_source::SocketSource;
use crate::transfer::Transfer;

/// A source whose bytes are had by ranges. Offsets are those of the pipe.
pub(crate) enum RangeSource {
    /// A file with its length: all of it is there.
    File(GatedFile, u64),
    /// A connection.
    Socket(BufferedSocket),
}

impl RangeSource {
    /// Offset before which bytes are there.
    pub fn until(&self) -> u64 {
        match self {
            Self::File(_, len_bytes) => *len_bytes,
            Self::Socket(socket) => socket.first + socket.bytes.len() as u64,
        }
    }

    /// Puts the next bytes of a range into a file, at most all of it. `is_urgent`: see
    /// [`GatedFile::put`].
    pub fn put(
        &mut self,
        (at, len_bytes): (u64, u64),
        (to, to_at): (BorrowedFd<'_>, u64),
        is_urgent: bool,
    ) -> Transfer {
        let socket = match self {
            Self::File(file, _) => return file.put((at, len_bytes), (to, to_at), is_urgent),
            Self::Socket(socket) => socket,
        };
        let put = socket.range(at, len_bytes).and_then(|(first, second)| {
            write_all(to, to_at, first)?;
            write_all(to, to_at + first.len() as u64, second)
        });
        match put {
            Ok(()) => Transfer::Bytes(len_bytes as usize),
            Err(error) => Transfer::Failed(error),
        }
    }

    /// Whether it waits at the VM's ceiling.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::File(file, _) if file.is_held())
    }

    /// Copies a range; not a long one.
    pub fn copy(&mut self, at: u64, len_bytes: u64) -> io::Result<Vec<u8>> {
        match self {
            Self::File(source, _) => source.copy(at, len_bytes),
            Self::Socket(socket) => {
                let (first, second) = socket.range(at, len_bytes)?;
                Ok([first, second].concat())
            }
        }
    }

    /// Frees bytes before `until`: they are in their place.
    pub fn release(&mut self, until: u64) {
        if let Self::Socket(socket) = self {
            let n = until.saturating_sub(socket.first) as usize;
            socket.bytes.drain(..n.min(socket.bytes.len()));
            socket.first += n as u64;
        }
    }

    /// Wakes the pipe when there is more to take in. False: it does not.
    pub fn arm(&self, epoll: &EpollSet) -> bool {
        match self {
            Self::Socket(from) if from.has_room() && from.source.left_bytes() > 0 => {
                from.source.arm(epoll)
            }
            _ => true,
        }
    }
}

/// A connection with its bytes that are not in the file yet.
pub(crate) struct BufferedSocket {
    pub source: SocketSource,
    bytes: VecDeque<u8>,
    /// Offset of the first of them.
    first: u64,
    /// Memory into which the kernel copies them: not on a thread's stack.
    landing: Box<[u8]>,
}

/// Bytes taken out of a connection at a time.
const LANDING_BYTES: usize = 256 << 10;

/// Most bytes that wait in memory: those that are being written, and as many again.
const MAX_BUFFER_BYTES: usize = (MAX_OPEN_REQUESTS + 1) * BUFFER_BYTES;

impl BufferedSocket {
    /// A connection whose first byte is at that offset.
    pub fn new(source: SocketSource, first: u64) -> Self {
        let landing = vec![0; LANDING_BYTES].into_boxed_slice();
        Self { source, bytes: VecDeque::new(), first, landing }
    }

    /// Whether more can be taken in at the moment.
    pub fn has_room(&self) -> bool {
        self.bytes.len() + LANDING_BYTES <= MAX_BUFFER_BYTES
    }

    /// Takes in bytes that are there; how many. `WouldBlock`: none are.
    pub fn fill(&mut self) -> io::Result<usize> {
        let left = usize::try_from(self.source.left_bytes()).unwrap_or(usize::MAX);
        let want = left.min(self.landing.len());
        let Some(twin) = self.source.fd().filter(|_| want > 0) else { return Ok(0) };
        let (got, _) =
            rustix::net::recv(twin.as_fd(), &mut self.landing[..want], RecvFlags::DONTWAIT)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.bytes.extend(&self.landing[..got]);
        self.source.taken_bytes += got as u64;
        Ok(got)
    }

    fn range(&self, at: u64, len_bytes: u64) -> io::Result<(&[u8], &[u8])> {
        let from = at.checked_sub(self.first).ok_or(io::ErrorKind::InvalidInput)?;
        let end = from.checked_add(len_bytes).filter(|end| *end <= self.bytes.len() as u64);
        let (from, end) = (from as usize, end.ok_or(io::ErrorKind::InvalidInput)? as usize);
        let (first, second) = self.bytes.as_slices();
        let cut = first.len();
        Ok((
            &first[from.min(cut)..end.min(cut)],
            &second[from.saturating_sub(cut)..end.saturating_sub(cut)],
        ))
    }
}
