//! Steps, short operations, bounce buffers, stages, order: against a disk that does as told.

use std::sync::{Arc, Mutex};

use crate::stage::{BlockStage, Direction, Verdict};
use base::random::Seeded;
use queue::inflight::InflightRegion;
use queue::testing::{ModelDriver, ModelOptions};
use queue::vring::VringParts;
use queue::{Queue, RingSetup, Vring};
use sidecore::{Arm, Ledger, Worker};

use crate::backend::Demands;
use crate::limits::{BOUNCE_COUNT, BOUNCE_LEN_BYTES, POLL_BUDGET_BYTES};
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, Rig, RigOptions, UNTOUCHED, pattern, range};

const LEN: usize = 16 << 20;

#[test]
fn short_operations_go_on_where_they_stopped() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        disk.state().short = Some(Seeded::new(5));
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let data = pattern(9, 5 << 20);
        rig.write(100, &data);
        assert!(rig.read(100, 5 << 20) == data);
        assert!(rig.stats.short_ops.get() > 10);
        assert!(disk.state().cache[51200..51200 + (5 << 20)] == data);
    }
}

#[test]
fn zeroes_fall_back_to_writing_and_discards_to_nothing() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        disk.state().cache.fill(7);
        disk.state().script.push_back(Err(libc::EOPNOTSUPP));
        let zeroes = rig.send(kind::WRITE_ZEROES, 0, &range(1, 5000, 1));
        assert_eq!(rig.finish(zeroes), (0, 1));
        let zeroed = 512..5001 * 512;
        assert!(disk.state().cache[zeroed.clone()].iter().all(|&b| b == 0));
        assert!(disk.state().cache[..512].iter().all(|&b| b == 7));
        assert!(disk.state().cache[zeroed.end..].iter().all(|&b| b == 7));
        disk.state().script.push_back(Err(libc::EOPNOTSUPP));
        let discard = rig.send(kind::DISCARD, 0, &range(0, 8, 0));
        assert_eq!(rig.finish(discard), (0, 1));
        let ops: Vec<&str> = disk.state().log.iter().map(|l| l.0).collect();
        assert_eq!(ops, ["zeroes", "write", "write", "write", "discard"]);
        assert_eq!(rig.stats.io_errors.get(), 0);
    }
}

#[test]
fn completions_come_in_the_order_of_the_disk() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        disk.state().hold = true;
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let ids: Vec<u16> = (0..3).map(|i| rig.send(kind::OUT, i, &pattern(i, 512)).id).collect();
        rig.engine.poll(0, &mut rig.ledger);
        assert_eq!(rig.driver.used(), None, "nothing completes before the disk did");
        // `finish_one` fills the gap with the last one.
        for (index, id) in [(1, ids[1]), (1, ids[2]), (0, ids[0])] {
            disk.finish_one(index);
            rig.engine.poll(0, &mut rig.ledger);
            assert_eq!(rig.driver.used(), Some((id, 1)));
        }
    }
}

#[test]
fn a_large_request_leaves_turns_to_others() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let large = rig.send(kind::OUT, 0, &pattern(1, 8 << 20));
        let small = rig.send(kind::OUT, 20000, &pattern(2, 512));
        let mut order = Vec::new();
        for _ in 0..100 {
            let before: u64 = disk.state().log.iter().map(|l| l.2).sum();
            rig.engine.poll(0, &mut rig.ledger);
            let after: u64 = disk.state().log.iter().map(|l| l.2).sum();
            assert!(after - before <= 2 * POLL_BUDGET_BYTES, "a poll has a budget");
            order.extend(std::iter::from_fn(|| rig.driver.used()).map(|u| u.0));
        }
        assert_eq!(order, [small.id, large.id]);
        assert!(disk.state().cache[..8 << 20] == pattern(1, 8 << 20));
    }
}

