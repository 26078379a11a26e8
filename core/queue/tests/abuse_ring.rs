//! Rings of a hostile driver. Each test is named after its class in the list of known bugs of the
//! field.
#![allow(non_snake_case)]
// Helpers of tests may unwrap as the tests themselves do.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};

use base::limits::{MAX_CHAIN_LEN_BYTES, MAX_CHAIN_SEGS};
use queue::inflight::InflightRegion;
use queue::testing::{GUEST_BASE, ModelDriver, ModelOptions, RawDesc};
use queue::{Batch, ChainFault, Completion, Layout, Queue, RingError, RingSetup, Vring};

const LAYOUTS: [Layout; 2] = [Layout::Split, Layout::Packed];
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn desc(addr: u64, len: u32, flags: u16) -> RawDesc {
    RawDesc { addr, len, flags, tail: 0 }
}

/// A good chain and then one made of `descs`: the error of the pop, after checking that the good
/// chain is in the batch, that nothing of the bad one is, and that the ring stays broken.
fn broken_by(driver: &mut ModelDriver, descs: &[RawDesc]) -> RingError {
    let good = driver.buffer(b"good");
    let id = driver.offer(&[good], &[]);
    driver.offer_raw(descs);
    broken(driver, id)
}

fn broken(driver: &ModelDriver, good: u16) -> RingError {
    let mut queue = driver.queue();
    let mut batch = Batch::new(8, 64);
    let error = queue.pop(&mut batch, 8).unwrap_err();
    assert_eq!(batch.len(), 1);
    assert_eq!((batch.get(0).id, batch.get(0).readable_len), (good, 4));
    assert_eq!(queue.pop(&mut batch, 8).unwrap_err(), error);
    assert!(batch.is_empty());
    assert!(!error.to_string().is_empty());
    error
}

/// A chain of `descs` between two good ones: its fault, after checking that the ring goes on, and
/// what is left of it: lengths of its readable and writable part.
fn faulty(driver: &mut ModelDriver, descs: &[RawDesc]) -> (ChainFault, u32, u32) {
    let good = driver.buffer(b"good");
    let before = driver.offer(&[good], &[]);
    let bad = driver.offer_raw(descs);
    let after = driver.offer(&[good], &[]);
    let mut queue = driver.queue();
    let mut batch = Batch::new(8, 64);
    assert_eq!(queue.pop(&mut batch, 8), Ok(3));
    let ids = [0, 1, 2].map(|i| batch.get(i).id);
    assert_eq!(ids, [before, bad, after]);
    assert_eq!([batch.get(0).fault, batch.get(2).fault], [None, None]);
    let chain = batch.get(1);
    assert!(chain.readable.len() <= 1 && chain.writable.len() <= 1);
    (chain.fault.expect("a fault"), chain.readable_len, chain.writable_len)
}

#[test]
fn abuse_R1_self_loop() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let good = driver.buffer(b"good");
    let id = driver.offer(&[good], &[]);
    let head = driver.offer(&[good], &[]);
    driver.set_desc(head, RawDesc { addr: good.0, len: 4, flags: NEXT, tail: head });
    assert!(matches!(
        broken(&driver, id),
        RingError::ChainTooLong { head: h, limit: 8, unit: "descriptors" } if h == head
    ));
}

#[test]
fn abuse_R1_loop_inside_a_table() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let (addr, len) = driver.buffer(b"x");
    let entry = |tail| RawDesc { addr, len, flags: NEXT, tail };
    let table = driver.ram().table(Layout::Split, &[entry(1), entry(2), entry(0)]);
    let error = broken_by(&mut driver, &[desc(table, 48, INDIRECT)]);
    assert!(matches!(error, RingError::ChainTooLong { limit: 3, .. }));
}

#[test]
fn abuse_R1_packed_chain_without_end() {
    let mut driver = ModelDriver::new(Layout::Packed, 8);
    let good = driver.buffer(b"good");
    let id = driver.offer(&[good], &[]);
    driver.offer_raw(&[desc(good.0, 4, 0); 7]);
    for i in 0..8 {
        let d = driver.desc(i);
        driver.set_desc(i, RawDesc { flags: if i == 0 { d.flags } else { d.flags | NEXT }, ..d });
    }
    assert!(matches!(broken(&driver, id), RingError::ChainTooLong { limit: 7, .. }));
}

