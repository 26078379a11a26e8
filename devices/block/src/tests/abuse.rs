//! Tests of hostile guests, files and disks (ABUSE.md).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use queue::{GuestMemory, Layout};
use sidecore::Worker;

use crate::Refusal;
use crate::backend::Demands;
use crate::dropper;
use crate::limits::{MAX_OP_SEGS, MAX_RANGE_SECTORS, MAX_RANGES};
use crate::null::NullBackend;
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Rig, RigOptions, UNTOUCHED, pattern, range};

const LEN: usize = 1 << 20;

fn rig(layout: Layout) -> (Rig, ModelDisk) {
    let disk = ModelDisk::new(LEN);
    (Rig::with_disk(layout, disk.boxed(), RigOptions::default()), disk)
}

#[test]
fn abuse_R3_header_in_any_pieces_and_status_anywhere() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        let data = pattern(1, 1024);
        let mut bytes = [0u8; 16].to_vec();
        bytes[..4].copy_from_slice(&kind::OUT.to_le_bytes());
        bytes[8] = 4;
        bytes.extend_from_slice(&data);
        // Header split in 16 pieces; header and data in one piece; header's end with the data.
        let cuts: [&[usize]; 3] = [&[1; 16], &[16 + 1024], &[3, 9]];
        for cut in cuts {
            disk.state().cache.fill(0);
            let mut readable = Vec::new();
            let mut at = 0;
            for &n in cut {
                readable.push(rig.driver.buffer(&bytes[at..at + n]));
                at += n;
            }
            if at < bytes.len() {
                readable.push(rig.driver.buffer(&bytes[at..]));
            }
            let status = rig.status_byte();
            rig.driver.offer_indirect(&readable, &[status]);
            assert_eq!(rig.settle().len(), 1);
            assert_eq!(rig.driver.read(status.0, 1), [0]);
            assert!(disk.state().cache[2048..3072] == data);
        }
        // Data and status byte in one buffer.
        let header = rig.header(kind::IN, 4);
        let buffer = rig.driver.buffer(&[UNTOUCHED; 1025]);
        rig.driver.offer(&[header], &[buffer]);
        assert_eq!(rig.settle()[0].1, 1025);
        assert!(rig.driver.read(buffer.0, 1024) == data);
        assert_eq!(rig.driver.read(buffer.0 + 1024, 1), [0]);
    }
}

#[test]
fn abuse_R3_short_header_is_an_error_and_no_status_room_breaks_the_port() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        for len in [1, 15] {
            let header = rig.driver.buffer(&vec![0; len]);
            let status = rig.status_byte();
            rig.driver.offer(&[header], &[status]);
            assert_eq!(rig.settle()[0].1, 1);
            assert_eq!(rig.driver.read(status.0, 1), [1]);
        }
        // Nothing but a status byte.
        let status = rig.status_byte();
        rig.driver.offer(&[], &[status]);
        assert_eq!(rig.settle().len(), 1);
        assert_eq!(rig.stats.refused[Refusal::ShortHeader as usize].get(), 3);
        assert!(rig.driver.health().is_live());
        // No status byte.
        let header = rig.header(kind::FLUSH, 0);
        rig.driver.offer(&[header], &[]);
        assert!(rig.settle().is_empty());
        let reason = rig.driver.health().reason().unwrap();
        assert!(reason.contains("no room for the status byte"), "{reason}");
        assert!(rig.driver.err_event().drain());
        assert!(disk.state().log.is_empty());
        // From then on nothing is taken.
        rig.send(kind::FLUSH, 0, &[]);
        assert!(rig.settle().is_empty());
    }
}

