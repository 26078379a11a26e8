//! A connection to a database file and its statements: what is used of SQLite, made safe.

mod functions;

use alloc::boxed::Box;
use alloc::ffi::CString;
use alloc::format;
use alloc::rc::Rc;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::cell::Cell;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

use crate::ffi;
use crate::value::Value;
use crate::vfs::Disk;

/// Steps of SQLite's machine between two looks at the clock: some ten microseconds.
const STEPS: c_int = 1000;
/// Memory for pages of a connection, in KiB.
const CACHE_KIB: u32 = 2048;
/// Length of the log, in pages, after which it is copied to the database; often in tests.
const CHECKPOINT_PAGES: u32 = if cfg!(test) { 40 } else { 1000 };
/// A log that has been longer is cut to this.
const LOG_BYTES: u32 = 16 << 20;
/// Longest statement.
const MAX_SQL_BYTES: c_int = 16 << 20;
/// Longest value.
const MAX_VALUE_BYTES: c_int = 16 << 20;
/// Columns of a table or of a result.
const MAX_COLUMNS: c_int = 1024;
/// Parameters of a statement: the strings in it.
const MAX_PARAMETERS: c_int = 32_000;

/// Failure of SQLite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// SQLite's extended code.
    pub code: c_int,
    /// Text.
    pub text: String,
}

/// Time that a statement may compute.
#[derive(Debug)]
struct Budget {
    disk: Rc<Disk>,
    until_ms: Cell<u64>,
}

#[derive(Debug)]
struct Handle {
    raw: *mut ffi::sqlite3,
    budget: Box<Budget>,
    /// Name by which statements call the database. SQLite keeps the pointer.
    schema: CString,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: statements hold the handle, so that none is left.
        unsafe { ffi::sqlite3_close(self.raw) };
    }
}

/// A connection.
#[derive(Debug, Clone)]
pub struct Db(Rc<Handle>);

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepped {
    /// A row can be read.
    Row,
    /// The statement is done.
    Done,
}

impl Db {
    /// Opens a database's file. `schema` is the name that statements may put in front of tables.
    pub fn open(disk: &Rc<Disk>, file: &str, schema: &str, create: bool) -> Result<Self, Failure> {
        let (path, schema) = (c_string(file)?, c_string(schema)?);
        let mut raw = ptr::null_mut();
        let mut flags = ffi::SQLITE_OPEN_READWRITE | ffi::SQLITE_OPEN_NOMUTEX;
        if create {
            flags |= ffi::SQLITE_OPEN_CREATE;
        }
        // SAFETY: strings that end with a zero, and a place for the handle.
        let done =
            unsafe { ffi::sqlite3_open_v2(path.as_ptr(), &mut raw, flags, disk.name().as_ptr()) };
        let budget = Box::new(Budget { disk: Rc::clone(disk), until_ms: Cell::new(u64::MAX) });
        // Also after a failure there is a handle to be closed.
        let db = Self(Rc::new(Handle { raw, budget, schema }));
        db.check(done)?;
        db.set_up()?;
        Ok(db)
    }

