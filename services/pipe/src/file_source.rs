//! A file with a lease as a pipe's source: extents of its disk's image, and holes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use guest_abi::pipe::{HOLE, MAX_EXTENTS};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::copy::read_all;
use crate::error::PipeError;
use crate::page_cache::{drop_cached, is_cached};

/// Bytes of the file of zeroes that holes are read from. It has no pages: reading makes none.
const ZEROES_BYTES: u64 = 1 << 20;

/// Bytes of a file that are looked at to know whether it is in memory.
const SAMPLES: u64 = 16;

/// A file that is read by its extents, with a cursor.
#[derive(Debug)]
pub struct FileSource {
    image: OwnedFd,
    extents: Vec<(u64, u64)>,
    /// Offset in the file at which each of them ends.
    ends: Vec<u64>,
    /// Cursor: bytes before it have been sent.
    sent_bytes: u64,
}

/// Place of some bytes of a file on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FilePlace<'a> {
    /// The host's file that has them.
    pub file: BorrowedFd<'a>,
    /// Offset in the host's file.
    pub offset: u64,
    /// Number of bytes without a gap, at least 1.
    pub len_bytes: u64,
    /// Whether they are zeroes, and on no disk.
    pub is_hole: bool,
}

impl FileSource {
    /// A file of `len_bytes`. `extents` are pairs of offset ([`HOLE`]: zeroes) and length; all of
    /// them together must have `len_bytes` and lie in the first `disk_bytes` of the image.
    pub fn new(
        image: OwnedFd,
        disk_bytes: u64,
        extents: Vec<(u64, u64)>,
        len_bytes: u64,
    ) -> Result<Self, PipeError> {
        check(disk_bytes, &extents, len_bytes)?;
        let mut end = 0;
        let ends = extents.iter().map(|(_, len)| {
            end += len;
            end
        });
        let ends = ends.collect();
        Ok(Self { image, extents, ends, sent_bytes: 0 })
    }

    /// Finds the bytes from `at` on; none: there are no more.
    pub(crate) fn find(&self, at: u64) -> io::Result<Option<FilePlace<'_>>> {
        let index = self.ends.partition_point(|end| *end <= at);
        let (Some(&(offset, len_bytes)), Some(end)) =
            (self.extents.get(index), self.ends.get(index))
        else {
            return Ok(None);
        };
        let left = end - at;
        if offset == HOLE {
            let len_bytes = left.min(ZEROES_BYTES);
            let file = zeroes()?.as_fd();
            return Ok(Some(FilePlace { file, offset: 0, len_bytes, is_hole: true }));
        }
        let offset = offset + (len_bytes - left);
        let file = self.image.as_fd();
        Ok(Some(FilePlace { file, offset, len_bytes: left, is_hole: false }))
    }

    /// Number of bytes that come next and are on the disk, without a gap; 0: a hole is next, or
    /// the end.
    pub(crate) fn next_on_disk(&self) -> u64 {
        let found = self.find(self.sent_bytes).ok().flatten();
        found.filter(|found| !found.is_hole).map_or(0, |found| found.len_bytes)
    }

    /// Has the kernel read its bytes from the disk anew: nobody writes to them while it is read.
    pub(crate) fn drop_cached(&self) {
        let in_image = self.extents.iter().filter(|(offset, _)| *offset != HOLE);
        in_image.for_each(|(offset, len)| drop_cached(self.image.as_fd(), *offset, *len));
    }

    /// Copies a range; not a long one.
    pub(crate) fn copy(&self, at: u64, len_bytes: u64) -> io::Result<Vec<u8>> {
        let len = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (mut bytes, mut done) = (vec![0; len], 0);
        while done < len {
            let found = self.find(at + done as u64)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let n = found.len_bytes.min((len - done) as u64) as usize;
            read_all(found.file, found.offset, &mut bytes[done..done + n])?;
            done += n;
        }
        Ok(bytes)
    }

    /// Whether most of its bytes are in the host's page cache, as a sample says. (Where nobody can
    /// tell, they are.)
    pub(crate) fn is_in_memory(&self, len_bytes: u64) -> bool {
        let step = (len_bytes / SAMPLES).max(1);
        let samples = (0..SAMPLES).map(|n| n * step).filter(|at| *at < len_bytes);
        let (mut all, mut missing) = (0, 0);
        for at in samples {
            let Ok(Some(found)) = self.find(at) else { continue };
            missing += u32::from(!is_cached(found.file, found.offset));
            all += 1;
        }
        missing * 2 <= all
    }

    /// Moves the next bytes to a socket, at most `max_bytes` and not beyond an extent. `Ok(0)` when
    /// all have been moved (or none is wanted); `WouldBlock` when the socket takes none.
    pub fn send(&mut self, sink: BorrowedFd<'_>, max_bytes: usize) -> io::Result<usize> {
        let Some(found) = self.find(self.sent_bytes)? else { return Ok(0) };
        let want = usize::try_from(found.len_bytes).unwrap_or(usize::MAX).min(max_bytes);
        if want == 0 {
            return Ok(0);
        }
        let mut from = found.offset;
        let moved = rustix::fs::sendfile(sink, found.file, Some(&mut from), want)?;
        if moved == 0 {
            // The image was cut off behind our back.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.sent_bytes += moved as u64;
        Ok(moved)
    }
}

/// Checks the extents that an agent has sent, once for all.
fn check(disk_bytes: u64, extents: &[(u64, u64)], len_bytes: u64) -> Result<(), PipeError> {
    let mut sum = 0u64;
    for (index, &(offset, len)) in extents.iter().enumerate() {
        let bad = |what, limit| PipeError::BadExtent { index, offset, len_bytes: len, what, limit };
        if index >= MAX_EXTENTS as usize {
            return Err(bad("too many extents", u64::from(MAX_EXTENTS)));
        }
        if len == 0 {
            return Err(bad("too short", 1));
        }
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= disk_bytes);
        if offset != HOLE && !is_inside {
            return Err(bad("behind the end of the disk", disk_bytes));
        }
        sum = match sum.checked_add(len) {
            Some(sum) if sum <= len_bytes => sum,
            _ => return Err(bad("behind the end of the pipe", len_bytes)),
        };
    }
    if sum == len_bytes && sum > 0 {
        return Ok(());
    }
    let (index, what) = (extents.len(), "together shorter than the pipe");
    Err(PipeError::BadExtent { index, offset: 0, len_bytes: sum, what, limit: len_bytes })
}

/// The file of zeroes, shared by all pipes.
fn zeroes() -> io::Result<&'static OwnedFd> {
    static ZEROES: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(file) = ZEROES.get() {
        return Ok(file);
    }
    let file = rustix::fs::memfd_create(
        c"millrace-zeroes",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    rustix::fs::ftruncate(&file, ZEROES_BYTES)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(ZEROES.get_or_init(|| file))
}

#[cfg(test)]
mod tests;