#[test]
fn abuse_R9_C4_sector_sums_that_overflow_or_leave_the_disk() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        let end = (LEN / 512) as u64;
        for sector in [end, end - 1, u64::MAX, u64::MAX / 512, u64::MAX / 512 + 1, 1 << 55] {
            let read = rig.ask(kind::IN, sector, 1024);
            assert_eq!(rig.finish(read), (1, 0), "read at {sector}");
            assert_eq!(rig.driver.read(read.data, 1024), vec![0xee; 1024]);
            let write = rig.send(kind::OUT, sector, &[1; 1024]);
            assert_eq!(rig.finish(write), (1, 1), "write at {sector}");
        }
        // The last block is still there.
        rig.write(end - 1, &[7; 512]);
        assert_eq!(rig.read(end - 1, 512), [7; 512]);
        // Lengths that are no blocks.
        for len in [1, 511, 513] {
            let read = rig.ask(kind::IN, 0, len);
            assert_eq!(rig.finish(read), (1, 0));
        }
        assert_eq!(disk.state().log.len(), 2);
        assert_eq!(rig.stats.refused[Refusal::OutOfRange as usize].get(), 12);
        assert_eq!(rig.stats.refused[Refusal::Misaligned as usize].get(), 3);
    }
}

#[test]
fn abuse_C4_blocks_larger_than_sectors_are_kept_whole() {
    let disk = ModelDisk::new(LEN);
    let options = RigOptions { block_size: 4096, ..RigOptions::default() };
    let mut rig = Rig::with_disk(Layout::Split, disk.boxed(), options);
    for (sector, len) in [(1, 4096), (0, 512), (8, 6144)] {
        let write = rig.send(kind::OUT, sector, &vec![1; len]);
        assert_eq!(rig.finish(write), (1, 1));
        let zeroes = rig.send(kind::WRITE_ZEROES, 0, &range(sector, len as u32 / 512, 0));
        assert_eq!(rig.finish(zeroes), (1, 1));
    }
    assert!(disk.state().log.is_empty());
}

#[test]
fn abuse_C4_ranges_of_discard_and_write_zeroes() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        let end = (LEN / 512) as u64;
        for kind in [kind::DISCARD, kind::WRITE_ZEROES] {
            let bad: Vec<(Vec<u8>, u8)> = vec![
                (vec![], 1),
                (vec![0; 15], 1),
                (vec![0; 17], 1),
                (range(0, 1, 0).repeat(MAX_RANGES + 1), 1),
                (range(end, 1, 0), 1),
                (range(end - 1, 2, 0), 1),
                (range(u64::MAX, 1, 0), 1),
                (range(u64::MAX / 512, u32::MAX, 0), 1),
                (range(0, MAX_RANGE_SECTORS + 1, 0), 1),
                (range(0, 1, 2), 2),
                (range(0, 1, u32::MAX), 2),
                // One good range does not save a bad one.
                ([range(0, 1, 0), range(end, 1, 0)].concat(), 1),
            ];
            for (data, status) in bad {
                let offered = rig.send(kind, 0, &data);
                assert_eq!(rig.finish(offered), (status, 1), "type {kind}, {data:?}");
            }
        }
        // "unmap" is for WRITE ZEROES only.
        let discard = rig.send(kind::DISCARD, 0, &range(0, 1, 1));
        assert_eq!(rig.finish(discard), (2, 1));
        assert!(disk.state().log.is_empty(), "nothing reached the disk");
    }
}

#[test]
fn abuse_C4_ranges_longer_than_announced_on_a_disk_that_has_room() {
    for layout in BOTH {
        let mut rig = Rig::new(layout, &NullBackend::new(1 << 40).unwrap());
        for kind in [kind::DISCARD, kind::WRITE_ZEROES] {
            let most = rig.send(kind, 0, &range(0, MAX_RANGE_SECTORS, 0));
            assert_eq!(rig.finish(most), (0, 1));
            let more = rig.send(kind, 0, &range(0, MAX_RANGE_SECTORS + 1, 0));
            assert_eq!(rig.finish(more), (1, 1));
        }
    }
}

