//! Against the kernel; needs root. The peer is played by hand, at the TAP.
#![allow(non_snake_case)]

use std::net::TcpListener;
use std::os::fd::AsRawFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::namespace::Namespace;
use crate::testing::{ONLY_ACK, PATIENCE, Say, Seen, TapEnd, inside};
use flow::TWIN_MAC;

const MSS: usize = 1000;
const SEND_SEQ: u32 = 0xffff_fc00;
const RECEIVE_SEQ: u32 = 0x7fff_ffff;
const TIMESTAMP: u32 = 0xffff_ff01;
const ALL: u8 = option::TIMESTAMPS | option::SACK | option::WINDOW_SCALE;

const V4: [&str; 2] = ["10.7.0.2", "203.0.113.9"];
const V6: [&str; 2] = ["fd07::2", "2001:db8::9"];
const LINK_LOCAL: [&str; 2] = ["fe80::2", "fe80::9"];

struct Bed {
    namespace: Namespace,
    tap: TapEnd,
    local: IpAddr,
    remote: IpAddr,
}

fn bed([local, remote]: [&str; 2]) -> Bed {
    let (namespace, tap) = Namespace::new("test", 65_521).unwrap();
    let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
    namespace.add_address(local).unwrap();
    Bed { namespace, tap: TapEnd(tap), local, remote }
}

impl Bed {
    fn state(&self, remote_port: u16, options: u8) -> TwinState {
        TwinState {
            local: (self.local, 80).into(),
            remote: (self.remote, remote_port).into(),
            options,
            send_scale: 5,
            receive_scale: 7,
            mss: MSS as u16,
            send_seq: SEND_SEQ,
            receive_seq: RECEIVE_SEQ,
            send_window_bytes: 60_000,
            // A multiple of the scale, and not 65,535 or more, which takes a scale.
            receive_window_bytes: 0xff80,
            timestamp: TIMESTAMP,
            congestion: *b"cubic\0\0\0\0\0\0\0\0\0\0\0",
            cwnd: 10,
            // So long that timers do not run out while a busy machine runs this.
            rtt_us: 30_000_000,
            reads: false,
        }
    }

    fn create(&self, state: &TwinState) -> Result<Twin, PipeError> {
        inside(&self.namespace, || Twin::create(state))
    }

    fn twin(&self, options: u8) -> (Twin, TwinState) {
        let state = self.state(4000, options);
        (self.create(&state).unwrap(), state)
    }

    fn nothing_before(&mut self) {
        self.tap.nothing_before(&self.namespace, self.local, self.remote);
    }

    /// An acknowledgement of the peer's, up to so many bytes.
    fn acknowledge(&mut self, state: &TwinState, bytes: u32, seen: &Seen) {
        self.answer(state, (bytes, 2000), seen);
    }

    /// The same with a window.
    fn answer(&mut self, state: &TwinState, (bytes, window): (u32, u16), seen: &Seen) {
        let say = Say {
            seq: RECEIVE_SEQ,
            ack: SEND_SEQ.wrapping_add(bytes),
            window,
            timestamps: seen.timestamps.map(|(value, _)| (777, value)),
            ..Say::default()
        };
        self.tap.say((state.remote, state.local), &say);
    }
}

/// Bytes that say where they are.
fn content(len: usize) -> Vec<u8> {
    (0..len as u32).flat_map(u32::to_le_bytes).take(len).collect()
}

fn give(twin: &Twin, bytes: &[u8]) {
    assert_eq!(rustix::net::send(twin, bytes, rustix::net::SendFlags::empty()), Ok(bytes.len()));
}

fn wait_until(what: impl Fn() -> bool) {
    let until = std::time::Instant::now() + PATIENCE;
    while !what() {
        assert!(std::time::Instant::now() < until);
        std::thread::yield_now();
    }
}

fn wait_acked(twin: &Twin, left_bytes: u32) {
    wait_until(|| twin.unacked_bytes().unwrap() == left_bytes);
}

