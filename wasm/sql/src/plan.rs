//! Plan of a statement: what is to be done for it.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use crate::bulk::{self, Bulk};
use crate::create;
use crate::errors::SqlError;
use crate::lex::{Lexer, Token, has, name_at};
use crate::rewrite::{self, Rewritten, quoted};
use crate::show::{self, Show};

/// A statement, understood.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// Nothing that matters here.
    Nothing,
    /// Rows are wanted, and nothing is changed.
    Read(Rewritten),
    /// Rows are wanted, and then others must not change them.
    ReadForUpdate(Rewritten),
    /// Rows are changed.
    Write(Rewritten),
    /// Rows are inserted that are all there.
    Bulk(Bulk),
    /// Tables are made or changed: statements that go together, and say how many rows were changed
    /// or not.
    Define(Vec<Rewritten>),
    /// The statement is one that SQLite does not know itself.
    Show(Show),
    /// A transaction begins.
    Begin,
    /// The transaction is committed.
    Commit,
    /// The transaction is rolled back.
    Rollback,
    /// A place to go back to.
    Savepoint(String),
    /// Going back to it.
    RollbackTo(String),
    /// A savepoint is not needed any more.
    Release(String),
    /// Whether statements are transactions of their own.
    Autocommit(bool),
    /// Another database.
    Use(String),
    /// A database is made; true: it may be there.
    CreateDatabase(String, bool),
    /// A database goes; true: it need not be there.
    DropDatabase(String, bool),
}

/// Understands a statement.
///
/// # Errors
/// It is none, or is one that cannot be served.
pub fn plan(text: &[u8]) -> Result<Plan, SqlError> {
    if let Some(bulk) = bulk::parse(text)? {
        return Ok(Plan::Bulk(bulk));
    }
    let mut tokens = Lexer::new(text, 0).all()?;
    while tokens.last().is_some_and(|t| t.is_op(";")) {
        tokens.pop();
    }
    if tokens.iter().any(|t| t.is_op(";")) {
        return Err(SqlError::unsupported("several statements at once"));
    }
    of_tokens(&tokens, text)
}