/// A device that takes the data from guest memory itself gets a request of 1,280 KiB, a Linux
/// driver's largest, in one operation, and three such requests in one poll.
#[test]
fn large_direct_requests_go_in_one_step_unless_they_are_copied() {
    const LARGE: usize = 1280 << 10;
    let demands = Demands { mem_align: 512, offset_align: 512, ..Demands::NONE };
    for (align, in_one_poll) in [(demands, vec![LARGE as u64; 3]), (Demands::NONE, vec![1 << 20])] {
        let disk = ModelDisk::new(LEN);
        disk.state().hold = true;
        let options = RigOptions { demands: align, ..RigOptions::default() };
        let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), options);
        let data = rig.driver.buffer(&pattern(1, LARGE + 512));
        // Aligned, and a byte off for the last one.
        let start = data.0.next_multiple_of(512);
        for i in 0..4 {
            let header = rig.header(kind::OUT, i * (LARGE as u64 / 512));
            let status = rig.status_byte();
            rig.driver.offer(&[header, (start + i / 3, LARGE as u32)], &[status]);
        }
        rig.engine.poll(0, &mut rig.ledger);
        let ops: Vec<u64> = disk.state().log.iter().map(|op| op.2).collect();
        assert_eq!(ops[..ops.len().min(3)], in_one_poll);
        for _ in 0..100 {
            rig.engine.poll(0, &mut rig.ledger);
            if !disk.state().held.is_empty() {
                disk.finish_one(0);
            }
        }
        assert_eq!(std::iter::from_fn(|| rig.driver.used()).count(), 4);
        assert_eq!(rig.stats.bounced.get(), u64::from(align.is_direct()));
    }
}

#[test]
fn more_bounced_requests_than_bounce_buffers_all_finish() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        disk.state().hold = true;
        let demands = Demands { mem_align: 512, offset_align: 512, ..Demands::NONE };
        let options = RigOptions { demands, ..RigOptions::default() };
        let mut rig = Rig::sized(layout, 256, disk.boxed(), options);
        let count = u64::from(BOUNCE_COUNT) + 10;
        let len = BOUNCE_LEN_BYTES as usize + 512;
        let mut sent = Vec::new();
        for i in 0..count {
            // One byte off any alignment.
            let data = rig.driver.buffer(&[vec![0], pattern(i, len)].concat());
            let header = rig.header(kind::OUT, i * 257);
            let status = rig.status_byte();
            let id = rig.driver.offer(&[header, (data.0 + 1, len as u32)], &[status]);
            sent.push((id, status.0));
        }
        for _ in 0..1000 {
            rig.engine.poll(0, &mut rig.ledger);
            assert!(disk.state().held.len() <= usize::from(BOUNCE_COUNT));
            if !disk.state().held.is_empty() {
                disk.finish_one(0);
            }
        }
        let used = std::iter::from_fn(|| rig.driver.used()).count();
        assert_eq!(used as u64, count);
        for (i, (_, status)) in sent.iter().enumerate() {
            assert_eq!(rig.driver.read(*status, 1), [0]);
            assert!(disk.state().cache[i * 257 * 512..][..len] == pattern(i as u64, len));
        }
        assert_eq!(rig.stats.bounced.get(), count);
    }
}

/// Inverts all bytes, notes what it saw, and refuses one offset.
struct Inverter {
    seen: Arc<Mutex<Vec<(Direction, u64, usize)>>>,
    refuse: Option<u64>,
}

impl BlockStage for Inverter {
    fn name(&self) -> &str {
        "inverter"
    }
    fn changes_content(&self) -> bool {
        true
    }
    fn push(&mut self, direction: Direction, offset: u64, data: &mut [u8]) -> Verdict {
        self.seen.lock().unwrap().push((direction, offset, data.len()));
        data.iter_mut().for_each(|b| *b = !*b);
        if self.refuse == Some(offset) { Verdict::Drop } else { Verdict::Pass }
    }
}

