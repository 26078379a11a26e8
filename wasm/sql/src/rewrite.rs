//! Rewrites words of MySQL's dialect into a statement of SQLite's.

use alloc::string::String;
use alloc::vec::Vec;

use crate::errors::SqlError;
use crate::lex::Token;
use crate::value::Value;

/// A statement as SQLite takes it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rewritten {
    /// The text; a `?` for each string.
    pub sql: String,
    /// The strings.
    pub parameters: Vec<Value>,
}

/// Functions that ask for the time of day.
const CLOCKS: [&str; 12] = [
    "NOW",
    "SYSDATE",
    "CURDATE",
    "CURTIME",
    "UTC_TIMESTAMP",
    "UTC_DATE",
    "UTC_TIME",
    "UNIX_TIMESTAMP",
    "LOCALTIME",
    "LOCALTIMESTAMP",
    "DATETIME",
    "JULIANDAY",
];
/// Names that ask for it without parentheses.
const BARE_CLOCKS: [&str; 3] = ["CURRENT_TIMESTAMP", "CURRENT_DATE", "CURRENT_TIME"];
/// Hints that change nothing.
const HINTS: [&str; 9] = [
    "SQL_NO_CACHE",
    "SQL_CACHE",
    "SQL_CALC_FOUND_ROWS",
    "SQL_BUFFER_RESULT",
    "SQL_SMALL_RESULT",
    "SQL_BIG_RESULT",
    "STRAIGHT_JOIN",
    "LOW_PRIORITY",
    "HIGH_PRIORITY",
];

impl Rewritten {
    /// Adds words.
    ///
    /// # Errors
    /// They have something that SQLite has nothing for.
    pub fn add(&mut self, tokens: &[Token<'_>]) -> Result<(), SqlError> {
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += self.add_one(token, &tokens[at + 1..], at)?;
        }
        Ok(())
    }

