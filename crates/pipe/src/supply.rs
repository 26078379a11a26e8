//! What a file is written with: another file, or what a connection has brought, in memory.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::net::RecvFlags;

use crate::copy::{copy_range, write_all};
use crate::file::Source;
use crate::limits::BUFFER_BYTES;
use crate::receiving::Receiving;

/// See the module's text. Offsets are those of the pipe.
pub(crate) enum Supply {
    /// A file: all of it is there.
    File(Source, u64),
    /// A connection.
    Socket(Buffered),
}

impl Supply {
    /// How far bytes are there.
    pub fn until(&self) -> u64 {
        match self {
            Self::File(_, len_bytes) => *len_bytes,
            Self::Socket(buffered) => buffered.first + buffered.bytes.len() as u64,
        }
    }

    /// Puts a range into a file.
    pub fn put(&self, at: u64, len_bytes: u64, to: BorrowedFd<'_>, to_at: u64) -> io::Result<()> {
        let source = match self {
            Self::File(source, _) => source,
            Self::Socket(buffered) => {
                let (first, second) = buffered.range(at, len_bytes)?;
                write_all(to, to_at, first)?;
                return write_all(to, to_at + first.len() as u64, second);
            }
        };
        let (mut at, mut to_at, end) = (at, to_at, at + len_bytes);
        while at < end {
            let found = source.find(at)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let n = found.len_bytes.min(end - at);
            copy_range((found.file, found.offset), (to, to_at), n)?;
            (at, to_at) = (at + n, to_at + n);
        }
        Ok(())
    }

    /// Copies a range; not a long one.
    pub fn read(&self, at: u64, len_bytes: u64) -> io::Result<Vec<u8>> {
        match self {
            Self::File(source, _) => source.copy(at, len_bytes),
            Self::Socket(buffered) => {
                let (first, second) = buffered.range(at, len_bytes)?;
                Ok([first, second].concat())
            }
        }
    }

    /// Everything before is in its place and not needed any more.
    pub fn release(&mut self, until: u64) {
        if let Self::Socket(buffered) = self {
            let n = until.saturating_sub(buffered.first) as usize;
            buffered.bytes.drain(..n.min(buffered.bytes.len()));
            buffered.first += n as u64;
        }
    }
}

/// A place among the pipes that hold bytes in memory.
#[derive(Debug)]
pub(crate) struct Room(Arc<AtomicUsize>);

impl Room {
    /// One of at most so many; none: all are taken.
    pub fn take(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let is_free = |n: usize| (n < most).then_some(n + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_free).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection's bytes that are not in the file yet.
pub(crate) struct Buffered {
    pub source: Receiving,
    bytes: VecDeque<u8>,
    /// Where the first of them belongs.
    first: u64,
    /// Where the kernel puts them: not on a thread's stack.
    landing: Box<[u8]>,
}

/// Taken out of a connection at once.
const LANDING_BYTES: usize = 256 << 10;

/// Bytes that wait in memory: those that are being written, and as many again.
const MOST_BYTES: usize = (crate::limits::OPEN_TAKES + 1) * BUFFER_BYTES;

impl Buffered {
    /// Its first byte is at that offset.
    pub fn new(source: Receiving, first: u64) -> Self {
        let landing = vec![0; LANDING_BYTES].into_boxed_slice();
        Self { source, bytes: VecDeque::new(), first, landing }
    }

    /// Whether more is taken in at the moment.
    pub fn has_room(&self) -> bool {
        self.bytes.len() + LANDING_BYTES <= MOST_BYTES
    }

    /// Takes in what is there; how many bytes. `WouldBlock`: none.
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
