//! Attempts of guests, peers and others in a twin's namespace (ABUSE class C3 and R10).
#![allow(non_snake_case)]

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base::alloc_count::allocations;
use base::counter::{DropReason, QueueStats};
use base::io::{IoSlice, Wire};
use flow::testing::{Build, key, mirror, read};
use flow::{FlowEvent, FlowKey, FlowWatch};
use net::BindMode;
use net::testing::{Lab, Spec, frame, mac, no_offload};

use super::*;

/// Guest 1 is in the same switch; the peer is outside.
fn attacked(bind: BindMode) -> Rig {
    let bound = |n: u8| Spec {
        bind,
        mac: Some(mac(usize::from(n))),
        addresses: vec![[10, 0, 0, 1 + 8 * n].into()],
        ..Spec::default()
    };
    Rig::new(false, OUTSIDE, vec![bound(0), bound(1)]).piped(500)
}

#[test]
fn abuse_C3_another_vm_cannot_send_on_a_flow() {
    for bind in [BindMode::Mac, BindMode::MacAndIp] {
        let mut rig = attacked(bind);
        rig.twin(ACK, ours(100), 100);
        rig.arrived();
        let forged = rig.of_guest(ACK | PSH, ours(200), theirs(0), 50);
        rig.guest_frame(1, &no_offload(), &forged.frame());
        assert_eq!(rig.lab.drops(1, DropReason::Spoofed), 1);
        assert_eq!(rig.arrived(), NOTHING);
        // With its own MAC address and the other's IP address: only where IP addresses are not
        // bound, and then as anybody's frame: as it is.
        let forged = Build { macs: [OUTSIDE, mac(1)], ..forged }.frame();
        rig.guest_frame(1, &no_offload(), &forged);
        let left = if bind == BindMode::Mac { vec![forged] } else { vec![] };
        assert_eq!(rig.arrived(), [vec![], left, vec![]]);
        assert_eq!(rig.lab.flows(0).is_shifted(&rig.key), Some(true));
        // The twin goes on where it was.
        rig.twin(ACK, ours(200), 100);
        assert_eq!(rig.only(PEER).seq, ours(200));
    }
}

#[test]
fn abuse_C3_another_vm_cannot_end_a_flow() {
    let mut rig = attacked(BindMode::Mac);
    rig.twin(ACK, ours(100), 500);
    rig.arrived();
    // It knows the addresses, not the numbers.
    let guesses = (0..32).map(|n| theirs(1 + n * 0x0800_0000)).chain([theirs(u32::MAX)]);
    for seq in guesses {
        for (flags, ack) in
            [(RST, 0), (RST | ACK, ours(600)), (ACK, ours(600)), (SYN, 0), (SYN | ACK, 0)]
        {
            let new = Build::new(mirror(&rig.key), flags, seq, ack);
            let is_far = seq != theirs(1) && seq != theirs(u32::MAX);
            if flags == ACK && !is_far {
                continue;
            }
            rig.guest_frame(1, &no_offload(), &Build { macs: [mac(0), mac(1)], ..new }.frame());
            let [_, peer, twin] = rig.arrived();
            assert!(peer.is_empty() && twin.is_empty(), "{flags} {seq:x}");
        }
    }
    assert_eq!(rig.told.take(), []);
    rig.peer(ACK, theirs(0), ours(600), 0);
    assert_eq!(rig.told.take(), [(1, FlowEvent::Acknowledged)]);
    let key = rig.key;
    assert_eq!(rig.lab.flows(0).finish(&key, 500), Ok(()));
}

/// A table of the same names at another port is another table.
#[test]
fn abuse_C3_another_vm_with_pipes_has_flows_of_its_own() {
    let mut rig = attacked(BindMode::Mac);
    let (tap, told) = rig.lab.set_pipes(1);
    let same = |rig: &Rig, flags, seq| Build {
        macs: [OUTSIDE, mac(1)],
        ..rig.of_guest(flags, seq, theirs(0), 0)
    };
    let syn = same(&rig, SYN | ACK, 77).frame();
    rig.guest_frame(1, &no_offload(), &syn);
    let key = rig.key;
    rig.lab.flows(1).hear(&key);
    rig.lab.flows(1).start(&key, 0, 10);
    rig.arrived();
    rig.twin(ACK, ours(100), 50);
    rig.peer(ACK, theirs(0), ours(150), 0);
    let [_, _, twin] = rig.arrived();
    assert_eq!(read(&twin[0]).ack, ours(150));
    assert!(tap.lock().unwrap().sent.is_empty() && told.take().is_empty());
}