#[test]
fn abuse_R2_index_outside_the_table() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let good = driver.buffer(b"good");
    let id = driver.offer(&[good], &[]);
    let head = driver.offer(&[good], &[]);
    driver.set_desc(head, RawDesc { addr: good.0, len: 4, flags: NEXT, tail: 8 });
    assert_eq!(broken(&driver, id), RingError::BadIndex { index: 8, size: 8 });
    driver.set_avail_entry(1, 0xffff);
    assert_eq!(broken(&driver, id), RingError::BadIndex { index: 0xffff, size: 8 });
    let entry = RawDesc { addr: good.0, len: 4, flags: NEXT, tail: 2 };
    let table = driver.ram().table(Layout::Split, &[entry, entry]);
    driver.set_avail_entry(1, head);
    driver.set_desc(head, desc(table, 32, INDIRECT));
    assert_eq!(broken(&driver, id), RingError::BadIndex { index: 2, size: 2 });
}

/// A driver may choose any id (virtio 1.2, 2.8.6), and gets back what it chose.
#[test]
fn abuse_B10_buffer_ids_are_any_numbers() {
    for (id, has_region) in [(8, false), (0xffff, false), (8, true), (0xffff, true), (7, true)] {
        let mut driver = ModelDriver::new(Layout::Packed, 8);
        let good = driver.buffer(b"good");
        let staged = driver.stage(&[good, good], &[]);
        driver.set_desc(1, RawDesc { tail: id, ..driver.desc(1) });
        driver.publish();
        let mut parts = driver.parts(0);
        parts.inflight = has_region.then(|| InflightRegion::new(1, 8, Layout::Packed).unwrap());
        let region = parts.inflight.clone();
        let mut vring = Vring::new(driver.queue(), parts).unwrap();
        let mut batch = Batch::new(8, 64);
        assert_eq!(vring.pop(&mut batch, 8), 1);
        assert_eq!((batch.get(0).id, batch.get(0).ndesc), (id, 2));
        if let Some(region) = region {
            // The next back end takes it again.
            let mut parts = driver.parts(0);
            parts.inflight = Some(region);
            vring = Vring::new(driver.queue(), parts).unwrap();
            assert_eq!(vring.pop(&mut batch, 8), 1);
            assert_eq!((batch.get(0).id, batch.get(0).ndesc), (id, 2));
        }
        vring.push(&[Completion { id, ndesc: 2, written: 0 }]);
        assert_eq!(driver.desc(0).tail, id);
        assert!(driver.health().is_live() && staged < 8);
    }
}

