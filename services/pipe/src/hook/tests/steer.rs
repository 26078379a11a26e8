//! Segments of guest, peer and twin: steered and shifted.

use base::counter::DropReason;
use flow::testing::{Build, key, mirror, read, sacks};
use flow::{FlowEvent, Snapshot};
use frame::testing::make_partial;
use frame::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, Vnet};
use net::features;
use net::testing::{MODERN, Spec, mac, no_offload};

use super::*;

#[test]
fn a_twin_sends_for_the_guest() {
    for v6 in [false, true] {
        for peer in [OUTSIDE, mac(1)] {
            a_pipe(Rig::new(v6, peer, vec![Spec::default(), Spec::default()]));
        }
    }
}

fn a_pipe(rig: Rig) {
    let mut rig = rig.piped(500);
    rig.twin(ACK | PSH, ours(100), 500);
    let bytes = rig.arrived();
    assert_eq!([bytes[0].len(), bytes[1].len(), bytes[2].len()], [0, 1, 0]);
    assert_eq!([&bytes[1][0][..6], &bytes[1][0][6..12]], [&rig.peer, &mac(0)]);
    let left = read(&bytes[1][0]);
    assert_eq!((left.seq, left.ack, left.off_by), (ours(100), theirs(0), 0));
    assert_eq!(left.payload, rig.of_twin(ACK, 0, 500).payload);
    // Acknowledgements are the twin's: the guest sleeps on.
    rig.peer(ACK, theirs(0), ours(300), 0);
    let heard = rig.only(TWIN);
    assert_eq!((heard.seq, heard.ack, heard.off_by), (theirs(0), ours(300), 0));
    assert_eq!(rig.told.take(), []);
    // Data is the guest's, what it acknowledges the twin's.
    rig.peer(ACK | PSH, theirs(0), ours(600), 40);
    let [guest, _, twin] = rig.arrived().map(|frames| frames.iter().map(|f| read(f)).next());
    let (guest, twin) = (guest.unwrap(), twin.unwrap());
    assert_eq!((guest.seq, guest.ack, guest.payload.len()), (theirs(0), ours(100), 40));
    assert_eq!((twin.ack, twin.payload.len(), twin.off_by), (ours(600), 0, 0));
    assert_eq!(rig.told.take(), [(1, FlowEvent::Acknowledged)]);
    rig.guest(ACK, ours(100), theirs(40), 0);
    let left = rig.only(PEER);
    assert_eq!((left.seq, left.ack), (ours(600), theirs(40)));
    // The rest is the guest's, shifted.
    let key = rig.key;
    rig.lab.flows(0).finish(&key, 500).unwrap();
    rig.guest(ACK | PSH, ours(100), theirs(40), 70);
    let left = rig.only(PEER);
    assert_eq!((left.seq, left.payload.len(), left.off_by), (ours(600), 70, 0));
    let mut frame = rig.of_peer(ACK, theirs(40), ours(600), 0);
    frame.options = sacks(&[(ours(610), ours(640))]);
    rig.peer_frame(&no_offload(), &frame.frame());
    let heard = rig.only(GUEST);
    assert_eq!((heard.ack, heard.off_by), (ours(100), 0));
    assert_eq!(heard.sacks, [(ours(110), ours(140))]);
}

/// The guest's frames wait in the ring, the agent's word comes by another way.
#[test]
fn a_pipe_hears_when_the_last_bytes_pass() {
    let mut rig = Rig::outside();
    let key = rig.key;
    assert_eq!(rig.lab.flows(0).snapshot(&key, 30), Ok(Snapshot::Waiting));
    rig.guest(ACK | PSH, ours(0), theirs(0), 20);
    assert_eq!(rig.told.take(), []);
    rig.guest(ACK | PSH, ours(20), theirs(0), 10);
    assert_eq!(rig.told.take(), [(1, FlowEvent::Settled)]);
    assert!(matches!(rig.lab.flows(0).snapshot(&key, 30), Ok(Snapshot::Ready(_))));
}

