//! Batches checked, replies put together.

use alloc::vec::Vec;
use core::ops::Bound;

use guest_abi::module::MAX_BODY_BYTES;
use guest_abi::table::{
    Answer, Batch, MAX_DEFINITION_BYTES, MAX_INDEXES, MAX_KEY_BYTES, MAX_OPS, MAX_TABLE_NAME_BYTES,
    MAX_VALUE_BYTES, MAX_XID_BYTES, Reply, Row, batch_flag, op, op_flag, reply_flag,
};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

use crate::fail::{Fail, fail};
use crate::filter;
use crate::op::{OpRef, op_at};

/// Length of a [`Reply`] in bytes.
pub const REPLY_BYTES: usize = size_of::<Reply>();
/// Length of an [`Answer`] in bytes.
pub const ANSWER_BYTES: usize = size_of::<Answer>();
/// Length of a [`Row`] in bytes.
pub const ROW_BYTES: usize = size_of::<Row>();
/// Length of the longest reply, with room left for a text.
pub const MAX_REPLY_BYTES: usize = MAX_BODY_BYTES as usize - 1024;

/// Head of a batch that was checked as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The client's number of the transaction.
    pub tx: u64,
    /// Number of ops.
    pub ops: u32,
    /// Flags: `guest_abi::table::batch_flag`.
    pub flags: u16,
    /// Longest wait for a lock.
    pub wait_ms: u32,
    /// Kind of the last op.
    pub last: u8,
    /// Whether it writes entries.
    pub writes: bool,
}

impl Head {
    /// Whether it has a flag.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether the batch leaves its number in the log.
    pub fn is_logged(&self) -> bool {
        use op::{COMMIT, COMMIT_PREPARED, CREATE, DROP, PREPARE};
        use op::{REDEFINE, RENAME, ROLLBACK_PREPARED, TRUNCATE};
        matches!(
            self.last,
            COMMIT
                | PREPARE
                | COMMIT_PREPARED
                | ROLLBACK_PREPARED
                | CREATE
                | DROP
                | RENAME
                | TRUNCATE
                | REDEFINE
        )
    }
}

/// Offset of the first op.
pub const FIRST_OP: usize = size_of::<Batch>();

/// Limits of an op of a kind.
struct Rule {
    name: &'static str,
    flags: u16,
    key_bytes: usize,
    value_bytes: usize,
    position: Position,
}

/// Position that an op may have in a batch.
#[derive(PartialEq, Eq)]
enum Position {
    Any,
    Last,
    Alone,
    /// Alone, in a batch with number 0.
    AloneWithoutTx,
}

const WRITE_FLAGS: u16 = op_flag::NO_LOCK | op_flag::NO_WAIT;
const LOCK_FLAGS: u16 = op_flag::SHARED | op_flag::EXCLUSIVE | op_flag::NO_WAIT;
const BOUND_FLAGS: u16 =
    op_flag::LOW_OPEN | op_flag::HIGH_OPEN | op_flag::NO_HIGH | op_flag::HIGH_PREFIX;
const READ_FLAGS: u16 = op_flag::FETCH | op_flag::KEYS_ONLY | LOCK_FLAGS;
const SCAN_FLAGS: u16 =
    READ_FLAGS | BOUND_FLAGS | op_flag::BACKWARD | op_flag::SKIP_LOCKED | op_flag::FILTER;