/// The error of a start names what is wrong with it.
#[test]
fn abuse_B10_a_base_that_makes_no_sense_is_called_base() {
    for (layout, avail, used, text) in [
        (Layout::Packed, 8, 0, "base: available index 8 is outside the ring of 8"),
        (Layout::Packed, 0, 9, "base: used index 9 is outside the ring of 8"),
        (Layout::Split, 9, 0, "base 9 (the next available index) is 9 ahead of the used index 0"),
        (
            Layout::Split,
            0,
            1,
            "base 0 (the next available index) is 65535 ahead of the used index 1",
        ),
    ] {
        let driver = ModelDriver::new(layout, 8);
        let mut setup = driver.setup();
        (setup.start.avail, setup.start.used) = (avail, used);
        let error = Queue::new(driver.memory(), setup).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
}

#[test]
fn abuse_R4_indirect_rules() {
    for layout in LAYOUTS {
        let options = ModelOptions { mem_bytes: 1 << 20, ..Default::default() };
        let driver = || ModelDriver::with_options(layout, 8, options);
        let rule = |make: &dyn Fn(&ModelDriver) -> RawDesc| {
            let mut driver = driver();
            let bad = make(&driver);
            broken_by(&mut driver, &[bad])
        };
        for len in [0, 1, 15, 17, 16 * 4097] {
            let error = rule(&|d| desc(d.alloc(64), len, INDIRECT));
            assert!(matches!(error, RingError::BadIndirect { .. }), "{layout:?} {len}: {error}");
        }
        let nested = rule(&|d| {
            let inner = d.ram().table(layout, &[desc(d.alloc(8), 8, 0)]);
            desc(d.ram().table(layout, &[desc(inner, 16, INDIRECT)]), 16, INDIRECT)
        });
        assert!(matches!(nested, RingError::BadIndirect { rule: "a table inside a table", .. }));
        let unmapped = rule(&|d| desc(d.unmapped_addr(), 16, INDIRECT));
        assert!(matches!(unmapped, RingError::Memory { place: "indirect table", .. }));
        let end = GUEST_BASE + options.mem_bytes as u64;
        let beyond = rule(&|_| desc(end - 8, 16, INDIRECT));
        assert!(matches!(beyond, RingError::Memory { place: "indirect table", .. }));
        let wraps = rule(&|_| desc(u64::MAX - 15, 32, INDIRECT));
        assert!(matches!(wraps, RingError::Memory { place: "indirect table", .. }));
        // Both INDIRECT and NEXT.
        let mut both = driver();
        let buffer = both.buffer(b"x");
        let table = both.ram().table(layout, &[desc(buffer.0, 1, 0)]);
        let error = {
            let id = both.offer(&[both.buffer(b"good")], &[]);
            let next = both.offer_raw(&[desc(table, 16, INDIRECT)]);
            let at = if layout == Layout::Split { next } else { 1 };
            both.set_desc(at, RawDesc { flags: both.desc(at).flags | NEXT, ..both.desc(at) });
            broken(&both, id)
        };
        assert!(matches!(error, RingError::BadIndirect { .. }), "{error}");
    }
}

#[test]
fn abuse_R4_indirect_not_negotiated() {
    for layout in LAYOUTS {
        let options = ModelOptions { indirect: false, ..Default::default() };
        let mut driver = ModelDriver::with_options(layout, 8, options);
        let table = driver.ram().table(layout, &[desc(driver.alloc(8), 8, 0)]);
        let error = broken_by(&mut driver, &[desc(table, 16, INDIRECT)]);
        assert_eq!(error, RingError::NotNegotiated { feature: "INDIRECT_DESC" });
    }
}

#[test]
fn abuse_R5_range_not_fully_mapped() {
    for layout in LAYOUTS {
        let end = GUEST_BASE + ModelOptions::default().mem_bytes as u64;
        for (addr, len) in [
            (end, 1),
            (end - 1, 2),
            (0, 4),
            (GUEST_BASE - 1, 2),
            (u64::MAX, 1),
            (u64::MAX, 2),
            (end - 4096, u32::MAX >> 8),
        ] {
            let mut driver = ModelDriver::new(layout, 8);
            let found = faulty(&mut driver, &[desc(addr, len, 0)]);
            assert_eq!(found, (ChainFault::NotMapped, 0, 0), "{layout:?} {addr:#x}+{len}");
        }
    }
}

/// D4: a program of the guest may name any address (direct I/O on a device's pages). What is left
/// of such a chain is what a disk needs: the header, and the status byte.
#[test]
fn abuse_D4_a_buffer_outside_memory_fails_its_chain_only() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let (header, status) = (driver.alloc(16), driver.alloc(3));
        let stray = driver.unmapped_addr();
        let at = |addr, len, flags| desc(addr, len, flags);
        let (first, last) = (at(header, 16, 0), at(status, 3, WRITE));
        let found = faulty(&mut driver, &[first, at(stray, 4096, WRITE), last]);
        assert_eq!(found, (ChainFault::NotMapped, 16, 1));
        // The status byte itself.
        let mut driver = ModelDriver::in_ram(driver.ram().clone(), layout, 8, Default::default());
        let found = faulty(&mut driver, &[first, last, at(stray, 1, WRITE)]);
        assert_eq!(found, (ChainFault::NotMapped, 16, 0));
        // In a table, and no header.
        let mut driver = ModelDriver::in_ram(driver.ram().clone(), layout, 8, Default::default());
        driver.offer_indirect(&[(stray, 16), (header, 16)], &[(status, 3)]);
        let mut batch = Batch::new(8, 64);
        assert_eq!(driver.queue().pop(&mut batch, 8), Ok(1));
        let chain = batch.get(0);
        let left = (chain.fault, chain.readable_len, chain.writable_len);
        assert_eq!(left, (Some(ChainFault::NotMapped), 0, 1));
        // The order of buffers is a rule of the ring still.
        let mut driver = ModelDriver::in_ram(driver.ram().clone(), layout, 8, Default::default());
        let error = broken_by(&mut driver, &[at(stray, 16, WRITE), at(header, 16, 0)]);
        assert!(matches!(error, RingError::ReadableAfterWritable { .. }));
    }
}

