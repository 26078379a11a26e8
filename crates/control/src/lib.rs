//! Config, control API, metrics and systemd: how people and programs steer the daemon.
//!
//! # Theory of operation
//! This room knows no engine. [`config`] turns TOML files (and, for ports attached at run time,
//! JSON bodies) into a checked [`config::Config`]; both go through one reader, so a port is written
//! and checked the same way in a file and in a request, and every problem is found in one run.
//! [`api`] serves HTTP and JSON on a Unix socket and asks a [`plane::Plane`], which the binary
//! implements over the engines. [`metrics`] prints counters that sidecores write and everybody may
//! read. [`client`] is the other end of the API for the command line. [`attached`] and
//! [`granted`] remember across a restart what was changed at run time, [`holders`] who kept sessions. [`systemd`] tells the service manager how we are.
//!
//! The API runs on one thread of its own; work that waits for a device runs on tokio's blocking
//! threads. Nothing here is on a data path.
//!
//! # Limits
//! - Config file 1 MiB, 1,024 drop-ins: 1,024 ports ([`base::limits::MAX_PORTS`]) with every
//!   setting written out take half of it.
//! - 100 problems are told at once ([`config::MAX_PROBLEMS`]); the rest is counted.
//! - Request body 64 KiB ([`api::MAX_BODY_LEN_BYTES`]): a port takes 1 KiB.
//! - 64 connections ([`api::MAX_CONNECTIONS`]): more wait. Headers may take 10 s, a body 5 s, an
//!   answer 60 s.
//! - The control socket is for its owner (mode 0600): whoever can open it may do everything. The socket for
//!   reading (`read_socket`) is for a group, takes 16 connections ([`api::MAX_READERS`]), and answers listings and
//!   metrics of all VMs; its group is looked up in `/etc/group` only.
//! - Leaving a channel may take 20 s at most ([`config::ChannelsConfig`]): answers are given within 60 s,
//!   and the packaged unit has 30 s to stop.
//! - A detached port of the config file is back after a restart: the file is the user's.

pub mod api;
pub mod attached;
pub mod client;
pub mod config;
mod error;
pub mod granted;
pub mod holders;
pub mod metrics;
pub mod plane;
pub mod run_list;
pub mod sample;
pub mod systemd;

pub use error::ControlError;
