//! Control API, metrics and systemd: how people and programs steer the daemon.
//!
//! # Theory of operation
//! This crate knows no engine. [`api`] serves HTTP and JSON on a Unix socket and asks a
//! [`plane::Plane`], which the binary implements over the engines. [`metrics`] prints counters that
//! sidecores write and everybody may read. [`client`] is the other end of the API, for the command
//! line and for tests. [`attached`], [`granted`] and [`holders`] remember across a restart which
//! ports were attached at run time, what VMs were granted, and which holders kept sessions.
//! [`systemd`] reports the daemon's state to the service manager.
//!
//! The API runs on one thread of its own; work that waits for a device runs on tokio's blocking
//! threads. Nothing here is on a data path.
//!
//! # Limits
//! - Request body 64 KiB ([`api::MAX_BODY_LEN_BYTES`]): a port takes 1 KiB.
//! - 64 connections ([`api::MAX_CONNECTIONS`]): more wait. Headers may take 10 s, a body 5 s, an
//!   answer 60 s.
//! - The control socket is for its owner (mode 0600): whoever can open it may do everything. The
//!   socket for reading (`read_socket`) is for a group, takes 16 connections
//!   ([`api::MAX_READERS`]), and answers listings and metrics of all VMs; its group is looked up in
//!   `/etc/group` only.
//! - A detached port of the config file is back after a restart: the file is the user's.

pub mod api;
pub mod attached;
pub mod client;
mod error;
pub mod granted;
pub mod holders;
pub mod metrics;
pub mod plane;
pub mod run_list;
pub mod sample;
pub mod systemd;

pub use error::ControlError;
