//! Types of columns.
//!
//! | MySQL | kept as | |
//! | --- | --- | --- |
//! | TINYINT … BIGINT, BOOL, YEAR | whole number of 64 bits | UNSIGNED up to 2^63 − 1 |
//! | FLOAT, DOUBLE | floating point number | |
//! | DECIMAL(p, s), p ≤ 15 | number | more digits would not be exact: refused |
//! | CHAR, VARCHAR, TEXT, ENUM, SET, JSON, UUID | its bytes | compared by `mysql_ci`, or by bytes if the collation ends in `_bin` |
//! | DATE, TIME, DATETIME, TIMESTAMP | its text | |
//! | BINARY, VARBINARY, BLOB | its bytes | |

use alloc::format;
use alloc::string::String;

use super::Cursor;
use crate::errors::SqlError;
use crate::lex::Token;

/// Digits that a number of SQLite has for certain.
const MAX_DIGITS: u32 = 15;

/// Type of a column as SQLite keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Type for SQLite.
    pub name: String,
    /// Comparison of values, if not by their bytes.
    pub collation: Option<&'static str>,
    /// Whole numbers only.
    pub is_whole: bool,
}

/// Whether options say that strings are compared by their bytes.
pub fn is_binary(tokens: &[Token<'_>]) -> bool {
    let is_collation = |t: &Token<'_>| t.is("COLLATE") || t.is("CHARSET");
    let named = |at: usize| {
        let value = tokens[at + 1..].iter().find(|t| !t.is_op("="));
        value.and_then(Token::name).is_some_and(|name| is_binary_name(&name))
    };
    tokens.iter().enumerate().any(|(at, token)| is_collation(token) && named(at))
}

fn is_binary_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name == "binary" || name.ends_with("_bin")
}

/// Reads a type.
///
/// # Errors
/// It is none that can be kept as it is meant.
pub(super) fn kept(cursor: &mut Cursor<'_, '_>, mut is_binary: bool) -> Result<Kept, SqlError> {
    let Some(Token::Word(word)) = cursor.tokens.get(cursor.at) else {
        return Err(SqlError::syntax("a column's type is missing"));
    };
    cursor.at += 1;
    let word = word.to_ascii_uppercase();
    cursor.eat(&["PRECISION"]);
    let size = size(cursor);
    let mut unsigned = "";
    loop {
        if cursor.eat(&["UNSIGNED"]) {
            unsigned = " UNSIGNED";
        } else if cursor.eat(&["ZEROFILL"]) || cursor.eat(&["SIGNED"]) {
        } else if cursor.eat(&["BINARY"]) {
            is_binary = true;
        } else if cursor.eat(&["CHARACTER", "SET"])
            || cursor.eat(&["CHARSET"])
            || cursor.eat(&["COLLATE"])
        {
            let name = cursor.tokens.get(cursor.at).and_then(Token::name);
            is_binary |= name.is_some_and(|name| is_binary_name(&name));
            cursor.at += 1;
        } else {
            break;
        }
    }
    let text = (!is_binary).then_some("mysql_ci");
    // Spaces at the end do not count there, either.
    let text = text.or(Some("RTRIM"));
    let (name, collation, is_whole) = match word.as_str() {
        "TINYINT" | "SMALLINT" | "MEDIUMINT" | "INT" | "INTEGER" | "BIGINT" => {
            (format!("{word}{size}{unsigned}"), None, true)
        }
        "BOOL" | "BOOLEAN" => ("TINYINT(1)".into(), None, true),
        "YEAR" => ("YEAR_INT".into(), None, true),
        "FLOAT" | "DOUBLE" | "REAL" => (format!("{word}{size}"), None, false),
        "DECIMAL" | "NUMERIC" | "DEC" | "FIXED" => (decimal(&size)?, None, false),
        "CHAR" | "VARCHAR" | "TINYTEXT" | "TEXT" | "MEDIUMTEXT" | "LONGTEXT" => {
            (format!("{word}{size}"), text, false)
        }
        "ENUM" | "SET" => (format!("{word}_TEXT"), text, false),
        "DATE" | "DATETIME" | "TIMESTAMP" | "TIME" | "JSON" | "UUID" => {
            (format!("{word}_TEXT"), None, false)
        }
        "BINARY" | "VARBINARY" | "TINYBLOB" | "BLOB" | "MEDIUMBLOB" | "LONGBLOB" => {
            (format!("{}_BLOB", word.trim_end_matches("BLOB")), None, false)
        }
        _ => return Err(SqlError::unsupported(&format!("columns of the type {word}"))),
    };
    Ok(Kept { name, collation, is_whole })
}

/// `(10)`, `(10,2)`, or nothing; values of an ENUM are not kept.
fn size(cursor: &mut Cursor<'_, '_>) -> String {
    let mut text = String::new();
    for token in cursor.parentheses().unwrap_or_default() {
        if let Token::Number(digits) = token {
            text.push(if text.is_empty() { '(' } else { ',' });
            text.push_str(digits);
        }
    }
    if !text.is_empty() {
        text.push(')');
    }
    text
}

fn decimal(size: &str) -> Result<String, SqlError> {
    let inner = size.trim_start_matches('(').trim_end_matches(')');
    let mut numbers = inner.split(',').map(|n| n.parse::<u32>().ok());
    let digits = numbers.next().flatten().unwrap_or(10);
    let behind = numbers.next().flatten().unwrap_or(0);
    if digits > MAX_DIGITS || behind > digits {
        let what = format!("DECIMAL of more than {MAX_DIGITS} digits, which would not be exact");
        return Err(SqlError::unsupported(&what));
    }
    Ok(format!("DECIMAL({digits},{behind})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lex::Lexer;

    fn of(text: &str) -> Result<(String, Option<&'static str>), SqlError> {
        let tokens = Lexer::new(text.as_bytes(), 0).all()?;
        let mut cursor = Cursor { tokens: &tokens, at: 0 };
        kept(&mut cursor, false).map(|kept| (kept.name, kept.collation))
    }

    #[test]
    fn types_are_kept_by_their_names_and_so_that_sqlite_keeps_the_values() {
        for (text, name, collation) in [
            ("INT(11) UNSIGNED", "INT(11) UNSIGNED", None),
            ("decimal(10,2)", "DECIMAL(10,2)", None),
            ("varchar(20)", "VARCHAR(20)", Some("mysql_ci")),
            ("VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", "VARCHAR(20)", Some("RTRIM")),
            ("enum('a','b')", "ENUM_TEXT", Some("mysql_ci")),
            ("datetime(6)", "DATETIME_TEXT", None),
            ("LONGBLOB", "LONG_BLOB", None),
            ("VARBINARY(10)", "VARBINARY_BLOB", None),
            ("BLOB", "_BLOB", None),
            ("DOUBLE PRECISION", "DOUBLE", None),
        ] {
            assert_eq!(of(text).unwrap(), (name.into(), collation), "{text}");
        }
        for text in ["BIT(1)", "POINT", "DECIMAL(16,2)", "GEOMETRY"] {
            assert_eq!(of(text).unwrap_err().code, 1235, "{text}");
        }
    }
}