    fn set_up(&self) -> Result<(), Failure> {
        let limits = [
            (ffi::SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES),
            (ffi::SQLITE_LIMIT_SQL_LENGTH, MAX_SQL_BYTES),
            (ffi::SQLITE_LIMIT_COLUMN, MAX_COLUMNS),
            (ffi::SQLITE_LIMIT_VARIABLE_NUMBER, MAX_PARAMETERS),
            (ffi::SQLITE_LIMIT_EXPR_DEPTH, 200),
            (ffi::SQLITE_LIMIT_ATTACHED, 0),
            (ffi::SQLITE_LIMIT_WORKER_THREADS, 0),
        ];
        for (which, most) in limits {
            // SAFETY: the handle is open.
            unsafe { ffi::sqlite3_limit(self.0.raw, which, most) };
        }
        let switches = [
            (ffi::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1),
            (ffi::SQLITE_DBCONFIG_DEFENSIVE, 1),
            (ffi::SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
            // In MySQL "x" is a string, and here a name: never something that is one or the other.
            (ffi::SQLITE_DBCONFIG_DQS_DML, 0),
            (ffi::SQLITE_DBCONFIG_DQS_DDL, 0),
        ];
        for (which, value) in switches {
            let value: c_int = value;
            let nowhere: *mut c_int = ptr::null_mut();
            // SAFETY: these take a number, and a place for the answer that may be null.
            self.check(unsafe { ffi::sqlite3_db_config(self.0.raw, which, value, nowhere) })?;
        }
        // SAFETY: the name lives as long as the handle.
        self.check(unsafe {
            let schema = self.0.schema.as_ptr();
            ffi::sqlite3_db_config(self.0.raw, ffi::SQLITE_DBCONFIG_MAINDBNAME, schema)
        })?;
        // SAFETY: the handle is open, and the budget lives as long.
        unsafe {
            ffi::sqlite3_extended_result_codes(self.0.raw, 1);
            let budget: *const Budget = &*self.0.budget;
            let budget: *mut c_void = budget.cast_mut().cast();
            ffi::sqlite3_progress_handler(self.0.raw, STEPS, Some(progress), budget);
        }
        // The log alone is written and not synced at a commit: the reply waits for the host's sync.
        // What must be in order (the log before the file, the file before the log is used anew)
        // SQLite syncs itself.
        for pragma in [
            "page_size=4096".to_string(),
            "temp_store=MEMORY".to_string(),
            "journal_mode=WAL".to_string(),
            "synchronous=NORMAL".to_string(),
            "foreign_keys=OFF".to_string(),
            format!("cache_size=-{CACHE_KIB}"),
            format!("wal_autocheckpoint={CHECKPOINT_PAGES}"),
            format!("journal_size_limit={LOG_BYTES}"),
        ] {
            self.run(&format!("PRAGMA {pragma}"))?;
        }
        functions::add(self)?;
        // SAFETY: the handle is open; the function wants nothing.
        let done =
            unsafe { ffi::sqlite3_set_authorizer(self.0.raw, Some(authorize), ptr::null_mut()) };
        self.check(done)
    }

    fn check(&self, done: c_int) -> Result<(), Failure> {
        match done {
            ffi::SQLITE_OK => Ok(()),
            code => Err(self.failure(code)),
        }
    }

    fn failure(&self, code: c_int) -> Failure {
        if self.0.raw.is_null() {
            return Failure { code, text: "no memory for a connection".into() };
        }
        // SAFETY: the message is good until the next call on the handle.
        let text = unsafe { CStr::from_ptr(ffi::sqlite3_errmsg(self.0.raw)) };
        Failure { code, text: text.to_string_lossy().into_owned() }
    }

    /// Statements may compute until then.
    pub fn set_until_ms(&self, until_ms: u64) {
        self.0.budget.until_ms.set(until_ms);
    }

    /// Executes what must not be interrupted: the end of a transaction.
    pub fn run_to_the_end(&self, sql: &str) -> Result<(), Failure> {
        let until_ms = self.0.budget.until_ms.replace(u64::MAX);
        let done = self.run(sql);
        self.set_until_ms(until_ms);
        done
    }

    /// Executes a statement without rows of interest.
    pub fn run(&self, sql: &str) -> Result<(), Failure> {
        let mut statement = self.prepare(sql)?;
        while statement.step()? == Stepped::Row {}
        Ok(())
    }

    /// The first column of the first row, if there is one.
    pub fn one(&self, sql: &str, parameters: &[Value]) -> Result<Option<Value>, Failure> {
        let mut statement = self.prepare(sql)?;
        statement.bind(parameters)?;
        Ok(match statement.step()? {
            Stepped::Row => Some(statement.value(0)),
            Stepped::Done => None,
        })
    }

    /// Compiles the one statement of a text.
    pub fn prepare(&self, sql: &str) -> Result<Statement, Failure> {
        let mut raw = ptr::null_mut();
        let mut rest: *const c_char = ptr::null();
        let start: *const c_char = sql.as_ptr().cast();
        let len = c_int::try_from(sql.len()).unwrap_or(c_int::MAX);
        // SAFETY: the text has so many bytes; places for the statement and the rest.
        let done =
            unsafe { ffi::sqlite3_prepare_v3(self.0.raw, start, len, 0, &mut raw, &mut rest) };
        self.check(done)?;
        let statement = Statement { raw, db: self.clone() };
        if raw.is_null() {
            return Err(Failure { code: ffi::SQLITE_ERROR, text: "the statement is empty".into() });
        }
        let used = (rest as usize).wrapping_sub(start as usize).min(sql.len());
        if !sql[used..].trim().is_empty() {
            let text = "more than one statement".into();
            return Err(Failure { code: ffi::SQLITE_ERROR, text });
        }
        Ok(statement)
    }

    /// Whether a transaction is open.
    pub fn is_in_transaction(&self) -> bool {
        // SAFETY: the handle is open.
        unsafe { ffi::sqlite3_get_autocommit(self.0.raw) == 0 }
    }

    /// Rows that were changed since the connection is there.
    pub fn total_changes(&self) -> i64 {
        // SAFETY: the handle is open.
        unsafe { ffi::sqlite3_total_changes64(self.0.raw) }
    }

    /// Rows that the last statement changed, without those of triggers.
    pub fn changes(&self) -> u64 {
        // SAFETY: the handle is open.
        unsafe { ffi::sqlite3_changes64(self.0.raw) as u64 }
    }

    /// Number of the row that was inserted last.
    pub fn last_insert_id(&self) -> i64 {
        // SAFETY: the handle is open.
        unsafe { ffi::sqlite3_last_insert_rowid(self.0.raw) }
    }
}

unsafe extern "C" fn progress(budget: *mut c_void) -> c_int {
    // SAFETY: it lives as long as the connection.
    let budget = unsafe { &*budget.cast::<Budget>() };
    let until_ms = budget.until_ms.get();
    c_int::from(until_ms != u64::MAX && budget.disk.now_ms() >= until_ms)
}

/// Refuses what clients may not do: reach other files, or change how this one is kept.
unsafe extern "C" fn authorize(
    _: *mut c_void,
    action: c_int,
    name: *const c_char,
    _: *const c_char,
    _: *const c_char,
    _: *const c_char,
) -> c_int {
    match action {
        // SAFETY: a string that ends with a zero, or null.
        ffi::SQLITE_PRAGMA if unsafe { owned(name) }.is_some_and(|name| is_harmless(&name)) => {
            ffi::SQLITE_OK
        }
        ffi::SQLITE_ATTACH | ffi::SQLITE_DETACH | ffi::SQLITE_PRAGMA => ffi::SQLITE_DENY,
        _ => ffi::SQLITE_OK,
    }
}

/// Pragmas that only tell something.
fn is_harmless(name: &str) -> bool {
    name == "table_info" || cfg!(test) && name == "integrity_check"
}

fn c_string(text: &str) -> Result<CString, Failure> {
    let failure = |_| Failure { code: ffi::SQLITE_MISUSE, text: "a name has a zero byte".into() };
    CString::new(text).map_err(failure)
}

/// A compiled statement.
#[derive(Debug)]
pub struct Statement {
    raw: *mut ffi::sqlite3_stmt,
    db: Db,
}

impl Drop for Statement {
    fn drop(&mut self) {
        // SAFETY: the statement is not used after this.
        unsafe { ffi::sqlite3_finalize(self.raw) };
    }
}

impl Statement {
    /// Gives values to its parameters, from the first on.
    pub fn bind(&mut self, values: &[Value]) -> Result<(), Failure> {
        for (at, value) in (1..).zip(values) {
            self.bind_one(at, value)?;
        }
        Ok(())
    }

