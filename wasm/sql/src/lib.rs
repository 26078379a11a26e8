//! A SQL database that speaks MySQL's protocol: SQLite, in files of this VM's folder.
//!
//! # Theory of operation
//! Each client is a stream: a connection of a program that the guest's relay passes on.
//! [`connections`] cuts it into packets ([`packet`]) and serves them in turn. A statement is cut
//! into words ([`lex`]) and understood ([`plan`]); SQLite gets it in its own dialect, with strings
//! as parameters ([`rewrite`], [`create`], [`bulk`]). What SQLite does with files goes to the host
//! ([`vfs`]); each database is a file and its log.
//!
//! *Durable.* The log has a checksum for each page and is only appended to. A commit writes to it
//! and does not sync; the reply is marked durable, and the host syncs once for all commits of a
//! call ([`connections`]). SQLite itself syncs only what must be in order: the log before pages go
//! from it to the database, the database before the log begins anew.
//!
//! *Deadlines.* No call may compute for long. Rows are told and inserted in pieces, over many
//! calls. What SQLite cannot interrupt and resume (sorting, counting, a statement that changes many
//! rows) ends with an error when it takes longer than [`shared::STATEMENT_MS`], or than the file
//! `statement-ms` says.
//!
//! *Who is who.* The VM is the identity: any user and any password are taken. The relay's socket in
//! the guest decides who may connect.
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | statement, row, value | 16 MiB | a packet of MySQL's protocol |
//! | words of a statement that is not an INSERT of literal rows | 20,000 | the call's deadline |
//! | computing of a statement between two rows | 60 ms, or the file `statement-ms` says | the call's deadline |
//! | waiting for a lock | 30 s | |
//! | clients | 256 | memory |
//! | bytes of all clients that wait | 64 MiB | memory |
//! | memory of SQLite | 128 MiB | the instance's own limit is 256 MiB by default |
//! | databases | 64, names of 1 to 40 of `a-z0-9_-` | files of the folder |
//!
//! Not there: prepared statements of the server, the time of day (a module has no calendar),
//! several statements in one, foreign keys, views, triggers, BIT, DECIMAL of more than 15 digits,
//! whole numbers above 2^63 − 1. Strings are compared without case as `mysql_ci` does, in which
//! accents count.

#![cfg_attr(target_arch = "wasm32", no_std)]

extern crate alloc;

pub mod answer;
pub mod bulk;
pub mod connections;
pub mod create;
pub mod db;
pub mod errors;
mod ffi;
#[doc(hidden)]
pub mod fuzzing;
pub mod lex;
pub mod locks;
pub mod packet;
pub mod plan;
pub mod rewrite;
pub mod rows;
pub mod session;
pub mod shared;
pub mod show;
pub mod statement;
#[cfg(test)]
mod testing;
pub mod transaction;
pub mod value;
pub mod vfs;

use guest_abi::module_call::log;
use sdk::{Errno, Events, Host, Module};

use crate::connections::Connections;
use crate::shared::{STATEMENT_MS, Shared};
use crate::vfs::Disk;

/// Name of the file that sets how long a statement may compute.
const STATEMENT_FILE: &str = "statement-ms";
/// Values of that file: the longest deadline of a call is 10 s.
const STATEMENTS_MS: core::ops::RangeInclusive<u64> = 1..=9_900;
/// Memory of SQLite.
#[cfg(target_arch = "wasm32")]
const MEMORY_BYTES: i64 = 128 << 20;

/// Module `sql`.
#[derive(Debug)]
pub struct Sql {
    connections: Connections,
    shared: Shared,
}

impl Module for Sql {
    fn start(host: &mut dyn Host) -> Result<Self, Errno> {
        // One for all tests of a process would be too little.
        #[cfg(target_arch = "wasm32")]
        db::limit_memory(MEMORY_BYTES);
        let statement_ms = statement_ms(host)?;
        shared::tidy(host)?;
        let shared = Shared::new(Disk::new()?, statement_ms);
        Ok(Self { connections: Connections::default(), shared })
    }

    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno> {
        self.shared.began_ms = host.now_ms();
        let (connections, shared) = (&mut self.connections, &mut self.shared);
        let disk = alloc::rc::Rc::clone(&shared.disk);
        disk.lend(host, || {
            for event in events {
                connections.take(shared, event);
            }
            connections.serve(shared);
        });
        Ok(())
    }
}

/// Reads the limit of a statement's computing from its file. A file without a number is logged.
fn statement_ms(host: &mut dyn Host) -> Result<u64, Errno> {
    let file = match host.open(STATEMENT_FILE, 0) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(STATEMENT_MS),
        Err(errno) => return Err(errno),
    };
    let mut bytes = [0; 16];
    let len = host.read(file, 0, &mut bytes)?;
    host.close(file);
    let text = core::str::from_utf8(&bytes[..len]).unwrap_or_default().trim();
    let number = text.parse().ok().filter(|n| STATEMENTS_MS.contains(n));
    Ok(number.unwrap_or_else(|| {
        host.log(log::WARN, "statement-ms: a number from 1 to 9900 is wanted; 60 is used");
        STATEMENT_MS
    }))
}

sdk::export!(Sql);

#[cfg(test)]
mod tests;
