//! Problems of a config: what is wrong, where, and how to put it right.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

/// Most problems kept of one config: a person mends them in rounds, and a hostile body must not
/// grow an answer without end.
pub const MAX_PROBLEMS: usize = 100;

/// Text that was parsed, kept to turn offsets into lines and columns.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: PathBuf,
    pub(crate) text: String,
}

/// A byte offset in a source.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) source: Arc<Source>,
    pub(crate) offset: usize,
}

impl Place {
    /// Line and column as an editor shows them: from 1, columns in characters.
    pub(crate) fn location(&self) -> Location {
        let bytes = self.source.text.as_bytes();
        let before = &bytes[..self.offset.min(bytes.len())];
        let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        // Counted over bytes that start a character, so that a stray offset cannot panic.
        let column = before[line_start..].iter().filter(|&&b| b & 0xc0 != 0x80).count() + 1;
        let line = before.iter().filter(|&&b| b == b'\n').count() + 1;
        Location { file: self.source.file.clone(), line, column }
    }
}

/// Place in a file; both numbers start at 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Location {
    /// The config file or drop-in.
    pub file: PathBuf,
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file.display(), self.line, self.column)
    }
}

/// One fault of a config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The setting, as a path: `vm[0].net[1].mac`.
    pub field: String,
    /// Description of the fault.
    pub what: String,
    /// Advice: how to mend it.
    pub fix: String,
    /// The limit that was passed, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Place in the file; none for a body of the control API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<Location>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(location) = &self.location {
            write!(f, "{location}: ")?;
        }
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}; {}", self.what, self.fix)
    }
}

/// Every problem found, in the order of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Problems {
    /// The first [`MAX_PROBLEMS`].
    pub problems: Vec<Problem>,
    /// Number of further problems.
    pub left_out: usize,
}

impl Problems {
    pub(crate) fn push(&mut self, problem: Problem) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(problem);
        } else {
            self.left_out += 1;
        }
    }

    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.problems.is_empty()
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{problem}")?;
        }
        if self.left_out > 0 {
            write!(f, "\n... and {} more", self.left_out)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str, offset: usize) -> Location {
        let source = Source { file: "f.toml".into(), text: text.into() };
        Place { source: Arc::new(source), offset }.location()
    }

    #[test]
    fn offsets_become_lines_and_columns() {
        assert_eq!(place("ab\ncd", 0).to_string(), "f.toml:1:1");
        assert_eq!(place("ab\ncd", 4).to_string(), "f.toml:2:2");
        // Columns count characters, not bytes; an offset past the end is the end.
        assert_eq!(place("äö = 1", 5).to_string(), "f.toml:1:4");
        assert_eq!(place("a\n", 99).to_string(), "f.toml:2:1");
    }

    #[test]
    fn more_problems_than_the_limit_are_counted_not_kept() {
        let mut all = Problems::default();
        for i in 0..MAX_PROBLEMS + 3 {
            all.push(Problem {
                field: format!("f{i}"),
                what: "w".into(),
                fix: "x".into(),
                limit: None,
                location: None,
            });
        }
        assert_eq!((all.problems.len(), all.left_out), (MAX_PROBLEMS, 3));
        assert!(all.to_string().ends_with("... and 3 more"));
    }
}