/// Limits of an op of a kind, if there is such a kind.
fn rule(kind: u8) -> Option<Rule> {
    use Position::{Alone, AloneWithoutTx, Any, Last};
    let of = |name, flags, key_bytes, value_bytes, position| {
        Some(Rule { name, flags, key_bytes, value_bytes, position })
    };
    let (key, name) = (MAX_KEY_BYTES, MAX_TABLE_NAME_BYTES);
    match kind {
        op::INSERT => of("INSERT", WRITE_FLAGS, key, MAX_VALUE_BYTES, Any),
        op::PUT => of("PUT", WRITE_FLAGS, key, MAX_VALUE_BYTES, Any),
        op::UPDATE => of("UPDATE", WRITE_FLAGS, key, MAX_VALUE_BYTES, Any),
        op::DELETE => of("DELETE", WRITE_FLAGS, key, 0, Any),
        op::GET => of("GET", READ_FLAGS, key, 0, Any),
        op::SCAN => of("SCAN", SCAN_FLAGS, key, filter::MAX_BYTES, Any),
        op::ESTIMATE => of("ESTIMATE", BOUND_FLAGS | op_flag::BACKWARD, key, key, Any),
        op::LOCK => of("LOCK", LOCK_FLAGS, 0, 0, Any),
        op::SAVEPOINT => of("SAVEPOINT", 0, 0, 0, Any),
        op::ROLLBACK_TO => of("ROLLBACK_TO", 0, 0, 0, Any),
        op::RELEASE => of("RELEASE", 0, 0, 0, Any),
        op::COMMIT => of("COMMIT", op_flag::RELAXED, 0, 0, Last),
        op::ROLLBACK => of("ROLLBACK", 0, 0, 0, Last),
        op::PREPARE => of("PREPARE", op_flag::RELAXED, MAX_XID_BYTES, 0, Last),
        op::COMMIT_PREPARED => of("COMMIT_PREPARED", op_flag::RELAXED, MAX_XID_BYTES, 0, Alone),
        op::ROLLBACK_PREPARED => of("ROLLBACK_PREPARED", op_flag::RELAXED, MAX_XID_BYTES, 0, Alone),
        op::LIST_PREPARED => of("LIST_PREPARED", 0, 0, 0, Alone),
        op::CREATE => of("CREATE", 0, name, MAX_DEFINITION_BYTES, AloneWithoutTx),
        op::OPEN => of("OPEN", 0, name, 0, AloneWithoutTx),
        op::DROP => of("DROP", 0, name, 0, AloneWithoutTx),
        op::RENAME => of("RENAME", 0, name, name, AloneWithoutTx),
        op::TRUNCATE => of("TRUNCATE", 0, 0, 0, AloneWithoutTx),
        op::REDEFINE => of("REDEFINE", 0, 0, MAX_DEFINITION_BYTES, AloneWithoutTx),
        op::LIST => of("LIST", 0, name, 0, AloneWithoutTx),
        op::STAT => of("STAT", 0, 0, 0, AloneWithoutTx),
        op::NEXT_AUTO => of("NEXT_AUTO", 0, 0, 0, Any),
        op::RAISE_AUTO => of("RAISE_AUTO", 0, 0, 0, Any),
        op::SYNC => of("SYNC", 0, 0, 0, AloneWithoutTx),
        op::VERSION => of("VERSION", 0, 0, 0, AloneWithoutTx),
        _ => None,
    }
}

/// Checks a request as a whole, before anything of it is done.
pub fn check(body: &[u8]) -> Result<Head, Fail> {
    let Ok((batch, _)) = Batch::read_from_prefix(body) else {
        return Err(fail!(
            BAD_REQUEST,
            "a batch has {FIRST_OP} bytes at least, not {}",
            body.len()
        ));
    };
    let known = batch_flag::BEGIN
        | batch_flag::NEW_SNAPSHOT
        | batch_flag::STRICT
        | batch_flag::ALL_OR_NOTHING;
    let mut head = Head {
        tx: batch.tx.get(),
        ops: batch.ops.get(),
        flags: batch.flags.get(),
        wait_ms: batch.wait_ms.get(),
        last: 0,
        writes: false,
    };
    if head.flags & !known != 0 || batch.reserved.get() != 0 || batch.reserved2.get() != 0 {
        return Err(fail!(BAD_REQUEST, "batch: unknown flags {:#x} or reserved bits", head.flags));
    }
    if head.ops > MAX_OPS {
        return Err(fail!(BAD_REQUEST, "batch: {} ops, the limit is {MAX_OPS}", head.ops));
    }
    if head.tx == 0 && head.has(batch_flag::BEGIN) {
        return Err(fail!(BAD_REQUEST, "batch: transaction 0 does not begin"));
    }
    let mut at = FIRST_OP;
    for i in 0..head.ops {
        let Some((op, next)) = op_at(body, at) else {
            return Err(fail!(BAD_REQUEST, "op {i} at byte {at} goes beyond the request's end"));
        };
        check_op(&op, i, &head)?;
        head.last = op.kind;
        head.writes |= matches!(op.kind, op::INSERT | op::PUT | op::UPDATE | op::DELETE);
        at = next;
    }
    if at != body.len() {
        return Err(fail!(BAD_REQUEST, "{} bytes after the last op", body.len() - at));
    }
    if head.tx == 0 && head.writes && !matches!(head.last, op::COMMIT | op::PREPARE | op::ROLLBACK)
    {
        return Err(fail!(BAD_REQUEST, "batch with number 0: it writes and has no commit"));
    }
    Ok(head)
}