    fn bind_one(&mut self, at: c_int, value: &Value) -> Result<(), Failure> {
        let copy = ffi::SQLITE_TRANSIENT();
        let len = |bytes: &Vec<u8>| c_int::try_from(bytes.len()).unwrap_or(c_int::MAX);
        // SAFETY: the bytes are copied within the call.
        let done = unsafe {
            match value {
                Value::Null => ffi::sqlite3_bind_null(self.raw, at),
                Value::Int(n) => ffi::sqlite3_bind_int64(self.raw, at, *n),
                Value::Real(x) => ffi::sqlite3_bind_double(self.raw, at, *x),
                Value::Text(t) => {
                    ffi::sqlite3_bind_text(self.raw, at, t.as_ptr().cast(), len(t), copy)
                }
                Value::Blob(b) => {
                    ffi::sqlite3_bind_blob(self.raw, at, b.as_ptr().cast(), len(b), copy)
                }
            }
        };
        self.db.check(done)
    }

    /// Goes on to the next row. After a failure it begins anew.
    pub fn step(&mut self) -> Result<Stepped, Failure> {
        // SAFETY: the statement is not finalised.
        match unsafe { ffi::sqlite3_step(self.raw) } {
            ffi::SQLITE_ROW => Ok(Stepped::Row),
            ffi::SQLITE_DONE => Ok(Stepped::Done),
            code => {
                let failure = self.db.failure(code);
                self.reset();
                Err(failure)
            }
        }
    }

