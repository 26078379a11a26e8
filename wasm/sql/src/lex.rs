//! Cuts a statement in MySQL's dialect into words.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::errors::{SqlError, code};

/// A word of a statement.
#[derive(Debug, Clone, PartialEq)]
pub enum Token<'a> {
    /// A keyword or a name, as it is written.
    Word(&'a str),
    /// A name in backticks, without them.
    Name(String),
    /// A string, without its quotes and escapes.
    Text(Vec<u8>),
    /// A number.
    Number(&'a str),
    /// `0x…` or `x'…'`: bytes.
    Hex(Vec<u8>),
    /// Anything else: one of [`OPERATORS`], or one character.
    Op(&'a str),
}

/// Operators of more than one character, longer ones first.
const OPERATORS: [&str; 11] = ["<=>", "<<", ">>", "<=", ">=", "<>", "!=", "&&", "||", ":=", "@@"];

impl Token<'_> {
    /// Whether it is that keyword; `word` in capitals.
    pub fn is(&self, word: &str) -> bool {
        matches!(self, Self::Word(w) if w.eq_ignore_ascii_case(word))
    }

    /// Whether it is that operator.
    pub fn is_op(&self, op: &str) -> bool {
        matches!(self, Self::Op(o) if *o == op)
    }

    /// The name that it is.
    pub fn name(&self) -> Option<String> {
        match self {
            Self::Word(word) => Some((*word).to_string()),
            Self::Name(name) => Some(name.clone()),
            _ => None,
        }
    }
}

/// Limit of words of a statement that are looked at together: compiling more takes longer than a
/// call may.
pub const MAX_WORDS: usize = 20_000;

/// Goes through a statement.
#[derive(Debug, Clone)]
pub struct Lexer<'a> {
    input: &'a [u8],
    /// Offset of the next word, or of space before it.
    pub at: usize,
}

impl<'a> Lexer<'a> {
    /// Begins at a byte.
    pub fn new(input: &'a [u8], at: usize) -> Self {
        Self { input, at }
    }

