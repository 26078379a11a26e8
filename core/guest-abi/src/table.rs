//! The table store: what its clients and the module `table` say to each other.
//!
//! # Tables
//! A table has a name, a definition that only its clients understand, and 1 to [`MAX_INDEXES`]
//! *indexes*: ordered maps from keys to values, both opaque bytes. Keys are ordered as `memcmp`
//! orders them, a prefix first. Index 0 is the primary one: its values are rows. The value of an
//! entry in another index is the primary key of its row, so that the store can fetch the row
//! ([`op_flag::FETCH`]). Clients keep indexes in step themselves: a row inserted is an insert into
//! each index. An index is unique if its keys are; where equal keys are allowed, the client appends
//! the primary key.
//!
//! # Requests
//! The body of a request is a [`Batch`] and its [`Op`]s, each with its key and its value behind it.
//! They are executed in order, up to the first that fails; a client's requests, too, one after the
//! other, so one that waits for a lock holds up those behind it. The reply is a [`Reply`], a text
//! of [`Reply::text_bytes`] that says what, where and the limit, and the [`Answer`]s of those ops
//! that have one and were done, in order.
//!
//! | op | key | value | `extra` | answer |
//! | --- | --- | --- | --- | --- |
//! | [`op::INSERT`] | key | value | | |
//! | [`op::PUT`] | key | value | | |
//! | [`op::UPDATE`] | key | value | | |
//! | [`op::DELETE`] | key | | | |
//! | [`op::GET`] | key | | | none or one [`Row`] |
//! | [`op::SCAN`] | low bound | high bound | most rows, most bytes ([`limits`]) | [`Row`]s |
//! | [`op::ESTIMATE`] | low bound | high bound | | [`Count`] |
//! | [`op::LOCK`] | | | | |
//! | [`op::SAVEPOINT`] | | | number | |
//! | [`op::ROLLBACK_TO`] | | | number | |
//! | [`op::RELEASE`] | | | number | |
//! | [`op::COMMIT`] | | | | |
//! | [`op::ROLLBACK`] | | | | |
//! | [`op::PREPARE`] | name | | | |
//! | [`op::COMMIT_PREPARED`] | name | | | |
//! | [`op::ROLLBACK_PREPARED`] | name | | | |
//! | [`op::LIST_PREPARED`] | | | | [`Row`]s: names, no values |
//! | [`op::CREATE`] | table's name | definition | indexes | [`Opened`] |
//! | [`op::OPEN`] | table's name | | | [`Opened`], definition |
//! | [`op::DROP`] | table's name | | | |
//! | [`op::RENAME`] | old name | new name | | |
//! | [`op::TRUNCATE`] | | | | |
//! | [`op::REDEFINE`] | | definition | | |
//! | [`op::LIST`] | names after this | | most rows, most bytes | [`Row`]s: names, definitions |
//! | [`op::STAT`] | | | | [`IndexStat`] for each index |
//! | [`op::NEXT_AUTO`] | | | how many, at least 1 | [`Auto`] |
//! | [`op::RAISE_AUTO`] | | | the least next value | |
//! | [`op::SYNC`] | | | | |
//! | [`op::VERSION`] | | | | [`Speaks`] |
//!
//! # Versions
//! This page is version [`VERSION`]. A store refuses a batch with anything that it does not know
//! with [`status::BAD_REQUEST`], before any of it is done: so a client asks once for
//! [`op::VERSION`] on each connection, and takes that answer for version 1. Version 2 adds, and
//! changes nothing else:
//! - [`op::SYNC`], [`op::RELEASE`], [`op::VERSION`];
//! - filters ([`op_flag::FILTER`], [`Filter`]);
//! - numbers of savepoints in any order, and one that is there already;
//! - [`op::NEXT_AUTO`] and [`op::RAISE_AUTO`] beside other ops, and in transactions.
//!
//! # Transactions
//! A client has one transaction at a time. A batch with [`batch_flag::BEGIN`] begins it, with a
//! number that the client chooses and has not used before; the batches that follow name it. A batch
//! with number 0 is a transaction of its own, beside an open one, if there is one: if it writes,
//! its last op is [`op::COMMIT`], [`op::PREPARE`] or [`op::ROLLBACK`], else it only reads. A batch
//! whose op failed leaves its transaction open, with what was done before it, also one that begins
//! it; not so with number 0, with [`batch_flag::ALL_OR_NOTHING`], and after [`status::DEADLOCK`]
//! and [`status::CONFLICT`]: the reply has [`reply_flag::ENDED`] then.
//!
//! *Savepoints* have a number each. Rolling back to one undoes what was done after it, forgets
//! those that came after it, and keeps locks and the savepoint. A number that is there already
//! moves: the old savepoint is forgotten, the others stay. Releasing one forgets it and those that
//! came after it, and undoes nothing. (In version 1 numbers grow, and there is no release.)
//!
//! *Counters* are no part of a transaction: values that were taken are gone, also if it is rolled
//! back or an op behind fails. [`op::NEXT_AUTO`] and [`op::RAISE_AUTO`] may be anywhere in a batch
//! (in version 1: alone, with number 0).
//!
//! *Isolation.* Reads without a lock see a snapshot: what was committed when the transaction first
//! read, or when its last batch with [`batch_flag::NEW_SNAPSHOT`] began; and its own writes. Reads
//! with [`op_flag::SHARED`] or [`op_flag::EXCLUSIVE`], and all writes, see what was committed last,
//! and lock the key until the transaction ends: also a key that is not there. They wait for the
//! locks of others, at most [`Batch::wait_ms`]. Ranges are not locked, so other rows may appear in
//! one. With [`batch_flag::STRICT`] a lock of a key that somebody changed after the transaction's
//! snapshot fails with [`status::CONFLICT`]: snapshot isolation. Without it and with the default
//! snapshot it is what InnoDB calls REPEATABLE READ, without gap locks; with a new snapshot for
//! each statement it is READ COMMITTED. Locks of whole tables ([`op::LOCK`]) make it SERIALIZABLE:
//! the client locks every table that it reads SHARED, and every one that it writes EXCLUSIVE.
//!
//! *Durability.* The reply to a batch with a commit comes when it is durable, unless
//! [`op_flag::RELAXED`]. Transactions that commit at the same time share one write and one sync. A
//! transaction that reads what another has just committed may commit earlier than that one is
//! durable, never more durably: the log has one order. The reply to [`op::SYNC`] comes when all is
//! durable whose replies had left before it came, whoever committed it: relaxed commits, too.
//!
//! *Prepared* transactions have a name, at most [`MAX_XID_BYTES`], and belong to no client any
//! more. They outlive everything but their commit or rollback.
//!
//! # Once
//! A batch that commits something, prepares or changes tables leaves its client's id and `seq` in
//! the log with it. Sent again after the store lost its memory, it is answered with
//! [`reply_flag::REPLAYED`] and without answers if it was done; else it is executed if it begins
//! its transaction itself, and fails with [`status::LOST`] if not. The store knows the last
//! [`MAX_REMEMBERED`] clients so.

