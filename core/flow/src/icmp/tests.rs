use etherparse::{SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;
use crate::scenario::{Scenario, TOKEN, ours as case_ours, theirs as case_theirs};
use crate::segment::{ACK, PSH};
use crate::testing::icmp::BuildError as Error;
use crate::testing::{Build, words};
use crate::types::FlowEvent;
use frame::HEAD_LEN;

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
    let new = Build::new(crate::testing::key(v6), ACK | PSH, 1000, 2000);
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

/// Error on the wire that a shifted guest would get without us.
#[test]
fn the_guests_numbers_are_its_own() {
    let mut case = Scenario::shifted(500);
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
            assert_eq!(case.flow.sender_of(error.seq), IcmpTarget::Guest);
            let copied = frame.len().min(HEAD_LEN);
            error.edit_for_guest(&mut frame[..copied], &case.flow);
            assert!(is_right(&frame));
            assert_eq!(frame, quote(case_ours(100), case_theirs(0)), "{v6} {tcp_len}");
        }
    }
}

/// Bytes behind a twin's stand where the guest waits.
#[test]
fn an_acknowledgement_of_the_twins_is_not_the_guests() {
    let mut case = Scenario::receiving(500);
    case.guest(PSH, 0, case_theirs(100), 40);
    let quote = |ack| Error::new(Build { seq: case_ours(0), ack, ..about(false) }, MACS).frame();
    for (ack, place) in [(60, 60), (100, 100), (300, 100)] {
        let mut frame = quote(case_theirs(ack));
        let error = parse(&frame).unwrap();
        assert_eq!(case.flow.sender_of(error.seq), IcmpTarget::Guest);
        error.edit_for_guest(&mut frame, &case.flow);
        assert_eq!(frame, quote(case_theirs(place)));
    }
}

#[test]
fn who_sent_it() {
    let whose = |case: &Scenario, n| case.flow.sender_of(case_ours(n));
    let mut case = Scenario::piped(500);
    case.twin(ACK, 100, 300).unwrap();
    assert_eq!([0, 99].map(|n| whose(&case, n)), [IcmpTarget::Guest; 2]);
    assert_eq!([100, 101, 400].map(|n| whose(&case, n)), [IcmpTarget::Twin; 3]);
    assert_eq!([401, 1 << 30].map(|n| whose(&case, n)), [IcmpTarget::Nobody; 2]);
    case.twin(ACK, 400, 200).unwrap();
    case.peer(0, case_theirs(0), 600, 0);
    assert_eq!(case.told(), [FlowEvent::Acknowledged]);
    case.flow.finish(TOKEN, 500).unwrap();
    // The guest goes on behind it; all before is of long ago.
    case.guest(PSH, 100, case_theirs(0), 90);
    assert_eq!([0, 100, 599].map(|n| whose(&case, n)), [IcmpTarget::Nobody; 3]);
    assert_eq!([600, 690].map(|n| whose(&case, n)), [IcmpTarget::Guest; 2]);
    assert_eq!([691, 5000].map(|n| whose(&case, n)), [IcmpTarget::Nobody; 2]);
    // And another twin: what the guest has sent between is its own.
    let taken = case.snapshot(190);
    case.flow.start(TOKEN, &taken, 50).unwrap();
    assert_eq!([599, 600, 689].map(|n| whose(&case, n)), {
        [IcmpTarget::Nobody, IcmpTarget::Guest, IcmpTarget::Guest]
    });
    assert_eq!([690, 691].map(|n| whose(&case, n)), [IcmpTarget::Twin, IcmpTarget::Nobody]);
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
        let mut case = Scenario::open(false);
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
            let len = error.end - error.l4.offset;
            let before = if v6 { pseudo_sum(frame, error.l4, len) } else { 0 };
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
            let sum_at = |f: &[u8]| u16::from_be_bytes([f[place], f[place + 1]]);
            let is_zero = |f: &[u8]| [0, 0xffff].contains(&sum_at(f));
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
        let case = Scenario::shifted(500);
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
