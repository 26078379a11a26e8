//! Random but valid use of a ring, compared with what the driver knows.

use std::collections::VecDeque;

use proptest::prelude::*;

use crate::queue::Queue;
use crate::seg::{copy_in, copy_out};
use crate::setup::{Completion, Layout};
use crate::testing::{ModelDriver, ModelOptions};
use crate::{Batch, Chain};

/// One step of driver or device.
#[derive(Debug, Clone)]
enum Step {
    /// Offer a chain: lengths of its readable and writable buffers; through a table or not.
    Offer { readable: Vec<u16>, writable: Vec<u16>, table: bool },
    /// Pop up to this many, give the last ones back, complete the rest.
    Serve { max: usize, back: usize },
    /// Pop up to this many and complete them, the newest first.
    Backwards { max: usize },
    /// Consume used chains.
    Consume,
    /// A new memory table with the same regions.
    Remap,
    /// A new queue at the position of the old one.
    Restart,
    /// The device wants kicks, or none.
    Kicks(bool),
    /// The driver wants interrupts, or none.
    Interrupts(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let lens = || prop::collection::vec(1u16..300, 0..4);
    prop_oneof![
        6 => (lens(), lens(), any::<bool>())
            .prop_map(|(readable, writable, table)| Step::Offer { readable, writable, table }),
        4 => (1..9usize, 0..4usize).prop_map(|(max, back)| Step::Serve { max, back }),
        2 => (1..9usize).prop_map(|max| Step::Backwards { max }),
        4 => Just(Step::Consume),
        1 => Just(Step::Remap),
        1 => Just(Step::Restart),
        1 => any::<bool>().prop_map(Step::Kicks),
        1 => any::<bool>().prop_map(Step::Interrupts),
    ]
}

/// A chain that the driver offered, as it knows it.
struct Offered {
    id: u16,
    bytes: Vec<u8>,
    writable: Vec<(u64, u32)>,
}

struct Model {
    driver: ModelDriver,
    queue: Queue,
    batch: Batch,
    /// Offered, not yet popped.
    waiting: VecDeque<Offered>,
    /// Completed, not yet consumed: the chain and how much was written.
    used: VecDeque<(Offered, u32)>,
    fill: u8,
    armed: bool,
}

impl Model {
    fn new(layout: Layout, size: u16, event_idx: bool) -> Self {
        let options = ModelOptions { event_idx, mem_bytes: 8 << 20, ..Default::default() };
        let driver = ModelDriver::with_options(layout, size, options);
        let queue = driver.queue();
        Self {
            driver,
            queue,
            batch: Batch::new(8, 64),
            waiting: VecDeque::new(),
            used: VecDeque::new(),
            fill: 0,
            armed: true,
        }
    }

    fn offer(&mut self, readable: &[u16], writable: &[u16], table: bool) {
        let descs = readable.len() + writable.len();
        let needed = if table { 1 } else { descs };
        if descs == 0 || needed > self.driver.free_descriptors() {
            return;
        }
        let mut bytes = Vec::new();
        let mut buffers = Vec::new();
        for &len in readable {
            self.fill = self.fill.wrapping_add(1);
            let content = vec![self.fill; usize::from(len)];
            buffers.push(self.driver.buffer(&content));
            bytes.extend(content);
        }
        let room: Vec<(u64, u32)> = writable
            .iter()
            .map(|&len| (self.driver.alloc(usize::from(len)), u32::from(len)))
            .collect();
        let id = if table {
            self.driver.offer_indirect(&buffers, &room)
        } else {
            self.driver.offer(&buffers, &room)
        };
        if self.driver.kick_needed() {
            assert!(self.armed, "a kick was asked for while kicks were off");
        }
        self.waiting.push_back(Offered { id, bytes, writable: room });
    }

    /// Compares a popped chain with what was offered, and fills its writable part.
    fn serve_one(chain: Chain<'_>, offered: &Offered) -> Completion {
        assert_eq!(chain.id, offered.id);
        let mut bytes = vec![0; offered.bytes.len() + 1];
        assert_eq!(copy_out(chain.readable, 0, &mut bytes), offered.bytes.len());
        assert_eq!(bytes[..offered.bytes.len()], offered.bytes);
        assert_eq!(chain.readable_len as usize, offered.bytes.len());
        let room: u32 = offered.writable.iter().map(|w| w.1).sum();
        assert_eq!(chain.writable_len, room);
        let written = room / 2;
        let reply = vec![chain.id as u8 ^ 0x5a; written as usize];
        assert_eq!(copy_in(chain.writable, 0, &reply), written as usize);
        Completion { id: chain.id, ndesc: chain.ndesc, written }
    }

    fn serve(&mut self, max: usize, back: usize, backwards: bool) {
        let popped = self.queue.pop(&mut self.batch, max).unwrap();
        assert_eq!(popped, max.min(8).min(self.waiting.len()));
        self.queue.unpop(&mut self.batch, back.min(popped));
        let keep = popped - back.min(popped);
        assert_eq!(self.batch.len(), keep);
        let offered: Vec<Offered> = self.waiting.drain(..keep).collect();
        let mut done: Vec<(Offered, Completion)> = offered
            .into_iter()
            .enumerate()
            .map(|(i, o)| {
                let completion = Self::serve_one(self.batch.get(i), &o);
                (o, completion)
            })
            .collect();
        if backwards {
            done.reverse();
        }
        let completions: Vec<Completion> = done.iter().map(|d| d.1).collect();
        self.queue.push(&completions);
        self.queue.take_notify();
        self.used.extend(done.into_iter().map(|(o, c)| (o, c.written)));
    }

