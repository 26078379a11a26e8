//! State that all connections share: the files, the databases that are open, and the call's time.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::rc::Rc;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use sdk::{Errno, Host};

use crate::db::{Db, Failure};
use crate::errors::{SqlError, code, of_failure};
use crate::vfs::Disk;

/// Nothing new is begun in a call that took so long.
pub const SLICE_MS: u64 = 20;
/// Time that a statement may compute, unless the file says otherwise: with a slice it has to fit in
/// a call's deadline, which is 100 ms if the config says nothing.
pub const STATEMENT_MS: u64 = 60;
/// Time for which a lock is waited for.
pub const LOCK_WAIT_MS: u64 = 30_000;
/// Connections to a database that wait for the next client: at least one, so that the index of its
/// log stays.
const IDLE: usize = 8;
/// Limit of databases.
const MAX_DATABASES: usize = 64;
/// Ending of the name of a database's file.
const SUFFIX: &str = ".db";
/// Ending of that name once the database is to go.
const GONE: &str = ".gone";
/// Longest name of a database.
const MAX_NAME_BYTES: usize = 40;

#[derive(Debug, Default)]
struct Database {
    idle: Vec<Db>,
    used: usize,
}

/// State that all connections share.
#[derive(Debug)]
pub struct Shared {
    /// The files.
    pub disk: Rc<Disk>,
    databases: BTreeMap<String, Database>,
    /// Time that a statement may compute.
    pub statement_ms: u64,
    /// Time when this call began.
    pub began_ms: u64,
    /// Commits, of this life or an earlier one, may not be durable yet: replies wait for a sync.
    pub is_dirty: bool,
    /// A transaction that wrote has ended: who waits for it goes on.
    pub is_freed: bool,
    /// Number of the next client.
    pub next_id: u32,
}

impl Shared {
    /// Begins without open databases.
    pub fn new(disk: Rc<Disk>, statement_ms: u64) -> Self {
        Self {
            disk,
            databases: BTreeMap::new(),
            statement_ms,
            began_ms: 0,
            // So may be the names of files that an earlier life made.
            is_dirty: true,
            is_freed: false,
            next_id: 1,
        }
    }

    /// Whether this call has done enough.
    pub fn is_late(&self) -> bool {
        self.disk.now_ms() >= self.began_ms + SLICE_MS
    }

    /// Translates a failure for a client.
    pub fn error(&self, failure: &Failure) -> SqlError {
        of_failure(failure, self.statement_ms)
    }

    /// Names of all databases.
    pub fn names(&self) -> Result<Vec<String>, SqlError> {
        let storage = |errno| SqlError::new(code::ERROR_ON_WRITE, format!("storage: {errno}"));
        let files = self.disk.call(|host| host.list()).map_err(storage)?;
        let name = |file: &String| file.strip_suffix(SUFFIX).map(ToString::to_string);
        Ok(files.iter().filter_map(name).collect())
    }

    /// A connection to a database that is there.
    pub fn open(&mut self, name: &str) -> Result<Db, SqlError> {
        if let Some(database) = self.databases.get_mut(name)
            && let Some(db) = database.idle.pop()
        {
            database.used += 1;
            return Ok(db);
        }
        if !self.names()?.iter().any(|n| n == name) {
            let text = format!("Unknown database '{name}'; CREATE DATABASE makes it");
            return Err(SqlError::new(code::UNKNOWN_DATABASE, text));
        }
        self.connect(name, false)
    }

    fn connect(&mut self, name: &str, create: bool) -> Result<Db, SqlError> {
        let file = format!("{name}{SUFFIX}");
        let db =
            Db::open(&self.disk, &file, name, create).map_err(|failure| self.error(&failure))?;
        // What an earlier life wrote and told nobody is seen from here on, so a sync comes before
        // the first answer: what was seen stays.
        self.is_dirty |= !self.databases.contains_key(name);
        self.databases.entry(name.to_string()).or_default().used += 1;
        Ok(db)
    }

    /// A connection is not used any more. It has no transaction.
    pub fn close(&mut self, name: &str, db: Db) {
        let Some(database) = self.databases.get_mut(name) else { return };
        database.used -= 1;
        if database.idle.len() < IDLE && !db.is_in_transaction() {
            db.set_until_ms(u64::MAX);
            database.idle.push(db);
        }
    }

    /// Makes a database.
    pub fn create(&mut self, name: &str, may_exist: bool) -> Result<(), SqlError> {
        let is_part =
            |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
        if !(1..=MAX_NAME_BYTES).contains(&name.len()) || !name.bytes().all(is_part) {
            let what = "names of databases other than 1 to 40 of a-z, 0-9, _ and -";
            return Err(SqlError::unsupported(what));
        }
        let names = self.names()?;
        if names.iter().any(|n| n == name) {
            let text = format!("Can't create database '{name}'; database exists");
            let error = SqlError::new(code::DATABASE_EXISTS, text);
            return if may_exist { Ok(()) } else { Err(error) };
        }
        if names.len() >= MAX_DATABASES {
            let text = format!("there are {MAX_DATABASES} databases, and no more can be made");
            return Err(SqlError::new(code::NOT_SUPPORTED, text));
        }
        let db = self.connect(name, true)?;
        self.is_dirty = true;
        self.close(name, db);
        Ok(())
    }

    /// Removes a database that nobody uses.
    pub fn remove(&mut self, name: &str, may_miss: bool) -> Result<(), SqlError> {
        if !self.names()?.iter().any(|n| n == name) {
            let text = format!("Can't drop database '{name}'; database doesn't exist");
            let error = SqlError::new(code::NO_SUCH_DATABASE, text);
            return if may_miss { Ok(()) } else { Err(error) };
        }
        if self.databases.get(name).is_some_and(|database| database.used > 0) {
            let text = format!("database '{name}' is in use by other connections");
            return Err(SqlError::new(code::UNKNOWN, text));
        }
        self.databases.remove(name);
        self.is_dirty = true;
        let storage = |errno| SqlError::new(code::ERROR_ON_WRITE, format!("storage: {errno}"));
        self.disk.call(|host| remove_files(host, name)).map_err(storage)
    }
}

/// The database goes before its log, durably: without the log it could be half of what it was.
fn remove_files(host: &mut dyn Host, name: &str) -> Result<(), Errno> {
    host.rename(&format!("{name}{SUFFIX}"), &format!("{name}{GONE}"))?;
    for suffix in [GONE, ".db-wal", ".db-journal"] {
        match host.remove(&format!("{name}{suffix}")) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Removes what an earlier life of the module left of databases that went.
pub fn tidy(host: &mut dyn Host) -> Result<(), Errno> {
    let names = host.list()?;
    for name in &names {
        let of = name.strip_suffix("-wal").or_else(|| name.strip_suffix("-journal"));
        let is_alone = of.is_some_and(|of| of.ends_with(SUFFIX) && !names.iter().any(|n| n == of));
        if is_alone || name.ends_with(GONE) {
            host.remove(name)?;
        }
    }
    Ok(())
}
