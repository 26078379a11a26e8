//! Ports that are charged to accounts.

use std::os::fd::RawFd;

use base::counter::DropReason;
use frame::{Allowed, Frame, FrameBuffer, Head, HeadBytes};
use sidecore::{Accounts, Arm, Settings, Worker};

use super::uplink::wired;
use crate::hook::{FromGuest, Outbox, Polled, PortHook, Queued, ToGuest};
use crate::testing::{BROADCAST, Lab, Spec, frame, mac, no_offload};

/// Opens an account for each of the first guests.
pub fn open(lab: &mut Lab, settings: &[Settings]) {
    let accounts = Accounts::default();
    for (n, settings) in settings.iter().enumerate() {
        let account = accounts.open(&format!("vm{n}"), *settings);
        lab.port(n).vm = account.id();
        lab.ledger.enrol(account);
    }
}

fn weight(weight: u32) -> Settings {
    Settings { weight, ..Settings::default() }
}

#[test]
fn weights_hold_between_two_saturating_ports() {
    // The heavier one sends the smaller frames.
    for (lens, due) in [([60, 60], [1, 3]), ([1514, 1514], [1, 3]), ([1514, 512], [512, 3 * 1514])]
    {
        let mut lab = Lab::new(vec![Spec::default(), Spec::default(), Spec::default()]);
        lab.introduce();
        open(&mut lab, &[weight(100), weight(300)]);
        let whole = |n: usize| [&no_offload()[..], &frame(mac(2), mac(n), lens[n])[..]].concat();
        let sent = [0, 1].map(|n| lab.guests[n].tx[0].buffer(&whole(n)));
        let room = lab.guests[2].rx[0].buffer(&[0; 1600]);
        let mut frames = [0u64; 2];
        for _ in 0..3000 {
            for n in 0..2 {
                let driver = &mut lab.guests[n].tx[0];
                while driver.used().is_some() {
                    frames[n] += 1;
                }
                while driver.free_descriptors() > 0 {
                    driver.offer(&[sent[n]], &[]);
                }
            }
            let driver = &mut lab.guests[2].rx[0];
            while driver.used().is_some() {}
            while driver.free_descriptors() > 0 {
                driver.offer(&[], &[room]);
            }
            lab.advance(10_000);
            lab.poll();
            lab.ledger.end_round(lab.now_ns);
        }
        let ratio = frames[1] as f64 / frames[0] as f64 * f64::from(due[0]) / f64::from(due[1]);
        assert!((0.95..1.05).contains(&ratio), "{lens:?}: {frames:?}");
    }
}

#[test]
fn a_port_at_its_ceiling_waits_asleep() {
    let mut lab = Lab::pair();
    let settings =
        Settings { ceiling_ops_per_s: 1000, ceiling_burst_ms: 10, ..Settings::default() };
    lab.advance(1_000_000_000);
    open(&mut lab, &[settings]);
    lab.guests[1].post(0, 64, 1600, 1);
    for _ in 0..12 {
        lab.guests[0].send(0, &no_offload(), &frame(mac(1), mac(0), 60), 1);
    }
    assert_eq!(lab.poll(), 10);
    assert_eq!(lab.poll(), 0);
    let Arm::Until(at_ns) = lab.engine.arm(lab.now_ns, &mut lab.ledger) else {
        panic!("no time to wake at");
    };
    assert!((lab.now_ns + 1..=lab.now_ns + 1_000_000).contains(&at_ns));
    lab.engine.disarm();
    lab.now_ns = at_ns;
    assert_eq!(lab.poll(), 1);
    lab.advance(1_000_000);
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 12);
}

/// Hook that sends the same frame again and again.
struct Repeater(Vec<u8>);

impl PortHook for Repeater {
    fn from_guest(&mut self, _: &mut Head, _: &mut HeadBytes, _: u64) -> FromGuest {
        FromGuest::Pass
    }

    unsafe fn to_guest(
        &mut self,
        _: &Frame<'_>,
        _: &mut HeadBytes,
        _: &mut FrameBuffer,
        _: u64,
    ) -> ToGuest {
        ToGuest { guest: None, wants_receipt: false, may_miss: true, queued: Queued::Nothing }
    }

    fn delivered(&mut self, _: &Frame<'_>) {}

    fn poll(&mut self, head: &mut Head) -> Polled<'_> {
        head.load_slice(&self.0, Allowed::ALL).unwrap();
        let start = head.bytes().len();
        Polled::Frame(&self.0[start..])
    }

    fn polled(&mut self, _: Result<(), DropReason>, _: usize) {}

    fn refill(&mut self) -> bool {
        true
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn flush(&mut self) {}

    fn notices(&mut self, _: &mut Outbox) {}

    fn event_fd(&self) -> Option<RawFd> {
        None
    }
}

#[test]
fn a_hooks_frames_end_at_the_ceiling_in_requests() {
    let mut lab = Lab::pair();
    let settings =
        Settings { ceiling_ops_per_s: 1000, ceiling_burst_ms: 10, ..Settings::default() };
    lab.advance(1_000_000_000);
    open(&mut lab, &[settings]);
    lab.set_hook(0, Box::new(Repeater([&no_offload()[..], &frame(mac(1), mac(0), 60)].concat())));
    lab.guests[1].post(0, 128, 1600, 1);
    assert_eq!(lab.poll(), 10);
    assert_eq!(lab.poll(), 0);
    lab.advance(3_000_000);
    assert_eq!(lab.poll(), 3);
    assert_eq!(lab.guests[1].recv_all(0).len(), 13);
}

#[test]
fn frames_from_outside_are_charged_and_end_at_the_ceiling() {
    let mut lab = Lab::pair();
    let wire = lab.set_wire();
    lab.advance(1_000_000_000);
    let settings =
        Settings { ceiling_bytes_per_s: 1_000_000, ceiling_burst_ms: 100, ..Settings::default() };
    open(&mut lab, &[settings]);
    let outside = [0x02, 0, 0, 0, 0, 0x77];
    let mut got = 0;
    for _ in 0..20 {
        lab.guests[0].post_up_to(0, 64, 1600, 1);
        let frames = (0..50).map(|_| wired(&frame(mac(0), outside, 1500)));
        wire.lock().unwrap().incoming.extend(frames);
        wire.lock().unwrap().incoming.push_back(wired(&frame(BROADCAST, outside, 60)));
        lab.poll();
        got += lab.guests[0].recv_all(0).iter().filter(|f| f.len() == 1500).count();
        lab.ledger.end_round(lab.now_ns);
    }
    // A burst of 100,000 bytes, and what comes before the buckets are asked again.
    assert!((60..110).contains(&got), "{got}");
    let dropped = lab.uplink_stats().drops[DropReason::Throttled as usize].get();
    assert_eq!(dropped as usize, 1000 - got);
}
