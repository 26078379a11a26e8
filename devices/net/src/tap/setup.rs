//! Making a TAP interface and setting it up.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use crate::error::NetError;
use frame::{ETH_LEN, VNET_LEN};

/// Settings of the interface.
#[derive(Debug, Clone, Default)]
pub struct TapConfig {
    /// Interface name, at most 15 bytes; `%d` is replaced by a number.
    pub name: String,
    /// Bridge to attach it to; none: the administrator's business.
    pub bridge: Option<String>,
    /// Let the host hand up partial checksums and super-packets.
    pub offloads: bool,
    /// The host asks nobody for addresses (ARP, neighbour discovery): all frames go to the
    /// interface's own.
    pub no_arp: bool,
    /// The longest packet that the interface must take; 0: as it is.
    pub mtu: u16,
}

/// Longest packet of a TAP interface: with its Ethernet header it may have 65,535 bytes.
const MAX_TAP_MTU: u16 = u16::MAX - ETH_LEN as u16;

pub(super) struct Opened {
    pub file: OwnedFd,
    pub name: String,
    pub uso: bool,
}

/// Adds an interface to a bridge (`linux/sockios.h`).
const SIOCBRADDIF: libc::Ioctl = 0x89a2;

/// Longest interface name, without its final zero (`IFNAMSIZ`).
const MAX_NAME: usize = libc::IFNAMSIZ - 1;

/// How long an interface that another program has is waited for. A killed daemon has its TAP until
/// the kernel is done with its io_uring, which is some time after the process has ended: on a
/// loaded machine tenths of a second.
const BUSY_TIMEOUT: Duration = Duration::from_secs(3);

/// Pause between two tries.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

