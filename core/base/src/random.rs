//! The seam for randomness.

/// A source of random numbers.
pub trait Random: Send {
    /// The next 64 random bits.
    fn next_u64(&mut self) -> u64;

    /// A number below `bound` (0 when `bound` is 0). The bias of the multiply-shift method is below
    /// 2^-32 for the bounds used here.
    fn below(&mut self, bound: u32) -> u32 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u32
    }
}

/// A seeded generator (SplitMix64, Steele et al., OOPSLA 2014): the same seed, the same run. Not
/// for secrets.
#[derive(Debug, Clone)]
pub struct Seeded(u64);

impl Seeded {
    /// A generator that replays the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
}

impl Random for Seeded {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Randomness from the kernel (`getrandom`).
#[derive(Debug, Default, Clone, Copy)]
pub struct OsRandom;

impl Random for OsRandom {
    fn next_u64(&mut self) -> u64 {
        let mut bytes = [0u8; 8];
        let mut filled = 0;
        while filled < bytes.len() {
            // SAFETY: the pointer and length describe the unfilled tail of `bytes`.
            let n = unsafe {
                libc::getrandom(bytes[filled..].as_mut_ptr().cast(), bytes.len() - filled, 0)
            };
            // getrandom(2) with flags 0 fails only with EINTR once the kernel has its seed.
            filled += usize::try_from(n).unwrap_or(0);
        }
        u64::from_ne_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_sequence() {
        let (mut a, mut b) = (Seeded::new(42), Seeded::new(42));
        for _ in 0..100 {
            assert_eq!(a.next_u64(), b.next_u64());
        }
    }

    #[test]
    fn below_stays_below() {
        let mut r = Seeded::new(1);
        for bound in [1, 2, 3, 1000, u32::MAX] {
            for _ in 0..100 {
                assert!(r.below(bound) < bound);
            }
        }
        assert_eq!(r.below(0), 0);
    }

    #[test]
    fn kernel_randomness_differs() {
        assert_ne!(OsRandom.next_u64(), OsRandom.next_u64());
    }
}
