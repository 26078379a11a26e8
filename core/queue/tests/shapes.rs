//! Chains whose shape lies near a limit: each is taken whole or refused, by a rule that needs no
//! walker to say so.

use base::limits::{MAX_CHAIN_LEN_BYTES, MAX_CHAIN_SEGS};
use proptest::prelude::*;
use queue::testing::{GUEST_BASE, ModelDriver, ModelOptions};
use queue::{Batch, ChainFault, Layout, RingError};

const QUEUE_SIZE: u16 = 1024;
/// Every descriptor may name the same buffer, so this need not hold the longest chain.
const MEM_BYTES: usize = 4 << 20;
const MAX_BUFFER_BYTES: u32 = 3 << 20;

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
                in_table: in_table || count > usize::from(QUEUE_SIZE),
                count,
                readable: readable.index(count + 1),
                len_bytes,
                stray: stray.map(|(at, past)| (at.index(count - 1), past)),
            }
        })
}

impl Shape {
    fn offer(&self) -> ModelDriver {
        let options = ModelOptions { indirect: true, mem_bytes: MEM_BYTES, ..Default::default() };
        let mut driver = ModelDriver::with_options(self.layout, QUEUE_SIZE, options);
        let buffers = vec![(GUEST_BASE, self.len_bytes); self.count];
        let (readable, writable) = buffers.split_at(self.readable);
        let head = if self.in_table {
            driver.offer_indirect(readable, writable)
        } else {
            driver.offer(readable, writable)
        };
        if let Some((place, past)) = self.stray {
            let (desc_addr, table_len) = if self.in_table {
                (driver.desc(head).addr + 16 * place as u64, self.count as u16)
            } else {
                let at = (0..place).fold(head, |at, _| driver.desc(at).tail);
                (driver.desc_addr(at), QUEUE_SIZE)
            };
            // `next` of a split descriptor (virtio 2.7.5).
            driver.ram().store_u16(desc_addr + 14, table_len + past);
        }
        driver
    }

    /// Limit that the chain breaks first, in the order of its descriptors.
    fn fault(&self) -> Option<ChainFault> {
        let bytes_for = (MAX_CHAIN_LEN_BYTES / self.len_bytes) as usize;
        let (first, fault) = match bytes_for <= MAX_CHAIN_SEGS {
            true => (bytes_for, ChainFault::TooManyBytes),
            false => (MAX_CHAIN_SEGS, ChainFault::TooManySegs),
        };
        (first < self.count).then_some(fault)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_chain_is_taken_whole_or_refused_by_its_shape(shape in shape()) {
        let driver = shape.offer();
        let mut batch = Batch::new(8, 64);
        let popped = driver.queue().pop(&mut batch, 8);
        if shape.stray.is_some() {
            prop_assert!(matches!(popped, Err(RingError::BadIndex { .. })), "{:?}", popped);
            return Ok(());
        }
        prop_assert_eq!(popped, Ok(1));
        let chain = batch.get(0);
        prop_assert_eq!(chain.fault, shape.fault());
        let writable = shape.count - shape.readable;
        if chain.fault.is_some() {
            prop_assert!(chain.readable.len() <= 1);
            prop_assert_eq!(chain.writable_len, u32::from(writable > 0));
        } else {
            let segs = (chain.readable.len(), chain.writable.len());
            prop_assert_eq!(segs, (shape.readable, writable));
            prop_assert_eq!(chain.readable_len, shape.readable as u32 * shape.len_bytes);
            prop_assert_eq!(chain.writable_len, writable as u32 * shape.len_bytes);
        }
    }
}
