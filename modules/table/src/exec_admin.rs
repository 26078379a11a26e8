//! Ops about other things than entries, most of them alone in their batch: tables, counters, statistics, prepared transactions.

use alloc::vec::Vec;
use core::ops::Bound;

use guest_abi::table::{Auto, Count, IndexStat, MAX_TABLES, Opened, Speaks, VERSION, op};
use sdk::Host;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::catalog::text;
use crate::clients::Running;
use crate::deed::{Change, change};
use crate::exec_read::borrow;
use crate::fail::{Fail, fail};
use crate::lock::Resource;
use crate::map::Merge;
use crate::memory::SPARE_BYTES;
use crate::record::kind;
use crate::reserve::Purpose;
use crate::run::{Act, Next};
use crate::store::Store;
use crate::wire::{self, MAX_REPLY_BYTES, OpRef, ROW_BYTES};

/// How far the log's ceiling of a counter is above its value.
const AUTO_STEP: u64 = 1024;
/// So many keys from either end of a range are looked at for an estimate.
const SAMPLE: usize = 500;

fn answer(run: &mut Running, bytes: &[u8]) {
    let at = wire::begin_answer(&mut run.out);
    run.out.extend_from_slice(bytes);
    wire::end_answer(&mut run.out, at, run.op, 0, 0);
    run.answers += 1;
}

impl Store {
    pub(crate) fn exec_alone(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
    ) -> Result<Next, Fail> {
        match op.kind {
            op::LIST_PREPARED => self.list_prepared(act.run),
            op::CREATE => self.create(host, act.run, op)?,
            op::OPEN => {
                let number = self.catalog.find(op.key)?;
                self.answer_opened(act.run, number, true)?;
            }
            op::DROP => {
                let table = self.catalog.find(op.key)?;
                self.change_unused(host, act.run, change::DROP, table)?;
            }
            op::RENAME => self.rename(host, act.run, op)?,
            op::TRUNCATE => {
                self.catalog.table(op.table)?;
                self.change_unused(host, act.run, change::TRUNCATE, op.table)?;
            }
            op::REDEFINE => {
                self.catalog.table(op.table)?;
                self.check_memory(op.value.len() as u64 + SPARE_BYTES)?;
                let change = Self::change_of(act.run, change::REDEFINE, op.table);
                self.change(host, act.run, &Change { definition: op.value, ..change })?;
            }
            op::LIST => self.list(act.run, op),
            op::STAT => self.stat(act.run, op)?,
            op::NEXT_AUTO => self.next_auto(host, act.run, op)?,
            op::RAISE_AUTO => self.raise_auto(host, act.run, op)?,
            op::SYNC => self.sync(host, act.run)?,
            op::VERSION => {
                let speaks = Speaks { version: U32::new(VERSION), reserved: U32::ZERO };
                answer(act.run, speaks.as_bytes());
            }
            kind => return Err(fail!(BAD_REQUEST, "op of kind {kind} at the wrong place")),
        }
        Ok(Next::Op)
    }

