//! Transaction of a client, and the database that it uses.
//!
//! SQLite has one writer of a database at a time, and any number of readers, each with its
//! snapshot. A statement that writes first gets the right to (`BEGIN IMMEDIATE`), or waits for it,
//! so that it never fails half-way for somebody else's sake. In a transaction that began to read,
//! another may have written since when this one wants to: it fails with 1213 and is rolled back as
//! a whole. What SQLite rolled back itself the client is told at each statement, until it says
//! ROLLBACK.

use alloc::string::{String, ToString};

use crate::db::{Db, Failure};
use crate::errors::{SqlError, code};
use crate::ffi;
use crate::packet::status;
use crate::shared::Shared;
use crate::show::no_database;

/// Transaction of a client: open, or about to be.
#[derive(Debug, Default)]
pub struct Transaction {
    /// Name of the database in use.
    pub database: Option<String>,
    /// Connection to that database.
    pub db: Option<Db>,
    /// Whether autocommit is off.
    pub is_manual: bool,
    /// Whether a transaction was begun, and is open from the next statement on.
    pub has_begun: bool,
    /// Whether it has, or may have, changed something.
    has_written: bool,
    /// Error that the client has to be told: the transaction is gone.
    pub doom: Option<SqlError>,
}

impl Transaction {
    /// Uses another database.
    pub fn choose(&mut self, shared: &mut Shared, name: &str) -> Result<(), SqlError> {
        if self.database.as_deref() == Some(name) {
            return Ok(());
        }
        if self.db.as_ref().is_some_and(Db::is_in_transaction) {
            return Err(SqlError::unsupported("USE within a transaction"));
        }
        let db = shared.open(name)?;
        self.leave(shared);
        (self.db, self.database) = (Some(db), Some(name.to_string()));
        Ok(())
    }

    /// Uses no database any more.
    pub fn leave(&mut self, shared: &mut Shared) {
        self.roll_back(shared);
        if let (Some(db), Some(name)) = (self.db.take(), self.database.take()) {
            shared.close(&name, db);
        }
    }

    /// Database in use.
    ///
    /// # Errors
    /// There is none.
    pub fn in_use(&self) -> Result<&Db, SqlError> {
        self.db.as_ref().ok_or_else(no_database)
    }

    /// Whether a transaction has several statements.
    pub fn is_explicit(&self) -> bool {
        self.is_manual || self.has_begun
    }

    /// Opens a transaction if there is none, for writing or for reading alone. False: somebody else
    /// writes.
    pub fn ensure(&mut self, is_write: bool) -> Result<bool, Failure> {
        let Some(db) = &self.db else { return Ok(true) };
        if db.is_in_transaction() || !is_write && !self.is_explicit() {
            self.has_written |= is_write;
            return Ok(true);
        }
        match db.run_to_the_end(if is_write { "BEGIN IMMEDIATE" } else { "BEGIN" }) {
            Ok(()) => {
                self.has_written |= is_write;
                Ok(true)
            }
            Err(failure) if failure.code & 0xff == ffi::SQLITE_BUSY => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Commits what is open. What fails is rolled back.
    pub fn commit(&mut self, shared: &mut Shared) -> Result<(), SqlError> {
        self.has_begun = false;
        let Some(db) = &self.db else { return Ok(()) };
        if !db.is_in_transaction() {
            self.has_written = false;
            return Ok(());
        }
        let done = db.run_to_the_end("COMMIT");
        shared.is_dirty |= self.has_written;
        shared.is_freed |= self.has_written;
        match done {
            Ok(()) => {
                self.has_written = false;
                Ok(())
            }
            Err(failure) => {
                let error = shared.error(&failure);
                self.roll_back(shared);
                Err(error)
            }
        }
    }

    /// Rolls back what is open.
    pub fn roll_back(&mut self, shared: &mut Shared) {
        self.has_begun = false;
        shared.is_freed |= core::mem::take(&mut self.has_written);
        let Some(db) = &self.db else { return };
        if db.is_in_transaction() {
            // One that fails has been rolled back.
            let _ = db.run_to_the_end("ROLLBACK");
        }
    }

    /// Undoes a statement that failed. A transaction that is gone is remembered.
    pub fn fail(&mut self, shared: &mut Shared, failure: &Failure) -> SqlError {
        let mut error = shared.error(failure);
        let is_explicit = self.is_explicit();
        let is_stale = failure.code == ffi::SQLITE_BUSY_SNAPSHOT;
        if !is_explicit || is_stale {
            self.roll_back(shared);
        }
        let is_gone = !self.db.as_ref().is_some_and(Db::is_in_transaction);
        if is_explicit && is_gone {
            shared.is_freed |= core::mem::take(&mut self.has_written);
            error.text.push_str("; the transaction was rolled back");
            self.doom = Some(SqlError::new(code::DEADLOCK, error.text.clone()));
        }
        error
    }

    /// Status flags for an answer.
    pub fn status(&self) -> u16 {
        let open = self.has_begun || self.db.as_ref().is_some_and(Db::is_in_transaction);
        let auto = if self.is_manual { 0 } else { status::AUTOCOMMIT };
        auto | if open { status::IN_TRANSACTION } else { 0 }
    }
}
