//! A network namespace for twins: a TAP, and nothing else.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, Once};

use base::sync::lock;
use flow::TWIN_MAC;
use net::tap::{Tap, TapConfig};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use crate::error::PipeError;
use crate::netlink::{DefaultRoute, MAIN_TABLE, Netlink};
use crate::sockopt::knows_rto_max;

/// Name of the TAP, in every namespace the same.
pub const TAP_NAME: &str = "twin";

/// Most addresses of a namespace. A port has 16 that were learned, or some that were configured. A
/// guest that changes its addresses must not fill the kernel's tables.
pub const MAX_ADDRESSES: usize = 64;

/// Length of the TAP's queue of frames that wait for the switch: a few super-packets of as many
/// twins as there may be. The kernel's 1,000 are too few for them, and what does not fit is sent
/// again.
const QUEUE_FRAMES: u32 = 4096;

/// Index of the loopback interface: it is the first of every namespace.
const LOOPBACK: u32 = 1;

/// Neighbour to which all IPv4 frames go, so that a thousand peers need one entry of the host's
/// neighbour table and not a thousand. No host has the address (RFC 7600), and nobody asks for it.
const GATEWAY_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 8));

/// Neighbour to which all IPv6 frames go: see [`GATEWAY_V4`].
const GATEWAY_V6: IpAddr =
    IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0x6d69, 0x6c6c, 0x7261, 0x6365));

/// Congestion windows that twins can begin with, in segments, beside the kernel's own (10). A
/// socket takes it from its route, and that from the socket's mark; the mark is the place here,
/// from 1.
const FIRST_WINDOWS: [u32; 7] = [16, 32, 64, 128, 256, 512, 1024];

/// Settings below `/proc/sys/net`, written before there is an interface to follow them. Some
/// namespaces begin with the host's settings, so those that matter are named here. What a kernel
/// does not have, it does not do.
const SETTINGS: &[(&str, &str)] = &[
    // Nothing is passed on, believed or answered here but TCP.
    ("ipv4/ip_forward", "0"),
    ("ipv4/conf/{}/accept_redirects", "0"),
    ("ipv4/conf/{}/accept_source_route", "0"),
    ("ipv4/icmp_echo_ignore_all", "1"),
    ("ipv6/conf/{}/disable_ipv6", "0"),
    ("ipv6/conf/{}/forwarding", "0"),
    ("ipv6/conf/{}/accept_redirects", "0"),
    ("ipv6/conf/{}/accept_source_route", "0"),
    ("ipv6/icmp/echo_ignore_all", "1"),
    // No addresses but those that are given, at once, and no word about them.
    ("ipv6/conf/{}/accept_ra", "0"),
    ("ipv6/conf/{}/autoconf", "0"),
    ("ipv6/conf/{}/accept_dad", "0"),
    ("ipv6/conf/{}/router_solicitations", "0"),
    ("ipv6/conf/default/addr_gen_mode", "1"),
    // Twins have their guests' ports, 80 for one, without a right of the daemon's that reaches
    // further.
    ("ipv4/ip_unprivileged_port_start", "0"),
    // The peers' frames come from everywhere.
    ("ipv4/conf/{}/rp_filter", "0"),
    // A twin knows what its guest knows, not what other twins learned.
    ("ipv4/tcp_no_metrics_save", "1"),
    // A disk that takes its time is no reason to begin slowly again.
    ("ipv4/tcp_slow_start_after_idle", "0"),
    // The segment size is the guest's affair.
    ("ipv4/tcp_mtu_probing", "0"),
    // A twin listens to routers that tell of a smaller MTU.
    ("ipv4/ip_no_pmtu_disc", "0"),
];

/// Setting for more retransmissions. Where their timeout is bounded to a second or so
/// ([`crate::twin`]), the kernel's 15 attempts would be over after 14 seconds of silence. With
/// these it is four minutes.
const ATTEMPTS: (&str, &str) = ("ipv4/tcp_retries2", "255");

/// The smallest MTU of a link with IPv6 (RFC 8200).
const IPV6_MIN_MTU: u16 = 1280;

/// A namespace without a name, held by this value and by the sockets made in it.
#[derive(Debug)]
pub struct Namespace {
    vm: String,
    file: OwnedFd,
    inside: Mutex<Inside>,
}

#[derive(Debug)]
struct Inside {
    netlink: Netlink,
    link: u32,
    addresses: Vec<IpAddr>,
}

impl Namespace {
    /// Makes one with a TAP, whose other end is returned. `mtu` is that of the TAP: at least
    /// [`IPV6_MIN_MTU`]. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN.
    pub fn new(vm: &str, mtu: u16) -> Result<(Self, Tap), PipeError> {
        let failed = |what, source| PipeError::Io { vm: vm.to_owned(), what, source };
        let builder = std::thread::Builder::new().name("namespace".into());
        // A thread of its own leaves the host's namespace, and ends.
        std::thread::scope(|scope| {
            let thread = builder
                .spawn_scoped(scope, || make(vm, mtu))
                .map_err(|e| failed("starting a thread for their namespace", e))?;
            thread.join().unwrap_or_else(|_| {
                Err(failed("making their namespace", io::Error::other("its thread panicked")))
            })
        })
    }

    /// Logs, once, if none can be made: else that is first heard of when an agent comes.
    pub fn report_missing_rights(vm: &str) {
        static TRIED: Once = Once::new();
        TRIED.call_once(|| {
            // It goes at once.
            if let Err(error) = Self::new(vm, IPV6_MIN_MTU) {
                tracing::error!("no pipes to or from connections: {error}");
            }
        });
    }

