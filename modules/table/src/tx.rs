//! A transaction: its writes, how they are undone, what it holds.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::deed::{LOCKED, log_op, put_op};
use crate::lock::{Resource, covers};
use crate::log::Place;
use crate::map::{ENTRY_BYTES, INLINE_BYTES, Loc, Slot, Write, Writes};
use crate::reserve::Purpose;
use crate::segment::Books;

/// An index of a table.
pub type Where = (u32, u8);

/// Ops that are in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spill {
    /// The first of their bytes, counted over all ops of the transaction.
    pub at: u64,
    /// Where that is in the log.
    pub place: Place,
}

/// What a write replaced.
#[derive(Debug)]
struct Undo {
    place: Where,
    key: Box<[u8]>,
    old: Option<Write>,
}

impl Undo {
    fn cost(&self) -> u64 {
        ENTRY_BYTES + self.key.len() as u64
    }
}

const SAVEPOINT_BYTES: u64 = size_of::<Savepoint>() as u64;

/// So many savepoints are looked at in a step.
const FEW: u64 = 256;

/// A moment to go back to.
#[derive(Debug, Clone, Copy)]
pub struct Savepoint {
    /// The client's number for it.
    pub number: u64,
    undo: usize,
    count: u32,
    puts: u32,
    bytes: u64,
}

/// A transaction.
#[derive(Debug, Default)]
pub struct Tx {
    /// The store's own number for it.
    pub id: u64,
    /// Whose it is; meaningless once it is prepared.
    pub client: u32,
    /// What its reads see.
    pub snapshot: Option<u64>,
    /// Its writes, by index.
    pub writes: BTreeMap<Where, Writes>,
    /// The ops since the last spill, as the log will have them.
    pub ops: Vec<u8>,
    /// How many bytes of ops there were before these.
    ops_at: u64,
    /// How many ops count.
    count: u32,
    /// How many of them give an entry a value.
    puts: u32,
    /// Bytes of large values in `ops`.
    large: u64,
    /// What is in the log already.
    pub spills: Vec<Spill>,
    /// Where the log's first record of it begins, while it is not committed.
    pub begun: Option<Place>,
    undo: Vec<Undo>,
    /// In the order of their moments.
    savepoints: Vec<Savepoint>,
    /// No savepoint has had a higher number.
    highest: u64,
    /// Its locks.
    pub held: Vec<Resource>,
    /// Its tables' locks, once more.
    pub tables: Vec<(u32, u8)>,
    /// What it costs, about.
    pub memory: u64,
}

impl Tx {
    /// One of a client.
    pub fn new(id: u64, client: u32) -> Self {
        Self { id, client, ..Self::default() }
    }

    /// Whether it has anything to commit.
    pub fn has_writes(&self) -> bool {
        !self.writes.is_empty() || !self.spills.is_empty()
    }

    /// What its records are for.
    pub fn purpose(&self) -> Purpose {
        if self.puts == 0 { Purpose::Free } else { Purpose::Change }
    }

    /// How it has locked a table.
    pub fn table_mode(&self, table: u32) -> u8 {
        self.tables.iter().find(|(t, _)| *t == table).map_or(0, |(_, m)| *m)
    }

    /// Whether its lock of the table is as good as locks of keys.
    pub fn has_table(&self, table: u32, mode: u8) -> bool {
        covers(self.table_mode(table), mode)
    }

    /// Notes a lock of a table.
    pub fn locked_table(&mut self, table: u32, mode: u8) {
        match self.tables.iter_mut().find(|(t, _)| *t == table) {
            Some((_, held)) => *held |= mode,
            None => self.tables.push((table, mode)),
        }
    }

    /// Its own write of a key.
    pub fn own(&self, place: Where, key: &[u8]) -> Option<&Write> {
        self.writes.get(&place)?.get(key)
    }

    /// Writes a value, or that there is none.
    pub fn put(
        &mut self,
        place: Where,
        key: &[u8],
        value: Option<&[u8]>,
        locked: bool,
        books: &mut Books,
    ) {
        let flags = if locked { LOCKED } else { 0 };
        let kind = if value.is_some() { log_op::PUT } else { log_op::DELETE };
        let at = put_op(&mut self.ops, kind, place, flags, key, value.unwrap_or(&[]));
        self.count = self.count.saturating_add(1);
        self.puts = self.puts.saturating_add(u32::from(value.is_some()));
        let slot = match value {
            None => Slot::Deleted,
            Some(value) if value.len() <= INLINE_BYTES => Slot::Inline(value.into()),
            Some(value) => {
                self.large += value.len() as u64;
                Slot::Own { at: self.ops_at + at as u64, len: value.len() as u32 }
            }
        };
        let cost = ENTRY_BYTES + (key.len() + slot_cost(&slot)) as u64;
        let old = self.writes.entry(place).or_default().insert(key.into(), Write { slot, locked });
        let mut more = if old.is_none() { cost } else { 0 };
        if value.is_some_and(|value| value.len() > INLINE_BYTES) {
            more += value.map_or(0, <[u8]>::len) as u64;
        }
        if !self.savepoints.is_empty() {
            let undo = Undo { place, key: key.into(), old };
            more += undo.cost();
            self.undo.push(undo);
        }
        self.memory += more;
        books.memory += more;
    }

