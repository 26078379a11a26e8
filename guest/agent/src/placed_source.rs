//! File without a lease as the source of a pipe: the agent reads it with direct I/O, over
//! placeholders, and the daemon copies the bytes where its disk is read. Meanwhile the file system
//! keeps the blocks for the file, and first writes newer content of the page cache. Bytes that the
//! daemon has not seen go to it in messages.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use guest_abi::Reason;
use guest_abi::pipe::{BLOCK_BYTES, MAX_TAKE_BYTES, PlacesEnd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use crate::disks::Disks;
use crate::line::{Line, ReadAnswer, ReadRequest};
use crate::placeholders::OverReadBuffer;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Most bytes of one system call. The memory does not begin at a page, so each page is a segment of
/// the request, and a disk has 128 at least in practice; the daemon does not see a request that is
/// cut elsewhere than between blocks.
const PIECE_BYTES: u64 = 512 << 10;
/// Most bytes that a daemon asks for at once, with ample room.
const MAX_REQUEST_BYTES: u64 = 64 << 20;

/// File that is read over placeholders.
#[derive(Debug)]
pub struct PlacedSource {
    direct: File,
    plain: File,
    start: u64,
    tag: [u8; 16],
    disk: u32,
    over: Option<OverReadBuffer>,
}

impl PlacedSource {
    /// Source from `start` of a file that is open for reading; `device` is the number of its file
    /// system's device.
    ///
    /// # Errors
    /// [`Reason::NoLease`]: the file cannot be read over placeholders either. Or the host is lost.
    pub fn new(
        plain: File,
        start: u64,
        device: u64,
        (disks, line): (&Disks, &Arc<Line>),
    ) -> Result<Self, Reason> {
        let place = disks.place_to_read_over(device, line).map_err(|reason| match reason {
            Reason::HostGone | Reason::NoDisk => reason,
            _ => Reason::NoLease,
        })?;
        let direct =
            crate::reopen::reopen_to_read(&plain, OFlags::DIRECT).map_err(|_| Reason::NoLease)?;
        let mut tag = [0; 16];
        getrandom(&mut tag, GetRandomFlags::empty()).map_err(|_| Reason::NoLease)?;
        Ok(Self { direct, plain, start, tag, disk: place.disk, over: None })
    }

    /// Appends the description of this end to a message.
    pub fn write_end(&self, body: &mut Vec<u8>) {
        let skew_bytes = U32::new((self.start % BLOCK) as u32);
        let end = PlacesEnd { tag: self.tag, skew_bytes, disk: U32::new(self.disk) };
        body.extend_from_slice(end.as_bytes());
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.plain
    }

    /// Reads a range that the daemon asks for, in a pipe of `len_bytes`. None: the request breaks
    /// the protocol.
    pub fn serve(&mut self, request: &ReadRequest, len_bytes: u64) -> Option<ReadAnswer> {
        let (at, len) = (request.at, u64::from(request.len_bytes));
        at.checked_add(len).filter(|until| *until <= len_bytes)?;
        if !request.by_placeholders {
            return (len <= MAX_TAKE_BYTES as u64).then(|| self.bytes(at, len as usize));
        }
        let aligned = (self.start + at).is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK);
        if !aligned || len > MAX_REQUEST_BYTES {
            return None;
        }
        Some(match self.read_over(at, len) {
            Ok(read) => ReadAnswer { len_bytes: read as u32, ..ReadAnswer::default() },
            Err(errno) => {
                ReadAnswer { errno: errno.raw_os_error() as u32, ..ReadAnswer::default() }
            }
        })
    }

    fn read_over(&mut self, at: u64, len_bytes: u64) -> Result<u64, Errno> {
        let tag = self.tag;
        let over = self.over.get_or_insert_with(|| OverReadBuffer::new(tag, PIECE_BYTES as usize));
        let mut done = 0;
        while done < len_bytes {
            let want = (len_bytes - done).min(PIECE_BYTES) as usize;
            match over.read(&self.direct, self.start + at + done, at + done, want) {
                // Not whole blocks: the file ends there.
                Ok(read) if read == 0 || !read.is_multiple_of(BLOCK_BYTES) => {
                    return Ok(done + read as u64);
                }
                Ok(read) => done += read as u64,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
    }

    fn bytes(&self, at: u64, len_bytes: usize) -> ReadAnswer {
        let mut bytes = vec![0; len_bytes];
        match read_up_to(&self.plain, &mut bytes, self.start + at) {
            Ok(read) => {
                bytes.truncate(read);
                ReadAnswer { len_bytes: read as u32, errno: 0, bytes }
            }
            Err(error) => {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                ReadAnswer { errno: errno.raw_os_error() as u32, ..ReadAnswer::default() }
            }
        }
    }
}

/// Reads until the end of the file. Returns the number of bytes.
pub fn read_up_to(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source on a file system with direct I/O. No daemon replaces bytes here.
    fn source(bytes: &[u8], start: u64) -> PlacedSource {
        let plain = tempfile::tempfile_in("/var/tmp").unwrap();
        plain.write_all_at(bytes, 0).unwrap();
        let direct = crate::reopen::reopen_to_read(&plain, OFlags::DIRECT).unwrap();
        PlacedSource { direct, plain, start, tag: [3; 16], disk: 0, over: None }
    }

    fn serve(
        source: &mut PlacedSource,
        at: u64,
        len_bytes: u32,
        by_placeholders: bool,
    ) -> Option<ReadAnswer> {
        source.serve(&ReadRequest { at, len_bytes, by_placeholders }, 4 << 20)
    }

    #[test]
    fn it_is_read_to_its_end_and_no_further() {
        let bytes: Vec<u8> = (0..3_000_001_u32).map(|n| (n * 7 + n / 251) as u8).collect();
        for start in [0, 1, 4095, 8192] {
            let mut source = source(&bytes, start);
            let left = bytes.len() as u64 - start;
            let first = (4096 - start % 4096) % 4096;
            let got = serve(&mut source, first, 2 << 20, true).unwrap();
            assert_eq!((got.len_bytes, got.errno, got.bytes.len()), (2 << 20, 0, 0));
            let last = first + (2 << 20);
            let got = serve(&mut source, last, 1 << 20, true).unwrap();
            assert_eq!((u64::from(got.len_bytes), got.errno), (left - last, 0));
            // Bytes that no daemon has seen.
            let got = serve(&mut source, last + 1, 60_000, false).unwrap();
            assert_eq!((got.len_bytes, got.errno), (60_000, 0));
            assert!(got.bytes == bytes[(start + last) as usize + 1..][..60_000]);
            let got = serve(&mut source, left - 10, 4000, false).unwrap();
            assert_eq!(got.bytes, bytes[bytes.len() - 10..]);
            assert_eq!(serve(&mut source, left, 1, false).unwrap(), ReadAnswer::default());
        }
    }

    #[test]
    fn what_makes_no_sense_is_not_read() {
        let mut source = source(&[1; 100_000], 512);
        for (at, len, by_placeholders) in [
            (0, 4096, true),
            (3584, 512, true),
            (3584, 4 << 20, true),
            (u64::MAX, 4096, true),
            (0, 4 << 20, false),
            (0, MAX_TAKE_BYTES as u32 + 1, false),
        ] {
            assert_eq!(
                serve(&mut source, at, len, by_placeholders),
                None,
                "{at} {len} {by_placeholders}"
            );
        }
        assert!(serve(&mut source, 3584, 4096, true).is_some());
    }

    #[test]
    fn memory_that_is_read_over_begins_within_a_page() {
        let mut over = OverReadBuffer::new([3; 16], 8192);
        let bytes = vec![9; 8192];
        let file = source(&bytes, 0).direct;
        assert_eq!(over.read(&file, 0, 4096, 8192), Ok(8192));
        assert!(!over.is_untouched(8192) && !over.is_untouched(512));
        assert_eq!(over.read(&file, 8192, 0, 8192), Ok(0));
        assert!(over.is_untouched(8192));
    }
}