/// Each costs a walk and leaves the batch as empty as before.
#[test]
fn abuse_B2_a_pop_takes_one_faulty_chain() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let stray = driver.unmapped_addr();
        for _ in 0..3 {
            driver.offer_raw(&[desc(stray, 1, 0)]);
        }
        let mut queue = driver.queue();
        let mut batch = Batch::new(8, 64);
        for _ in 0..3 {
            assert_eq!(queue.pop(&mut batch, 8), Ok(1));
            assert!(batch.has_fault());
        }
        assert_eq!(queue.pop(&mut batch, 8), Ok(0));
        assert!(!batch.has_fault());
    }
}

#[test]
fn abuse_R6_length_zero() {
    for layout in LAYOUTS {
        for addr in [0, GUEST_BASE, u64::MAX] {
            for flags in [0, WRITE] {
                let mut driver = ModelDriver::new(layout, 8);
                let error = broken_by(&mut driver, &[desc(addr, 0, flags)]);
                assert!(matches!(error, RingError::ZeroLength { .. }), "{error}");
                let table = driver.ram().table(layout, &[desc(addr, 0, flags)]);
                let mut driver =
                    ModelDriver::in_ram(driver.ram().clone(), layout, 8, ModelOptions::default());
                let error = broken_by(&mut driver, &[desc(table, 16, INDIRECT)]);
                assert!(matches!(error, RingError::ZeroLength { .. }), "{error}");
            }
        }
    }
}

#[test]
fn abuse_R7_available_index_jumps() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let buffer = driver.buffer(b"x");
    let mut queue = driver.queue();
    let mut batch = Batch::new(8, 64);
    for avail in [9, 0x8000, 0xffff] {
        driver.set_avail_idx(avail);
        assert_eq!(
            queue.pop(&mut batch, 8),
            Err(RingError::AvailJump { avail, seen: 0, ahead: avail, size: 8 })
        );
    }
    // With chains in flight, the room is smaller.
    driver.set_avail_idx(0);
    for _ in 0..3 {
        driver.offer(&[buffer], &[]);
    }
    assert_eq!(queue.pop(&mut batch, 8), Ok(3));
    driver.set_avail_idx(8);
    assert_eq!(queue.pop(&mut batch, 8), Ok(5));
    driver.set_avail_idx(9);
    assert!(matches!(queue.pop(&mut batch, 8), Err(RingError::AvailJump { .. })));
    // Backwards.
    driver.set_avail_idx(2);
    assert!(matches!(queue.pop(&mut batch, 8), Err(RingError::AvailJump { .. })));
}

#[test]
fn abuse_R7_packed_descriptors_offered_again_in_flight() {
    let mut driver = ModelDriver::new(Layout::Packed, 4);
    let buffer = driver.buffer(b"x");
    for _ in 0..4 {
        driver.offer(&[buffer], &[]);
    }
    let mut queue = driver.queue();
    let mut batch = Batch::new(8, 64);
    assert_eq!(queue.pop(&mut batch, 8), Ok(4));
    // All made available for the next lap while we still have them.
    for i in 0..4 {
        driver.set_desc(i, RawDesc { flags: 0x8000, ..driver.desc(i) });
    }
    assert_eq!(queue.pop(&mut batch, 8), Ok(0));
    assert!(!queue.enable_kicks());
}

#[test]
fn abuse_R7_overlapping_or_misaligned_parts() {
    for layout in LAYOUTS {
        let driver = ModelDriver::new(layout, 8);
        let good = driver.setup();
        let with = |change: &dyn Fn(&mut RingSetup)| {
            let mut setup = good;
            change(&mut setup);
            Queue::new(driver.memory(), setup).err()
        };
        assert_eq!(with(&|_| {}), None);
        let overlap = with(&|s| s.addrs.driver = s.addrs.desc + 16);
        assert_eq!(overlap, Some(RingError::OverlappingParts { part: "driver" }));
        let overlap = with(&|s| s.addrs.device = s.addrs.driver);
        assert_eq!(overlap, Some(RingError::OverlappingParts { part: "device" }));
        for (part, change) in [
            ("descriptor", &(|s: &mut RingSetup| s.addrs.desc += 8) as &dyn Fn(&mut RingSetup)),
            ("driver", &|s| s.addrs.driver += 1),
            ("device", &|s| s.addrs.device += 2),
        ] {
            let error = with(change);
            assert!(
                matches!(error, Some(RingError::Misaligned { part: p, .. }) if p == part),
                "{layout:?} {part}: {error:?}"
            );
        }
        let end = GUEST_BASE + driver.region().len_bytes;
        for addr in [0, end, end - 16, u64::MAX - 15] {
            for part in 0..3 {
                let error = with(&|s| match part {
                    0 => s.addrs.desc = addr,
                    1 => s.addrs.driver = addr,
                    _ => s.addrs.device = addr,
                });
                // The last 16 bytes hold a packed ring's event structures, and nothing else.
                let fits = addr == end - 16 && part != 0 && layout == Layout::Packed;
                assert_eq!(
                    matches!(error, Some(RingError::Memory { place: "ring", .. })),
                    !fits,
                    "{layout:?} {addr:#x} {part}: {error:?}"
                );
            }
        }
    }
}

