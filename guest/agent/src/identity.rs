//! Identity of a program: the agent writes files as its user.
//!
//! The agent is root, and file systems treat root differently: it keeps setuid bits of files that
//! it writes, gets the blocks reserved for it, and more than its quota. None of that belongs to the
//! program. So while the agent writes for it, the writing thread has the program's user for file
//! systems (`setfsuid(2)`, which takes the capabilities that concern files along), and the two
//! capabilities that still matter are given up when the agent starts.

use std::fs;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::sys;

/// Process, user and group of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Process; 0: it is in another PID namespace, and so has no number here.
    pid: u32,
    uid: u32,
    gid: u32,
}

/// Guard: while it lives, this thread uses files as the program.
#[derive(Debug)]
pub struct IdentityGuard {
    is_other: bool,
}

impl Identity {
    /// Identity of the process that connected a Unix socket, at the time of the connect.
    ///
    /// # Errors
    /// The descriptor is no such socket.
    pub fn of(socket: BorrowedFd<'_>) -> Result<Self, Errno> {
        let [pid, uid, gid] = sys::peer_credentials(socket)?;
        Ok(Self { pid, uid, gid })
    }

    /// Makes this thread use files as the program until the guard is dropped.
    ///
    /// # Errors
    /// The agent lacks `CAP_SETUID` or `CAP_SETGID`.
    pub fn assume(&self) -> Result<IdentityGuard, Errno> {
        let is_other = (self.uid, self.gid) != (0, 0);
        // Undone if it has failed half-way.
        let acting = IdentityGuard { is_other };
        if is_other && !sys::set_file_user(self.uid, self.gid) {
            return Err(Errno::PERM);
        }
        Ok(acting)
    }

    /// Most bytes that a file of the program may have (`RLIMIT_FSIZE`). None: not known, as the
    /// program has exited, or `/proc` hides it.
    pub fn max_file_bytes(&self) -> Option<u64> {
        // prlimit(2) would need CAP_SYS_RESOURCE.
        parse_limit(&fs::read_to_string(format!("/proc/{}/limits", self.pid)).ok()?)
    }
}

impl Drop for IdentityGuard {
    fn drop(&mut self) {
        // The way back to the IDs of the process as a whole is always allowed.
        let back = !self.is_other || sys::set_file_user(0, 0);
        debug_assert!(back, "back to root");
    }
}

/// Reads the soft limit from the line `Max file size SOFT HARD bytes` of `/proc/PID/limits`.
fn parse_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max file size "))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// Gives up capabilities that would let the agent, or a thread of it that acts as root, write more
/// than a program may: for the calling thread and those that it starts from then on.
///
/// # Errors
/// The kernel refuses it.
pub fn give_up_privileges() -> Result<(), Errno> {
    // Blocks beyond the quota; setuid bits that stay.
    let unwanted = CapabilitySet::SYS_RESOURCE | CapabilitySet::FSETID;
    let mut sets = capabilities(None)?;
    if !sets.effective.union(sets.permitted).intersects(unwanted) {
        return Ok(());
    }
    sets.effective.remove(unwanted);
    sets.permitted.remove(unwanted);
    sets.inheritable.remove(unwanted);
    set_capabilities(None, sets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixStream;

    #[test]
    fn limits_are_found() {
        let pair = UnixStream::pair().unwrap();
        let own = Identity::of(pair.0.as_fd()).unwrap();
        assert_eq!(own.pid, std::process::id());
        assert!(own.max_file_bytes().is_some());
        assert_eq!(Identity { pid: u32::MAX, ..own }.max_file_bytes(), None);
        let line = |value: &str| format!("Max cpu time 1 2 s\nMax file size  {value}  bytes\n");
        assert_eq!(parse_limit(&line("4096 unlimited")), Some(4096));
        assert_eq!(parse_limit(&line("unlimited 7")), Some(u64::MAX));
        assert_eq!(parse_limit(&line("some")), None);
        assert_eq!(parse_limit(""), None);
    }

    #[test]
    fn files_are_made_and_written_as_the_program_would() {
        let nobody = Identity { pid: 1, uid: 65534, gid: 65534 };
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let path = folder.path().join("f");
        let acting = nobody.assume().unwrap();
        let mut file = fs::File::create(&path).unwrap();
        assert!(fs::read("/etc/shadow").is_err());
        drop(acting);
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert!(status.contains("Uid:\t0\t0\t0\t0"), "{status}");
        assert!(fs::read("/etc/shadow").is_ok());
        let got = file.metadata().unwrap();
        assert_eq!((got.uid(), got.gid()), (65534, 65534));
        // The file is not root's, whose setuid bits stay.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        let acting = nobody.assume().unwrap();
        file.write_all(b"x").unwrap();
        drop(acting);
        assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o777);
    }

    #[test]
    fn privileges_are_given_up_by_a_thread_alone() {
        let wanted = CapabilitySet::SYS_RESOURCE | CapabilitySet::FSETID;
        let before = capabilities(None).unwrap();
        let after = std::thread::spawn(|| {
            give_up_privileges().unwrap();
            give_up_privileges().unwrap();
            capabilities(None).unwrap()
        });
        let after = after.join().unwrap();
        assert!(!after.permitted.intersects(wanted) && !after.effective.intersects(wanted));
        assert_eq!(after.effective, before.effective.difference(wanted));
        assert_eq!(capabilities(None).unwrap(), before);
    }
}
