//! Copies from one file of the host to another, without passing through this process: shared where
//! the file system can (reflink), copied once where it cannot.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use crate::limits::SPLICE_BYTES;

/// Copies a range. `UnexpectedEof`: the source is shorter.
pub(crate) fn copy_range(
    (from, mut from_at): (BorrowedFd<'_>, u64),
    (to, mut to_at): (BorrowedFd<'_>, u64),
    len_bytes: u64,
) -> io::Result<()> {
    let mut left = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    while left > 0 {
        // Shares blocks where both files lie on a file system that can, and copies else.
        let got = rustix::fs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), left);
        match got {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => left -= n,
            Err(Errno::INTR) => {}
            // Different file systems, or one of both is no regular file.
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                return splice_range((from, from_at), (to, to_at), left);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Copies a range through a pipe(2): pages of the source, copied into those of the sink.
fn splice_range(
    (from, mut from_at): (BorrowedFd<'_>, u64),
    (to, mut to_at): (BorrowedFd<'_>, u64),
    len_bytes: usize,
) -> io::Result<()> {
    let (read_end, write_end) = kernel_pipe(PipeFlags::empty())?;
    let mut left = len_bytes;
    while left > 0 {
        let want = left.min(SPLICE_BYTES);
        let got =
            retry(|| splice(from, Some(&mut from_at), &write_end, None, want, SpliceFlags::MOVE))?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut held = got;
        while held > 0 {
            let read_end = read_end.as_fd();
            let put =
                retry(|| splice(read_end, None, to, Some(&mut to_at), held, SpliceFlags::MOVE))?;
            if put == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            held -= put;
        }
        left -= got;
    }
    Ok(())
}

/// Makes a pipe(2) for [`SPLICE_BYTES`]: its read end and its write end.
pub(crate) fn kernel_pipe(flags: PipeFlags) -> io::Result<(OwnedFd, OwnedFd)> {
    let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC | flags)?;
    // Refused: the smaller one will do.
    let _ = fcntl_setpipe_size(&write_end, SPLICE_BYTES);
    Ok((read_end, write_end))
}

/// Repeats a system call that was interrupted.
fn retry(mut call: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Writes all of it.
pub(crate) fn write_all(to: BorrowedFd<'_>, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = retry(|| rustix::io::pwrite(to, bytes, at))?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        (bytes, at) = (&bytes[n..], at + n as u64);
    }
    Ok(())
}

/// Reads all of it. `UnexpectedEof`: there is less.
pub(crate) fn read_all(from: BorrowedFd<'_>, mut at: u64, mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = retry(|| rustix::io::pread(from, &mut *bytes, at))?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (bytes, at) = (&mut bytes[n..], at + n as u64);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::testing::pattern;

    fn file(bytes: &[u8]) -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    #[test]
    fn both_ways_copy_just_the_range() {
        let bytes = pattern(3 << 20);
        let from = file(&bytes);
        let ranges = [(0, 0, 3 << 20), (5, 4096, (2 << 20) + 17), (4096, 1, 1), (0, 9, 0)];
        for (from_at, to_at, len) in ranges {
            for spliced in [false, true] {
                let to = file(&vec![0xee; 4 << 20]);
                let (source, sink) = ((from.as_fd(), from_at as u64), (to.as_fd(), to_at as u64));
                match spliced {
                    true => splice_range(source, sink, len).unwrap(),
                    false => copy_range(source, sink, len as u64).unwrap(),
                }
                let mut want = vec![0xee; 4 << 20];
                want[to_at..to_at + len].copy_from_slice(&bytes[from_at..from_at + len]);
                let mut got = vec![0; 4 << 20];
                read_all(to.as_fd(), 0, &mut got).unwrap();
                assert!(got == want, "{from_at} {to_at} {len} {spliced}");
            }
        }
    }

    #[test]
    fn a_source_that_ends_early_is_an_error() {
        let (from, to) = (file(&pattern(5000)), file(&[]));
        let end =
            |r: io::Result<()>| assert_eq!(r.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        end(copy_range((from.as_fd(), 10), (to.as_fd(), 0), 5000));
        end(splice_range((from.as_fd(), 10), (to.as_fd(), 0), 5000));
        end(read_all(from.as_fd(), 10, &mut [0; 5000]));
    }

    #[test]
    fn memory_goes_to_a_file_and_back() {
        let to = file(&[]);
        write_all(to.as_fd(), 100, &pattern(9000)).unwrap();
        let mut got = vec![0; 9000];
        read_all(to.as_fd(), 100, &mut got).unwrap();
        assert_eq!(got, pattern(9000));
    }
}
