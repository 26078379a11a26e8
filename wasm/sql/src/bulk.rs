//! Rows to insert that are all there, without an expression: as FederatedX sends them, many in a
//! statement. The statement is compiled once, and the rows are read and inserted one by one, in as
//! many calls as it takes.

use alloc::string::String;
use alloc::vec::Vec;

use crate::errors::{SqlError, code};
use crate::lex::{Lexer, Token};
use crate::rewrite::quoted;
use crate::value::Value;

/// A statement that is shorter is looked at in whole before anything is done.
const SHORT_BYTES: usize = 64 << 10;

/// Limit of values of a row.
const MAX_VALUES: usize = 1024;

/// Statement before its rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Bulk {
    /// Beginning of the statement for SQLite.
    pub verb: &'static str,
    /// The database's name, if there is one in front of the table's.
    pub schema: Option<String>,
    /// The table.
    pub table: String,
    /// The columns; none: all.
    pub columns: Vec<String>,
    /// Offset of the first row.
    pub at: usize,
}

/// Next row, or something else.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// A row; is it the last?
    Values(Vec<Value>, bool),
    /// Text that is not a row of literals.
    Other,
}

impl Bulk {
    /// The statement for rows of so many values.
    pub fn sql(&self, values: usize) -> String {
        let mut sql = String::from(self.verb);
        sql.push_str(" INTO ");
        if let Some(schema) = &self.schema {
            sql.push_str(&quoted(schema));
            sql.push('.');
        }
        sql.push_str(&quoted(&self.table));
        if values == 0 {
            sql.push_str(" DEFAULT VALUES");
            return sql;
        }
        if !self.columns.is_empty() {
            let columns: Vec<String> = self.columns.iter().map(|c| quoted(c)).collect();
            sql.push_str(&alloc::format!(" ({})", columns.join(",")));
        }
        sql.push_str(" VALUES (?");
        sql.push_str(&",?".repeat(values - 1));
        sql.push(')');
        sql
    }
}

/// Reads what is in front of the rows. None: it is not such a statement.
///
/// # Errors
/// It is such a statement, and has a string or a number that is none.
pub fn parse(text: &[u8]) -> Result<Option<Bulk>, SqlError> {
    let mut lexer = Lexer::new(text, 0);
    let mut verb = match lexer.next() {
        Ok(Some(token)) if token.is("INSERT") => "INSERT",
        Ok(Some(token)) if token.is("REPLACE") => "REPLACE",
        // What is wrong with it others will tell.
        _ => return Ok(None),
    };
    let Some(bulk) = head(&mut lexer, &mut verb)? else { return Ok(None) };
    let mut at = bulk.at;
    loop {
        match row(text, &mut at)? {
            Row::Other => return Ok(None),
            Row::Values(_, true) => break,
            Row::Values(_, false) if text.len() > SHORT_BYTES => break,
            Row::Values(..) => {}
        }
    }
    Ok(Some(bulk))
}

fn head(lexer: &mut Lexer<'_>, verb: &mut &'static str) -> Result<Option<Bulk>, SqlError> {
    let mut token = lexer.next()?;
    while let Some(Token::Word(word)) = &token {
        match word.to_ascii_uppercase().as_str() {
            "IGNORE" if *verb == "INSERT" => *verb = "INSERT OR IGNORE",
            "LOW_PRIORITY" | "HIGH_PRIORITY" | "DELAYED" | "INTO" => {}
            _ => break,
        }
        token = lexer.next()?;
    }
    let Some(mut table) = token.as_ref().and_then(Token::name) else { return Ok(None) };
    let mut schema = None;
    token = lexer.next()?;
    if token.as_ref().is_some_and(|t| t.is_op(".")) {
        let Some(name) = lexer.next()?.as_ref().and_then(Token::name) else { return Ok(None) };
        schema = Some(core::mem::replace(&mut table, name));
        token = lexer.next()?;
    }
    let mut columns = Vec::new();
    if token.as_ref().is_some_and(|t| t.is_op("(")) {
        loop {
            match lexer.next()? {
                Some(t) if t.is_op(")") => break,
                Some(t) if t.is_op(",") => {}
                Some(t) => match t.name() {
                    Some(name) => columns.push(name),
                    None => return Ok(None),
                },
                None => return Ok(None),
            }
            if columns.len() > MAX_VALUES {
                return Ok(None);
            }
        }
        token = lexer.next()?;
    }
    let is_values = token.as_ref().is_some_and(|t| t.is("VALUES") || t.is("VALUE"));
    Ok(is_values.then_some(Bulk { verb, schema, table, columns, at: lexer.at }))
}

