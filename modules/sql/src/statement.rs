//! A statement under way: it may wait for who writes, and has as many calls as it needs.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use guest_abi::stream::PIECE_BYTES;

use crate::bulk::{self, Bulk, Row};
use crate::db::{Db, Failure, Statement, Stepped};
use crate::errors::{SqlError, code};
use crate::ffi;
use crate::packet::Writer;
use crate::plan::Plan;
use crate::rewrite::{Rewritten, quoted};
use crate::rows::{self, Form};
use crate::session::{Progress, Session};
use crate::shared::{LOCK_WAIT_MS, Shared};
use crate::value::Value;

/// What a statement of several rows goes back to when one fails.
const UNDO: &str = "\"millrace statement\"";

/// Rows between two looks at the clock.
const ROWS: u32 = 32;

/// See the module.
#[derive(Debug)]
pub struct Work {
    stage: Stage,
    /// Since when it waits for who writes.
    since_ms: u64,
}

#[derive(Debug)]
enum Stage {
    /// Not begun.
    Planned(Plan, Vec<u8>),
    /// Rows are told.
    Reading(Statement, Vec<Form>),
    /// Rows are inserted.
    Inserting(Inserting),
}

#[derive(Debug)]
struct Inserting {
    text: Vec<u8>,
    at: usize,
    statement: Statement,
    width: usize,
    auto: Auto,
    has_undo: bool,
    rows: u64,
    before: i64,
    first_id: u64,
}

/// The column that SQLite numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Auto {
    /// The table has none.
    None,
    /// It has, and rows have something at that place.
    At(usize),
    /// It has, and rows do not say anything about it.
    Unsaid,
}

/// Why it stops.
enum Stop {
    Blocked,
    Failed(Failure),
    Error(SqlError),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        match failure.code {
            ffi::SQLITE_BUSY_SNAPSHOT => Self::Failed(failure),
            other if other & 0xff == ffi::SQLITE_BUSY => Self::Blocked,
            _ => Self::Failed(failure),
        }
    }
}

impl Work {
    /// What a plan wants. `text` is the statement, of which rows are read.
    pub fn new(plan: Plan, text: &[u8], now_ms: u64) -> Self {
        let text = if matches!(plan, Plan::Bulk(_)) { text.to_vec() } else { Vec::new() };
        Self { stage: Stage::Planned(plan, text), since_ms: now_ms }
    }

    /// When it has waited for too long.
    pub fn gives_up_ms(&self) -> u64 {
        self.since_ms + LOCK_WAIT_MS
    }

    /// Bytes that it keeps.
    pub fn held_bytes(&self) -> usize {
        match &self.stage {
            Stage::Planned(_, text) => text.len(),
            Stage::Inserting(inserting) => inserting.text.len(),
            Stage::Reading(..) => 0,
        }
    }
}

impl Session {
    /// Goes on with what is under way.
    pub fn go_on(&mut self, shared: &mut Shared, out: &mut Vec<u8>) -> Progress {
        let Some(work) = self.work.take() else { return Progress::Done };
        if let Some(db) = &self.db {
            db.set_until_ms(shared.disk.now_ms() + shared.statement_ms);
        }
        let since_ms = work.since_ms;
        let done = match work.stage {
            Stage::Planned(plan, text) => self.begin(shared, plan, text, since_ms, out),
            Stage::Reading(statement, forms) => {
                self.read_on(shared, statement, forms, since_ms, out)
            }
            Stage::Inserting(inserting) => self.insert_on(shared, inserting, since_ms, out),
        };
        match done {
            Ok(progress) => progress,
            Err(Stop::Blocked) => Progress::Blocked,
            Err(Stop::Failed(failure)) => {
                let error = self.failed(shared, &failure);
                self.say_error(&error, out);
                Progress::Done
            }
            Err(Stop::Error(error)) => {
                if !self.is_explicit() {
                    self.roll_back(shared);
                }
                self.say_error(&error, out);
                Progress::Done
            }
        }
    }

    /// It has waited for too long.
    pub fn give_up(&mut self, shared: &mut Shared, out: &mut Vec<u8>) {
        self.work = None;
        if !self.is_explicit() {
            self.roll_back(shared);
        }
        let text = "Lock wait timeout exceeded; try restarting transaction";
        self.say_error(&SqlError::new(code::LOCK_WAIT_TIMEOUT, text), out);
    }

    fn later(&mut self, stage: Stage, since_ms: u64) -> Progress {
        self.work = Some(Work { stage, since_ms });
        Progress::More
    }

