//! Requests of more segments than a slot has room for, of more than are served, and with buffers
//! that are not there.

use base::limits::MAX_CHAIN_SEGS;
use queue::{GuestMemory, Layout};
use sidecore::Worker;

use crate::Refusal;
use crate::backend::Demands;
use crate::dropper;
use crate::limits::{MAX_OP_SEGS, WIDE_COUNT};
use crate::null::NullBackend;
use crate::raw::RawBackend;
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Rig, RigOptions, UNTOUCHED, alloc, pattern};

const LEN: usize = 4 << 20;

fn rig(layout: Layout, demands: Demands) -> (Rig, ModelDisk) {
    let disk = ModelDisk::new(LEN);
    let options = RigOptions { demands, ..RigOptions::default() };
    (Rig::with_disk(layout, disk.boxed(), options), disk)
}

/// The buffer at `addr` in pieces of these lengths, over and over, `count` of them; and their sum.
fn pieces(addr: u64, lens: &[u32], count: usize) -> (Vec<(u64, u32)>, usize) {
    let mut at = addr;
    let cut = |n: usize| {
        let piece = (at, lens[n % lens.len()]);
        at += u64::from(piece.1);
        piece
    };
    let all: Vec<_> = (0..count).map(cut).collect();
    (all, (at - addr) as usize)
}

/// Writes, then reads back, through chains of so many data segments.
fn there_and_back(rig: &mut Rig, lens: &[u32], count: usize) {
    let len: usize = pieces(0, lens, count).1;
    let data = pattern(count as u64, len);
    let from = rig.driver.buffer(&data);
    let to = rig.driver.buffer(&vec![0xee; len]);
    let (readable, _) = pieces(from.0, lens, count);
    let (mut writable, _) = pieces(to.0, lens, count);
    let (write, read) = (rig.status_byte(), rig.status_byte());
    let header = rig.header(kind::OUT, 16);
    rig.driver.offer_indirect(&[&[header], &readable[..]].concat(), &[write]);
    assert_eq!(rig.settle().len(), 1);
    writable.push(read);
    let header = rig.header(kind::IN, 16);
    rig.driver.offer_indirect(&[header], &writable);
    assert_eq!(rig.settle()[0].1 as usize, len + 1);
    assert_eq!([rig.driver.read(write.0, 1), rig.driver.read(read.0, 1)], [[0], [0]]);
    assert!(rig.driver.read(to.0, len) == data, "{count} pieces of {lens:?}");
    assert!(rig.driver.health().is_live());
}

#[test]
fn abuse_B2_a_thousand_segments_are_written_and_read_back() {
    for layout in BOTH {
        let (mut rig, _disk) = rig(layout, Demands::NONE);
        for count in [255, 256, 257, 513, 1024, MAX_CHAIN_SEGS - 2] {
            there_and_back(&mut rig, &[512], count);
            there_and_back(&mut rig, &[511, 513], count & !1);
        }
        assert_eq!(rig.engine.requests.in_flight.slab.free_wide(), usize::from(WIDE_COUNT));
    }
}

/// An operation takes 256 buffers, and must end with a whole block.
#[test]
fn abuse_B2_long_requests_of_direct_disks_are_cut_at_blocks() {
    for layout in BOTH {
        let demands = Demands { mem_align: 512, offset_align: 4096, ..Demands::NONE };
        let (mut rig, disk) = rig(layout, demands);
        for lens in [&[4096][..], &[512], &[512, 1536, 2048]] {
            let whole = (0..).map(|n| 600 + n).find(|&n| pieces(0, lens, n).1.is_multiple_of(4096));
            there_and_back(&mut rig, lens, whole.unwrap());
        }
        let odd = |l: &&(&str, u64, u64)| !l.1.is_multiple_of(4096) || !l.2.is_multiple_of(4096);
        assert_eq!(disk.state().log.iter().find(odd), None);
        assert!(disk.state().log.len() > 6);
    }
}

#[test]
fn abuse_B2_files_take_requests_of_a_thousand_segments() {
    for (place, direct) in [("/dev/shm", false), ("/var/tmp", false), ("/var/tmp", true)] {
        let dir = tempfile::tempdir_in(place).unwrap();
        let path = dir.path().join("disk.img");
        std::fs::File::create(&path).unwrap().set_len(LEN as u64).unwrap();
        let backend = RawBackend::open_auto(&path, direct, false, 512).unwrap();
        let mut rig = Rig::new(Layout::Split, &backend);
        for lens in [&[4096][..], &[512]] {
            there_and_back(&mut rig, lens, 800);
        }
    }
}

#[test]
fn abuse_B2_too_many_segments_are_an_error_and_the_ring_goes_on() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout, Demands::NONE);
        let page = rig.driver.alloc(512);
        for (readable, writable) in [(1, MAX_CHAIN_SEGS), (MAX_CHAIN_SEGS, 0), (4000, 0)] {
            let kind = if writable > 0 { kind::IN } else { kind::OUT };
            let status = rig.status_byte();
            let header = rig.header(kind, 0);
            let readable = [&[header], &vec![(page, 512); readable - 1][..]].concat();
            let writable = [&vec![(page, 512); writable][..], &[status]].concat();
            rig.driver.offer_indirect(&readable, &writable);
            let good = rig.send(kind::OUT, 0, &[1; 512]);
            assert_eq!(rig.settle().len(), 2);
            assert_eq!(rig.driver.read(status.0, 1), [1]);
            assert_eq!(rig.status(good), 0);
        }
        assert_eq!(rig.stats.refused[Refusal::TooLong as usize].get(), 3);
        assert_eq!(disk.state().log.len(), 3, "only the good ones reached the disk");
        assert_eq!(rig.engine.requests.in_flight.slab.free_wide(), usize::from(WIDE_COUNT));
    }
}

