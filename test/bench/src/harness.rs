//! Ground of all suites: rounds, measuring, statistics, rows, files, and the processes under test.
//!
//! Nothing here knows a suite.

pub mod cleanup;
pub mod cpu;
pub mod daemon;
pub mod distance;
pub mod error;
pub mod fleet;
pub mod folder;
pub mod guest_events;
mod guests;
pub mod host;
pub mod machine;
pub(crate) mod options;
pub mod output;
pub mod ovs;
pub mod paired;
pub mod process;
pub mod progress;
pub mod repeat;
pub mod report;
pub mod results;
pub mod runner;
#[cfg(test)]
pub(crate) mod samples;
pub mod spinner;
pub mod stats;
pub mod steal_time;
pub mod suite;
pub mod summary;
pub mod svg;
pub mod table;
pub mod usage;