    fn begin(
        &mut self,
        shared: &mut Shared,
        plan: Plan,
        mut text: Vec<u8>,
        since_ms: u64,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Stop> {
        let is_write = match plan {
            Plan::Read(_) => false,
            Plan::ReadForUpdate(_) => self.is_explicit(),
            _ => true,
        };
        if !self.ensure(is_write)? {
            self.later(Stage::Planned(plan, text), since_ms);
            return Err(Stop::Blocked);
        }
        let done = self.execute(shared, &plan, &mut text, since_ms, out);
        if matches!(done, Err(Stop::Blocked)) && self.work.is_none() {
            // A transaction that read so far, and now wants to write.
            self.later(Stage::Planned(plan, text), since_ms);
        }
        done
    }

    fn execute(
        &mut self,
        shared: &mut Shared,
        plan: &Plan,
        text: &mut Vec<u8>,
        since_ms: u64,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Stop> {
        let db = self.in_use().map_err(Stop::Error)?.clone();
        match plan {
            Plan::Read(rewritten) | Plan::ReadForUpdate(rewritten) => {
                let mut statement = prepared(&db, rewritten)?;
                // A change in disguise would be told before it is durable.
                if !statement.is_read_only() {
                    let what = "changes that begin with WITH";
                    return Err(Stop::Error(SqlError::unsupported(what)));
                }
                let has_row = statement.step()? == Stepped::Row;
                let (columns, forms) = rows::columns(&statement, has_row);
                self.say_columns(&columns, out);
                if has_row {
                    put_row(self, &statement, &forms, out)?;
                    return self.read_on(shared, statement, forms, since_ms, out);
                }
                self.end_of_rows(out)
            }
            Plan::Write(rewritten) => {
                let mut statement = prepared(&db, rewritten)?;
                let before = db.total_changes();
                while statement.step()? == Stepped::Row {}
                drop(statement);
                let affected = (db.total_changes() - before) as u64;
                let is_insert =
                    rewritten.sql.starts_with("INSERT") || rewritten.sql.starts_with("REPL");
                let id = if is_insert && affected > 0 { db.last_insert_id() as u64 } else { 0 };
                self.finish(shared, affected, id, out)
            }
            Plan::Bulk(bulk) => {
                let inserting = Inserting::new(&db, bulk, text)?;
                self.insert_on(shared, inserting, since_ms, out)
            }
            Plan::Define(statements) => {
                for rewritten in statements {
                    prepared(&db, rewritten)?.step()?;
                }
                // A definition is a transaction of its own.
                self.commit(shared).map_err(Stop::Error)?;
                self.say_ok(0, 0, out);
                Ok(Progress::Done)
            }
            Plan::Savepoint(name) => self.point(shared, &db, "SAVEPOINT", name, out),
            Plan::RollbackTo(name) => self.point(shared, &db, "ROLLBACK TO", name, out),
            Plan::Release(name) => self.point(shared, &db, "RELEASE", name, out),
            other => {
                let what = format!("{other:?} here");
                Err(Stop::Error(SqlError::unsupported(&what)))
            }
        }
    }

    fn point(
        &mut self,
        shared: &mut Shared,
        db: &Db,
        what: &str,
        name: &str,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Stop> {
        db.run(&format!("{what} {}", quoted(name)))?;
        self.finish(shared, 0, 0, out)
    }

    /// A statement that wrote is done.
    fn finish(
        &mut self,
        shared: &mut Shared,
        affected: u64,
        id: u64,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Stop> {
        if !self.is_explicit() {
            self.commit(shared).map_err(Stop::Error)?;
        }
        self.say_ok(affected, id, out);
        Ok(Progress::Done)
    }

    fn end_of_rows(&mut self, out: &mut Vec<u8>) -> Result<Progress, Stop> {
        self.say_end(out);
        Ok(Progress::Done)
    }

    /// Tells rows until there is enough for a reply, or the call has done enough.
    fn read_on(
        &mut self,
        shared: &mut Shared,
        mut statement: Statement,
        forms: Vec<Form>,
        since_ms: u64,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Stop> {
        let mut rows = 0;
        loop {
            if out.len() > PIECE_BYTES || (rows == ROWS && shared.is_late()) {
                return Ok(self.later(Stage::Reading(statement, forms), since_ms));
            }
            rows = rows % ROWS + 1;
            match statement.step() {
                Ok(Stepped::Row) => put_row(self, &statement, &forms, out)?,
                Ok(Stepped::Done) => {
                    drop(statement);
                    return self.end_of_rows(out);
                }
                // Rows were told: it cannot begin anew.
                Err(failure) => return Err(Stop::Failed(failure)),
            }
        }
    }

    fn insert_on(
        &mut self,
        shared: &mut Shared,
        mut inserting: Inserting,
        since_ms: u64,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Stop> {
        let db = self.in_use().map_err(Stop::Error)?.clone();
        loop {
            match inserting.next(&db) {
                Ok(true) => break,
                Ok(false) if inserting.rows.is_multiple_of(u64::from(ROWS)) && shared.is_late() => {
                    return Ok(self.later(Stage::Inserting(inserting), since_ms));
                }
                Ok(false) => {}
                Err(Stop::Blocked) if inserting.rows == 0 => {
                    self.later(Stage::Inserting(inserting), since_ms);
                    return Err(Stop::Blocked);
                }
                Err(stop) => {
                    inserting.undo(&db);
                    return Err(stop);
                }
            }
        }
        if inserting.has_undo {
            db.run(&format!("RELEASE {UNDO}"))?;
        }
        let affected = (db.total_changes() - inserting.before) as u64;
        let id = inserting.first_id;
        drop(inserting);
        self.finish(shared, affected, id, out)
    }
}

fn prepared(db: &Db, rewritten: &Rewritten) -> Result<Statement, Failure> {
    let mut statement = db.prepare(&rewritten.sql)?;
    statement.bind(&rewritten.parameters)?;
    Ok(statement)
}

fn put_row(
    session: &mut Session,
    statement: &Statement,
    forms: &[Form],
    out: &mut Vec<u8>,
) -> Result<(), Stop> {
    let mut writer = Writer::new(out, session.number);
    let fits = writer.packet(|p| rows::put_row(p, statement, forms));
    session.number = writer.number;
    let text = "a row of 16 MiB or more";
    fits.then_some(()).ok_or_else(|| Stop::Error(SqlError::new(code::PACKET_TOO_LARGE, text)))
}

impl Inserting {
    fn new(db: &Db, bulk: &Bulk, text: &mut Vec<u8>) -> Result<Self, Stop> {
        let mut at = bulk.at;
        let (width, is_last) = match bulk::row(text, &mut at).map_err(Stop::Error)? {
            Row::Values(values, is_last) => (values.len(), is_last),
            Row::Other => return Err(Stop::Error(SqlError::syntax("rows of literals are wanted"))),
        };
        let statement = db.prepare(&bulk.sql(width))?;
        let auto = auto_column(db, bulk)?;
        if !is_last {
            db.run(&format!("SAVEPOINT {UNDO}"))?;
        }
        Ok(Self {
            text: core::mem::take(text),
            at: bulk.at,
            statement,
            width,
            auto,
            has_undo: !is_last,
            rows: 0,
            before: db.total_changes(),
            first_id: 0,
        })
    }

    /// Inserts the next row. True: it was the last.
    fn next(&mut self, db: &Db) -> Result<bool, Stop> {
        let mut at = self.at;
        let row = bulk::row(&self.text, &mut at).map_err(Stop::Error)?;
        let Row::Values(mut values, is_last) = row else {
            let what = "expressions in an INSERT of more than 64 KiB";
            return Err(Stop::Error(SqlError::unsupported(what)));
        };
        let number = self.rows + 1;
        if values.len() != self.width {
            let text = format!("Column count doesn't match value count at row {number}");
            return Err(Stop::Error(SqlError::new(code::VALUE_COUNT, text)));
        }
        let is_numbered = match self.auto {
            Auto::None => false,
            Auto::Unsaid => true,
            Auto::At(at) => values.get_mut(at).is_some_and(|value| {
                // As in MySQL, zero is none.
                let is_none = match &*value {
                    Value::Null | Value::Int(0) => true,
                    Value::Text(text) => text == b"0",
                    _ => false,
                };
                if is_none {
                    *value = Value::Null;
                }
                is_none
            }),
        };
        self.statement.bind(&values)?;
        let before = db.total_changes();
        self.statement.step()?;
        self.statement.reset();
        (self.rows, self.at) = (number, at);
        if self.first_id == 0 && is_numbered && db.total_changes() > before {
            self.first_id = u64::try_from(db.last_insert_id()).unwrap_or(0);
        }
        Ok(is_last)
    }

    fn undo(&mut self, db: &Db) {
        self.statement.reset();
        if self.has_undo && db.is_in_transaction() {
            // Without the transaction it is undone already.
            let _ = db.run(&format!("ROLLBACK TO {UNDO}"));
            let _ = db.run(&format!("RELEASE {UNDO}"));
        }
    }
}

/// The AUTO_INCREMENT column of a table that is inserted into.
fn auto_column(db: &Db, bulk: &Bulk) -> Result<Auto, Failure> {
    let sql = "SELECT i.cid, i.name FROM sqlite_master m JOIN pragma_table_info(m.name) i \
               WHERE m.type = 'table' AND m.name = ?1 COLLATE NOCASE AND i.pk = 1 \
               AND i.type = 'INTEGER' AND m.sql LIKE '%AUTOINCREMENT%'";
    let mut statement = db.prepare(sql)?;
    statement.bind(&[Value::from(bulk.table.as_str())])?;
    if statement.step()? == Stepped::Done {
        return Ok(Auto::None);
    }
    if bulk.columns.is_empty() {
        return Ok(Auto::At(statement.int(0) as usize));
    }
    let name = String::from_utf8_lossy(statement.bytes(1)).into_owned();
    let at = bulk.columns.iter().position(|column| column.eq_ignore_ascii_case(&name));
    Ok(at.map_or(Auto::Unsaid, Auto::At))
}