fn of_tokens(tokens: &[Token<'_>], text: &[u8]) -> Result<Plan, SqlError> {
    let Some(first) = tokens.first() else { return Ok(Plan::Nothing) };
    let Token::Word(word) = first else {
        // A SELECT in parentheses is the one that begins so.
        return if first.is_op("(") { read(tokens) } else { Err(not_understood(text)) };
    };
    match word.to_ascii_uppercase().as_str() {
        "SELECT" => match show::select(tokens)? {
            Some(show) => Ok(Plan::Show(show)),
            None => read(tokens),
        },
        "WITH" | "VALUES" => read(tokens),
        "INSERT" | "REPLACE" => insert(tokens),
        "UPDATE" | "DELETE" => Ok(Plan::Write(rewrite::change(tokens)?)),
        "SET" => set(tokens),
        "BEGIN" | "START" | "COMMIT" | "ROLLBACK" | "SAVEPOINT" | "RELEASE" => transaction(tokens),
        "SHOW" | "DESCRIBE" | "DESC" => Ok(Plan::Show(show::show(tokens)?)),
        "USE" => Ok(Plan::Use(name_at(tokens, 1)?)),
        "CREATE" => create_something(tokens),
        "DROP" => drop_something(tokens),
        "ALTER" => create::alter(tokens).map(Plan::Define),
        "TRUNCATE" => truncate(tokens),
        "OPTIMIZE" | "ANALYZE" | "REPAIR" | "CHECK" | "FLUSH" | "UNLOCK" => Ok(Plan::Nothing),
        _ => Err(not_understood(text)),
    }
}

fn not_understood(text: &[u8]) -> SqlError {
    let start = String::from_utf8_lossy(&text[..text.len().min(80)]);
    SqlError::syntax(alloc::format!("a statement that the module sql does not know: {start}"))
}

fn read(tokens: &[Token<'_>]) -> Result<Plan, SqlError> {
    let mut end = tokens.len();
    let mut locks = false;
    for tail in [&["FOR", "UPDATE"][..], &["LOCK", "IN", "SHARE", "MODE"], &["FOR", "SHARE"]] {
        if end >= tail.len() && has(tokens, end - tail.len(), tail) {
            end -= tail.len();
            locks = true;
        }
    }
    // A table of nothing.
    if end >= 2 && has(tokens, end - 2, &["FROM", "DUAL"]) {
        end -= 2;
    }
    let mut out = Rewritten::default();
    out.add(&tokens[..end])?;
    Ok(if locks { Plan::ReadForUpdate(out) } else { Plan::Read(out) })
}

fn insert(tokens: &[Token<'_>]) -> Result<Plan, SqlError> {
    let mut out = Rewritten::default();
    let mut at = 1;
    let mut ignores = false;
    while let Some(Token::Word(word)) = tokens.get(at) {
        match word.to_ascii_uppercase().as_str() {
            "IGNORE" => ignores = true,
            "LOW_PRIORITY" | "HIGH_PRIORITY" | "DELAYED" | "INTO" => {}
            _ => break,
        }
        at += 1;
    }
    let is_replace = tokens.first().is_some_and(|t| t.is("REPLACE"));
    out.push(match (is_replace, ignores) {
        (true, _) => "REPLACE INTO",
        (false, true) => "INSERT OR IGNORE INTO",
        (false, false) => "INSERT INTO",
    });
    let is_set = rewrite::top_level(tokens, at, |t| t.is("SET")) == Some(at + 1);
    if is_set {
        return Err(SqlError::unsupported("INSERT … SET"));
    }
    out.add(&tokens[at..])?;
    Ok(Plan::Write(out))
}

/// Plans a SET: only AUTOCOMMIT matters, all else is of a server that this is not.
fn set(tokens: &[Token<'_>]) -> Result<Plan, SqlError> {
    let at = tokens.iter().position(|t| t.is("AUTOCOMMIT"));
    let Some(at) = at else { return Ok(Plan::Nothing) };
    let value = tokens.get(at + 1..).unwrap_or_default();
    let value = value.iter().find(|t| !t.is_op("=") && !t.is_op(":="));
    match value {
        Some(Token::Number("0")) => Ok(Plan::Autocommit(false)),
        Some(Token::Number("1")) => Ok(Plan::Autocommit(true)),
        Some(t) if t.is("OFF") || t.is("FALSE") => Ok(Plan::Autocommit(false)),
        Some(t) if t.is("ON") || t.is("TRUE") || t.is("DEFAULT") => Ok(Plan::Autocommit(true)),
        _ => Err(SqlError::syntax("SET AUTOCOMMIT wants 0 or 1")),
    }
}

fn transaction(tokens: &[Token<'_>]) -> Result<Plan, SqlError> {
    let is = |at: usize, word: &str| tokens.get(at).is_some_and(|t| t.is(word));
    if is(0, "BEGIN") || is(0, "START") && is(1, "TRANSACTION") {
        return Ok(Plan::Begin);
    }
    if is(0, "COMMIT") {
        return Ok(Plan::Commit);
    }
    if is(0, "SAVEPOINT") {
        return Ok(Plan::Savepoint(name_at(tokens, 1)?));
    }
    if is(0, "RELEASE") {
        return Ok(Plan::Release(name_at(tokens, 2)?));
    }
    if !is(0, "ROLLBACK") {
        return Err(SqlError::syntax("START TRANSACTION is meant?"));
    }
    let to = if is(1, "WORK") { 2 } else { 1 };
    if !is(to, "TO") {
        return Ok(Plan::Rollback);
    }
    let name = to + 1 + usize::from(is(to + 1, "SAVEPOINT"));
    Ok(Plan::RollbackTo(name_at(tokens, name)?))
}

fn create_something(tokens: &[Token<'_>]) -> Result<Plan, SqlError> {
    if has(tokens, 1, &["DATABASE"]) || has(tokens, 1, &["SCHEMA"]) {
        let may_exist = has(tokens, 2, &["IF", "NOT", "EXISTS"]);
        let name = name_at(tokens, if may_exist { 5 } else { 2 })?;
        return Ok(Plan::CreateDatabase(name, may_exist));
    }
    create::create(tokens).map(Plan::Define)
}

fn drop_something(tokens: &[Token<'_>]) -> Result<Plan, SqlError> {
    let may_miss = has(tokens, 2, &["IF", "EXISTS"]);
    let at = if may_miss { 4 } else { 2 };
    if has(tokens, 1, &["DATABASE"]) || has(tokens, 1, &["SCHEMA"]) {
        return Ok(Plan::DropDatabase(name_at(tokens, at)?, may_miss));
    }
    if has(tokens, 1, &["INDEX"]) {
        let (index, table) = (name_at(tokens, at)?, name_at(tokens, at + 2)?);
        return Ok(Plan::Define(vec![create::drop_index(&table, &index)]));
    }
    if !has(tokens, 1, &["TABLE"]) {
        return Err(SqlError::unsupported("DROP of anything but TABLE, INDEX and DATABASE"));
    }
    let mut statements = Vec::new();
    for one in tokens[at.min(tokens.len())..].split(|t| t.is_op(",")) {
        let mut out = Rewritten::default();
        out.push(if may_miss { "DROP TABLE IF EXISTS" } else { "DROP TABLE" });
        let one = one.strip_suffix(&[Token::Word("CASCADE")]).unwrap_or(one);
        out.add(one)?;
        statements.push(out);
    }
    Ok(Plan::Define(statements))
}

fn truncate(tokens: &[Token<'_>]) -> Result<Plan, SqlError> {
    let at = if has(tokens, 1, &["TABLE"]) { 2 } else { 1 };
    let table = name_at(tokens, at)?;
    let sql = alloc::format!("DELETE FROM {}", quoted(&table));
    Ok(Plan::Define(vec![Rewritten { sql, parameters: Vec::new() }]))
}