#[test]
fn abuse_R10_a_flood_of_syns_leaves_needed_flows_alone() {
    let mut rig = Rig::outside().piped(500);
    let key = rig.key;
    for n in 0..20_000_u32 {
        let local_port = 1000 + (n % 50_000) as u16;
        let new = Build::new(FlowKey { local_port, ..key }, SYN, n, 0);
        let syn = Build { macs: [OUTSIDE, mac(0)], ..new }.frame();
        rig.lab.guests[0].send(0, &no_offload(), &syn, 1);
        if n % 64 == 63 {
            rig.lab.advance(1_000_000);
            rig.lab.poll();
            while rig.lab.guests[0].tx[0].used().is_some() {}
        }
    }
    while rig.lab.poll() > 0 {}
    rig.arrived();
    rig.twin(ACK, ours(100), 500);
    assert_eq!(rig.only(PEER).seq, ours(100));
    rig.peer(ACK, theirs(0), ours(600), 0);
    rig.only(TWIN);
    rig.lab.flows(0).finish(&key, 500).unwrap();
}

/// Only segments of a running twin leave its namespace.
#[test]
fn abuse_C3_nothing_else_leaves_the_namespace_of_the_twins() {
    let mut rig = Rig::outside().piped(500);
    let good = rig.of_twin(ACK, ours(100), 50);
    let with = |key: FlowKey| Build { key, ..good.clone() }.frame();
    let whole = good.frame();
    let changed = |at: usize, byte: u8| {
        let mut frame = whole.clone();
        frame[at] = byte;
        frame
    };
    let others = vec![
        frame([0xff; 6], [3; 6], 60),
        frame(mac(1), mac(0), 600),
        with(FlowKey { local: [10, 0, 0, 9].into(), ..good.key }),
        with(FlowKey { remote: [10, 0, 0, 9].into(), ..good.key }),
        with(FlowKey { local_port: 81, ..good.key }),
        with(FlowKey { remote_port: 5001, ..good.key }),
        with(mirror(&good.key)),
        with(key(true)),
        changed(23, 17),
        changed(20, 0x20),
        changed(17, 0xff),
        whole[..50].to_vec(),
        whole[..13].to_vec(),
        [&whole[..12], &[0x81, 0, 0, 5], &whole[12..]].concat(),
        Build { flags: RST | ACK, ..good.clone() }.frame(),
        Build { flags: SYN | ACK, ..good.clone() }.frame(),
        Build { flags: 1 | ACK, ..good.clone() }.frame(),
        Build { flags: PSH, ..good.clone() }.frame(),
        Build { seq: ours(50), ..good.clone() }.frame(),
    ];
    for (n, frame) in others.iter().enumerate() {
        rig.twin_frame(&no_offload(), frame);
        assert_eq!(rig.arrived(), NOTHING, "{n}");
    }
    assert!(rig.tap.lock().unwrap().incoming.is_empty());
    rig.twin_frame(&no_offload(), &whole);
    assert_eq!(rig.only(PEER).payload, good.payload);
    // Nor anything once it is over.
    rig.peer(ACK, theirs(0), ours(150), 0);
    let key = rig.key;
    rig.lab.flows(0).finish(&key, 50).unwrap();
    rig.arrived();
    rig.twin_frame(&no_offload(), &whole);
    assert_eq!(rig.arrived(), NOTHING);
}

/// One answer for each probe, none longer than it; none without a buffer.
#[test]
fn abuse_R10_answers_to_probes_are_bounded() {
    let mut rig = Rig::outside().piped(500);
    let probe = rig.of_guest(ACK, ours(99), theirs(0), 1).frame();
    for _ in 0..200 {
        rig.guest_frame(0, &no_offload(), &probe);
    }
    let answers = rig.lab.guests[0].recv_all(0);
    assert_eq!(answers.len(), 60);
    for answer in &answers {
        let read = read(answer);
        assert_eq!((read.seq, read.ack, read.off_by), (theirs(0), ours(100), 0));
        assert!(answer.len() <= probe.len());
    }
    assert_eq!(rig.arrived(), NOTHING);
    // With buffers again it is answered again.
    rig.guest_frame(0, &no_offload(), &probe);
    rig.only(GUEST);
}

/// Frames that are there when asked for, and nothing else.
struct Still {
    frames: Vec<Vec<u8>>,
    at: usize,
    left: Arc<AtomicUsize>,
}

/// A wire of these frames, and the count of those that are there.
fn still(frames: Vec<Vec<u8>>) -> (Box<Still>, Arc<AtomicUsize>) {
    let left = Arc::new(AtomicUsize::new(0));
    (Box::new(Still { frames, at: 0, left: left.clone() }), left)
}

impl Wire for Still {
    unsafe fn send(&mut self, _: &[IoSlice]) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> io::Result<u32> {
        Ok(0)
    }

    fn receive(&mut self) -> Option<&[u8]> {
        let is_more = self.left.load(Ordering::Relaxed) > 0;
        is_more.then(|| &self.frames[self.at][..])
    }

    fn release(&mut self) {
        self.left.fetch_sub(1, Ordering::Relaxed);
        self.at = (self.at + 1) % self.frames.len();
    }

