//! WebAssembly modules that serve requests of guests: a piece of middleware in the host (VAMOS, section 2.2).
//!
//! # Theory of operation
//! Each VM that has modules has one process for them, which the daemon starts ([`host`]). It opens the code
//! and the folders of its modules, then confines itself ([`sandbox`]), and only then runs a module's first
//! instruction ([`process`]). Programs of the guest connect over vsock; the daemon hands each connection to
//! the process, as a descriptor, and no byte of it passes the daemon's own threads but those of the vsock
//! device. What is said is specified in `guest_abi::module`; what modules are given in
//! `guest_abi::module_call`.
//!
//! *One thread per module.* It reads what has come on all connections and hands it over in one call, as a
//! batch ([`service`]). A module answers now or later. Replies that promise that something is durable are
//! held until one sync has made it so: transactions that commit at the same time share it.
//!
//! *Nothing is done twice.* Clients number their requests. When a connection breaks, what has no reply is sent
//! again, and is answered from what was kept, or not at all if it is under way ([`clients`]). When the
//! process dies, what the module wrote tells it which requests it has done.
//!
//! *A module is replaced, not repaired.* A call has a deadline in CPU time of its thread, told by a timer of
//! the kernel that costs nothing while there is no work ([`deadline`]). A call that exceeds it, traps, or
//! says that its memory is not to be trusted ends the instance: requests without a reply fail, the files
//! stay, the next instance reads them. The same process runs it; nothing is compiled there.
//!
//! *Files* are all that a module keeps, in a folder for it and its VM alone, by plain names ([`folder`]).
//!
//! *Code* is compiled by the daemon, before there is a process, and kept by the hash of its WebAssembly
//! ([`engine`]). The config names that hash.
//!
//! *Another version* of a module is another process: it loads and confines itself, and waits for the folders,
//! which the old one locks until it ends. Clients connect again.
//!
//! # Limits
//! All numbers, each with its reason, are in [`limits`] and in `guest_abi::module`. Beyond those:
//! - Calls of one module do not run at the same time, and none runs while its files are made durable: what
//!   comes meanwhile is the next batch.
//! - After a sync that failed nothing of that module is called durable any more until its process is started
//!   anew: the kernel tells of lost pages once.
//! - Bytes of a file that was removed while it was open are not counted until it is closed.
//! - The compiler runs in the daemon, on files that the config names by hash: they are trusted not to attack
//!   it. What comes out is not trusted.

mod clients;
mod conn;
mod control;
mod deadline;
pub mod engine;
mod error;
pub mod folder;
#[doc(hidden)]
pub mod fuzzing;
mod greet;
pub mod host;
mod imports;
pub mod instance;
pub mod limits;
pub mod process;
pub mod sandbox;
mod service;
mod stats;

pub use control::ModuleSetup;
pub use error::ModulesError;
pub use host::{ModuleConfig, VmModules, VmModulesConfig};
pub use stats::ModuleStats;