    /// Adds one word, or several; how many.
    fn add_one(
        &mut self,
        token: &Token<'_>,
        behind: &[Token<'_>],
        at: usize,
    ) -> Result<usize, SqlError> {
        match token {
            Token::Word(word) => return self.add_word(word, behind, at),
            Token::Name(name) => self.push_name(name),
            Token::Text(text) => self.push_value(Value::Text(text.clone())),
            Token::Hex(bytes) => self.push_value(Value::Blob(bytes.clone())),
            Token::Number(digits) => self.push(digits),
            Token::Op(op) => self.push(match *op {
                "&&" => "AND",
                "||" => "OR",
                "!" => "NOT",
                "<=>" => "IS",
                ":=" | "@" | "@@" => return Err(SqlError::unsupported("variables")),
                "?" => return Err(SqlError::unsupported("parameters")),
                other => other,
            }),
        }
        Ok(1)
    }

    fn add_word(&mut self, word: &str, behind: &[Token<'_>], at: usize) -> Result<usize, SqlError> {
        let is = |other: &str| word.eq_ignore_ascii_case(other);
        let is_call = behind.first().is_some_and(|t| t.is_op("("));
        let is_text = matches!(behind.first(), Some(Token::Text(_)));
        if (is_call && CLOCKS.iter().any(|c| is(c))) || BARE_CLOCKS.iter().any(|c| is(c)) {
            return Err(no_calendar(word));
        }
        if word.starts_with('_') && is_text || at < 4 && HINTS.iter().any(|hint| is(hint)) {
            return Ok(1);
        }
        if is("LIKE") && is_text {
            self.push("LIKE");
            self.add(&behind[..1])?;
            if !behind.get(1).is_some_and(|t| t.is("ESCAPE")) {
                self.push("ESCAPE '\\'");
            }
            return Ok(2);
        }
        if is("ON") && behind.first().is_some_and(|t| t.is("DUPLICATE")) {
            self.push("ON CONFLICT DO UPDATE SET");
            let rest =
                behind.get(3..).ok_or_else(|| SqlError::syntax("ON DUPLICATE KEY UPDATE"))?;
            self.add_update_of_duplicate(rest)?;
            return Ok(1 + behind.len());
        }
        if is("IF") && is_call {
            self.push("iif");
        } else {
            self.push(word);
        }
        Ok(1)
    }

    /// `VALUES(column)` there is the value that was to be inserted.
    fn add_update_of_duplicate(&mut self, mut rest: &[Token<'_>]) -> Result<(), SqlError> {
        while let Some(first) = rest.first() {
            if let (true, Some(column)) = (first.is("VALUES"), rest.get(2).and_then(Token::name)) {
                self.push("excluded.");
                self.push_name(&column);
                rest = rest.get(4..).unwrap_or_default();
            } else {
                let used = self.add_one(first, &rest[1..], usize::MAX)?;
                rest = rest.get(used..).unwrap_or_default();
            }
        }
        Ok(())
    }

    /// Adds a piece of text as it is.
    pub fn push(&mut self, text: &str) {
        if !self.sql.is_empty() {
            self.sql.push(' ');
        }
        self.sql.push_str(text);
    }

    /// Adds a name.
    pub fn push_name(&mut self, name: &str) {
        if !self.sql.is_empty() {
            self.sql.push(' ');
        }
        self.sql.push_str(&quoted(name));
    }

    fn push_value(&mut self, value: Value) {
        self.push("?");
        self.parameters.push(value);
    }
}

/// A name in SQLite's quotes.
pub fn quoted(name: &str) -> String {
    let mut quoted = String::with_capacity(name.len() + 2);
    quoted.push('"');
    for c in name.chars() {
        if c == '"' {
            quoted.push('"');
        }
        quoted.push(c);
    }
    quoted.push('"');
    quoted
}

/// A string in SQLite's quotes, where no parameter may be.
///
/// # Errors
/// It has a zero byte, or is not UTF-8.
pub fn quoted_text(text: &[u8]) -> Result<String, SqlError> {
    let text = core::str::from_utf8(text).ok().filter(|text| !text.contains('\0'));
    let text = text.ok_or_else(|| SqlError::unsupported("such bytes in a definition"))?;
    Ok(["'", &text.replace('\'', "''"), "'"].concat())
}

/// The error of whoever asks for the time.
pub fn no_calendar(word: &str) -> SqlError {
    let mut text = String::from(word);
    text.push_str(": a module has no calendar; give the time in the statement");
    SqlError::unsupported(&text)
}

/// Rewrites `UPDATE …` or `DELETE …` with a LIMIT, which SQLite has not: the rows are looked up
/// first.
///
/// # Errors
/// See [`Rewritten::add`].
pub fn change(tokens: &[Token<'_>]) -> Result<Rewritten, SqlError> {
    let mut out = Rewritten::default();
    let is_update = tokens.first().is_some_and(|t| t.is("UPDATE"));
    let mut at = 1;
    out.push(if is_update { "UPDATE" } else { "DELETE" });
    while tokens.get(at).is_some_and(|t| t.is("LOW_PRIORITY") || t.is("QUICK") || t.is("IGNORE")) {
        if is_update && tokens[at].is("IGNORE") {
            out.push("OR IGNORE");
        }
        at += 1;
    }
    if !is_update {
        out.push("FROM");
        at += usize::from(tokens.get(at).is_some_and(|t| t.is("FROM")));
    }
    let place = |word| top_level(tokens, at, |t| t.is(word));
    let (condition, order, limit) = (place("WHERE"), place("ORDER"), place("LIMIT"));
    let end = [condition, order, limit].into_iter().flatten().min().unwrap_or(tokens.len());
    let set = place("SET").unwrap_or(end);
    let table = &tokens[at..if is_update { set.min(end) } else { end }];
    if table.iter().any(|t| t.is_op(",")) {
        return Err(SqlError::unsupported("changes of several tables at once"));
    }
    out.add(&tokens[at..end])?;
    if limit.is_none() {
        // An order alone changes nothing.
        if let Some(condition) = condition {
            let condition = tokens.get(condition..order.unwrap_or(tokens.len()));
            out.add(condition.ok_or_else(|| SqlError::syntax("WHERE stands behind ORDER BY"))?)?;
        }
        return Ok(out);
    }
    out.push("WHERE rowid IN (SELECT rowid FROM");
    out.add(table)?;
    out.add(&tokens[end..])?;
    out.push(")");
    Ok(out)
}

/// Offset of the first such word outside of parentheses.
pub fn top_level(
    tokens: &[Token<'_>],
    from: usize,
    is_wanted: impl Fn(&Token<'_>) -> bool,
) -> Option<usize> {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(from) {
        if token.is_op("(") {
            depth += 1;
        } else if token.is_op(")") {
            depth -= 1;
        } else if depth == 0 && is_wanted(token) {
            return Some(at);
        }
    }
    None
}
