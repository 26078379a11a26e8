//! The driver's rings against our own device side: two programs written from the specification
//! alone agree on every format.

use queue::memory::{GuestMemory, RegionSpec};
use queue::{Batch, Completion, Layout, Position, Queue, RingAddrs, RingSetup};

use super::*;
use crate::memory::GUEST_BASE;

fn device(memory: &Memory, ring: &Ring) -> Queue {
    let spec = RegionSpec {
        guest_addr: GUEST_BASE,
        len_bytes: memory.len_bytes() as u64,
        user_addr: memory.user_base(),
        mmap_offset: 0,
    };
    let fd = memory.fd().try_clone_to_owned().unwrap();
    let table = GuestMemory::empty().with_region(spec, &fd).unwrap();
    let shape = ring.shape();
    let [desc, driver, device] = ring.parts().map(|p| memory.guest_addr(p));
    let setup = RingSetup {
        size: shape.size,
        layout: if shape.packed { Layout::Packed } else { Layout::Split },
        event_idx: shape.event_idx,
        in_order: shape.in_order,
        indirect: shape.indirect,
        addrs: RingAddrs { desc, driver, device },
        start: Position::fresh(),
        log_used_addr: None,
    };
    Queue::new(table, setup).unwrap()
}

/// Memory, a ring in it, and the device's side of the ring with room for what it takes.
fn both_sides(shape: RingShape) -> (Memory, Ring, Queue, Batch) {
    let mut memory = Memory::new(1 << 20, false).unwrap();
    let ring = Ring::new(&mut memory, shape).unwrap();
    let queue = device(&memory, &ring);
    (memory, ring, queue, Batch::new(16, 256))
}

#[test]
fn chains_go_round_in_every_format() {
    for shape in RingShape::all(16) {
        let (_memory, mut ring, mut queue, mut batch) = both_sides(shape);
        let buffer = GUEST_BASE + (1 << 19);
        let (mut posted, mut seen) = (0u16, 0u16);
        for round in 0..200u16 {
            let bufs: Vec<Buf> = (0..1 + u64::from(round % 3))
                .map(|i| Buf { addr: buffer + 64 * i, len: 64, write: i > 0 })
                .collect();
            while ring.has_room(bufs.len()) && posted - seen < 16 {
                ring.post(&bufs, posted);
                posted += 1;
            }
            ring.publish();
            let n = queue.pop(&mut batch, 1 + usize::from(round % 5)).unwrap();
            let done: Vec<_> = (0..n)
                .map(|i| batch.get(i))
                .map(|c| Completion { id: c.id, ndesc: c.ndesc, written: c.writable_len })
                .collect();
            queue.push(&done);
            while let Some(used) = ring.used().unwrap() {
                assert_eq!(used.token, seen, "{shape:?}");
                seen += 1;
            }
        }
        assert!(seen > 150, "{shape:?}: {seen}");
    }
}

#[test]
fn both_sides_tell_each_other_exactly_when_asked() {
    for shape in RingShape::all(16) {
        let (_memory, mut ring, mut queue, mut batch) = both_sides(shape);
        let buf = [Buf { addr: GUEST_BASE + (1 << 19), len: 64, write: true }];
        for lap in 0..40 {
            assert!(!queue.enable_kicks(), "{shape:?} {lap}");
            ring.post(&buf, 0);
            assert!(ring.publish(), "{shape:?} {lap}: it sleeps");
            queue.disable_kicks();
            ring.post(&buf, 1);
            assert!(!ring.publish(), "{shape:?} {lap}: it polls");
            assert_eq!(queue.pop(&mut batch, 8).unwrap(), 2);
            assert!(!ring.set_interrupts(true));
            let done = |i: usize| {
                let chain = batch.get(i);
                Completion { id: chain.id, ndesc: chain.ndesc, written: 64 }
            };
            queue.push(&[done(0)]);
            assert!(queue.take_notify(), "{shape:?} {lap}: we sleep");
            ring.set_interrupts(false);
            queue.push(&[done(1)]);
            assert!(!queue.take_notify(), "{shape:?} {lap}: we poll");
            while ring.used().unwrap().is_some() {}
        }
    }
}
