//! Writes of placeholders: which they are, what they wait for, how they end.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use guest_abi::pipe::SECTOR_BYTES;
use queue::Layout;
use sidecore::{Arm, Worker};

use crate::backend::Demands;
use crate::limits::BOUNCE_COUNT;
use crate::placeholder::{PlaceholderHandler, PlaceholderOp, PlaceholderRequest};
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::placeholders::{
    ImmediateHandler, TAG, TagHandler, known, offer_to, sector, sectors,
};
use crate::testing::{BOTH, Offered, Rig, RigOptions, UNTOUCHED, alloc, pattern};

const LEN: usize = 16 << 20;

pub(super) struct Bench {
    pub rig: Rig,
    pub disk: ModelDisk,
    pub handler: Arc<TagHandler>,
    pub taken: Receiver<PlaceholderRequest>,
}

impl Bench {
    pub fn new(layout: Layout, writeback: bool) -> Self {
        let disk = ModelDisk::new(LEN);
        let options = RigOptions { writeback, ..RigOptions::default() };
        let mut rig = Rig::with_disk(layout, disk.boxed(), options);
        let (handler, taken) = known(&mut rig);
        Self { rig, disk, handler, taken }
    }

    pub fn poll(&mut self) {
        self.rig.engine.poll(0, &mut self.rig.ledger);
    }

    /// Sends placeholders and gives what was taken.
    fn place(&mut self, sector: u64, at: u64, len: usize) -> (Offered, PlaceholderRequest) {
        let offered = self.rig.send(kind::OUT, sector, &sectors(TAG, at, len));
        self.poll();
        (offered, self.taken.try_recv().unwrap())
    }

    pub fn log(&self) -> Vec<&'static str> {
        self.disk.state().log.iter().map(|l| l.0).collect()
    }

    /// Asserts that a write of this data goes to the disk as it is.
    fn is_ordinary(&mut self, data: &[u8]) {
        self.disk.state().cache.fill(UNTOUCHED);
        self.rig.write(8, data);
        assert!(self.taken.try_recv().is_err());
        assert!(self.disk.state().cache[4096..][..data.len()] == *data);
    }
}

#[test]
fn a_placed_write_waits_without_the_disk_and_ends_from_another_thread() {
    for layout in BOTH {
        let mut bench = Bench::new(layout, true);
        let (offered, write) = bench.place(24, 1024, 8192);
        assert_eq!((write.tag(), write.at(), write.len_bytes()), (TAG, 1024, 8192));
        assert_eq!((write.offset(), write.op()), (24 * 512, PlaceholderOp::Write { sync: false }));
        bench.poll();
        assert_eq!(bench.rig.driver.used(), None);
        assert_eq!(bench.rig.status(offered), UNTOUCHED);
        // Others go by.
        let other = bench.rig.send(kind::OUT, 0, &[7; 512]);
        bench.poll();
        assert_eq!(bench.rig.driver.used(), Some((other.id, 1)));
        std::thread::spawn(move || write.complete(Ok(()))).join().unwrap();
        assert_eq!(bench.rig.finish(offered), (0, 1));
        assert_eq!(bench.log(), ["write"], "the other one");
        let stats = &bench.rig.stats;
        assert_eq!((stats.writes.get(), stats.placeholders.get()), (2, 1));
        assert_eq!(stats.written_bytes.get(), 512 + 8192);
        assert_eq!(bench.rig.engine.requests.in_flight.slab.taken(), 0);
    }
}

#[test]
fn all_slots_may_wait_and_end_in_any_order() {
    for layout in BOTH {
        let mut bench = Bench::new(layout, true);
        let mut open = Vec::new();
        // Three descriptors each.
        for n in 0..21 {
            open.push(bench.place(n, n * 512, 512));
        }
        let parked =
            |bench: &Bench| bench.rig.engine.requests.placeholders.as_ref().unwrap().parked();
        assert_eq!(parked(&bench), 21);
        let mut ids = Vec::new();
        for (n, (offered, write)) in open.into_iter().rev().enumerate() {
            let failed = n % 3 == 0;
            let error = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
            write.complete(if failed { error() } else { Ok(()) });
            bench.poll();
            assert_eq!(bench.rig.driver.used(), Some((offered.id, 1)));
            assert_eq!(bench.rig.status(offered), u8::from(failed));
            ids.push(offered.id);
        }
        ids.sort_unstable();
        ids.dedup();
        assert_eq!((ids.len(), parked(&bench)), (21, 0));
        let stats = &bench.rig.stats;
        assert_eq!(
            (stats.io_errors.get(), stats.no_space.get(), stats.placeholders.get()),
            (7, 7, 14)
        );
    }
}

