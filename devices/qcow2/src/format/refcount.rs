//! Refcounts of 1 to 64 bits in a refcount block.

/// The refcount at `index` of a block whose refcounts have 2^`order` bits.
pub fn get(block: &[u8], order: u32, index: u64) -> u64 {
    let index = index as usize;
    if order < 3 {
        let per_byte = 8usize >> order;
        let bits = 1u32 << order;
        let shift = (index % per_byte) as u32 * bits;
        return u64::from(block[index / per_byte] >> shift) & ((1 << bits) - 1);
    }
    let len = 1usize << (order - 3);
    block[index * len..][..len].iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// Sets the refcount at `index`; `value` fits.
pub fn set(block: &mut [u8], order: u32, index: u64, value: u64) {
    let index = index as usize;
    if order < 3 {
        let per_byte = 8usize >> order;
        let bits = 1u32 << order;
        let shift = (index % per_byte) as u32 * bits;
        let byte = &mut block[index / per_byte];
        let mask = ((1u32 << bits) - 1) as u8;
        *byte = *byte & !(mask << shift) | ((value as u8 & mask) << shift);
        return;
    }
    let len = 1usize << (order - 3);
    block[index * len..][..len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
}

/// The bytes of a block that hold the refcounts `from..to`.
pub fn bytes_of(order: u32, from: u64, to: u64) -> std::ops::Range<usize> {
    let first = (from << order) / 8;
    let end = (to << order).div_ceil(8);
    first as usize..end as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counts_of_a_bit_begin_with_the_least_significant_one() {
        let mut block = [0u8; 2];
        set(&mut block, 0, 0, 1);
        set(&mut block, 0, 9, 1);
        assert_eq!(block, [1, 2]);
        set(&mut block, 2, 1, 0xf);
        assert_eq!(block, [0xf1, 2]);
        let mut block = [0u8; 4];
        set(&mut block, 4, 1, 0x1234);
        assert_eq!(block, [0, 0, 0x12, 0x34]);
        assert_eq!(bytes_of(0, 3, 17), 0..3);
        assert_eq!(bytes_of(4, 3, 5), 6..10);
        assert_eq!(bytes_of(6, 1, 2), 8..16);
    }

    proptest! {
        #[test]
        fn what_is_set_is_got_and_the_others_stay(
            order in 0u32..=6,
            writes in proptest::collection::vec((0u64..64, any::<u64>()), 1..100),
        ) {
            let mut block = vec![0u8; 512];
            let mut model = [0u64; 64];
            let max = if order == 6 { u64::MAX } else { (1u64 << (1 << order)) - 1 };
            for (index, value) in writes {
                set(&mut block, order, index, value & max);
                model[index as usize] = value & max;
                prop_assert!((0..64).all(|i| get(&block, order, i) == model[i as usize]));
            }
        }
    }
}