    /// All words that are left.
    ///
    /// # Errors
    /// See [`Lexer::next`]; or there are more than [`MAX_WORDS`].
    pub fn all(mut self) -> Result<Vec<Token<'a>>, SqlError> {
        let mut tokens = Vec::new();
        while let Some(token) = self.next()? {
            if tokens.len() == MAX_WORDS {
                let what = format!(
                    "statements of more than {MAX_WORDS} words, but for INSERT and REPLACE of rows \
                     without expressions"
                );
                return Err(SqlError::unsupported(&what));
            }
            tokens.push(token);
        }
        Ok(tokens)
    }

    /// The next word, if there is one.
    ///
    /// # Errors
    /// A string or a comment that does not end, a character that is none, a number that is too
    /// large.
    #[expect(clippy::should_implement_trait, reason = "it can fail")]
    pub fn next(&mut self) -> Result<Option<Token<'a>>, SqlError> {
        self.skip()?;
        let rest = &self.input[self.at..];
        let Some(&first) = rest.first() else { return Ok(None) };
        let token = match first {
            b'\'' | b'"' => Token::Text(self.text(first)?),
            b'`' => Token::Name(self.quoted_name()?),
            b'0' if matches!(rest.get(1), Some(b'x')) && is_hex(rest.get(2)) => {
                self.at += 2;
                Token::Hex(bytes_of(self.run(|b| b.is_ascii_hexdigit()))?)
            }
            b'x' | b'X' if rest.get(1) == Some(&b'\'') => {
                self.at += 1;
                let digits = self.text(b'\'')?;
                Token::Hex(bytes_of(&digits)?)
            }
            b'0'..=b'9' => self.number()?,
            b'.' if rest.get(1).is_some_and(u8::is_ascii_digit) => self.number()?,
            b if is_word(b) => Token::Word(utf8(self.run(is_word))?),
            _ => self.operator()?,
        };
        Ok(Some(token))
    }

    /// Skips space and comments.
    fn skip(&mut self) -> Result<(), SqlError> {
        loop {
            self.run(|b| b.is_ascii_whitespace());
            let rest = &self.input[self.at..];
            let is_dashes = rest.starts_with(b"--")
                && rest.get(2).is_none_or(|b| b.is_ascii_whitespace() || b.is_ascii_control());
            if is_dashes || rest.first() == Some(&b'#') {
                self.run(|b| b != b'\n');
            } else if rest.starts_with(b"/*") {
                let end = rest[2..].windows(2).position(|pair| pair == b"*/");
                let end = end.ok_or_else(|| SqlError::syntax("a comment does not end"))?;
                self.at += end + 4;
            } else {
                return Ok(());
            }
        }
    }

    fn run(&mut self, is_part: impl Fn(u8) -> bool) -> &'a [u8] {
        let rest = &self.input[self.at..];
        let len = rest.iter().position(|&b| !is_part(b)).unwrap_or(rest.len());
        self.at += len;
        &rest[..len]
    }

    /// A string in quotes, which are doubled within it; with escapes.
    fn text(&mut self, quote: u8) -> Result<Vec<u8>, SqlError> {
        self.at += 1;
        let mut text = Vec::new();
        loop {
            text.extend_from_slice(self.run(|b| b != quote && b != b'\\'));
            let unended = || SqlError::syntax("a string does not end");
            let &found = self.input.get(self.at).ok_or_else(unended)?;
            let next = self.input.get(self.at + 1).copied();
            match next {
                _ if found == b'\\' => text.extend_from_slice(escaped(&next.ok_or_else(unended)?)),
                Some(again) if again == quote => text.push(quote),
                _ => {
                    self.at += 1;
                    return Ok(text);
                }
            }
            self.at += 2;
        }
    }

    fn quoted_name(&mut self) -> Result<String, SqlError> {
        self.at += 1;
        let mut name = String::new();
        loop {
            name.push_str(utf8(self.run(|b| b != b'`'))?);
            let rest = &self.input[self.at..];
            if rest.starts_with(b"``") {
                name.push('`');
                self.at += 2;
            } else if rest.is_empty() {
                return Err(SqlError::syntax("a name in backticks does not end"));
            } else {
                self.at += 1;
                let is_fine = !name.is_empty() && !name.contains('\0');
                return if is_fine { Ok(name) } else { Err(SqlError::syntax("an empty name")) };
            }
        }
    }

    fn number(&mut self) -> Result<Token<'a>, SqlError> {
        let start = self.at;
        self.run(|b| b.is_ascii_digit());
        let mut is_whole = true;
        if self.input.get(self.at) == Some(&b'.') {
            self.at += 1;
            is_whole = false;
            self.run(|b| b.is_ascii_digit());
        }
        if matches!(self.input.get(self.at), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(self.input.get(self.at + 1), Some(b'+' | b'-')));
            if self.input.get(self.at + 1 + sign).is_some_and(u8::is_ascii_digit) {
                self.at += 1 + sign;
                is_whole = false;
                self.run(|b| b.is_ascii_digit());
            }
        }
        let digits = utf8(&self.input[start..self.at])?;
        // The lowest number is written as minus one that is too large itself.
        if is_whole && digits.parse::<i64>().is_err() && digits != "9223372036854775808" {
            let text =
                format!("{digits}: whole numbers above 9223372036854775807 cannot be stored");
            return Err(SqlError::new(code::OUT_OF_RANGE, text));
        }
        Ok(Token::Number(digits))
    }

    fn operator(&mut self) -> Result<Token<'a>, SqlError> {
        let rest = &self.input[self.at..];
        let found = OPERATORS.iter().find(|op| rest.starts_with(op.as_bytes()));
        let len = found.map_or(1, |op| op.len());
        self.at += len;
        let op = utf8(&rest[..len])?;
        if op.bytes().all(|b| b.is_ascii_graphic()) {
            Ok(Token::Op(op))
        } else {
            Err(SqlError::syntax("a character that belongs to nothing"))
        }
    }
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'_' | b'$') || b >= 0x80
}

fn is_hex(b: Option<&u8>) -> bool {
    b.is_some_and(u8::is_ascii_hexdigit)
}

/// Character that one behind a backslash stands for.
fn escaped(next: &u8) -> &[u8] {
    match next {
        b'0' => b"\0",
        b'n' => b"\n",
        b'r' => b"\r",
        b't' => b"\t",
        b'b' => b"\x08",
        b'Z' => b"\x1a",
        // For patterns of LIKE, which know them.
        b'%' => b"\\%",
        b'_' => b"\\_",
        other => core::slice::from_ref(other),
    }
}

fn utf8(bytes: &[u8]) -> Result<&str, SqlError> {
    core::str::from_utf8(bytes).map_err(|_| SqlError::syntax("a name that is not UTF-8"))
}

/// Bytes of hexadecimal digits.
fn bytes_of(digits: &[u8]) -> Result<Vec<u8>, SqlError> {
    let odd = digits.len() % 2;
    let padded = [&b"0"[..odd], digits].concat();
    let digit = |b: u8| char::from(b).to_digit(16);
    let byte = |pair: &[u8]| Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8);
    let bytes: Option<Vec<u8>> = padded.chunks_exact(2).map(byte).collect();
    bytes.ok_or_else(|| SqlError::syntax("hexadecimal digits are wanted"))
}

/// Takes the name at a place.
///
/// # Errors
/// There is none.
pub fn name_at(tokens: &[Token<'_>], at: usize) -> Result<String, SqlError> {
    let name = tokens.get(at).and_then(Token::name);
    name.ok_or_else(|| SqlError::syntax("a name is missing"))
}

/// Whether a statement has these words, from a place on.
pub fn has(tokens: &[Token<'_>], at: usize, words: &[&str]) -> bool {
    tokens.len() >= at + words.len() && words.iter().zip(&tokens[at..]).all(|(w, t)| t.is(w))
}

#[cfg(test)]
mod tests;
