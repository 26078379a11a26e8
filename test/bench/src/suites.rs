//! Suites: each compares Millrace with its peers in one respect.
//!
//! A suite knows [`crate::harness`] and no other suite.

pub mod channels;
pub mod consolidate;
pub mod demo;
pub mod events;
pub mod idle;
pub mod modules;
pub mod peers;
pub mod pipes;
pub mod shares;
