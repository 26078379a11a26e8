//! The table store: ordered tables with transactions on an append log.
//!
//! What its clients may ask for is described at `guest_abi::table`. This page says how it is done.
//!
//! # Theory of operation
//! *Log.* All that is to last is appended to segments of a log (`record`, `record_body`, `log`). A
//! transaction is one record, made when it commits; a large one puts its ops into the log before,
//! and replay passes over them unless the commit follows. All commits of a call are appended in one
//! piece (`staging`), and only then applied and seen (`endings`): so an append that fails has
//! changed nothing. The host holds their replies until it has made the log durable.
//!
//! *Memory.* For each index an ordered map from keys to versions (`map`). Small values are in it,
//! for others it says where in the log they are. It is a cache: a start makes it anew (`replay`)
//! from the last checkpoint (`checkpoint`) and the log behind it. Values that nobody wants any more
//! go with their segment, and the others of a segment that has few move out of it before
//! (`compact`).
//!
//! *Transactions.* Writes stay with their transaction (`tx`) until it commits; its reads see them
//! over the maps. Each commit has a number, and a snapshot is the number that a reader saw last
//! (`versions`). Versions older than the oldest snapshot wants are forgotten when their key is
//! written, or by a sweep. Locks of keys and tables are held to the end (`lock`); a batch that
//! waits is kept and goes on at the op where it stopped (`store`). Who waits looks at once whether
//! it waits for itself.
//!
//! *Filters* pass over what a client does not want before it is sent (`filter`,
//! `exec::scan_filter`). They compare bytes. Values that they need are read a chunk at a time.
//!
//! *A full disk* fails what needs space and nothing else: space is kept for what frees some
//! (`reserve`).
//!
//! *Calls* are short. Each has a number of steps; what is not done by then (a long scan, a large
//! commit, a table that is removed) goes on in the next (`store`, `upkeep`).
//!
//! *Who may touch what.* `Store` takes events and runs batches. It has four states with fields of
//! their own: the `database` (log, catalog, locks, transactions, versions), which is all that ops
//! see (`exec::context`); `clients`; `endings` (transactions that have ended and are not over); and
//! `upkeep` (checkpoints and compaction).
//!
//! # Files and copies
//! No file is ever written to but at its end.
//!
//! | file | |
//! | --- | --- |
//! | `log-N` | appended to while it is the last one; then it stays as it is until it is removed. What an append that failed has left is cut off at once, what a power cut has left at the start |
//! | `checkpoint-N.new` | appended to, then renamed |
//! | `checkpoint-N` | stays as it is until the next one is there |
//! | `reserve-…` | what is in it means nothing; a copy may leave it out |
//!
//! So a copy of all files between two calls is the committed state of that moment: as after a kill,
//! all that was committed and prepared is in it, and nothing of transactions that are open. If all
//! files were synced before it was made, it is one that nothing which was acknowledged is missing
//! from. Most of it can be copied while the store serves: of a file that is there both times only
//! what was appended since is to be copied again, when it stands still. A copy needs all files of
//! one moment: files that are gone by then are removed from it.
//!
//! # Isolation
//! Levels are those of `guest_abi::table`; `tests::isolation` shows each case. With the default
//! snapshot: no dirty reads, no fuzzy reads, no read skew, no phantoms among plain reads. Lost
//! updates and write skew are possible between a plain read and a later write, as in InnoDB's
//! REPEATABLE READ, and reads that lock see what others have committed meanwhile, also new rows.
//! STRICT ends lost updates: that is snapshot isolation, and leaves write skew. A snapshot for each
//! statement is READ COMMITTED. Locks of whole tables are SERIALIZABLE.
//!
//! # Limits
//! - All keys are in memory, with about 100 bytes each beside their own and those of values up to
//!   64 bytes. Where the host allows the module no more, writes fail with LIMIT, and deletions a
//!   little later; 64 MiB are kept free for requests, replies and what estimates do not know
//!   (`memory`). A store whose rows do not fit into its memory any more, since it is allowed less
//!   than before, does not start.
//! - Old versions go by the oldest snapshot: one that is kept for long keeps all of them.
//! - A disk that is full is an error that passes. What frees space has a reserve: it may wait for a
//!   checkpoint, and fails for good only if all of the reserve does not help to make one. Of what
//!   the host allows, the reserve takes as much as the memory in use, a sixteenth of the log (4 MiB
//!   at most), and half of a segment once there are two.
//! - A read error or a value whose bytes were changed fails the op. After a write error nothing
//!   more is written until the next start.
//! - A power cut loses the log's end as far as nobody was told of it. Such an end is cut off at the
//!   next start; bytes that were changed are an error, and the store does not start. The two are
//!   told apart by what lost bytes look like (`record`): damage that looks like a loss (whole pages
//!   of zeroes, a file that is shorter) in what came since the last sync of the module's own is
//!   taken for one.
//! - One transaction at a time may be in the middle of being applied; commits behind it wait.
//! - After a restart a prepared transaction has the exclusive locks of the keys that it wrote, and
//!   no others.
#![cfg_attr(target_arch = "wasm32", no_std)]

extern crate alloc;

mod catalog;
mod checkpoint;
mod clients;
mod compact;
mod config;
mod database;
mod endings;
mod entry;
mod exec;
mod fail;
mod filter;
mod load;
mod lock;
mod log;
mod map;
mod memory;
mod op;
mod record;
mod record_body;
mod remembered;
mod replay;
mod reserve;
mod restored;
mod segment;
mod slot;
mod staging;
mod store;
mod transactions;
mod tx;
mod upkeep;
mod versions;
mod wire;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use config::Config;
pub use store::Store;

sdk::export!(Store);