    fn change_of(run: &Running, kind: u8, table: u32) -> Change<'static> {
        let note = run.note;
        Change { kind, indexes: 0, table, auto: 0, note, name: &[], definition: &[] }
    }

    /// Changes tables: first in the log, then in memory.
    fn change(
        &mut self,
        host: &mut dyn Host,
        run: &mut Running,
        change: &Change<'_>,
    ) -> Result<(), Fail> {
        self.flush(host);
        let frees = matches!(change.kind, change::DROP | change::TRUNCATE);
        let purpose = if frees { Purpose::Free } else { Purpose::Change };
        self.log.write(host, kind::CATALOG, purpose, |out| change.put(out))?;
        let before = self.catalog.weight(change.table);
        self.catalog.apply(change);
        let memory =
            (self.log.books.memory + self.catalog.weight(change.table)).saturating_sub(before);
        self.log.books.memory = memory;
        if change.kind != change::AUTO {
            self.remembered.add(change.note);
            run.to.durable = true;
        }
        Ok(())
    }

    fn change_unused(
        &mut self,
        host: &mut dyn Host,
        run: &mut Running,
        kind: u8,
        table: u32,
    ) -> Result<(), Fail> {
        if self.locks.is_used(Resource::Table(table)) {
            return Err(fail!(BUSY, "table {table}: transactions have locks in it"));
        }
        self.change(host, run, &Self::change_of(run, kind, table))
    }

    fn create(
        &mut self,
        host: &mut dyn Host,
        run: &mut Running,
        op: &OpRef<'_>,
    ) -> Result<(), Fail> {
        if self.catalog.names.contains_key(op.key) {
            return Err(fail!(TABLE_EXISTS, "there is a table {:?}", text(op.key)));
        }
        if self.catalog.tables.len() >= MAX_TABLES || self.catalog.next == u32::MAX {
            return Err(fail!(LIMIT, "tables: the limit is {MAX_TABLES}"));
        }
        self.check_memory((op.key.len() + op.value.len()) as u64 + SPARE_BYTES)?;
        let number = self.catalog.next.max(1);
        let indexes = op.extra as u8;
        let change = Self::change_of(run, change::CREATE, number);
        let change = Change { indexes, name: op.key, definition: op.value, ..change };
        self.change(host, run, &change)?;
        self.answer_opened(run, number, false)
    }

    fn answer_opened(&self, run: &mut Running, number: u32, define: bool) -> Result<(), Fail> {
        let table = self.catalog.table(number)?;
        let opened = Opened {
            table: U32::new(number),
            indexes: U32::new(table.indexes.len() as u32),
            next_auto: U64::new(table.next_auto),
        };
        let definition: &[u8] = if define { &table.definition } else { &[] };
        answer(run, &[opened.as_bytes(), definition].concat());
        Ok(())
    }

    fn rename(
        &mut self,
        host: &mut dyn Host,
        run: &mut Running,
        op: &OpRef<'_>,
    ) -> Result<(), Fail> {
        let table = self.catalog.find(op.key)?;
        if self.catalog.names.get(op.value).is_some_and(|other| *other != table) {
            return Err(fail!(TABLE_EXISTS, "there is a table {:?}", text(op.value)));
        }
        let change = Self::change_of(run, change::RENAME, table);
        self.change(host, run, &Change { name: op.value, ..change })
    }

    fn list(&mut self, run: &mut Running, op: &OpRef<'_>) {
        let low = if op.key.is_empty() { Bound::Unbounded } else { Bound::Excluded(op.key) };
        let limit = |part: u64| if part == 0 { u64::from(u32::MAX) } else { part };
        let (most_rows, most_bytes) =
            (limit(op.extra & u64::from(u32::MAX)), limit(op.extra >> 32));
        let at = wire::begin_answer(&mut run.out);
        let (mut rows, mut bytes, mut more) = (0_u32, 0_u64, false);
        for (name, number) in self.catalog.names.range::<[u8], _>((low, Bound::Unbounded)) {
            let Some(table) = self.catalog.tables.get(number) else { continue };
            let len = name.len() + table.definition.len();
            bytes += len as u64;
            let full = u64::from(rows) >= most_rows || bytes > most_bytes;
            if rows > 0 && (full || run.out.len() + ROW_BYTES + len > MAX_REPLY_BYTES) {
                more = true;
                break;
            }
            wire::put_row(&mut run.out, name.len(), 0, table.definition.len());
            run.out.extend_from_slice(name);
            run.out.extend_from_slice(&table.definition);
            rows += 1;
        }
        wire::end_answer(&mut run.out, at, run.op, rows, u32::from(more));
        run.answers += 1;
    }

    fn list_prepared(&mut self, run: &mut Running) {
        let at = wire::begin_answer(&mut run.out);
        for name in self.prepared.keys() {
            wire::put_row(&mut run.out, name.len(), 0, 0);
            run.out.extend_from_slice(name);
        }
        wire::end_answer(&mut run.out, at, run.op, self.prepared.len() as u32, 0);
        run.answers += 1;
    }

    fn stat(&mut self, run: &mut Running, op: &OpRef<'_>) -> Result<(), Fail> {
        let mut bytes = Vec::new();
        for index in &self.catalog.table(op.table)?.indexes {
            let stat = IndexStat {
                entries: U64::new(index.entries),
                key_bytes: U64::new(index.key_bytes),
                value_bytes: U64::new(index.value_bytes),
            };
            bytes.extend_from_slice(stat.as_bytes());
        }
        answer(run, &bytes);
        Ok(())
    }

    /// Sees to it that a restart does not give values of the counter below `next` again.
    fn log_auto(
        &mut self,
        host: &mut dyn Host,
        run: &mut Running,
        table: u32,
        next: u64,
    ) -> Result<(), Fail> {
        self.log.writable()?;
        if next > self.catalog.table(table)?.logged_auto {
            let auto = next.saturating_add(AUTO_STEP);
            self.change(host, run, &Change { auto, ..Self::change_of(run, change::AUTO, table) })?;
        }
        self.catalog.table_mut(table)?.next_auto = next;
        Ok(())
    }

    fn next_auto(
        &mut self,
        host: &mut dyn Host,
        run: &mut Running,
        op: &OpRef<'_>,
    ) -> Result<(), Fail> {
        let first = self.catalog.table(op.table)?.next_auto;
        let Some(next) = first.checked_add(op.extra) else {
            return Err(fail!(LIMIT, "table {}: its counter is at {first}", op.table));
        };
        self.log_auto(host, run, op.table, next)?;
        answer(run, Auto { first: U64::new(first) }.as_bytes());
        Ok(())
    }

    fn raise_auto(
        &mut self,
        host: &mut dyn Host,
        run: &mut Running,
        op: &OpRef<'_>,
    ) -> Result<(), Fail> {
        if op.extra > self.catalog.table(op.table)?.next_auto {
            self.log_auto(host, run, op.table, op.extra)?;
        }
        Ok(())
    }

    /// SYNC: the reply waits like a commit's, whatever was relaxed before.
    fn sync(&mut self, host: &mut dyn Host, run: &mut Running) -> Result<(), Fail> {
        self.flush(host);
        self.log.writable()?;
        run.to.durable = true;
        Ok(())
    }

    /// ESTIMATE.
    pub(crate) fn estimate(&mut self, act: &mut Act<'_>, op: &OpRef<'_>) -> Result<Next, Fail> {
        let snapshot = self.snapshot(act.tx);
        let index = self.catalog.index(op.table, op.index)?;
        let range = wire::bounds(op);
        let (mut entries, mut exact) = (0, true);
        if !wire::is_empty(&range) {
            let own = act.tx.writes.get(&(op.table, op.index));
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
        self.steps = self.steps.saturating_sub(entries.min(4 * SAMPLE as u64));
        let count = Count { entries: U64::new(entries), exact: U64::new(u64::from(exact)) };
        answer(act.run, count.as_bytes());
        Ok(Next::Op)
    }
}

/// How many keys there are from the first of `low` to the first of `high`, if they lie as close to each
/// other as those that were looked at.
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
