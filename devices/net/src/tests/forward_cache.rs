//! Memory of a port's last frames, which never changes a verdict: a switch that remembers and
//! one that is made to forget before every frame do the same with the same frames.

use base::counter::DropReason;
use proptest::prelude::*;

use crate::binding::BindMode;
use crate::forward_cache::ForwardCache;
use crate::testing::{BROADCAST, Lab, Spec, mac, no_offload};

/// Guests 0 to 2: bound to MAC and IP, to MAC, not at all.
const MODES: [BindMode; 3] = [BindMode::MacAndIp, BindMode::Mac, BindMode::Off];

#[derive(Debug, Clone)]
struct Sent {
    src: u8,
    dst: u8,
    kind: u8,
    ip: u8,
    len: usize,
}

/// A batch of one guest, after some time.
type Step = (usize, u64, Vec<Sent>);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Runs of alike frames are what is remembered: most frames are of the first kind.
    let mostly = |n: u8| prop_oneof![4 => Just(0u8), 1 => 0..n];
    let frame = (mostly(4), 0..5u8, mostly(11), mostly(4), 60..200usize)
        .prop_map(|(src, dst, kind, ip, len)| Sent { src, dst, kind, ip, len });
    let pause =
        prop_oneof![6 => Just(1_000u64), 1 => Just(150_000_000), 1 => Just(400_000_000_000)];
    prop::collection::vec((0..3usize, pause, prop::collection::vec(frame, 1..20)), 1..30)
}

fn bytes(guest: usize, sent: &Sent) -> Vec<u8> {
    // Address 0 is the guest's own, the others are those of somebody, or of nobody.
    let src = if sent.src == 0 { mac(guest) } else { mac(usize::from(sent.src)) };
    let dst = if sent.dst == 4 { BROADCAST } else { mac(usize::from(sent.dst)) };
    let host = if sent.ip == 0 { guest as u8 + 1 } else { sent.ip };
    let mut out = [&dst[..], &src[..]].concat();
    let v4 = |ihl: u8, src: [u8; 4]| {
        let mut ip = vec![0x40 | ihl, 0, 0, 40, 0, 0, 0, 0, 64, 17, 0, 0];
        ip.extend(src);
        ip.extend([10, 0, 0, 99]);
        ip
    };
    let v6 = |next: u8| {
        let mut ip = vec![0x60, 0, 0, 0, 0, 20, next, 64, 0x20, 1, 0xd, 0xb8];
        ip.extend([0; 11]);
        ip.push(host);
        ip.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 99]);
        ip
    };
    match sent.kind {
        0 => out.extend([&[8, 0][..], &v4(5, [10, 0, 0, host])].concat()),
        1 => out.extend([&[0x86, 0xdd][..], &v6(17)].concat()),
        // Neighbour advertisement for another's address.
        2 => out.extend([&[0x86, 0xdd][..], &v6(58), &[136, 0, 0, 0]].concat()),
        3 => out.extend([&[8, 0][..], &v4(6, [10, 0, 0, host])].concat()),
        4 => out.extend([&[8, 0][..], &v4(5, [0, 0, 0, 0])].concat()),
        5 => {
            out.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
            out.extend([&src[..], &[10, 0, 0, host], &[0; 6], &[10, 0, 0, 99]].concat());
        }
        // From DHCP servers' ports.
        6 => out.extend([&[8, 0][..], &v4(5, [10, 0, 0, host]), &[0, 67, 0, 68]].concat()),
        7 => out.extend([&[0x86, 0xdd][..], &v6(17), &[2, 35, 2, 34]].concat()),
        // To clients' ports.
        8 => out.extend([&[8, 0][..], &v4(5, [10, 0, 0, host]), &[4, 67, 0, 68]].concat()),
        9 => out.extend([&[0x86, 0xdd][..], &v6(17), &[4, 35, 2, 34]].concat()),
        _ => out.extend([0x88, 0xb5]),
    }
    out.resize(sent.len, 0);
    out
}

fn lab() -> Lab {
    let guest = |bind| Spec { bind, ..Spec::default() };
    Lab::new(MODES.map(guest).into_iter().collect())
}

/// Drops by reason, and what each guest got.
fn outcome(lab: &mut Lab) -> (Vec<u64>, Vec<Vec<Vec<u8>>>) {
    let guests = 0..MODES.len();
    let drops = guests.clone().flat_map(|g| DropReason::ALL.map(|r| lab.drops(g, r))).collect();
    (drops, guests.map(|g| lab.guests[g].recv_all(0)).collect())
}

fn send(lab: &mut Lab, guest: usize, frames: &[Vec<u8>], forget: bool) {
    for g in 0..MODES.len() {
        lab.guests[g].post_up_to(0, 60, 256, 1);
    }
    for frame in frames {
        lab.guests[guest].send(0, &no_offload(), frame, 1);
        if forget {
            lab.port(guest).forward_cache = ForwardCache::default();
            lab.poll();
        }
    }
    lab.poll();
    while lab.guests[guest].tx[0].used().is_some() {}
}

proptest! {
    #[test]
    fn remembering_changes_no_verdict(steps in steps()) {
        let (mut remembers, mut forgets) = (lab(), lab());
        for (guest, pause_ns, sent) in steps {
            let frames: Vec<_> = sent.iter().map(|s| bytes(guest, s)).collect();
            for lab in [&mut remembers, &mut forgets] {
                lab.advance(pause_ns);
            }
            send(&mut remembers, guest, &frames, false);
            send(&mut forgets, guest, &frames, true);
            prop_assert_eq!(outcome(&mut remembers), outcome(&mut forgets));
        }
    }
}

/// A port that has stopped gets nothing any more: not by the short way either, though buffers of it
/// are at hand.
#[test]
fn a_run_of_frames_ends_at_a_port_that_has_stopped() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 8, 1600, 1);
    let sent = crate::testing::frame(mac(1), mac(0), 60);
    for _ in 0..3 {
        assert_eq!(lab.judge(0, &sent), None);
    }
    lab.guests[1].rx[0].health().fail(None, &"a broken ring");
    assert_eq!(lab.judge(0, &sent), Some(DropReason::LinkDown));
    assert_eq!(lab.guests[1].recv_all(0).len(), 3);
}
