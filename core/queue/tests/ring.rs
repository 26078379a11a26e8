//! Rings against the model driver: what a well-behaved guest does.

#![allow(non_snake_case)]

use queue::seg::{copy_in, copy_out};
use queue::testing::{GuestRam, ModelDriver, ModelOptions};
use queue::{Batch, Completion, Layout};

const LAYOUTS: [Layout; 2] = [Layout::Split, Layout::Packed];

fn done(batch: &Batch, index: usize, written: u32) -> Completion {
    let chain = batch.get(index);
    Completion { id: chain.id, ndesc: chain.ndesc, written }
}

#[test]
fn chains_arrive_in_order_with_their_bytes() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let mut queue = driver.queue();
        let mut batch = Batch::new(8, 64);
        // 8 is no multiple of 3: chains begin at every position and wrap.
        for round in 0..50u8 {
            let hello = driver.buffer(&[round; 100]);
            let more = driver.buffer(&[round.wrapping_add(1); 7]);
            let reply = driver.alloc(32);
            let indirect = round % 2 == 0;
            let id = if indirect {
                driver.offer_indirect(&[hello, more], &[(reply, 32)])
            } else {
                driver.offer(&[hello, more], &[(reply, 32)])
            };
            assert_eq!(queue.pop(&mut batch, 8), Ok(1));
            let chain = batch.get(0);
            assert_eq!((chain.id, chain.readable_len, chain.writable_len), (id, 107, 32));
            assert_eq!(chain.ndesc, if indirect { 1 } else { 3 });
            let mut bytes = [0; 200];
            assert_eq!(copy_out(chain.readable, 0, &mut bytes), 107);
            assert_eq!(bytes[..100], [round; 100]);
            assert_eq!(bytes[100..107], [round.wrapping_add(1); 7]);
            assert_eq!(copy_in(chain.writable, 2, b"pong"), 4);
            queue.push(&[done(&batch, 0, 6)]);
            assert_eq!(driver.used(), Some((id, 6)));
            assert_eq!(driver.used(), None);
            assert_eq!(driver.read(reply, 6), b"\0\0pong");
        }
    }
}

#[test]
fn a_batch_is_popped_and_published_at_once() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 16);
        let mut queue = driver.queue();
        let mut batch = Batch::new(16, 64);
        for _ in 0..20 {
            let buffer = driver.buffer(b"x");
            let ids: Vec<u16> = (0..11).map(|_| driver.stage(&[buffer], &[])).collect();
            assert_eq!(queue.pop(&mut batch, 16), Ok(0));
            driver.publish();
            assert_eq!(queue.pop(&mut batch, 4), Ok(4));
            let mut all: Vec<_> = (0..4).map(|i| done(&batch, i, 0)).collect();
            assert_eq!(queue.pop(&mut batch, 16), Ok(7));
            all.extend((0..7).map(|i| done(&batch, i, 0)));
            assert_eq!(driver.used(), None);
            queue.push(&all);
            let used: Vec<u16> = std::iter::from_fn(|| driver.used()).map(|u| u.0).collect();
            assert_eq!(used, ids);
        }
    }
}

#[test]
fn completions_may_come_out_of_order() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let mut queue = driver.queue();
        let mut batch = Batch::new(8, 64);
        for _ in 0..30 {
            let buffer = driver.buffer(b"x");
            let a = driver.offer(&[buffer, buffer], &[]);
            let b = driver.offer(&[buffer], &[buffer, buffer]);
            assert_eq!(queue.pop(&mut batch, 8), Ok(2));
            queue.push(&[done(&batch, 1, 1)]);
            queue.push(&[done(&batch, 0, 0)]);
            assert_eq!(driver.used(), Some((b, 1)));
            assert_eq!(driver.used(), Some((a, 0)));
        }
    }
}

