//! Statement under way: it may wait for another writer, and has as many calls as it needs.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use guest_abi::stream::PIECE_BYTES;

use crate::answer::Answer;
use crate::bulk::{self, Bulk, Row};
use crate::db::{Db, Failure, Statement, Stepped};
use crate::errors::{SqlError, code};
use crate::ffi;
use crate::packet::Writer;
use crate::plan::Plan;
use crate::rewrite::{Rewritten, quoted};
use crate::rows::{self, Form};
use crate::shared::{LOCK_WAIT_MS, Shared};
use crate::transaction::Transaction;
use crate::value::Value;

/// Savepoint that a statement of several rows goes back to when one fails.
const UNDO: &str = "\"millrace statement\"";

/// Rows between two looks at the clock.
const ROWS: u32 = 32;

/// Statement that is under way.
#[derive(Debug)]
pub struct ActiveStatement {
    stage: Stage,
    /// Time since which it waits for another writer.
    since_ms: u64,
}

#[derive(Debug)]
enum Stage {
    /// Planned, not begun: the plan, and the text of rows.
    Planned(Plan, Vec<u8>),
    /// Rows are sent.
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

/// Column that SQLite numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Auto {
    /// The table has none.
    None,
    /// The table has one, and rows have something at that place.
    At(usize),
    /// The table has one, and rows do not say anything about it.
    Unsaid,
}

/// Reason why a statement stops.
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

impl ActiveStatement {
    /// Begins with a plan. `text` is the statement, of which rows are read.
    pub fn new(plan: Plan, text: &[u8], now_ms: u64) -> Self {
        let text = if matches!(plan, Plan::Bulk(_)) { text.to_vec() } else { Vec::new() };
        Self { stage: Stage::Planned(plan, text), since_ms: now_ms }
    }

    /// Time at which it has waited for too long.
    pub fn gives_up_ms(&self) -> u64 {
        self.since_ms + LOCK_WAIT_MS
    }

    /// Number of bytes that it keeps.
    pub fn held_bytes(&self) -> usize {
        match &self.stage {
            Stage::Planned(_, text) => text.len(),
            Stage::Inserting(inserting) => inserting.text.len(),
            Stage::Reading(..) => 0,
        }
    }
}

impl ActiveStatement {
    /// Goes on with it.
    pub fn go_on(self, context: &mut Context<'_>) -> Progress {
        if let Some(db) = &context.tx.db {
            let shared = &context.shared;
            db.set_until_ms(shared.disk.now_ms() + shared.statement_ms);
        }
        let since_ms = self.since_ms;
        let done = match self.stage {
            Stage::Planned(plan, text) => context.begin(plan, text, since_ms),
            Stage::Reading(statement, forms) => context.read_on(statement, forms, since_ms),
            Stage::Inserting(inserting) => context.insert_on(inserting, since_ms),
        };
        let error = match done {
            Ok(progress) => return progress,
            Err(Stop::Blocked) => return Progress::Blocked,
            Err(Stop::Failed(failure)) => context.tx.fail(context.shared, &failure),
            Err(Stop::Error(error)) => {
                if !context.tx.is_explicit() {
                    context.tx.roll_back(context.shared);
                }
                error
            }
        };
        context.answer.error(&error, context.out);
        Progress::Done
    }
}

/// Progress of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The statement is done.
    Done,
    /// The statement goes on in a later call, or when its answer so far is taken.
    More,
    /// Another client writes.
    Blocked,
}

/// State that a statement works on.
pub struct Context<'a> {
    /// Transaction of the client.
    pub tx: &'a mut Transaction,
    /// Answer to the client.
    pub answer: &'a mut Answer,
    /// State that all clients share.
    pub shared: &'a mut Shared,
    /// Bytes for the client.
    pub out: &'a mut Vec<u8>,
    /// Statement as it goes on in a later call.
    pub next: &'a mut Option<ActiveStatement>,
}