#[test]
fn a_guest_without_buffers_does_not_stop_its_twin() {
    for peer in [OUTSIDE, mac(1)] {
        let mut rig = Rig::new(false, peer, vec![Spec::default(), Spec::default()]);
        rig.guest(ACK | PSH, ours(0), theirs(0), 100);
        let key = rig.key;
        rig.lab.flows(0).start(&key, 100, 500);
        rig.twin(ACK, ours(100), 500);
        // All its buffers are used.
        rig.arrived();
        for n in 0..60 {
            rig.peer(ACK | PSH, theirs(0), ours(0), 1 + n);
        }
        assert_eq!(rig.lab.guests[0].recv_all(0).len(), 60);
        rig.uplink.lock().unwrap().sent.clear();
        // These are news for the guest, too: its own bytes.
        for ack in [100, 300, 600] {
            rig.peer(ACK, theirs(0), ours(ack), 0);
        }
        assert_eq!(rig.lab.stats.holds.get(), 0);
        assert_eq!(rig.lab.drops(1, DropReason::ReceiverStalled), 0);
        assert_eq!(rig.told.take(), [(1, FlowEvent::Acknowledged)]);
        let [guest, _, twin] = rig.arrived();
        let acks: Vec<_> = twin.iter().map(|f| read(f).ack).collect();
        assert_eq!((guest.len(), acks), (0, vec![ours(100), ours(300), ours(600)]));
        // It has buffers again: the next one tells it.
        rig.peer(ACK, theirs(0), ours(600), 0);
        let [guest, _, twin] = rig.arrived();
        assert_eq!((read(&guest[0]).ack, twin.len()), (ours(100), 1));
        rig.peer(ACK, theirs(0), ours(600), 0);
        rig.only(TWIN);
    }
}

#[test]
fn a_twins_frames_wait_for_a_guest_without_buffers() {
    let mut rig = Rig::new(false, mac(1), vec![Spec::default(), Spec::default()]).piped(500);
    for _ in 0..60 {
        rig.guest_frame(0, &no_offload(), &frame(mac(1), mac(0), 60));
    }
    rig.lab.guests[1].recv_all(0);
    for n in 0..3 {
        rig.tap
            .lock()
            .unwrap()
            .incoming
            .push_back(wired(&rig.of_twin(ACK, ours(100 + n), 1).frame()));
    }
    assert_eq!(rig.lab.poll(), 0);
    assert_eq!(rig.tap.lock().unwrap().incoming.len(), 3);
    rig.lab.guests[1].post(0, 2, 1600, 1);
    rig.lab.poll();
    let seqs: Vec<_> = rig.lab.guests[1].recv_all(0).iter().map(|f| read(f).seq).collect();
    assert_eq!(seqs, [ours(100), ours(101)]);
}

/// Byte for byte, in both directions, with a twin and a shift beside them.
#[test]
fn all_other_frames_pass_as_they_are() {
    for shifted in [false, true] {
        let rig = Rig::outside();
        let mut rig = if shifted { rig.shifted(500) } else { rig.piped(500) };
        let guest = rig.of_guest(ACK, ours(50), theirs(0), 200);
        let peer = rig.of_peer(ACK, theirs(0), ours(50), 200);
        let others = |build: &Build| -> Vec<Vec<u8>> {
            let FlowKey { local_port, remote_port, .. } = build.key;
            let port = |local_port, remote_port| Build {
                key: FlowKey { local_port, remote_port, ..build.key },
                ..build.clone()
            };
            let whole = build.frame();
            let udp = [&whole[..23], &[17], &whole[24..]].concat();
            let fragment = [&whole[..20], &[0x20, 1], &whole[22..]].concat();
            let tagged = [&whole[..12], &[0x81, 0, 0, 5], &whole[12..]].concat();
            let [to, from] = build.macs;
            let v6 = if build.key.local_port == 80 { key(true) } else { mirror(&key(true)) };
            vec![
                port(local_port + 1, remote_port).frame(),
                port(local_port, remote_port + 1).frame(),
                port(remote_port, local_port).frame(),
                Build { key: v6, extra: vec![], ..build.clone() }.frame(),
                udp,
                fragment,
                tagged,
                whole[..60].to_vec(),
                frame(to, from, 700),
            ]
        };
        for (n, frame) in others(&guest).into_iter().enumerate() {
            rig.guest_frame(0, &no_offload(), &frame);
            assert_eq!(rig.arrived(), [vec![], vec![frame], vec![]], "from the guest, {n}");
        }
        for (n, frame) in others(&peer).into_iter().enumerate() {
            rig.peer_frame(&no_offload(), &frame);
            assert_eq!(rig.arrived(), [vec![frame], vec![], vec![]], "for the guest, {n}");
        }
        assert_eq!(rig.told.take(), []);
    }
}