    /// Begins anew.
    pub fn reset(&mut self) {
        // SAFETY: the statement is not finalised. What it returns was told before.
        unsafe { ffi::sqlite3_reset(self.raw) };
    }

    /// Whether it changes nothing.
    pub fn is_read_only(&self) -> bool {
        // SAFETY: the statement is not finalised.
        unsafe { ffi::sqlite3_stmt_readonly(self.raw) != 0 }
    }

    /// Number of columns of a row; 0: there are no rows.
    pub fn columns(&self) -> usize {
        // SAFETY: the statement is not finalised.
        unsafe { ffi::sqlite3_column_count(self.raw) as usize }
    }

    /// A column's name.
    pub fn column_name(&self, at: usize) -> String {
        // SAFETY: a string, or null without memory, good until the next call.
        unsafe { owned(ffi::sqlite3_column_name(self.raw, at as c_int)) }.unwrap_or_default()
    }

    /// The type that a column of a table was made with.
    pub fn column_type(&self, at: usize) -> Option<String> {
        // SAFETY: as above; null if it is no column of a table.
        unsafe { owned(ffi::sqlite3_column_decltype(self.raw, at as c_int)) }
    }

    /// The table and the column that a column is of.
    pub fn column_origin(&self, at: usize) -> Option<(String, String)> {
        // SAFETY: as above.
        unsafe {
            let table = owned(ffi::sqlite3_column_table_name(self.raw, at as c_int))?;
            Some((table, owned(ffi::sqlite3_column_origin_name(self.raw, at as c_int))?))
        }
    }

    /// The kind of this row's value, as SQLite numbers them.
    pub fn kind(&self, at: usize) -> c_int {
        // SAFETY: the statement is not finalised.
        unsafe { ffi::sqlite3_column_type(self.raw, at as c_int) }
    }

    /// Whole number in a column of the row.
    pub fn int(&self, at: usize) -> i64 {
        // SAFETY: the statement is not finalised.
        unsafe { ffi::sqlite3_column_int64(self.raw, at as c_int) }
    }

    /// Floating-point number in a column of the row.
    pub fn real(&self, at: usize) -> f64 {
        // SAFETY: the statement is not finalised.
        unsafe { ffi::sqlite3_column_double(self.raw, at as c_int) }
    }

    /// Bytes in a column of the row, without a copy.
    pub fn bytes(&self, at: usize) -> &[u8] {
        // SAFETY: the bytes are good until the next call that changes the statement, which wants it
        // `mut`; null if there is none.
        unsafe {
            let start = ffi::sqlite3_column_blob(self.raw, at as c_int).cast::<u8>();
            let len = ffi::sqlite3_column_bytes(self.raw, at as c_int) as usize;
            if start.is_null() { &[] } else { core::slice::from_raw_parts(start, len) }
        }
    }

    /// Value in a column of the row.
    pub fn value(&self, at: usize) -> Value {
        match self.kind(at) {
            ffi::SQLITE_INTEGER => Value::Int(self.int(at)),
            ffi::SQLITE_FLOAT => Value::Real(self.real(at)),
            ffi::SQLITE_TEXT => Value::Text(self.bytes(at).to_vec()),
            ffi::SQLITE_BLOB => Value::Blob(self.bytes(at).to_vec()),
            _ => Value::Null,
        }
    }
}

/// # Safety
/// Null, or a string that ends with a zero.
unsafe fn owned(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: as above.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Bounds the memory that SQLite may take, for all connections of the process.
pub fn limit_memory(bytes: i64) {
    // SAFETY: it takes a number.
    unsafe { ffi::sqlite3_hard_heap_limit64(bytes) };
}