#[test]
fn abuse_C4_unknown_types_and_serial_longer_than_asked() {
    for layout in BOTH {
        let (mut rig, _) = rig(layout);
        for kind in [2, 3, 5, 7, 9, 10, 12, 14, 15, 16, 0x8000_0000, u32::MAX] {
            let offered = rig.send(kind, 0, &[0; 64]);
            assert_eq!(rig.finish(offered), (2, 1), "type {kind}");
        }
        let id = rig.ask(kind::GET_ID, 0, 1);
        assert_eq!(rig.finish(id), (0, 2));
    }
}

#[test]
fn abuse_D1_a_request_rewritten_after_the_check_stays_what_it_was() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        disk.state().hold = true;
        let header = rig.header(kind::OUT, 8);
        let data = rig.driver.buffer(&[5; 512]);
        let status = rig.status_byte();
        rig.driver.offer(&[header, data], &[status]);
        let ranges = rig.driver.buffer(&range(16, 1, 0));
        let zero_header = rig.header(kind::WRITE_ZEROES, 0);
        let zero_status = rig.status_byte();
        rig.driver.offer(&[zero_header, ranges], &[zero_status]);
        rig.engine.poll(0, &mut rig.ledger);
        // Both were taken and checked; now the guest points them elsewhere.
        rig.driver.write(header.0, &[0xff; 16]);
        rig.driver.write(ranges.0, &[0xff; 16]);
        disk.state().script.push_back(Ok(0));
        disk.let_go();
        rig.settle();
        assert_eq!(rig.driver.read(zero_status.0, 1), [0]);
        let ops: Vec<_> = disk.state().log.iter().map(|l| (l.0, l.1)).collect();
        assert!(ops.contains(&("write", 4096)) && ops.contains(&("zeroes", 8192)), "{ops:?}");
    }
}

#[test]
fn abuse_D3_memory_removed_under_a_request_stays_mapped_until_it_is_done() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        disk.state().hold = true;
        disk.state().cache[..4096].fill(9);
        let read = rig.ask(kind::IN, 0, 4096);
        rig.engine.poll(0, &mut rig.ledger);
        // The VM unplugs all its memory while the disk holds addresses into it.
        let table = Arc::downgrade(&rig.driver.memory());
        rig.engine.set_memory(GuestMemory::empty());
        assert!(!rig.driver.health().is_live(), "a ring without memory stops");
        dropper::wait();
        let in_flight = table.strong_count();
        disk.let_go();
        rig.engine.poll(0, &mut rig.ledger);
        assert_eq!(rig.driver.read(read.data, 4096), vec![9; 4096]);
        assert_eq!(rig.engine.requests.in_flight.slab.taken(), 0);
        dropper::wait();
        let after = table.strong_count();
        assert_eq!(in_flight - after, 1, "the request held the table, and holds it no longer");
    }
}