fn check_op(op: &OpRef<'_>, i: u32, head: &Head) -> Result<(), Fail> {
    let Some(rule) = rule(op.kind) else {
        return Err(fail!(BAD_REQUEST, "op {i}: unknown kind {}", op.kind));
    };
    let name = rule.name;
    if op.flags & !rule.flags != 0 {
        let flags = op.flags & !rule.flags;
        return Err(fail!(BAD_REQUEST, "op {i}, {name}: flags {flags:#x} are not for it"));
    }
    if op.has(op_flag::SHARED) && op.has(op_flag::EXCLUSIVE) {
        return Err(fail!(BAD_REQUEST, "op {i}, {name}: shared and exclusive"));
    }
    if op.key.len() > rule.key_bytes {
        let (len, most) = (op.key.len(), rule.key_bytes);
        return Err(fail!(LIMIT, "op {i}, {name}: key of {len} bytes, the limit is {most}"));
    }
    if op.value.len() > rule.value_bytes {
        let (len, most) = (op.value.len(), rule.value_bytes);
        return Err(fail!(LIMIT, "op {i}, {name}: value of {len} bytes, the limit is {most}"));
    }
    let last = i + 1 == head.ops;
    let is_in_place = match rule.position {
        Position::Any => true,
        Position::Last => last,
        Position::Alone => head.ops == 1,
        Position::AloneWithoutTx => head.ops == 1 && head.tx == 0,
    };
    if !is_in_place {
        return Err(fail!(BAD_REQUEST, "op {i}, {name}: not at this place in a batch"));
    }
    check_special(op, i, name)
}

fn check_special(op: &OpRef<'_>, i: u32, name: &str) -> Result<(), Fail> {
    match op.kind {
        op::CREATE if op.extra == 0 || op.extra > u64::from(MAX_INDEXES) => Err(fail!(
            BAD_REQUEST,
            "op {i}, CREATE: {} indexes, the limits are 1 and {MAX_INDEXES}",
            op.extra
        )),
        op::SCAN => filter::check(op, i),
        op::LOCK if !op.locks() => {
            Err(fail!(BAD_REQUEST, "op {i}, LOCK: neither shared nor exclusive"))
        }
        op::CREATE | op::OPEN | op::DROP | op::RENAME | op::PREPARE if op.key.is_empty() => {
            Err(fail!(BAD_REQUEST, "op {i}, {name}: no name"))
        }
        op::RENAME if op.value.is_empty() => Err(fail!(BAD_REQUEST, "op {i}, RENAME: no new name")),
        op::NEXT_AUTO if op.extra == 0 => Err(fail!(BAD_REQUEST, "op {i}, NEXT_AUTO: no values")),
        op::INSERT | op::PUT | op::UPDATE | op::DELETE
            if op.index == 0 && op.has(op_flag::NO_LOCK) =>
        {
            Err(fail!(BAD_REQUEST, "op {i}, {name}: keys of the primary index are locked"))
        }
        _ => Ok(()),
    }
}

