//! Twins that receive, through the whole switch.

use base::counter::DropReason;
use flow::testing::{Build, Read, mirror, read};
use flow::{FlowError, FlowEvent, ReceiveStart, TWIN_MAC};
use frame::{F_NEEDS_CSUM, GSO_TCPV4, VNET_LEN};
use net::features;
use net::testing::{MODERN, Spec, mac, no_offload};

use super::steer::partial;
use super::*;

const FIN: u8 = 1;
const TOKEN: u64 = 1;

/// A twin behind 100 bytes of the peer's.
fn receiving(mut rig: Rig, wanted: u32) -> Rig {
    rig.peer(ACK | PSH, theirs(0), ours(0), 100);
    rig.guest(ACK, ours(0), theirs(100), 0);
    let key = rig.key;
    let taken = rig.lab.flows(0).receive_snapshot(&key, 100).unwrap();
    let start = rig.lab.flows(0).start_receiving(&key, TOKEN, &taken, 100, wanted);
    assert_eq!(start, Ok(ReceiveStart { own_bytes: 0, twin_bytes: wanted }));
    rig.arrived();
    rig
}

impl Rig {
    fn twin_acks(&mut self, ack: u32) {
        let mut says = self.of_twin(ACK, ours(0), 0);
        (says.ack, says.window) = (theirs(ack), 500);
        self.twin_frame(&no_offload(), &says.frame());
    }

    fn of_stream(&self, at: u32, len: usize) -> Build {
        let new = self.of_peer(ACK | PSH, theirs(at), ours(0), 0);
        Build { payload: (0..len).map(|k| stream(at + k as u32)).collect(), ..new }
    }
}

