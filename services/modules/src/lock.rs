//! A folder belongs to one process at a time: the kernel sees to it, and lets go of it when the
//! process has ended, however it did.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::ModulesError;
use crate::limits::{LOCK_PATIENCE, LOCK_TIMEOUT};

/// Time between two looks at a folder that another process has.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Takes a folder for this process alone; false: another one has it.
pub(crate) fn lock(folder: &OwnedFd) -> Result<bool, ModulesError> {
    match flock(folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(e) => Err(ModulesError::io("locking a module's folder")(e)),
    }
}

/// Waits until an earlier process has let go of something that modules have. False: the daemon has
/// gone meanwhile.
///
/// # Errors
/// The other process does not let go: which one it is.
pub(crate) fn wait_for(
    what: &str,
    folder: &OwnedFd,
    control: &OwnedFd,
) -> Result<bool, ModulesError> {
    let (since, mut told) = (Instant::now(), false);
    while !lock(folder)? {
        let waited = since.elapsed();
        if waited >= LOCK_TIMEOUT {
            let why = format!(
                "{what} is locked by {} for {} s: it must end first",
                holder(folder),
                waited.as_secs()
            );
            return Err(ModulesError::Control(why));
        }
        if waited >= LOCK_PATIENCE && !std::mem::replace(&mut told, true) {
            tracing::warn!("{what} is still locked by {}", holder(folder));
        }
        let mut fds = [PollFd::new(control, PollFlags::empty())];
        let _ = poll(&mut fds, Some(&PAUSE));
        if fds[0].revents().contains(PollFlags::HUP) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Holder of the lock, as the kernel tells it.
pub(crate) fn holder(folder: &OwnedFd) -> String {
    let inode = rustix::fs::fstat(folder).map(|stat| stat.st_ino).unwrap_or_default();
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    match find(&locks, inode) {
        Some(pid) => format!("process {pid}"),
        None => "another process".into(),
    }
}

/// The process of a whole-file lock on an inode: `1: FLOCK ADVISORY WRITE 123 08:01:4711 0 EOF`.
fn find(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (kind, pid, of) = (words.next()?, words.nth(2)?, words.next()?);
        let same = of.rsplit(':').next()?.parse() == Ok(inode);
        (kind == "FLOCK" && same).then(|| pid.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_lock_is_found() {
        let text = "1: POSIX  ADVISORY  WRITE 7 00:15:99 0 EOF\n\
                    2: FLOCK  ADVISORY  WRITE 42 fe:00:99 0 EOF\n";
        assert_eq!((find(text, 99), find(text, 9), find("", 99)), (Some(42), None, None));
        let folder = tempfile::tempdir().unwrap();
        let open = || OwnedFd::from(std::fs::File::open(folder.path()).unwrap());
        let (first, second) = (open(), open());
        assert!(lock(&first).unwrap());
        assert!(!lock(&second).unwrap());
        assert_eq!(holder(&second), format!("process {}", std::process::id()));
        drop(first);
        assert!(lock(&second).unwrap());
    }
}