pub(super) fn open(config: &TapConfig) -> Result<Opened, NetError> {
    let fail = |what| {
        let name = config.name.clone();
        move |source: io::Error| NetError::Tap { name, what, source }
    };
    if config.name.is_empty() || config.name.len() > MAX_NAME {
        return Err(fail("checking its name (1 to 15 bytes)")(io::ErrorKind::InvalidInput.into()));
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open("/dev/net/tun", flags, Mode::empty())
        .map_err(|e| fail("opening /dev/net/tun")(e.into()))?;
    let name = attach_free(&file, &config.name).map_err(fail("making the interface"))?;
    let vnet_len = VNET_LEN as libc::c_int;
    set(&file, libc::TUNSETVNETHDRSZ, &vnet_len).map_err(fail("setting the header length"))?;
    // Headers are little-endian whatever the host is (virtio 1.x).
    set(&file, libc::TUNSETVNETLE, &(1 as libc::c_int)).map_err(fail("setting byte order"))?;
    let uso = set_offloads(&file, config.offloads).map_err(fail("setting offloads"))?;
    let socket = control_socket().map_err(fail("opening a control socket"))?;
    // Before it joins: a bridge takes the smallest MTU of its members, for all of them.
    raise_mtu_by(&socket, &name, config.mtu).map_err(fail("setting its MTU"))?;
    if let Some(bridge) = &config.bridge {
        join(&socket, &name, bridge).map_err(fail("attaching it to its bridge"))?;
    }
    bring_up(&socket, &name, config.no_arp).map_err(fail("bringing it up"))?;
    Ok(Opened { file, name, uso })
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an `ifreq` of zeroes is a valid one: it has integers, addresses and bytes.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() > MAX_NAME {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// One ioctl that reads (and may write) `*arg`.
fn ioctl<T>(file: &OwnedFd, number: libc::Ioctl, arg: *mut T) -> io::Result<()> {
    // SAFETY: every caller below passes a pointer to a live value of the type the ioctl takes.
    match unsafe { libc::ioctl(file.as_raw_fd(), number, arg) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The TUN ioctls that take a pointer to an integer.
fn set(file: &OwnedFd, number: libc::Ioctl, value: &libc::c_int) -> io::Result<()> {
    ioctl(file, number, std::ptr::from_ref(value).cast_mut())
}

/// Does [`attach`] once nobody else has the interface, waiting at most `BUSY_TIMEOUT`.
fn attach_free(file: &OwnedFd, name: &str) -> io::Result<String> {
    let since = Instant::now();
    loop {
        match attach(file, name) {
            Err(e) if is_busy(&e) && since.elapsed() < BUSY_TIMEOUT => {
                std::thread::sleep(BUSY_PAUSE);
            }
            answer => return answer,
        }
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}

fn attach(file: &OwnedFd, name: &str) -> io::Result<String> {
    let mut request = request(name)?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    ioctl(file, libc::TUNSETIFF, &raw mut request)?;
    let bytes = request.ifr_name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Asks for everything, then for everything but UDP super-packets (Linux before 6.2). Returns
/// whether those are understood.
fn set_offloads(file: &OwnedFd, wanted: bool) -> io::Result<bool> {
    let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let udp = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let ask = |bits: libc::c_uint| {
        // This one takes the value itself in place of a pointer.
        let value = bits as usize as *mut libc::c_void;
        ioctl(file, libc::TUNSETOFFLOAD, value)
    };
    let uso = ask(tcp | udp).is_ok();
    match (wanted, uso) {
        (true, true) => {}
        (true, false) => ask(tcp)?,
        (false, _) => ask(0)?,
    }
    Ok(uso)
}

/// Has an interface take packets of `mtu` bytes. Never fewer than it does already: others may use
/// it. Returns the longest that it takes then.
pub fn raise_mtu(name: &str, mtu: u16) -> Result<u16, NetError> {
    let fail = |source| NetError::Tap { name: name.to_owned(), what: "setting its MTU", source };
    let socket = control_socket().map_err(fail)?;
    raise_mtu_by(&socket, name, mtu).map_err(fail)
}

/// Longest packet that an interface takes.
pub fn mtu_of(name: &str) -> Result<u16, NetError> {
    let fail = |source| NetError::Tap { name: name.to_owned(), what: "reading its MTU", source };
    read_mtu(&control_socket().map_err(fail)?, name).map_err(fail)
}

fn read_mtu(socket: &OwnedFd, name: &str) -> io::Result<u16> {
    let mut request = request(name)?;
    ioctl(socket, libc::SIOCGIFMTU as libc::Ioctl, &raw mut request)?;
    // SAFETY: the kernel has just filled it in.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    // Loopback's is longer than any packet.
    Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
}

fn raise_mtu_by(socket: &OwnedFd, name: &str, mtu: u16) -> io::Result<u16> {
    let (now, wanted) = (read_mtu(socket, name)?, mtu.min(MAX_TAP_MTU));
    if wanted <= now {
        return Ok(now);
    }
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = wanted.into();
    ioctl(socket, libc::SIOCSIFMTU as libc::Ioctl, &raw mut request)?;
    Ok(wanted)
}

fn control_socket() -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    Ok(socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

fn join(socket: &OwnedFd, name: &str, bridge: &str) -> io::Result<()> {
    let wanted = CString::new(name)?;
    // SAFETY: a zero-terminated string.
    let index = unsafe { libc::if_nametoindex(wanted.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    let mut request = request(bridge)?;
    request.ifr_ifru.ifru_ifindex = index as libc::c_int;
    match ioctl(socket, SIOCBRADDIF, &raw mut request) {
        // In a bridge already: in this one by an earlier daemon, or an administrator knows why.
        Err(e) if is_busy(&e) => Ok(()),
        other => other,
    }
}

fn bring_up(socket: &OwnedFd, name: &str, no_arp: bool) -> io::Result<()> {
    let mut request = request(name)?;
    ioctl(socket, libc::SIOCGIFFLAGS as libc::Ioctl, &raw mut request)?;
    // SAFETY: the kernel has just filled the flags in.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    // Both at once: a host that finds it up with ARP begins to talk.
    let quiet = if no_arp { libc::IFF_NOARP } else { 0 };
    request.ifr_ifru.ifru_flags = flags | (libc::IFF_UP | quiet) as libc::c_short;
    ioctl(socket, libc::SIOCSIFFLAGS as libc::Ioctl, &raw mut request)
}
