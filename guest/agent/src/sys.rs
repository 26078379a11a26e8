//! System calls that no library has: all of the agent's `unsafe` code.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::ioctl::{Getter, Opcode, Updater, ioctl, opcode};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Most extents that are asked for at a time.
pub const FIEMAP_EXTENTS: usize = 256;

/// `struct fiemap_extent`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FiemapExtent {
    pub logical: u64,
    pub physical: u64,
    pub len_bytes: u64,
    pub reserved: [u64; 2],
    pub flags: u32,
    pub reserved2: [u32; 3],
}

/// `struct fiemap` with room for extents.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Fiemap {
    start: u64,
    len_bytes: u64,
    flags: u32,
    mapped: u32,
    room: u32,
    reserved: u32,
    extents: [FiemapExtent; FIEMAP_EXTENTS],
}

/// Number of the call, which encodes the size of the head alone.
const FS_IOC_FIEMAP: Opcode = opcode::read_write::<[u64; 4]>(b'f', 11);
const FIEMAP_FLAG_SYNC: u32 = 1;

/// Reads the first extents of a range of a file, after its dirty pages were written.
pub fn fiemap(file: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<Vec<FiemapExtent>> {
    let mut map = Box::new(Fiemap::new_zeroed());
    (map.start, map.len_bytes) = (start, len_bytes);
    (map.flags, map.room) = (FIEMAP_FLAG_SYNC, FIEMAP_EXTENTS as u32);
    // SAFETY: the call reads and writes `struct fiemap` and at most `room` extents behind it, which
    // is what `Fiemap` has; any bytes are a valid value of it.
    unsafe { ioctl(file, Updater::<FS_IOC_FIEMAP, Fiemap>::new(&mut map)) }?;
    Ok(map.extents[..FIEMAP_EXTENTS.min(map.mapped as usize)].to_vec())
}

/// `struct fsxattr`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Fsxattr {
    xflags: u32,
    others: [u32; 6],
}

const FS_IOC_FSGETXATTR: Opcode = opcode::read::<Fsxattr>(b'X', 31);

/// Reads a file's `FS_XFLAG_*`.
pub fn xflags(file: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: the call writes one `struct fsxattr`.
    Ok(unsafe { ioctl(file, Getter::<FS_IOC_FSGETXATTR, Fsxattr>::new()) }?.xflags)
}

/// Process, user and group of the program that connected a Unix socket. Not by rustix: there the
/// process is never 0, which it is for another PID namespace.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> Result<[u32; 3], Errno> {
    let mut who = [0u32; 3];
    let mut len = size_of_val(&who) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the call writes at most `len` bytes: a `struct ucred`, which is three numbers of 32
    // bits.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, who.as_mut_ptr().cast(), &raw mut len)
    };
    match result {
        0 => Ok(who),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Option `SO_NETNS_COOKIE` (Linux 5.14).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Cookie of a socket's network namespace: no two namespaces ever have the same. Not for Unix
/// sockets.
pub fn network_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut cookie = 0u64;
    let mut len = size_of_val(&cookie) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, SO_NETNS_COOKIE);
    // SAFETY: the call writes at most `len` bytes: one number of 64 bits.
    let result = unsafe {
        let value = (&raw mut cookie).cast();
        libc::getsockopt(socket.as_raw_fd(), level, name, value, &raw mut len)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

const F_SETOWN: libc::c_int = 8;

fn fcntl(file: BorrowedFd<'_>, command: libc::c_int, argument: libc::c_int) -> io::Result<i32> {
    // SAFETY: the commands used here take a number and touch no memory.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Number of this process, cached: the C library asks the kernel each time.
fn own_pid() -> libc::c_int {
    static OWN: OnceLock<u32> = OnceLock::new();
    *OWN.get_or_init(std::process::id) as libc::c_int
}

/// Takes a read lease, with `SIGIO` to this process when it is to be broken.
pub fn take_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    // Before the lease: else the kernel takes the thread for the owner, and an exited thread gets
    // no signal.
    fcntl(file, F_SETOWN, own_pid())?;
    fcntl(file, libc::F_SETLEASE, libc::F_RDLCK as libc::c_int).map(|_| ())
}

/// Whether no process waits to break the lease.
pub fn is_lease_unbroken(file: BorrowedFd<'_>) -> bool {
    fcntl(file, libc::F_GETLEASE, 0).is_ok_and(|kind| kind == libc::F_RDLCK as libc::c_int)
}

/// Releases a lease.
pub fn release_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    fcntl(file, libc::F_SETLEASE, libc::F_UNLCK as libc::c_int).map(|_| ())
}

/// First part of `struct tcp_info`, which kernels have since Linux 4.19.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TcpInfo {
    pub state: u8,
    pub not_used: [u8; 4],
    pub options: u8,
    /// The peer's window scale in the low half, ours in the high one.
    pub scales: u8,
    pub not_used2: u8,
    pub not_used3: [u32; 2],
    pub send_mss: u32,
    pub not_used4: [u32; 12],
    pub rtt_us: u32,
    pub not_used5: [u32; 2],
    pub send_cwnd: u32,
    pub not_used6: [u32; 5],
    pub not_used7: [u64; 3],
    pub bytes_received: u64,
    pub segments: [u32; 2],
    pub not_sent_bytes: u32,
    pub not_used8: [u32; 3],
    pub not_used9: [u64; 4],
    pub delivered: [u32; 2],
    pub bytes_sent: u64,
    pub bytes_retransmitted: u64,
}

