//! Questions about the server and its tables, which SQLite does not answer itself.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use crate::db::{Db, Failure, Stepped};
use crate::errors::{SqlError, code};
use crate::lex::Token;
use crate::lex::{has, name_at};
use crate::packet::{Column, charset, column_type};
use crate::rewrite::quoted;
use crate::value::Value;

/// Version that the server says it is.
pub const VERSION: &str = concat!("5.7.44-millrace-", env!("CARGO_PKG_VERSION"));

/// A question.
#[derive(Debug, Clone, PartialEq)]
pub enum Show {
    /// Tables whose names are like that, with estimates.
    TableStatus(Option<Vec<u8>>),
    /// Names of tables that are like that.
    Tables(Option<Vec<u8>>),
    /// Databases.
    Databases,
    /// Variables whose names are like that.
    Variables(Option<Vec<u8>>),
    /// A table's columns.
    Columns(String),
    /// Nothing to tell, in one column.
    Empty(&'static str),
    /// `SELECT` of variables and of functions about the connection: each with its name.
    Select(Vec<(String, Item)>),
}

/// Item that is selected.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// Value that is known.
    Known(Value),
    /// The database in use.
    Database,
    /// The connection's number.
    Connection,
    /// Whether each statement is a transaction.
    Autocommit,
}

/// Facts about the connection that asks.
#[derive(Debug)]
pub struct About<'a> {
    /// The database in use.
    pub database: Option<&'a str>,
    /// Number of the connection.
    pub id: u32,
    /// Whether autocommit is on: [`Item::Autocommit`].
    pub autocommit: bool,
}

/// Variables that clients ask for.
const VARIABLES: [(&str, &str); 22] = [
    ("auto_increment_increment", "1"),
    ("character_set_client", "utf8mb4"),
    ("character_set_connection", "utf8mb4"),
    ("character_set_results", "utf8mb4"),
    ("character_set_server", "utf8mb4"),
    ("collation_connection", "utf8mb4_general_ci"),
    ("collation_server", "utf8mb4_general_ci"),
    ("init_connect", ""),
    ("interactive_timeout", "28800"),
    ("license", "Apache-2.0 OR MIT"),
    ("lower_case_table_names", "0"),
    ("max_allowed_packet", "16777214"),
    ("net_write_timeout", "60"),
    ("query_cache_type", "OFF"),
    ("sql_mode", "STRICT_TRANS_TABLES"),
    ("system_time_zone", "UTC"),
    ("time_zone", "+00:00"),
    ("transaction_isolation", "SERIALIZABLE"),
    ("tx_isolation", "SERIALIZABLE"),
    ("version", VERSION),
    ("version_comment", "Millrace, module sql"),
    ("wait_timeout", "28800"),
];

