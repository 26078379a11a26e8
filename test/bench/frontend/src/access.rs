//! Order in which the blocks of a disk are asked for.

use base::random::{Random, Seeded};

use crate::error::FrontendError;

/// Parts of all stretches of which the first is the warm-up of a run that asks for each once.
const WARM_UP_PARTS: usize = 8;

/// How a disk is gone through. By default: at random, for ever, by a driver that cannot flush, so
/// that each write is durable when it is answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Access {
    /// From the first block to the last, over and over.
    pub sequential: bool,
    /// One block of each stretch of so many bytes, each stretch once; then the run ends. For what
    /// can be measured only once, such as the first write to a cluster of an image.
    pub once_per_bytes: Option<usize>,
    /// Negotiate FLUSH, as guests do: writes may stay in the back end's cache.
    pub write_cache: bool,
}

/// The blocks still to come.
#[derive(Debug)]
pub(crate) struct Blocks(Kind);

#[derive(Debug)]
enum Kind {
    Random {
        count: u32,
    },
    Sequential {
        count: u32,
        next: u32,
    },
    Once {
        /// In the order in which they are asked for.
        stretches: Vec<u32>,
        blocks_per_stretch: u32,
        next: usize,
        /// End of this part of the run.
        end: usize,
    },
}

impl Blocks {
    /// Blocks of a disk: `count` blocks of `block_bytes`, `depth` of them under way.
    pub(crate) fn new(
        count: u32,
        block_bytes: usize,
        depth: usize,
        access: Access,
        random: &mut Seeded,
    ) -> Result<Self, FrontendError> {
        let Some(stretch_bytes) = access.once_per_bytes else {
            let next = 0;
            let sequential = Kind::Sequential { count, next };
            return Ok(Self(if access.sequential { sequential } else { Kind::Random { count } }));
        };
        let usage = |text: String| Err(FrontendError::Usage(text));
        if stretch_bytes == 0 || !stretch_bytes.is_multiple_of(block_bytes) {
            return usage(format!("stretches of {stretch_bytes} bytes: whole blocks are needed"));
        }
        let blocks_per_stretch = u32::try_from(stretch_bytes / block_bytes).unwrap_or(u32::MAX);
        let mut stretches: Vec<u32> = (0..count / blocks_per_stretch).collect();
        if stretches.len() / WARM_UP_PARTS < depth {
            let (have, need) = (stretches.len(), depth * WARM_UP_PARTS);
            return usage(format!("{have} stretches, at least {need} are needed for the depth"));
        }
        if !access.sequential {
            shuffle(&mut stretches, random);
        }
        let end = stretches.len();
        Ok(Self(Kind::Once { stretches, blocks_per_stretch, next: 0, end }))
    }

    /// The next one; none when each stretch of this part had its turn.
    #[inline]
    pub(crate) fn next(&mut self, random: &mut Seeded) -> Option<u64> {
        match &mut self.0 {
            Kind::Random { count } => Some(u64::from(random.below(*count))),
            Kind::Sequential { count, next } => {
                let block = *next;
                *next = if block + 1 == *count { 0 } else { block + 1 };
                Some(u64::from(block))
            }
            Kind::Once { stretches, blocks_per_stretch, next, end } => {
                let stretch = *stretches[..*end].get(*next)?;
                *next += 1;
                let within = random.below(*blocks_per_stretch);
                Some(u64::from(stretch) * u64::from(*blocks_per_stretch) + u64::from(within))
            }
        }
    }

    /// Ends with the warm-up's part, until [`Blocks::open_all`].
    pub(crate) fn open_warm_up(&mut self) {
        if let Kind::Once { stretches, end, .. } = &mut self.0 {
            *end = stretches.len() / WARM_UP_PARTS;
        }
    }

    /// Ends with the last stretch.
    pub(crate) fn open_all(&mut self) {
        if let Kind::Once { stretches, end, .. } = &mut self.0 {
            *end = stretches.len();
        }
    }
}

/// Fisher and Yates.
fn shuffle(all: &mut [u32], random: &mut Seeded) {
    for last in (1..all.len()).rev() {
        all.swap(last, random.below(last as u32 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 4096;

    fn blocks(count: u32, access: Access) -> Vec<u64> {
        let mut random = Seeded::new(3);
        let mut blocks = Blocks::new(count, BLOCK, 1, access, &mut random).unwrap();
        std::iter::from_fn(|| blocks.next(&mut random)).take(1000).collect()
    }

    #[test]
    fn each_stretch_is_asked_for_once_and_nowhere_always_at_the_same_place() {
        let once = Access { once_per_bytes: Some(16 * BLOCK), ..Access::default() };
        let all = blocks(16 * 64 + 5, once);
        let mut stretches: Vec<u64> = all.iter().map(|b| b / 16).collect();
        assert!(!stretches.is_sorted(), "shuffled: {stretches:?}");
        stretches.sort_unstable();
        assert_eq!(stretches, (0..64).collect::<Vec<_>>());
        let mut places: Vec<u64> = all.iter().map(|b| b % 16).collect();
        places.sort_unstable();
        places.dedup();
        assert!(places.len() > 8, "{places:?}");
        assert_eq!(all, blocks(16 * 64 + 5, once), "the same seed, the same order");
    }

    #[test]
    fn the_warm_up_and_the_rest_share_no_stretch() {
        let access = Access { sequential: true, once_per_bytes: Some(BLOCK), write_cache: true };
        let mut random = Seeded::new(1);
        let mut blocks = Blocks::new(80, BLOCK, 2, access, &mut random).unwrap();
        blocks.open_warm_up();
        let warm_up: Vec<u64> = std::iter::from_fn(|| blocks.next(&mut random)).collect();
        blocks.open_all();
        let rest: Vec<u64> = std::iter::from_fn(|| blocks.next(&mut random)).collect();
        assert_eq!([warm_up, rest], [(0..10).collect::<Vec<_>>(), (10..80).collect()]);
    }

    #[test]
    fn sequential_goes_round_and_random_goes_on() {
        let sequential = blocks(300, Access { sequential: true, ..Access::default() });
        assert_eq!(sequential[297..302], [297, 298, 299, 0, 1]);
        let random = blocks(300, Access::default());
        assert!(random.len() == 1000 && random.iter().all(|b| *b < 300));
    }

    #[test]
    fn stretches_that_do_not_fit_are_told() {
        let new = |bytes, depth| {
            let access = Access { once_per_bytes: Some(bytes), ..Access::default() };
            let e = Blocks::new(64, BLOCK, depth, access, &mut Seeded::new(1)).unwrap_err();
            e.to_string()
        };
        assert_eq!(new(5000, 1), "stretches of 5000 bytes: whole blocks are needed");
        assert_eq!(new(0, 1), "stretches of 0 bytes: whole blocks are needed");
        let few = "32 stretches, at least 40 are needed for the depth";
        assert_eq!(new(2 * BLOCK, 5), few);
        assert!(new(1 << 45, 1).starts_with("0 stretches"));
    }
}