/// The first segments of a connection are exactly what the guest would have sent; for all
/// combinations of options. What shows only in answers is asked for.
fn first_segments(addresses: [&str; 2]) {
    let mut bed = bed(addresses);
    for options in 0..8 {
        let state = bed.state(4000 + u16::from(options), options);
        let has = |bit| options & bit != 0;
        let twin = bed.create(&state).unwrap();
        bed.nothing_before();
        give(&twin, &content(3 * MSS));
        let seen = bed.tap.bytes(3 * MSS);
        assert_eq!((seen.from, seen.to), (state.local, state.remote));
        assert_eq!((&seen.macs[..6], &seen.macs[6..]), (&TWIN_MAC[..], &TWIN_MAC[..]));
        assert_eq!((seen.seq, seen.ack, seen.flags), (SEND_SEQ, RECEIVE_SEQ, ONLY_ACK));
        assert_eq!(seen.payload, content(3 * MSS));
        assert_eq!(usize::from(seen.gso_size), MSS, "options {options}");
        let scale = if has(option::WINDOW_SCALE) { 7 } else { 0 };
        assert_eq!(u32::from(seen.window), state.receive_window_bytes >> scale);
        assert_eq!(seen.timestamps.is_some(), has(option::TIMESTAMPS));
        if let Some((value, echo)) = seen.timestamps {
            let later = value.wrapping_sub(TIMESTAMP);
            assert!((1..20_000).contains(&later), "{later} ms later");
            assert_eq!(echo, 0, "it has not heard of the peer's");
        }
        assert_eq!(seen.first_sack, None);
        // Something out of order: the answer says whether there are selective acknowledgements.
        let ahead = RECEIVE_SEQ.wrapping_add(100);
        let timestamps = seen.timestamps.map(|(value, _)| (777, value));
        let say = Say { seq: ahead, ack: SEND_SEQ, window: 900, timestamps, ..Say::default() };
        bed.tap.say((state.remote, state.local), &Say { payload: vec![1; 50], ..say });
        let seen = bed.tap.tcp();
        assert_eq!((seen.flags, seen.ack, seen.payload.len()), (ONLY_ACK, RECEIVE_SEQ, 0));
        let block = has(option::SACK).then_some((ahead, ahead.wrapping_add(50)));
        assert_eq!(seen.first_sack, block, "options {options}");
        twin.close_silently();
    }
    bed.nothing_before();
}

#[test]
fn the_first_segments_are_the_guests_v4() {
    first_segments(V4);
}

#[test]
fn the_first_segments_are_the_guests_v6() {
    first_segments(V6);
}

#[test]
fn the_first_segments_are_the_guests_on_a_link() {
    first_segments(LINK_LOCAL);
}

/// The window that the twin begins with, and one that the peer tells later, bound what is sent.
#[test]
fn windows_are_kept_and_scaled() {
    for (options, later_bytes) in [(ALL, 250 << 5), (ALL & !option::WINDOW_SCALE, 250)] {
        let mut bed = bed(V4);
        let mut state = bed.state(4000, options);
        state.send_window_bytes = 2 * MSS as u32;
        let twin = bed.create(&state).unwrap();
        give(&twin, &content(20 * MSS));
        let seen = bed.tap.bytes(2 * MSS);
        assert_eq!(seen.payload.len(), 2 * MSS);
        assert_eq!(twin.unsent_bytes().unwrap(), 18 * MSS as u32);
        let say = Say {
            seq: RECEIVE_SEQ,
            ack: SEND_SEQ.wrapping_add(2 * MSS as u32),
            window: 250,
            timestamps: seen.timestamps.map(|(value, _)| (777, value)),
            ..Say::default()
        };
        bed.tap.say((state.remote, state.local), &say);
        // Whole segments, as long as the window holds one; else what it holds.
        let whole = (later_bytes / MSS * MSS).max(later_bytes.min(MSS));
        assert_eq!(bed.tap.bytes(whole).payload.len(), whole);
        assert_eq!(twin.unsent_bytes().unwrap() as usize, 18 * MSS - whole);
    }
}

#[test]
fn a_closed_window_is_probed_and_opens() {
    let mut bed = bed(V4);
    let mut state = bed.state(4000, ALL);
    (state.send_window_bytes, state.rtt_us) = (0, 20_000);
    let twin = bed.create(&state).unwrap();
    give(&twin, &content(2 * MSS));
    let probe = bed.tap.tcp();
    assert_eq!((probe.seq, probe.payload.len()), (SEND_SEQ.wrapping_sub(1), 0));
    bed.acknowledge(&state, 0, &probe);
    assert_eq!(bed.tap.bytes(2 * MSS).payload, content(2 * MSS));
    assert_eq!(twin.info().unwrap().mss, MSS as u32);
}

#[test]
fn acknowledgements_drain_the_queue() {
    let mut bed = bed(V6);
    let (twin, state) = bed.twin(ALL);
    give(&twin, &content(5 * MSS));
    let seen = bed.tap.bytes(5 * MSS);
    assert_eq!((twin.unacked_bytes().unwrap(), twin.unsent_bytes().unwrap()), (5000, 0));
    bed.acknowledge(&state, 2000, &seen);
    wait_acked(&twin, 3000);
    bed.acknowledge(&state, 5000, &seen);
    wait_acked(&twin, 0);
    let info = twin.info().unwrap();
    assert!(info.is_established() && info.retransmits == 0, "{info:?}");
    assert!(info.rtt_us > 0 && info.cwnd >= 10, "{info:?}");
}

