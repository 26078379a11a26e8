//! Settings: `tidy.toml` with limits, lists of words, exceptions, and places that are not clean
//! yet.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::error::TidyError;

/// Content of `tidy.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Paths that are no part of the tree: build outputs.
    pub skip: Vec<String>,
    /// Numbers that rules compare with.
    pub limits: Limits,
    /// Words that rules look for.
    pub words: Words,
    /// Exceptions that stay, each with its reason.
    #[serde(default)]
    pub allow: Vec<Allow>,
    /// Files with `unsafe`, each with its reason.
    #[serde(default)]
    pub unsafe_files: BTreeMap<String, String>,
    /// Path prefixes by rule that are not clean yet: reported, but no failure.
    #[serde(default)]
    pub not_yet: BTreeMap<String, Vec<String>>,
}

/// Numbers that rules compare with.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Columns of a line of code or of a comment.
    pub columns: usize,
    /// Columns of a line of prose in a page.
    pub page_columns: usize,
    /// Lines of a function.
    pub function_lines: usize,
    /// Lines of a file.
    pub file_lines: usize,
    /// Files that may import each other in a circle.
    pub circle_files: usize,
}

/// Words that rules look for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Words {
    /// Words that no doc comment begins with.
    pub doc_openings: Vec<String>,
    /// Names that no file and no folder has.
    pub file_names: Vec<String>,
    /// Folders whose names at the beginning of a path make it a link into the tree.
    pub link_roots: Vec<String>,
}

/// One exception.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allow {
    /// Rule that the exception is from.
    pub rule: String,
    /// File, or folder with all in it.
    pub path: String,
    /// Words that the finding's text contains, where the path alone is too much.
    #[serde(default)]
    pub text: String,
    /// Largest size that is allowed; any where it is missing.
    pub limit: Option<usize>,
    /// Reason why it stays.
    pub reason: String,
}

impl Config {
    /// Reads the settings from a file.
    pub fn read(path: &Path) -> Result<Config, TidyError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| TidyError::Read { path: path.to_owned(), error })?;
        Config::parse(&text)
    }

    /// Reads the settings from text; `unsafe_files` become exceptions as all others.
    pub fn parse(text: &str) -> Result<Config, TidyError> {
        let mut config: Config = toml::from_str(text)?;
        let files = std::mem::take(&mut config.unsafe_files);
        config.allow.extend(files.into_iter().map(|(path, reason)| Allow {
            rule: "unsafe".to_owned(),
            path,
            text: String::new(),
            limit: None,
            reason,
        }));
        Ok(config)
    }
}

/// Tells whether `path` is `prefix` or lies in the folder `prefix`; all lie in the empty one.
pub fn is_under(path: &str, prefix: &str) -> bool {
    prefix.is_empty()
        || path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Settings of unit tests, without exceptions.
    pub(crate) fn config() -> Config {
        Config::parse(
            "skip = []\n\
             [limits]\ncolumns = 100\npage_columns = 120\nfunction_lines = 70\nfile_lines = 800\ncircle_files = 2\n\
             [words]\ndoc_openings = ['Of', 'Its']\nfile_names = ['lately']\n\
             link_roots = ['docs', 'crates']\n",
        )
        .unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_at_a_folder() {
        assert!(is_under("crates/pipe/src/a.rs", "crates/pipe"));
        assert!(is_under("crates/pipe", "crates/pipe"));
        assert!(!is_under("crates/pipeline/a.rs", "crates/pipe"));
        assert!(is_under("crates", ""));
    }

    #[test]
    fn unknown_settings_are_refused() {
        assert!(Config::parse("skipp = []").is_err());
    }
}
