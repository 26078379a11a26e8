//! A TAP in a fresh network namespace, against the kernel's own stack. Needs root.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};

use super::*;

/// Runs `f` in a network namespace of its own, on a thread of its own.
fn in_namespace(f: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        // SAFETY: the namespace is left with the thread, which nobody else uses.
        let left = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(left, 0, "unshare: {}", io::Error::last_os_error());
        f();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn ip(args: &str) {
    let status = std::process::Command::new("ip").args(args.split(' ')).status().unwrap();
    assert!(status.success(), "ip {args}");
}

fn open() -> Tap {
    let config = TapConfig { name: "mrtest%d".into(), offloads: true, ..TapConfig::default() };
    let tap = Tap::open(&config).unwrap();
    ip(&format!("addr add 10.99.0.1/24 dev {}", tap.name()));
    ip(&format!("neigh add 10.99.0.2 lladdr 02:00:00:00:00:02 dev {}", tap.name()));
    tap
}

/// The next frame from the kernel that carries UDP over IPv4 (it also sends IPv6 by itself).
fn next_udp(tap: &mut Tap) -> Vec<u8> {
    loop {
        tap.refill().unwrap();
        if let Some(frame) = tap.receive().map(<[u8]>::to_vec) {
            tap.release();
            if frame[24..26] == [8, 0] && frame[35] == 17 {
                return frame;
            }
            continue;
        }
        // SAFETY: the ring is open as long as the TAP is.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(tap.event_fd().unwrap()) };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => panic!("poll: {e}"),
        }
    }
}

/// A UDP datagram from 10.99.0.2:7 to the host's socket.
fn datagram(port: u16, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; VNET_LEN];
    etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 2], [0xff; 6])
        .ipv4([10, 99, 0, 2], [10, 99, 0, 1], 64)
        .udp(7, port)
        .write(&mut out, payload)
        .unwrap();
    out
}

fn slices(bytes: &[u8], step: usize) -> Vec<IoSlice> {
    let piece = |p: &[u8]| IoSlice { iov_base: p.as_ptr().cast_mut().cast(), iov_len: p.len() };
    bytes.chunks(step).map(piece).collect()
}

#[test]
fn frames_cross_between_the_tap_and_a_socket_in_order() {
    in_namespace(|| {
        let mut tap = open();
        let socket = UdpSocket::bind("10.99.0.1:4000").unwrap();
        for round in 0..20 {
            for n in 0..40u16 {
                socket.send_to(&n.to_be_bytes().repeat(100), "10.99.0.2:7").unwrap();
            }
            for n in 0..40u16 {
                let frame = next_udp(&mut tap);
                assert_eq!(frame[54..56], n.to_be_bytes(), "round {round}");
                assert_eq!(frame.len(), 12 + 14 + 20 + 8 + 200);
            }
        }
        let frames: Vec<_> = (0..SEND_SLOTS as u8).map(|n| datagram(4000, &[n; 99])).collect();
        for frame in &frames {
            // SAFETY: `frames` outlives the flush.
            unsafe { tap.send(&slices(frame, 25)).unwrap() };
        }
        // SAFETY: nothing is queued by a refused send.
        let full = unsafe { tap.send(&slices(&frames[0], 25)) };
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(tap.flush().unwrap(), 0);
        let mut got = [0; 200];
        for n in 0..SEND_SLOTS as u8 {
            assert_eq!(socket.recv(&mut got).unwrap(), 99);
            assert_eq!(got[..99], [n; 99]);
        }
    });
}

#[test]
fn a_frame_the_kernel_cannot_take_is_counted() {
    in_namespace(|| {
        let mut tap = open();
        let good = datagram(4000, b"x");
        // A checksum far behind the end of the frame.
        let mut bad = good.clone();
        bad[..10].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0]);
        for frame in [&good, &bad, &good] {
            // SAFETY: both frames outlive the flush.
            unsafe { tap.send(&slices(frame, 4096)).unwrap() };
        }
        assert_eq!(tap.flush().unwrap(), 1);
        assert_eq!(tap.flush().unwrap(), 0);
    });
}

