//! MySQL's errors, and what SQLite's are among them.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;

use crate::db::Failure;
use crate::ffi;

/// Codes, named as MySQL does.
pub mod code {
    #![allow(missing_docs, reason = "the names are MySQL's")]
    pub const TOO_MANY_CONNECTIONS: u16 = 1040;
    pub const OUT_OF_MEMORY: u16 = 1041;
    pub const HANDSHAKE: u16 = 1043;
    pub const NO_DATABASE: u16 = 1046;
    pub const UNKNOWN_COMMAND: u16 = 1047;
    pub const NOT_NULL: u16 = 1048;
    pub const UNKNOWN_DATABASE: u16 = 1049;
    pub const TABLE_EXISTS: u16 = 1050;
    pub const UNKNOWN_TABLE: u16 = 1051;
    pub const UNKNOWN_COLUMN: u16 = 1054;
    pub const DUPLICATE: u16 = 1062;
    pub const SYNTAX: u16 = 1064;
    pub const TABLE_FULL: u16 = 1114;
    pub const DATABASE_EXISTS: u16 = 1007;
    pub const NO_SUCH_DATABASE: u16 = 1008;
    pub const ERROR_ON_WRITE: u16 = 1026;
    pub const VALUE_COUNT: u16 = 1136;
    pub const NO_SUCH_TABLE: u16 = 1146;
    pub const PACKET_TOO_LARGE: u16 = 1153;
    pub const LOCK_WAIT_TIMEOUT: u16 = 1205;
    pub const DEADLOCK: u16 = 1213;
    pub const NOT_SUPPORTED: u16 = 1235;
    pub const OUT_OF_RANGE: u16 = 1264;
    pub const NO_SAVEPOINT: u16 = 1305;
    pub const UNKNOWN: u16 = 1105;
    pub const CRASHED: u16 = 1194;
    pub const INTERRUPTED: u16 = 1969;
    pub const CHECK: u16 = 4025;
}

/// An error that a client is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlError {
    /// [`code`].
    pub code: u16,
    /// Text.
    pub text: String,
}

impl SqlError {
    /// Makes an error with a text.
    pub fn new(code: u16, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// A statement that is not understood.
    pub fn syntax(text: impl Into<String>) -> Self {
        Self::new(code::SYNTAX, text)
    }

    /// Error for a feature that MySQL has and this module lacks.
    pub fn unsupported(what: &str) -> Self {
        Self::new(code::NOT_SUPPORTED, format!("the module sql does not support {what}"))
    }

    /// The class that goes with the code, five characters.
    pub fn state(&self) -> &'static str {
        match self.code {
            code::TOO_MANY_CONNECTIONS => "08004",
            code::HANDSHAKE | code::UNKNOWN_COMMAND => "08S01",
            code::NO_DATABASE => "3D000",
            code::NOT_NULL | code::DUPLICATE | code::CHECK => "23000",
            code::UNKNOWN_DATABASE | code::SYNTAX | code::NOT_SUPPORTED => "42000",
            code::TABLE_EXISTS => "42S01",
            code::UNKNOWN_TABLE | code::NO_SUCH_TABLE => "42S02",
            code::UNKNOWN_COLUMN => "42S22",
            code::VALUE_COUNT => "21S01",
            code::DEADLOCK => "40001",
            code::INTERRUPTED => "70100",
            code::OUT_OF_RANGE => "22003",
            _ => "HY000",
        }
    }
}

/// Translates a failure for a client. `statement_ms` is how long a statement may compute.
pub fn of_failure(failure: &Failure, statement_ms: u64) -> SqlError {
    let text = failure.text.as_str();
    let code = match failure.code {
        ffi::SQLITE_CONSTRAINT_PRIMARYKEY
        | ffi::SQLITE_CONSTRAINT_UNIQUE
        | ffi::SQLITE_CONSTRAINT_ROWID => {
            let key = text.rsplit_once(": ").map_or(text, |(_, columns)| columns);
            let text = format!("Duplicate entry for key '{key}'");
            return SqlError::new(code::DUPLICATE, text);
        }
        ffi::SQLITE_CONSTRAINT_NOTNULL => {
            let column = text.rsplit_once('.').map_or(text, |(_, column)| column);
            return SqlError::new(code::NOT_NULL, format!("Column '{column}' cannot be null"));
        }
        ffi::SQLITE_CONSTRAINT_CHECK => code::CHECK,
        ffi::SQLITE_CONSTRAINT_DATATYPE | ffi::SQLITE_MISMATCH => code::OUT_OF_RANGE,
        ffi::SQLITE_BUSY_SNAPSHOT => {
            let text = "Deadlock found when trying to get lock: another transaction has written \
                        since this one began to read; try restarting transaction";
            return SqlError::new(code::DEADLOCK, text);
        }
        other => match other & 0xff {
            ffi::SQLITE_ERROR => of_text(text),
            ffi::SQLITE_INTERRUPT => {
                let text = format!(
                    "Query execution was interrupted: it computed for more than {statement_ms} ms, \
                     the module's limit for a statement (file statement-ms)"
                );
                return SqlError::new(code::INTERRUPTED, text);
            }
            ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED => code::LOCK_WAIT_TIMEOUT,
            ffi::SQLITE_FULL => code::TABLE_FULL,
            ffi::SQLITE_NOMEM => code::OUT_OF_MEMORY,
            ffi::SQLITE_IOERR | ffi::SQLITE_CANTOPEN => code::ERROR_ON_WRITE,
            ffi::SQLITE_CORRUPT | ffi::SQLITE_NOTADB => code::CRASHED,
            ffi::SQLITE_AUTH => code::NOT_SUPPORTED,
            ffi::SQLITE_TOOBIG => code::PACKET_TOO_LARGE,
            _ => code::UNKNOWN,
        },
    };
    SqlError::new(code, text.to_owned())
}

/// SQLite has one code for all that is wrong with a statement.
fn of_text(text: &str) -> u16 {
    let has = |part: &str| text.contains(part);
    if text.starts_with("no such table") {
        code::NO_SUCH_TABLE
    } else if has("no such column") || has("has no column named") {
        code::UNKNOWN_COLUMN
    } else if text.starts_with("no such savepoint") {
        code::NO_SAVEPOINT
    } else if has("already exists") {
        code::TABLE_EXISTS
    } else if has("values for") && has("columns") || has("values were supplied") {
        code::VALUE_COUNT
    } else {
        code::SYNTAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_mysqls_codes() {
        let told = |code, text: &str| of_failure(&Failure { code, text: text.into() }, 60);
        let error = told(ffi::SQLITE_CONSTRAINT_UNIQUE, "UNIQUE constraint failed: t.a, t.b");
        assert_eq!((error.code, error.text.as_str()), (1062, "Duplicate entry for key 't.a, t.b'"));
        let error = told(ffi::SQLITE_CONSTRAINT_NOTNULL, "NOT NULL constraint failed: t.a");
        assert_eq!((error.code, error.text.as_str()), (1048, "Column 'a' cannot be null"));
        assert_eq!(told(ffi::SQLITE_ERROR, "no such table: t").code, 1146);
        assert_eq!(told(ffi::SQLITE_ERROR, "near \"x\": syntax error").code, 1064);
        assert_eq!(told(ffi::SQLITE_BUSY_SNAPSHOT, "database is locked").code, 1213);
        assert_eq!(told(ffi::SQLITE_IOERR_WRITE, "disk I/O error").code, 1026);
        assert!(told(ffi::SQLITE_INTERRUPT, "interrupted").text.contains("60 ms"));
    }
}
