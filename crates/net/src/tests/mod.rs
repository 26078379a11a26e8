//! The switch as a whole, driven by hand: model drivers on every queue, a clock that moves when
//! told to, one poll at a time.

mod abuse;
pub mod alloc;
mod announce;
mod backlog;
mod basic;
mod checksum;
mod control;
mod credits;
mod device;
mod dirty;
pub mod flows;
mod flows_abuse;
mod flows_receive;
mod hold;
pub mod lab;
mod lately;
mod offloads;
mod pieces;
mod stages;
mod uplink;
