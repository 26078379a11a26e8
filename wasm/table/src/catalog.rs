//! Catalog: the tables and their indexes.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::fail::{Fail, fail};
use crate::map::Index;
use crate::record_body::{Change, change};
use crate::segment::Usage;

/// Table.
#[derive(Debug)]
pub struct Table {
    /// Name.
    pub name: Box<[u8]>,
    /// Definition, of which only clients know what it means.
    pub definition: Box<[u8]>,
    /// Indexes, the primary one first.
    pub indexes: Vec<Index>,
    /// Next value of the counter.
    pub next_auto: u64,
    /// Value of the counter after a restart.
    pub logged_auto: u64,
}

impl Table {
    fn new(name: &[u8], definition: &[u8], indexes: u8) -> Self {
        Self {
            name: name.into(),
            definition: definition.into(),
            indexes: (0..indexes).map(|_| Index::default()).collect(),
            next_auto: 1,
            logged_auto: 1,
        }
    }
}

/// All tables.
#[derive(Debug, Default)]
pub struct Catalog {
    /// Tables by number.
    pub tables: BTreeMap<u32, Table>,
    /// Numbers of tables by name.
    pub names: BTreeMap<Box<[u8]>, u32>,
    /// Lowest number that no table has had.
    pub next: u32,
    /// Indexes of tables that are gone, which are freed a piece at a time.
    pub dropped_indexes: Vec<Index>,
}

impl Catalog {
    /// Finds a table by number.
    pub fn table(&self, table: u32) -> Result<&Table, Fail> {
        self.tables.get(&table).ok_or_else(|| fail!(NO_TABLE, "there is no table {table}"))
    }

    /// Finds a table by number, to change it.
    pub fn table_mut(&mut self, table: u32) -> Result<&mut Table, Fail> {
        self.tables.get_mut(&table).ok_or_else(|| fail!(NO_TABLE, "there is no table {table}"))
    }

    /// Finds an index.
    pub fn index(&self, table: u32, index: u8) -> Result<&Index, Fail> {
        let indexes = &self.table(table)?.indexes;
        indexes.get(usize::from(index)).ok_or_else(|| {
            fail!(NO_TABLE, "table {table} has {} indexes, not one {index}", indexes.len())
        })
    }

    /// Finds an index, if it is there, to change it.
    pub fn index_mut(&mut self, table: u32, index: u8) -> Option<&mut Index> {
        self.tables.get_mut(&table)?.indexes.get_mut(usize::from(index))
    }

    /// Memory that a table costs beside its entries, about.
    pub fn memory_of(&self, table: u32) -> u64 {
        let Some(table) = self.tables.get(&table) else { return 0 };
        let names = 2 * table.name.len() + table.definition.len();
        (names + size_of::<Table>() + table.indexes.len() * size_of::<Index>()) as u64
    }

    /// Finds the number of a table by its name.
    pub fn find(&self, name: &[u8]) -> Result<u32, Fail> {
        let found = self.names.get(name).copied();
        found.ok_or_else(|| fail!(NO_TABLE, "there is no table {:?}", text(name)))
    }

    /// Applies a change that is in the log. While the log is read, names are right only after the
    /// last change ([`Catalog::rebuild_names`]).
    pub fn apply(&mut self, change: &Change<'_>) {
        let number = change.table;
        match change.kind {
            change::CREATE => {
                self.next = self.next.max(number.saturating_add(1));
                let new = || Table::new(change.name, change.definition, change.indexes);
                self.tables.entry(number).or_insert_with(new);
                self.names.insert(change.name.into(), number);
            }
            change::DROP => {
                if let Some(table) = self.tables.remove(&number) {
                    self.names.remove(&table.name);
                    self.dropped_indexes.extend(table.indexes);
                }
            }
            _ => self.alter(change),
        }
    }

    fn alter(&mut self, change: &Change<'_>) {
        let Some(table) = self.tables.get_mut(&change.table) else { return };
        match change.kind {
            change::RENAME => {
                let old = core::mem::replace(&mut table.name, change.name.into());
                self.names.remove(&old);
                self.names.insert(change.name.into(), change.table);
            }
            change::TRUNCATE => {
                let indexes = table.indexes.len();
                let new = (0..indexes).map(|_| Index::default()).collect();
                self.dropped_indexes.extend(core::mem::replace(&mut table.indexes, new));
                (table.next_auto, table.logged_auto) = (1, 1);
            }
            change::REDEFINE => table.definition = change.definition.into(),
            change::AUTO => {
                (table.next_auto, table.logged_auto) = (change.auto, change.auto);
            }
            _ => {}
        }
    }

    /// Builds the list of names from the tables.
    pub fn rebuild_names(&mut self) {
        self.names = self.tables.iter().map(|(n, t)| (t.name.clone(), *n)).collect();
    }

    /// Frees indexes of tables that are gone, as far as `steps` go.
    pub fn free_dropped(&mut self, usage: &mut Usage, steps: &mut u64) {
        while *steps > 0
            && let Some(index) = self.dropped_indexes.last_mut()
        {
            let done = index.remove_some(*steps, usage);
            *steps = steps.saturating_sub(done.max(1));
            if index.map.is_empty() {
                self.dropped_indexes.pop();
            }
        }
    }
}

/// Name as an error's text shows it.
pub fn text(name: &[u8]) -> alloc::string::String {
    let mut text = alloc::string::String::from_utf8_lossy(name).into_owned();
    if text.len() > 128 {
        text = text.chars().take(96).collect();
        text.push('…');
    }
    text
}
