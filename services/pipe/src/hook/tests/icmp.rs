//! ICMP errors about segments of guest and twin.

use flow::testing::icmp::BuildError as Error;
use flow::testing::{Build, mirror, read};
use flow::{FlowKey, TWIN_MAC};
use frame::F_NEEDS_CSUM;
use net::testing::{Spec, mac, no_offload};

use super::*;

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
