//! QEMU's image locks: QEMU, its tools and we keep each other out of an image as two QEMUs do.
//!
//! Byte 100 + n of the image is locked for reading by each opening that holds permission n, byte
//! 200 + n by each that does not share it (QEMU, block/file-posix.c). Such locks do not conflict
//! with each other: an opening first takes all of its own, then tests whether one of another stands
//! against them, and lets go if so. Of two that come at once both may be refused, and neither
//! waits.
//!
//! Daemons before this protocol locked the whole file, for writing or for reading. A whole-file
//! read lock does not conflict with those above, so a writer also has one byte for itself
//! ([`WRITER_BYTE`]): old readers then find the image locked. It also decides between two writers
//! of ours that come at once.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::BlockError;

/// Reads what was written, nothing half done.
const CONSISTENT_READ: u64 = 0;
/// Changes the guest's data.
const WRITE: u64 = 1;
/// Changes the length of the file: qcow2 grows, a raw image is padded to whole blocks.
const RESIZE: u64 = 3;

/// First byte of held permissions (QEMU: `RAW_LOCK_PERM_BASE`).
const HELD_BASE: u64 = 100;
/// First byte of permissions that are not shared (QEMU: `RAW_LOCK_SHARED_BASE`).
const UNSHARED_BASE: u64 = 200;
/// Byte that only our writers lock, for writing; QEMU has no use for it.
const WRITER_BYTE: u64 = 300;

/// Permissions of a writer: QEMU's for a guest's disk, and the right to grow the file.
const WRITER_HOLDS: &[u64] = &[CONSISTENT_READ, WRITE, RESIZE];
/// Permissions of a reader, of a disk as of a backing file.
const READER_HOLDS: &[u64] = &[CONSISTENT_READ];
/// Permissions that neither shares. Both share reading: images that are not written have many
/// readers.
const UNSHARED: &[u64] = &[WRITE, RESIZE];

/// Takes the locks of a reader or a writer, or names the lock that stands against them. They belong
/// to the opening: the kernel releases them with its last descriptor, also after `kill -9`.
pub(crate) fn take(fd: &impl AsRawFd, path: &Path, read_only: bool) -> Result<(), BlockError> {
    let result = try_take(fd, if read_only { READER_HOLDS } else { WRITER_HOLDS }, read_only);
    let error = match result {
        Ok(None) => return Ok(()),
        Ok(Some(obstacle)) => {
            BlockError::Locked { path: path.to_path_buf(), obstacle, holders: String::new() }
        }
        Err(error) => BlockError::file("cannot lock", path)(error),
    };
    release(fd);
    Err(error)
}

/// Releases all locks of this opening.
pub(crate) fn release(fd: &impl AsRawFd) {
    // An error leaves them to the kernel, which releases them with the file.
    let _ = set(fd, libc::F_UNLCK, 0, 0);
}

fn try_take(fd: &impl AsRawFd, holds: &[u64], read_only: bool) -> io::Result<Option<&'static str>> {
    // Whoever is refused may try again soon, and should not stand against others each time.
    if let Some(obstacle) = test(fd, holds)? {
        return Ok(Some(obstacle));
    }
    let is_taken = |set: io::Result<()>| match set {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(true),
        other => other.map(|()| false),
    };
    if !read_only && is_taken(set(fd, libc::F_WRLCK, WRITER_BYTE, 1))? {
        return Ok(Some(obstacle(fd, WRITER_BYTE)?.unwrap_or("another daemon writes it")));
    }
    let held = holds.iter().map(|permission| HELD_BASE + permission);
    for byte in held.chain(UNSHARED.iter().map(|permission| UNSHARED_BASE + permission)) {
        if is_taken(set(fd, libc::F_RDLCK, byte, 1))? {
            // Nobody of this protocol locks these for writing.
            return Ok(Some(obstacle(fd, byte)?.unwrap_or(WHOLE_FILE)));
        }
    }
    test(fd, holds)
}

/// Looks for a lock of another opening that stands against holding these permissions and not
/// sharing [`UNSHARED`].
fn test(fd: &impl AsRawFd, holds: &[u64]) -> io::Result<Option<&'static str>> {
    let against_ours = UNSHARED.iter().map(|permission| HELD_BASE + permission);
    for byte in against_ours.chain(holds.iter().map(|permission| UNSHARED_BASE + permission)) {
        let found = obstacle(fd, byte)?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

const WHOLE_FILE: &str = "another program locks the whole file, as older versions of millrace do";

/// Meaning of another opening's lock on this byte; `None` without such a lock.
fn obstacle(fd: &impl AsRawFd, byte: u64) -> io::Result<Option<&'static str>> {
    let mut lock = request(libc::F_WRLCK, byte, 1);
    // SAFETY: the descriptor is open and `lock` a valid `struct flock` that the call may change.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if i32::from(lock.l_type) == libc::F_UNLCK {
        return Ok(None);
    }
    const HELD_WRITE: u64 = HELD_BASE + WRITE;
    const HELD_RESIZE: u64 = HELD_BASE + RESIZE;
    const UNSHARED_WRITE: u64 = UNSHARED_BASE + WRITE;
    const UNSHARED_RESIZE: u64 = UNSHARED_BASE + RESIZE;
    Ok(Some(match byte {
        // Whoever locks from the first byte to the end locks no permissions.
        _ if lock.l_start == 0 && lock.l_len == 0 => WHOLE_FILE,
        WRITER_BYTE => "another daemon writes it",
        HELD_WRITE => "another process has it open for writing",
        HELD_RESIZE => "another process may change its size",
        UNSHARED_WRITE => "another process uses it and lets nobody write to it",
        UNSHARED_RESIZE => "another process uses it and lets nobody change its size",
        _ => "another process lets nobody read it",
    }))
}

fn request(kind: libc::c_int, start: u64, len: u64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start as libc::off_t,
        l_len: len as libc::off_t,
        l_pid: 0,
    }
}

/// Sets the lock of this opening on `len` bytes (0: all that follow) to `kind`.
fn set(fd: &impl AsRawFd, kind: libc::c_int, start: u64, len: u64) -> io::Result<()> {
    let request = request(kind, start, len);
    // SAFETY: the descriptor is open and `request` a valid `struct flock` for the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