#[test]
fn a_dropped_write_is_an_io_error() {
    let mut bench = Bench::new(Layout::Split, true);
    let (offered, write) = bench.place(0, 0, 4096);
    drop(write);
    assert_eq!(bench.rig.finish(offered), (1, 1));
    assert_eq!((bench.rig.stats.io_errors.get(), bench.rig.stats.placeholders.get()), (1, 0));
    assert!(bench.log().is_empty());
}

#[test]
fn anything_else_is_an_ordinary_write() {
    let mut bench = Bench::new(Layout::Packed, true);
    let good = sectors(TAG, 512, 4096);
    for wrong in 0..8 {
        // Each field, at its first and last byte, and the sector's number.
        for byte in [0, 7, 8, 15, 16, 31] {
            let mut data = good.clone();
            data[wrong * SECTOR_BYTES + byte] ^= 1;
            bench.is_ordinary(&data);
        }
        for at in [512, 512 * (wrong as u64 + 2), 0] {
            let mut data = good.clone();
            data.splice(wrong * SECTOR_BYTES..(wrong + 1) * SECTOR_BYTES, sector(TAG, at));
            if data != good {
                bench.is_ordinary(&data);
            }
        }
    }
    // Beyond the end of all numbers.
    bench.is_ordinary(&[sector(TAG, 512), sector(TAG, 0)].concat());
    bench.is_ordinary(&[sector(TAG, u64::MAX - 511), sector(TAG, 0)].concat());
    bench.is_ordinary(&sector(TAG, u64::MAX - 511));
    // A pipe may begin anywhere in its file.
    let (offered, write) = bench.place(0, 7, 4096);
    write.complete(Ok(()));
    assert_eq!(bench.rig.finish(offered), (0, 1));
    // The last one that ends before it is one.
    let (offered, write) = bench.place(0, u64::MAX - 1023, 512);
    write.complete(Ok(()));
    assert_eq!(bench.rig.finish(offered), (0, 1));
}

#[test]
fn what_is_given_back_is_written_as_it_is() {
    for layout in BOTH {
        let mut bench = Bench::new(layout, true);
        let unknown = *b"0123456789abcdeF";
        for len in [512, 4096, 3 << 20] {
            bench.is_ordinary(&sectors(unknown, 1 << 40, len));
        }
        assert_eq!(bench.rig.stats.placeholders.get(), 0);
        // Nothing is looked at while none are known.
        bench.handler.any.store(false, Ordering::Relaxed);
        bench.is_ordinary(&sectors(TAG, 0, 4096));
        bench.handler.any.store(true, Ordering::Relaxed);
        let (offered, write) = bench.place(0, 0, 4096);
        write.complete(Ok(()));
        assert_eq!(bench.rig.finish(offered), (0, 1));
    }
}

#[test]
fn reads_and_other_requests_are_not_looked_at() {
    let mut bench = Bench::new(Layout::Split, true);
    bench.disk.state().cache[..4096].copy_from_slice(&sectors(TAG, 0, 4096));
    assert!(bench.rig.read(0, 4096) == sectors(TAG, 0, 4096));
    let flush = bench.rig.send(kind::FLUSH, 0, &sectors(TAG, 0, 4096));
    assert_eq!(bench.rig.finish(flush).0, 0);
    // Refused before anybody sees them: outside of the disk.
    let outside = bench.rig.send(kind::OUT, (LEN / 512) as u64 - 1, &sectors(TAG, 0, 1024));
    assert_eq!(bench.rig.finish(outside), (1, 1));
    let empty = bench.rig.send(kind::OUT, 0, &[]);
    assert_eq!(bench.rig.finish(empty).0, 0);
    assert!(bench.taken.try_recv().is_err());
}