    /// Gives this moment a number; the moment that had it is forgotten.
    pub fn save(&mut self, number: u64, steps: &mut u64, books: &mut Books) {
        // Numbers that grow are not looked for.
        if number <= self.highest
            && let Some(place) = self.savepoints.iter().rposition(|s| s.number == number)
        {
            *steps = steps.saturating_sub((self.savepoints.len() - place) as u64 / FEW);
            self.savepoints.remove(place);
            self.give_back(SAVEPOINT_BYTES, books);
        }
        self.highest = self.highest.max(number);
        let (undo, count, puts) = (self.undo.len(), self.count, self.puts);
        let bytes = self.ops_at + self.ops.len() as u64;
        self.savepoints.push(Savepoint { number, undo, count, puts, bytes });
        self.memory += SAVEPOINT_BYTES;
        books.memory += SAVEPOINT_BYTES;
    }

    fn give_back(&mut self, bytes: u64, books: &mut Books) {
        self.memory = self.memory.saturating_sub(bytes);
        books.memory = books.memory.saturating_sub(bytes);
    }

    /// Forgets a savepoint and those after it. False: there is no such savepoint.
    pub fn release(&mut self, number: u64, steps: &mut u64, books: &mut Books) -> bool {
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
        self.give_back(bytes, books);
        true
    }

    /// Undoes what was done since a savepoint, in up to so many steps, which are taken from `steps`. None:
    /// there is no such savepoint. False: there is more to undo.
    pub fn roll_back_to(&mut self, number: u64, steps: &mut u64) -> Option<bool> {
        let place = self.savepoints.iter().rposition(|s| s.number == number)?;
        let to = *self.savepoints.get(place)?;
        while self.undo.len() > to.undo {
            if *steps == 0 {
                return Some(false);
            }
            *steps -= 1;
            let Some(undo) = self.undo.pop() else { break };
            let Some(writes) = self.writes.get_mut(&undo.place) else { continue };
            match undo.old {
                Some(old) => drop(writes.insert(undo.key, old)),
                None => drop(writes.remove(&undo.key)),
            }
            if writes.is_empty() {
                self.writes.remove(&undo.place);
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

    /// The ops are in the log.
    pub fn spilled(&mut self, place: Place, books: &mut Books) {
        books.pin(place.segment);
        books.segments.entry(place.segment).or_default().values += self.large;
        self.spills.push(Spill { at: self.ops_at, place });
        self.ops_at += self.ops.len() as u64;
        self.ops = Vec::new();
        self.memory = self.memory.saturating_sub(self.large);
        books.memory = books.memory.saturating_sub(self.large);
        self.large = 0;
    }

    /// Where in the log a value of its own is, if it is there already.
    pub fn resolve(&self, at: u64, len: u32) -> Option<Loc> {
        let after = self.spills.partition_point(|s| s.at <= at);
        if at >= self.ops_at {
            return None;
        }
        let spill = self.spills.get(after.checked_sub(1)?)?;
        let offset = u64::from(spill.place.offset) + (at - spill.at);
        Some(Loc { segment: spill.place.segment, offset: offset as u32, len })
    }

    /// The bytes of a value of its own that is not in the log yet.
    pub fn bytes(&self, at: u64, len: u32) -> Option<&[u8]> {
        let from = at.checked_sub(self.ops_at)? as usize;
        self.ops.get(from..from + len as usize)
    }

    /// What a value of its own is for others.
    pub fn settle(&self, slot: Slot) -> Slot {
        match slot {
            Slot::Own { at, len } => self.resolve(at, len).map_or(Slot::Deleted, Slot::At),
            slot => slot,
        }
    }

    /// Forgets up to so many of its writes; true: none is left.
    pub fn wither(&mut self, steps: &mut u64) -> bool {
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

fn slot_cost(slot: &Slot) -> usize {
    match slot {
        Slot::Inline(bytes) => bytes.len(),
        _ => 0,
    }
}
