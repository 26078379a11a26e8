//! Claim on a port's inflight region: one daemon at a time may start queues on it.
//!
//! A killed daemon's reads may still be in the disk, aimed at guest memory, when the next daemon
//! finds them in the inflight region and does them again: the guest would have its answer, use the
//! buffer for something else, and then the old read would land there (D3). So whoever starts queues
//! on a region first takes a lock on its file, in an opening of its own, and gives that opening to
//! each ring ([`Disk::keep_open`]): the kernel lets go of it with the ring's last request, whatever
//! became of the process. Disks that are written have the lock on their image besides; read-only
//! images are shared, and have this one only.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Longest wait for an earlier daemon's requests. They end within milliseconds, unless the disk
/// hangs; a front end that locks its own region holds up its own session only.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(5);

/// Interval between two tries to take the lock: the kernel offers no wait with a limit.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// Lock on an inflight region's file, held by an opening of its own.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
    /// Device and inode.
    id: (u64, u64),
}

impl Claim {
    /// Claims the region's file. `None` when it cannot be opened a second time (the front end's
    /// file, in another user's hands): then there is no protection. An error of kind `WouldBlock`
    /// when another daemon still has it after `limit`.
    pub fn new(region: BorrowedFd<'_>, limit: Duration) -> io::Result<Option<Self>> {
        let id = id(region)?;
        let path = format!("/proc/self/fd/{}", region.as_raw_fd());
        let file = match File::options().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(error) => {
                tracing::warn!("inflight region not locked against an earlier daemon: {error}");
                return Ok(None);
            }
        };
        let begin = Instant::now();
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self { file, id })),
                Err(Errno::AGAIN) if begin.elapsed() < limit => std::thread::sleep(RETRY_INTERVAL),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether this claim is on `region`.
    pub fn is_on(&self, region: BorrowedFd<'_>) -> bool {
        id(region).is_ok_and(|id| id == self.id)
    }

    /// The opening that has the lock.
    pub fn file(&self) -> &File {
        &self.file
    }
}

fn id(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}
