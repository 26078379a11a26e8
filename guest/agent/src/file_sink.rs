//! File as the sink of a pipe: the agent writes placeholders to the file system, and the host
//! replaces them by the pipe's bytes. Bytes that do not fill whole blocks come in messages.
//!
//! A placeholder that was not replaced must not stay in the file. While the daemon is there, it
//! names those by sending their bytes again. When it is lost, or the pipe ends early, the agent
//! reads the ranges that it has written and looks for placeholders itself: their tag is a secret of
//! this pipe, so no content can be mistaken for one.

use std::cell::OnceCell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use guest_abi::Reason;
use guest_abi::pipe::{BLOCK_BYTES, PlacesEnd, SECTOR_BYTES};
use rustix::fs::{OFlags, SeekFrom, Stat, fcntl_getfl, fstat, ftruncate, seek};
use rustix::io::{Errno, pwrite};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use crate::disks::Disks;
use crate::file_source::{self, FileSource};
use crate::identity::Identity;
use crate::line::{Line, WriteRequest};
use crate::log::log;
use crate::placed_source::read_up_to;
use crate::placeholders::Blocks;
use crate::ranges::Ranges;
use crate::reopen::reopen_to_write;
use crate::sys;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Most bytes of placeholders in one system call: a disk's requests are smaller.
const PIECE_BYTES: u64 = 1 << 20;
/// Most ranges with gaps between them that a pipe's writes may make. Writes come in order, but for
/// bytes that are sent again, which lie in ranges already written.
pub const MAX_RANGES: usize = 64;

/// A file that a pipe writes.
#[derive(Debug)]
pub struct FileSink {
    program: OwnedFd,
    identity: Identity,
    direct: File,
    /// Handle without direct I/O, for bytes that do not fill whole blocks.
    plain: OnceCell<File>,
    /// `O_SYNC` and `O_DSYNC`, if the program's descriptor has them.
    sync: OFlags,
    start: u64,
    uses_own_position: bool,
    /// Most bytes that may be written.
    max_bytes: u64,
    old_size: u64,
    tag: [u8; 16],
    disk: u32,
    blocks: Option<Blocks>,
    /// Ranges that were written as placeholders, or may have been.
    placed: Ranges,
    /// Ranges that were written, in any way.
    written: Ranges,
    errno: Option<Errno>,
}

/// Checks that a program's descriptor may be written and its file piped to. Returns the
/// descriptor's flags.
pub fn check(program: BorrowedFd<'_>) -> Result<OFlags, Reason> {
    let flags = fcntl_getfl(program).map_err(|_| Reason::NotPermitted)?;
    // Appending writes elsewhere than at the offset of the request.
    if flags.intersects(OFlags::PATH | OFlags::APPEND) || flags & OFlags::RWMODE == OFlags::RDONLY {
        return Err(Reason::NotPermitted);
    }
    file_source::check_content(program)?;
    Ok(flags)
}

impl FileSink {
    /// Opens the file for writing past the page cache. `stat` is that of the program's descriptor,
    /// `flags` the result of [`check`].
    ///
    /// # Errors
    /// Reason why the file cannot be piped to.
    pub fn new(
        program: OwnedFd,
        (stat, flags): (&Stat, OFlags),
        offset: u64,
        identity: Identity,
        (disks, line): (&Disks, &Arc<Line>),
    ) -> Result<Self, Reason> {
        let uses_own_position = offset == guest_abi::program::OWN_POSITION;
        let start = file_source::start(&program, offset)?;
        // At the limit, the ordinary write has its own answer, and a signal.
        let limit = identity.max_file_bytes().ok_or(Reason::NotPermitted)?.min(i64::MAX as u64);
        let max_bytes = limit.checked_sub(start).filter(|left| *left > 0);
        let max_bytes = max_bytes.ok_or(Reason::NotPermitted)?;
        let sync = flags & (OFlags::SYNC | OFlags::DSYNC);
        let direct = reopen_to_write(program.as_fd(), sync | OFlags::DIRECT)?;
        let place = disks.place_to_write(stat.st_dev, line)?;
        let mut tag = [0; 16];
        rustix::rand::getrandom(&mut tag, rustix::rand::GetRandomFlags::empty())
            .map_err(|_| Reason::SelfTest)?;
        Ok(Self {
            program,
            identity,
            direct,
            plain: OnceCell::new(),
            sync,
            start,
            uses_own_position,
            max_bytes,
            old_size: stat.st_size as u64,
            tag,
            disk: place.disk,
            blocks: None,
            placed: Ranges::default(),
            written: Ranges::default(),
            errno: None,
        })
    }

