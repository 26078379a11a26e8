//! Processes of modules, as the daemon starts them: real processes, real confinement, modules
//! written for the test.
#![allow(clippy::unwrap_used, non_snake_case)]

mod calls;
mod client;
mod copy;
mod crowd;
mod faults;
mod rings;
mod serving;
mod storage;
mod swap;
mod world;