#[test]
fn without_a_write_cache_whoever_takes_it_makes_it_durable() {
    let mut bench = Bench::new(Layout::Split, false);
    let (offered, write) = bench.place(0, 0, 4096);
    assert_eq!(write.op(), PlaceholderOp::Write { sync: true });
    write.complete(Ok(()));
    assert_eq!(bench.rig.finish(offered), (0, 1));
    assert!(bench.log().is_empty(), "it is durable");
}

#[test]
fn a_cache_that_is_switched_off_meanwhile_is_flushed() {
    for outcome in [Ok(0), Err(libc::EIO)] {
        let mut bench = Bench::new(Layout::Packed, true);
        let (offered, write) = bench.place(0, 0, 4096);
        assert_eq!(write.op(), PlaceholderOp::Write { sync: false });
        bench.rig.engine.set_writeback(false);
        bench.disk.state().script.push_back(outcome);
        write.complete(Ok(()));
        assert_eq!(bench.rig.finish(offered), (u8::from(outcome.is_err()), 1));
        assert_eq!(bench.log(), ["flush"]);
    }
}

/// The guest changes its memory when it likes.
#[test]
fn abuse_D1_what_was_seen_is_not_looked_at_again() {
    let mut bench = Bench::new(Layout::Split, true);
    let header = bench.rig.header(kind::OUT, 0);
    let status = bench.rig.status_byte();
    let data = bench.rig.driver.buffer(&sectors(TAG, 0, 3 << 20));
    bench.rig.driver.offer(&[header, data], &[status]);
    bench.poll();
    assert!(bench.taken.try_recv().is_err(), "a part of it was looked at");
    // All of the first part, with the first sector, which said what it is.
    bench.rig.driver.write(data.0, &vec![0xbb; 1 << 20]);
    bench.rig.driver.write(header.0, &[0xbb; 16]);
    (0..3).for_each(|_| bench.poll());
    let write = bench.taken.try_recv().unwrap();
    bench.rig.driver.write(data.0, &vec![0xbb; 3 << 20]);
    assert_eq!((write.tag(), write.at(), write.len_bytes()), (TAG, 0, 3 << 20));
    write.complete(Ok(()));
    bench.poll();
    assert_eq!(bench.rig.driver.read(status.0, 1), [0]);
    assert!(bench.log().is_empty());

    // What was not seen yet: then it is an ordinary write, of what is there by then.
    let data = sectors(TAG, 0, 3 << 20);
    let header = bench.rig.header(kind::OUT, 0);
    let buffer = bench.rig.driver.buffer(&data);
    bench.rig.driver.offer(&[header, buffer], &[status]);
    bench.poll();
    let after = [&data[..2 << 20], &pattern(1, 1 << 20)].concat();
    bench.rig.driver.write(buffer.0, &after);
    assert_eq!(bench.rig.settle().len(), 2, "and the one before");
    assert!(bench.taken.try_recv().is_err());
    assert!(bench.disk.state().cache[..3 << 20] == after);
}

/// One that has to wait after its first sector was seen: behind a request without a bounce buffer.
#[test]
fn abuse_D1_the_first_sector_is_copied_once() {
    let disk = ModelDisk::new(LEN);
    disk.state().hold = true;
    let demands = Demands { mem_align: 512, offset_align: 512, ..Demands::NONE };
    let options = RigOptions { demands, ..RigOptions::default() };
    let mut rig = Rig::sized(Layout::Packed, 256, disk.boxed(), options);
    let (_knows, taken) = known(&mut rig);
    let offer = |rig: &mut Rig, data: &[u8], odd: u64| {
        let (header, status) = (rig.header(kind::OUT, 0), rig.status_byte());
        let at = rig.driver.ram().alloc_aligned(data.len() + 512, 512) + odd;
        rig.driver.write(at, data);
        rig.driver.offer(&[header, (at, data.len() as u32)], &[status]);
        (at, status.0)
    };
    for _ in 0..BOUNCE_COUNT {
        offer(&mut rig, &[1; 512], 1);
    }
    for _ in 0..4 {
        rig.engine.poll(0, &mut rig.ledger);
    }
    assert_eq!(disk.state().held.len(), usize::from(BOUNCE_COUNT));
    offer(&mut rig, &[1; 512], 1);
    let (data, status) = offer(&mut rig, &sectors(TAG, 0, 4096), 0);
    rig.engine.poll(0, &mut rig.ledger);
    assert!(taken.try_recv().is_err());
    rig.driver.write(data, &sector([0; 16], 512));
    disk.let_go();
    for _ in 0..4 {
        rig.engine.poll(0, &mut rig.ledger);
    }
    let write = taken.try_recv().unwrap();
    assert_eq!((write.tag(), write.at(), write.len_bytes()), (TAG, 0, 4096));
    write.complete(Ok(()));
    assert_eq!(rig.settle().len(), usize::from(BOUNCE_COUNT) + 2);
    assert_eq!(rig.driver.read(status, 1), [0]);
}