#[test]
fn abuse_D3_an_engine_dropped_with_requests_in_flight_leaves_them_their_buffers() {
    let disk = ModelDisk::new(LEN);
    disk.state().hold = true;
    let mut rig = Rig::with_disk(Layout::Split, disk.boxed(), RigOptions::default());
    rig.ask(kind::IN, 0, 4096);
    rig.engine.poll(0, &mut rig.ledger);
    assert_eq!(rig.engine.requests.in_flight.in_disk, 1);
    let port = rig.engine.port_state();
    let table = Arc::downgrade(&rig.driver.memory());
    drop((rig.engine, rig.driver));
    // It waits for nothing, and lets go of nothing.
    assert_eq!(port.orphans.wait(Duration::ZERO), 1);
    assert_eq!((disk.ends(), table.strong_count()), (1, 1));
    disk.let_go();
    assert_eq!(port.orphans.wait(Duration::from_secs(60)), 0);
    assert!(!disk.state().abandoned, "buffers were freed under the disk");
    dropper::wait();
    assert_eq!((disk.ends(), table.strong_count()), (0, 0));
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(64))]

    /// Requests of any bytes: each is answered with a legal status, nothing outside its buffers is
    /// touched, and the queue goes on.
    #[test]
    fn abuse_R3_C4_any_bytes_are_answered(
        requests in proptest::collection::vec(
            (
                proptest::prelude::any::<[u8; 16]>(),
                0u32..16,
                0u64..4096,
                proptest::collection::vec(proptest::prelude::any::<u8>(), 0..600),
                0usize..1100,
                0usize..3,
            ),
            1..20,
        ),
    ) {
        let (mut rig, _disk) = rig(Layout::Packed);
        for (mut header, kind, sector, data, room, tame) in requests {
            // From wholly random to nearly right.
            if tame > 0 {
                header[..4].copy_from_slice(&kind.to_le_bytes());
            }
            if tame > 1 {
                header[8..].copy_from_slice(&sector.to_le_bytes());
            }
            let bytes = [&header[..], &data].concat();
            let readable = rig.driver.buffer(&bytes);
            let guarded = rig.driver.buffer(&vec![UNTOUCHED; room + 2]);
            let id = rig.driver.offer(&[readable], &[(guarded.0, room as u32 + 1)]);
            let used = rig.settle();
            assert_eq!(used.len(), 1);
            assert_eq!(used[0].0, id);
            assert!(used[0].1 as usize <= room + 1);
            let after = rig.driver.read(guarded.0, room + 2);
            assert!(after[room] <= 2, "a status");
            assert_eq!(after[room + 1], UNTOUCHED);
            assert_eq!(rig.driver.read(readable.0, bytes.len()), bytes);
        }
        rig.write(0, &[1; 512]);
        assert!(rig.driver.health().is_live());
    }
}

#[test]
fn abuse_I_B11_failed_reads_claim_only_what_was_written_from_the_first_byte_on() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        // The status byte lies behind data that was not written, and does not count.
        disk.state().script.push_back(Err(libc::EIO));
        let read = rig.ask(kind::IN, 0, 4096);
        assert_eq!(rig.finish(read), (1, 0));
        // Nor does that of a request that writes nothing and has room for data.
        let flush = rig.ask(kind::FLUSH, 0, 16);
        assert_eq!(rig.finish(flush), (0, 0));
        // The second of two operations of a step fails.
        disk.state().script.extend([Ok(512), Err(libc::EIO)]);
        let read = rig.ask(kind::IN, 0, 4096);
        assert_eq!(rig.finish(read), (1, 0));
        // A read that is short at the end of the file is zero-filled, not left as it was.
        disk.state().script.extend([Ok(512), Ok(0)]);
        disk.state().cache[..512].fill(3);
        let read = rig.ask(kind::IN, 0, 4096);
        assert_eq!(rig.finish(read), (0, 4097));
        let expect = [vec![3; 512], vec![0; 3584]].concat();
        assert_eq!(rig.driver.read(read.data, 4096), expect);
    }
}

#[test]
fn abuse_I_bounce_buffers_never_carry_bytes_of_another_request() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        let demands = Demands { mem_align: 512, offset_align: 512, ..Demands::NONE };
        let options = RigOptions { demands, ..RigOptions::default() };
        let mut rig = Rig::with_disk(layout, disk.boxed(), options);
        let unaligned = |rig: &Rig, len| (rig.driver.alloc(len as usize + 1) + 1, len);
        let secret = unaligned(&rig, 4096);
        rig.driver.write(secret.0, &[0x5e; 4096]);
        let (header, status) = (rig.header(kind::OUT, 0), rig.status_byte());
        rig.driver.offer(&[header, secret], &[status]);
        rig.settle();
        // The same buffer serves a read that gets nothing from the disk.
        disk.state().script.push_back(Ok(0));
        let room = unaligned(&rig, 4096);
        let (header, status) = (rig.header(kind::IN, 64), rig.status_byte());
        rig.driver.offer(&[header], &[room, status]);
        rig.settle();
        assert_eq!(rig.driver.read(room.0, 4096), vec![0; 4096]);
        assert_eq!(rig.stats.bounced.get(), 2);
    }
}