/// A peer that does not answer: everything comes again, soon where the kernel lets us say so.
#[test]
fn what_is_lost_is_sent_again() {
    let mut bed = bed(V4);
    let mut state = bed.state(4000, ALL);
    state.rtt_us = 20_000;
    let twin = bed.create(&state).unwrap();
    give(&twin, &content(MSS));
    let first = bed.tap.tcp();
    let again = bed.tap.tcp();
    assert_eq!((again.seq, &again.payload), (first.seq, &first.payload));
    if knows_rto_max() {
        assert_eq!(get_tcp::<libc::c_int>(&twin, TCP_RTO_MAX_MS).unwrap(), 1000);
    }
    bed.acknowledge(&state, MSS as u32, &again);
    wait_acked(&twin, 0);
}

/// One of four is lost: the peer's selective acknowledgements bring it back without a timeout.
#[test]
fn selective_acknowledgements_are_understood() {
    let mut bed = bed(V6);
    let (twin, state) = bed.twin(ALL);
    give(&twin, &content(8 * MSS));
    let seen = bed.tap.bytes(8 * MSS);
    let at = |segments: usize| SEND_SEQ.wrapping_add((segments * MSS) as u32);
    for end in 2..=8 {
        let say = Say {
            seq: RECEIVE_SEQ,
            ack: SEND_SEQ,
            window: 2000,
            timestamps: seen.timestamps.map(|(value, _)| (777, value)),
            sack: Some((at(1), at(end))),
            ..Say::default()
        };
        bed.tap.say((state.remote, state.local), &say);
    }
    wait_until(|| get_tcp::<TcpInfo>(&twin, libc::TCP_INFO).unwrap().others[1] == 7);
    // A busy machine sends the last one again, since the answers were late.
    let again = std::iter::repeat_with(|| bed.tap.tcp()).find(|again| again.seq == SEND_SEQ);
    assert_eq!(again.unwrap().payload, content(MSS));
    bed.acknowledge(&state, 8 * MSS as u32, &seen);
    wait_acked(&twin, 0);
}

#[test]
fn silence_at_the_end_whatever_is_in_the_queues() {
    for (sent, acked) in [(0, 0), (3 * MSS, 0), (3 * MSS, MSS), (3 * MSS, 3 * MSS), (60 * MSS, 0)] {
        for by_drop in [false, true] {
            let mut bed = bed(V4);
            let (twin, state) = bed.twin(ALL);
            if sent > 0 {
                give(&twin, &content(sent));
                let seen = bed.tap.bytes(sent.min(10 * MSS));
                bed.acknowledge(&state, acked as u32, &seen);
                wait_acked(&twin, (sent - acked) as u32);
            }
            if by_drop {
                drop(twin)
            } else {
                twin.close_silently()
            }
            bed.nothing_before();
            // The place is free for the next pipe of the connection.
            bed.create(&state).unwrap();
        }
    }
}

#[test]
fn a_reset_ends_it() {
    let mut bed = bed(V4);
    let (twin, state) = bed.twin(ALL);
    let mut frame = Vec::new();
    let (IpAddr::V4(remote), IpAddr::V4(local)) = (bed.remote, bed.local) else { panic!() };
    etherparse::PacketBuilder::ethernet2([2, 0, 0, 0, 0, 7], TWIN_MAC)
        .ipv4(remote.octets(), local.octets(), 64)
        .tcp(state.remote.port(), state.local.port(), RECEIVE_SEQ, 0)
        .rst()
        .write(&mut frame, &[])
        .unwrap();
    bed.tap.inject(&frame);
    let timeout = Timespec::try_from(PATIENCE).unwrap();
    // As the pool waits for it.
    assert_eq!(poll(&mut [PollFd::new(&twin, PollFlags::empty())], Some(&timeout)), Ok(1));
    assert!(!twin.info().unwrap().is_established());
    let error = rustix::net::send(&twin, b"x", rustix::net::SendFlags::NOSIGNAL);
    assert_eq!(error, Err(rustix::io::Errno::CONNRESET));
    twin.close_silently();
    bed.nothing_before();
}

#[test]
fn fails_cleanly_without_its_address() {
    let mut bed = bed(V4);
    for (local, remote) in [("10.7.0.99", V4[1]), ("fd07::99", V6[1]), (V6[0], V6[1])] {
        let mut state = bed.state(4000, ALL);
        state.local = (local.parse::<IpAddr>().unwrap(), 80).into();
        state.remote = (remote.parse::<IpAddr>().unwrap(), 4000).into();
        let text = bed.create(&state).unwrap_err().to_string();
        assert!(text.contains("bind: Cannot assign requested address"), "{text}");
        bed.nothing_before();
    }
    // Two families, in one state: nothing that a guest can bring about.
    let mut state = bed.state(4000, ALL);
    state.remote = (V6[1].parse::<IpAddr>().unwrap(), 4000).into();
    assert!(bed.create(&state).is_err());
    bed.nothing_before();
}