#[test]
fn abuse_R10_a_large_one_leaves_turns_to_others() {
    for layout in BOTH {
        let mut bench = Bench::new(layout, true);
        let large = bench.rig.send(kind::OUT, 0, &sectors(TAG, 0, 8 << 20));
        let small = bench.rig.send(kind::OUT, 20000, &pattern(2, 512));
        let mut polls = 0;
        while bench.rig.driver.used().is_none_or(|used| used.0 != small.id) {
            bench.poll();
            polls += 1;
        }
        assert!(polls <= 3 && bench.taken.try_recv().is_err());
        let write = loop {
            bench.poll();
            polls += 1;
            assert!(polls < 20);
            if let Ok(write) = bench.taken.try_recv() {
                break write;
            }
        };
        assert!(polls >= 6, "{polls}: one step in each poll");
        assert_eq!(write.len_bytes(), 8 << 20);
        write.complete(Ok(()));
        assert_eq!(bench.rig.finish(large), (0, 1));
    }
}

/// Answers another one than it was offered.
#[derive(Debug)]
struct Confused(Mutex<Option<PlaceholderRequest>>);

impl PlaceholderHandler for Confused {
    fn has_any(&self) -> bool {
        true
    }
    fn take(&self, write: PlaceholderRequest) -> Option<PlaceholderRequest> {
        self.0.lock().unwrap().replace(write)
    }
}

#[test]
fn another_one_that_comes_back_fails_and_nothing_else_does() {
    let mut bench = Bench::new(Layout::Split, true);
    let confused = Arc::new(Confused(Mutex::default()));
    offer_to(&mut bench.rig, confused.clone());
    let first = bench.rig.send(kind::OUT, 0, &sectors(TAG, 0, 512));
    bench.poll();
    let second = bench.rig.send(kind::OUT, 0, &sectors(TAG, 512, 512));
    bench.poll();
    assert_eq!(bench.rig.driver.used(), Some((first.id, 1)));
    assert_eq!(bench.rig.status(first), 1);
    let held = confused.0.lock().unwrap().take().unwrap();
    assert_eq!(held.at(), 512);
    held.complete(Ok(()));
    assert_eq!(bench.rig.finish(second), (0, 1));
    // One that is nobody's.
    let stray = PlaceholderRequest::detached(
        TAG,
        0,
        (0, 512),
        PlaceholderOp::Read,
        tempfile::tempfile().unwrap(),
    )
    .unwrap();
    *confused.0.lock().unwrap() = Some(stray.0);
    let third = bench.rig.send(kind::OUT, 0, &sectors(TAG, 0, 512));
    bench.poll();
    assert!(stray.1.get().unwrap().is_err());
    confused.0.lock().unwrap().take().unwrap().complete(Ok(()));
    assert_eq!(bench.rig.finish(third), (0, 1));
}

#[test]
fn an_answer_after_the_queues_end_reaches_nobody() {
    for layout in BOTH {
        let mut bench = Bench::new(layout, true);
        let (offered, write) = bench.place(0, 0, 4096);
        let vring = bench.rig.engine.into_vring();
        // The same ring goes on with the next engine, which begins it again.
        let options = RigOptions::default();
        let mut next = Rig::around(vring, &bench.disk, options);
        write.complete(Err(io::ErrorKind::Other.into()));
        next.poll(0, &mut bench.rig.ledger);
        assert_eq!(bench.rig.driver.used(), None);
        assert_eq!(bench.rig.driver.read(offered.status, 1), [UNTOUCHED]);
        assert_eq!(next.requests.in_flight.slab.taken(), 0);
    }
}

