//! A client's connection: who it is, which database it uses, its transaction, and what is under way.
//!
//! # Transactions
//! SQLite has one writer of a database at a time, and any number of readers, each with its snapshot. A
//! statement that writes first gets the right to (`BEGIN IMMEDIATE`), or waits for it, so that it never
//! fails half-way for somebody else's sake. In a transaction that began to read, another may have written since
//! when this one wants to: it fails with 1213 and is rolled back as a whole. What SQLite rolled back
//! itself the client is told at each statement, until it says ROLLBACK.
//!
//! FederatedX connects anew when its connection breaks, and goes on as if it had said SET AUTOCOMMIT=0 there. So a
//! savepoint begins a transaction where there is none, unlike in MySQL, and going back to one where there
//! is none means that the transaction is gone: then nothing is done before the client has rolled back.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::db::{Db, Failure};
use crate::errors::{SqlError, code};
use crate::ffi;
use crate::packet::{self, Login, Writer, command, status};
use crate::plan::{Plan, plan};
use crate::rewrite::quoted;
use crate::shared::Shared;
use crate::show::{self, About, VERSION, no_database};
use crate::work::Work;

/// How far a session has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// Nothing was said.
    #[default]
    New,
    /// The greeting was said.
    Greeted,
    /// Commands are taken.
    Ready,
    /// It is over.
    Over,
}

/// What became of what is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It is done.
    Done,
    /// It goes on in a later call, or when what was said is taken.
    More,
    /// Somebody else writes.
    Blocked,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Session {
    /// How far it is.
    pub phase: Phase,
    id: u32,
    database: Option<String>,
    /// The connection to the database. Behind the work in the order of fields: statements go first.
    pub(crate) work: Option<Work>,
    pub(crate) db: Option<Db>,
    is_manual: bool,
    /// A transaction was begun, and is open from the next statement on.
    has_begun: bool,
    /// It has, or may have, changed something.
    pub(crate) has_written: bool,
    /// The transaction is gone, and the client has to be told.
    doom: Option<SqlError>,
    /// The number of the answer's next packet.
    pub(crate) number: u8,
}

impl Session {
    /// Says the greeting.
    pub fn greet(&mut self, shared: &mut Shared, out: &mut Vec<u8>) {
        self.id = shared.next_id;
        shared.next_id = shared.next_id.wrapping_add(1).max(1);
        let mut challenge = [0; 20];
        let _ = shared.disk.call(|host| host.random(&mut challenge));
        // None of it may be zero, which would end it.
        challenge.iter_mut().for_each(|b| *b = b'!' + *b % 90);
        Writer::new(out, 0).greeting(self.id, &challenge, VERSION);
        self.phase = Phase::Greeted;
    }

    /// One too many: it is told, and it is over.
    pub fn refuse(&mut self, error: &SqlError, out: &mut Vec<u8>) {
        Writer::new(out, self.number).error(error);
        self.phase = Phase::Over;
    }

    /// Takes a packet. What it asks for is done, or under way from now on.
    pub fn take(&mut self, shared: &mut Shared, number: u8, payload: &[u8], out: &mut Vec<u8>) {
        self.number = number.wrapping_add(1);
        let done = match self.phase {
            Phase::Greeted => self.login(shared, payload),
            Phase::Ready => self.command(shared, payload, out),
            Phase::New | Phase::Over => return,
        };
        match done {
            Ok(true) => self.say_ok(0, 0, out),
            Ok(false) => {}
            Err(error) => self.say_error(&error, out),
        }
    }

    fn login(&mut self, shared: &mut Shared, payload: &[u8]) -> Result<bool, SqlError> {
        let Some(Login { database, .. }) = packet::login(payload) else {
            self.phase = Phase::Over;
            return Err(SqlError::new(code::HANDSHAKE, "Bad handshake"));
        };
        if let Some(name) = database {
            self.phase = Phase::Over;
            self.choose(shared, &String::from_utf8_lossy(&name))?;
        }
        self.phase = Phase::Ready;
        Ok(true)
    }

