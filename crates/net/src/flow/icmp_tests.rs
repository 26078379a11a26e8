use std::net::IpAddr;

use etherparse::{SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::super::FlowEvent;
use super::super::case::{Case, TOKEN, ours as case_ours, theirs as case_theirs};
use super::super::testing::{Build, mirror, read, words};
use super::*;
use crate::flow::TWIN_MAC;
use crate::flow::segment::{ACK, PSH};
use crate::header::HEAD_LEN;
use crate::tests::flows::{GUEST, NOTHING, OUTSIDE, Rig, TWIN, ours, theirs};
use crate::tests::lab::{Spec, mac, no_offload};

const TOO_BIG_V4: [u8; 2] = [3, 4];
const TOO_BIG_V6: [u8; 2] = [2, 0];

fn too_big(v6: bool) -> [u8; 2] {
    if v6 { TOO_BIG_V6 } else { TOO_BIG_V4 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// An error to be made about a segment.
#[derive(Debug, Clone)]
struct Error {
    about: Build,
    /// Type and code.
    kind: [u8; 2],
    /// Bytes of the segment that are quoted, with its IP header.
    quoted: usize,
    macs: [[u8; 6]; 2],
    /// IPv4 options, or one IPv6 extension header whose first byte is that of ICMP.
    extra: Vec<u8>,
    /// Behind the packet.
    padding: usize,
}

impl Error {
    fn new(about: Build, macs: [[u8; 6]; 2]) -> Self {
        let kind = too_big(about.key.local.is_ipv6());
        Self { about, kind, quoted: usize::MAX, macs, extra: Vec::new(), padding: 0 }
    }

    fn v6(&self) -> bool {
        self.about.key.local.is_ipv6()
    }

    fn ip_len(&self) -> usize {
        if self.v6() { 40 } else { 20 + self.about.extra.len() }
    }

    /// Quotes so much of the TCP header.
    fn short(self, tcp_len: usize) -> Self {
        Self { quoted: self.ip_len() + tcp_len, ..self }
    }

    /// From a router between the two.
    fn frame(&self) -> Vec<u8> {
        let local = self.about.key.local;
        let router: Vec<u8> =
            octets(local).split_last().map(|(_, a)| [a, &[254]].concat()).unwrap();
        let sent = self.about.frame();
        let quoted = &sent[14..sent.len().min(self.quoted.saturating_add(14))];
        let mut icmp = [&self.kind[..], &[0, 0, 0, 0, 5, 20], quoted].concat();
        let pseudo = match self.v6() {
            true => {
                let len = (icmp.len() as u32).to_be_bytes();
                [&router[..], &octets(local), &len, &[0, 0, 0, 58]].concat()
            }
            false => Vec::new(),
        };
        let check = !words(&[&pseudo[..], &icmp].concat());
        icmp[2..4].copy_from_slice(&check.to_be_bytes());
        let len = (self.extra.len() + icmp.len()) as u16;
        let ip = if self.v6() {
            let proto = if self.extra.is_empty() { 58 } else { 60 };
            let first = [&[0x60, 0, 0, 0][..], &len.to_be_bytes(), &[proto, 255]].concat();
            [&[0x86, 0xdd][..], &first, &router, &octets(local), &self.extra].concat()
        } else {
            let first = [0x45 + self.extra.len() as u8 / 4, 0xc0];
            let rest = [0, 0, 0, 0, 64, 1, 0, 0];
            let len = (20 + len).to_be_bytes();
            let mut ip = [&first[..], &len, &rest, &router, &octets(local), &self.extra].concat();
            let check = !words(&ip);
            ip[10..12].copy_from_slice(&check.to_be_bytes());
            [&[8, 0][..], &ip].concat()
        };
        [&self.macs.concat()[..], &ip, &icmp, &vec![0x77; self.padding]].concat()
    }
}

const MACS: [[u8; 6]; 2] = [[2; 6], [4; 6]];

fn parse(frame: &[u8]) -> Option<IcmpError> {
    IcmpError::parse(&frame[..frame.len().min(HEAD_LEN)], frame.len())
}

/// By a reader of its own: whether the message is whole.
fn is_right(frame: &[u8]) -> bool {
    let packet = SlicedPacket::from_ethernet(frame).unwrap();
    match (packet.net.as_ref().unwrap().ipv6_ref(), packet.transport.unwrap()) {
        (_, TransportSlice::Icmpv4(icmp)) => words(icmp.slice()) == 0xffff,
        (Some(ip), TransportSlice::Icmpv6(icmp)) => {
            icmp.is_checksum_valid(ip.header().source(), ip.header().destination())
        }
        other => panic!("{other:?}"),
    }
}

fn about(v6: bool) -> Build {
    let new = Build::new(super::super::testing::key(v6), ACK | PSH, 1000, 2000);
    Build { payload: vec![7; 300], ..new }
}

#[test]
fn errors_are_read() {
    for v6 in [false, true] {
        let tcp_lens = [8, 11, 12, 17, 18, 19, 20, 100, usize::MAX - 100];
        for (tcp_len, padding) in tcp_lens.into_iter().zip((0..3).cycle()) {
            let error = Error { padding, ..Error::new(about(v6), MACS).short(tcp_len) };
            let frame = error.frame();
            assert!(is_right(&frame));
            let parsed = parse(&frame).unwrap();
            assert_eq!((parsed.key, parsed.seq), (error.about.key, 1000));
            assert_eq!(parsed.tcp_len, tcp_len.min(20));
            assert_eq!(parsed.end, frame.len() - padding);
            assert!(parsed.is_sum_right(&frame));
            for at in parsed.l4.offset..parsed.end {
                let mut damaged = frame.clone();
                damaged[at] ^= 0x20;
                assert!(!parsed.is_sum_right(&damaged), "{at}");
            }
        }
    }
}

#[test]
fn errors_have_their_types() {
    let is_read =
        |v6, kind| parse(&Error { kind, ..Error::new(about(v6), MACS) }.frame()).is_some();
    let read = |v6| -> Vec<u8> { (0..=255).filter(|n| is_read(v6, [*n, 1])).collect() };
    assert_eq!(read(false), [3, 11, 12]);
    assert_eq!(read(true), [1, 2, 3, 4]);
}

#[test]
fn headers_may_be_longer() {
    // Options of either IPv4 header; an IPv6 extension header.
    let mut inner = Error::new(Build { extra: vec![1; 8], ..about(false) }, MACS);
    assert_eq!(parse(&inner.frame()).map(|e| (e.key, e.seq)), Some((inner.about.key, 1000)));
    inner.extra = vec![1; 12];
    assert_eq!(parse(&inner.frame()).map(|e| e.tcp), Some(14 + 32 + 8 + 28));
    let extra = vec![58, 0, 1, 4, 0, 0, 0, 0];
    let outer = Error { extra, ..Error::new(about(true), MACS) };
    let parsed = parse(&outer.frame()).unwrap();
    assert_eq!((parsed.key, parsed.seq), (outer.about.key, 1000));
    // The sum of the pseudo header is that of the message alone.
    assert!(parsed.is_sum_right(&outer.frame()));
}

#[test]
fn all_else_is_not_read() {
    for v6 in [false, true] {
        let good = Error::new(about(v6), MACS);
        let whole = good.frame();
        let inner = 14 + good.ip_len() + 8;
        let changed = |at: usize, byte: u8| {
            let mut frame = whole.clone();
            frame[at] = byte;
            frame
        };
        assert!(parse(&whole).is_some());
        assert!(parse(&good.clone().short(7).frame()).is_none());
        let proto = if v6 { inner + 6 } else { inner + 9 };
        let length = if v6 { 18 } else { 16 };
        let mut others = vec![
            changed(proto, 17),
            changed(inner, if v6 { 0x45 } else { 0x60 }),
            // The other family's ICMP.
            changed(if v6 { 20 } else { 23 }, if v6 { 1 } else { 58 }),
            // For another address than the one that sent.
            changed(if v6 { 53 } else { 33 }, 99),
            // Longer than it is.
            changed(length, 0x70),
            // Shorter than that.
            [&whole[..length], &[0, 40], &whole[length + 2..]].concat(),
            [&whole[..12], &[0x81, 0, 0, 5], &whole[12..]].concat(),
            good.about.frame(),
        ];
        if !v6 {
            // Fragments: this one, and the one that is quoted.
            others.extend([changed(20, 0x20), changed(21, 1), changed(inner + 7, 1)]);
            others.push(changed(inner, 0x44));
            // The first of those that are quoted is one.
            assert!(parse(&changed(inner + 6, 0x20)).is_some());
        }
        for (n, frame) in others.iter().enumerate() {
            assert!(parse(frame).is_none(), "{v6} {n}");
        }
        for len in 0..inner + good.ip_len() + 8 {
            assert!(IcmpError::parse(&whole[..len], whole.len()).is_none(), "{v6} {len}");
        }
    }
}

/// As on the wire: the error that a shifted guest would get without us.
#[test]
fn the_guests_numbers_are_its_own() {
    let mut case = Case::shifted(500);
    case.flow.shift.receive = 70;
    case.guest(PSH, 100, case_theirs(0), 90);
    for v6 in [false, true] {
        for tcp_len in [8, 10, 12, 16, 18, 20, 300] {
            let quote = |seq, ack| {
                let build = Build { seq, ack, ..about(v6) };
                Error::new(build, MACS).short(tcp_len).frame()
            };
            let mut frame = quote(case_ours(600), case_theirs(70));
            let error = parse(&frame).unwrap();
            assert_eq!(case.flow.sender_of(error.seq), Whose::Guests);
            let copied = frame.len().min(HEAD_LEN);
            error.edit_for_guest(&mut frame[..copied], &case.flow);
            assert!(is_right(&frame));
            assert_eq!(frame, quote(case_ours(100), case_theirs(0)), "{v6} {tcp_len}");
        }
    }
}

/// What is behind a twin's bytes stands where the guest waits.
#[test]
fn an_acknowledgement_of_the_twins_is_not_the_guests() {
    let mut case = Case::receiving(500);
    case.guest(PSH, 0, case_theirs(100), 40);
    let quote = |ack| Error::new(Build { seq: case_ours(0), ack, ..about(false) }, MACS).frame();
    for (ack, place) in [(60, 60), (100, 100), (300, 100)] {
        let mut frame = quote(case_theirs(ack));
        let error = parse(&frame).unwrap();
        assert_eq!(case.flow.sender_of(error.seq), Whose::Guests);
        error.edit_for_guest(&mut frame, &case.flow);
        assert_eq!(frame, quote(case_theirs(place)));
    }
}

#[test]
fn who_sent_it() {
    let whose = |case: &Case, n| case.flow.sender_of(case_ours(n));
    let mut case = Case::piped(500);
    case.twin(ACK, 100, 300).unwrap();
    assert_eq!([0, 99].map(|n| whose(&case, n)), [Whose::Guests; 2]);
    assert_eq!([100, 101, 400].map(|n| whose(&case, n)), [Whose::Twins; 3]);
    assert_eq!([401, 1 << 30].map(|n| whose(&case, n)), [Whose::Nobodys; 2]);
    case.twin(ACK, 400, 200).unwrap();
    case.peer(0, case_theirs(0), 600, 0);
    assert_eq!(case.told(), [FlowEvent::Acknowledged]);
    case.flow.finish(TOKEN, 500).unwrap();
    // The guest goes on behind it; all before is of long ago.
    case.guest(PSH, 100, case_theirs(0), 90);
    assert_eq!([0, 100, 599].map(|n| whose(&case, n)), [Whose::Nobodys; 3]);
    assert_eq!([600, 690].map(|n| whose(&case, n)), [Whose::Guests; 2]);
    assert_eq!([691, 5000].map(|n| whose(&case, n)), [Whose::Nobodys; 2]);
    // And another twin: what the guest has sent between is its own.
    let taken = case.snapshot(190);
    case.flow.start(TOKEN, &taken, 50).unwrap();
    assert_eq!([599, 600, 689].map(|n| whose(&case, n)), {
        [Whose::Nobodys, Whose::Guests, Whose::Guests]
    });
    assert_eq!([690, 691].map(|n| whose(&case, n)), [Whose::Twins, Whose::Nobodys]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A wrong checksum stays as wrong as it was, at any numbers and lengths.
    #[test]
    fn edits_keep_what_the_checksum_says(
        v6: bool,
        seq: u32,
        ack: u32,
        by in any::<(u32, u32)>(),
        tcp_len in 8..400_usize,
        damage: u16,
        payload in prop::collection::vec(any::<u8>(), 0..99),
    ) {
        let mut case = Case::open(false);
        (case.flow.shift.send, case.flow.shift.receive) = by;
        let quote = |seq, ack| {
            let build = Build { seq, ack, payload: payload.clone(), ..about(v6) };
            Error::new(build, MACS).short(tcp_len).frame()
        };
        let mut frame = quote(seq, ack);
        let error = parse(&frame).unwrap();
        let place = error.l4.offset + 2;
        let old = u16::from_be_bytes([frame[place], frame[place + 1]]);
        frame[place..place + 2].copy_from_slice(&(old ^ damage).to_be_bytes());
        let off_by = |frame: &[u8]| {
            let message = words(&frame[error.l4.offset..error.end]);
            let before = if v6 { pseudo_sum(frame, error.l4, error.end - error.l4.offset) } else { 0 };
            (u64::from(message) + before) % 0xffff
        };
        let was = off_by(&frame);
        prop_assert_eq!(error.is_sum_right(&frame), was == 0);
        error.edit_for_guest(&mut frame, &case.flow);
        prop_assert_eq!(off_by(&frame), was);
        if damage == 0 {
            let (send, receive) = by;
            let ack = if tcp_len < 12 { ack } else { ack.wrapping_sub(receive) };
            let expected = quote(seq.wrapping_sub(send), ack);
            // Zero has two forms.
            let is_zero = |f: &[u8]| [0, 0xffff].contains(&u16::from_be_bytes([f[place], f[place + 1]]));
            if !is_zero(&frame) {
                prop_assert_eq!(frame, expected);
            }
        }
    }

    /// Anything may come.
    #[test]
    fn nothing_breaks_it(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        v6: bool,
        changes in prop::collection::vec((0..150_usize, any::<u8>()), 0..6),
        cut in 0..500_usize,
        more in 0..300_usize,
    ) {
        let case = Case::shifted(500);
        let mut likely = Error::new(about(v6), MACS).frame();
        for (at, byte) in changes {
            likely[at] = byte;
        }
        likely.truncate(cut.max(1));
        for mut frame in [bytes, likely] {
            // The copied beginning may be shorter than the frame.
            frame.extend(vec![0; more]);
            for len in [frame.len(), frame.len().min(HEAD_LEN)] {
                if let Some(error) = IcmpError::parse(&frame[..len], frame.len()) {
                    error.is_sum_right(&frame);
                    error.edit_for_guest(&mut frame[..len], &case.flow);
                }
            }
        }
    }
}

fn rigs() -> impl Iterator<Item = Rig> {
    let specs = || vec![Spec::default(), Spec::default()];
    let all = [(false, OUTSIDE), (false, mac(1)), (true, OUTSIDE), (true, mac(1))];
    all.into_iter().map(move |(v6, peer)| Rig::new(v6, peer, specs()))
}

/// About a segment on the wire that begins there; as long as routers make them.
fn about_wire(rig: &Rig, at: u32) -> Error {
    let about = Build { options: vec![], ..rig.of_guest(ACK | PSH, ours(at), theirs(0), 1400) };
    let quoted = if rig.key.local.is_ipv6() { 1232 } else { 548 };
    Error { quoted, ..Error::new(about, [mac(0), rig.peer]) }
}

#[test]
fn a_shifted_guest_hears_of_its_own_segments() {
    for rig in rigs() {
        let mut rig = rig.shifted(500);
        rig.guest(ACK | PSH, ours(100), theirs(0), 1400);
        rig.arrived();
        // The path takes no more than 1,300 bytes: it hears of the number that it sent.
        rig.peer_frame(&no_offload(), &about_wire(&rig, 600).frame());
        let [guest, peer, twin] = rig.arrived();
        let own = Error {
            about: Build { seq: ours(100), ..about_wire(&rig, 600).about },
            ..about_wire(&rig, 600)
        };
        assert_eq!((guest, peer.len(), twin.len()), (vec![own.frame()], 0, 0));
        // Stale ones, and such as nobody sent, are nobody's.
        for at in [0, 100, 599, 2001, 1 << 31] {
            rig.peer_frame(&no_offload(), &about_wire(&rig, at).frame());
            assert_eq!(rig.arrived(), NOTHING, "{at}");
        }
        // Behind our copy of the beginning it is damaged: as it is.
        let mut damaged = about_wire(&rig, 600).frame();
        damaged[400] ^= 1;
        rig.peer_frame(&no_offload(), &damaged);
        assert_eq!(rig.arrived()[GUEST], [damaged]);
        // Whatever its checksum is, it is to be another.
        let mut unsummed = no_offload();
        (unsummed[0], unsummed[6], unsummed[8]) = (F_NEEDS_CSUM, 34, 2);
        if rig.key.local.is_ipv6() {
            unsummed[6] = 54;
        }
        let frame = about_wire(&rig, 600).frame();
        rig.peer_frame(&unsummed, &frame);
        assert_eq!(rig.arrived()[GUEST], [frame]);
    }
}

#[test]
fn a_twin_hears_of_its_own_segments() {
    for rig in rigs() {
        let mut rig = rig.piped(5000);
        rig.twin(ACK | PSH, ours(100), 1400);
        rig.arrived();
        for at in [100, 700, 1500] {
            let frame = about_wire(&rig, at).frame();
            rig.peer_frame(&no_offload(), &frame);
            let [guest, peer, twin] = rig.arrived();
            assert_eq!((guest.len(), peer.len()), (0, 0));
            assert_eq!(twin, [[&TWIN_MAC[..], &frame[6..]].concat()]);
        }
        // Old ones of the guest's are as they were: nothing is shifted yet.
        let frame = about_wire(&rig, 30).frame();
        rig.peer_frame(&no_offload(), &frame);
        assert_eq!(rig.arrived(), [vec![frame], vec![], vec![]]);
        // It is the twin's kernel that speaks then; segments go on as before.
        rig.peer(ACK, theirs(0), ours(700), 0);
        assert_eq!(rig.only(TWIN).ack, ours(700));
    }
}

/// Byte for byte.
#[test]
fn errors_of_other_connections_pass() {
    for rig in rigs() {
        let v6 = rig.key.local.is_ipv6();
        let mut rig = rig;
        // It is not shifted: the guest's kernel knows what it has sent.
        for at in [0, 5000] {
            let frame = about_wire(&rig, at).frame();
            rig.peer_frame(&no_offload(), &frame);
            assert_eq!(rig.arrived()[GUEST], [frame], "{v6} {at}");
        }
        let mut rig = rig.shifted(500);
        let good = about_wire(&rig, 600);
        let of = |key| Error { about: Build { key, ..good.about.clone() }, ..good.clone() }.frame();
        let key = rig.key;
        let echo = if v6 { [128, 0] } else { [8, 0] };
        let mut udp = good.frame();
        udp[if v6 { 62 + 6 } else { 42 + 9 }] = 17;
        let others = [
            of(FlowKey { remote_port: 1, ..key }),
            of(FlowKey { local_port: 1, ..key }),
            Error { kind: echo, ..good.clone() }.frame(),
            // About what the peer has sent.
            of(mirror(&key)),
            udp,
            good.clone().short(7).frame(),
        ];
        for (n, frame) in others.into_iter().enumerate() {
            rig.peer_frame(&no_offload(), &frame);
            assert_eq!(rig.arrived()[GUEST], [frame], "{v6} {n}");
        }
        rig.guest(ACK | PSH, ours(100), theirs(0), 10);
        assert_eq!(read(&rig.arrived()[1][0]).seq, ours(600));
    }
}