    fn refill(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }
}

struct Deaf(AtomicUsize);

impl FlowWatch for Deaf {
    fn flow_event(&self, _: u64, _: FlowEvent) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn poll_without_allocations(lab: &mut Lab, turns: u32, round: u32) {
    let count = allocations(|| {
        for _ in 0..turns {
            lab.poll();
            lab.arm();
            lab.disarm();
        }
    });
    assert_eq!(count, 0, "round {round}");
}

/// A twin, its guest, a peer and strangers, all at once.
#[test]
fn pipes_allocate_nothing() {
    let mut rig = Rig::outside();
    let twin = |at: u32| wired(&rig.of_twin(ACK, ours(100 + at), 100).frame());
    let (tap, twins) = still((0..50).map(|n| twin(n * 100)).collect());
    let peer =
        |n: u32| wired(&rig.of_peer(ACK, theirs(0), ours(50 * n), n as usize % 2 * 90).frame());
    let (wire, peers) = still((0..100).map(peer).collect());
    let told = Arc::new(Deaf(AtomicUsize::new(0)));
    let hook = PipeHook::new(told.clone(), tap, Arc::new(QueueStats::default()), None);
    rig.lab.set_hook(0, Box::new(hook));
    rig.lab.set_uplink(wire, Arc::default());
    rig.guest(SYN | ACK, ISS, theirs(0), 0);
    rig.guest(ACK | PSH, ours(0), theirs(0), 100);
    let key = rig.key;
    rig.lab.flows(0).hear(&key);
    rig.lab.flows(0).start(&key, 100, 5000);
    for round in 0..50_u32 {
        for n in 0..40_u32 {
            let whole = match n % 4 {
                0 => rig.of_guest(ACK, ours(99), theirs(0), 0),
                1 => rig.of_guest(ACK | PSH, ours(50), theirs(0), 200),
                2 => rig.of_guest(ACK | PSH, ours(100), theirs(0), 20),
                _ => Build {
                    key: FlowKey { local_port: (round * 40 + n) as u16, ..key },
                    ..rig.of_guest(SYN, n, 0, 0)
                },
            };
            rig.lab.guests[0].send(0, &no_offload(), &whole.frame(), 1);
        }
        twins.store(40, Ordering::Relaxed);
        peers.store(100, Ordering::Relaxed);
        poll_without_allocations(&mut rig.lab, 6, round);
        while rig.lab.guests[0].tx[0].used().is_some() {}
        rig.lab.guests[0].recv_all(0);
        rig.lab.guests[0].post_up_to(0, 60, 1600, 1);
    }
    assert_eq!((twins.load(Ordering::Relaxed), peers.load(Ordering::Relaxed)), (0, 0));
    assert_eq!(told.0.load(Ordering::Relaxed), 0);
}

/// A twin that receives: small and large frames, from outside and from another guest's memory.
#[test]
fn receiving_allocates_nothing() {
    for peer in [OUTSIDE, mac(1)] {
        let mut rig = Rig::new(false, peer, vec![Spec::default(), Spec::default()]);
        let twin = Build { ack: theirs(900), ..rig.of_twin(ACK, ours(0), 0) };
        let (tap, twins) = still(vec![wired(&twin.frame())]);
        let of_peer = |n: u32| rig.of_peer(ACK, theirs(100 * n), ours(10 * n), 700 * n as usize);
        let frames: Vec<_> = (0..8).map(|n| of_peer(n).frame()).collect();
        let (wire, peers) = still(frames.iter().map(|frame| wired(frame)).collect());
        let told = Arc::new(Deaf(AtomicUsize::new(0)));
        let hook = PipeHook::new(told, tap, Arc::new(QueueStats::default()), None);
        rig.lab.set_hook(0, Box::new(hook));
        rig.lab.set_uplink(wire, Arc::default());
        rig.guest(SYN | ACK, ISS, theirs(0), 0);
        rig.guest(ACK | PSH, ours(0), theirs(0), 100);
        let key = rig.key;
        rig.lab.flows(0).hear(&key);
        let taken = rig.lab.flows(0).receive_snapshot(&key, 0).unwrap();
        rig.lab.flows(0).start_receiving(&key, 1, &taken, 0, 5000).unwrap();
        for round in 0..20_u32 {
            for frame in &frames {
                match peer {
                    OUTSIDE => drop(peers.fetch_add(1, Ordering::Relaxed)),
                    _ => drop(rig.lab.guests[1].send(0, &no_offload(), frame, 4)),
                }
            }
            twins.store(2, Ordering::Relaxed);
            poll_without_allocations(&mut rig.lab, 4, round);
            while rig.lab.guests[1].tx[0].used().is_some() {}
            rig.lab.guests[0].recv_all(0);
            rig.lab.guests[0].post_up_to(0, 60, 1600, 1);
        }
    }
}