/// A ring that refuses to submit stands in for a kernel without memory.
#[test]
fn reads_that_could_not_be_submitted_are_submitted_later() {
    in_namespace(|| {
        let mut tap = open();
        let ring = IoUring::builder().setup_r_disabled().build(2 * BUFFERS as u32).unwrap();
        tap.receiver = Receiver::new(ring);
        for _ in 0..3 {
            assert!(tap.refill().is_err());
            assert_eq!((tap.receiver.in_kernel, tap.receiver.waiting), (2, true));
        }
        tap.receiver.ring.submitter().register_enable_rings().unwrap();
        let socket = UdpSocket::bind("10.99.0.1:4000").unwrap();
        for n in 0..100u8 {
            socket.send_to(&[n], "10.99.0.2:7").unwrap();
        }
        for n in 0..100u8 {
            assert_eq!(next_udp(&mut tap)[54], n);
        }
    });
}

#[test]
fn a_received_frame_stays_until_released() {
    in_namespace(|| {
        let mut tap = open();
        let socket = UdpSocket::bind("10.99.0.1:4000").unwrap();
        socket.send_to(b"first", "10.99.0.2:7").unwrap();
        // Skips what the kernel says by itself.
        let first = next_udp(&mut tap);
        assert_eq!(first[54..], *b"first");
        for n in 0..200u8 {
            socket.send_to(&[n], "10.99.0.2:7").unwrap();
        }
        // More than there are buffers: the rest waits in the kernel, none is lost.
        for n in 0..200u8 {
            assert_eq!(next_udp(&mut tap)[54], n);
        }
    });
}

#[test]
fn with_all_buffers_full_nothing_more_is_read_and_nothing_lost() {
    in_namespace(|| {
        let mut tap = open();
        let socket = UdpSocket::bind("10.99.0.1:4000").unwrap();
        for n in 0..100u8 {
            socket.send_to(&[n], "10.99.0.2:7").unwrap();
        }
        // The first of them is read by the waiter, the others by bursts: no wait is needed, since
        // all of them are in the kernel's queue.
        while tap.receiver.ready.len() < BUFFERS {
            tap.refill().unwrap();
        }
        assert!(tap.receiver.free.is_empty());
        tap.refill().unwrap();
        assert_eq!((tap.receiver.in_kernel, tap.receiver.waiting), (0, false));
        for n in 0..100u8 {
            assert_eq!(next_udp(&mut tap)[54], n);
        }
    });
}

#[test]
fn super_packets_come_up_whole() {
    in_namespace(|| {
        let mut tap = open();
        if !tap.takes_uso() {
            return;
        }
        let socket = UdpSocket::bind("10.99.0.1:4000").unwrap();
        let size: libc::c_int = 1000;
        // SAFETY: the option takes an integer by address and length.
        let set = unsafe {
            let at = (&raw const size).cast();
            libc::setsockopt(socket.as_fd().as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, at, 4)
        };
        assert_eq!(set, 0);
        socket.send_to(&[5; 20_000], "10.99.0.2:7").unwrap();
        let frame = next_udp(&mut tap);
        assert_eq!((frame[1], u16::from_le_bytes([frame[4], frame[5]])), (5, 1000));
        assert_eq!(frame.len(), 12 + 14 + 20 + 8 + 20_000);
    });
}

#[test]
fn dropping_takes_the_waiting_read_back() {
    in_namespace(|| {
        let mut tap = open();
        while tap.receive().is_some() {
            tap.release();
        }
        tap.refill().unwrap();
        tap.receive();
        assert!(tap.receiver.cancel(), "the kernel gave the buffers back");
        assert_eq!(tap.receiver.in_kernel, 0);
    });
}