mod filter;

pub use filter::{Filter, MAX_FILTER_BYTES, MAX_TERMS, Term, part, test};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of this page.
pub const VERSION: u32 = 2;

/// Name of the module.
pub const MODULE: &str = "table";

/// Longest key: a MariaDB key of 3,072 bytes, expanded by its collation, with the primary key.
pub const MAX_KEY_BYTES: usize = 16 << 10;

/// Longest value: what fits in a frame with its key and headers.
pub const MAX_VALUE_BYTES: usize = (16 << 20) - (64 << 10);

/// Longest name of a table.
pub const MAX_TABLE_NAME_BYTES: usize = 512;

/// Longest definition.
pub const MAX_DEFINITION_BYTES: usize = 64 << 10;

/// Longest name of a prepared transaction: an XID as MariaDB packs it.
pub const MAX_XID_BYTES: usize = 152;

/// Most indexes of a table.
pub const MAX_INDEXES: u32 = 65;

/// Most tables.
pub const MAX_TABLES: usize = 16_384;

/// Most ops of a batch.
pub const MAX_OPS: u32 = 65_536;

/// Most clients whose last commits are known.
pub const MAX_REMEMBERED: usize = 4_096;

/// Most prepared transactions.
pub const MAX_PREPARED: usize = 1_024;

/// Header in front of the ops.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Batch {
    /// The transaction; 0: one of its own.
    pub tx: U64,
    /// Number of ops, at most [`MAX_OPS`].
    pub ops: U32,
    /// [`batch_flag`]s.
    pub flags: U16,
    /// Zero.
    pub reserved: U16,
    /// Longest time that an op waits for a lock.
    pub wait_ms: U32,
    /// Zero.
    pub reserved2: U32,
}

/// Flags of a [`Batch`].
pub mod batch_flag {
    /// The transaction begins.
    pub const BEGIN: u16 = 1;
    /// Reads see what is committed now.
    pub const NEW_SNAPSHOT: u16 = 2;
    /// Locks of what was changed since the snapshot fail.
    pub const STRICT: u16 = 4;
    /// Should an op fail, the whole transaction is rolled back.
    pub const ALL_OR_NOTHING: u16 = 8;
}

