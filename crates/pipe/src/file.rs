//! A file of a guest as a pipe's source: extents of its disk's image, and holes.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use guest_abi::pipe::{HOLE, MAX_EXTENTS};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::error::PipeError;

/// Bytes of the file of zeroes that holes are read from. It has no pages: reading makes none.
const ZEROES_BYTES: u64 = 1 << 20;

/// The bytes of a file, in their order, with a cursor.
#[derive(Debug)]
pub struct Source {
    image: OwnedFd,
    extents: Vec<(u64, u64)>,
    /// The extent that is under way.
    at: usize,
    /// Bytes of it that have been sent.
    done_bytes: u64,
}

impl Source {
    /// `extents` are pairs of offset ([`HOLE`]: zeroes) and length; all of them together must have
    /// `len_bytes` and lie in the first `disk_bytes` of the image.
    pub fn new(
        image: OwnedFd,
        disk_bytes: u64,
        extents: Vec<(u64, u64)>,
        len_bytes: u64,
    ) -> Result<Self, PipeError> {
        check(disk_bytes, &extents, len_bytes)?;
        Ok(Self { image, extents, at: 0, done_bytes: 0 })
    }

    /// Moves the next bytes to a socket, at most `max_bytes` and not beyond an extent. `Ok(0)` when
    /// all have been moved (or none is wanted); `WouldBlock` when the socket takes none.
    pub fn send(&mut self, sink: BorrowedFd<'_>, max_bytes: usize) -> io::Result<usize> {
        let Some(&(offset, len_bytes)) = self.extents.get(self.at) else { return Ok(0) };
        let left_bytes = len_bytes - self.done_bytes;
        let want = usize::try_from(left_bytes).unwrap_or(usize::MAX).min(max_bytes);
        if want == 0 {
            return Ok(0);
        }
        let moved = if offset == HOLE {
            let mut zero = 0;
            let want = want.min(ZEROES_BYTES as usize);
            rustix::fs::sendfile(sink, zeroes()?, Some(&mut zero), want)?
        } else {
            let mut from = offset + self.done_bytes;
            rustix::fs::sendfile(sink, &self.image, Some(&mut from), want)?
        };
        if moved == 0 {
            // The image was cut off behind our back.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.done_bytes += moved as u64;
        if self.done_bytes == len_bytes {
            self.at += 1;
            self.done_bytes = 0;
        }
        Ok(moved)
    }
}

/// Everything an agent says of extents is checked here, once.
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
#[path = "file_tests.rs"]
mod tests;