/// In mid-way the kernel refuses: here the window scale.
#[test]
fn fails_cleanly_in_the_middle() {
    let mut bed = bed(V4);
    let mut state = bed.state(4000, ALL);
    state.send_scale = 15;
    let text = bed.create(&state).unwrap_err().to_string();
    assert!(text.contains("10.7.0.2:80 to 203.0.113.9:4000: TCP_REPAIR_OPTIONS"), "{text}");
    bed.nothing_before();
    state.send_scale = 14;
    bed.create(&state).unwrap();
}

#[test]
fn one_connection_has_one_twin_and_one_port_has_many() {
    let bed = bed(V4);
    let twins: Vec<_> =
        (4000..4100).map(|port| bed.create(&bed.state(port, ALL)).unwrap()).collect();
    let text = bed.create(&bed.state(4050, ALL)).unwrap_err().to_string();
    assert!(text.contains("connect"), "{text}");
    drop(twins);
    bed.create(&bed.state(4050, ALL)).unwrap();
}

#[test]
fn a_twin_listens_to_nobody_else() {
    let bed = bed(V4);
    let (_twin, state) = bed.twin(ALL);
    // A listener on the host's side of the world is another thing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut other = state.clone();
    other.remote = listener.local_addr().unwrap();
    other.local = (IpAddr::from([127, 0, 0, 1]), 80).into();
    // 127.0.0.1 is the namespace's own.
    let twin = bed.create(&other).unwrap();
    give(&twin, b"hello");
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

/// Down to what small networks have, and up to half of what a guest's largest MTU gives.
#[test]
fn segments_are_as_long_as_the_guests() {
    let mut bed = bed(V4);
    for (port, mss) in (4000..).zip([88, 536, 1448, 8948, 32_755, 32_756, 65_469u16]) {
        let mut state = bed.state(port, ALL);
        (state.mss, state.send_window_bytes) = (mss, 1 << 20);
        let twin = bed.create(&state).unwrap();
        let mss = mss.min(32_755);
        give(&twin, &content(usize::from(mss)));
        assert_eq!(bed.tap.tcp().payload.len(), usize::from(mss));
        assert_eq!(twin.info().unwrap().mss, u32::from(mss));
    }
    let mut state = bed.state(5000, ALL);
    state.mss = 75;
    let text = bed.create(&state).unwrap_err().to_string();
    assert!(text.contains("TCP_MAXSEG"), "{text}");
}

#[test]
fn the_first_congestion_window_is_near_the_guests() {
    let mut bed = bed(V4);
    for (port, (cwnd, first)) in (4000..).zip([(1, 10), (10, 10), (31, 16), (64, 64), (900, 512)]) {
        let mut state = bed.state(port, ALL);
        (state.cwnd, state.send_window_bytes) = (cwnd, 1 << 20);
        let twin = bed.create(&state).unwrap();
        assert_eq!(twin.info().unwrap().cwnd, first);
        if first == 64 {
            give(&twin, &content(64 * MSS));
            assert_eq!(bed.tap.bytes(64 * MSS).payload, content(64 * MSS));
        }
    }
}

/// A guest names what it likes; only what is there already is used, and nothing is loaded.
#[test]
fn abuse_P7_unknown_congestion_controls_are_ignored() {
    let bed = bed(V4);
    for (port, (name, used)) in (4000..).zip([
        (*b"reno\0\0\0\0\0\0\0\0\0\0\0\0", Some("reno")),
        (*b"nosuch\0\0\0\0\0\0\0\0\0\0", None),
        ([0xff; 16], None),
        ([0; 16], None),
        (*b"re\0o\0\0\0\0\0\0\0\0\0\0\0\0", None),
    ]) {
        let mut state = bed.state(port, ALL);
        state.congestion = name;
        let twin = bed.create(&state).unwrap();
        let found = sockopt::tcp_congestion(&twin).unwrap();
        let host = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap();
        assert_eq!(found.to_string(), used.unwrap_or(host.trim()));
    }
}

#[test]
fn is_a_socket_for_a_pool() {
    let bed = bed(V4);
    let (twin, _) = bed.twin(ALL);
    let flags = rustix::fs::fcntl_getfl(&twin).unwrap();
    assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
    assert!(rustix::io::fcntl_getfd(&twin).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    assert!(sockopt::tcp_nodelay(&twin).unwrap());
    assert!(twin.as_fd().as_raw_fd() > 2);
}

#[test]
fn the_timeout_is_a_second_or_some_round_trips() {
    let bounds = [0, 20_000, 250_000, 600_000, 60_000_000, u32::MAX].map(rto_max_ms);
    assert_eq!(bounds, [1000, 1000, 1000, 2400, 120_000, 120_000]);
}

mod relief;
