//! Transaction: its writes, how they are undone, the locks that it holds.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::lock::{Resource, covers};
use crate::log::Place;
use crate::map::{ENTRY_BYTES, IndexId, Write, Writes};
use crate::record_body::{LOCKED, log_op, put_op};
use crate::reserve::Purpose;
use crate::segment::Usage;
use crate::slot::{INLINE_BYTES, Loc, Slot};

/// Ops of a transaction that are in the log before its commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spill {
    /// First of their bytes, counted over all ops of the transaction.
    pub at: u64,
    /// Place of that byte in the log.
    pub place: Place,
}

/// Value that a write replaced.
#[derive(Debug)]
struct Undo {
    index: IndexId,
    key: Box<[u8]>,
    old: Option<Write>,
}

impl Undo {
    fn cost(&self) -> u64 {
        ENTRY_BYTES + self.key.len() as u64
    }
}

const SAVEPOINT_BYTES: u64 = size_of::<Savepoint>() as u64;

/// Savepoints that are looked at in a step.
const SAVEPOINTS_PER_STEP: u64 = 256;

/// Savepoint: a moment of a transaction to go back to.
#[derive(Debug, Clone, Copy)]
pub struct Savepoint {
    /// Number that the client gave it.
    pub number: u64,
    undo: usize,
    count: u32,
    puts: u32,
    bytes: u64,
}

/// Transaction.
#[derive(Debug, Default)]
pub struct Tx {
    /// Number that the store gave it.
    pub id: u64,
    /// Client that it belongs to; meaningless once it is prepared.
    pub client: u32,
    /// Commit up to which its reads see.
    pub snapshot: Option<u64>,
    /// Writes by index.
    pub writes: BTreeMap<IndexId, Writes>,
    /// Ops since the last spill, as the log will have them.
    pub ops: Vec<u8>,
    /// Bytes of ops that were spilled before these.
    ops_at: u64,
    /// Number of ops that count.
    count: u32,
    /// Number of ops that give an entry a value.
    puts: u32,
    /// Bytes of the values in `ops` that do not stay in memory.
    large_bytes: u64,
    /// Ops that are in the log already.
    pub spills: Vec<Spill>,
    /// Beginning of its first record in the log, while it is not committed.
    pub begun: Option<Place>,
    undo: Vec<Undo>,
    /// Savepoints in the order of their moments.
    savepoints: Vec<Savepoint>,
    /// Highest number that a savepoint has had.
    highest: u64,
    /// Locks that it holds.
    pub held: Vec<Resource>,
    /// Tables that it has locked, with the modes.
    pub tables: Vec<(u32, u8)>,
    /// Estimate of the memory it costs, in bytes.
    pub memory: u64,
}

impl Tx {
    /// Begins a transaction of a client.
    pub fn new(id: u64, client: u32) -> Self {
        Self { id, client, ..Self::default() }
    }

    /// Whether it has anything to commit.
    pub fn has_writes(&self) -> bool {
        !self.writes.is_empty() || !self.spills.is_empty()
    }

    /// Purpose of its records.
    pub fn purpose(&self) -> Purpose {
        if self.puts == 0 { Purpose::Free } else { Purpose::Change }
    }

    /// Modes in which it has locked a table.
    pub fn table_mode(&self, table: u32) -> u8 {
        self.tables.iter().find(|(t, _)| *t == table).map_or(0, |(_, m)| *m)
    }

    /// Whether its lock of the table is as good as locks of keys.
    pub fn has_table(&self, table: u32, mode: u8) -> bool {
        covers(self.table_mode(table), mode)
    }

    /// Adds a lock of a table.
    pub fn add_table_lock(&mut self, table: u32, mode: u8) {
        match self.tables.iter_mut().find(|(t, _)| *t == table) {
            Some((_, held)) => *held |= mode,
            None => self.tables.push((table, mode)),
        }
    }

    /// Write of a key by this transaction, if there is one.
    pub fn write_of(&self, index: IndexId, key: &[u8]) -> Option<&Write> {
        self.writes.get(&index)?.get(key)
    }

    /// Writes a value, or a deletion.
    pub fn put(
        &mut self,
        index: IndexId,
        key: &[u8],
        value: Option<&[u8]>,
        locked: bool,
        usage: &mut Usage,
    ) {
        let flags = if locked { LOCKED } else { 0 };
        let kind = if value.is_some() { log_op::PUT } else { log_op::DELETE };
        let at = put_op(&mut self.ops, kind, index, flags, key, value.unwrap_or(&[]));
        self.count = self.count.saturating_add(1);
        self.puts = self.puts.saturating_add(u32::from(value.is_some()));
        let slot = match value {
            None => Slot::Deleted,
            Some(value) if value.len() <= INLINE_BYTES => Slot::Inline(value.into()),
            Some(value) => {
                self.large_bytes += value.len() as u64;
                Slot::Own { at: self.ops_at + at as u64, len: value.len() as u32 }
            }
        };
        let cost = ENTRY_BYTES + (key.len() + slot_cost(&slot)) as u64;
        let old = self.writes.entry(index).or_default().insert(key.into(), Write { slot, locked });
        let mut more = if old.is_none() { cost } else { 0 };
        if value.is_some_and(|value| value.len() > INLINE_BYTES) {
            more += value.map_or(0, <[u8]>::len) as u64;
        }
        if !self.savepoints.is_empty() {
            let undo = Undo { index, key: key.into(), old };
            more += undo.cost();
            self.undo.push(undo);
        }
        self.memory += more;
        usage.memory += more;
    }

