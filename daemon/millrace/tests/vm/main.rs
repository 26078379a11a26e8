//! The main job on real VMs: guests boot with Debian's kernels under QEMU and use the network,
//! disk and vsock devices of a real daemon. `MILLRACE_SOAK=1` runs the full amounts of data.

#![allow(clippy::unwrap_used)]

mod channel_ceiling;
mod channel_device;
mod channel_hostile;
mod channel_migration;
mod channel_pipes;
mod channel_proxy;
mod channel_rules;
mod channel_world;
mod channels;
mod checked;
mod churn;
mod common;
mod disk;
mod fallback;
mod firmware;
mod foreign;
mod ftp;
mod guard;
mod guests;
mod hostile;
mod huge_pages;
mod idle_move;
mod libvirt;
mod module_copies;
mod module_prepared;
mod modules;
mod moves;
mod net;
mod open_files;
mod pairs;
mod pipe;
mod pipe_ceiling;
mod pipe_world;
mod programs;
mod quiet;
mod relay;
mod restart;
mod servers;
#[path = "../common/strace.rs"]
mod strace;
mod testpmd;
mod twins;
mod vsock;
mod web;