#[test]
fn unpop_gives_the_same_chains_again() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let mut queue = driver.queue();
        let mut batch = Batch::new(8, 64);
        for round in 0..20 {
            let buffer = driver.buffer(b"x");
            let ids = [
                driver.offer(&[buffer], &[]),
                driver.offer(&[buffer, buffer], &[]),
                driver.offer(&[buffer, buffer, buffer], &[]),
            ];
            let before = queue.position();
            assert_eq!(queue.pop(&mut batch, 8), Ok(3));
            queue.unpop(&mut batch, 3);
            assert_eq!(queue.position(), before, "{layout:?} round {round}");
            assert_eq!(queue.pop(&mut batch, 8), Ok(3));
            queue.unpop(&mut batch, 2);
            assert_eq!(batch.len(), 1);
            assert_eq!(batch.get(0).id, ids[0]);
            queue.push(&[done(&batch, 0, 0)]);
            assert_eq!(queue.pop(&mut batch, 8), Ok(2));
            queue.push(&[done(&batch, 0, 0), done(&batch, 1, 0)]);
            let used: Vec<u16> = std::iter::from_fn(|| driver.used()).map(|u| u.0).collect();
            assert_eq!(used, ids);
        }
    }
}

#[test]
fn a_vring_counts_and_notifies() {
    for layout in LAYOUTS {
        for event_idx in [false, true] {
            let options = ModelOptions { event_idx, ..ModelOptions::default() };
            let mut driver = ModelDriver::with_options(layout, 8, options);
            let mut vring = driver.vring(0);
            let mut batch = Batch::new(8, 64);
            assert!(!vring.arm());
            let buffer = driver.buffer(b"x");
            for wanted in [true, false, true] {
                driver.set_interrupts(wanted);
                // The first interrupt after the start is always sent with EVENT_IDX.
                driver.offer(&[buffer], &[]);
                assert!(driver.kick(), "{layout:?} {event_idx}");
                assert!(vring.parts.kick.as_ref().is_some_and(|k| k.drain()));
                vring.disarm();
                assert_eq!(vring.pop(&mut batch, 8), 1);
                vring.push(&[done(&batch, 0, 0)]);
                vring.notify();
                vring.notify();
                assert_eq!(driver.interrupted(), wanted, "{layout:?} event_idx {event_idx}");
                assert!(driver.used().is_some());
                assert!(!vring.arm());
            }
            let stats = driver.stats();
            assert_eq!((stats.requests.get(), stats.batches.get()), (3, 3));
            assert_eq!(stats.notifications_sent.get(), 2);
            assert_eq!(stats.notifications_suppressed.get(), 1);
        }
    }
}

/// Size by crosvm's default. The free-running indexes have 16 bits: two laps of the ring are all
/// there is.
#[test]
fn abuse_N4_the_largest_ring_is_served_full_and_over_the_wrap_of_its_indexes() {
    const SIZE: u16 = base::limits::MAX_QUEUE_SIZE;
    for layout in LAYOUTS {
        let ram = GuestRam::new(4 << 20);
        let mut driver = ModelDriver::in_ram(ram, layout, SIZE, ModelOptions::default());
        let mut queue = driver.queue();
        let mut batch = Batch::new(usize::from(SIZE), usize::from(SIZE));
        let buffer = driver.buffer(b"x");
        // Not a divisor of the size: the third lap begins in the middle.
        for count in [usize::from(SIZE), 31_000, usize::from(SIZE), 5] {
            let ids: Vec<u16> = (0..count).map(|_| driver.stage(&[buffer], &[])).collect();
            driver.publish();
            let mut all = Vec::with_capacity(count);
            while all.len() < count {
                let popped = queue.pop(&mut batch, 1000).unwrap();
                all.extend((0..popped).map(|i| done(&batch, i, 0)));
            }
            assert_eq!(queue.pop(&mut batch, 1000), Ok(0));
            assert_eq!(all.iter().map(|c| c.id).collect::<Vec<_>>(), ids);
            queue.push(&all);
            for id in ids {
                assert_eq!(driver.used(), Some((id, 0)));
            }
            assert_eq!(driver.used(), None);
        }
    }
}
