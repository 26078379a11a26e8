//! Compares Millrace with its peers, on one machine, in one run.
//!
//! # Theory of operation
//! A [`runner::Case`] puts one load on one side at a time: ours, or the peer's. [`runner::compare`]
//! runs cases in short interleaved rounds (ours, peer, ours, peer, …), throws each case's first
//! round away and publishes the median of the rounds' own ratios ([`stats`]), because the machine's
//! speed drifts more between minutes than between two neighbouring seconds. Beside each value it
//! accounts host CPU per operation ([`cpu`]), which is steadier than throughput. Results are
//! written in the published format ([`results`]), as a table ([`table`]), as plots ([`svg`]) and as
//! one HTML page ([`report`]).
//!
//! [`peers`] compares back ends without VMs: many of them in each round, under one front end.
//! [`events`] counts what one request costs in exits, interrupts, wake-ups and system calls, and
//! [`consolidate`] loads eight VMs a side at once; both boot a [`fleet`] of guests a side and read
//! single threads of the host ([`host`]).
//! [`shares`] asks whether many VMs on one sidecore get what is due to them, and [`idle`] what ports
//! cost that do nothing; both, as [`peers`], start a [`daemon`] without VMs.
//! [`pipes`] boots a VM that shares its CPU with busy ones, and moves its files to a client.
//! [`channels`] boots two guests and compares all ways between them; beside each load between them it
//! notes how far the host's CPUs are from each other ([`apart`]).
//! [`modules`] boots a guest with a database whose rows go to the host, or to disks of all kinds.
//!
//! # Limits
//! - Rounds: 1 to 99. More takes hours and moves no median.
//! - Load: 0.2 s to 60 s. Below, the guest's program start dominates; above, the machine drifts
//!   within a round.
//! - CPU time has the kernel's grain of 10 ms a process: 0.5 % of a 2 s window.
//! - System calls are counted through the kernel's tracepoint: root, and tracefs mounted.
//! - A round with more than 15 % foreign load is named in the report, not repeated: a busy machine
//!   would never finish.

pub mod apart;
pub mod cases;
pub mod channels;
pub mod cli;
pub mod consolidate;
pub mod cpu;
pub mod daemon;
pub mod demo;
pub mod error;
pub mod events;
pub mod fleet;
pub mod host;
pub mod idle;
pub mod machine;
pub mod modules;
pub mod output;
mod paired;
pub mod peers;
pub mod pipes;
pub mod progress;
pub mod repeat;
pub mod report;
pub mod results;
pub mod runner;
pub mod shares;
pub mod spinner;
pub mod stats;
pub mod steal;
pub mod summary;
pub mod svg;
pub mod table;

#[cfg(test)]
mod samples;
