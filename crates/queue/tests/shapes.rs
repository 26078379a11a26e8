//! Chains whose shape lies near a limit: each is taken whole or refused, by a rule that needs no
//! walker to say so.

use base::limits::{MAX_CHAIN_LEN_BYTES, MAX_CHAIN_SEGS};
use proptest::prelude::*;
use queue::testing::{GUEST_BASE, ModelDriver, ModelOptions, RawDesc};
use queue::{Batch, Layout, RingError};

const QUEUE_SIZE: u16 = 512;
/// Every descriptor may name the same buffer, so this need not hold the longest chain.
const MEM_BYTES: usize = 4 << 20;
const MAX_BUFFER_BYTES: u32 = 3 << 20;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

#[derive(Debug, Clone)]
struct Shape {
    layout: Layout,
    in_table: bool,
    /// Descriptors, and how many of them the device may only read.
    count: usize,
    readable: usize,
    len_bytes: u32,
    /// Split: descriptor `.0` points `.1` entries past the table's end.
    stray: Option<(usize, u16)>,
}

/// Mostly small, mostly near the limit where not.
fn count() -> impl Strategy<Value = usize> {
    prop_oneof![1..9usize, MAX_CHAIN_SEGS - 3..MAX_CHAIN_SEGS + 4, 1..400usize]
}

fn shape() -> impl Strategy<Value = Shape> {
    let stray = prop::option::weighted(0.3, (any::<prop::sample::Index>(), 0..3u16));
    (any::<(bool, bool)>(), count(), any::<prop::sample::Index>(), any::<(u8, i8)>(), stray)
        .prop_map(|((packed, in_table), count, readable, (scale, off), stray)| {
            let layout = if packed { Layout::Packed } else { Layout::Split };
            // Near the length that fills a chain, or a small one.
            let full = i64::from(MAX_CHAIN_LEN_BYTES) / count as i64;
            let near = if scale.is_multiple_of(2) { full } else { i64::from(scale) };
            let len_bytes = (near + i64::from(off % 3)).clamp(1, MAX_BUFFER_BYTES.into()) as u32;
            let stray = stray.filter(|_| !packed && count > 1);
            Shape {
                layout,
                in_table,
                count,
                readable: readable.index(count + 1),
                len_bytes,
                stray: stray.map(|(at, past)| (at.index(count - 1), past)),
            }
        })
}

impl Shape {
    fn descs(&self) -> Vec<RawDesc> {
        let flags = |i: usize| if i < self.readable { 0 } else { WRITE };
        let desc = |i| RawDesc { addr: GUEST_BASE, len: self.len_bytes, flags: flags(i), tail: 0 };
        (0..self.count).map(desc).collect()
    }

    fn offer(&self) -> ModelDriver {
        let options = ModelOptions { indirect: true, mem_bytes: MEM_BYTES, ..Default::default() };
        let mut driver = ModelDriver::with_options(self.layout, QUEUE_SIZE, options);
        if self.in_table {
            self.offer_table(&mut driver)
        } else {
            self.offer_chain(&mut driver)
        }
        driver
    }

    fn offer_chain(&self, driver: &mut ModelDriver) {
        let mut at = driver.offer_raw(&self.descs());
        if let Some((place, past)) = self.stray {
            for _ in 0..place {
                at = driver.desc(at).tail;
            }
            driver.set_desc(at, RawDesc { tail: QUEUE_SIZE + past, ..driver.desc(at) });
        }
    }

    fn offer_table(&self, driver: &mut ModelDriver) {
        let mut descs = self.descs();
        if self.layout == Layout::Split {
            for (i, desc) in descs.iter_mut().enumerate().take(self.count - 1) {
                (desc.flags, desc.tail) = (desc.flags | NEXT, i as u16 + 1);
            }
        }
        if let Some((place, past)) = self.stray {
            descs[place].tail = self.count as u16 + past;
        }
        let addr = driver.ram().table(self.layout, &descs);
        let len = 16 * self.count as u32;
        driver.offer_raw(&[RawDesc { addr, len, flags: INDIRECT, tail: 0 }]);
    }

    /// What must come of it: the first rule that the chain breaks, in the order of its descriptors.
    fn broken_rule(&self) -> Option<&'static str> {
        let bytes_for = MAX_CHAIN_LEN_BYTES / self.len_bytes;
        let stray = self.stray.map_or(usize::MAX, |(place, _)| place + 2);
        // Descriptor `n` (from 1) is the first that cannot be taken. Where two rules meet, the
        // stray index is seen first: without it there is no next descriptor.
        let first =
            [(stray, "index"), (bytes_for as usize + 1, "bytes"), (MAX_CHAIN_SEGS + 1, "segments")];
        let first = first.into_iter().min_by_key(|(n, _)| *n)?;
        (first.0 <= self.count).then_some(first.1)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_chain_is_taken_whole_or_refused_by_its_shape(shape in shape()) {
        let driver = shape.offer();
        let mut batch = Batch::new(8, 64);
        let popped = driver.queue().pop(&mut batch, 8);
        let broken = match &popped {
            Ok(_) => None,
            Err(RingError::ChainTooLong { unit, .. }) => Some(*unit),
            Err(RingError::BadIndex { .. }) => Some("index"),
            Err(other) => panic!("{other}"),
        };
        prop_assert_eq!(broken, shape.broken_rule(), "{:?}", popped);
        if broken.is_none() {
            let chain = batch.get(0);
            let writable = shape.count - shape.readable;
            prop_assert_eq!((chain.readable.len(), chain.writable.len()), (shape.readable, writable));
            prop_assert_eq!(chain.readable_len, shape.readable as u32 * shape.len_bytes);
            prop_assert_eq!(chain.writable_len, writable as u32 * shape.len_bytes);
        }
    }
}
