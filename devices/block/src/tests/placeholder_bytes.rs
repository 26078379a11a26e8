//! Bytes that make a placed write, however they lie in the guest's memory.

use proptest::prelude::*;
use queue::Layout;

use super::placeholders::Bench;
use crate::request::kind;
use crate::testing::placeholders::{TAG, sector};

/// Tag and offset in the pipe that a write must be taken to have, from its bytes alone.
fn oracle(data: &[u8]) -> Option<([u8; 16], u64)> {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let at = number(data.get(8..16)?);
    let tag: [u8; 16] = data[16..32].try_into().unwrap();
    let good = data.chunks(512).enumerate().all(|(n, sector)| {
        let wanted = at.checked_add(n as u64 * 512);
        sector[..8] == *b"MLRCHOLD"
            && Some(number(&sector[8..16])) == wanted
            && sector[16..32] == tag
            && wanted.and_then(|at| at.checked_add(512)).is_some()
    });
    (good && tag == TAG).then_some((tag, at))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..Default::default()
    })]

    /// However the guest cuts its buffers, and whatever it puts into them.
    #[test]
    fn a_write_is_placed_exactly_when_all_its_bytes_say_so(
        count in 1usize..40,
        at in prop_oneof![Just(0u64), Just(1 << 33), Just(u64::MAX - 10_239), any::<u64>()],
        flips in prop::collection::vec((0usize..40 * 512, any::<u8>(), any::<bool>()), 0..3),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..25),
        packed in any::<bool>(),
    ) {
        // What a guest would make of it: numbers go round.
        let mut data: Vec<u8> = (0..count as u64)
            .flat_map(|n| sector(TAG, at.wrapping_add(n * 512)))
            .collect();
        for (place, value, in_head) in flips {
            let place = if in_head { place / 512 * 512 + place % 32 } else { place };
            let len = data.len();
            data[place % len] = value;
        }
        let mut bench = Bench::new(if packed { Layout::Packed } else { Layout::Split }, true);
        let mut bytes = vec![0u8; 16];
        bytes[..4].copy_from_slice(&kind::OUT.to_le_bytes());
        bytes.extend_from_slice(&data);
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        cuts.dedup();
        let readable: Vec<_> =
            cuts.windows(2).map(|w| bench.rig.driver.buffer(&bytes[w[0]..w[1]])).collect();
        let status = bench.rig.status_byte();
        bench.rig.driver.offer(&readable, &[status]);
        bench.poll();
        let taken = bench.taken.try_recv().ok();
        let found = taken.as_ref().map(|w| (w.tag(), w.at()));
        prop_assert_eq!(found, oracle(&data));
        match taken {
            Some(write) => {
                prop_assert_eq!((write.offset(), write.len_bytes()), (0, data.len() as u64));
                write.complete(Ok(()));
                prop_assert!(bench.log().is_empty());
            }
            None => prop_assert!(bench.disk.state().cache[..data.len()] == data),
        }
        bench.poll();
        prop_assert_eq!(bench.rig.driver.read(status.0, 1), [0]);
    }
}
