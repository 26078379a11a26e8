//! Ports that are charged to accounts.

use sidecore::{Account, Accounts, SEG_CHARGE_BYTES, Settings};
use std::sync::atomic::Ordering;

use super::*;
use crate::limits::MIN_CHARGE_BYTES;

/// Opens an account for each guest.
fn open(world: &mut TestDomain) -> Vec<Arc<Account>> {
    let accounts = Accounts::default();
    let ids = world.ids.clone();
    let open = ids.into_iter().enumerate().map(|(n, id)| {
        let account = accounts.open(&format!("vm{n}"), Settings::default());
        world.engine.table.ports.get_mut(id).unwrap().spec.vm = account.id();
        world.ledger.enrol(Arc::clone(&account));
        account
    });
    open.collect()
}

/// A packet that belongs to no connection: it costs what it is long.
fn send_stray(guest: &mut Guest, len: usize) {
    let key = ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 };
    let mut header = guest.header(key, Op::Rw);
    header.len = (len as u32).into();
    guest.send(&header, &vec![7; len]);
}

fn taken(world: &TestDomain, guest: usize) -> u64 {
    world.guests[guest].tx.stats().requests.get()
}

fn round(world: &mut TestDomain) {
    world.turn();
    world.ledger.end_round(world.now_ns);
}

/// A turn is 40 KiB while others do anything: one packet of 64 KiB, which exceeds it, and not as
/// many as would fit if they were short.
#[test]
fn abuse_R10_long_packets_keep_to_the_turn() {
    const LONG: usize = 64 << 10;
    for layout in [Layout::Split, Layout::Packed] {
        let mut world = TestDomain::new();
        world.add_guest(layout, |_| {});
        world.add_guest(layout, |_| {});
        let accounts = open(&mut world);
        for guest in &mut world.guests {
            send_stray(guest, 0);
        }
        round(&mut world);
        // Short ones before: the mean of the last batch says that many fit.
        for _ in 0..16 {
            send_stray(&mut world.guests[0], LONG);
        }
        for n in 0..16 {
            assert_eq!(taken(&world, 0), 1 + n);
            send_stray(&mut world.guests[1], 0);
            round(&mut world);
        }
        assert_eq!(taken(&world, 0), 17);
        // What was given back was not charged, and nothing was lost.
        world.guests[0].collect();
        assert_eq!(world.guests[0].slots.len(), TX_SLOTS);
        // Ledgers tell what they charged about once a millisecond.
        world.now_ns += 2_000_000;
        round(&mut world);
        let charged = accounts[0].stats.charged_bytes.load(Ordering::Relaxed);
        let sent = MIN_CHARGE_BYTES + 16 * (HEADER + LONG) as u64;
        let answers = world.guests[0].inbox.len() as u64 * MIN_CHARGE_BYTES;
        assert!((sent..=sent + answers).contains(&charged), "{charged} {sent} {answers}");
    }
}

/// Descriptors are paid for by what they cost to walk, in packets and in the buffers for them.
#[test]
fn abuse_R10_packets_in_pieces_are_charged_for_each() {
    const PIECES: u64 = 100;
    for layout in [Layout::Split, Layout::Packed] {
        let mut world = TestDomain::new();
        world.add_guest(layout, |_| {});
        let accounts = open(&mut world);
        let guest = &mut world.guests[0];
        let key = ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 };
        let header = guest.header(key, Op::Rst);
        let addr = guest.slots.pop().unwrap();
        guest.tx.write(addr, header.as_bytes());
        let mut pieces = vec![(addr, HEADER as u64 as u32)];
        pieces.extend((1..PIECES).map(|_| (addr, 1)));
        guest.tx.offer(&pieces, &[]);
        round(&mut world);
        world.now_ns += 2_000_000;
        round(&mut world);
        let charged = accounts[0].stats.charged_bytes.load(Ordering::Relaxed);
        assert_eq!((taken(&world, 0), charged), (1, PIECES * SEG_CHARGE_BYTES));
    }
}