/// Both have had pipes: each one's numbers are shifted at its own port.
#[test]
fn two_ports_with_pipes_talk_to_each_other() {
    let mut rig = Rig::new(false, mac(1), vec![Spec::default(), Spec::default()]);
    let (tap, told) = rig.lab.set_pipes(1);
    // Anew, so that both ports see its beginning.
    rig.peer(SYN, IRS, 0, 0);
    rig.guest(SYN | ACK, ISS, theirs(0), 0);
    rig.peer(ACK, theirs(0), ours(0), 0);
    let mut rig = rig.shifted(500);
    let (here, there) = (rig.key, mirror(&rig.key));
    rig.lab.flows(1).start(&there, 0, 300);
    let frame = Build { macs: [[9; 6]; 2], ..rig.of_peer(ACK, theirs(0), ours(0), 300) }.frame();
    tap.lock().unwrap().incoming.push_back(wired(&frame));
    rig.lab.poll();
    let came = rig.only(GUEST);
    // The other guest has acknowledged all; so says its twin, in the numbers of the first one.
    assert_eq!((came.seq, came.ack, came.payload.len()), (theirs(0), ours(100), 300));
    rig.guest(ACK, ours(100), theirs(300), 0);
    let sent = std::mem::take(&mut tap.lock().unwrap().sent);
    assert_eq!((sent.len(), read(&sent[0][12..]).ack), (1, theirs(300)));
    assert_eq!(told.take(), [(1, FlowEvent::Acknowledged)]);
    rig.lab.flows(1).finish(&there, 300).unwrap();
    assert_eq!(rig.lab.flows(0).is_shifted(&here), Some(true));
    // Each sees numbers without the other's twin's bytes behind its own.
    rig.guest(ACK | PSH, ours(100), theirs(300), 10);
    let came = rig.only(PEER);
    assert_eq!((came.seq, came.ack, came.off_by), (ours(600), theirs(0), 0));
    rig.peer(ACK | PSH, theirs(0), ours(610), 20);
    let came = rig.only(GUEST);
    assert_eq!((came.seq, came.ack, came.off_by), (theirs(300), ours(110), 0));
}

/// A frame with its checksum left open, and as a super-packet where `size` says so.
pub fn partial(frame: &[u8], v6: bool, size: u16) -> (Vec<u8>, Vec<u8>) {
    let csum_start = if v6 { 54 } else { 34 };
    let mut vnet = Vnet { flags: F_NEEDS_CSUM, csum_start, csum_offset: 16, ..Vnet::default() };
    if size > 0 {
        vnet.gso_type = if v6 { GSO_TCPV6 } else { GSO_TCPV4 };
        (vnet.gso_size, vnet.hdr_len) = (size, csum_start + 32);
    }
    let mut frame = frame.to_vec();
    make_partial(&mut frame, &vnet);
    (vnet.to_bytes(0).to_vec(), frame)
}

#[test]
fn offloads_work_with_twins_and_shifts() {
    for v6 in [false, true] {
        let bare = Spec { features: MODERN & !features::OFFLOADS, ..Spec::default() };
        let mut rig = Rig::new(v6, mac(1), vec![Spec::default(), bare]).piped(4000);
        let sent = rig.of_twin(ACK | PSH, ours(100), 4000);
        let (vnet, bytes) = partial(&sent.frame(), v6, 1000);
        rig.twin_frame(&vnet, &bytes);
        let collect = |frames: &[Vec<u8>], first: u32| {
            let mut payload = Vec::new();
            for read in frames.iter().map(|f| read(f)) {
                assert_eq!((read.seq, read.off_by), (first.wrapping_add(payload.len() as u32), 0));
                payload.extend(read.payload);
            }
            payload
        };
        assert_eq!(collect(&rig.arrived()[PEER], ours(100)), sent.payload);
        // From the guest: old and new bytes in one super-packet. The old ones are less than a
        // segment.
        let sent = rig.of_guest(ACK | PSH, ours(0), theirs(0), 3000);
        for size in [50, 1000] {
            let (vnet, bytes) = partial(&sent.frame(), v6, size);
            rig.guest_frame(0, &vnet, &bytes);
            let [_, peer, _] = rig.arrived();
            assert_eq!(peer.len(), if size == 50 { 2 } else { 1 });
            assert_eq!(collect(&peer, ours(0)), sent.payload[..100]);
        }
        // And one without any offload.
        rig.guest_frame(0, &no_offload(), &rig.of_guest(ACK, ours(0), theirs(0), 1000).frame());
        assert_eq!(collect(&rig.arrived()[PEER], ours(0)), sent.payload[..100]);
        rig.peer(ACK, theirs(0), ours(4100), 0);
        rig.arrived();
        let key = rig.key;
        rig.lab.flows(0).finish(&key, 4000).unwrap();
        let sent = rig.of_guest(ACK | PSH, ours(100), theirs(0), 3000);
        let (vnet, bytes) = partial(&sent.frame(), v6, 900);
        rig.guest_frame(0, &vnet, &bytes);
        assert_eq!(collect(&rig.arrived()[PEER], ours(4100)), sent.payload);
    }
}

