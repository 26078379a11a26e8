//! The switch as a whole, driven by hand: model drivers on every queue, a clock that moves when
//! told to, one poll at a time.

mod abuse;
mod alloc;
mod announce;
mod backlog;
mod backpressure;
mod basic;
mod checksum;
mod control;
mod credits;
mod device;
mod dirty;
mod forward_cache;
mod offloads;
mod payload;
mod pieces;
mod uplink;
mod window;