#[test]
fn stages_see_every_byte_once_and_own_it() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        disk.state().short = Some(Seeded::new(3));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let stage = Inverter { seen: Arc::clone(&seen), refuse: Some(1 << 20) };
        let options = RigOptions { stages: vec![Box::new(stage)], ..RigOptions::default() };
        let mut rig = Rig::with_disk(layout, disk.boxed(), options);
        let data = pattern(4, 300 << 10);
        rig.write(8, &data);
        let stored: Vec<u8> = data.iter().map(|b| !b).collect();
        assert!(disk.state().cache[4096..4096 + data.len()] == stored);
        let bytes: usize = seen.lock().unwrap().iter().map(|s| s.2).sum();
        assert_eq!(bytes, data.len(), "once per byte, also when the disk is short");
        assert!(rig.read(8, data.len()) == data);
        // Zeroes pass through the stage like any data.
        let zeroes = rig.send(kind::WRITE_ZEROES, 0, &range(8, 8, 1));
        assert_eq!(rig.finish(zeroes), (0, 1));
        assert_eq!(disk.state().cache[4096..8192], vec![0xff; 4096]);
        assert_eq!(rig.read(8, 4096), vec![0; 4096]);
        // A refusal is an I/O error; nothing reaches disk or guest.
        let refused = rig.send(kind::OUT, 2048, &[1; 512]);
        assert_eq!(rig.finish(refused), (1, 1));
        assert_eq!(disk.state().cache[1 << 20..][..512], vec![0; 512]);
        let refused = rig.ask(kind::IN, 2048, 512);
        assert_eq!(rig.finish(refused), (1, 0));
        assert_eq!(rig.driver.read(refused.data, 512), vec![0xee; 512]);
        assert_eq!(rig.stats.stage_refused.get(), 2);
    }
}

#[test]
fn a_drain_waits_for_requests_in_flight_and_takes_no_more() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        disk.state().hold = true;
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let first = rig.send(kind::OUT, 0, &pattern(1, 512));
        rig.engine.poll(0, &mut rig.ledger);
        let (notice, drained) = std::sync::mpsc::channel();
        rig.engine.drain(notice, false);
        let second = rig.send(kind::OUT, 1, &pattern(2, 512));
        rig.engine.poll(0, &mut rig.ledger);
        assert!(drained.try_recv().is_err(), "one is in flight");
        disk.finish_one(0);
        rig.engine.poll(0, &mut rig.ledger);
        assert!(drained.try_recv().is_ok());
        assert_eq!(rig.driver.used(), Some((first.id, 1)));
        assert_eq!(rig.driver.used(), None);
        assert_eq!(rig.status(second), UNTOUCHED);
    }
}

#[test]
fn requests_that_a_killed_daemon_had_taken_are_done_by_the_next() {
    for layout in BOTH {
        let options = ModelOptions { event_idx: true, ..Default::default() };
        let mut driver = ModelDriver::with_options(layout, 64, options);
        let region = InflightRegion::new(1, 64, layout).unwrap();
        let vring = |driver: &ModelDriver, setup| {
            let queue = Queue::new(driver.memory(), setup).unwrap();
            let parts = VringParts { inflight: Some(Arc::clone(&region)), ..driver.parts(0) };
            Vring::new(queue, parts).unwrap()
        };
        let dead = ModelDisk::new(LEN);
        dead.state().hold = true;
        let setup = driver.setup();
        let mut first = Rig::around(vring(&driver, setup), &dead, RigOptions::default());
        let mut status = Vec::new();
        for i in 0..5u8 {
            let mut header = [0u8; 16];
            header[0] = kind::OUT as u8;
            header[8] = i;
            let readable = [driver.buffer(&header), driver.buffer(&[i + 1; 512])];
            status.push(driver.buffer(&[UNTOUCHED]));
            driver.offer(&readable, &[status[usize::from(i)]]);
        }
        first.poll(0, &mut Ledger::default());
        // One of them completes, the others die with the daemon.
        dead.finish_one(2);
        first.poll(0, &mut Ledger::default());
        assert!(driver.used().is_some());
        let start = first.requests.vring.queue.position();
        std::mem::forget(first);

        let disk = ModelDisk::new(LEN);
        let setup = RingSetup { start, ..setup };
        let mut second = Rig::around(vring(&driver, setup), &disk, RigOptions::default());
        while second.poll(0, &mut Ledger::default()) > 0 {}
        assert_eq!(std::iter::from_fn(|| driver.used()).count(), 4);
        for (i, (addr, _)) in status.iter().enumerate() {
            assert_eq!(driver.read(*addr, 1), [0]);
            let stored = if i == 2 { 0 } else { i as u8 + 1 };
            assert_eq!(disk.state().cache[i * 512], stored, "each once, none doubled");
        }
        assert_eq!(disk.state().log.len(), 4);
    }
}