/// Reads a socket option into bytes; returns its length.
fn getsockopt(fd: BorrowedFd<'_>, level: i32, name: i32, into: &mut [u8]) -> io::Result<usize> {
    let mut len = into.len() as libc::socklen_t;
    let at = into.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `len` bytes to `at`, which are borrowed for us alone.
    let result = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, at, &mut len) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(len as usize) }
}

/// Reads `TCP_INFO`.
pub fn tcp_info(socket: BorrowedFd<'_>) -> io::Result<TcpInfo> {
    let mut info = TcpInfo::new_zeroed();
    let len = getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_bytes())?;
    if len < size_of::<TcpInfo>() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(info)
}

/// Whether another protocol sits on top of TCP in the kernel, such as kTLS.
pub fn has_ulp(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut name = [0; 16];
    let len = getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_ULP, &mut name)?;
    Ok(len > 0 && name[0] != 0)
}

/// Largest page size of any machine.
const MAX_PAGE_BYTES: u64 = 64 << 10;

/// Parts of a range of a file that are in the page cache: pairs of beginning and end, in whole
/// pages.
pub fn cached_ranges(file: BorrowedFd<'_>, from: u64, until: u64) -> io::Result<Vec<(u64, u64)>> {
    let from = from / MAX_PAGE_BYTES * MAX_PAGE_BYTES;
    let len = (until - from) as usize;
    // SAFETY: it takes a number and touches no memory.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let mut pages = vec![0_u8; len.div_ceil(page)];
    let (nothing, shared) = (libc::PROT_NONE, libc::MAP_SHARED);
    // SAFETY: a new mapping where the kernel wants, which nobody reads and which ends below.
    // `mincore` writes a byte for each page of it, as many as `pages` has.
    let known = unsafe {
        let fd = file.as_raw_fd();
        let at = libc::mmap(std::ptr::null_mut(), len, nothing, shared, fd, from as libc::off_t);
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let result = libc::mincore(at, len, pages.as_mut_ptr());
        let known = if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        libc::munmap(at, len);
        known
    };
    known?;
    let mut found: Vec<(u64, u64)> = Vec::new();
    for (at, _) in (from..).step_by(page).zip(&pages).filter(|(_, page)| **page & 1 != 0) {
        match found.last_mut() {
            Some(last) if last.1 == at => last.1 += page as u64,
            _ => found.push((at, at + page as u64)),
        }
    }
    Ok(found)
}

/// Gives this thread the file system access of another user and group. Returns false when that is
/// not allowed. Bypasses the C library, which might change all threads.
pub fn set_file_user(uid: u32, gid: u32) -> bool {
    // No user has this number: the call only reads.
    const NONE: u32 = u32::MAX;
    // SAFETY: both calls take a number and touch no memory. They return what was before.
    let now = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        (libc::syscall(libc::SYS_setfsuid, NONE), libc::syscall(libc::SYS_setfsgid, NONE))
    };
    now == (uid.into(), gid.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;
    use std::os::fd::AsFd;

    #[test]
    fn structures_are_those_of_the_kernel() {
        assert_eq!((size_of::<FiemapExtent>(), offset_of!(Fiemap, extents)), (56, 32));
        assert_eq!((FS_IOC_FIEMAP, FS_IOC_FSGETXATTR), (0xC020_660B, 0x801C_581F));
        let offsets = [
            offset_of!(TcpInfo, options),
            offset_of!(TcpInfo, scales),
            offset_of!(TcpInfo, send_mss),
            offset_of!(TcpInfo, rtt_us),
            offset_of!(TcpInfo, send_cwnd),
            offset_of!(TcpInfo, bytes_received),
            offset_of!(TcpInfo, not_sent_bytes),
            offset_of!(TcpInfo, bytes_sent),
            size_of::<TcpInfo>(),
        ];
        assert_eq!(offsets, [5, 6, 16, 68, 80, 128, 144, 200, 216]);
    }

    #[test]
    fn pages_in_the_cache_are_found() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::tempfile_in(".").unwrap();
        file.set_len(1 << 20).unwrap();
        let found = |from, until| cached_ranges(file.as_fd(), from, until).unwrap();
        assert_eq!(found(0, 1 << 20), []);
        file.write_all_at(&[1; 10_000], 200_000).unwrap();
        let pages = [(196_608, 212_992)];
        assert_eq!(found(0, 1 << 20), pages);
        assert_eq!(found(131_072, 212_000), pages);
        assert_eq!(found(0, 196_608), []);
    }

    #[test]
    fn options_of_a_tcp_socket_can_be_read() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let info = tcp_info(client.as_fd()).unwrap();
        assert_eq!((info.state, info.bytes_sent, info.not_sent_bytes), (1, 0, 0));
        assert!(info.send_mss > 500 && info.send_cwnd > 0, "{info:?}");
        assert!(!has_ulp(client.as_fd()).unwrap());
    }
}