#[test]
fn bridges_and_names() {
    in_namespace(|| {
        ip("link add mrbr0 type bridge");
        let config = |name: &str, bridge: &str| TapConfig {
            name: name.into(),
            bridge: Some(bridge.into()),
            ..TapConfig::default()
        };
        let tap = Tap::open(&config("mrt0", "mrbr0")).unwrap();
        let shown = std::process::Command::new("ip")
            .args(["link", "show", "master", "mrbr0"])
            .output()
            .unwrap();
        let text = String::from_utf8(shown.stdout).unwrap();
        assert!(text.contains("mrt0") && text.contains("UP"), "{text}");
        drop(tap);
        let missing = Tap::open(&config("mrt1", "nosuch")).unwrap_err().to_string();
        assert!(missing.contains("TAP mrt1: attaching it to its bridge"), "{missing}");
        let long = Tap::open(&config("a_name_with_sixteen", "mrbr0")).unwrap_err().to_string();
        assert!(long.contains("1 to 15 bytes"), "{long}");
    });
}

/// A bridge has the MTU of the least of its members: a TAP must not be that one.
#[test]
#[allow(non_snake_case)]
fn abuse_N6_the_tap_takes_what_the_ports_take() {
    in_namespace(|| {
        ip("link add mrbr0 type bridge");
        ip("link add mrnic type veth peer name mrfar");
        ip("link set mrnic mtu 9000 master mrbr0 up");
        ip("link set mrfar mtu 9000 up");
        let config = |mtu| TapConfig {
            name: "mrjumbo".into(),
            bridge: Some("mrbr0".into()),
            mtu,
            ..TapConfig::default()
        };
        let mut tap = Tap::open(&config(9000)).unwrap();
        let mtus = || ["mrjumbo", "mrbr0"].map(|name| mtu_of(name).unwrap());
        assert_eq!(mtus(), [9000, 9000]);
        ip("link set mrbr0 up");
        ip("addr add 10.99.0.1/24 dev mrbr0");
        ip("neigh add 10.99.0.2 lladdr 02:00:00:00:00:02 dev mrbr0");
        let socket = UdpSocket::bind("10.99.0.1:4000").unwrap();
        let payload = vec![7; 9000 - 28];
        socket.send_to(&payload, "10.99.0.2:7").unwrap();
        assert_eq!(next_udp(&mut tap).len(), VNET_LEN + 14 + 9000, "in one piece");
        // More is taken for a port that comes, and never less.
        assert_eq!(raise_mtu("mrjumbo", 1500).unwrap(), 9000);
        assert_eq!(raise_mtu("mrjumbo", u16::MAX).unwrap(), u16::MAX - 14);
        assert_eq!(mtus(), [u16::MAX - 14, 9000]);
        assert!(raise_mtu("nosuch", 1500).unwrap_err().to_string().contains("TAP nosuch"));
    });
}

#[test]
fn without_arp_frames_go_to_the_interface_itself_and_nothing_goes_first() {
    in_namespace(|| {
        let config = TapConfig { name: "mrquiet".into(), no_arp: true, ..TapConfig::default() };
        let mut tap = Tap::open(&config).unwrap();
        ip("addr add 10.99.0.1/24 dev mrquiet");
        let socket = UdpSocket::bind("10.99.0.1:4000").unwrap();
        socket.send_to(b"first", "10.99.0.2:7").unwrap();
        let frame = next_udp(&mut tap);
        assert_eq!(frame[54..], *b"first");
        assert_eq!(frame[12..18], frame[18..24], "to and from the same address");
    });
}

/// A TAP whose owner leaves late, as that of a killed daemon: the kernel ends its ring after the
/// process.
#[test]
fn a_tap_that_its_last_owner_is_about_to_leave_is_waited_for() {
    in_namespace(|| {
        let config = TapConfig { name: "mrleft0".into(), ..TapConfig::default() };
        let last = Tap::open(&config).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let leaver = std::thread::spawn(move || {
            told.recv().unwrap();
            // The other one tries meanwhile: each try is a system call on the interface that is
            // there.
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(last);
        });
        tell.send(()).unwrap();
        assert_eq!(Tap::open(&config).unwrap().name(), "mrleft0");
        leaver.join().unwrap();
    });
}