/// Bounds of a range.
pub type Range = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// Bounds of a scan or an estimate.
pub fn bounds(op: &OpRef<'_>) -> Range {
    let low = match op.key {
        [] => Bound::Unbounded,
        key if op.has(op_flag::LOW_OPEN) => Bound::Excluded(key.to_vec()),
        key => Bound::Included(key.to_vec()),
    };
    let high = if op.has(op_flag::NO_HIGH) {
        Bound::Unbounded
    } else if op.has(op_flag::HIGH_PREFIX) {
        after_prefix(filter::high(op)).map_or(Bound::Unbounded, Bound::Excluded)
    } else if op.has(op_flag::HIGH_OPEN) {
        Bound::Excluded(filter::high(op).to_vec())
    } else {
        Bound::Included(filter::high(op).to_vec())
    };
    (low, high)
}

/// Lowest key above all that begin with a prefix.
fn after_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let len = prefix.iter().rposition(|&b| b != 0xFF)? + 1;
    let mut next = prefix[..len].to_vec();
    next[len - 1] += 1;
    Some(next)
}

/// Whether nothing can be between two bounds. (The standard library's maps panic on some of these.)
pub fn is_empty(range: &Range) -> bool {
    use Bound::{Excluded, Included};
    match range {
        (Included(low), Included(high)) => low > high,
        (Included(low), Excluded(high))
        | (Excluded(low), Included(high))
        | (Excluded(low), Excluded(high)) => low >= high,
        _ => false,
    }
}

/// Begins an answer, and returns its offset for [`end_answer`].
pub fn begin_answer(out: &mut Vec<u8>) -> usize {
    let at = out.len();
    out.resize(at + ANSWER_BYTES, 0);
    at
}

/// Ends an answer.
pub fn end_answer(out: &mut [u8], at: usize, op: u32, rows: u32, more: u32) {
    let len = out.len().saturating_sub(at + ANSWER_BYTES);
    let head = Answer {
        len_bytes: U32::new(len as u32),
        op: U32::new(op),
        rows: U32::new(rows),
        more: U32::new(more),
    };
    if let Some(to) = out.get_mut(at..at + ANSWER_BYTES) {
        to.copy_from_slice(head.as_bytes());
    }
}

/// Appends the head of a row.
pub fn put_row(out: &mut Vec<u8>, key: usize, primary: usize, value: usize) {
    let row = Row {
        key_bytes: U32::new(key as u32),
        primary_bytes: U32::new(primary as u32),
        value_bytes: U32::new(value as u32),
    };
    out.extend_from_slice(row.as_bytes());
}

/// Outcome of a batch: the head of its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Status: `guest_abi::table::status`.
    pub status: u16,
    /// Number of ops done.
    pub done: u32,
    /// Whether there is no transaction any more.
    pub ended: bool,
    /// Whether the batch was done before.
    pub replayed: bool,
    /// Number of answers.
    pub answers: u32,
}

/// Finishes a reply: `out` is room for its head, and the answers.
pub fn finish(out: &mut Vec<u8>, outcome: Outcome, text: &str) {
    let mut cut = text.len().min(512);
    while !text.is_char_boundary(cut) {
        cut -= 1;
    }
    let text = &text.as_bytes()[..cut];
    let mut flags = if outcome.ended { reply_flag::ENDED } else { 0 };
    if outcome.replayed {
        flags |= reply_flag::REPLAYED;
    }
    let head = Reply {
        status: U16::new(outcome.status),
        flags: U16::new(flags),
        done: U32::new(outcome.done),
        text_bytes: U32::new(text.len() as u32),
        answers: U32::new(outcome.answers),
    };
    if out.len() < REPLY_BYTES {
        out.resize(REPLY_BYTES, 0);
    }
    out[..REPLY_BYTES].copy_from_slice(head.as_bytes());
    if !text.is_empty() {
        out.splice(REPLY_BYTES..REPLY_BYTES, text.iter().copied());
    }
}