#[test]
fn abuse_R8_queue_sizes() {
    for layout in LAYOUTS {
        let driver = ModelDriver::new(layout, 8);
        for (size, split_ok, packed_ok) in [
            (0, false, false),
            (1, true, true),
            (3, false, true),
            (8, true, true),
            (1000, false, true),
            (1024, true, true),
            (1025, false, true),
            (2048, true, true),
            (0x7fff, false, true),
            (0x8000, true, true),
            (0x8001, false, false),
            (0xffff, false, false),
        ] {
            let mut setup = RingSetup { size, ..driver.setup() };
            // Room for the largest parts.
            setup.addrs.desc = driver.alloc(1 << 20).next_multiple_of(4096);
            setup.addrs.driver = driver.alloc(1 << 18).next_multiple_of(4096);
            setup.addrs.device = driver.alloc(1 << 20).next_multiple_of(4096);
            let result = Queue::new(driver.memory(), setup).err();
            let ok = if layout == Layout::Split { split_ok } else { packed_ok };
            assert_eq!(result.is_none(), ok, "{layout:?} {size}: {result:?}");
            if !ok {
                assert!(matches!(result, Some(RingError::BadSize { .. })));
            }
        }
    }
}

#[test]
fn abuse_R8_start_beyond_the_ring() {
    let driver = ModelDriver::new(Layout::Packed, 8);
    for (avail, used, wraps) in [(8, 0, true), (0, 8, true), (0x7fff, 0, true), (0, 1, true)] {
        let mut setup = driver.setup();
        setup.start.avail = avail;
        setup.start.used = used;
        setup.start.avail_wrap = wraps;
        assert!(Queue::new(driver.memory(), setup).is_err(), "{avail} {used}");
    }
    let driver = ModelDriver::new(Layout::Split, 8);
    let mut setup = driver.setup();
    setup.start.avail = 9;
    assert!(matches!(
        Queue::new(driver.memory(), setup),
        Err(RingError::BadBase { base: 9, used: 0, ahead: 9, size: 8 })
    ));
}

#[test]
fn abuse_R9_too_many_bytes_or_segments() {
    for layout in LAYOUTS {
        // As many bytes as allowed, from the same guest memory over and over; then one more.
        let options = ModelOptions { mem_bytes: 8 << 20, ..Default::default() };
        let part = MAX_CHAIN_LEN_BYTES / 16;
        for (extra, ok) in [(0, true), (1, false)] {
            let mut driver = ModelDriver::with_options(layout, 32, options);
            let mut descs = vec![desc(GUEST_BASE, part, 0); 8];
            descs.extend(vec![desc(GUEST_BASE, part, WRITE); 8]);
            if extra > 0 {
                descs.push(desc(GUEST_BASE, extra, WRITE));
            }
            driver.offer_raw(&descs);
            let mut batch = Batch::new(8, 64);
            assert_eq!(driver.queue().pop(&mut batch, 8), Ok(1));
            let fault = (!ok).then_some(ChainFault::TooManyBytes);
            assert_eq!(batch.get(0).fault, fault, "{layout:?} {extra}");
        }
        // Lengths whose sum is beyond 32 bits.
        let mut driver = ModelDriver::with_options(layout, 32, options);
        let found = faulty(&mut driver, &[desc(GUEST_BASE, u32::MAX, 0); 3]);
        assert_eq!(found, (ChainFault::TooManyBytes, 0, 0));
    }
}