    fn consume(&mut self) {
        while let Some((id, written)) = self.driver.used() {
            let (offered, expected) = self.used.pop_front().expect("nothing was completed");
            assert_eq!((id, written), (offered.id, expected));
            let mut left = written;
            for (addr, len) in offered.writable {
                let part = len.min(left);
                let bytes = self.driver.read(addr, len as usize);
                assert!(bytes[..part as usize].iter().all(|&b| b == id as u8 ^ 0x5a));
                assert!(bytes[part as usize..].iter().all(|&b| b == 0));
                left -= part;
            }
        }
        assert!(self.used.is_empty(), "completions did not arrive");
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Offer { readable, writable, table } => self.offer(readable, writable, *table),
            Step::Serve { max, back } => self.serve(*max, *back, false),
            Step::Backwards { max } => self.serve(*max, 0, true),
            Step::Consume => self.consume(),
            Step::Remap => self.queue.set_memory(self.driver.memory().with_log(None)).unwrap(),
            Step::Restart => {
                let setup = self.queue.setup();
                self.queue = Queue::new(self.driver.memory(), setup).unwrap();
            }
            Step::Kicks(true) => {
                self.armed = true;
                assert_eq!(self.queue.enable_kicks(), !self.waiting.is_empty());
            }
            Step::Kicks(false) => {
                self.queue.disable_kicks();
                // With a split ring's event index one late kick may still come.
                self.armed =
                    self.queue.setup().layout == Layout::Split && self.queue.setup().event_idx;
            }
            Step::Interrupts(wanted) => self.driver.set_interrupts(*wanted),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn split_rings_keep_order_ids_and_bytes(
        power in 0u32..5,
        event_idx: bool,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut model = Model::new(Layout::Split, 1 << power, event_idx);
        steps.iter().for_each(|s| model.apply(s));
    }

    #[test]
    fn packed_rings_keep_order_ids_and_bytes(
        size in 1u16..20,
        event_idx: bool,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut model = Model::new(Layout::Packed, size, event_idx);
        steps.iter().for_each(|s| model.apply(s));
    }
}

/// The index of a split ring wraps at 65,536, far beyond what random steps reach.
#[test]
fn indices_wrap() {
    for layout in [Layout::Split, Layout::Packed] {
        for event_idx in [false, true] {
            let mut model = Model::new(layout, 8, event_idx);
            let mark = model.driver.ram().mark();
            for _ in 0..70_000 / 5 {
                for i in 0..5 {
                    model.offer(&[3], if i == 0 { &[4] } else { &[] }, false);
                }
                model.serve(8, 1, false);
                model.serve(8, 0, true);
                model.consume();
                model.driver.ram().free_to(mark);
                // Consumed buffers are checked to be zero beyond what was written.
                model.driver.write(model.driver.ram().alloc(640), &[0; 640]);
                model.driver.ram().free_to(mark);
            }
        }
    }
}

/// Every time the driver waits for an interrupt it must get one, and every time the device waits
/// for a kick: in all combinations of what was asked for and how much happened since. Whether the
/// driver waits is seen, too.
#[test]
fn notifications_are_never_missed() {
    for layout in [Layout::Split, Layout::Packed] {
        for event_idx in [false, true] {
            let options = ModelOptions { event_idx, mem_bytes: 1 << 20, ..Default::default() };
            let mut driver = ModelDriver::with_options(layout, 4, options);
            let mut queue = driver.queue();
            let mut batch = Batch::new(4, 64);
            let buffer = driver.buffer(b"x");
            for round in 0..500 {
                let count = 1 + round % 4;
                let wanted = round % 3 != 0;
                driver.set_interrupts(wanted);
                assert!(!queue.enable_kicks());
                driver.kick_needed();
                for _ in 0..count {
                    driver.stage(&[buffer], &[]);
                }
                driver.publish();
                assert!(driver.kick_needed(), "{layout:?} {event_idx} round {round}");
                queue.disable_kicks();
                assert_eq!(queue.pop(&mut batch, 4), Ok(count));
                let done: Vec<Completion> = (0..count)
                    .map(|i| batch.get(i))
                    .map(|c| Completion { id: c.id, ndesc: c.ndesc, written: 0 })
                    .collect();
                assert_eq!(queue.driver_waits(), wanted);
                queue.push(&done);
                assert_eq!(queue.driver_waits(), wanted && !event_idx);
                let notify = queue.take_notify();
                // The first one is always sent: an earlier daemon's may be missing.
                let first = round == 0 && event_idx && layout == Layout::Split;
                assert_eq!(notify, wanted || first, "{layout:?} {event_idx} round {round}");
                let is_asked = !(round == 0 && event_idx);
                assert_eq!(queue.driver_waited(), wanted && is_asked);
                assert!(!queue.take_notify());
                while driver.used().is_some() {}
                assert_eq!(queue.driver_waits(), wanted);
            }
        }
    }
}