/// A guest's program may splice a device's page into a file with O_DIRECT: its address is in no
/// memory table.
#[test]
fn abuse_D4_a_data_buffer_outside_memory_is_an_error_of_its_request() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout, Demands::NONE);
        let stray = (rig.driver.unmapped_addr(), 4096);
        let data = (rig.driver.alloc(4096), 4096);
        for kind in [kind::IN, kind::OUT, kind::DISCARD] {
            for buffers in [vec![stray], vec![data, stray], vec![stray, data]] {
                let (header, status) = (rig.header(kind, 0), rig.status_byte());
                let mut readable = vec![header];
                let mut writable = vec![status];
                match kind {
                    kind::IN => drop(writable.splice(0..0, buffers)),
                    _ => readable.extend(buffers),
                }
                rig.driver.offer(&readable, &writable);
                assert_eq!(rig.settle().len(), 1);
                assert_eq!(rig.driver.read(status.0, 1), [1]);
            }
        }
        // Header, or status byte, or both.
        let (header, status) = (rig.header(kind::FLUSH, 0), rig.status_byte());
        for (header, status) in [(header, (stray.0, 1)), ((stray.0, 16), (stray.0, 1))] {
            rig.driver.offer(&[header], &[status]);
            assert_eq!(rig.settle()[0].1, 0);
        }
        rig.driver.offer(&[(stray.0, 16)], &[status]);
        assert_eq!(rig.settle().len(), 1);
        assert_eq!(rig.driver.read(status.0, 1), [1]);
        assert_eq!(rig.stats.refused[Refusal::NotMapped as usize].get(), 12);
        assert!(disk.state().log.is_empty());
        rig.write(0, &[1; 512]);
        assert!(rig.driver.health().is_live());
    }
}

#[test]
fn abuse_B2_long_requests_wait_for_one_another_and_short_ones_for_them() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout, Demands::NONE);
        disk.state().hold = true;
        let page = rig.driver.alloc(512);
        let long = MAX_OP_SEGS + 44;
        let statuses: Vec<_> = (0..usize::from(WIDE_COUNT) + 3)
            .map(|_| {
                let (header, status) = (rig.header(kind::IN, 0), rig.status_byte());
                let writable = [&vec![(page, 512); long][..], &[status]].concat();
                rig.driver.offer_indirect(&[header], &writable);
                status
            })
            .collect();
        let short = rig.send(kind::OUT, 0, &[1; 512]);
        // A batch has room for six of them.
        for now_ns in 0..4 {
            rig.engine.poll(now_ns, &mut rig.ledger);
        }
        assert_eq!(rig.engine.requests.in_flight.slab.taken(), usize::from(WIDE_COUNT));
        assert_eq!(rig.engine.arm(4, &mut rig.ledger), sidecore::Arm::Idle, "it sleeps meanwhile");
        rig.engine.disarm();
        disk.let_go();
        assert_eq!(rig.settle().len(), statuses.len() + 1);
        statuses.iter().for_each(|s| assert_eq!(rig.driver.read(s.0, 1), [0]));
        assert_eq!(rig.status(short), 0);
        assert_eq!(rig.engine.requests.in_flight.slab.free_wide(), usize::from(WIDE_COUNT));
    }
}

#[test]
fn abuse_D3_lists_of_long_requests_let_go_of_a_table_that_was_exchanged() {
    let (mut rig, disk) = rig(Layout::Split, Demands::NONE);
    let offer = |rig: &mut Rig| {
        let (header, status) = (rig.header(kind::OUT, 0), rig.status_byte());
        let page = rig.driver.buffer(&[UNTOUCHED; 512]);
        let readable = [&[header], &vec![page; MAX_OP_SEGS + 1][..]].concat();
        rig.driver.offer_indirect(&readable, &[status]);
    };
    // One that is done, one in flight; then the memory goes.
    offer(&mut rig);
    rig.settle();
    disk.state().hold = true;
    offer(&mut rig);
    rig.engine.poll(1, &mut rig.ledger);
    let table = std::sync::Arc::downgrade(&rig.driver.memory());
    rig.engine.set_memory(GuestMemory::empty());
    dropper::wait();
    let in_flight = table.strong_count();
    disk.let_go();
    // Two operations, one after the other.
    for now_ns in 2..5 {
        rig.engine.poll(now_ns, &mut rig.ledger);
    }
    assert_eq!(rig.engine.requests.in_flight.slab.taken(), 0);
    dropper::wait();
    assert_eq!(in_flight - table.strong_count(), 1, "one hold for the one in flight");
}

#[test]
fn long_requests_and_bad_ones_allocate_nothing() {
    for layout in BOTH {
        let mut rig = Rig::new(layout, &NullBackend::new(LEN as u64).unwrap());
        let page = rig.driver.alloc(512);
        let stray = (rig.driver.unmapped_addr(), 512);
        let mut allocated = 0;
        for round in 0..3 {
            for buffers in [vec![(page, 512); 600], vec![stray]] {
                let (header, status) = (rig.header(kind::IN, 0), rig.status_byte());
                let writable = [&buffers[..], &[status]].concat();
                rig.driver.offer_indirect(&[header], &writable);
            }
            let before = alloc::count();
            while rig.engine.poll(round + 1, &mut rig.ledger) > 0 {}
            // The first line about a refused request is written to the log.
            if round > 0 {
                allocated += alloc::count() - before;
            }
            assert_eq!(std::iter::from_fn(|| rig.driver.used()).count(), 2);
        }
        assert_eq!(allocated, 0);
    }
}