/// Reads the next row and goes behind it.
///
/// # Errors
/// A string or a number that is none, too many values.
pub fn row(text: &[u8], at: &mut usize) -> Result<Row, SqlError> {
    let mut lexer = Lexer::new(text, *at);
    if !lexer.next()?.is_some_and(|t| t.is_op("(")) {
        return Ok(Row::Other);
    }
    let mut values = Vec::new();
    loop {
        let Some(value) = literal(&mut lexer, values.is_empty())? else { return Ok(Row::Other) };
        let Some(value) = value else { break };
        values.push(value);
        if values.len() > MAX_VALUES {
            return Err(SqlError::new(code::VALUE_COUNT, "a row of more than 1024 values"));
        }
        match lexer.next()? {
            Some(t) if t.is_op(",") => {}
            Some(t) if t.is_op(")") => break,
            _ => return Ok(Row::Other),
        }
    }
    let is_last = match lexer.next()? {
        Some(t) if t.is_op(",") => false,
        Some(t) if t.is_op(";") => lexer.next()?.is_none(),
        None => true,
        Some(_) => return Ok(Row::Other),
    };
    *at = lexer.at;
    Ok(Row::Values(values, is_last))
}

/// Reads one literal. None: something else. Some(None): the row, which is empty, ends.
fn literal(lexer: &mut Lexer<'_>, may_end: bool) -> Result<Option<Option<Value>>, SqlError> {
    let mut is_minus = false;
    loop {
        let value = match lexer.next()? {
            Some(t) if t.is_op("-") => {
                is_minus = !is_minus;
                continue;
            }
            Some(t) if t.is_op("+") => continue,
            Some(Token::Number(digits)) => number(digits, is_minus),
            _ if is_minus => None,
            Some(Token::Text(text) | Token::Hex(text)) => Some(Value::Text(text)),
            Some(t) if t.is("NULL") => Some(Value::Null),
            Some(t) if t.is("TRUE") => Some(Value::Int(1)),
            Some(t) if t.is("FALSE") => Some(Value::Int(0)),
            Some(t) if t.is_op(")") && may_end => return Ok(Some(None)),
            _ => None,
        };
        return Ok(value.map(Some));
    }
}

fn number(digits: &str, is_minus: bool) -> Option<Value> {
    let signed = |sign: &str| [sign, digits].concat();
    let text = signed(if is_minus { "-" } else { "" });
    if let Ok(whole) = text.parse() {
        return Some(Value::Int(whole));
    }
    // A whole number that is too large would lose digits.
    let is_whole = digits.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| !is_whole).map(Value::Real)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &[u8]) -> Vec<Vec<Value>> {
        let mut at = parse(text).unwrap().unwrap().at;
        let mut rows = Vec::new();
        loop {
            let Row::Values(values, is_last) = row(text, &mut at).unwrap() else { panic!() };
            rows.push(values);
            if is_last {
                return rows;
            }
        }
    }

    #[test]
    fn federatedx_rows_are_taken_one_by_one() {
        let text = b"INSERT INTO `t` (`id`, `v`)  VALUES  (1, 'a\\'b') , (-2,  NULL ) ";
        let bulk = parse(text).unwrap().unwrap();
        assert_eq!(bulk.sql(2), "INSERT INTO \"t\" (\"id\",\"v\") VALUES (?,?)");
        let wanted = vec![
            vec![Value::Int(1), Value::Text(b"a'b".to_vec())],
            vec![Value::Int(-2), Value::Null],
        ];
        assert_eq!(rows(text), wanted);
        let text = b"REPLACE INTO d.t VALUES (1.5, 0x4142, TRUE, -9223372036854775808);";
        assert_eq!(parse(text).unwrap().unwrap().sql(1), "REPLACE INTO \"d\".\"t\" VALUES (?)");
        let wanted =
            [Value::Real(1.5), Value::Text(b"AB".to_vec()), Value::Int(1), Value::Int(i64::MIN)];
        assert_eq!(rows(text), vec![wanted.to_vec()]);
        let text = b"INSERT IGNORE INTO t  VALUES  () ";
        assert_eq!(
            parse(text).unwrap().unwrap().sql(0),
            "INSERT OR IGNORE INTO \"t\" DEFAULT VALUES"
        );
        assert_eq!(rows(text), vec![Vec::new()]);
    }

    #[test]
    fn what_has_expressions_is_for_others() {
        for text in [
            "INSERT INTO t SELECT 1",
            "INSERT INTO t VALUES (1 + 1)",
            "INSERT INTO t VALUES (1), (abs(2))",
            "INSERT INTO t VALUES (1) ON DUPLICATE KEY UPDATE a = 1",
            "INSERT INTO t VALUES (9223372036854775808)",
            "UPDATE t SET a = 1",
            "INSERT INTO t VALUES (1,)",
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap(), None, "{text}");
        }
    }
}
