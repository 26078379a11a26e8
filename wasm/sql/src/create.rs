//! Tables and indexes: MySQL's definitions as SQLite's.
//!
//! Each type keeps its name, with an ending that tells SQLite how to keep the values; `types` has
//! the list. A primary key of one column of whole numbers is SQLite's own number of the row.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

mod types;

use crate::errors::SqlError;
use crate::lex::Token;
use crate::lex::{has, name_at};
use crate::rewrite::{Rewritten, no_calendar, quoted, quoted_text};

use types::{Kept, kept};

type Tokens<'a, 'b> = &'a [Token<'b>];

fn plain(sql: String) -> Rewritten {
    Rewritten { sql, parameters: Vec::new() }
}

/// Reads words one after the other.
pub(super) struct Cursor<'a, 'b> {
    pub tokens: Tokens<'a, 'b>,
    pub at: usize,
}

impl<'a, 'b> Cursor<'a, 'b> {
    fn peek(&self) -> Option<&'a Token<'b>> {
        self.tokens.get(self.at)
    }

    /// Goes behind these words, if they are there.
    pub fn eat(&mut self, words: &[&str]) -> bool {
        let found = has(self.tokens, self.at, words);
        self.at += if found { words.len() } else { 0 };
        found
    }

    fn name(&mut self) -> Result<String, SqlError> {
        self.at += 1;
        name_at(self.tokens, self.at - 1)
    }

    /// Takes what is in the parentheses that begin here.
    pub fn parentheses(&mut self) -> Option<Tokens<'a, 'b>> {
        if !self.peek()?.is_op("(") {
            return None;
        }
        let mut depth = 0;
        for (at, token) in self.tokens.iter().enumerate().skip(self.at) {
            depth += i32::from(token.is_op("(")) - i32::from(token.is_op(")"));
            if depth == 0 {
                let inner = &self.tokens[self.at + 1..at];
                self.at = at + 1;
                return Some(inner);
            }
        }
        None
    }
}

/// Cuts at the commas outside of parentheses.
fn items<'a, 'b>(tokens: Tokens<'a, 'b>) -> Vec<Tokens<'a, 'b>> {
    let mut depth = 0;
    tokens
        .split(|token| {
            depth += i32::from(token.is_op("(")) - i32::from(token.is_op(")"));
            depth == 0 && token.is_op(",")
        })
        .collect()
}

/// A table that is made.
#[derive(Default)]
struct Table {
    columns: Vec<Column>,
    primary: Vec<String>,
    constraints: Vec<String>,
    /// Name, columns.
    indexes: Vec<(Option<String>, String)>,
}

struct Column {
    name: String,
    kept: Kept,
    attributes: String,
    is_auto: bool,
    is_nullable: bool,
}