/// A `SELECT` that is such a question; None: SQLite answers it.
///
/// # Errors
/// There is no such variable.
pub fn select(tokens: &[Token<'_>]) -> Result<Option<Show>, SqlError> {
    let mut end = tokens.len();
    if end >= 2 && tokens[end - 2].is("LIMIT") {
        end -= 2;
    }
    let mut items = Vec::new();
    for part in tokens[1..end.max(1)].split(|t| t.is_op(",")) {
        let (part, alias) = match part {
            [inner @ .., word, name] if word.is("AS") => (inner, name.name()),
            _ => (part, None),
        };
        let Some((name, item)) = item(part)? else { return Ok(None) };
        items.push((alias.unwrap_or(name), item));
    }
    Ok(Some(Show::Select(items)))
}

fn item(tokens: &[Token<'_>]) -> Result<Option<(String, Item)>, SqlError> {
    match tokens {
        [at, rest @ ..] if at.is_op("@@") => {
            let name = rest.last().and_then(Token::name).unwrap_or_default().to_ascii_lowercase();
            if name == "autocommit" {
                return Ok(Some((format!("@@{name}"), Item::Autocommit)));
            }
            let found = VARIABLES.iter().find(|(known, _)| *known == name);
            let unknown = || SqlError::new(1193, format!("Unknown system variable '{name}'"));
            let (_, value) = found.ok_or_else(unknown)?;
            Ok(Some((format!("@@{name}"), Item::Known(Value::from(*value)))))
        }
        // Whether the server is there is often asked so, and without a database.
        [Token::Number(digits)] => {
            Ok(Some((digits.to_string(), Item::Known(Value::from(*digits)))))
        }
        [Token::Word(function), open, close] if open.is_op("(") && close.is_op(")") => {
            let item = match function.to_ascii_uppercase().as_str() {
                "DATABASE" | "SCHEMA" => Item::Database,
                "VERSION" => Item::Known(Value::from(VERSION)),
                "CONNECTION_ID" => Item::Connection,
                "USER" | "CURRENT_USER" | "SESSION_USER" => Item::Known(Value::from("vm@host")),
                _ => return Ok(None),
            };
            Ok(Some((format!("{function}()"), item)))
        }
        _ => Ok(None),
    }
}

/// `SHOW …` and `DESCRIBE …`.
///
/// # Errors
/// It is about something that is not here.
pub fn show(tokens: &[Token<'_>]) -> Result<Show, SqlError> {
    if !tokens[0].is("SHOW") {
        return Ok(Show::Columns(name_at(tokens, 1)?));
    }
    let mut at = 1;
    while ["FULL", "GLOBAL", "SESSION"].iter().any(|w| has(tokens, at, &[w])) {
        at += 1;
    }
    let like = tokens.iter().position(|t| t.is("LIKE")).and_then(|at| match tokens.get(at + 1) {
        Some(Token::Text(pattern)) => Some(pattern.clone()),
        _ => None,
    });
    let is = |words: &[&str]| has(tokens, at, words);
    if is(&["TABLE", "STATUS"]) {
        Ok(Show::TableStatus(like))
    } else if is(&["TABLES"]) {
        Ok(Show::Tables(like))
    } else if is(&["DATABASES"]) || is(&["SCHEMAS"]) {
        Ok(Show::Databases)
    } else if is(&["VARIABLES"]) {
        Ok(Show::Variables(like))
    } else if is(&["COLUMNS"]) || is(&["FIELDS"]) {
        Ok(Show::Columns(name_at(tokens, at + 2)?))
    } else if is(&["WARNINGS"]) || is(&["ERRORS"]) {
        Ok(Show::Empty("Message"))
    } else if is(&["STATUS"]) || is(&["ENGINES"]) || is(&["PROCESSLIST"]) {
        Ok(Show::Empty("Variable_name"))
    } else {
        Err(SqlError::unsupported("this SHOW"))
    }
}

/// An answer: columns and rows.
pub type Table = (Vec<Column>, Vec<Vec<Value>>);

fn column(name: &str) -> Column {
    let name = name.as_bytes().to_vec();
    let (kind, charset) = (column_type::VAR_STRING, charset::UTF8MB4);
    Column { name, kind, charset, ..Column::default() }
}

fn columns(names: &[&str]) -> Vec<Column> {
    names.iter().map(|name| column(name)).collect()
}

/// Answers a question that needs no table.
pub fn answer(show: &Show, about: &About<'_>, databases: &[String]) -> Option<Table> {
    Some(match show {
        Show::Select(items) => {
            let value = |item: &Item| match item {
                Item::Known(value) => value.clone(),
                Item::Database => about.database.map_or(Value::Null, Value::from),
                Item::Connection => Value::Int(about.id.into()),
                Item::Autocommit => Value::Int(about.autocommit.into()),
            };
            let names: Vec<&str> = items.iter().map(|(name, _)| name.as_str()).collect();
            (columns(&names), vec![items.iter().map(|(_, item)| value(item)).collect()])
        }
        Show::Databases => {
            let row = |name: &String| vec![Value::from(name.as_str())];
            (columns(&["Database"]), databases.iter().map(row).collect())
        }
        Show::Variables(pattern) => {
            let wanted = |name: &str| pattern.as_ref().is_none_or(|p| like(p, name.as_bytes()));
            let rows = VARIABLES.iter().filter(|(name, _)| wanted(name));
            let row = |(name, value): &(&str, &str)| vec![Value::from(*name), Value::from(*value)];
            (columns(&["Variable_name", "Value"]), rows.map(row).collect())
        }
        Show::Empty(name) => (columns(&[name]), Vec::new()),
        Show::TableStatus(_) | Show::Tables(_) | Show::Columns(_) => return None,
    })
}

/// Answers a question about the tables of a database.
pub fn of_tables(show: &Show, db: &Db) -> Result<Table, Failure> {
    match show {
        Show::TableStatus(pattern) => table_status(db, pattern.as_deref()),
        Show::Tables(pattern) => {
            let names = tables(db, pattern.as_deref())?;
            Ok((columns(&["Tables"]), names.into_iter().map(|n| vec![Value::from(n)]).collect()))
        }
        Show::Columns(table) => described(db, table),
        _ => Ok((Vec::new(), Vec::new())),
    }
}

/// Names of tables like that, the one that is that first.
fn tables(db: &Db, pattern: Option<&[u8]>) -> Result<Vec<String>, Failure> {
    let sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite~_%' \
               ESCAPE '~' ORDER BY name <> ?1, name";
    let mut statement = db.prepare(sql)?;
    statement.bind(&[pattern.map_or(Value::Null, |p| Value::Text(p.to_vec()))])?;
    let mut names = Vec::new();
    while statement.step()? == Stepped::Row {
        if pattern.is_none_or(|p| like(p, statement.bytes(0))) {
            names.push(String::from_utf8_lossy(statement.bytes(0)).into_owned());
        }
    }
    Ok(names)
}

/// Rows are estimated by their numbers: counting them takes as long as reading them.
fn table_status(db: &Db, pattern: Option<&[u8]>) -> Result<Table, Failure> {
    let names = [
        "Name",
        "Engine",
        "Version",
        "Row_format",
        "Rows",
        "Avg_row_length",
        "Data_length",
        "Max_data_length",
        "Index_length",
        "Data_free",
        "Auto_increment",
        "Create_time",
        "Update_time",
        "Check_time",
        "Collation",
        "Checksum",
        "Create_options",
        "Comment",
    ];
    let mut rows = Vec::new();
    for name in tables(db, pattern)? {
        let table = quoted(&name);
        let sql = format!(
            "SELECT (SELECT max(rowid) FROM {table}) - (SELECT min(rowid) FROM {table}) + 1"
        );
        let count = match db.one(&sql, &[])? {
            Some(Value::Int(count)) => count.max(0),
            _ => 0,
        };
        let mut row = vec![Value::Null; names.len()];
        row[0] = Value::from(name);
        row[1] = Value::from("SQLite");
        row[2] = Value::Int(10);
        row[4] = Value::Int(count);
        row[5] = Value::Int(AVERAGE_ROW_BYTES);
        row[6] = Value::Int(count.saturating_mul(AVERAGE_ROW_BYTES));
        row[16] = Value::from("");
        row[17] = Value::from("");
        rows.push(row);
    }
    Ok((columns(&names), rows))
}

/// Average length of a row as the server tells it: only a planner wants it, to compare tables.
const AVERAGE_ROW_BYTES: i64 = 128;

fn described(db: &Db, table: &str) -> Result<Table, Failure> {
    let mut statement = db.prepare(
        "SELECT name, type, iif(\"notnull\" OR pk, 'NO', 'YES'), iif(pk, 'PRI', ''), dflt_value, '' \
         FROM pragma_table_info(?1)",
    )?;
    statement.bind(&[Value::from(table)])?;
    let mut rows = Vec::new();
    while statement.step()? == Stepped::Row {
        let mut row: Vec<Value> = (0..6).map(|at| statement.value(at)).collect();
        if let Value::Text(kind) = &row[1] {
            row[1] = Value::from(mysql_type(&String::from_utf8_lossy(kind)));
        }
        rows.push(row);
    }
    if rows.is_empty() {
        let text = format!("no such table: {table}");
        return Err(Failure { code: crate::ffi::SQLITE_ERROR, text });
    }
    Ok((columns(&["Field", "Type", "Null", "Key", "Default", "Extra"]), rows))
}

/// The type that a column was made with, from what SQLite was told.
fn mysql_type(kept: &str) -> String {
    let name = kept.trim_end_matches("_TEXT").trim_end_matches("_INT");
    match name {
        "INTEGER" => "bigint".to_string(),
        "VARBINARY_BLOB" | "BINARY_BLOB" => name.trim_end_matches("_BLOB").to_ascii_lowercase(),
        _ => name.replace("_BLOB", "BLOB").to_ascii_lowercase(),
    }
}

/// Whether a name is like a pattern, whatever the case.
pub fn like(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where to go on if what follows the last % does not fit.
    let mut again: Option<(usize, usize)> = None;
    while n < name.len() {
        let (wanted, len) = match pattern.get(p..) {
            Some([b'%', ..]) => {
                again = Some((p + 1, n));
                p += 1;
                continue;
            }
            Some([b'_', ..]) => (None, 1),
            Some([b'\\', c, ..]) => (Some(*c), 2),
            Some([c, ..]) => (Some(*c), 1),
            _ => (Some(0), 0),
        };
        let fits = len > 0 && wanted.is_none_or(|c| c.eq_ignore_ascii_case(&name[n]));
        if fits {
            (p, n) = (p + len, n + 1);
        } else if let Some((behind, from)) = again {
            (p, n) = (behind, from + 1);
            again = Some((behind, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == b'%')
}

/// The error when no database was chosen.
pub fn no_database() -> SqlError {
    SqlError::new(code::NO_DATABASE, "No database selected")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lex::Lexer;

    #[test]
    fn names_are_like_patterns() {
        for (pattern, name, is_like) in [
            ("t1", "T1", true),
            ("t_", "tx", true),
            ("t\\_", "tx", false),
            ("%_set_%", "character_set_client", true),
            ("a%b%c", "axxbxxbc", true),
            ("a%b", "axxc", false),
            ("", "", true),
            ("%", "", true),
            ("abc", "ab", false),
        ] {
            assert_eq!(like(pattern.as_bytes(), name.as_bytes()), is_like, "{pattern} {name}");
        }
    }

    #[test]
    fn what_clients_ask_first_is_answered() {
        let tokens = Lexer::new(b"select @@version_comment limit 1", 0).all().unwrap();
        let show = select(&tokens).unwrap().unwrap();
        let about = About { database: Some("d"), id: 7, autocommit: true };
        let (_, rows) = answer(&show, &about, &[]).unwrap();
        assert_eq!(rows, vec![vec![Value::from("Millrace, module sql")]]);
        let tokens = Lexer::new(b"SELECT DATABASE(), @@session.autocommit AS a", 0).all().unwrap();
        let (columns, rows) = answer(&select(&tokens).unwrap().unwrap(), &about, &[]).unwrap();
        assert_eq!(rows, vec![vec![Value::from("d"), Value::Int(1)]]);
        assert_eq!(columns[1].name, b"a");
        let tokens = Lexer::new(b"SELECT a FROM t", 0).all().unwrap();
        assert_eq!(select(&tokens).unwrap(), None);
    }
}
