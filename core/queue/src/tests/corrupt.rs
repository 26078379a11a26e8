//! Random corruption: rings and inflight regions full of nonsense. Never a panic, never a segment
//! outside guest memory, always an error or a limit.

use std::os::fd::AsFd;
use std::sync::Arc;

use proptest::prelude::*;

use crate::Batch;
use crate::inflight::InflightRegion;
use crate::memory::GuestMemory;
use crate::queue::Queue;
use crate::setup::{Completion, Layout};
use crate::testing::{GUEST_BASE, ModelDriver, ModelOptions, RawDesc};
use crate::vring::Vring;
use base::limits::{MAX_CHAIN_LEN_BYTES, MAX_CHAIN_SEGS};

const MEM_BYTES: usize = 1 << 20;

/// A field value that is more often near something than uniformly random.
fn addr() -> impl Strategy<Value = u64> {
    prop_oneof![
        5 => (0..MEM_BYTES as u64).prop_map(|a| GUEST_BASE + a),
        1 => (0..64u64).prop_map(|a| GUEST_BASE + MEM_BYTES as u64 - 32 + a),
        1 => 0..4096u64,
        1 => (0..64u64).prop_map(|a| u64::MAX - a),
        1 => any::<u64>(),
    ]
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 1..300u32,
        2 => (0..40u32).prop_map(|n| n * 16),
        1 => 0..2u32,
        1 => any::<u32>(),
    ]
}

fn desc() -> impl Strategy<Value = RawDesc> {
    let flags = prop_oneof![
        6 => 0..8u16,
        4 => (0..8u16).prop_map(|f| f | 0x80),
        2 => (0..8u16).prop_map(|f| f | 0x8000),
        1 => any::<u16>(),
    ];
    let tail = prop_oneof![8 => 0..10u16, 1 => any::<u16>()];
    (addr(), len(), flags, tail).prop_map(|(addr, len, flags, tail)| RawDesc {
        addr,
        len,
        flags,
        tail,
    })
}

#[derive(Debug, Clone)]
enum Step {
    Desc(u16, RawDesc),
    /// A table of descriptors at a place in memory where `Desc` may point.
    Table(u16, Vec<RawDesc>),
    Avail(u16),
    Entry(u16, u16),
    Event(u16, u16),
    Pop(usize, usize),
    Push(u8),
    Kicks(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..8u16, desc()).prop_map(|(i, d)| Step::Desc(i, d)),
        2 => (0..100u16, prop::collection::vec(desc(), 1..5))
            .prop_map(|(at, d)| Step::Table(at, d)),
        3 => prop_oneof![0..20u16, any::<u16>()].prop_map(Step::Avail),
        2 => (0..8u16, prop_oneof![0..10u16, any::<u16>()]).prop_map(|(i, h)| Step::Entry(i, h)),
        1 => (any::<u16>(), any::<u16>()).prop_map(|(e, f)| Step::Event(e, f)),
        6 => (0..9usize, 0..9usize).prop_map(|(max, back)| Step::Pop(max, back)),
        3 => any::<u8>().prop_map(Step::Push),
        1 => any::<bool>().prop_map(Step::Kicks),
    ]
}

/// Every segment lies in guest memory, and the limits hold.
fn check(batch: &Batch, memory: &GuestMemory) {
    for i in 0..batch.len() {
        let chain = batch.get(i);
        let mut total = 0;
        for seg in chain.readable.iter().chain(chain.writable) {
            let first = memory.host_to_guest(seg.ptr).expect("a segment outside memory");
            let last = memory.host_to_guest(seg.ptr.wrapping_add(seg.len - 1));
            assert_eq!(last, Some(first + seg.len as u64 - 1));
            total += seg.len;
        }
        assert!(total <= MAX_CHAIN_LEN_BYTES as usize);
        assert!(chain.readable.len() + chain.writable.len() <= MAX_CHAIN_SEGS);
        assert_eq!(total, (chain.readable_len + chain.writable_len) as usize);
    }
}