/// One step; its key and its value follow.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Op {
    /// [`op`].
    pub kind: u8,
    /// Number of the table's index.
    pub index: u8,
    /// [`op_flag`]s.
    pub flags: U16,
    /// The table ([`Opened::table`]), where the op is for one that is open.
    pub table: U32,
    /// Bytes of the key.
    pub key_bytes: U32,
    /// Bytes of the value.
    pub value_bytes: U32,
    /// Extra word, as the list of ops says.
    pub extra: U64,
}

/// `extra` of a scan: most rows in the lower half, most bytes of keys and values in the upper. One
/// row comes in any case. A zero stands for what fits in a reply.
pub fn limits(rows: u32, bytes: u32) -> u64 {
    u64::from(rows) | u64::from(bytes) << 32
}

/// Kinds of ops.
pub mod op {
    /// A new entry; fails with [`super::status::EXISTS`].
    pub const INSERT: u8 = 1;
    /// An entry, new or replaced.
    pub const PUT: u8 = 2;
    /// Replaces an entry; fails with [`super::status::NOT_FOUND`].
    pub const UPDATE: u8 = 3;
    /// Removes an entry; fails with [`super::status::NOT_FOUND`].
    pub const DELETE: u8 = 4;
    /// Reads an entry.
    pub const GET: u8 = 5;
    /// Reads the entries between two bounds, in order.
    pub const SCAN: u8 = 6;
    /// About how many entries are between two bounds.
    pub const ESTIMATE: u8 = 7;
    /// Locks the table, [`super::op_flag::SHARED`] or [`super::op_flag::EXCLUSIVE`].
    pub const LOCK: u8 = 8;
    /// Numbers this moment of the transaction. A savepoint with that number moves.
    pub const SAVEPOINT: u8 = 9;
    /// Undoes what was done since.
    pub const ROLLBACK_TO: u8 = 10;
    /// Ends the transaction; the last op of its batch.
    pub const COMMIT: u8 = 11;
    /// Undoes it; the last op of its batch.
    pub const ROLLBACK: u8 = 12;
    /// Makes its end certain, whatever happens; the last op of its batch.
    pub const PREPARE: u8 = 13;
    /// Ends a prepared transaction; alone in its batch.
    pub const COMMIT_PREPARED: u8 = 14;
    /// Undoes a prepared transaction; alone in its batch.
    pub const ROLLBACK_PREPARED: u8 = 15;
    /// Names of prepared transactions; alone in its batch.
    pub const LIST_PREPARED: u8 = 16;
    /// Makes a table; fails with [`super::status::TABLE_EXISTS`]. This and all below are alone in a
    /// batch with number 0, are no part of a transaction, and hold at once.
    pub const CREATE: u8 = 17;
    /// Finds a table by its name.
    pub const OPEN: u8 = 18;
    /// Removes a table; fails with [`super::status::BUSY`] while a transaction has locks in it.
    pub const DROP: u8 = 19;
    /// Gives it another name, also while transactions have locks in it.
    pub const RENAME: u8 = 20;
    /// Empties it, as [`DROP`] and [`CREATE`] would, with the same number. Its counter begins at 1
    /// again.
    pub const TRUNCATE: u8 = 21;
    /// Replaces its definition.
    pub const REDEFINE: u8 = 22;
    /// Names of tables.
    pub const LIST: u8 = 23;
    /// How much there is of it.
    pub const STAT: u8 = 24;
    /// Takes values of its counter, for good. This one and the next may be anywhere in a batch.
    pub const NEXT_AUTO: u8 = 25;
    /// Raises its counter.
    pub const RAISE_AUTO: u8 = 26;
    /// Waits until all that was committed before is durable. Alone in a batch with number 0.
    pub const SYNC: u8 = 27;
    /// Forgets a savepoint, and those after it.
    pub const RELEASE: u8 = 28;
    /// Asks for the version of this page that the store speaks. Alone in a batch with number 0.
    pub const VERSION: u8 = 29;
}