#[test]
fn a_super_packet_of_the_peer_is_for_guest_and_twin() {
    let mut rig = Rig::outside().piped(500);
    rig.twin(ACK, ours(100), 500);
    rig.arrived();
    let sent = rig.of_peer(ACK | PSH, theirs(0), ours(600), 3000);
    let (vnet, bytes) = partial(&sent.frame(), false, 1000);
    rig.peer_frame(&vnet, &bytes);
    let twin = std::mem::take(&mut rig.tap.lock().unwrap().sent);
    assert_eq!((twin.len(), &twin[0][..2]), (1, &[0, 0][..]));
    let heard = read(&twin[0][12..]);
    assert_eq!((heard.ack, heard.payload.len(), heard.off_by), (ours(600), 0, 0));
    let (vnet, came) = rig.lab.guests[0].recv(0).unwrap();
    assert_eq!((vnet[0], vnet[1]), (F_NEEDS_CSUM, GSO_TCPV4));
    assert_eq!((read(&came).ack, read(&came).payload), (ours(100), sent.payload));
}

/// Checksums that nobody has looked at: damaged segments are the guest's to drop.
#[test]
fn a_damaged_segment_tells_the_twin_nothing() {
    let mut rig = Rig::outside().piped(500);
    rig.twin(ACK, ours(100), 500);
    rig.arrived();
    for (len, at) in [(0, 45), (40, 45), (40, 100), (900, 800)] {
        let mut frame = rig.of_peer(ACK, theirs(0), ours(600), len).frame();
        frame[at] ^= 4;
        let was = read(&frame).off_by;
        rig.peer_frame(&no_offload(), &frame);
        let came = rig.only(GUEST);
        assert_eq!(came.off_by, was, "{len} {at}");
        assert_ne!(was, 0);
    }
    assert_eq!(rig.told.take(), []);
    rig.peer(ACK, theirs(0), ours(600), 900);
    assert_eq!(rig.told.take(), [(1, FlowEvent::Acknowledged)]);
}

#[test]
fn a_lost_pipe_resets_both_sides() {
    for v6 in [false, true] {
        let mut rig = Rig::new(v6, OUTSIDE, vec![Spec::default(), Spec::default()]).piped(500);
        rig.twin(ACK, ours(100), 200);
        rig.peer(ACK, theirs(0), ours(150), 7);
        rig.arrived();
        let key = rig.key;
        assert!(rig.lab.flows(0).reset(&key, 2).is_err());
        assert_eq!(rig.arrived(), NOTHING);
        rig.lab.flows(0).reset(&key, 1).unwrap();
        let [guest, peer, twin] = rig.arrived();
        let [guest, peer] = [&guest, &peer].map(|frames| read(&frames[0]));
        assert_eq!((guest.flags, guest.seq, guest.off_by), (RST | ACK, theirs(7), 0));
        assert_eq!((peer.flags, peer.seq, peer.off_by), (RST | ACK, ours(150), 0));
        assert!(twin.is_empty());
        // Were the reset lost, the guest's next bytes would not reach the peer.
        rig.guest(ACK | PSH, ours(100), theirs(7), 9);
        let [guest, peer, twin] = rig.arrived();
        assert!(guest.len() == 1 && peer.len() == 1 && twin.is_empty());
        let [again, prompt] = [&guest, &peer].map(|frames| read(&frames[0]));
        assert_eq!((again.flags, again.seq, again.off_by), (RST | ACK, theirs(7), 0));
        // The peer is asked to speak, so that the guest can tell it, too.
        assert_eq!((prompt.flags, prompt.seq, prompt.off_by), (ACK, ours(149), 0));
        assert_eq!(prompt.payload.len(), 0);
        // And the twin's do not, either.
        rig.twin(ACK, ours(300), 10);
        assert_eq!(rig.arrived(), NOTHING);
    }
}
