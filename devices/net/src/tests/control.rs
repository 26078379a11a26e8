//! The control queue, and what its requests change.
#![allow(non_snake_case)]

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use queue::Layout;
use queue::testing::{ModelDriver, ModelOptions};

use crate::BindMode;
use crate::control;
use crate::features as f;
use crate::port::ControlQueue;
use crate::testing::{BROADCAST, Lab, MODERN, Spec, frame, mac, no_offload, vnet};
use frame::{F_NEEDS_CSUM, Mac};

const CONTROL: u64 = f::CTRL_VQ | f::CTRL_RX | f::CTRL_MAC_ADDR | f::WHOLE_DEVICE;
const RX: u8 = 0;
const MAC: u8 = 1;
const VLAN: u8 = 2;
const ANNOUNCE: u8 = 3;
const MQ: u8 = 4;
const OFFLOADS: u8 = 5;
const OK: Option<u8> = Some(0);
const ERR: Option<u8> = Some(1);

/// A guest with a control queue, guest 0, and another one.
struct Bench {
    lab: Lab,
    driver: ModelDriver,
}

impl Bench {
    fn new(spec: Spec) -> Self {
        let (features, layout, pairs) = (spec.features | CONTROL, spec.layout, spec.pairs);
        let mut lab = Lab::new(vec![Spec { features, ..spec }, Spec::default()]);
        lab.introduce();
        let ram = lab.guests[0].ram.clone();
        let driver = ModelDriver::in_ram(ram, layout, 64, ModelOptions::default());
        let mut bench = Self { lab, driver };
        let index = control::index(features, pairs).unwrap();
        bench.start(index);
        bench
    }

    fn start(&mut self, index: u16) {
        let vring = self.driver.vring(index);
        let port = self.lab.port(0);
        control::start(port, &vring);
        port.control = Some(Box::new(ControlQueue::new(vring)));
    }

    /// The answer to a request; none when it was not answered.
    fn ask(&mut self, class: u8, command: u8, data: &[u8]) -> Option<u8> {
        self.ask_raw(&[&[class, command], data].concat())
    }

    fn ask_raw(&mut self, bytes: &[u8]) -> Option<u8> {
        let request = self.driver.buffer(bytes);
        let ack = self.driver.buffer(&[0xee]);
        self.driver.offer(&[request], &[ack]);
        self.lab.poll();
        let (_, written) = self.driver.used()?;
        assert_eq!(written, 1);
        Some(self.driver.read(ack.0, 1)[0])
    }

    /// Whether guest 0 receives a frame to `dst` from the other one, on any of its queues.
    fn takes(&mut self, bytes: &[u8]) -> bool {
        let guests = &mut self.lab.guests;
        for queue in 0..guests[0].rx.len() {
            guests[0].post_up_to(queue, 4, 2048, 1);
        }
        guests[1].send(0, &no_offload(), bytes, 1);
        self.lab.poll();
        let guest = &mut self.lab.guests[0];
        (0..guest.rx.len()).map(|queue| guest.recv_all(queue).len()).sum::<usize>() == 1
    }

    fn takes_to(&mut self, dst: [u8; 6]) -> bool {
        self.takes(&frame(dst, mac(1), 100))
    }
}

const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];
const UNKNOWN: [u8; 6] = [2, 7, 7, 7, 7, 7];

fn table(unicast: &[[u8; 6]], multicast: &[[u8; 6]]) -> Vec<u8> {
    let one = |macs: &[[u8; 6]]| [&(macs.len() as u32).to_le_bytes()[..], &macs.concat()].concat();
    [one(unicast), one(multicast)].concat()
}