/// A disk that works while the sidecore waits: ranges count in full against a poll's share.
#[test]
fn ranges_that_are_done_at_once_are_charged_by_their_length() {
    let count = |max_range_bytes| {
        let disk = ModelDisk::new(LEN);
        let demands = Demands { max_range_bytes, ..Demands::NONE };
        let options = RigOptions { demands, ..RigOptions::default() };
        let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), options);
        for i in 0..8 {
            let kind = if i % 2 == 0 { kind::DISCARD } else { kind::WRITE_ZEROES };
            rig.send(kind, 0, &range(i * 2048, 2048, 0));
        }
        rig.engine.poll(0, &mut rig.ledger);
        let started = disk.state().log.len();
        assert_eq!(rig.settle().len(), 8);
        started
    };
    assert_eq!(count(POLL_BUDGET_BYTES), 1);
    assert_eq!(count(u64::MAX), 2, "discards cost little where the kernel does them meanwhile");
}

#[test]
fn a_driver_with_a_pile_in_hand_is_told_late_but_told() {
    for layout in BOTH {
        let disk = ModelDisk::new(LEN);
        let mut rig = Rig::with_disk(layout, disk.boxed(), RigOptions::default());
        let queue = Arc::clone(&rig.engine.requests.vring.parts.stats);
        let told = || queue.notifications_sent.get() + queue.notifications_suppressed.get();
        let mut now_ns = 1_000_000;
        // 16 at once, then one each 50 µs: the driver works through what it got.
        for i in 0..16 {
            rig.send(kind::OUT, i, &pattern(i, 512));
        }
        rig.engine.poll(now_ns, &mut rig.ledger);
        for i in 0..40 {
            now_ns += 50_000;
            rig.send(kind::OUT, i, &pattern(i, 512));
            rig.engine.poll(now_ns, &mut rig.ledger);
            while rig.driver.used().is_some() {}
        }
        assert!(told() < 20, "{} times for 56 requests", told());
        // Told of all so far, and one more soon after.
        rig.engine.requests.vring.notify();
        let before = told();
        rig.send(kind::OUT, 1, &pattern(1, 512));
        rig.engine.poll(now_ns + 1000, &mut rig.ledger);
        assert_eq!(told(), before, "one more is no reason to interrupt");
        let arm = rig.engine.arm(now_ns + 1000, &mut rig.ledger);
        let Arm::Until(wake_ns) = arm else { panic!("no timer") };
        assert!(wake_ns <= now_ns + 300_000);
        rig.engine.disarm();
        // Idle by now, which only the arming sees: it must not sleep on what is untold.
        assert!(matches!(rig.engine.arm(now_ns + 1_000_000, &mut rig.ledger), Arm::Idle));
        assert_eq!(told(), before + 1, "an idle driver is told");
    }
}

#[test]
fn large_requests_are_told_and_kicked_for_one_by_one() {
    for (len, large) in [(512, false), (1 << 20, true)] {
        let disk = ModelDisk::new(LEN);
        disk.state().hold = true;
        let mut rig = Rig::with_disk(BOTH[0], disk.boxed(), RigOptions::default());
        for _ in 0..4 {
            rig.send(kind::OUT, 0, &pattern(1, len));
        }
        while rig.engine.poll(1000, &mut rig.ledger) > 0 {}
        let arm = rig.engine.arm(1000, &mut rig.ledger);
        assert_eq!(matches!(arm, Arm::Idle), large, "no timer beside a kick: {arm:?}");
        rig.engine.disarm();
        disk.finish_one(0);
        rig.engine.poll(2000, &mut rig.ledger);
        let queue = &rig.engine.requests.vring.parts.stats;
        let told = queue.notifications_sent.get() + queue.notifications_suppressed.get();
        assert_eq!(told, u64::from(large), "the others are still in the disk");
    }
}