    /// Gives the TAP an address of the guest's. One that it has already is no error.
    pub fn add_address(&self, address: IpAddr) -> Result<(), PipeError> {
        let mut inside = lock(&self.inside);
        if inside.addresses.contains(&address) {
            return Ok(());
        }
        let vm = || self.vm.clone();
        if !is_of_a_host(address) {
            return Err(PipeError::BadAddress { vm: vm(), address });
        }
        if inside.addresses.len() == MAX_ADDRESSES {
            return Err(PipeError::TooManyAddresses { vm: vm(), address, limit: MAX_ADDRESSES });
        }
        inside.netlink.add_address(inside.link, address).map_err(|source| PipeError::Io {
            vm: vm(),
            what: "adding an address",
            source,
        })?;
        inside.addresses.push(address);
        Ok(())
    }

    /// Moves the calling thread into it.
    pub fn enter(&self) -> Result<(), PipeError> {
        enter(self.file.as_fd()).map_err(|source| PipeError::Io {
            vm: self.vm.clone(),
            what: "entering their namespace",
            source,
        })
    }
}

/// Moves the calling thread into a namespace.
fn enter(file: impl AsFd) -> io::Result<()> {
    let network = Some(LinkNameSpaceType::Network);
    Ok(rustix::thread::move_into_link_name_space(file.as_fd(), network)?)
}

/// Whether an interface of a VM can have this address: not a group, not a place in the host itself.
fn is_of_a_host(address: IpAddr) -> bool {
    let is_reserved = match address {
        IpAddr::V4(v4) => v4.is_broadcast() || v4.octets()[0] == 0,
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_some(),
    };
    let is_gateway = address == GATEWAY_V4 || address == GATEWAY_V6;
    let is_special = address.is_unspecified() || address.is_loopback() || address.is_multicast();
    !(is_reserved || is_gateway || is_special)
}

/// Mark of a socket that shall begin with at most this congestion window.
pub(crate) fn window_mark(cwnd: u32) -> u32 {
    FIRST_WINDOWS.iter().take_while(|first| **first <= cwnd).count() as u32
}

/// Makes a namespace, in a thread of its own, which stays in it.
fn make(vm: &str, mtu: u16) -> Result<(Namespace, Tap), PipeError> {
    let failed = |what| {
        let vm = vm.to_owned();
        move |source: io::Error| PipeError::Io { vm, what, source }
    };
    // SAFETY: only the network namespace is left; no other thread shares what that changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
        .map_err(|e| failed("making their namespace")(e.into()))?;
    let file = File::open("/proc/thread-self/ns/net").map_err(failed("opening their namespace"))?;
    let attempts = knows_rto_max().then_some(ATTEMPTS);
    for &(name, value) in SETTINGS.iter().chain(&attempts) {
        write_setting(vm, name, value)?;
    }
    let config =
        TapConfig { name: TAP_NAME.into(), offloads: true, no_arp: true, ..TapConfig::default() };
    let tap = Tap::open(&config).map_err(|source| PipeError::Tap { vm: vm.to_owned(), source })?;
    let netlink = Netlink::open().map_err(failed("opening a routing socket"))?;
    let link = tap_index().map_err(failed("looking for the TAP"))?;
    netlink
        .set_link(link, TWIN_MAC, mtu, QUEUE_FRAMES)
        .map_err(failed("setting the TAP's address, MTU and queue"))?;
    netlink.set_up(LOOPBACK).map_err(failed("bringing loopback up"))?;
    add_routes(&netlink, link).map_err(failed("adding routes"))?;
    let inside = Mutex::new(Inside { netlink, link, addresses: Vec::new() });
    Ok((Namespace { vm: vm.to_owned(), file: file.into(), inside }, tap))
}

/// The TAP's number in the calling thread's namespace.
pub(crate) fn tap_index() -> io::Result<u32> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(netdevice::name_to_index(&socket, TAP_NAME)?)
}

/// Writes a setting. A name with `{}` stands for two: for all interfaces that there are, and for
/// those that come.
fn write_setting(vm: &str, name: &str, value: &'static str) -> Result<(), PipeError> {
    let names = if name.contains("{}") {
        vec![name.replace("{}", "all"), name.replace("{}", "default")]
    } else {
        vec![name.to_owned()]
    };
    for name in names {
        match std::fs::write(Path::new("/proc/sys/net").join(&name), value) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(source) => {
                return Err(PipeError::Sysctl { vm: vm.to_owned(), name, value, source });
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

fn add_routes(netlink: &Netlink, link: u32) -> io::Result<()> {
    let has_v6 = Path::new("/proc/sys/net/ipv6").exists();
    for gateway in [Some(GATEWAY_V4), has_v6.then_some(GATEWAY_V6)].into_iter().flatten() {
        let route = DefaultRoute { table: MAIN_TABLE, link, gateway, first_cwnd: None };
        netlink.add_default_route(&route)?;
        // Without policy routing in the kernel twins begin with its own window.
        if let Err(error) = add_window_routes(netlink, link, gateway) {
            tracing::debug!(%gateway, "twins begin with a small window: {error}");
        }
    }
    Ok(())
}

fn add_window_routes(netlink: &Netlink, link: u32, gateway: IpAddr) -> io::Result<()> {
    for (table, window) in (1..).zip(FIRST_WINDOWS) {
        let route = DefaultRoute { table, link, gateway, first_cwnd: Some(window) };
        netlink.add_default_route(&route)?;
        netlink.add_mark_rule(gateway, table.into(), table)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
