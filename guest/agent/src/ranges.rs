//! Sets of ranges of a pipe's bytes.

/// Set of ranges in order, with gaps between them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Adds the bytes from `from` up to `until`, which is not below it.
    pub fn add(&mut self, mut from: u64, mut until: u64) {
        if from == until {
            return;
        }
        // Ranges before the first that touches the new one stay, and those behind the last.
        let first = self.0.partition_point(|range| range.1 < from);
        let behind = self.0.partition_point(|range| range.0 <= until);
        if first < behind {
            (from, until) = (from.min(self.0[first].0), until.max(self.0[behind - 1].1));
        }
        self.0.splice(first..behind, [(from, until)]);
    }

    /// Number of bytes from the pipe's beginning on without a gap.
    pub fn first_bytes(&self) -> u64 {
        self.0.first().filter(|range| range.0 == 0).map_or(0, |range| range.1)
    }

    /// End of the last range.
    pub fn end(&self) -> u64 {
        self.0.last().map_or(0, |range| range.1)
    }

    /// Number of ranges.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Parts of the ranges that lie from `from` up to `until`: pairs of beginning and end.
    pub fn between(&self, from: u64, until: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let cut = move |range: &(u64, u64)| (range.0.max(from), range.1.min(until));
        self.0.iter().map(cut).filter(|range| range.0 < range.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_those_of_a_set_of_bytes() {
        // Steps that are no multiples of one another, overlapping again and again.
        for step in 1..40 {
            let (mut ranges, mut bytes) = (Ranges::default(), [false; 64]);
            for turn in 0..20_u64 {
                let from = turn * step % 61;
                let until = (from + turn % 4).min(64);
                ranges.add(from, until);
                bytes[from as usize..until as usize].fill(true);
                let mut got = [false; 64];
                for (from, until) in ranges.between(0, u64::MAX) {
                    got[from as usize..until as usize].fill(true);
                }
                assert_eq!(got, bytes);
                assert!(ranges.0.windows(2).all(|pair| pair[0].1 < pair[1].0), "{ranges:?}");
                let first = bytes.iter().take_while(|byte| **byte).count();
                assert_eq!(ranges.first_bytes(), first as u64);
                let end = bytes.iter().rposition(|byte| *byte).map_or(0, |at| at + 1);
                assert_eq!(ranges.end(), end as u64);
            }
        }
    }

    #[test]
    fn a_part_of_them() {
        let mut ranges = Ranges::default();
        ranges.add(10, 20);
        ranges.add(30, 40);
        assert_eq!(ranges.between(15, 35).collect::<Vec<_>>(), [(15, 20), (30, 35)]);
        assert_eq!((ranges.between(20, 30).count(), ranges.count()), (0, 2));
    }
}
