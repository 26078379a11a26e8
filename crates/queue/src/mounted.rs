//! On what kind of file system a peer's file is, learnt without asking that file system.
//!
//! `fstat(2)` and `fstatfs(2)` of a FUSE file are requests to its server, which may be the attacker: they
//! wait, also for a kill. The kernel knows by itself whether a file is in memory, and where it is mounted. A
//! mount of another namespace is unknown here, and is asked: it may be a VMM's own view of a local disk.
//! FUSE's kernel side lets only its own user ask, unless it is mounted with `allow_other`.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{AtFlags, StatxFlags};

/// Kinds that answer by themselves, as `/proc/self/mountinfo` names them, among those that have no block
/// device: the others there wait for a server.
const OWN_WORD: [&str; 8] =
    ["tmpfs", "devtmpfs", "hugetlbfs", "ramfs", "btrfs", "overlay", "proc", "zfs"];

/// Whether the file's own file system may be asked. The error is a text that says why not.
pub(crate) fn may_be_asked(fd: BorrowedFd<'_>) -> Result<(), String> {
    // A file in memory, a memfd above all. Others have no seals.
    if rustix::fs::fcntl_get_seals(fd).is_ok() || is_on_block_device(fd) {
        return Ok(());
    }
    let file = |path: &str| std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"));
    let info = file(&format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let kind = kind_of(&info, &file("/proc/self/mountinfo")?);
    match kind.as_deref() {
        Some(kind) if OWN_WORD.contains(&kind) => Ok(()),
        Some(kind) => Err(format!("the file is on {kind}, which may wait for somebody")),
        // A pipe, a socket, an eventfd; or a mount of another namespace.
        None => Ok(()),
    }
}

/// Only root mounts those, FUSE's kind of it included. What is cached is enough to tell: nobody is asked.
fn is_on_block_device(fd: BorrowedFd<'_>) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(fd, c"", flags, StatxFlags::TYPE).is_ok_and(|stat| stat.stx_dev_major != 0)
}

/// The kind of the mount that `fdinfo` names, by `mountinfo` (proc(5)).
fn kind_of(fdinfo: &str, mountinfo: &str) -> Option<String> {
    let mount = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
    let line = mountinfo.lines().find(|line| line.split(' ').next() == Some(mount))?;
    let (_, behind) = line.split_once(" - ")?;
    behind.split(' ').next().map(str::to_owned)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn abuse_P9_a_servers_file_is_told_by_its_mount() {
        let mounts = "22 28 0:21 / /proc rw,nosuid - proc proc rw\n\
                      91 28 0:50 / /mnt/x\\040y rw shared:4 - fuse.sshfs me@host:/ rw,user_id=1000\n";
        let kind = |id| kind_of(&format!("pos:\t0\nflags:\t02\nmnt_id:\t{id}\nino:\t1\n"), mounts);
        assert_eq!(kind(91).as_deref(), Some("fuse.sshfs"));
        assert_eq!(kind(22).as_deref(), Some("proc"));
        assert_eq!((kind(9), kind(2)), (None, None));
        assert_eq!(kind_of("pos:\t0\n", mounts), None);
    }

    #[test]
    fn what_answers_by_itself_is_asked() {
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        may_be_asked(pipe.as_fd()).unwrap();
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        may_be_asked(memory.as_fd()).unwrap();
        for path in ["/proc/self/status", "/dev/zero", "/"] {
            may_be_asked(std::fs::File::open(path).unwrap().as_fd()).unwrap();
        }
    }
}
