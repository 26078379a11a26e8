//! Percentiles of latencies.

/// Mean, 50th and 99th percentile of a list of nanoseconds, in microseconds.
pub(super) fn percentiles(mut nanos: Vec<u32>) -> (f64, f64, f64) {
    if nanos.is_empty() {
        return (0.0, 0.0, 0.0);
    }
    nanos.sort_unstable();
    let at = |part: f64| f64::from(nanos[(((nanos.len() - 1) as f64) * part) as usize]) / 1e3;
    let mean = nanos.iter().map(|&nanos| f64::from(nanos)).sum::<f64>() / nanos.len() as f64 / 1e3;
    (mean, at(0.5), at(0.99))
}
