//! Latency of requests, from the poll that took them to the poll after their completion.

use base::histogram::Histogram;

/// Completed requests of one queue whose time is not known yet, by the poll that took them. The
/// recorder is given the time of each poll and reads no clock.
///
/// What a poll completes is visible when it ends, and the next poll is the first to know when that
/// was. So a time has the rest of the round in it: on a sidecore with many workers that much too
/// much, and never too little. The last completions of a queue that stops are not counted.
#[derive(Debug)]
pub(crate) struct LatencyRecorder(Vec<PollGroup>);

/// Requests taken by the same poll.
#[derive(Debug, Clone, Copy)]
struct PollGroup {
    at_ns: u64,
    count: u64,
}

impl LatencyRecorder {
    /// A recorder for a queue with up to `depth` requests in flight.
    pub fn new(depth: u16) -> Self {
        // A slot that a failed request leaves may be taken and left again by the same poll.
        Self(Vec::with_capacity(usize::from(depth) * 2))
    }

    /// Adds a completed request that was taken at `at_ns`.
    #[inline]
    pub fn add(&mut self, at_ns: u64) {
        if let Some(last) = self.0.last_mut()
            && last.at_ns == at_ns
        {
            last.count += 1;
        } else if self.0.len() < self.0.capacity() {
            // Never so full; if it were, it would lose a time and not grow.
            self.0.push(PollGroup { at_ns, count: 1 });
        }
    }

    /// Records all that were added since the last call: they became visible by `now_ns`.
    #[inline]
    pub fn record(&mut self, now_ns: u64, into: &Histogram) {
        for taken in self.0.drain(..) {
            into.record_many(now_ns.saturating_sub(taken.at_ns), taken.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_counts_once_with_its_own_time() {
        let (mut finished, times) = (LatencyRecorder::new(2), Histogram::default());
        [10, 10, 12].into_iter().for_each(|at_ns| finished.add(at_ns));
        finished.record(20, &times);
        finished.record(30, &times);
        let all = times.snapshot();
        assert_eq!((all.count(), all.sum(), all.quantile(0.5), all.max()), (3, 28, 10, 10));
    }

    #[test]
    fn it_never_grows() {
        let mut finished = LatencyRecorder::new(4);
        let room = finished.0.capacity();
        (0..1000).for_each(|at_ns| finished.add(at_ns));
        assert_eq!(finished.0.capacity(), room);
    }
}
