//! What a guest is asked to write, or to read: ranges of a pipe, cut so that placeholders stand for whole
//! blocks of the file, and what has been seen of each.

use std::ops::Range;

use guest_abi::pipe::{BLOCK_BYTES, MAX_TAKE_BYTES, take};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Take {
    /// Offsets in the pipe.
    pub range: Range<u64>,
    /// [`take`].
    pub how: u8,
    /// Ranges whose placeholders were replaced, apart from each other, in order.
    seen: Vec<Range<u64>>,
}

impl Take {
    /// Placeholders.
    pub fn places(range: Range<u64>) -> Self {
        Self { range, how: take::PLACES, seen: Vec::new() }
    }

    /// Bytes, which go with it.
    pub fn bytes(range: Range<u64>) -> Self {
        Self { range, how: take::BYTES, seen: Vec::new() }
    }

    /// How long it is; in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// These bytes are in their place.
    pub fn see(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        self.seen.retain(|old| {
            let is_apart = old.end < start || end < old.start;
            if !is_apart {
                (start, end) = (start.min(old.start), end.max(old.end));
            }
            is_apart
        });
        let at = self.seen.partition_point(|old| old.start < start);
        self.seen.insert(at, start..end);
    }

    /// It ends there, behind its beginning.
    pub fn cut(&mut self, end: u64) {
        self.range.end = self.range.end.min(end);
        self.seen.retain(|seen| seen.start < end);
        self.seen.iter_mut().for_each(|seen| seen.end = seen.end.min(end));
    }

    /// What the guest has written, or read, and nobody has seen, as requests for bytes.
    pub fn missed(&self) -> Vec<Self> {
        let mut missed = Vec::new();
        let mut at = self.range.start;
        if self.how == take::BYTES {
            return missed;
        }
        for seen in self.seen.iter().chain([&(self.range.end..self.range.end)]) {
            while at < seen.start {
                let end = seen.start.min(at + MAX_TAKE_BYTES as u64);
                missed.push(Self::bytes(at..end));
                at = end;
            }
            at = at.max(seen.end);
        }
        missed
    }
}

/// The next request, for what follows `at` and is there up to `until`; none: it is worth waiting for more.
/// `skew_bytes` is where the pipe's first byte lies in its block. At `is_end` nothing more will come.
pub(crate) fn next(
    at: u64,
    until: u64,
    is_end: bool,
    skew_bytes: u64,
    max_bytes: usize,
) -> Option<Take> {
    if at >= until {
        return None;
    }
    let behind = (skew_bytes + at) % BLOCK;
    if behind != 0 {
        let end = (at + BLOCK - behind).min(until);
        let is_whole = end == at + BLOCK - behind;
        return (is_whole || is_end).then(|| Take::bytes(at..end));
    }
    let blocks = (until - at).min(max_bytes as u64) / BLOCK * BLOCK;
    if blocks > 0 {
        return Some(Take::places(at..at + blocks));
    }
    is_end.then(|| Take::bytes(at..until))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_is_asked_for_once_and_placeholders_are_whole_blocks(
            first in 0..10_000u64,
            len in 1..3_000_000u64,
            skew in 0..4096u64,
            steps in proptest::collection::vec(1..500_000u64, 1..20),
        ) {
            let (mut at, mut until, end) = (first, first, first + len);
            let mut steps = steps.into_iter().cycle();
            while at < end {
                match next(at, until, until == end, skew, 1 << 20) {
                    Some(take) => {
                        prop_assert_eq!(take.range.start, at);
                        prop_assert!(take.range.end <= until && take.len_bytes() > 0);
                        if take.how == take::PLACES {
                            prop_assert_eq!((skew + at) % BLOCK, 0);
                            prop_assert_eq!(take.len_bytes() % BLOCK, 0);
                            prop_assert!(take.len_bytes() <= 1 << 20);
                        } else {
                            prop_assert!(take.len_bytes() < BLOCK);
                        }
                        at = take.range.end;
                    }
                    None => {
                        prop_assert!(until < end);
                        until = (until + steps.next().unwrap()).min(end);
                    }
                }
            }
        }

        #[test]
        fn what_was_missed_is_what_was_not_seen(
            ranges in proptest::collection::vec((0..64u64, 1..16u64), 0..12),
        ) {
            let mut take = Take::places(4096..4096 * 65);
            let mut is_seen = [false; 64];
            for (from, len) in ranges {
                let to = (from + len).min(64);
                take.see(4096 * (1 + from)..4096 * (1 + to));
                is_seen[from as usize..to as usize].fill(true);
            }
            let missed = take.missed();
            for (block, is_seen) in is_seen.iter().enumerate() {
                let at = 4096 * (1 + block as u64);
                let times = missed.iter().filter(|m| m.range.start <= at && at < m.range.end);
                prop_assert_eq!(times.count(), usize::from(!is_seen));
            }
            prop_assert!(missed.iter().all(|m| m.len_bytes() <= MAX_TAKE_BYTES as u64));
        }
    }
}
