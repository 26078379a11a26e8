//! Scans with filters: what may match by its key is read a chunk at a time, and what matches goes into the
//! answer.

use alloc::vec::Vec;

use guest_abi::table::{MAX_KEY_BYTES, Row, op_flag};
use sdk::Host;
use zerocopy::FromBytes;

use crate::clients::Cursor;
use crate::exec_read::{Found, More, Room, Wanted, after, borrow, bytes_of, read_all, resolve};
use crate::fail::Fail;
use crate::filter::Filter;
use crate::map::{Merge, Slot};
use crate::run::Act;
use crate::store::Store;
use crate::wire::{self, OpRef};

/// So many bytes, or rows, are read together: what is read beyond a limit is read for nothing.
const CHUNK_BYTES: usize = 256 << 10;
const CHUNK_ROWS: u32 = 256;

/// Rows that may match.
#[derive(Default)]
struct Chunk {
    bytes: Vec<u8>,
    wanted: Vec<Wanted>,
    rows: u32,
}

impl Chunk {
    fn is_full(&self) -> bool {
        self.bytes.len() >= CHUNK_BYTES || self.rows >= CHUNK_ROWS
    }

    /// Moves what matches to the answer. False: it does not fit any more.
    fn sift(
        &mut self,
        filter: &Filter<'_>,
        op: &OpRef<'_>,
        cursor: &mut Cursor,
        out: &mut Vec<u8>,
    ) -> Result<bool, Fail> {
        let mut room = Room::new(op, cursor, out.len() + MAX_KEY_BYTES);
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
        self.wanted.clear();
        self.bytes.clear();
        Ok(true)
    }
}

impl Store {
    /// Puts rows that match into the answer. None: the steps are used up.
    pub(crate) fn gather_matches(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        filter: &Filter<'_>,
        snapshot: u64,
        cursor: &mut Cursor,
    ) -> Result<Option<More>, Fail> {
        if wire::is_empty(&cursor.range) {
            return Ok(Some(More::No));
        }
        let Self { catalog, log, steps, .. } = self;
        let (tx, out) = (&*act.tx, &mut act.run.out);
        let range = cursor.range.clone();
        let range = (borrow(&range.0), borrow(&range.1));
        let index = catalog.index(op.table, op.index)?;
        let own = tx.writes.get(&(op.table, op.index));
        let mut merge = Merge::new(index, own, range, op.has(op_flag::BACKWARD), snapshot);
        let mut chunk = Chunk::default();
        let (rows, mut last) = (op.extra as u32, None);
        let end = loop {
            let Some((key, slot)) = merge.step() else { break Some(More::No) };
            if slot.is_some() && rows != 0 && cursor.rows >= rows {
                break Some(More::Yes);
            }
            if slot.is_some() && cursor.examined >= filter.examine {
                break Some(More::Examined);
            }
            *steps = steps.saturating_sub(1);
            last = Some(key);
            if let Some(slot) = slot {
                cursor.examined += 1;
                if filter.takes_key(key) {
                    let mut primary = Vec::new();
                    let value = resolve(host, catalog, log, tx, op, slot, snapshot, &mut primary)?;
                    if let Some(value) = value {
                        *steps = steps.saturating_sub(1 + value.len() as u64 / 4096);
                        let value =
                            (filter.wants_values || !op.has(op_flag::KEYS_ONLY)).then_some(value);
                        let found = Found { key, primary: &primary, value };
                        found.put(&mut chunk.bytes, tx, &mut chunk.wanted)?;
                        chunk.rows += 1;
                    }
                }
            }
            if chunk.is_full() {
                read_all(host, log, &mut chunk.bytes, &chunk.wanted)?;
                if !chunk.sift(filter, op, cursor, out)? {
                    return Ok(Some(More::Yes));
                }
            }
            if *steps == 0 {
                break None;
            }
        };
        read_all(host, log, &mut chunk.bytes, &chunk.wanted)?;
        if !chunk.sift(filter, op, cursor, out)? {
            return Ok(Some(More::Yes));
        }
        if let Some(key) = last {
            after(cursor, op, key);
        }
        Ok(end)
    }

    /// Whether a filter takes an entry as it was committed last.
    pub(crate) fn is_match(
        &mut self,
        host: &mut dyn Host,
        act: &Act<'_>,
        op: &OpRef<'_>,
        filter: &Filter<'_>,
        (key, slot): (&[u8], &Slot),
    ) -> Result<bool, Fail> {
        if !filter.takes_key(key) || !filter.wants_values {
            return Ok(filter.takes_key(key));
        }
        let (visible, mut primary) = (self.visible, Vec::new());
        let Self { catalog, log, steps, .. } = self;
        let value = resolve(host, catalog, log, act.tx, op, slot, visible, &mut primary)?;
        let Some(value) = value.cloned() else { return Ok(false) };
        *steps = steps.saturating_sub(1 + value.len() as u64 / 4096);
        Ok(filter.takes_value(&bytes_of(host, log, act.tx, &value)?))
    }
}
