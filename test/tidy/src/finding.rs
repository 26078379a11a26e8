//! Findings: one broken rule at one place.

use std::fmt;

use serde::Serialize;

/// One place where the tree breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// File or folder, from the root of the tree.
    pub path: String,
    /// Line of the file, counted from 1.
    pub line: usize,
    /// Name of the rule, as in `tidy.toml`.
    pub rule: &'static str,
    /// Text of the error: what is wrong, and the limit.
    pub text: String,
    /// Size that an exception's `limit` is compared with; 0 where the rule measures nothing.
    pub size: usize,
}

impl Finding {
    /// A finding of a rule that measures nothing.
    pub fn new(rule: &'static str, path: &str, line: usize, text: impl Into<String>) -> Finding {
        Finding { path: path.to_owned(), line, rule, text: text.into(), size: 0 }
    }

    /// The same finding with the size that was measured.
    pub fn sized(mut self, size: usize) -> Finding {
        self.size = size;
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line, self.rule, self.text)
    }
}