#[test]
fn abuse_X_errors_of_the_disk_are_errors_of_one_request() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        let errors = [libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::EFAULT, libc::EOPNOTSUPP];
        for errno in errors {
            disk.state().script.push_back(Err(errno));
            let write = rig.send(kind::OUT, 0, &[1; 512]);
            assert_eq!(rig.finish(write), (1, 1));
        }
        assert_eq!(rig.stats.io_errors.get(), errors.len() as u64);
        assert_eq!(rig.stats.no_space.get(), 2);
        // A write that moves nothing is not repeated for ever.
        disk.state().script.push_back(Ok(0));
        let write = rig.send(kind::OUT, 0, &[1; 512]);
        assert_eq!(rig.finish(write), (1, 1));
        // The port goes on.
        rig.write(0, &[2; 512]);
        assert_eq!(rig.read(0, 512), [2; 512]);
        assert!(rig.driver.health().is_live());
    }
}

#[test]
fn abuse_X_interrupted_operations_are_repeated_but_not_for_ever() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        disk.state().script.extend([Err(libc::EINTR), Err(libc::EAGAIN)]);
        rig.write(0, &[4; 512]);
        assert_eq!(rig.read(0, 512), [4; 512]);
        disk.state().script.extend([Err(libc::EAGAIN); 100]);
        let write = rig.send(kind::OUT, 0, &[1; 512]);
        assert_eq!(rig.finish(write), (1, 1));
        assert!(disk.state().script.len() > 80);
    }
}

#[test]
fn abuse_R10_memory_of_a_queue_does_not_grow_with_what_guests_ask() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        // 200 segments of 4 KiB, 40 times: far more than fits the batch's room at once.
        let header = rig.header(kind::IN, 0);
        let page = rig.driver.alloc(4096);
        let before = rig.engine.requests.in_flight.slab.slots.len();
        for _ in 0..40 {
            let status = rig.status_byte();
            let mut writable = vec![(page, 4096); 200];
            writable.push(status);
            rig.driver.offer_indirect(&[header], &writable);
        }
        assert_eq!(rig.settle().len(), 40);
        assert_eq!(rig.engine.requests.in_flight.slab.slots.len(), before);
        for slot in &rig.engine.requests.in_flight.slab.slots {
            assert_eq!(slot.iov.0.capacity(), MAX_OP_SEGS);
        }
        drop(disk);
    }
}

/// Steps of a request that were done count, also when a later one fails.
#[test]
fn abuse_B11_a_read_that_fails_in_its_second_step_claims_the_first() {
    for layout in BOTH {
        let disk = ModelDisk::new(4 << 20);
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        disk.state().script.extend([Ok(1 << 20), Err(libc::EIO)]);
        let read = rig.ask(kind::IN, 0, 2 << 20);
        assert_eq!(rig.finish(read), (1, 1 << 20));
        assert_eq!(rig.driver.read(read.data + (1 << 20), 512), [0xee; 512]);
    }
}

#[test]
fn abuse_B11_discard_and_write_zeroes_are_unsupported_unless_negotiated() {
    for layout in BOTH {
        let (mut rig, disk) = rig(layout);
        let port = rig.engine.port_state();
        port.discard.store(false, Ordering::Relaxed);
        port.write_zeroes.store(false, Ordering::Relaxed);
        for kind in [kind::DISCARD, kind::WRITE_ZEROES] {
            let offered = rig.send(kind, 0, &range(0, 8, 0));
            assert_eq!(rig.finish(offered), (2, 1));
        }
        assert!(disk.state().log.is_empty());
    }
}
