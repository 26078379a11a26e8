#![allow(non_snake_case)]

use super::*;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

/// Environment variables: the child's attempt, and the folder for it.
const WHAT: &str = "MILLRACE_TEST_TRIES";
const WHERE: &str = "MILLRACE_TEST_FOLDER";

/// Exit code of a child that may do it.
const MAY: i32 = 10;
/// Exit code of a child that may not do it, and lives.
const MAY_NOT: i32 = 11;

/// Runs this test as a process of its own, confined, that tries one thing.
fn child(what: &str, folder: &Path) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sandbox::tests::confined", "--ignored", "--test-threads=1"])
        .env(WHAT, what)
        .env(WHERE, folder)
        .output()
        .unwrap()
        .status
}

#[test]
#[ignore = "only as a process of its own"]
fn confined() {
    let Ok(what) = std::env::var(WHAT) else { return };
    let folder = std::env::var(WHERE).unwrap();
    let fd = std::fs::File::open(&folder).unwrap();
    give_up_rights(1 << 30, 64, 1 << 20).unwrap();
    leave_folders(std::iter::once(fd.as_fd())).unwrap();
    leave_calls().unwrap();
    let may = attempt(&what, Path::new(&folder), &fd);
    // No handlers that run at an exit, and no output of the test's own.
    // SAFETY: ends the process.
    unsafe { libc::_exit(if may { MAY } else { MAY_NOT }) }
}

fn attempt(what: &str, folder: &Path, fd: &std::fs::File) -> bool {
    use rustix::fs::{Mode, OFlags, openat};
    let open = |path: &Path, flags| openat(fd, path, flags, Mode::RUSR | Mode::WUSR).is_ok();
    let map = |prot| {
        // SAFETY: a new mapping of memory of its own, which nobody uses.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                prot,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        at != libc::MAP_FAILED
    };
    match what {
        "own file" => open(Path::new("own"), OFlags::RDWR | OFlags::CREATE),
        "password" => open(Path::new("/etc/passwd"), OFlags::RDONLY),
        "parent" => open(Path::new(".."), OFlags::RDONLY | OFlags::DIRECTORY),
        "neighbour" => open(&folder.with_file_name("neighbour"), OFlags::RDONLY),
        "link" => open(Path::new("link"), OFlags::RDONLY),
        "memory" => map(libc::PROT_READ | libc::PROT_WRITE),
        "code" => map(libc::PROT_READ | libc::PROT_EXEC),
        // SAFETY: signal 0 is none.
        "signal" => unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) == 0 },
        // SAFETY: the descriptor's flags alone.
        "flags" => unsafe { libc::fcntl(2, libc::F_SETFL, libc::O_NONBLOCK) == 0 },
        // SAFETY: it cuts nothing: the output is no file, and the call is not allowed.
        "log" => unsafe { libc::ftruncate(2, 0) == 0 },
        // SAFETY: each call has arguments that it checks itself.
        "socket" => unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) >= 0 },
        // SAFETY: as above.
        "fork" => unsafe { libc::fork() >= 0 },
        // SAFETY: as above.
        "execute" => unsafe {
            libc::execve(c"/bin/true".as_ptr(), std::ptr::null(), std::ptr::null()) == 0
        },
        // SAFETY: as above.
        "trace" => unsafe { libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0) == 0 },
        // SAFETY: as above.
        "link of a file" => unsafe { libc::link(c"/etc/passwd".as_ptr(), c"own2".as_ptr()) == 0 },
        _ => panic!("{what}"),
    }
}

#[test]
fn abuse_M_only_what_is_its_own_can_be_had() {
    let all = tempfile::tempdir().unwrap();
    let folder = all.path().join("own");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(all.path().join("neighbour"), "secret").unwrap();
    std::os::unix::fs::symlink("../neighbour", folder.join("link")).unwrap();
    for what in ["own file", "memory"] {
        assert_eq!(child(what, &folder).code(), Some(MAY), "{what}");
    }
    for what in ["password", "parent", "neighbour", "link"] {
        assert_eq!(child(what, &folder).code(), Some(MAY_NOT), "{what}");
    }
    for what in
        ["code", "socket", "fork", "execute", "trace", "link of a file", "signal", "flags", "log"]
    {
        assert_eq!(child(what, &folder).signal(), Some(libc::SIGSYS), "{what}");
    }
}
