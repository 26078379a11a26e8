//! Rules of the tree, checked as a test.
//!
//! # Theory of operation [`tree::Tree`] reads every text file once. Each Rust file is taken apart
//! twice: by [`text`], which knows comments and literals, and by [`syntax`], which knows items,
//! imports and the paths that code uses. Both give plain data, so that threads share the work. Each
//! file of [`rules`] holds one rule; a rule turns the tree into [`finding::Finding`]s and knows
//! nothing of exceptions.
//!
//! [`check_tree`] then sorts the findings by `tidy.toml`:
//! - An `allow` or `unsafe_files` entry with its reason covers what stays. One that covers nothing
//!   is a failure.
//! - A path under `not_yet` was not clean when its rule was written. Its findings are reported and
//!   do not fail. A prefix without findings is a failure, "take it off": so the lists only get
//!   shorter.
//! - All others are failures.
//!
//! **Circles.** [`circles`] builds the tree of modules of each crate as the compiler does and
//! resolves each path that code uses, through imports, globs and re-exports, to the file that
//! defines the item. That is an arrow between two files. Groups of files that reach each other are
//! circles. A re-export alone is no arrow, nor is `mod`; a private import of a trait is one, since
//! its methods carry no path. Method calls are not resolved. Code of tests and of the feature
//! `testing` is left out.
//!
//! The binary `tidy` prints the same as text or, with `--json`, for programs; it also lists the
//! circles that are allowed, with the names that tie their files.
//!
//! **Reference pages.** [`mod@reference`] makes `docs/reference/*.md` of the same tree: `tidy
//! reference` writes them, a test finds those that are old.
//!
//! # Limits
//! - What macros expand to is not seen, but for paths that stand in what they are given.
//! - Names behind `cfg` of a platform or a feature count as if all of them were built.
//! - Lengths of functions of C, C++, Python and shell scripts come from how the text is laid out.

pub mod circles;
pub mod config;
pub mod error;
pub mod facts;
pub mod finding;
pub mod packages;
pub mod reference;
pub mod report;
pub mod rules;
pub mod syntax;
pub mod text;
pub mod tree;

use std::path::{Path, PathBuf};

pub use error::TidyError;
pub use report::Report;

/// Root of the tree that this crate was built in.
pub fn find_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let is_root = |folder: &&Path| folder.join("ARCHITECTURE.md").exists();
    here.ancestors().find(is_root).unwrap_or(here).to_owned()
}

/// Settings of a tree, from its root.
const SETTINGS: &str = "test/tidy/tidy.toml";

/// Reads the settings of the tree at `root`.
pub fn read_settings(root: &Path) -> Result<config::Config, TidyError> {
    config::Config::read(&root.join(SETTINGS))
}

/// Checks a tree with its own settings.
pub fn check_tree(root: &Path) -> Result<Report, TidyError> {
    let config = read_settings(root)?;
    let tree = tree::Tree::read(root, &config.skip)
        .map_err(|error| TidyError::Read { path: root.to_owned(), error })?;
    Ok(check(&facts::Facts::collect(tree), &config))
}

/// Checks all rules on a tree that was read.
pub fn check(facts: &facts::Facts, config: &config::Config) -> Report {
    let circles = circles::find(facts);
    let findings = rules::find_all(facts, &circles, config);
    Report::new(findings, circles, rules::rooms::arrows_of_tests(facts), config)
}
