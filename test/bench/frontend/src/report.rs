//! Counts of a run, and its report.

use std::time::Instant;

use base::histogram::Histogram;
use serde::Serialize;

use crate::error::FrontendError;

/// Length of the windows whose rates are reported beside the mean: short enough that most are not
/// disturbed by the scheduler of a shared machine.
const WINDOW_NS: u64 = 10_000_000;

/// The result of a run; rates are per second, times in nanoseconds.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Frames received, round trips or requests done.
    pub ops: u64,
    /// Per second.
    pub ops_per_s: f64,
    /// Payload (frames: with their Ethernet header) per second.
    pub bytes_per_s: f64,
    /// Length of the measurement.
    pub seconds: f64,
    /// Latency; 0 where none is measured.
    pub p50_ns: u64,
    /// Ninetieth percentile, nanoseconds.
    pub p90_ns: u64,
    /// Ninety-ninth percentile, nanoseconds.
    pub p99_ns: u64,
    /// Longest, nanoseconds.
    pub max_ns: u64,
    /// Tenth percentile of the rates of 10 ms windows.
    pub window_p10_per_s: f64,
    /// Median of the windows' rates.
    pub window_p50_per_s: f64,
    /// Ninetieth percentile of the windows' rates.
    pub window_p90_per_s: f64,
    /// Doorbells rung for the device.
    pub kicks: u64,
    /// Interrupts that the device sent.
    pub interrupts: u64,
    /// Frames that were taken from the sender and never came.
    pub lost: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Whether every byte was compared.
    pub verified: bool,
    /// Time that this thread waited for its CPU.
    pub cpu_delay_ns: u64,
}

/// Counts while a run goes on.
#[derive(Debug)]
pub struct Meter {
    start: Instant,
    end_ns: u64,
    window_end_ns: u64,
    window_ops: u64,
    rates: Vec<f64>,
    delay_before_ns: u64,
    /// Latencies.
    pub latency: Histogram,
    /// Operations so far.
    pub ops: u64,
}

impl Meter {
    /// Starts the clock for a run of `run_ns`.
    pub fn start(run_ns: u64) -> Result<Self, FrontendError> {
        Ok(Self {
            delay_before_ns: run_delay_ns()?,
            start: Instant::now(),
            end_ns: run_ns,
            window_end_ns: WINDOW_NS,
            window_ops: 0,
            rates: Vec::with_capacity((run_ns / WINDOW_NS) as usize + 1),
            latency: Histogram::default(),
            ops: 0,
        })
    }

    /// Nanoseconds since the start.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Closes windows; false when the run is over.
    #[inline]
    pub fn goes_on(&mut self, now_ns: u64) -> bool {
        if now_ns >= self.window_end_ns {
            self.close_window(now_ns);
        }
        now_ns < self.end_ns
    }

    fn close_window(&mut self, now_ns: u64) {
        let length_ns = now_ns - (self.window_end_ns - WINDOW_NS);
        if self.rates.len() < self.rates.capacity() {
            let ops = self.ops - self.window_ops;
            self.rates.push(ops as f64 * 1e9 / length_ns as f64);
        }
        self.window_ops = self.ops;
        self.window_end_ns = now_ns + WINDOW_NS;
    }

    /// The result so far; `op_bytes` is what an operation moves.
    pub fn report(mut self, op_bytes: u64) -> Result<Report, FrontendError> {
        let seconds = self.now_ns() as f64 / 1e9;
        let latency = self.latency.snapshot();
        self.rates.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let index = (self.rates.len().saturating_sub(1) as f64 * share).round() as usize;
            self.rates.get(index).copied().unwrap_or_default()
        };
        Ok(Report {
            ops: self.ops,
            ops_per_s: self.ops as f64 / seconds,
            bytes_per_s: (self.ops * op_bytes) as f64 / seconds,
            seconds,
            p50_ns: latency.quantile(0.5),
            p90_ns: latency.quantile(0.9),
            p99_ns: latency.quantile(0.99),
            max_ns: latency.max(),
            window_p10_per_s: at(0.1),
            window_p50_per_s: at(0.5),
            window_p90_per_s: at(0.9),
            cpu_delay_ns: run_delay_ns()?.saturating_sub(self.delay_before_ns),
            ..Report::default()
        })
    }
}

/// How long this thread has waited in the run queue (proc(5), `schedstat`).
pub(crate) fn run_delay_ns() -> Result<u64, FrontendError> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")
        .map_err(FrontendError::io("reading the thread's schedstat"))?;
    Ok(text.split_whitespace().nth(1).and_then(|w| w.parse().ok()).unwrap_or_default())
}
