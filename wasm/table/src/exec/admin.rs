//! Ops about other things than entries, most of them alone in their batch: tables, counters,
//! statistics, prepared transactions.

use alloc::vec::Vec;
use core::ops::Bound;

use guest_abi::table::{Auto, Count, IndexStat, MAX_TABLES, Opened, Speaks, VERSION, op};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::catalog::text;
use crate::clients::ActiveRequest;
use crate::exec::context::{Execution, OpProgress};
use crate::exec::rows::borrow;
use crate::fail::{Fail, fail};
use crate::lock::Resource;
use crate::map::Merge;
use crate::memory::SPARE_BYTES;
use crate::op::OpRef;
use crate::record::kind;
use crate::record_body::{Change, change};
use crate::reserve::Purpose;
use crate::wire::{self, MAX_REPLY_BYTES, ROW_BYTES};

/// Distance of the log's ceiling of a counter from its value.
const AUTO_STEP: u64 = 1024;
/// Keys from either end of a range that are looked at for an estimate.
const SAMPLE: usize = 500;

/// Appends an answer.
fn answer(request: &mut ActiveRequest, bytes: &[u8]) {
    let at = wire::begin_answer(&mut request.out);
    request.out.extend_from_slice(bytes);
    wire::end_answer(&mut request.out, at, request.op, 0, 0);
    request.answers += 1;
}

/// Executes an op.
pub fn execute(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
    match op.kind {
        op::LIST_PREPARED => list_prepared(exec),
        op::CREATE => create(exec, op)?,
        op::OPEN => {
            let number = exec.db.catalog.find(op.key)?;
            answer_opened(exec, number, true)?;
        }
        op::DROP => {
            let table = exec.db.catalog.find(op.key)?;
            change_unused(exec, change::DROP, table)?;
        }
        op::RENAME => rename(exec, op)?,
        op::TRUNCATE => {
            exec.db.catalog.table(op.table)?;
            change_unused(exec, change::TRUNCATE, op.table)?;
        }
        op::REDEFINE => {
            exec.db.catalog.table(op.table)?;
            exec.db.check_memory(op.value.len() as u64 + SPARE_BYTES)?;
            let change = change_of(exec.request, change::REDEFINE, op.table);
            log_change(exec, &Change { definition: op.value, ..change })?;
        }
        op::LIST => list(exec, op),
        op::STAT => stat(exec, op)?,
        op::NEXT_AUTO => next_auto(exec, op)?,
        op::RAISE_AUTO => raise_auto(exec, op)?,
        op::SYNC => sync(exec)?,
        op::VERSION => {
            let speaks = Speaks { version: U32::new(VERSION), reserved: U32::ZERO };
            answer(exec.request, speaks.as_bytes());
        }
        kind => return Err(fail!(BAD_REQUEST, "op of kind {kind} at the wrong place")),
    }
    Ok(OpProgress::Done)
}

fn change_of(request: &ActiveRequest, kind: u8, table: u32) -> Change<'static> {
    let request_id = request.request_id;
    Change { kind, indexes: 0, table, auto: 0, request_id, name: &[], definition: &[] }
}

/// Changes tables: first in the log, then in memory.
fn log_change(exec: &mut Execution<'_>, change: &Change<'_>) -> Result<(), Fail> {
    exec.db.append_staged(exec.host);
    let frees = matches!(change.kind, change::DROP | change::TRUNCATE);
    let purpose = if frees { Purpose::Free } else { Purpose::Change };
    exec.db.log.write(exec.host, kind::CATALOG, purpose, |out| change.put(out))?;
    let before = exec.db.catalog.memory_of(change.table);
    exec.db.catalog.apply(change);
    let memory =
        (exec.db.log.usage.memory + exec.db.catalog.memory_of(change.table)).saturating_sub(before);
    exec.db.log.usage.memory = memory;
    if change.kind != change::AUTO {
        exec.db.remembered.add(change.request_id);
        exec.request.to.durable = true;
    }
    Ok(())
}

