//! Announcements of VMs that came from another host.
#![allow(non_snake_case)]

use base::counter::DropReason;

use crate::binding::BindMode;
use crate::port::Place;
use crate::testing::{Lab, Spec, mac, no_offload};
use frame::Mac;

/// Has a guest's session announce `addr`.
fn announce(lab: &mut Lab, guest: usize, addr: [u8; 6]) -> Result<(), DropReason> {
    let serial = lab.port(guest).serial;
    let place = Place { id: guest as u16, serial };
    lab.engine.announce(place, Mac::new(addr), lab.now_ns)
}

#[test]
fn O1_an_announcement_reaches_the_uplink_and_all_others() {
    for bind in [BindMode::Off, BindMode::Mac, BindMode::MacAndIp] {
        let mut lab =
            Lab::new((0..2).map(|n| Spec { mac: Some(mac(n)), bind, ..Spec::default() }).collect());
        let wire = lab.set_wire();
        (0..2).for_each(|n| lab.guests[n].post(0, 4, 1600, 1));
        announce(&mut lab, 0, mac(0)).unwrap();
        let mut sent = std::mem::take(&mut wire.lock().unwrap().sent);
        assert_eq!(sent.len(), 1);
        sent[0][10] = 0;
        let (vnet, frame) = sent[0].split_at(12);
        assert_eq!((vnet, frame.len()), (&no_offload()[..], 60));
        assert_eq!((&frame[..6], &frame[6..12]), (&[0xff; 6][..], &mac(0)[..]));
        assert_eq!(frame[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&frame[22..28], &frame[32..38]), (&mac(0)[..], &mac(0)[..]));
        assert_eq!(lab.guests[1].recv_all(0), [frame.to_vec()]);
        assert_eq!(lab.guests[0].recv_all(0).len(), 0);
    }
}

#[test]
fn abuse_O1_nobody_announces_what_is_not_his() {
    let spec = |n| Spec { mac: Some(mac(n)), bind: BindMode::Mac, ..Spec::default() };
    let mut lab = Lab::new(vec![spec(0), spec(1)]);
    let wire = lab.set_wire();
    assert_eq!(announce(&mut lab, 0, mac(1)), Err(DropReason::Spoofed));
    assert_eq!(announce(&mut lab, 0, [0xff; 6]), Err(DropReason::Spoofed));
    lab.port(0).link_up = false;
    assert_eq!(announce(&mut lab, 0, mac(0)), Err(DropReason::LinkDown));
    assert!(wire.lock().unwrap().sent.is_empty());
    let gone = Place { id: 1, serial: u64::MAX };
    let told = lab.engine.announce(gone, Mac::new(mac(1)), 0);
    assert_eq!(told, Err(DropReason::NoDestination));
}
