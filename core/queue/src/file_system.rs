//! File systems of peers' files: which of them may be asked, and which may be mapped.
//!
//! `fstat(2)` and `fstatfs(2)` of a FUSE file are requests to its server, which may be the
//! attacker: they wait, also for a kill. The kernel knows by itself whether a file is in memory,
//! and where it is mounted, so this is looked up first. A mount of another namespace is unknown
//! here, and is asked: it may be a VMM's own view of a local disk. FUSE's kernel side lets only its
//! own user ask, unless it is mounted with `allow_other`.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{AtFlags, StatxFlags};

/// Page size of ordinary mappings.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// `f_type` of hugetlbfs (statfs(2)).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// File systems whose pages come from memory or a local disk, by `f_type`. Memory files (memfds)
/// are on the first two; QEMU's `memory-backend-file` may be on any. Overlay: what can be written
/// there is on its upper layer, which the kernel wants local.
const ALLOWED: [(u64, &str); 7] = [
    (0x0102_1994, "tmpfs"),
    (HUGETLBFS_MAGIC, "hugetlbfs"),
    (0x8584_58f6, "ramfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x794c_7630, "overlay"),
];

/// Refused file systems that are met most often, by name for the error.
const REFUSED: [(u64, &str); 7] = [
    (0x6573_5546, "FUSE"),
    (0x6969, "NFS"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x0102_1997, "9p"),
    (0x00c3_6400, "Ceph"),
    (0x9fa0, "proc"),
];

/// File systems without a block device that the kernel serves by itself, as `/proc/self/mountinfo`
/// names them. Others without a block device wait for a server.
const KERNEL_SERVED: [&str; 8] =
    ["tmpfs", "devtmpfs", "hugetlbfs", "ramfs", "btrfs", "overlay", "proc", "zfs"];

/// Fails when the file's own file system may wait before it answers; the error is a text that says
/// why.
pub(crate) fn check_never_waits(fd: BorrowedFd<'_>) -> Result<(), String> {
    // A file in memory, a memfd above all. Others have no seals.
    if rustix::fs::fcntl_get_seals(fd).is_ok() || is_on_block_device(fd) {
        return Ok(());
    }
    let file = |path: &str| std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"));
    let info = file(&format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    let kind = kind_of(&info, &file("/proc/self/mountinfo")?);
    match kind.as_deref() {
        Some(kind) if KERNEL_SERVED.contains(&kind) => Ok(()),
        Some(kind) => Err(format!("the file is on {kind}, which may wait for somebody")),
        // A pipe(2), a socket, an eventfd; or a mount of another namespace.
        None => Ok(()),
    }
}

/// Whether the file system has a block device: only root mounts those, `fuseblk` included. Cached
/// attributes are enough to tell, so no file system is asked.
fn is_on_block_device(fd: BorrowedFd<'_>) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(fd, c"", flags, StatxFlags::TYPE).is_ok_and(|stat| stat.stx_dev_major != 0)
}

/// File system type of the mount that `fdinfo` names, by `mountinfo` (proc(5)).
fn kind_of(fdinfo: &str, mountinfo: &str) -> Option<String> {
    let mount = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
    let line = mountinfo.lines().find(|line| line.split(' ').next() == Some(mount))?;
    let (_, behind) = line.split_once(" - ")?;
    behind.split(' ').next().map(str::to_owned)
}

/// Fails for file systems where a page fault waits for a server. A sidecore that touches such a
/// page stands still, with all VMs on it, for as long as a server on the network, or an attacker's
/// own FUSE process, likes.
fn check_file_system(magic: u64) -> Result<(), String> {
    let named = |list: &[(u64, &'static str)]| list.iter().find(|f| f.0 == magic).map(|f| f.1);
    if named(&ALLOWED).is_some() {
        return Ok(());
    }
    let allowed = ALLOWED.map(|f| f.1).join(", ");
    let name = named(&REFUSED).unwrap_or("another file system");
    Err(format!("the file is on {name} (type {magic:#x}); allowed are {allowed}"))
}

/// Size of the pages of a mapping of the file; the error says why the file system is refused.
pub(crate) fn page_bytes(fd: BorrowedFd<'_>) -> Result<u64, String> {
    let stat = rustix::fs::fstatfs(fd).map_err(|e| format!("fstatfs: {e}"))?;
    // The kernel's numbers have 32 bits; where the field is signed they may be extended.
    let magic = stat.f_type as u64 & 0xffff_ffff;
    check_file_system(magic)?;
    if magic != HUGETLBFS_MAGIC {
        return Ok(PAGE_BYTES);
    }
    let bytes = stat.f_bsize as u64;
    if bytes.is_power_of_two() && bytes >= PAGE_BYTES {
        Ok(bytes)
    } else {
        Err(format!("huge page size {bytes:#x} is not a power of two"))
    }
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
        check_never_waits(pipe.as_fd()).unwrap();
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        check_never_waits(memory.as_fd()).unwrap();
        for path in ["/proc/self/status", "/dev/zero", "/"] {
            check_never_waits(std::fs::File::open(path).unwrap().as_fd()).unwrap();
        }
    }

    #[test]
    fn abuse_P9_file_systems_that_wait_for_somebody_are_refused_by_name() {
        for (magic, name) in [(0x6573_5546, "FUSE"), (0x6969, "NFS"), (0x0102_1997, "9p")] {
            let text = check_file_system(magic).unwrap_err();
            assert!(text.contains(name) && text.contains("allowed are tmpfs, hugetlbfs"), "{text}");
        }
        assert!(check_file_system(0xdead).unwrap_err().contains("0xdead"));
        for (magic, _) in ALLOWED {
            check_file_system(magic).unwrap();
        }
    }
}
