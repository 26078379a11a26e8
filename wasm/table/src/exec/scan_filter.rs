//! SCAN with a filter: rows that may match by their key are read a chunk at a time, and those that
//! match go into the answer.

use alloc::vec::Vec;

use guest_abi::table::{MAX_KEY_BYTES, Row, op_flag};
use zerocopy::FromBytes;

use crate::clients::Cursor;
use crate::database::Database;
use crate::exec::context::Execution;
use crate::exec::rows::{
    AnswerRoom, FoundRow, ScanRest, UnreadValue, borrow, bytes_of, move_behind, read_values,
    resolve,
};
use crate::fail::Fail;
use crate::filter::Filter;
use crate::map::Merge;
use crate::op::OpRef;
use crate::slot::Slot;
use crate::wire;

/// Bytes that are read together: what is read beyond a limit is read for nothing.
const CHUNK_BYTES: usize = 256 << 10;
/// Rows that are read together.
const CHUNK_ROWS: u32 = 256;

/// Rows that may match a filter.
#[derive(Default)]
struct Chunk {
    bytes: Vec<u8>,
    unread: Vec<UnreadValue>,
    rows: u32,
}

impl Chunk {
    fn is_full(&self) -> bool {
        self.bytes.len() >= CHUNK_BYTES || self.rows >= CHUNK_ROWS
    }

    /// Moves rows that match to the answer. False: one does not fit any more.
    fn move_matches(
        &mut self,
        filter: &Filter<'_>,
        op: &OpRef<'_>,
        cursor: &mut Cursor,
        out: &mut Vec<u8>,
    ) -> Result<bool, Fail> {
        let mut room = AnswerRoom::new(op, cursor, out.len() + MAX_KEY_BYTES);
        let mut rest = &self.bytes[..];
        while let Ok((row, bytes)) = Row::read_from_prefix(rest) {
            let front = (row.key_bytes.get() + row.primary_bytes.get()) as usize;
            let all = front + row.value_bytes.get() as usize;
            let (Some(keys), Some(value)) = (bytes.get(..front), bytes.get(front..all)) else {
                break;
            };
            rest = &bytes[all..];
            if !filter.takes_value(value) {
                continue;
            }
            let value = if op.has(op_flag::KEYS_ONLY) { &[] } else { value };
            let len = front + value.len();
            if !room.take(cursor.rows == 0, len)? {
                return Ok(false);
            }
            wire::put_row(
                out,
                row.key_bytes.get() as usize,
                row.primary_bytes.get() as usize,
                value.len(),
            );
            out.extend_from_slice(keys);
            out.extend_from_slice(value);
            cursor.rows += 1;
            cursor.bytes += len as u64;
        }
        self.rows = 0;
        self.unread.clear();
        self.bytes.clear();
        Ok(true)
    }
}

/// Puts rows that match into the answer. None: the call's steps are used up, and it goes on later.
pub fn gather_matches(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    filter: &Filter<'_>,
    snapshot: u64,
    cursor: &mut Cursor,
) -> Result<Option<ScanRest>, Fail> {
    if wire::is_empty(&cursor.range) {
        return Ok(Some(ScanRest::None));
    }
    let Execution { host, db, request, tx } = exec;
    let Database { catalog, log, steps, .. } = &mut **db;
    let (tx, out) = (&**tx, &mut request.out);
    let range = cursor.range.clone();
    let range = (borrow(&range.0), borrow(&range.1));
    let index = catalog.index(op.table, op.index)?;
    let own = tx.writes.get(&(op.table, op.index));
    let mut merge = Merge::new(index, own, range, op.has(op_flag::BACKWARD), snapshot);
    let mut chunk = Chunk::default();
    let (rows, mut last) = (op.extra as u32, None);
    let end = loop {
        let Some((key, slot)) = merge.step() else { break Some(ScanRest::None) };
        if slot.is_some() && rows != 0 && cursor.rows >= rows {
            break Some(ScanRest::More);
        }
        if slot.is_some() && cursor.examined >= filter.examine {
            break Some(ScanRest::Examined);
        }
        *steps = steps.saturating_sub(1);
        last = Some(key);
        if let Some(slot) = slot {
            cursor.examined += 1;
            if filter.takes_key(key) {
                let mut primary = Vec::new();
                let value =
                    resolve(&mut **host, catalog, log, tx, op, slot, snapshot, &mut primary)?;
                if let Some(value) = value {
                    *steps = steps.saturating_sub(1 + value.len() as u64 / 4096);
                    let value =
                        (filter.wants_values || !op.has(op_flag::KEYS_ONLY)).then_some(value);
                    let found = FoundRow { key, primary: &primary, value };
                    found.put(&mut chunk.bytes, tx, &mut chunk.unread)?;
                    chunk.rows += 1;
                }
            }
        }
        if chunk.is_full() {
            read_values(&mut **host, log, &mut chunk.bytes, &chunk.unread)?;
            if !chunk.move_matches(filter, op, cursor, out)? {
                return Ok(Some(ScanRest::More));
            }
        }
        if *steps == 0 {
            break None;
        }
    };
    read_values(&mut **host, log, &mut chunk.bytes, &chunk.unread)?;
    if !chunk.move_matches(filter, op, cursor, out)? {
        return Ok(Some(ScanRest::More));
    }
    if let Some(key) = last {
        move_behind(cursor, op, key);
    }
    Ok(end)
}

/// Whether a filter takes an entry as it was committed last.
pub fn is_match(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    filter: &Filter<'_>,
    (key, slot): (&[u8], &Slot),
) -> Result<bool, Fail> {
    if !filter.takes_key(key) || !filter.wants_values {
        return Ok(filter.takes_key(key));
    }
    let (visible, mut primary) = (exec.db.versions.visible, Vec::new());
    let Execution { host, db, tx, .. } = exec;
    let Database { catalog, log, steps, .. } = &mut **db;
    let value = resolve(&mut **host, catalog, log, tx, op, slot, visible, &mut primary)?;
    let Some(value) = value.cloned() else { return Ok(false) };
    *steps = steps.saturating_sub(1 + value.len() as u64 / 4096);
    Ok(filter.takes_value(&bytes_of(&mut **host, log, tx, &value)?))
}