/// Flags of an [`Op`].
pub mod op_flag {
    /// The low bound itself is not meant.
    pub const LOW_OPEN: u16 = 1;
    /// The high bound itself is not meant.
    pub const HIGH_OPEN: u16 = 2;
    /// No high bound. An empty low bound is none in any case.
    pub const NO_HIGH: u16 = 4;
    /// Scan from the high bound down.
    pub const BACKWARD: u16 = 8;
    /// With the rows that the entries' values are the primary keys of.
    pub const FETCH: u16 = 16;
    /// Without values.
    pub const KEYS_ONLY: u16 = 32;
    /// Locks what is read, and its row, against change.
    pub const SHARED: u16 = 64;
    /// Locks what is read, and its row, against locks.
    pub const EXCLUSIVE: u16 = 128;
    /// Keys that begin with the high bound are below it, whatever [`HIGH_OPEN`] says.
    pub const HIGH_PREFIX: u16 = 256;
    /// Commit whose reply does not wait until it is durable.
    pub const RELAXED: u16 = 512;
    /// Lock that fails with [`super::status::TIMEOUT`] instead of waiting.
    pub const NO_WAIT: u16 = 1024;
    /// Lock in a scan that passes over entries that others have locked.
    pub const SKIP_LOCKED: u16 = 2048;
    /// Write in another index than the primary one: the key is the client's own, made unique
    /// by the primary key. It is not locked, since the row is.
    pub const NO_LOCK: u16 = 4096;
    /// Scan whose value is a [`super::Filter`] with the high bound and the terms.
    pub const FILTER: u16 = 8192;
}

/// Header in front of a reply's text and answers.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Reply {
    /// [`status`] of the op that ended it.
    pub status: U16,
    /// [`reply_flag`]s.
    pub flags: U16,
    /// Number of ops that were done; the next one failed.
    pub done: U32,
    /// Bytes of the text that follows.
    pub text_bytes: U32,
    /// Number of [`Answer`]s that follow.
    pub answers: U32,
}

/// Flags of a [`Reply`].
pub mod reply_flag {
    /// Transaction has ended.
    pub const ENDED: u16 = 1;
    /// Batch was done when it was sent first; the answers of its ops are not known any more.
    pub const REPLAYED: u16 = 2;
}

/// Status of a batch.
pub mod status {
    /// All of it was done.
    pub const OK: u16 = 0;
    /// Key exists already.
    pub const EXISTS: u16 = 1;
    /// No such key, or no such prepared transaction.
    pub const NOT_FOUND: u16 = 2;
    /// Two transactions wait for each other; this one was rolled back.
    pub const DEADLOCK: u16 = 3;
    /// A lock could not be had in time.
    pub const TIMEOUT: u16 = 4;
    /// Another transaction changed it since the snapshot; rolled back.
    pub const CONFLICT: u16 = 5;
    /// The client cancelled it.
    pub const CANCELLED: u16 = 6;
    /// No such transaction: it was lost with the store's memory, or rolled back.
    pub const LOST: u16 = 7;
    /// No such table, or index.
    pub const NO_TABLE: u16 = 8;
    /// Table exists already.
    pub const TABLE_EXISTS: u16 = 9;
    /// Transactions have locks in the table.
    pub const BUSY: u16 = 10;
    /// A limit of this page, or the store's memory.
    pub const LIMIT: u16 = 11;
    /// The disk is full. Reads, deletions and all that frees space go on; other changes fail until
    /// there is space again.
    pub const NO_SPACE: u16 = 12;
    /// The storage failed.
    pub const STORAGE: u16 = 13;
    /// The request is not as this page says.
    pub const BAD_REQUEST: u16 = 14;
}

/// Header in front of an op's answer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Answer {
    /// Bytes that follow.
    pub len_bytes: U32,
    /// Number of the op in the batch.
    pub op: U32,
    /// Number of [`Row`]s.
    pub rows: U32,
    /// 1: there are more than the limits allowed. 2: a filter has looked at as many as it may, and
    /// the key to go on behind follows the rows.
    pub more: U32,
}

/// An entry; its bytes follow: key, primary key, value.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Row {
    /// Bytes of the key.
    pub key_bytes: U32,
    /// Bytes of the primary key; 0 without [`op_flag::FETCH`].
    pub primary_bytes: U32,
    /// Bytes of the value; of the row with [`op_flag::FETCH`].
    pub value_bytes: U32,
}

/// Answer of an estimate.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Count {
    /// About so many entries.
    pub entries: U64,
    /// 1: exactly.
    pub exact: U64,
}

/// Answer of an open. A definition may follow.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Opened {
    /// Number of the table in ops; never used again for another table.
    pub table: U32,
    /// Number of indexes.
    pub indexes: U32,
    /// The counter's next value.
    pub next_auto: U64,
}

/// Answer of a stat, for each index.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct IndexStat {
    /// Entries.
    pub entries: U64,
    /// Bytes of their keys.
    pub key_bytes: U64,
    /// Bytes of their values.
    pub value_bytes: U64,
}

/// Answer of taking values.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Auto {
    /// The first; those that follow are the client's, too, up to as many as it asked for.
    pub first: U64,
}

/// Answer of [`op::VERSION`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Speaks {
    /// Version of this page.
    pub version: U32,
    /// Zero.
    pub reserved: U32,
}

#[cfg(test)]
mod tests;
