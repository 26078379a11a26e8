//! Times of requests, as they are listed.

use std::collections::BTreeMap;

use base::histogram::Snapshot;
use serde::Serialize;

/// Times of requests; of a disk: from the poll that took a request to the poll after its
/// completion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LatencyStatus {
    /// Number of requests.
    pub count: u64,
    /// Sum of the times.
    pub sum_ns: u64,
    /// Median, to within 1/32.
    pub p50_ns: u64,
    /// 99th percentile, to within 1/32.
    pub p99_ns: u64,
    /// Smallest time of each bucket, and requests in it; see [`Snapshot::coarse`]. The difference
    /// of two answers is the histogram of the time between them.
    pub buckets: BTreeMap<u64, u64>,
}

impl From<&Snapshot> for LatencyStatus {
    fn from(times: &Snapshot) -> Self {
        Self {
            count: times.count(),
            sum_ns: times.sum(),
            p50_ns: times.quantile(0.5),
            p99_ns: times.quantile(0.99),
            buckets: times.coarse().collect(),
        }
    }
}