#[test]
fn abuse_N2_receive_modes_act_on_what_the_switch_delivers() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut bench = Bench::new(Spec { layout, ..Spec::default() });
        assert!([BROADCAST, GROUP, UNKNOWN, mac(0)].map(|dst| bench.takes_to(dst)) == [true; 4]);
        let floods = bench.lab.stats.flood_drops.get();
        assert_eq!(bench.ask(RX, 0, &[0]), OK);
        let taken = [BROADCAST, GROUP, UNKNOWN, mac(0)].map(|dst| bench.takes_to(dst));
        assert_eq!(taken, [true, false, false, true]);
        assert_eq!(
            bench.lab.stats.flood_drops.get(),
            floods,
            "a frame that is not wanted is no loss"
        );
        assert_eq!(bench.ask(RX, 1, &[1]), OK);
        assert!(bench.takes_to(GROUP));
        assert_eq!((bench.ask(RX, 2, &[1]), bench.ask(RX, 5, &[1])), (OK, OK));
        assert!(bench.takes_to(UNKNOWN) && !bench.takes_to(BROADCAST));
        assert_eq!((bench.ask(RX, 3, &[1]), bench.ask(RX, 4, &[1])), (OK, OK));
        assert!(!bench.takes_to(GROUP) && !bench.takes_to(mac(0)), "also by the short way");
    }
}

#[test]
fn abuse_N2_the_table_of_addresses_is_a_filter() {
    let mut bench = Bench::new(Spec::default());
    assert_eq!(bench.ask(RX, 0, &[0]), OK);
    assert_eq!(bench.ask(MAC, 0, &table(&[UNKNOWN], &[GROUP])), OK);
    assert!(bench.takes_to(UNKNOWN) && bench.takes_to(GROUP));
    assert_eq!(bench.ask(MAC, 0, &table(&[], &[])), OK);
    assert!(!bench.takes_to(UNKNOWN) && !bench.takes_to(GROUP));
    // More than we hold: all of the kind.
    assert_eq!(bench.ask(MAC, 0, &table(&[], &[[1, 1, 1, 1, 1, 1]; 65])), OK);
    assert!(!bench.takes_to(UNKNOWN) && bench.takes_to(GROUP));
    // Lengths that are not those of the tables change nothing.
    let whole = table(&[UNKNOWN], &[]);
    for len in 0..whole.len() {
        assert_eq!(bench.ask(MAC, 0, &whole[..len]), ERR, "{len}");
    }
    assert_eq!(bench.ask(MAC, 0, &[&whole[..], &[0]].concat()), ERR);
    assert_eq!(bench.ask(MAC, 0, &[0xff; 8]), ERR);
    assert!(!bench.takes_to(UNKNOWN) && bench.takes_to(GROUP));
}

#[test]
fn abuse_N2_vlans_are_filtered() {
    let mut bench = Bench::new(Spec::default());
    let tagged = |dst: [u8; 6], id: u8| {
        let mut bytes = frame(dst, mac(1), 100);
        bytes.splice(12..12, [0x81, 0, 0, id]);
        bytes
    };
    assert!(bench.takes(&tagged(mac(0), 5)), "promiscuous at first");
    assert_eq!(bench.ask(RX, 0, &[0]), OK);
    assert!(bench.takes_to(mac(0)) && !bench.takes(&tagged(mac(0), 5)));
    assert_eq!(bench.ask(VLAN, 0, &5u16.to_le_bytes()), OK);
    assert!(bench.takes(&tagged(mac(0), 5)) && !bench.takes(&tagged(mac(0), 6)));
    assert_eq!(bench.ask(VLAN, 1, &5u16.to_le_bytes()), OK);
    assert!(!bench.takes(&tagged(mac(0), 5)));
    assert_eq!(bench.ask(VLAN, 0, &4096u16.to_le_bytes()), ERR);
    assert_eq!(bench.ask(VLAN, 2, &5u16.to_le_bytes()), ERR);
}

