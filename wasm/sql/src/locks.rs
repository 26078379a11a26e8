//! The locks of a database file and of its index of the log. One instance has a database's files
//! for itself, so that nothing outside has to be locked: these are between its own connections.

/// Levels of a connection's lock of the file, as SQLite numbers them.
pub mod level {
    /// No lock.
    pub const NONE: i32 = 0;
    /// Reads.
    pub const SHARED: i32 = 1;
    /// Will write.
    pub const RESERVED: i32 = 2;
    /// Writes.
    pub const EXCLUSIVE: i32 = 4;
}

/// Locks of an index of the log.
pub const SLOTS: usize = 8;

/// Refusal: a lock of another connection is in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy;

/// The locks of one file.
#[derive(Debug, Default)]
pub struct Locks {
    readers: u32,
    is_reserved: bool,
    is_pending: bool,
    is_exclusive: bool,
    slots: [Slot; SLOTS],
}

#[derive(Debug, Default, Clone, Copy)]
struct Slot {
    readers: u32,
    is_exclusive: bool,
}

/// Locks that one connection holds.
#[derive(Debug, Default)]
pub struct Held {
    /// [`level`].
    pub level: i32,
    is_pending: bool,
    shared: [bool; SLOTS],
    exclusive: [bool; SLOTS],
}

impl Locks {
    /// Raises a connection's lock of the file.
    pub fn raise(&mut self, held: &mut Held, wanted: i32) -> Result<(), Busy> {
        if wanted <= held.level {
            return Ok(());
        }
        if held.level == level::NONE {
            if self.is_pending || self.is_exclusive {
                return Err(Busy);
            }
            self.readers += 1;
            held.level = level::SHARED;
        }
        if wanted == level::SHARED {
            return Ok(());
        }
        if held.level == level::SHARED {
            if self.is_reserved {
                return Err(Busy);
            }
            self.is_reserved = true;
            held.level = level::RESERVED;
        }
        if wanted == level::RESERVED {
            return Ok(());
        }
        // From here on nobody begins to read.
        (self.is_pending, held.is_pending) = (true, true);
        if self.readers > 1 {
            return Err(Busy);
        }
        self.is_exclusive = true;
        held.level = level::EXCLUSIVE;
        Ok(())
    }

    /// Lowers it to [`level::SHARED`] or [`level::NONE`].
    pub fn lower(&mut self, held: &mut Held, wanted: i32) {
        if held.is_pending {
            (self.is_pending, held.is_pending) = (false, false);
        }
        if held.level >= level::RESERVED {
            self.is_reserved = false;
        }
        if held.level == level::EXCLUSIVE {
            self.is_exclusive = false;
        }
        if wanted == level::NONE && held.level > level::NONE {
            self.readers -= 1;
        }
        held.level = held.level.min(wanted);
    }

    /// Whether somebody will write.
    pub fn is_reserved(&self) -> bool {
        self.is_reserved
    }

    /// Takes `count` slots of the index from `first` on, all or none.
    pub fn take(
        &mut self,
        held: &mut Held,
        first: usize,
        count: usize,
        is_exclusive: bool,
    ) -> Result<(), Busy> {
        let range = first..(first + count).min(SLOTS);
        for at in range.clone() {
            let others = self.slots[at].readers - u32::from(held.shared[at]);
            let taken = self.slots[at].is_exclusive && !held.exclusive[at];
            if taken || (is_exclusive && others > 0) {
                return Err(Busy);
            }
        }
        for at in range {
            if is_exclusive {
                (self.slots[at].is_exclusive, held.exclusive[at]) = (true, true);
            } else if !held.shared[at] {
                self.slots[at].readers += 1;
                held.shared[at] = true;
            }
        }
        Ok(())
    }

    /// Gives them back.
    pub fn give(&mut self, held: &mut Held, first: usize, count: usize) {
        for at in first..(first + count).min(SLOTS) {
            if core::mem::take(&mut held.exclusive[at]) {
                self.slots[at].is_exclusive = false;
            }
            if core::mem::take(&mut held.shared[at]) {
                self.slots[at].readers -= 1;
            }
        }
    }

    /// Gives back everything: a connection has gone.
    pub fn drop_all(&mut self, held: &mut Held) {
        self.give(held, 0, SLOTS);
        self.lower(held, level::NONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_reserves_others_read_and_nobody_writes_while_one_reads() {
        let (mut locks, mut a, mut b) = (Locks::default(), Held::default(), Held::default());
        locks.raise(&mut a, level::RESERVED).unwrap();
        locks.raise(&mut b, level::SHARED).unwrap();
        assert_eq!(locks.raise(&mut b, level::RESERVED), Err(Busy));
        assert_eq!(locks.raise(&mut a, level::EXCLUSIVE), Err(Busy));
        let mut c = Held::default();
        assert_eq!(locks.raise(&mut c, level::SHARED), Err(Busy), "a writer waits");
        locks.lower(&mut b, level::NONE);
        locks.raise(&mut a, level::EXCLUSIVE).unwrap();
        locks.drop_all(&mut a);
        assert!(!locks.is_reserved());
        locks.raise(&mut c, level::EXCLUSIVE).unwrap();
    }

    #[test]
    fn slots_are_shared_or_exclusive_and_taken_together() {
        let (mut locks, mut a, mut b) = (Locks::default(), Held::default(), Held::default());
        locks.take(&mut a, 3, 1, false).unwrap();
        locks.take(&mut b, 3, 1, false).unwrap();
        assert_eq!(locks.take(&mut b, 2, 3, true), Err(Busy));
        locks.take(&mut a, 2, 1, true).unwrap();
        locks.give(&mut a, 2, 2);
        locks.take(&mut b, 2, 3, true).unwrap();
        assert_eq!(locks.take(&mut a, 4, 1, false), Err(Busy));
        locks.drop_all(&mut b);
        locks.take(&mut a, 0, SLOTS, true).unwrap();
    }
}