impl Context<'_> {
    /// Keeps a statement that goes on in a later call.
    fn later(&mut self, stage: Stage, since_ms: u64) -> Progress {
        *self.next = Some(ActiveStatement { stage, since_ms });
        Progress::More
    }

    fn begin(&mut self, plan: Plan, mut text: Vec<u8>, since_ms: u64) -> Result<Progress, Stop> {
        let is_write = match plan {
            Plan::Read(_) => false,
            Plan::ReadForUpdate(_) => self.tx.is_explicit(),
            _ => true,
        };
        if !self.tx.ensure(is_write)? {
            self.later(Stage::Planned(plan, text), since_ms);
            return Err(Stop::Blocked);
        }
        let done = self.execute(&plan, &mut text, since_ms);
        if matches!(done, Err(Stop::Blocked)) && self.next.is_none() {
            // A transaction that read so far, and now wants to write.
            self.later(Stage::Planned(plan, text), since_ms);
        }
        done
    }

    fn execute(
        &mut self,
        plan: &Plan,
        text: &mut Vec<u8>,
        since_ms: u64,
    ) -> Result<Progress, Stop> {
        let db = self.tx.in_use().map_err(Stop::Error)?.clone();
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
                self.answer.columns(&columns, self.tx.status(), self.out);
                if has_row {
                    put_row(self, &statement, &forms)?;
                    return self.read_on(statement, forms, since_ms);
                }
                self.end_of_rows()
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
                self.finish(affected, id)
            }
            Plan::Bulk(bulk) => {
                let inserting = Inserting::new(&db, bulk, text)?;
                self.insert_on(inserting, since_ms)
            }
            Plan::Define(statements) => {
                for rewritten in statements {
                    prepared(&db, rewritten)?.step()?;
                }
                // A definition is a transaction of its own.
                self.tx.commit(self.shared).map_err(Stop::Error)?;
                self.answer.ok(0, 0, self.tx.status(), self.out);
                Ok(Progress::Done)
            }
            Plan::Savepoint(name) => self.savepoint(&db, "SAVEPOINT", name),
            Plan::RollbackTo(name) => self.savepoint(&db, "ROLLBACK TO", name),
            Plan::Release(name) => self.savepoint(&db, "RELEASE", name),
            other => {
                let what = format!("{other:?} here");
                Err(Stop::Error(SqlError::unsupported(&what)))
            }
        }
    }

    fn savepoint(&mut self, db: &Db, what: &str, name: &str) -> Result<Progress, Stop> {
        db.run(&format!("{what} {}", quoted(name)))?;
        self.finish(0, 0)
    }

    /// Finishes a statement that wrote.
    fn finish(&mut self, affected: u64, id: u64) -> Result<Progress, Stop> {
        if !self.tx.is_explicit() {
            self.tx.commit(self.shared).map_err(Stop::Error)?;
        }
        self.answer.ok(affected, id, self.tx.status(), self.out);
        Ok(Progress::Done)
    }

    fn end_of_rows(&mut self) -> Result<Progress, Stop> {
        self.answer.end(self.tx.status(), self.out);
        Ok(Progress::Done)
    }

    /// Sends rows until there is enough for a reply, or the call has done enough.
    fn read_on(
        &mut self,
        mut statement: Statement,
        forms: Vec<Form>,
        since_ms: u64,
    ) -> Result<Progress, Stop> {
        let mut rows = 0;
        loop {
            if self.out.len() > PIECE_BYTES || (rows == ROWS && self.shared.is_late()) {
                return Ok(self.later(Stage::Reading(statement, forms), since_ms));
            }
            rows = rows % ROWS + 1;
            match statement.step() {
                Ok(Stepped::Row) => put_row(self, &statement, &forms)?,
                Ok(Stepped::Done) => {
                    drop(statement);
                    return self.end_of_rows();
                }
                // Rows were told: it cannot begin anew.
                Err(failure) => return Err(Stop::Failed(failure)),
            }
        }
    }

    fn insert_on(&mut self, mut inserting: Inserting, since_ms: u64) -> Result<Progress, Stop> {
        let db = self.tx.in_use().map_err(Stop::Error)?.clone();
        loop {
            match inserting.next(&db) {
                Ok(true) => break,
                Ok(false)
                    if inserting.rows.is_multiple_of(u64::from(ROWS)) && self.shared.is_late() =>
                {
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
        self.finish(affected, id)
    }
}

fn prepared(db: &Db, rewritten: &Rewritten) -> Result<Statement, Failure> {
    let mut statement = db.prepare(&rewritten.sql)?;
    statement.bind(&rewritten.parameters)?;
    Ok(statement)
}

fn put_row(context: &mut Context<'_>, statement: &Statement, forms: &[Form]) -> Result<(), Stop> {
    let mut writer = Writer::new(context.out, context.answer.number);
    let fits = writer.packet(|p| rows::put_row(p, statement, forms));
    context.answer.number = writer.number;
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