/// `CREATE TABLE …` and `CREATE [UNIQUE] INDEX …`.
///
/// # Errors
/// It is neither, or has something that SQLite has nothing for.
pub fn create(tokens: &[Token<'_>]) -> Result<Vec<Rewritten>, SqlError> {
    let mut cursor = Cursor { tokens, at: 1 };
    let is_unique = cursor.eat(&["UNIQUE"]);
    if cursor.eat(&["INDEX"]) {
        let index = cursor.name()?;
        cursor.eat(&["USING", "BTREE"]);
        if !cursor.eat(&["ON"]) {
            return Err(SqlError::syntax("CREATE INDEX name ON table (columns) is meant?"));
        }
        let table = cursor.name()?;
        let columns = key_columns(&mut cursor, is_unique)?;
        return Ok(vec![index_of(&table, Some(index), &columns.join(","), is_unique, 0)]);
    }
    if is_unique || !cursor.eat(&["TABLE"]) {
        return Err(SqlError::unsupported("CREATE of anything but TABLE, INDEX and DATABASE"));
    }
    let may_exist = cursor.eat(&["IF", "NOT", "EXISTS"]);
    let mut name = cursor.name()?;
    let mut schema = String::new();
    if cursor.peek().is_some_and(|t| t.is_op(".")) {
        cursor.at += 1;
        schema = format!("{}.", quoted(&core::mem::replace(&mut name, cursor.name()?)));
    }
    let inner = cursor.parentheses();
    let inner = inner.ok_or_else(|| SqlError::unsupported("CREATE TABLE without columns"))?;
    let is_binary = types::is_binary(&tokens[cursor.at..]);
    if tokens[cursor.at..].iter().any(|t| t.is("SELECT") || t.is("PARTITION")) {
        return Err(SqlError::unsupported("CREATE TABLE … SELECT and partitions"));
    }
    let mut table = Table::default();
    for item in items(inner) {
        table.item(item, is_binary)?;
    }
    let columns = table.text()?;
    let maybe = if may_exist { "IF NOT EXISTS " } else { "" };
    let mut all = vec![plain(format!("CREATE TABLE {maybe}{schema}{} ({columns})", quoted(&name)))];
    for (number, (index, columns)) in table.indexes.into_iter().enumerate() {
        let mut made = index_of(&name, index, &columns, false, number);
        if may_exist {
            made.sql = made.sql.replacen("CREATE INDEX", "CREATE INDEX IF NOT EXISTS", 1);
        }
        all.push(made);
    }
    Ok(all)
}

fn index_of(
    table: &str,
    name: Option<String>,
    columns: &str,
    is_unique: bool,
    number: usize,
) -> Rewritten {
    let unique = if is_unique { "UNIQUE " } else { "" };
    // Names of indexes are a table's own in MySQL.
    let name = index_name(table, &name.unwrap_or_else(|| format!("key{number}")));
    plain(format!("CREATE {unique}INDEX {name} ON {} ({columns})", quoted(table)))
}

fn index_name(table: &str, index: &str) -> String {
    quoted(&format!("{table}.{index}"))
}

/// `DROP INDEX`.
pub fn drop_index(table: &str, index: &str) -> Rewritten {
    plain(format!("DROP INDEX {}", index_name(table, index)))
}

/// `(a, b(10) DESC)`. A unique key of a part of a column would be another one.
fn key_columns(cursor: &mut Cursor<'_, '_>, is_whole: bool) -> Result<Vec<String>, SqlError> {
    cursor.eat(&["USING", "BTREE"]);
    let inner =
        cursor.parentheses().ok_or_else(|| SqlError::syntax("a key's columns are missing"))?;
    cursor.eat(&["USING", "BTREE"]);
    let column = |item: Tokens<'_, '_>| {
        if is_whole && item.iter().any(|t| t.is_op("(")) {
            return Err(SqlError::unsupported("unique keys of a part of a column"));
        }
        let order = if item.last().is_some_and(|t| t.is("DESC")) { " DESC" } else { "" };
        Ok(quoted(&name_at(item, 0)?) + order)
    };
    items(inner).into_iter().map(column).collect()
}

impl Table {
    fn item(&mut self, tokens: Tokens<'_, '_>, is_binary: bool) -> Result<(), SqlError> {
        let mut cursor = Cursor { tokens, at: 0 };
        if cursor.eat(&["CONSTRAINT"]) {
            let is_named = !["PRIMARY", "UNIQUE", "CHECK", "FOREIGN"]
                .iter()
                .any(|word| cursor.peek().is_some_and(|t| t.is(word)));
            cursor.at += usize::from(is_named);
        }
        if cursor.eat(&["PRIMARY", "KEY"]) {
            self.primary = key_columns(&mut cursor, true)?;
        } else if cursor.eat(&["UNIQUE"]) {
            let _ = cursor.eat(&["KEY"]) || cursor.eat(&["INDEX"]);
            skip_name(&mut cursor);
            let columns = key_columns(&mut cursor, true)?.join(",");
            self.constraints.push(format!("UNIQUE ({columns})"));
        } else if cursor.eat(&["KEY"]) || cursor.eat(&["INDEX"]) {
            let name = skip_name(&mut cursor);
            let columns = key_columns(&mut cursor, false)?.join(",");
            self.indexes.push((name, columns));
        } else if cursor.eat(&["CHECK"]) {
            self.constraints.push(check(&mut cursor)?);
        } else if ["FULLTEXT", "SPATIAL", "FOREIGN", "PERIOD"]
            .iter()
            .any(|word| cursor.peek().is_some_and(|t| t.is(word)))
        {
            return Err(SqlError::unsupported("FULLTEXT, SPATIAL and FOREIGN keys"));
        } else {
            let column = self.column(&mut cursor, is_binary)?;
            self.columns.push(column);
        }
        Ok(())
    }

    fn column(&mut self, cursor: &mut Cursor<'_, '_>, is_binary: bool) -> Result<Column, SqlError> {
        let name = cursor.name()?;
        let kept = kept(cursor, is_binary)?;
        let attributes = String::new();
        let mut column = Column { name, kept, attributes, is_auto: false, is_nullable: true };
        while let Some(token) = cursor.peek() {
            if cursor.eat(&["NOT", "NULL"]) {
                column.is_nullable = false;
            } else if cursor.eat(&["NULL"]) || cursor.eat(&["INVISIBLE"]) {
            } else if cursor.eat(&["AUTO_INCREMENT"]) {
                column.is_auto = true;
            } else if cursor.eat(&["PRIMARY", "KEY"]) || cursor.eat(&["KEY"]) {
                self.primary = vec![quoted(&column.name)];
            } else if cursor.eat(&["UNIQUE"]) {
                cursor.eat(&["KEY"]);
                column.attributes.push_str(" UNIQUE");
            } else if cursor.eat(&["DEFAULT"]) {
                column.attributes.push_str(&default(cursor)?);
            } else if cursor.eat(&["COMMENT"]) || cursor.eat(&["COLUMN_FORMAT"]) {
                cursor.at += 1;
            } else if cursor.eat(&["CHECK"]) {
                column.attributes.push(' ');
                column.attributes.push_str(&check(cursor)?);
            } else {
                let text = format!("column {}: {token:?} of its definition", column.name);
                return Err(SqlError::unsupported(&text));
            }
        }
        Ok(column)
    }

    fn text(&self) -> Result<String, SqlError> {
        let mut parts = Vec::new();
        let [only] = self.primary.as_slice() else { return self.text_with_key(parts) };
        let whole = |c: &&Column| quoted(&c.name) == *only && c.kept.is_whole;
        let Some(number) = self.columns.iter().find(whole) else {
            return self.text_with_key(parts);
        };
        for column in &self.columns {
            if core::ptr::eq(column, number) {
                let auto = if column.is_auto { " AUTOINCREMENT" } else { "" };
                parts.push(format!("{} INTEGER PRIMARY KEY{auto}", quoted(&column.name)));
            } else {
                parts.push(column.text(false)?);
            }
        }
        parts.extend(self.constraints.iter().cloned());
        Ok(parts.join(", "))
    }

    fn text_with_key(&self, mut parts: Vec<String>) -> Result<String, SqlError> {
        for column in &self.columns {
            parts.push(column.text(self.primary.contains(&quoted(&column.name)))?);
        }
        if !self.primary.is_empty() {
            parts.push(format!("PRIMARY KEY ({})", self.primary.join(",")));
        }
        parts.extend(self.constraints.iter().cloned());
        Ok(parts.join(", "))
    }
}

impl Column {
    fn text(&self, is_key: bool) -> Result<String, SqlError> {
        if self.is_auto {
            let what = "AUTO_INCREMENT but for a whole number that is the primary key";
            return Err(SqlError::unsupported(what));
        }
        let name = quoted(&self.name);
        let null = if is_key || !self.is_nullable { " NOT NULL" } else { "" };
        let mut text = format!("{name} {}{null}{}", self.kept.name, self.attributes);
        if let Some(collation) = self.kept.collation {
            text.push_str(&format!(" COLLATE {collation}"));
        }
        if self.kept.is_whole {
            // SQLite would keep anything.
            text.push_str(&format!(" CHECK (typeof({name}) IN ('integer', 'null'))"));
        }
        Ok(text)
    }
}

fn skip_name(cursor: &mut Cursor<'_, '_>) -> Option<String> {
    let name = cursor.peek().filter(|t| !t.is("USING")).and_then(|t| t.name());
    cursor.at += usize::from(name.is_some());
    name
}

fn check(cursor: &mut Cursor<'_, '_>) -> Result<String, SqlError> {
    let inner = cursor.parentheses().ok_or_else(|| SqlError::syntax("CHECK (…) is meant?"))?;
    Ok(format!("CHECK ({})", definition(inner)?))
}

/// An expression where no parameter may be.
fn definition(tokens: Tokens<'_, '_>) -> Result<String, SqlError> {
    let mut text = String::new();
    for token in tokens {
        if let Token::Text(bytes) | Token::Hex(bytes) = token {
            text.push(' ');
            text.push_str(&quoted_text(bytes)?);
        } else {
            let mut one = Rewritten::default();
            one.add(core::slice::from_ref(token))?;
            text.push(' ');
            text.push_str(&one.sql);
        }
    }
    Ok(text)
}

fn default(cursor: &mut Cursor<'_, '_>) -> Result<String, SqlError> {
    if let Some(inner) = cursor.parentheses() {
        return Ok(format!(" DEFAULT ({})", definition(inner)?));
    }
    let mut text = " DEFAULT".to_string();
    let mut take = |cursor: &mut Cursor<'_, '_>| -> Result<bool, SqlError> {
        let token = cursor.peek().ok_or_else(|| SqlError::syntax("DEFAULT of what?"))?;
        if let Token::Word(word) = token
            && !["NULL", "TRUE", "FALSE"].iter().any(|w| token.is(w))
        {
            return Err(no_calendar(word));
        }
        cursor.at += 1;
        text.push_str(&definition(core::slice::from_ref(token))?);
        Ok(token.is_op("-") || token.is_op("+"))
    };
    if take(cursor)? {
        take(cursor)?;
    }
    Ok(text)
}

/// `ALTER TABLE` with one change, of those that SQLite can make.
///
/// # Errors
/// It is another.
pub fn alter(tokens: &[Token<'_>]) -> Result<Vec<Rewritten>, SqlError> {
    let mut cursor = Cursor { tokens, at: 1 };
    if !cursor.eat(&["TABLE"]) {
        return Err(SqlError::unsupported("ALTER of anything but TABLE"));
    }
    let table = cursor.name()?;
    let changes = items(&tokens[cursor.at..]);
    let one = |change: Tokens<'_, '_>| alter_one(&table, &mut Cursor { tokens: change, at: 0 });
    changes.into_iter().map(one).collect()
}

fn alter_one(table: &str, cursor: &mut Cursor<'_, '_>) -> Result<Rewritten, SqlError> {
    let (name, unsupported) = (quoted(table), || SqlError::unsupported("this ALTER TABLE"));
    if cursor.eat(&["RENAME"]) {
        let _ = cursor.eat(&["TO"]) || cursor.eat(&["AS"]);
        return Ok(plain(format!("ALTER TABLE {name} RENAME TO {}", quoted(&cursor.name()?))));
    }
    if cursor.eat(&["DROP"]) {
        if cursor.eat(&["KEY"]) || cursor.eat(&["INDEX"]) {
            return Ok(drop_index(table, &cursor.name()?));
        }
        cursor.eat(&["COLUMN"]);
        return Ok(plain(format!("ALTER TABLE {name} DROP COLUMN {}", quoted(&cursor.name()?))));
    }
    if !cursor.eat(&["ADD"]) || cursor.eat(&["PRIMARY"]) || cursor.eat(&["CONSTRAINT"]) {
        return Err(unsupported());
    }
    let is_unique = cursor.eat(&["UNIQUE"]);
    if cursor.eat(&["KEY"]) || cursor.eat(&["INDEX"]) || is_unique {
        let index = skip_name(cursor);
        let columns = key_columns(cursor, is_unique)?.join(",");
        return Ok(index_of(table, index, &columns, is_unique, 0));
    }
    cursor.eat(&["COLUMN"]);
    let column = Table::default().column(cursor, false)?;
    Ok(plain(format!("ALTER TABLE {name} ADD COLUMN {}", column.text(false)?)))
}

#[cfg(test)]
mod tests;