#[test]
fn abuse_N2_a_bound_port_cannot_take_another_address() {
    // Bound by its first frame.
    let mut bench = Bench::new(Spec::default());
    assert_eq!(bench.ask(MAC, 1, &mac(0)), OK);
    for bad in [UNKNOWN, GROUP, [0; 6], BROADCAST] {
        assert_eq!(bench.ask(MAC, 1, &bad), ERR);
    }
    let mut bench = Bench::new(Spec { bind: BindMode::Off, ..Spec::default() });
    assert_eq!((bench.ask(RX, 0, &[0]), bench.ask(MAC, 1, &UNKNOWN)), (OK, OK));
    assert!(bench.takes_to(UNKNOWN));
    assert_eq!(bench.ask(MAC, 1, &GROUP), ERR);
}

#[test]
fn abuse_N2_queue_pairs_receive_as_far_as_the_driver_wants() {
    let spec = || Spec { pairs: 4, features: MODERN | f::MQ, ..Spec::default() };
    let mut bench = Bench::new(spec());
    assert_eq!(bench.lab.port(0).rx_running, [0]);
    for (pairs, answer, running) in [(3u16, OK, 3), (0, ERR, 3), (5, ERR, 3), (4, OK, 4)] {
        assert_eq!(bench.ask(MQ, 0, &pairs.to_le_bytes()), answer);
        assert_eq!(bench.lab.port(0).rx_running.len(), running);
    }
    assert_eq!(bench.ask(MQ, 1, &[0; 2]), ERR, "receive-side scaling was not offered");
    let mut bench = Bench::new(Spec { features: MODERN, ..spec() });
    assert_eq!(bench.driver.queue().size(), 64);
    assert_eq!(bench.ask(MQ, 0, &[1, 0]), ERR, "not negotiated");
    // Its control queue is the third then.
    assert_eq!(control::index(CONTROL, 4), Some(2));
    assert_eq!(control::index(CONTROL | f::MQ, 4), Some(8));
    assert_eq!(control::index(CONTROL | f::MQ, 16), Some(32));
    assert_eq!(control::index(0, 4), None);
}

#[test]
fn abuse_N2_receive_offloads_can_be_switched_off_and_on() {
    let mut bench = Bench::new(Spec::default());
    let own = MODERN & f::GUEST_OFFLOADS;
    let partial = |bench: &mut Bench| {
        let header = vnet(F_NEEDS_CSUM, 0, 0, 34, 16);
        let mut bytes = frame(mac(0), mac(1), 100);
        bytes[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 86, 0, 0, 0, 0, 64, 6]);
        bench.lab.guests[0].post_up_to(0, 4, 2048, 1);
        bench.lab.guests[1].send(0, &header, &bytes, 1);
        bench.lab.poll();
        bench.lab.guests[0].recv(0).unwrap().0[0] == F_NEEDS_CSUM
    };
    assert!(partial(&mut bench));
    assert_eq!(bench.ask(OFFLOADS, 0, &0u64.to_le_bytes()), OK);
    assert!(!partial(&mut bench));
    assert_eq!(bench.ask(OFFLOADS, 0, &(1u64 << 10).to_le_bytes()), ERR);
    assert_eq!(bench.ask(OFFLOADS, 0, &own.to_le_bytes()), OK);
    assert!(partial(&mut bench));
}

#[test]
fn abuse_N2_a_driver_says_when_it_has_announced_itself() {
    let mut bench = Bench::new(Spec::default());
    let asks = Arc::clone(&bench.lab.port(0).announce);
    assert!(!asks.load(Relaxed), "a driver that begins is known by its first frame");
    assert_eq!(bench.ask(ANNOUNCE, 0, &[]), OK);
    // Another daemon takes over.
    let control = bench.lab.port(0).control.take().unwrap();
    let features = bench.lab.port(0).features;
    bench.lab.port(0).set_features(features);
    control::start(bench.lab.port(0), &control.vring);
    bench.lab.port(0).control = Some(control);
    for (command, data) in [(1, &[][..]), (0, &[0])] {
        assert_eq!((bench.ask(ANNOUNCE, command, data), asks.load(Relaxed)), (ERR, true));
    }
    assert_eq!((bench.ask(ANNOUNCE, 0, &[]), asks.load(Relaxed)), (OK, false));
    // Who did not negotiate it is not asked.
    bench.lab.port(0).set_features(features & !f::GUEST_ANNOUNCE);
    let control = bench.lab.port(0).control.take().unwrap();
    control::start(bench.lab.port(0), &control.vring);
    bench.lab.port(0).control = Some(control);
    assert_eq!((bench.ask(ANNOUNCE, 0, &[]), asks.load(Relaxed)), (ERR, false));
}

