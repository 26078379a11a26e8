//! The tables.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::deed::{Change, change};
use crate::fail::{Fail, fail};
use crate::map::Index;

/// A table.
#[derive(Debug)]
pub struct Table {
    /// Its name.
    pub name: Box<[u8]>,
    /// What its clients say of it.
    pub definition: Box<[u8]>,
    /// Its indexes, the primary one first.
    pub indexes: Vec<Index>,
    /// The counter.
    pub next_auto: u64,
    /// A restart begins here.
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

/// All of them.
#[derive(Debug, Default)]
pub struct Catalog {
    /// By number.
    pub tables: BTreeMap<u32, Table>,
    /// Numbers by name.
    pub names: BTreeMap<Box<[u8]>, u32>,
    /// No table has had this number yet.
    pub next: u32,
    /// What is left of tables that are gone.
    pub graves: Vec<Index>,
}

impl Catalog {
    /// A table.
    pub fn table(&self, table: u32) -> Result<&Table, Fail> {
        self.tables.get(&table).ok_or_else(|| fail!(NO_TABLE, "there is no table {table}"))
    }

    /// A table.
    pub fn table_mut(&mut self, table: u32) -> Result<&mut Table, Fail> {
        self.tables.get_mut(&table).ok_or_else(|| fail!(NO_TABLE, "there is no table {table}"))
    }

    /// An index.
    pub fn index(&self, table: u32, index: u8) -> Result<&Index, Fail> {
        let indexes = &self.table(table)?.indexes;
        indexes.get(usize::from(index)).ok_or_else(|| {
            fail!(NO_TABLE, "table {table} has {} indexes, not one {index}", indexes.len())
        })
    }

    /// An index, if it is there.
    pub fn index_mut(&mut self, table: u32, index: u8) -> Option<&mut Index> {
        self.tables.get_mut(&table)?.indexes.get_mut(usize::from(index))
    }

    /// What a table costs beside its entries, about.
    pub fn weight(&self, table: u32) -> u64 {
        let Some(table) = self.tables.get(&table) else { return 0 };
        let names = 2 * table.name.len() + table.definition.len();
        (names + size_of::<Table>() + table.indexes.len() * size_of::<Index>()) as u64
    }

    /// The number that has a name.
    pub fn find(&self, name: &[u8]) -> Result<u32, Fail> {
        let found = self.names.get(name).copied();
        found.ok_or_else(|| fail!(NO_TABLE, "there is no table {:?}", text(name)))
    }

    /// Does what the log says. Names are only right once all of it is done ([`Catalog::name_all`]).
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
                    self.graves.extend(table.indexes);
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
                self.graves.extend(core::mem::replace(&mut table.indexes, new));
                (table.next_auto, table.logged_auto) = (1, 1);
            }
            change::REDEFINE => table.definition = change.definition.into(),
            change::AUTO => {
                (table.next_auto, table.logged_auto) = (change.auto, change.auto);
            }
            _ => {}
        }
    }

    /// Finds names anew.
    pub fn name_all(&mut self) {
        self.names = self.tables.iter().map(|(n, t)| (t.name.clone(), *n)).collect();
    }
}

/// A name in an error's text.
pub fn text(name: &[u8]) -> alloc::string::String {
    let mut text = alloc::string::String::from_utf8_lossy(name).into_owned();
    if text.len() > 128 {
        text = text.chars().take(96).collect();
        text.push('…');
    }
    text
}