fn run(driver: &ModelDriver, queue: &mut Queue, steps: &[Step]) {
    let mut batch = Batch::new(8, 64);
    let mut taken: Vec<Completion> = Vec::new();
    for step in steps {
        match step {
            Step::Desc(i, d) => driver.set_desc(i % driver.setup().size, *d),
            Step::Table(at, descs) => {
                for (i, d) in descs.iter().enumerate() {
                    let addr = GUEST_BASE + 0x8000 + u64::from(*at) * 16 + i as u64 * 16;
                    driver.ram().store_desc(addr, driver.setup().layout, *d);
                }
            }
            Step::Avail(n) => driver.set_avail_idx(*n),
            Step::Entry(i, head) => driver.set_avail_entry(*i, *head),
            Step::Event(event, flags) => {
                driver.set_used_event(*event);
                driver.set_driver_flags(*flags);
            }
            Step::Pop(max, back) => {
                let result = queue.pop(&mut batch, *max);
                assert!(batch.len() <= *max);
                check(&batch, &driver.memory());
                if result.is_ok() {
                    queue.unpop(&mut batch, *back);
                }
                let done = |c: crate::Chain<'_>| Completion {
                    id: c.id,
                    ndesc: c.ndesc,
                    written: c.writable_len,
                };
                taken.extend((0..batch.len()).map(|i| done(batch.get(i))));
            }
            Step::Push(n) => {
                let n = usize::from(*n) % (taken.len() + 1);
                let done: Vec<Completion> = taken.drain(..n).collect();
                queue.push(&done);
                queue.take_notify();
            }
            Step::Kicks(true) => {
                queue.enable_kicks();
            }
            Step::Kicks(false) => queue.disable_kicks(),
        }
    }
}

fn options(event_idx: bool, indirect: bool) -> ModelOptions {
    ModelOptions { event_idx, indirect, mem_bytes: MEM_BYTES, ..Default::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn corrupt_rings_are_refused(
        packed: bool,
        event_idx: bool,
        indirect: bool,
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let layout = if packed { Layout::Packed } else { Layout::Split };
        let driver = ModelDriver::with_options(layout, 8, options(event_idx, indirect));
        run(&driver, &mut driver.queue(), &steps);
    }

    /// The region is shared with the front end: any bytes may be in it.
    #[test]
    #[allow(non_snake_case)]
    fn abuse_P5_corrupt_inflight_regions_are_refused(
        packed: bool,
        writes in prop::collection::vec((0..320usize, prop_oneof![0..9u8, any::<u8>()]), 0..60),
        offered in 0..6usize,
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let layout = if packed { Layout::Packed } else { Layout::Split };
        let mut driver = ModelDriver::with_options(layout, 8, options(true, true));
        let buffer = driver.buffer(b"x");
        let region = InflightRegion::new(1, 8, layout).unwrap();
        let parts = |driver: &ModelDriver| {
            let mut parts = driver.parts(0);
            parts.inflight = Some(Arc::clone(&region));
            parts
        };
        // A region in use: some chains are taken and not completed.
        for _ in 0..offered {
            driver.offer(&[buffer], &[]);
        }
        let mut batch = Batch::new(8, 64);
        let mut vring = Vring::new(driver.queue(), parts(&driver)).unwrap();
        prop_assert_eq!(vring.pop(&mut batch, 8), offered);
        let fd = region.as_parts().0.as_fd().try_clone_to_owned().unwrap();
        for (at, value) in writes {
            rustix::io::pwrite(&fd, &[value], at as u64).unwrap();
        }
        if let Ok(mut vring) = Vring::new(driver.queue(), parts(&driver)) {
            let mut done = Vec::new();
            while vring.pop(&mut batch, 3) > 0 && done.len() < 100 {
                check(&batch, &driver.memory());
                vring.unpop(&mut batch, 1);
                let all = (0..batch.len()).map(|i| batch.get(i));
                done.extend(all.map(|c| Completion { id: c.id, ndesc: c.ndesc, written: 0 }));
                if batch.is_empty() {
                    break;
                }
            }
            vring.push(&done);
            run(&driver, &mut vring.queue, &steps);
        }
    }
}