    /// True: an OK is the answer.
    fn command(
        &mut self,
        shared: &mut Shared,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, SqlError> {
        let (kind, body) = payload.split_first().unwrap_or((&0, &[]));
        match *kind {
            command::QUIT => {
                self.phase = Phase::Over;
                Ok(false)
            }
            command::PING | command::SET_OPTION => Ok(true),
            command::INIT_DB => {
                self.choose(shared, &String::from_utf8_lossy(body))?;
                Ok(true)
            }
            command::QUERY => self.query(shared, body, out),
            command::FIELD_LIST => self.fields(shared, body, out),
            command::RESET => {
                self.roll_back(shared);
                (self.is_manual, self.has_begun, self.doom) = (false, false, None);
                Ok(true)
            }
            command::STATISTICS => {
                let mut writer = Writer::new(out, self.number);
                writer.packet(|p| p.extend_from_slice(VERSION.as_bytes()));
                Ok(false)
            }
            command::PREPARE => Err(SqlError::new(
                code::UNKNOWN_COMMAND,
                "the module sql has no prepared statements of the server: let the client prepare them",
            )),
            other => {
                let text = format!("the module sql does not know command {other}");
                Err(SqlError::new(code::UNKNOWN_COMMAND, text))
            }
        }
    }

    fn query(
        &mut self,
        shared: &mut Shared,
        text: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, SqlError> {
        let plan = plan(text)?;
        if let Some(doom) = &self.doom {
            let ends =
                matches!(plan, Plan::Rollback | Plan::Commit | Plan::Begin | Plan::Autocommit(_));
            let error = doom.clone();
            if ends {
                (self.doom, self.has_begun) = (None, false);
            }
            if plan != Plan::Rollback {
                return Err(error);
            }
        }
        match plan {
            Plan::Nothing => Ok(true),
            Plan::Begin => {
                self.commit(shared)?;
                self.has_begun = true;
                Ok(true)
            }
            Plan::Commit => self.commit(shared).map(|()| true),
            Plan::Rollback => {
                self.roll_back(shared);
                Ok(true)
            }
            Plan::Autocommit(on) => {
                self.is_manual = !on;
                if on {
                    self.commit(shared)?;
                }
                Ok(true)
            }
            Plan::RollbackTo(name) if !self.is_explicit() => {
                let text = format!("SAVEPOINT {name} does not exist: its transaction is gone");
                self.doom = Some(SqlError::new(code::DEADLOCK, text.clone()));
                Err(SqlError::new(code::NO_SAVEPOINT, text))
            }
            Plan::Use(name) => self.choose(shared, &name).map(|()| true),
            Plan::CreateDatabase(name, may_exist) => {
                self.commit(shared)?;
                shared.create(&name, may_exist).map(|()| true)
            }
            Plan::DropDatabase(name, may_miss) => {
                self.commit(shared)?;
                if self.database.as_deref() == Some(&name) {
                    self.leave(shared);
                }
                shared.remove(&name, may_miss).map(|()| true)
            }
            Plan::Show(show) => {
                let database = self.database.as_deref();
                let about = About { database, id: self.id, autocommit: !self.is_manual };
                let table = match show::answer(&show, &about, &shared.names()?) {
                    Some(table) => table,
                    None => {
                        let db = self.in_use()?;
                        db.set_until_ms(shared.disk.now_ms() + shared.statement_ms);
                        show::of_tables(&show, db).map_err(|failure| shared.error(&failure))?
                    }
                };
                self.say_table(&table, out);
                Ok(false)
            }
            plan => {
                self.in_use()?;
                if matches!(plan, Plan::Define(_)) {
                    self.commit(shared)?;
                }
                self.has_begun |= matches!(plan, Plan::Savepoint(_));
                self.work = Some(Work::new(plan, text, shared.disk.now_ms()));
                Ok(false)
            }
        }
    }

    /// A table's columns, as clients complete names with.
    fn fields(
        &mut self,
        shared: &mut Shared,
        body: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, SqlError> {
        let table = packet::until_zero(body).map_or(body, |(table, _)| table);
        let sql = format!("SELECT * FROM {}", quoted(&String::from_utf8_lossy(table)));
        let db = self.in_use()?;
        let statement = db.prepare(&sql).map_err(|failure| shared.error(&failure))?;
        let (columns, _) = crate::rows::columns(&statement, false);
        let status = self.status();
        let mut writer = Writer::new(out, self.number);
        for column in &columns {
            writer.column(column, true);
        }
        writer.end(status);
        Ok(false)
    }

    /// Another database.
    fn choose(&mut self, shared: &mut Shared, name: &str) -> Result<(), SqlError> {
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

    fn leave(&mut self, shared: &mut Shared) {
        self.roll_back(shared);
        if let (Some(db), Some(name)) = (self.db.take(), self.database.take()) {
            shared.close(&name, db);
        }
    }

    /// The client has gone.
    pub fn end(&mut self, shared: &mut Shared) {
        self.work = None;
        self.leave(shared);
        self.phase = Phase::Over;
    }

    pub(crate) fn in_use(&self) -> Result<&Db, SqlError> {
        self.db.as_ref().ok_or_else(no_database)
    }

    /// Whether a transaction has several statements.
    pub(crate) fn is_explicit(&self) -> bool {
        self.is_manual || self.has_begun
    }

    /// Opens a transaction if there is none, for writing or for reading alone. False: somebody else writes.
    pub(crate) fn ensure(&mut self, is_write: bool) -> Result<bool, Failure> {
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
    pub(crate) fn commit(&mut self, shared: &mut Shared) -> Result<(), SqlError> {
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
    pub(crate) fn roll_back(&mut self, shared: &mut Shared) {
        self.has_begun = false;
        shared.is_freed |= core::mem::take(&mut self.has_written);
        let Some(db) = &self.db else { return };
        if db.is_in_transaction() {
            // One that fails has been rolled back.
            let _ = db.run_to_the_end("ROLLBACK");
        }
    }

    /// A statement failed: what it did is undone, and a transaction that is gone is remembered.
    pub(crate) fn failed(&mut self, shared: &mut Shared, failure: &Failure) -> SqlError {
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

    fn status(&self) -> u16 {
        let open = self.has_begun || self.db.as_ref().is_some_and(Db::is_in_transaction);
        let auto = if self.is_manual { 0 } else { status::AUTOCOMMIT };
        auto | if open { status::IN_TRANSACTION } else { 0 }
    }

    pub(crate) fn say_ok(&mut self, affected: u64, insert_id: u64, out: &mut Vec<u8>) {
        let status = self.status();
        Writer::new(out, self.number).ok(affected, insert_id, status);
    }

    pub(crate) fn say_error(&mut self, error: &SqlError, out: &mut Vec<u8>) {
        Writer::new(out, self.number).error(error);
    }

    fn say_table(&mut self, (columns, rows): &show::Table, out: &mut Vec<u8>) {
        let status = self.status();
        let mut writer = Writer::new(out, self.number);
        writer.columns(columns, status);
        for row in rows {
            writer.packet(|p| crate::rows::put_values(p, row));
        }
        writer.end(status);
    }

    /// The head of a result.
    pub(crate) fn say_columns(&mut self, columns: &[packet::Column], out: &mut Vec<u8>) {
        let status = self.status();
        let mut writer = Writer::new(out, self.number);
        writer.columns(columns, status);
        self.number = writer.number;
    }

    /// The end of a result.
    pub(crate) fn say_end(&mut self, out: &mut Vec<u8>) {
        let status = self.status();
        Writer::new(out, self.number).end(status);
    }
}
