//! Bodies of records: ops of transactions, heads of transactions, changes of tables.

use alloc::vec::Vec;

use xxhash_rust::xxh3::xxh3_64;

use crate::record::{u32_at, u64_at};
use crate::slot::INLINE_BYTES;

/// Kinds of a record's ops.
pub mod log_op {
    /// An entry has a value.
    pub const PUT: u8 = 1;
    /// An entry is not there.
    pub const DELETE: u8 = 2;
    /// Takes ops back: of the transaction's ops only the first `table` count.
    pub const UNDO: u8 = 3;
}

/// Flag of an op: its key is locked.
pub const LOCKED: u8 = 1;

const OP_BYTES: usize = 16;
/// Bytes of the check behind a value that is not kept in memory.
pub const CHECK_BYTES: usize = 4;

/// Op of a transaction, as the log has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogOp<'a> {
    /// Kind: [`log_op`].
    pub kind: u8,
    /// Index of the table.
    pub index: u8,
    /// Flags: [`LOCKED`].
    pub flags: u8,
    /// Number of the table.
    pub table: u32,
    /// Key of the entry.
    pub key: &'a [u8],
    /// Value of the entry.
    pub value: &'a [u8],
    /// Offset of the value in the bytes that the op was read from.
    pub value_at: usize,
}

/// Check behind a value, which proves that its bytes are those that were written.
pub fn check_value(value: &[u8]) -> [u8; CHECK_BYTES] {
    (xxh3_64(value) as u32).to_le_bytes()
}

/// Appends an op, and returns the offset of its value.
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

/// Reads the op at `at`; with it the offset of the next one.
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

/// A client's request, by which a repetition is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestId {
    /// Id that the client gave itself.
    pub client: [u8; 16],
    /// Number of the request.
    pub seq: u64,
}

/// Head of the bodies of records about transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxHead<'a> {
    /// Number of the commit; 0: it is none.
    pub commit: u64,
    /// The store's number of the transaction.
    pub tx: u64,
    /// Request that wrote the record.
    pub request_id: RequestId,
    /// Name of a prepared transaction.
    pub name: &'a [u8],
}

const TX_HEAD_BYTES: usize = 44;

impl<'a> TxHead<'a> {
    /// Appends its bytes.
    pub fn put(&self, out: &mut Vec<u8>) {
        // The first bytes of a body are not all zero: `record` says why.
        out.extend_from_slice(&self.tx.to_le_bytes());
        out.extend_from_slice(&self.commit.to_le_bytes());
        out.extend_from_slice(&self.request_id.client);
        out.extend_from_slice(&self.request_id.seq.to_le_bytes());
        out.extend_from_slice(&(self.name.len() as u32).to_le_bytes());
        out.extend_from_slice(self.name);
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        TX_HEAD_BYTES + self.name.len()
    }

    /// Reads it from a body; with it the offset of the ops.
    pub fn read(body: &'a [u8]) -> Option<(Self, usize)> {
        let name_len = u32_at(body.get(..TX_HEAD_BYTES)?, 40) as usize;
        let name = body.get(TX_HEAD_BYTES..)?.get(..name_len)?;
        let mut client = [0; 16];
        client.copy_from_slice(&body[16..32]);
        let request_id = RequestId { client, seq: u64_at(body, 32) };
        let head = Self { commit: u64_at(body, 8), tx: u64_at(body, 0), request_id, name };
        Some((head, TX_HEAD_BYTES + name_len))
    }
}

/// Kinds of changes of tables.
pub mod change {
    /// Table is there, with this name and definition.
    pub const CREATE: u8 = 1;
    /// Table is not there.
    pub const DROP: u8 = 2;
    /// Table has this name.
    pub const RENAME: u8 = 3;
    /// Table is empty.
    pub const TRUNCATE: u8 = 4;
    /// Table has this definition.
    pub const REDEFINE: u8 = 5;
    /// Values of the table's counter below this are taken.
    pub const AUTO: u8 = 6;
}

/// Change of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change<'a> {
    /// Kind: [`change`].
    pub kind: u8,
    /// Number of indexes.
    pub indexes: u8,
    /// Number of the table.
    pub table: u32,
    /// Value of the table's counter.
    pub auto: u64,
    /// Request that wrote the record.
    pub request_id: RequestId,
    /// Name of the table.
    pub name: &'a [u8],
    /// Definition of the table.
    pub definition: &'a [u8],
}

const CHANGE_BYTES: usize = 48;

impl<'a> Change<'a> {
    /// Appends its bytes.
    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.kind, self.indexes, 0, 0]);
        out.extend_from_slice(&self.table.to_le_bytes());
        out.extend_from_slice(&self.auto.to_le_bytes());
        out.extend_from_slice(&self.request_id.client);
        out.extend_from_slice(&self.request_id.seq.to_le_bytes());
        out.extend_from_slice(&(self.name.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.definition.len() as u32).to_le_bytes());
        out.extend_from_slice(self.name);
        out.extend_from_slice(self.definition);
    }

    /// Reads it from a body.
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
            request_id: RequestId { client, seq: u64_at(head, 32) },
            name: body.get(CHANGE_BYTES..)?.get(..name)?,
            definition: body.get(CHANGE_BYTES + name..)?.get(..definition)?,
        })
    }
}