#[test]
fn another_who_knows_takes_what_comes_then_and_answers_to_the_first_still_count() {
    let mut bench = Bench::new(Layout::Packed, true);
    let (first, write) = bench.place(0, 0, 512);
    let (_knows, taken) = known(&mut bench.rig);
    let second = bench.rig.send(kind::OUT, 0, &sectors(TAG, 0, 512));
    bench.poll();
    let late = taken.try_recv().unwrap();
    assert!(bench.taken.try_recv().is_err());
    for (offered, write) in [(first, write), (second, late)] {
        write.complete(Ok(()));
        bench.poll();
        assert_eq!(bench.rig.driver.used(), Some((offered.id, 1)));
    }
}

#[test]
fn a_changed_memory_table_does_not_touch_what_waits() {
    for layout in BOTH {
        let mut bench = Bench::new(layout, true);
        let (offered, write) = bench.place(0, 0, 512);
        let (region, fd) = (bench.rig.driver.region(), bench.rig.driver.fd());
        let again = queue::GuestMemory::empty().with_region(region, &fd).unwrap();
        bench.rig.engine.set_memory(again);
        write.complete(Ok(()));
        assert_eq!(bench.rig.finish(offered), (0, 1));
    }
}

#[test]
fn a_queue_that_sleeps_is_rung_and_one_that_polls_is_not() {
    let mut bench = Bench::new(Layout::Split, true);
    let answers = offer_to(&mut bench.rig, bench.handler.clone());
    assert!(!answers.event.drain());
    let disk = ModelDisk::new(4096);
    let mut rig = Rig::with_disk(Layout::Split, disk.boxed(), RigOptions::default());
    let answers = offer_to(&mut rig, bench.handler.clone());
    let one = |rig: &mut Rig| {
        let offered = rig.send(kind::OUT, 0, &sectors(TAG, 0, 512));
        rig.engine.poll(0, &mut rig.ledger);
        (offered, bench.taken.try_recv().unwrap())
    };
    let (offered, write) = one(&mut rig);
    write.complete(Ok(()));
    assert!(!answers.event.drain(), "it polls");
    assert_eq!(rig.engine.arm(0, &mut rig.ledger), Arm::Busy, "the answer is there");
    rig.engine.disarm();
    assert_eq!(rig.status(offered), 0);
    while rig.driver.used().is_some() {}

    let (offered, write) = one(&mut rig);
    assert_eq!(rig.engine.arm(0, &mut rig.ledger), Arm::Idle);
    write.complete(Ok(()));
    assert!(answers.event.drain(), "it sleeps");
    assert!(rig.engine.watched_fds().contains(&std::os::fd::AsRawFd::as_raw_fd(&answers.event)));
    rig.engine.disarm();
    assert_eq!(rig.finish(offered), (0, 1));
    let (_, write) = one(&mut rig);
    write.complete(Ok(()));
    assert!(!answers.event.drain(), "it polls again");
}

#[test]
fn no_allocation_whether_placeholders_are_known_or_not() {
    for layout in BOTH {
        let disk = crate::null::NullBackend::new(1 << 30).unwrap();
        let mut rig = Rig::new(layout, &disk);
        let (idle, _taken) = TagHandler::new();
        idle.any.store(false, Ordering::Relaxed);
        for handler in [idle as Arc<dyn PlaceholderHandler>, Arc::new(ImmediateHandler)] {
            offer_to(&mut rig, handler);
            for round in 0..20u64 {
                let mark = rig.driver.ram().mark();
                rig.send(kind::OUT, 0, &sectors(TAG, 0, 4096));
                rig.send(kind::OUT, 0, &sectors(TAG, 0, 2 << 20));
                rig.send(kind::OUT, 0, &sectors([0; 16], 0, 4096));
                rig.send(kind::OUT, 0, &[1; 4096]);
                let (mut finished, mut in_polls) = (0, 0);
                while finished < 4 {
                    let before = alloc::count();
                    rig.engine.poll(round, &mut rig.ledger);
                    in_polls += alloc::count() - before;
                    while rig.driver.used().is_some() {
                        finished += 1;
                    }
                }
                assert!(round == 0 || in_polls == 0, "{layout:?} {round}");
                rig.driver.ram().free_to(mark);
            }
        }
        assert_eq!(rig.stats.placeholders.get(), 40);
    }
}
