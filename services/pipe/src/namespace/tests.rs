//! Against the kernel; needs root.
#![allow(non_snake_case)]

use std::net::{TcpListener, TcpStream, UdpSocket};

use super::*;
use crate::testing::{TapEnd, inside};

fn namespace() -> (Namespace, TapEnd) {
    let (namespace, tap) = Namespace::new("test", 9000).unwrap();
    (namespace, TapEnd(tap))
}

fn ip(args: &[&str]) -> String {
    let out = std::process::Command::new("ip").args(args).output().unwrap();
    assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn has_a_quiet_tap_and_nothing_else() {
    let (namespace, tap) = namespace();
    assert_eq!(tap.0.name(), TAP_NAME);
    let (up, links, routes) = inside(&namespace, || {
        (ip(&["-o", "link", "show", "up"]), ip(&["-o", "link", "show", TAP_NAME]), {
            ip(&["route"]) + &ip(&["-6", "route"])
        })
    });
    let names: Vec<_> = up.lines().map(|line| line.split(": ").nth(1).unwrap()).collect();
    assert_eq!(names, ["lo", "twin"], "{up}");
    assert!(links.contains("NOARP") && links.contains("mtu 9000"), "{links}");
    assert!(links.contains("02:4d:52:54:57:4e") && links.contains("qlen 4096"), "{links}");
    assert_eq!(routes.matches("default via").count(), 2, "{routes}");
    // Also no link-local address, which would speak by itself.
    let addresses = inside(&namespace, || ip(&["-o", "addr", "show", TAP_NAME]));
    assert_eq!(addresses, "");
}

#[test]
fn settings_are_as_wanted() {
    let (namespace, _tap) = namespace();
    inside(&namespace, || {
        for &(name, value) in SETTINGS.iter().chain(knows_rto_max().then_some(&ATTEMPTS)) {
            let name = name.replace("{}", "all");
            let found = std::fs::read_to_string(Path::new("/proc/sys/net").join(&name)).unwrap();
            assert_eq!(found.trim(), value, "{name}");
        }
        for name in ["ipv4/conf/twin/rp_filter", "ipv6/conf/twin/accept_ra"] {
            let found = std::fs::read_to_string(Path::new("/proc/sys/net").join(name)).unwrap();
            assert_eq!(found.trim(), "0", "{name}");
        }
    });
    assert_ne!(
        std::fs::read_to_string("/proc/sys/net/ipv4/tcp_retries2").unwrap().trim(),
        "255",
        "the host's own is left alone"
    );
}

#[test]
fn addresses_are_added_once_quietly_and_up_to_a_limit() {
    let (namespace, mut tap) = namespace();
    let (v4, v6) = ("10.7.0.2".parse().unwrap(), "fd07::2".parse().unwrap());
    for address in [v4, v6, v4, v6] {
        namespace.add_address(address).unwrap();
    }
    tap.nothing_before(&namespace, v4, "10.7.0.1".parse().unwrap());
    // Usable at once.
    tap.nothing_before(&namespace, v6, "fd07::1".parse().unwrap());
    // Given by someone else before: fine.
    inside(&namespace, || ip(&["addr", "add", "10.7.0.3/32", "dev", TAP_NAME]));
    namespace.add_address("10.7.0.3".parse().unwrap()).unwrap();
    for last in 4..=MAX_ADDRESSES as u8 {
        namespace.add_address(IpAddr::from([10, 7, 0, last])).unwrap();
    }
    namespace.add_address(v6).unwrap();
    let error = namespace.add_address(IpAddr::from([10, 7, 1, 1])).unwrap_err().to_string();
    assert!(error.contains("one address too many; the limit is 64"), "{error}");
    let shown = inside(&namespace, || ip(&["-o", "addr", "show", TAP_NAME]));
    assert_eq!(shown.lines().count(), MAX_ADDRESSES, "{shown}");
    assert!(!shown.contains("tentative"), "{shown}");
}

#[test]
fn addresses_that_no_guest_can_have_are_refused() {
    let (namespace, _tap) = namespace();
    for address in [
        "0.0.0.0",
        "0.1.2.3",
        "127.0.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "192.0.0.8",
        "::",
        "::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "fe80::6d69:6c6c:7261:6365",
    ] {
        let error = namespace.add_address(address.parse().unwrap()).unwrap_err();
        assert!(matches!(error, PipeError::BadAddress { .. }), "{address}: {error}");
    }
}

/// A socket in the namespace reaches no socket of the host, whatever it connects to: the packets
/// come out of the TAP.
#[test]
fn abuse_I_the_host_is_not_reachable() {
    let (namespace, mut tap) = namespace();
    let local = "10.7.0.2".parse().unwrap();
    namespace.add_address(local).unwrap();
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let heard = UdpSocket::bind(("0.0.0.0", port)).unwrap();
    heard.set_nonblocking(true).unwrap();
    let mut of_the_host: Vec<IpAddr> = ip(&["-o", "-4", "addr"])
        .lines()
        .filter_map(|line| line.split_whitespace().nth(3)?.split('/').next()?.parse().ok())
        .filter(|address: &IpAddr| !address.is_loopback())
        .collect();
    // And a neighbour that the host may have.
    of_the_host.push("10.0.0.1".parse().unwrap());
    inside(&namespace, || {
        let refused = TcpStream::connect(("127.0.0.1", port)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let socket = UdpSocket::bind((local, 0)).unwrap();
        for address in &of_the_host {
            socket.send_to(b"hello", (*address, port)).unwrap();
        }
    });
    for _ in &of_the_host {
        assert!(tap.any().ends_with(b"hello"));
    }
    assert_eq!(heard.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

/// A frame for another address than the namespace's goes nowhere, not even back.
#[test]
fn abuse_I_nothing_is_passed_on() {
    let (namespace, mut tap) = namespace();
    let local: IpAddr = "10.7.0.2".parse().unwrap();
    namespace.add_address(local).unwrap();
    for to in [[10, 7, 0, 9], [127, 0, 0, 1], [10, 7, 0, 2]] {
        let mut frame = Vec::new();
        let echo = etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 7], TWIN_MAC)
            .ipv4([10, 7, 0, 1], to, 64)
            .icmpv4_echo_request(1, 1);
        echo.write(&mut frame, b"ping").unwrap();
        tap.inject(&frame);
    }
    tap.nothing_before(&namespace, local, "10.7.0.1".parse().unwrap());
}

/// Many peers share one entry of the host's neighbour table, which has room for about a thousand.
#[test]
fn a_thousand_peers_are_one_neighbour() {
    let (namespace, mut tap) = namespace();
    let local: IpAddr = "10.7.0.2".parse().unwrap();
    namespace.add_address(local).unwrap();
    let socket = inside(&namespace, || UdpSocket::bind((local, 0)).unwrap());
    for peer in 0..2000u16 {
        let [high, low] = peer.to_be_bytes();
        socket.send_to(b"x", (IpAddr::from([10, 8, high, low]), 9)).unwrap();
        assert!(tap.any().ends_with(b"x"));
    }
    let neighbours =
        inside(&namespace, || ip(&["-4", "neigh", "show", "nud", "all", "dev", TAP_NAME]));
    assert!(neighbours.lines().count() <= 2, "{neighbours}");
}

#[test]
fn marks_are_those_of_the_next_smaller_window() {
    let marks = [0, 1, 15, 16, 31, 32, 1023, 1024, u32::MAX].map(window_mark);
    assert_eq!(marks, [0, 0, 0, 1, 1, 2, 6, 7, 7]);
}