fn change_unused(exec: &mut Execution<'_>, kind: u8, table: u32) -> Result<(), Fail> {
    if exec.db.locks.is_used(Resource::Table(table)) {
        return Err(fail!(BUSY, "table {table}: transactions have locks in it"));
    }
    log_change(exec, &change_of(exec.request, kind, table))
}

fn create(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<(), Fail> {
    if exec.db.catalog.names.contains_key(op.key) {
        return Err(fail!(TABLE_EXISTS, "there is a table {:?}", text(op.key)));
    }
    if exec.db.catalog.tables.len() >= MAX_TABLES || exec.db.catalog.next == u32::MAX {
        return Err(fail!(LIMIT, "tables: the limit is {MAX_TABLES}"));
    }
    exec.db.check_memory((op.key.len() + op.value.len()) as u64 + SPARE_BYTES)?;
    let number = exec.db.catalog.next.max(1);
    let indexes = op.extra as u8;
    let change = change_of(exec.request, change::CREATE, number);
    let change = Change { indexes, name: op.key, definition: op.value, ..change };
    log_change(exec, &change)?;
    answer_opened(exec, number, false)
}

fn answer_opened(exec: &mut Execution<'_>, number: u32, define: bool) -> Result<(), Fail> {
    let table = exec.db.catalog.table(number)?;
    let opened = Opened {
        table: U32::new(number),
        indexes: U32::new(table.indexes.len() as u32),
        next_auto: U64::new(table.next_auto),
    };
    let definition: &[u8] = if define { &table.definition } else { &[] };
    answer(exec.request, &[opened.as_bytes(), definition].concat());
    Ok(())
}

fn rename(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<(), Fail> {
    let table = exec.db.catalog.find(op.key)?;
    if exec.db.catalog.names.get(op.value).is_some_and(|other| *other != table) {
        return Err(fail!(TABLE_EXISTS, "there is a table {:?}", text(op.value)));
    }
    let change = change_of(exec.request, change::RENAME, table);
    log_change(exec, &Change { name: op.value, ..change })
}

fn list(exec: &mut Execution<'_>, op: &OpRef<'_>) {
    let request = &mut *exec.request;
    let low = if op.key.is_empty() { Bound::Unbounded } else { Bound::Excluded(op.key) };
    let limit = |part: u64| if part == 0 { u64::from(u32::MAX) } else { part };
    let (most_rows, most_bytes) = (limit(op.extra & u64::from(u32::MAX)), limit(op.extra >> 32));
    let at = wire::begin_answer(&mut request.out);
    let (mut rows, mut bytes, mut more) = (0_u32, 0_u64, false);
    for (name, number) in exec.db.catalog.names.range::<[u8], _>((low, Bound::Unbounded)) {
        let Some(table) = exec.db.catalog.tables.get(number) else { continue };
        let len = name.len() + table.definition.len();
        bytes += len as u64;
        let full = u64::from(rows) >= most_rows || bytes > most_bytes;
        if rows > 0 && (full || request.out.len() + ROW_BYTES + len > MAX_REPLY_BYTES) {
            more = true;
            break;
        }
        wire::put_row(&mut request.out, name.len(), 0, table.definition.len());
        request.out.extend_from_slice(name);
        request.out.extend_from_slice(&table.definition);
        rows += 1;
    }
    wire::end_answer(&mut request.out, at, request.op, rows, u32::from(more));
    request.answers += 1;
}

fn list_prepared(exec: &mut Execution<'_>) {
    let (request, prepared) = (&mut *exec.request, &exec.db.txs.prepared);
    let at = wire::begin_answer(&mut request.out);
    for name in prepared.keys() {
        wire::put_row(&mut request.out, name.len(), 0, 0);
        request.out.extend_from_slice(name);
    }
    wire::end_answer(&mut request.out, at, request.op, prepared.len() as u32, 0);
    request.answers += 1;
}

fn stat(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<(), Fail> {
    let mut bytes = Vec::new();
    for index in &exec.db.catalog.table(op.table)?.indexes {
        let stat = IndexStat {
            entries: U64::new(index.entries),
            key_bytes: U64::new(index.key_bytes),
            value_bytes: U64::new(index.value_bytes),
        };
        bytes.extend_from_slice(stat.as_bytes());
    }
    answer(exec.request, &bytes);
    Ok(())
}

/// Logs a counter, so that a restart does not give values below `next` again.
fn log_auto(exec: &mut Execution<'_>, table: u32, next: u64) -> Result<(), Fail> {
    exec.db.log.check_writable()?;
    if next > exec.db.catalog.table(table)?.logged_auto {
        let auto = next.saturating_add(AUTO_STEP);
        log_change(exec, &Change { auto, ..change_of(exec.request, change::AUTO, table) })?;
    }
    exec.db.catalog.table_mut(table)?.next_auto = next;
    Ok(())
}

fn next_auto(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<(), Fail> {
    let first = exec.db.catalog.table(op.table)?.next_auto;
    let Some(next) = first.checked_add(op.extra) else {
        return Err(fail!(LIMIT, "table {}: its counter is at {first}", op.table));
    };
    log_auto(exec, op.table, next)?;
    answer(exec.request, Auto { first: U64::new(first) }.as_bytes());
    Ok(())
}

fn raise_auto(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<(), Fail> {
    if op.extra > exec.db.catalog.table(op.table)?.next_auto {
        log_auto(exec, op.table, op.extra)?;
    }
    Ok(())
}

/// Executes SYNC: the reply waits like a commit's, whatever was relaxed before.
fn sync(exec: &mut Execution<'_>) -> Result<(), Fail> {
    exec.db.append_staged(exec.host);
    exec.db.log.check_writable()?;
    exec.request.to.durable = true;
    Ok(())
}

/// Executes ESTIMATE.
pub fn estimate(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
    let snapshot = exec.db.versions.snapshot(exec.tx);
    let index = exec.db.catalog.index(op.table, op.index)?;
    let range = wire::bounds(op);
    let (mut entries, mut exact) = (0, true);
    if !wire::is_empty(&range) {
        let own = exec.tx.writes.get(&(op.table, op.index));
        let bounds = (borrow(&range.0), borrow(&range.1));
        let mut sides = [false, true].map(|back| {
            let mut merge = Merge::new(index, own, bounds, back, snapshot);
            let mut keys = Vec::new();
            for _ in 0..2 * SAMPLE {
                let Some((key, slot)) = merge.step() else { break };
                if slot.is_some() {
                    keys.push(key);
                }
            }
            (keys, merge.step().is_none())
        });
        let (low, whole) = &mut sides[0];
        entries = low.len() as u64;
        if !*whole {
            low.truncate(SAMPLE);
            let low = core::mem::take(low);
            sides[1].0.truncate(SAMPLE);
            entries = extrapolate(&low, &sides[1].0, index.entries);
            exact = false;
        }
    }
    exec.db.spend(entries.min(4 * SAMPLE as u64));
    let count = Count { entries: U64::new(entries), exact: U64::new(u64::from(exact)) };
    answer(exec.request, count.as_bytes());
    Ok(OpProgress::Done)
}

/// Estimates the number of keys from the first of `low` to the first of `high`, if they lie as
/// close to each other as those that were looked at.
fn extrapolate(low: &[&[u8]], high: &[&[u8]], all: u64) -> u64 {
    let seen = (low.len() + high.len()) as u64;
    let (Some(first), Some(last)) = (low.first(), high.first()) else { return seen };
    let (Some(low_end), Some(high_end)) = (low.last(), high.last()) else { return seen };
    let common = first.iter().zip(*last).take_while(|(a, b)| a == b).count();
    let place = |key: &[u8]| {
        let mut eight = [0; 8];
        let rest = key.get(common..).unwrap_or(&[]);
        let len = rest.len().min(8);
        eight[..len].copy_from_slice(&rest[..len]);
        u128::from(u64::from_be_bytes(eight))
    };
    let whole = place(last).saturating_sub(place(first));
    let covered =
        place(low_end).saturating_sub(place(first)) + place(last).saturating_sub(place(high_end));
    let guess = (u128::from(seen) * whole).checked_div(covered).unwrap_or(u128::from(all));
    u64::try_from(guess).unwrap_or(u64::MAX).clamp(seen, all.max(seen))
}