/// Chains with as many descriptors as a table may have and drivers are known to send, with as many
/// segments as a chain may have, and with more.
#[test]
fn abuse_B2_chains_of_a_thousand_descriptors_and_of_too_many() {
    for layout in LAYOUTS {
        for count in [257, 515, 1026, MAX_CHAIN_SEGS, MAX_CHAIN_SEGS + 1, 4096] {
            let fault = (count > MAX_CHAIN_SEGS).then_some(ChainFault::TooManySegs);
            let mut driver = ModelDriver::new(layout, 8);
            let (addr, status) = (driver.alloc(8), driver.alloc(1));
            driver.offer_indirect(&vec![(addr, 2); count - 1], &[(status, 1)]);
            let mut batch = Batch::new(8, 64);
            let mut queue = driver.queue();
            assert_eq!(queue.pop(&mut batch, 8), Ok(1));
            let chain = batch.get(0);
            assert_eq!((chain.fault, chain.writable_len), (fault, 1), "{layout:?} {count}");
            assert_eq!(chain.readable_len as usize, fault.map_or(2 * (count - 1), |_| 2));
            // The way to the status byte is work, and is told as such.
            let kept = if fault.is_some() { 2 } else { 0 };
            assert_eq!(chain.segs() as usize, count + kept);
            queue.unpop(&mut batch, 1);
            assert_eq!(queue.pop(&mut batch, 8), Ok(1), "given back, it comes again");
        }
        let mut driver = ModelDriver::new(layout, 8);
        let table = driver.alloc(16);
        let error = broken_by(&mut driver, &[desc(table, 16 * 4097, INDIRECT)]);
        assert!(error.to_string().contains("more than 4096 entries"), "{error}");
    }
}

#[test]
fn abuse_R3_readable_after_writable() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let addr = driver.alloc(64);
        let error = broken_by(&mut driver, &[desc(addr, 8, WRITE), desc(addr, 8, 0)]);
        assert!(matches!(error, RingError::ReadableAfterWritable { .. }));
    }
}

/// The driver changes a descriptor all the time between a good and a bad length: whatever we take
/// must be what we checked.
#[test]
fn abuse_D1_descriptor_changes_while_it_is_read() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let addr = driver.alloc(64);
        driver.offer(&[(addr, 64)], &[]);
        let mut queue = driver.queue();
        let mut batch = Batch::new(8, 64);
        assert_eq!(queue.pop(&mut batch, 8), Ok(1));
        // What was popped does not follow the guest any more.
        let len_addr = driver.desc_addr(0) + 8;
        driver.ram().store_u32(len_addr, 1);
        assert_eq!(batch.get(0).readable_len, 64);
        queue.unpop(&mut batch, 1);
        driver.ram().store_u32(len_addr, 64);
        let stop = AtomicBool::new(false);
        let ram = driver.ram();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ram.store_u32(len_addr, 0xffff_fff0);
                    ram.store_u32(len_addr, 64);
                }
            });
            let mut taken = Vec::new();
            for _ in 0..20_000 {
                if queue.pop(&mut batch, 8).is_ok() {
                    let chain = batch.get(0);
                    if chain.fault.is_none() {
                        taken.push((chain.readable_len, chain.readable[0].len()));
                    }
                    queue.unpop(&mut batch, 1);
                }
            }
            // Asserting before this would leave the other thread running.
            stop.store(true, Ordering::Relaxed);
            assert!(taken.iter().all(|&t| t == (64, 64)));
        });
    }
}

#[test]
fn a_broken_ring_breaks_its_port_only_once() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = driver.vring(3);
    let mut batch = Batch::new(8, 64);
    let good = driver.buffer(b"good");
    driver.offer(&[good], &[]);
    driver.offer_raw(&[desc(good.0, 0, 0)]);
    assert_eq!(vring.pop(&mut batch, 8), 1);
    let chain = batch.get(0);
    vring.push(&[Completion { id: chain.id, ndesc: chain.ndesc, written: 0 }]);
    vring.notify();
    assert!(driver.used().is_some());
    assert!(!driver.health().is_live());
    assert!(driver.health().reason().is_some_and(|r| r.starts_with("queue 3: descriptor ")));
    assert!(driver.err_event().drain());
    assert_eq!(vring.pop(&mut batch, 8), 0);
    assert!(!vring.arm());
    assert!(!driver.err_event().drain());
}
