//! Answer of a front end, and the program that gives it.

use std::process::Command;

use serde::{Deserialize, Serialize};

/// Answer of a front end. Fields that it leaves out are not measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reading {
    /// Frames received, round trips or requests done in the measured time.
    pub ops: f64,
    /// The same per second.
    pub ops_per_s: f64,
    /// Bytes of them per second.
    pub bytes_per_s: f64,
    /// Measured time.
    pub seconds: f64,
    /// Median latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_ns: Option<f64>,
    /// 99th percentile of the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<f64>,
    /// Operations per second in the window of 10 ms that 10 % of the windows stay below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_p10_per_s: Option<f64>,
    /// The median window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_p50_per_s: Option<f64>,
    /// The window that 90 % stay below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_p90_per_s: Option<f64>,
    /// Notifications to the back end.
    pub kicks: f64,
    /// Notifications from it.
    pub interrupts: f64,
    /// Frames sent and not received.
    pub lost: f64,
    /// Requests or frames that came back wrong.
    pub errors: f64,
    /// How long the front end was ready to run and did not.
    pub cpu_delay_ns: f64,
    /// CPU time of an operation, from a load that is its own back end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_us_per_op: Option<f64>,
}

/// A load, ready to start.
pub struct Program {
    /// Prints its result.
    pub command: Command,
    /// Takes the result from what it printed.
    pub parse: fn(&str) -> Option<Reading>,
    /// Ends when all is done, not when the time is over.
    pub ends_by_itself: bool,
}

/// The JSON object in a front end's output; programs may warn before it.
pub fn parse(text: &str) -> Option<Reading> {
    serde_json::from_str(text.get(text.find('{')?..)?.trim()).ok()
}
