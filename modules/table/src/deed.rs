//! What is in records: ops, who did them, changes of tables.

use alloc::vec::Vec;

use xxhash_rust::xxh3::xxh3_64;

use crate::map::INLINE_BYTES;
use crate::record::{u32_at, u64_at};

/// Kinds of a record's ops.
pub mod log_op {
    /// An entry has a value.
    pub const PUT: u8 = 1;
    /// An entry is not there.
    pub const DELETE: u8 = 2;
    /// Of the transaction's ops only the first `table` count.
    pub const UNDO: u8 = 3;
}

/// Flag of an op: its key is locked.
pub const LOCKED: u8 = 1;

const OP_BYTES: usize = 16;
/// Bytes behind a value that is read from the log.
pub const CHECK_BYTES: usize = 4;

/// An op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogOp<'a> {
    /// [`log_op`].
    pub kind: u8,
    /// Of the table.
    pub index: u8,
    /// [`LOCKED`].
    pub flags: u8,
    /// Its number.
    pub table: u32,
    /// Of the entry.
    pub key: &'a [u8],
    /// Of the entry.
    pub value: &'a [u8],
    /// Where the value is in the bytes it was read from.
    pub value_at: usize,
}

/// What proves that the bytes of a value are those that were written.
pub fn check_value(value: &[u8]) -> [u8; CHECK_BYTES] {
    (xxh3_64(value) as u32).to_le_bytes()
}

/// Appends an op; where its value is.
pub fn put_op(
    out: &mut Vec<u8>,
    kind: u8,
    (table, index): (u32, u8),
    flags: u8,
    key: &[u8],
    value: &[u8],
) -> usize {
    out.reserve(OP_BYTES + key.len() + value.len() + CHECK_BYTES);
    out.extend_from_slice(&[kind, index, flags, 0]);
    out.extend_from_slice(&table.to_le_bytes());
    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    out.extend_from_slice(key);
    let at = out.len();
    out.extend_from_slice(value);
    if value.len() > INLINE_BYTES {
        out.extend_from_slice(&check_value(value));
    }
    at
}

/// The op at `at`, and where the next one is.
pub fn op_at(bytes: &[u8], at: usize) -> Option<(LogOp<'_>, usize)> {
    let head = bytes.get(at..)?.get(..OP_BYTES)?;
    let (key_len, value_len) = (u32_at(head, 8) as usize, u32_at(head, 12) as usize);
    let key_at = at + OP_BYTES;
    let value_at = key_at.checked_add(key_len)?;
    let value_end = value_at.checked_add(value_len)?;
    let check = if value_len > INLINE_BYTES { CHECK_BYTES } else { 0 };
    let op = LogOp {
        kind: head[0],
        index: head[1],
        flags: head[2],
        table: u32_at(head, 4),
        key: bytes.get(key_at..value_at)?,
        value: bytes.get(value_at..value_end)?,
        value_at,
    };
    (value_end + check <= bytes.len()).then_some((op, value_end + check))
}

/// Who did it, so that it is not done twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Note {
    /// The client's own id.
    pub client: [u8; 16],
    /// The request.
    pub seq: u64,
}

/// The beginning of records about transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deed<'a> {
    /// The commit; 0: none.
    pub commit: u64,
    /// The store's own number of the transaction.
    pub tx: u64,
    /// Who.
    pub note: Note,
    /// Of a prepared transaction.
    pub name: &'a [u8],
}

const DEED_BYTES: usize = 44;

impl<'a> Deed<'a> {
    /// Appends it.
    pub fn put(&self, out: &mut Vec<u8>) {
        // The first bytes of a body are not all zero: `record` says why.
        out.extend_from_slice(&self.tx.to_le_bytes());
        out.extend_from_slice(&self.commit.to_le_bytes());
        out.extend_from_slice(&self.note.client);
        out.extend_from_slice(&self.note.seq.to_le_bytes());
        out.extend_from_slice(&(self.name.len() as u32).to_le_bytes());
        out.extend_from_slice(self.name);
    }

    /// How long it is.
    pub fn len(&self) -> usize {
        DEED_BYTES + self.name.len()
    }

    /// From a body, with where its ops begin.
    pub fn read(body: &'a [u8]) -> Option<(Self, usize)> {
        let name_len = u32_at(body.get(..DEED_BYTES)?, 40) as usize;
        let name = body.get(DEED_BYTES..)?.get(..name_len)?;
        let mut client = [0; 16];
        client.copy_from_slice(&body[16..32]);
        let note = Note { client, seq: u64_at(body, 32) };
        let deed = Self { commit: u64_at(body, 8), tx: u64_at(body, 0), note, name };
        Some((deed, DEED_BYTES + name_len))
    }
}

/// Changes of tables.
pub mod change {
    /// It is there, with this name and definition.
    pub const CREATE: u8 = 1;
    /// It is not there.
    pub const DROP: u8 = 2;
    /// It has this name.
    pub const RENAME: u8 = 3;
    /// It is empty.
    pub const TRUNCATE: u8 = 4;
    /// It has this definition.
    pub const REDEFINE: u8 = 5;
    /// Values of its counter below this are taken.
    pub const AUTO: u8 = 6;
}

/// A change of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change<'a> {
    /// [`change`].
    pub kind: u8,
    /// How many indexes.
    pub indexes: u8,
    /// The table.
    pub table: u32,
    /// Of the counter.
    pub auto: u64,
    /// Who.
    pub note: Note,
    /// The table's.
    pub name: &'a [u8],
    /// The table's.
    pub definition: &'a [u8],
}

const CHANGE_BYTES: usize = 48;

impl<'a> Change<'a> {
    /// Appends it.
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.kind, self.indexes, 0, 0]);
        out.extend_from_slice(&self.table.to_le_bytes());
        out.extend_from_slice(&self.auto.to_le_bytes());
        out.extend_from_slice(&self.note.client);
        out.extend_from_slice(&self.note.seq.to_le_bytes());
        out.extend_from_slice(&(self.name.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.definition.len() as u32).to_le_bytes());
        out.extend_from_slice(self.name);
        out.extend_from_slice(self.definition);
    }

    /// From a body.
    pub fn read(body: &'a [u8]) -> Option<Self> {
        let head = body.get(..CHANGE_BYTES)?;
        let (name, definition) = (u32_at(head, 40) as usize, u32_at(head, 44) as usize);
        let mut client = [0; 16];
        client.copy_from_slice(&head[16..32]);
        Some(Self {
            kind: head[0],
            indexes: head[1],
            table: u32_at(head, 4),
            auto: u64_at(head, 8),
            note: Note { client, seq: u64_at(head, 32) },
            name: body.get(CHANGE_BYTES..)?.get(..name)?,
            definition: body.get(CHANGE_BYTES + name..)?.get(..definition)?,
        })
    }
}
