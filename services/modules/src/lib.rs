//! WebAssembly modules that serve requests of guests: a piece of middleware in the host (VAMOS,
//! section 2.2).
//!
//! # Theory of operation
//! Each VM that has modules has one process for them, which the daemon starts ([`host`]). It opens
//! the code and the folders of its modules, then confines itself ([`sandbox`]), and only then runs
//! a module's first instruction ([`process`]). Programs of the guest connect over vsock; the daemon
//! hands each connection to the process, as a descriptor, and no byte of it passes the daemon's own
//! threads but those of the vsock device. What is said is specified in `guest_abi::module`; what
//! modules are given in `guest_abi::module_call`.
//!
//! *One thread per module.* It reads what has come on all connections and hands it over in one
//! call, as a batch ([`service`]). A module answers now or later. Replies that promise that
//! something is durable are held until one sync has made it so: transactions that commit at the
//! same time share it.
//!
//! *Sockets may be left behind.* A VM can share memory with its modules, a region of one file
//! ([`ring`]). A client that has it before it gets a slot there, and its frames go both ways by
//! that; the socket wakes who sleeps, and its end is the connection's. A module's thread looks at
//! slots that are in use for a while before it sleeps, as long as that catches something and nobody
//! else wants the CPU. Nothing in it is believed: words are checked, bytes are copied, and each
//! frame has the stamp of its connection in its check.
//!
//! *Nothing is done twice.* Clients number their requests. When a connection breaks, what has no
//! reply is sent again, and is answered from what was kept, or not at all if it is under way
//! ([`clients`]). When the process dies, what the module wrote tells it which requests it has done.
//! When the guest itself has gone, which its vsock device tells, its clients go at once, with all
//! locks.
//!
//! *Memory has a budget.* What clients make the process hold (parts of requests, replies that are
//! not taken, replies that are kept) is counted: each module has a share, and all have one pot
//! ([`budget`]). Who holds much, and that for the longest time, makes room: kept replies go but for
//! small ones, connections end, and are told why. Small replies, which say what became of a
//! transaction, always pass.
//!
//! *A module is replaced, not repaired.* A call has a deadline in CPU time of its thread, told by a
//! timer of the kernel that costs nothing while there is no work ([`deadline`]). A call that
//! exceeds it, traps, or says that its memory is not to be trusted ends the instance: requests
//! without a reply fail, the files stay, the next instance reads them. The same process runs it;
//! nothing is compiled there. One that does not start is tried again, ever more rarely; its
//! requests are told why meanwhile.
//!
//! *Files* are all that a module keeps, in a folder for it and its VM alone, by plain names
//! ([`folder`]). After a sync that failed, what is read is no proof of what is on the disk. All
//! that waits for it is told that the storage failed, the instance ends, and all its files are
//! written anew and synced before the next one reads them; a mark in the folder sees to it that the
//! next process does so, should this one not come to it.
//!
//! *Code* is compiled by the daemon, before there is a process, and kept by the hash of its
//! WebAssembly ([`engine`]). The config names that hash.
//!
//! *Another version* of a module is another process. It loads its code; then the old one is told to
//! end, and the new one waits for the folders, which the kernel locks for the old one until that
//! has ended, and takes them over. If a module of it does not start, the old version is started
//! again, and whoever asked is told. Clients connect again.
//!
//! *A process that hangs* is killed, if it is ours, and never waited for. Its folders stay locked
//! for as long as it is there: the new process says whom it waits for, and gives up after a minute,
//! to be started again.
//!
//! *Credits.* Requests and replies are charged to the VM by its vsock device. What goes by rings,
//! and what its modules read, write and sync, is told to the daemon, about once per mebibyte, which
//! charges it to the same account: a VM that keeps its disk busy by way of its modules gets less of
//! the sidecores until it has paid. Nothing in a process waits for credit: who is held back is the
//! guest that asks.
//!
//! *Copies* are taken while a module serves ([`copy`]): the daemon reads the files, and the process
//! tells it which parts were written meanwhile, as a hypervisor does of a VM's memory. For the rest
//! the module is held still between two calls.
//!
//! *The log* of a process is a pipe to the daemon, which bounds it and adds the names of VM and
//! module.
//!
//! # Limits
//! All numbers, each with its reason, are in [`limits`] and in `guest_abi::module`. Beyond those:
//! - Calls of one module do not run at the same time, and none runs while its files are made
//!   durable: what comes meanwhile is the next batch.
//! - Writing files anew takes as much room on the disk as the longest of them, beyond the module's
//!   limit.
//! - Where the disk that failed a sync cannot even take the mark, and the process is killed before
//!   it has written the files anew, the next one does not know.
//! - The compiler runs in the daemon, on files that the config names by hash: they are trusted not
//!   to attack it. What comes out is not trusted.

mod budget;
mod clients;
mod conn;
mod control;
pub mod copy;
mod deadline;
pub mod engine;
mod error;
pub mod folder;
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
pub mod host;
mod imports;
pub mod instance;
mod instance_state;
pub mod limits;
mod lock;
pub mod process;
pub mod ring;
pub mod sandbox;
mod service;
mod share;
mod spin;
mod stats;

pub use control::{CopyStep, DiskUse, ModuleSetup, RingSetup};
pub use error::ModulesError;
pub use host::{Charge, ModuleConfig, RingConfig, VmModules, VmModulesConfig};
pub use stats::ModuleStats;
