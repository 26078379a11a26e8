//! Compares Millrace with its peers, on one machine, in one run.
//!
//! # Theory of operation
//! A suite ([`suites`]) is a comparison in one respect; all of them stand on [`harness`] and run as
//! [`harness::suite`] tells. Files of a run, and the page among them, are written by
//! [`harness::output`].
//!
//! A [`harness::runner::Case`] puts one load on one side at a time: ours, or the peer's.
//! [`harness::runner::compare`] runs cases in short interleaved rounds (ours, peer, ours, peer, …),
//! throws each case's first round away and publishes the median of the rounds' own ratios
//! ([`harness::stats`]), because the machine's speed drifts more between minutes than between two
//! neighbouring seconds. Beside each value it accounts host CPU per operation ([`harness::cpu`]),
//! which is steadier than throughput. Results are written in the published format
//! ([`harness::results`]), as a table ([`harness::table`]), as plots ([`harness::svg`]) and as one
//! HTML page ([`harness::report`]).
//!
//! - [`suites::demo`] compares two VMs a side, on Millrace and on QEMU's own devices.
//! - [`suites::peers`] compares back ends without VMs: many of them in each round, under one front
//!   end.
//! - [`suites::events`] counts what one request costs in exits, interrupts, wake-ups and system
//!   calls, and [`suites::consolidate`] loads eight VMs a side at once; both boot a
//!   [`harness::fleet`] of guests a side and read single threads of the host ([`harness::host`]).
//!   What a guest's own kernel counts is read by [`harness::guest_events`].
//! - [`suites::shares`] asks whether many VMs on one sidecore get what is due to them, and
//!   [`suites::idle`] what ports cost that do nothing; both, as [`suites::peers`], start a
//!   [`harness::daemon`] without VMs.
//! - [`suites::pipes`] boots a VM that shares its CPU with busy ones, and moves its files to a
//!   client.
//! - [`suites::channels`] boots two guests and compares all ways between them; beside each load
//!   between them it notes how far the host's CPUs are from each other ([`harness::distance`]).
//! - [`suites::modules`] boots a guest with a database whose rows go to the host, or to disks of
//!   all kinds.
//!
//! # Limits
//! - Rounds: 1 to 99. More takes hours and moves no median.
//! - Load: 0.2 s to 60 s. Below, the guest's program start dominates; above, the machine drifts
//!   within a round.
//! - CPU time has the kernel's grain of 10 ms a process: 0.5 % of a 2 s window.
//! - System calls are counted through the kernel's tracepoint: root, and tracefs mounted.
//! - A round with more than 15 % foreign load is named in the report, not repeated: a busy machine
//!   would never finish.

pub mod cli;
pub mod harness;
pub mod suites;
