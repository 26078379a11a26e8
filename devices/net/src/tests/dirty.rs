//! Marks of a receive queue in the dirty log while a migration runs (ABUSE P11), and a memory
//! table that was replaced is let go.
#![allow(non_snake_case)]

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use queue::dirty::{DirtyLog, LOG_PAGE_BYTES};
use queue::testing::{GUEST_BASE, GuestRam};
use queue::{Layout, MemoryShare};

use crate::testing::{Lab, Spec, frame, mac};

/// Room for the bits of 8 GiB of addresses: a model guest's memory starts at 4 GiB.
const LOG_BYTES: usize = 256 << 10;

fn pages(addr: u64, len: u64) -> std::ops::RangeInclusive<u64> {
    addr / LOG_PAGE_BYTES..=(addr + len - 1) / LOG_PAGE_BYTES
}

fn dirty(log: &GuestRam) -> BTreeSet<u64> {
    let bytes = log.read(GUEST_BASE, LOG_BYTES);
    let bits = bytes.iter().enumerate().filter(|(_, b)| **b != 0);
    bits.flat_map(|(at, b)| (0..8).filter(move |bit| b >> bit & 1 != 0).map(move |bit| (at, bit)))
        .map(|(at, bit)| at as u64 * 8 + bit)
        .collect()
}

/// Two guests; the second one's receive queue logs.
fn logged(layout: Layout) -> (Lab, Arc<GuestRam>) {
    let receiver = Spec { layout, mtu: 9000, ..Spec::default() };
    let mut lab = Lab::new(vec![Spec::default(), receiver]);
    lab.introduce();
    let ram = GuestRam::new(LOG_BYTES);
    let log = DirtyLog::new(&MemoryShare::new(), ram.fd(), LOG_BYTES as u64, 0).unwrap();
    let memory = lab.guests[1].ram.memory().with_log(Some(Arc::new(log)));
    let rxq = lab.port(1).rx[0].as_deref_mut().unwrap();
    rxq.vring.queue.set_memory(memory).unwrap();
    (lab, ram)
}

/// Sends a frame of `len` bytes into buffers of these pieces, each on pages of its own, and checks
/// that exactly the written pages are dirty.
fn check(layout: Layout, len: usize, buffers: &[&[usize]]) {
    let (mut lab, log) = logged(layout);
    let mut posted = HashMap::new();
    let driver = &mut lab.guests[1].rx[0];
    for pieces in buffers {
        let alloc = |len: &usize| (driver.ram().alloc_aligned(*len, LOG_PAGE_BYTES), *len as u32);
        let bufs: Vec<_> = pieces.iter().map(alloc).collect();
        posted.insert(driver.offer(&[], &bufs), bufs);
    }
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), len)), None);
    let mut wanted = BTreeSet::new();
    let mut total = 0;
    while let Some((id, written)) = lab.guests[1].rx[0].used() {
        total += written as usize;
        let mut left = u64::from(written);
        for (addr, len) in &posted[&id] {
            let here = left.min(u64::from(*len));
            if here > 0 {
                wanted.extend(pages(*addr, here));
            }
            left -= here;
        }
    }
    assert_eq!(total, 12 + len);
    assert_eq!(dirty(&log), wanted, "{layout:?} {len} {buffers:?}");
}

#[test]
fn abuse_P11_pages_of_received_frames_are_logged() {
    for layout in [Layout::Split, Layout::Packed] {
        // In one buffer: copied as a whole.
        check(layout, 60, &[&[12_288]]);
        check(layout, 5000, &[&[12_288]]);
        check(layout, 5000, &[&[12, 4096, 8192]]);
        // In several.
        check(layout, 5000, &[&[2048], &[2048], &[2048], &[2048]]);
        check(layout, 8000, &[&[12, 4096], &[2000], &[100, 6000]]);
    }
}

#[test]
fn abuse_P11_pages_of_frames_finished_in_software_are_logged() {
    use crate::features as f;
    use frame::testing::{make_partial, super_packet};
    let (mut lab, log) = logged(Layout::Split);
    lab.port(1).set_features(crate::testing::MODERN & !f::OFFLOADS);
    let (mut bytes, vnet) = super_packet(false, false, 4200, 1400);
    bytes[..6].copy_from_slice(&mac(1));
    bytes[6..12].copy_from_slice(&mac(0));
    make_partial(&mut bytes, &vnet);
    let driver = &mut lab.guests[1].rx[0];
    let mut posted = HashMap::new();
    for _ in 0..4 {
        let addr = driver.ram().alloc_aligned(4096, LOG_PAGE_BYTES);
        posted.insert(driver.offer(&[], &[(addr, 2048)]), addr);
    }
    assert_eq!(lab.judge_with(0, &vnet.to_bytes(0), &bytes), None);
    let used = std::iter::from_fn(|| lab.guests[1].rx[0].used());
    let wanted: BTreeSet<u64> = used.map(|(id, _)| posted[&id] / LOG_PAGE_BYTES).collect();
    assert_eq!(wanted.len(), 3);
    assert_eq!(dirty(&log), wanted);
}

/// A queue without traffic must not keep a removed region mapped.
#[test]
fn buffers_given_back_let_go_of_their_memory_table() {
    let mut lab = Lab::pair();
    let own = lab.guests[1].ram.memory();
    let old = own.with_log(None);
    let gone = Arc::downgrade(&old);
    let rxq = lab.port(1).rx[0].as_deref_mut().unwrap();
    rxq.vring.queue.set_memory(old).unwrap();
    // One of them is used, the others are taken and kept.
    lab.guests[1].post(0, 8, 1600, 1);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), None);
    let rxq = lab.port(1).rx[0].as_deref_mut().unwrap();
    rxq.give_back();
    rxq.vring.queue.set_memory(own).unwrap();
    assert!(gone.upgrade().is_none(), "somebody still has the old table");
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 61)), None);
    assert_eq!(lab.guests[1].recv_all(0).len(), 2);
}