    /// Makes a savepoint; one that had the number before is forgotten.
    pub fn save(&mut self, number: u64, steps: &mut u64, usage: &mut Usage) {
        // Numbers that grow are not looked for.
        if number <= self.highest
            && let Some(place) = self.savepoints.iter().rposition(|s| s.number == number)
        {
            *steps =
                steps.saturating_sub((self.savepoints.len() - place) as u64 / SAVEPOINTS_PER_STEP);
            self.savepoints.remove(place);
            self.give_back(SAVEPOINT_BYTES, usage);
        }
        self.highest = self.highest.max(number);
        let (undo, count, puts) = (self.undo.len(), self.count, self.puts);
        let bytes = self.ops_at + self.ops.len() as u64;
        self.savepoints.push(Savepoint { number, undo, count, puts, bytes });
        self.memory += SAVEPOINT_BYTES;
        usage.memory += SAVEPOINT_BYTES;
    }

    fn give_back(&mut self, bytes: u64, usage: &mut Usage) {
        self.memory = self.memory.saturating_sub(bytes);
        usage.memory = usage.memory.saturating_sub(bytes);
    }

    /// Forgets a savepoint and those after it. False: there is no such savepoint.
    pub fn release(&mut self, number: u64, steps: &mut u64, usage: &mut Usage) -> bool {
        let Some(place) = self.savepoints.iter().rposition(|s| s.number == number) else {
            return false;
        };
        let mut bytes = (self.savepoints.len() - place) as u64 * SAVEPOINT_BYTES;
        self.savepoints.truncate(place);
        // Without a savepoint nothing is undone. What the steps are too few for stays, for no use.
        while self.savepoints.is_empty()
            && *steps > 0
            && let Some(undo) = self.undo.pop()
        {
            *steps -= 1;
            bytes += undo.cost();
        }
        self.give_back(bytes, usage);
        true
    }

    /// Undoes the writes since a savepoint, as far as `steps` go. None: there is no such savepoint.
    /// False: there is more to undo.
    pub fn roll_back_to(&mut self, number: u64, steps: &mut u64) -> Option<bool> {
        let place = self.savepoints.iter().rposition(|s| s.number == number)?;
        let to = *self.savepoints.get(place)?;
        while self.undo.len() > to.undo {
            if *steps == 0 {
                return Some(false);
            }
            *steps -= 1;
            let Some(undo) = self.undo.pop() else { break };
            let Some(writes) = self.writes.get_mut(&undo.index) else { continue };
            match undo.old {
                Some(old) => drop(writes.insert(undo.key, old)),
                None => drop(writes.remove(&undo.key)),
            }
            if writes.is_empty() {
                self.writes.remove(&undo.index);
            }
        }
        self.savepoints.truncate(place + 1);
        (self.count, self.puts) = (to.count, to.puts);
        if let Some(keep) = to.bytes.checked_sub(self.ops_at) {
            self.ops.truncate(keep as usize);
        } else {
            self.ops.clear();
            put_op(&mut self.ops, log_op::UNDO, (to.count, 0), 0, &[], &[]);
        }
        Some(true)
    }

    /// Moves the ops out of memory: they are in the log.
    pub fn move_ops_to_log(&mut self, place: Place, usage: &mut Usage) {
        usage.pin(place.segment);
        usage.segments.entry(place.segment).or_default().values += self.large_bytes;
        self.spills.push(Spill { at: self.ops_at, place });
        self.ops_at += self.ops.len() as u64;
        self.ops = Vec::new();
        self.memory = self.memory.saturating_sub(self.large_bytes);
        usage.memory = usage.memory.saturating_sub(self.large_bytes);
        self.large_bytes = 0;
    }

    /// Place in the log of a value of its own, if it is there already.
    pub fn resolve(&self, at: u64, len: u32) -> Option<Loc> {
        let after = self.spills.partition_point(|s| s.at <= at);
        if at >= self.ops_at {
            return None;
        }
        let spill = self.spills.get(after.checked_sub(1)?)?;
        let offset = u64::from(spill.place.offset) + (at - spill.at);
        Some(Loc { segment: spill.place.segment, offset: offset as u32, len })
    }

    /// Bytes of a value of its own that is not in the log yet.
    pub fn bytes(&self, at: u64, len: u32) -> Option<&[u8]> {
        let from = at.checked_sub(self.ops_at)? as usize;
        self.ops.get(from..from + len as usize)
    }

    /// Value of its own as others refer to it.
    pub fn settle(&self, slot: Slot) -> Slot {
        match slot {
            Slot::Own { at, len } => self.resolve(at, len).map_or(Slot::Deleted, Slot::At),
            slot => slot,
        }
    }

    /// Forgets its writes, as far as `steps` go. True: none is left.
    pub fn forget_writes(&mut self, steps: &mut u64) -> bool {
        while *steps > 0 {
            let Some(mut first) = self.writes.first_entry() else { break };
            match first.get_mut().pop_first() {
                Some(_) => *steps -= 1,
                None => drop(first.remove()),
            }
        }
        let keep = self.undo.len().saturating_sub(*steps as usize);
        *steps -= (self.undo.len() - keep) as u64;
        self.undo.truncate(keep);
        self.writes.is_empty() && self.undo.is_empty()
    }
}

impl Tx {
    /// Takes one of its writes out.
    pub fn pop_write(&mut self) -> Option<(IndexId, Box<[u8]>, Write)> {
        loop {
            let mut first = self.writes.first_entry()?;
            let index = *first.key();
            match first.get_mut().pop_first() {
                Some((key, write)) => return Some((index, key, write)),
                None => drop(first.remove()),
            }
        }
    }
}

fn slot_cost(slot: &Slot) -> usize {
    match slot {
        Slot::Inline(bytes) => bytes.len(),
        _ => 0,
    }
}
