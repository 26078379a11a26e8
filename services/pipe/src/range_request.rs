//! Ranges of a pipe that the guest is asked to write, or to read: cut so that placeholders stand
//! for whole blocks of the file. A range notes for which of its bytes the guest's disk has met
//! placeholders.

use std::ops::Range;

use guest_abi::pipe::{BLOCK_BYTES, MAX_TAKE_BYTES, take};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A range that the guest is asked to write, or to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RangeRequest {
    /// Offsets in the pipe.
    pub range: Range<u64>,
    /// Form of the bytes: a code of [`take`].
    pub how: u8,
    /// Ranges whose placeholders stood for bytes that are in their place now: with gaps between
    /// them, in order.
    replaced: Vec<Range<u64>>,
}

impl RangeRequest {
    /// A request over placeholders.
    pub fn by_placeholders(range: Range<u64>) -> Self {
        Self { range, how: take::PLACES, replaced: Vec::new() }
    }

    /// A request whose bytes go in messages.
    pub fn by_bytes(range: Range<u64>) -> Self {
        Self { range, how: take::BYTES, replaced: Vec::new() }
    }

    /// Length of the range.
    pub fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Notes that placeholders of these bytes were replaced.
    pub fn add_replaced(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        self.replaced.retain(|old| {
            let is_apart = old.end < start || end < old.start;
            if !is_apart {
                (start, end) = (start.min(old.start), end.max(old.end));
            }
            is_apart
        });
        let at = self.replaced.partition_point(|old| old.start < start);
        self.replaced.insert(at, start..end);
    }

    /// Ends the range there, which is behind its beginning.
    pub fn truncate(&mut self, end: u64) {
        self.range.end = self.range.end.min(end);
        self.replaced.retain(|replaced| replaced.start < end);
        self.replaced.iter_mut().for_each(|replaced| replaced.end = replaced.end.min(end));
    }

    /// Requests, by bytes, for what the guest's disk has met no placeholders of.
    pub fn unreplaced(&self) -> Vec<Self> {
        let mut requests = Vec::new();
        let mut at = self.range.start;
        if self.how == take::BYTES {
            return requests;
        }
        for replaced in self.replaced.iter().chain([&(self.range.end..self.range.end)]) {
            while at < replaced.start {
                let end = replaced.start.min(at + MAX_TAKE_BYTES as u64);
                requests.push(Self::by_bytes(at..end));
                at = end;
            }
            at = at.max(replaced.end);
        }
        requests
    }
}

/// The next request, for bytes from `at` on of which those before `until` can be had. None: more
/// are worth waiting for. `skew_bytes` is the offset of the pipe's first byte in its block.
/// `is_end`: no more will come.
pub(crate) fn next_request(
    at: u64,
    until: u64,
    is_end: bool,
    skew_bytes: u64,
    max_bytes: usize,
) -> Option<RangeRequest> {
    if at >= until {
        return None;
    }
    let in_block = (skew_bytes + at) % BLOCK;
    if in_block != 0 {
        let end = (at + BLOCK - in_block).min(until);
        let is_whole = end == at + BLOCK - in_block;
        return (is_whole || is_end).then(|| RangeRequest::by_bytes(at..end));
    }
    let blocks = (until - at).min(max_bytes as u64) / BLOCK * BLOCK;
    if blocks > 0 {
        return Some(RangeRequest::by_placeholders(at..at + blocks));
    }
    is_end.then(|| RangeRequest::by_bytes(at..until))
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
                match next_request(at, until, until == end, skew, 1 << 20) {
                    Some(request) => {
                        prop_assert_eq!(request.range.start, at);
                        prop_assert!(request.range.end <= until && request.len_bytes() > 0);
                        if request.how == take::PLACES {
                            prop_assert_eq!((skew + at) % BLOCK, 0);
                            prop_assert_eq!(request.len_bytes() % BLOCK, 0);
                            prop_assert!(request.len_bytes() <= 1 << 20);
                        } else {
                            prop_assert!(request.len_bytes() < BLOCK);
                        }
                        at = request.range.end;
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
            let mut request = RangeRequest::by_placeholders(4096..4096 * 65);
            let mut is_seen = [false; 64];
            for (from, len) in ranges {
                let to = (from + len).min(64);
                request.add_replaced(4096 * (1 + from)..4096 * (1 + to));
                is_seen[from as usize..to as usize].fill(true);
            }
            let missed = request.unreplaced();
            for (block, is_seen) in is_seen.iter().enumerate() {
                let at = 4096 * (1 + block as u64);
                let times = missed.iter().filter(|m| m.range.start <= at && at < m.range.end);
                prop_assert_eq!(times.count(), usize::from(!is_seen));
            }
            prop_assert!(missed.iter().all(|m| m.len_bytes() <= MAX_TAKE_BYTES as u64));
        }
    }
}