#[test]
fn abuse_D4_B2_a_request_of_buffers_that_cannot_be_read_is_refused_and_the_next_is_served() {
    let mut bench = Bench::new(Spec::default());
    let ack = bench.driver.buffer(&[0xee]);
    let outside = (bench.driver.unmapped_addr(), 3);
    let piece = bench.driver.buffer(&[RX]);
    for request in [vec![outside], vec![piece; base::limits::MAX_CHAIN_SEGS + 1]] {
        bench.driver.offer_indirect(&request, &[ack]);
        bench.lab.poll();
        assert_eq!(bench.driver.used().unwrap().1, 1);
        assert_eq!(bench.driver.read(ack.0, 1)[0], 1);
    }
    assert_eq!(bench.ask(RX, 0, &[0]), OK);
}

#[test]
fn abuse_N2_a_request_without_room_for_an_answer_breaks_its_own_port() {
    let mut bench = Bench::new(Spec::default());
    let request = bench.driver.buffer(&[RX, 0, 1]);
    bench.driver.offer(&[request], &[]);
    bench.lab.poll();
    assert!(bench.driver.health().reason().unwrap().contains("room for an answer"));
    assert!(bench.lab.judge(1, &frame(BROADCAST, mac(1), 60)).is_none(), "no other notices");
}

#[test]
fn a_pause_keeps_what_the_driver_asked_for_and_a_new_driver_begins_anew() {
    let mut bench = Bench::new(Spec::default());
    assert_eq!(bench.ask(RX, 0, &[0]), OK);
    let control = bench.lab.port(0).control.take().unwrap();
    assert!(!bench.takes_to(GROUP));
    // Goes on where it stood.
    control::start(bench.lab.port(0), &control.vring);
    bench.lab.port(0).control = Some(control);
    assert!(!bench.takes_to(GROUP));
    // Another daemon takes over: it does not know, and delivers what any driver takes.
    let control = bench.lab.port(0).control.take().unwrap();
    let features = bench.lab.port(0).features;
    bench.lab.port(0).set_features(features);
    control::start(bench.lab.port(0), &control.vring);
    assert!(bench.takes_to(GROUP));
    assert_eq!(bench.lab.port(0).rx_features & f::GUEST_OFFLOADS, 0);
    // A driver that is loaded anew begins with a new ring.
    let (layout, ram) = (Layout::Split, bench.lab.guests[0].ram.clone());
    bench.driver = ModelDriver::in_ram(ram, layout, 64, ModelOptions::default());
    bench.start(2);
    assert_eq!(bench.lab.port(0).rx_features, features);
    assert_eq!(bench.lab.port(0).filter.as_ref().unwrap().mac, Some(Mac::new(mac(0))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any request is answered, and the port lives.
    #[test]
    fn abuse_N2_any_request_is_answered(
        requests in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..80), 1..20),
        classes in prop::collection::vec((0u8..8, 0u8..8), 20),
    ) {
        let mut bench = Bench::new(Spec { pairs: 2, features: MODERN | f::MQ, ..Spec::default() });
        for (mut request, (class, command)) in requests.into_iter().zip(classes) {
            if request.len() > 2 {
                (request[0], request[1]) = (class, command);
            }
            prop_assert!(bench.ask_raw(&request).is_some_and(|answer| answer <= 1));
        }
        prop_assert!(bench.driver.health().is_live());
    }
}