    /// Most bytes that fit, at least 1.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Offset in the file at which the first byte goes.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Appends the description of this end to a message.
    pub fn write_end(&self, body: &mut Vec<u8>) {
        let skew_bytes = U32::new((self.start % BLOCK) as u32);
        let end = PlacesEnd { tag: self.tag, skew_bytes, disk: U32::new(self.disk) };
        body.extend_from_slice(end.as_bytes());
    }

    /// Error of a write that failed.
    pub fn errno(&self) -> Option<Errno> {
        self.errno
    }

    /// Writes a range that the daemon asks for, in a pipe of `len_bytes`. Returns the errno, 0 if
    /// all of the range was written; after an error all later writes fail too. None: the request
    /// breaks the protocol.
    pub fn serve(&mut self, request: &WriteRequest, len_bytes: u64) -> Option<u32> {
        let (at, len) = (request.at, u64::from(request.len_bytes));
        let until = at.checked_add(len).filter(|until| *until <= len_bytes)?;
        let aligned = (self.start + at).is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK);
        if request.bytes.is_none() && !aligned {
            return None;
        }
        if self.errno.is_none() {
            let written = match &request.bytes {
                Some(bytes) => self.write(at, bytes).map(|_| ()),
                None => self.write_placeholders(at..until, len_bytes),
            };
            self.errno = written.err();
        }
        if self.written.count() > MAX_RANGES {
            return None;
        }
        Some(self.errno.map_or(0, |errno| errno.raw_os_error() as u32))
    }

    fn write_placeholders(&mut self, range: Range<u64>, len_bytes: u64) -> Result<(), Errno> {
        let room = len_bytes.next_multiple_of(BLOCK).min(PIECE_BYTES) as usize;
        let blocks = self.blocks.get_or_insert_with(|| Blocks::new(self.tag, room));
        let acting = self.identity.assume()?;
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(PIECE_BYTES);
            // A failed write may have reached the disk as well.
            self.placed.add(at, at + len);
            match blocks.write(&self.direct, self.start + at, at, len as usize) {
                Ok(written) => {
                    self.written.add(at, at + written as u64);
                    at += written as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        drop(acting);
        self.clean_cache(range).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    /// Ensures that no placeholder is in the page cache. File systems may do direct I/O through it
    /// after all, when pages there are busy or the file begins in its inode: then the disk has the
    /// pipe's bytes, and readers would see placeholders.
    fn clean_cache(&self, range: Range<u64>) -> io::Result<()> {
        let (from, until) = (self.start + range.start, self.start + range.end);
        for (cached, end) in sys::cached_ranges(self.direct.as_fd(), from, until)? {
            // Most likely another process reads the file.
            let mut at = cached.max(from);
            while at < end.min(until) {
                let len = (end.min(until) - at).min(PIECE_BYTES);
                self.clean_piece(at, len as usize)?;
                at += len;
            }
        }
        Ok(())
    }

    fn clean_piece(&self, offset: u64, len_bytes: usize) -> io::Result<()> {
        let (mut bytes, plain) = (vec![0; len_bytes], self.plain()?);
        let read = read_up_to(plain, &mut bytes, offset)?;
        let left = Blocks::remaining(self.tag, &bytes[..read]);
        if !left.is_empty() {
            // Written back to the disk, which replaces them, so that the range can be read anew.
            plain.sync_data()?;
        }
        for left in left {
            let at = (offset + left) / BLOCK * BLOCK;
            let mut blocks = Blocks::new(self.tag, BLOCK_BYTES);
            let block = blocks.read(&self.direct, at, BLOCK_BYTES)?;
            let _acting = self.identity.assume()?;
            plain.write_all_at(block, at)?;
        }
        Ok(())
    }

    /// Writes bytes of the pipe from `at` on. Returns their number, which is all of them.
    ///
    /// # Errors
    /// Those of `pwrite(2)`: then a part may be written, and later writes fail too.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let result = self.try_write(at, bytes);
        self.errno = self.errno.or(result.err());
        result
    }

    fn try_write(&mut self, at: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let file = self.plain()?;
        let acting = self.identity.assume()?;
        let mut done = 0;
        let result = loop {
            match pwrite(file, &bytes[done..], self.start + at + done as u64) {
                Ok(0) => break Err(Errno::IO),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(errno) => break Err(errno),
            }
            if done == bytes.len() {
                break Ok(done);
            }
        };
        drop(acting);
        self.written.add(at, at + done as u64);
        result
    }

    fn plain(&self) -> Result<&File, Errno> {
        if let Some(file) = self.plain.get() {
            return Ok(file);
        }
        // Opened as root: the program may have made a file that it could not open a second time.
        let file = reopen_to_write(self.direct.as_fd(), self.sync).map_err(|_| Errno::PERM)?;
        Ok(self.plain.get_or_init(|| file))
    }

    /// Ends the writing: ensures that no placeholder stays in the file, and that the file does not
    /// grow behind the pipe's bytes. `moved_bytes` is the daemon's count, none if it is lost;
    /// `again` is the source, if it can be read again. Returns the number of bytes that are in
    /// place from the pipe's beginning on.
    pub fn settle(&mut self, moved_bytes: Option<u64>, again: Option<&FileSource>) -> u64 {
        let there = self.written.first_bytes();
        let mut moved = moved_bytes.unwrap_or(there).min(there);
        // The daemon has seen the bytes that it counts.
        let doubtful = if moved_bytes.is_some() { moved } else { 0 };
        let doubtful: Vec<_> = self.placed.between(doubtful, u64::MAX).collect();
        if doubtful.is_empty() && self.written.end() <= moved {
            return moved;
        }
        let believed = moved;
        self.cut(moved);
        for (from, until) in doubtful {
            let cleaned = self.clean_cache(from..until).map_err(|error| (from, error));
            let repaired = self.repair(from, until, again, &mut moved);
            if let Err((at, error)) = cleaned.and(repaired) {
                // The bytes behind it are not known: the count may be too low.
                log(format_args!("a file that a pipe wrote could not be repaired: {error}"));
                moved = moved.min(at);
            }
        }
        if moved < believed {
            self.cut(moved);
        }
        moved
    }

    /// Truncates the bytes that the pipe has added behind those that it has moved, unless another
    /// writer has appended there.
    fn cut(&self, moved_bytes: u64) {
        let _acting = self.identity.assume();
        // Without a moved byte, no write can have extended the file.
        let end = if moved_bytes > 0 { self.start + moved_bytes } else { 0 };
        let wanted = self.old_size.max(end);
        let own_end = self.start + self.written.end().max(self.placed.end());
        let is_ours = |stat: &Stat| (wanted + 1..=own_end).contains(&(stat.st_size as u64));
        let stat = fstat(&self.direct);
        let cut = stat
            .and_then(|stat| if is_ours(&stat) { ftruncate(&self.direct, wanted) } else { Ok(()) });
        if let Err(error) = cut {
            log(format_args!("a file that a pipe wrote could not be truncated: {error}"));
        }
    }

    /// Replaces placeholders in a range of whole sectors by the bytes that they stand for, or by
    /// zeroes. An error comes with its offset.
    fn repair(
        &self,
        from: u64,
        until: u64,
        again: Option<&FileSource>,
        moved: &mut u64,
    ) -> Result<(), (u64, io::Error)> {
        let plain = self.plain().map_err(|errno| (from, errno.into()))?;
        // Also when it cannot be read: placeholders must go.
        let _acting = self.identity.assume();
        let mut blocks = Blocks::new(self.tag, (until - from).min(PIECE_BYTES) as usize);
        let mut at = from;
        while at < until {
            let len = (until - at).min(PIECE_BYTES) as usize;
            let read = match blocks.read(&self.direct, self.start + at, len) {
                Ok(read) => read,
                // The file ends there.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err((at, error)),
            };
            let end = at + read.len() as u64;
            for left in Blocks::remaining(self.tag, read) {
                let left = at + left;
                let mut bytes = [0; SECTOR_BYTES];
                if again.is_none_or(|source| source.read_at(&mut bytes, left).is_err()) {
                    bytes.fill(0);
                    *moved = (*moved).min(left);
                }
                let bytes = &bytes[..SECTOR_BYTES.min((end - left) as usize)];
                let written = pwrite(plain, bytes, self.start + left);
                if written != Ok(bytes.len()) {
                    let error =
                        written.err().map_or_else(|| io::ErrorKind::WriteZero.into(), Into::into);
                    return Err((left, error));
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Moves the program's position on by the bytes moved, if that was asked for.
    pub fn finish(self, moved_bytes: u64) {
        if self.uses_own_position && moved_bytes > 0 {
            // A regular file's position inside its size can always be set.
            let _ = seek(&self.program, SeekFrom::Start(self.start.saturating_add(moved_bytes)));
        }
    }
}