/// The byte at that place of the peer's stream.
fn stream(at: u32) -> u8 {
    (at.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// Puts what came together, and checks headers, order and checksums.
fn collect(frames: &[Vec<u8>], first: u32) -> Vec<u8> {
    let mut payload = Vec::new();
    for read in frames.iter().map(|frame| read(frame)) {
        assert_eq!((read.seq, read.off_by), (first.wrapping_add(payload.len() as u32), 0));
        payload.extend(read.payload);
    }
    payload
}

fn stretch(from: u32, to: u32) -> Vec<u8> {
    (from..to).map(stream).collect()
}

#[test]
fn a_twin_receives_for_the_guest() {
    for v6 in [false, true] {
        for peer in [OUTSIDE, mac(1)] {
            a_pipe(receiving(Rig::new(v6, peer, vec![Spec::default(), Spec::default()]), 3000));
        }
    }
}

fn a_pipe(mut rig: Rig) {
    // Several frames in one round: each is there as it was, though its memory is used again.
    for at in [100, 1300] {
        let frame = rig.of_stream(at, 1200).frame();
        match rig.peer {
            OUTSIDE => rig.uplink.lock().unwrap().incoming.push_back(wired(&frame)),
            _ => drop(rig.lab.guests[1].send(0, &no_offload(), &frame, 3)),
        }
    }
    rig.lab.poll();
    while rig.lab.guests[1].tx[0].used().is_some() {}
    let [guest, peer, twin] = rig.arrived();
    assert!(guest.is_empty() && peer.is_empty());
    assert!(twin.iter().all(|frame| frame[..6] == TWIN_MAC));
    assert_eq!(collect(&twin, theirs(100)), stretch(100, 2500));
    rig.twin_acks(2500);
    let left = rig.only(PEER);
    assert_eq!((left.seq, left.ack, left.window), (ours(0), theirs(2500), 500));
    // The guest's own direction goes on beside it.
    rig.guest(ACK | PSH, ours(0), theirs(100), 60);
    let left = rig.only(PEER);
    assert_eq!((left.ack, left.window, left.payload.len()), (theirs(2500), 500, 60));
    let news = Build { ack: ours(60), ..rig.of_stream(2500, 600) };
    rig.peer_frame(&no_offload(), &news.frame());
    let [guest, _, twin] = rig.arrived();
    let heard = read(&guest[0]);
    assert_eq!((heard.seq, heard.ack, heard.payload.len()), (theirs(100), ours(60), 0));
    assert_eq!((heard.off_by, read(&twin[0]).ack), (0, ours(0)));
    rig.twin_acks(3100);
    assert_eq!(rig.only(PEER).ack, theirs(3100));
    let key = rig.key;
    assert_eq!(rig.lab.flows(0).finish_receiving(&key, TOKEN, 3000), Ok(()));
    // The peer need not ask for the guest's window.
    let left = rig.only(PEER);
    assert_eq!((left.ack, left.window, left.seq), (theirs(3100), 1000, ours(60)));
    assert_eq!((left.off_by, left.timestamps.is_some()), (0, true));
    rig.peer_frame(&no_offload(), &rig.of_stream(3100, 80).frame());
    let came = rig.only(GUEST);
    assert_eq!((came.seq, came.payload), (theirs(100), stretch(3100, 3180)));
}

/// Frames pass as they are, with what is left open in them; cut where the twin's part ends.
#[test]
fn super_packets_reach_the_twin_in_one_piece() {
    for v6 in [false, true] {
        for peer in [OUTSIDE, mac(1)] {
            let rig = Rig::new(v6, peer, vec![Spec::default(), Spec::default()]);
            let mut rig = receiving(rig, 70_000);
            let (vnet, frame) = partial(&rig.of_stream(100, 60_000).frame(), v6, 1400);
            rig.peer_frame(&vnet, &frame);
            let sent = std::mem::take(&mut rig.tap.lock().unwrap().sent);
            assert_eq!(sent.len(), 1);
            assert_eq!(sent[0][..10], vnet[..10]);
            assert_eq!(filled(&sent[0]).payload, stretch(100, 60_100));
            // 10,000 are left.
            let (vnet, frame) = partial(&rig.of_stream(60_100, 20_000).frame(), v6, 1400);
            rig.peer_frame(&vnet, &frame);
            let sent = std::mem::take(&mut rig.tap.lock().unwrap().sent);
            assert_eq!(sent[0][..10], vnet[..10]);
            let came = filled(&sent[0]);
            assert_eq!((came.seq, came.payload), (theirs(60_100), stretch(60_100, 70_100)));
            assert!(rig.arrived()[GUEST].is_empty());
        }
    }
}

/// The memory of each is used again for the next one.
#[test]
fn long_frames_of_a_round_arrive_as_they_were() {
    for peer in [OUTSIDE, mac(1)] {
        let rig = Rig::new(false, peer, vec![Spec::default(), Spec::default()]);
        let mut rig = receiving(rig, 60_000);
        for at in (100..30_100).step_by(3000) {
            let (vnet, frame) = partial(&rig.of_stream(at, 3000).frame(), false, 1000);
            match peer {
                OUTSIDE => {
                    let whole = [vnet, frame].concat();
                    rig.uplink.lock().unwrap().incoming.push_back(whole);
                }
                _ => drop(rig.lab.guests[1].send(0, &vnet, &frame, 5)),
            }
        }
        rig.lab.poll();
        let sent = std::mem::take(&mut rig.tap.lock().unwrap().sent);
        let came: Vec<u8> = sent.iter().flat_map(|whole| filled(whole).payload).collect();
        assert_eq!(came, stretch(100, 30_100));
    }
}

/// Checks a frame whose checksum is open.
fn filled(whole: &[u8]) -> Read {
    assert_eq!(whole[0], F_NEEDS_CSUM);
    let start = usize::from(u16::from_le_bytes([whole[6], whole[7]]));
    let mut frame = whole[VNET_LEN..].to_vec();
    let check = !flow::testing::words(&frame[start..]);
    frame[start + 16..start + 18].copy_from_slice(&check.to_be_bytes());
    let read = read(&frame);
    assert_eq!(read.off_by, 0);
    read
}

/// One that is cut on the way, in all the forms in which it may come and be wanted.
#[test]
fn a_frame_across_the_twins_beginning_is_for_both() {
    for offloads in [MODERN, MODERN & !features::OFFLOADS] {
        for size in [0, 30, 1000] {
            let specs = vec![Spec { features: offloads, ..Spec::default() }, Spec::default()];
            let mut rig = receiving(Rig::new(false, OUTSIDE, specs), 70_000);
            let whole = rig.of_stream(20, 3000).frame();
            let (vnet, frame) = match size {
                0 => (no_offload().to_vec(), whole),
                size => partial(&whole, false, size),
            };
            rig.peer_frame(&vnet, &frame);
            let sent = std::mem::take(&mut rig.tap.lock().unwrap().sent);
            assert_eq!(sent.len(), 1);
            let came = if size == 0 { read(&sent[0][VNET_LEN..]) } else { filled(&sent[0]) };
            assert_eq!((came.seq, came.payload), (theirs(20), stretch(20, 3020)));
            let own = match offloads {
                MODERN => {
                    let (vnet, frame) = rig.lab.guests[0].recv(0).unwrap();
                    let is_super = size == 30;
                    assert_eq!((vnet[0], vnet[1] == GSO_TCPV4), (F_NEEDS_CSUM, is_super));
                    filled(&[vnet, frame].concat()).payload
                }
                _ => collect(&rig.arrived()[GUEST], theirs(20)),
            };
            assert_eq!(own, stretch(20, 100));
        }
    }
}

#[test]
fn a_guest_without_buffers_does_not_stop_its_receiving_twin() {
    for peer in [OUTSIDE, mac(1)] {
        let rig = Rig::new(false, peer, vec![Spec::default(), Spec::default()]);
        let mut rig = receiving(rig, 60_000);
        rig.guest(ACK | PSH, ours(0), theirs(100), 60);
        rig.arrived();
        while rig.lab.guests[0].raw_recv(0).is_some() {}
        // All its buffers are used: with what is the guest's own.
        for _ in 0..60 {
            rig.peer_frame(&no_offload(), &rig.of_stream(0, 50).frame());
        }
        assert_eq!(rig.lab.guests[0].recv_all(0).len(), 60);
        rig.uplink.lock().unwrap().sent.clear();
        for n in 0..20 {
            let news = Build { ack: ours(3 * n), ..rig.of_stream(100 + 40 * n, 40) };
            rig.peer_frame(&no_offload(), &news.frame());
        }
        assert_eq!(rig.lab.stats.holds.get(), 0);
        let [guest, _, twin] = rig.arrived();
        assert!(guest.is_empty());
        assert_eq!(collect(&twin, theirs(100)), stretch(100, 900));
        // It has buffers again: the next one tells it, once.
        for at in [900, 940] {
            let news = Build { ack: ours(57), ..rig.of_stream(at, 40) };
            rig.peer_frame(&no_offload(), &news.frame());
        }
        let [guest, _, twin] = rig.arrived();
        assert_eq!((guest.len(), read(&guest[0]).ack, twin.len()), (1, ours(57), 2));
    }
}

#[test]
fn a_full_tap_loses_frames_and_counts_them() {
    let mut rig = receiving(Rig::outside(), 60_000);
    let stats = rig.lab.flows(0).stats();
    rig.tap.lock().unwrap().refuse = true;
    for n in 0..3 {
        rig.peer_frame(
            &no_offload(),
            &rig.of_stream(100 + 1400 * n, 1400 * (1 + n as usize)).frame(),
        );
    }
    assert_eq!(drops(&stats), 3);
    rig.tap.lock().unwrap().refuse = false;
    rig.peer_frame(&no_offload(), &rig.of_stream(100, 5000).frame());
    assert_eq!(collect(&rig.arrived()[TWIN], theirs(100)), stretch(100, 5100));
}

fn drops(stats: &QueueStats) -> u64 {
    stats.drops[DropReason::WireError as usize].get()
}

#[test]
fn the_guest_is_told_that_its_peer_has_closed() {
    let mut rig = receiving(Rig::outside(), 60_000);
    let last = Build { flags: ACK | FIN, ..rig.of_stream(100, 700) };
    rig.peer_frame(&no_offload(), &last.frame());
    let heard = rig.only(TWIN);
    assert_eq!((heard.flags, heard.payload), (ACK, stretch(100, 800)));
    rig.twin_acks(800);
    assert_eq!(rig.told.take(), [(TOKEN, FlowEvent::Ended)]);
    assert_eq!(rig.only(PEER).ack, theirs(800));
    let key = rig.key;
    assert_eq!(rig.lab.flows(0).stop_receiving(&key, TOKEN, 0), Ok(700));
    assert_eq!(rig.only(PEER).window, 1000);
    assert_eq!(rig.lab.flows(0).finish_receiving(&key, TOKEN, 700), Ok(()));
    let [guest, peer, _] = rig.arrived();
    let heard = read(&guest[0]);
    assert_eq!((heard.flags, heard.seq, heard.ack), (ACK | FIN, theirs(100), ours(0)));
    assert_eq!((heard.window, heard.off_by, peer.len()), (1000, 0, 1));
    rig.guest(ACK, ours(0), theirs(101), 0);
    assert_eq!(rig.only(PEER).ack, theirs(801));
}

/// The guest waits with its acknowledgement for company.
#[test]
fn a_guest_that_is_behind_is_asked() {
    let mut rig = Rig::outside();
    rig.peer_frame(&no_offload(), &rig.of_stream(0, 100).frame());
    rig.arrived();
    let key = rig.key;
    let taken = rig.lab.flows(0).receive_snapshot(&key, 0).unwrap();
    rig.lab.flows(0).start_receiving(&key, TOKEN, &taken, 0, 1000).unwrap();
    let asked = rig.only(GUEST);
    assert_eq!((asked.flags, asked.seq, asked.payload.len()), (ACK, theirs(0).wrapping_sub(1), 0));
}

#[test]
fn a_lost_receiving_pipe_resets_both_sides() {
    let mut rig = receiving(Rig::outside(), 60_000);
    rig.peer_frame(&no_offload(), &rig.of_stream(100, 700).frame());
    rig.twin_acks(800);
    rig.arrived();
    let key = rig.key;
    let answer = rig.lab.flows(0).finish_receiving(&key, TOKEN, 600);
    assert_eq!((answer, rig.arrived()), (Err(FlowError::Broken), NOTHING));
    rig.lab.flows(0).reset(&key, TOKEN).unwrap();
    let [guest, peer, _] = rig.arrived();
    let [guest, peer] = [&guest, &peer].map(|frames| read(&frames[0]));
    assert_eq!((guest.flags, guest.seq), (RST | ACK, theirs(100)));
    assert_eq!((peer.flags, peer.seq), (RST | ACK, ours(0)));
}

/// Both guests have pipes: what the one's twin sends, the other's receives.
#[test]
fn two_twins_talk_to_each_other() {
    let mut rig = Rig::new(false, mac(1), vec![Spec::default(), Spec::default()]);
    let (tap, _) = rig.lab.set_pipes(1);
    // Anew, so that both ports see its beginning.
    rig.peer(SYN, IRS, 0, 0);
    rig.guest(SYN | ACK, ISS, theirs(0), 0);
    rig.peer(ACK, theirs(0), ours(0), 0);
    let mut rig = receiving(rig, 60_000);
    rig.lab.flows(1).start(&mirror(&rig.key), 100, 60_000);
    for at in (100..9_100).step_by(3000) {
        let build = Build { macs: [[9; 6]; 2], ..rig.of_stream(at, 3000) };
        let (vnet, frame) = partial(&build.frame(), false, 1000);
        tap.lock().unwrap().incoming.push_back([vnet, frame].concat());
    }
    rig.lab.poll();
    let sent = std::mem::take(&mut rig.tap.lock().unwrap().sent);
    let came: Vec<u8> = sent.iter().flat_map(|whole| filled(whole).payload).collect();
    assert_eq!(came, stretch(100, 9_100));
    // And back.
    tap.lock().unwrap().sent.clear();
    rig.twin_acks(9_100);
    let sent = std::mem::take(&mut tap.lock().unwrap().sent);
    assert_eq!((sent.len(), read(&sent[0][VNET_LEN..]).ack), (1, theirs(9_100)));
}
