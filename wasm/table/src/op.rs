//! Ops as batches have them.

use guest_abi::table::{Op, op_flag};
use zerocopy::FromBytes;

/// Op of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpRef<'a> {
    /// Kind: `guest_abi::table::op`.
    pub kind: u8,
    /// Index of the table.
    pub index: u8,
    /// Flags: `guest_abi::table::op_flag`.
    pub flags: u16,
    /// Number of the table.
    pub table: u32,
    /// Key, or the low bound, or a name.
    pub key: &'a [u8],
    /// Value, or the high bound, or a definition.
    pub value: &'a [u8],
    /// Extra number, as the list of ops in `guest_abi::table` says.
    pub extra: u64,
}

impl OpRef<'_> {
    /// Whether it has a flag.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether it locks what it reads.
    pub fn locks(&self) -> bool {
        self.has(op_flag::SHARED | op_flag::EXCLUSIVE)
    }
}

/// Reads the op at an offset of a batch; with it the offset of the next one.
pub fn op_at(body: &[u8], at: usize) -> Option<(OpRef<'_>, usize)> {
    let (head, rest) = Op::read_from_prefix(body.get(at..)?).ok()?;
    let (key_bytes, value_bytes) = (head.key_bytes.get() as usize, head.value_bytes.get() as usize);
    let key = rest.get(..key_bytes)?;
    let value = rest.get(key_bytes..)?.get(..value_bytes)?;
    let next = at + size_of::<Op>() + key_bytes + value_bytes;
    let op = OpRef {
        kind: head.kind,
        index: head.index,
        flags: head.flags.get(),
        table: head.table.get(),
        key,
        value,
        extra: head.extra.get(),
    };
    Some((op, next))
}
