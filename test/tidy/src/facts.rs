//! All that rules look at: the files, and each Rust file taken apart.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::packages::{self, Package};
use crate::syntax::Syntax;
use crate::text::RustText;
use crate::tree::{Language, SourceFile, Tree};

/// Threads that parse; there is nothing to gain from more.
const MAX_THREADS: usize = 8;

/// A Rust file taken apart.
#[derive(Debug)]
pub struct RustFile {
    /// Position in [`Tree::files`].
    pub file: usize,
    /// Comments, literals and code.
    pub text: RustText,
    /// Syntax; the error where the file does not parse.
    pub syntax: Result<Syntax, String>,
}

/// The tree with what was found in its files.
#[derive(Debug)]
pub struct Facts {
    /// Files.
    pub tree: Tree,
    /// Rust files, in the order of [`Tree::files`].
    pub rust: Vec<RustFile>,
    /// Packages, sorted by folder.
    pub packages: Vec<Package>,
}

impl Facts {
    /// Takes all files of a tree apart.
    pub fn collect(tree: Tree) -> Facts {
        let next = AtomicUsize::new(0);
        let threads = thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let mut rust = thread::scope(|scope| {
            let workers: Vec<_> =
                (0..threads).map(|_| scope.spawn(|| parse_files(&tree, &next))).collect();
            workers.into_iter().flat_map(|w| w.join().unwrap_or_default()).collect::<Vec<_>>()
        });
        rust.sort_by_key(|f| f.file);
        let packages = packages::read(&tree);
        Facts { tree, rust, packages }
    }

    /// Facts of a tree that has these files, for tests.
    pub fn from_sources(sources: &[(&str, &str)]) -> Facts {
        Facts::collect(Tree::from_sources(sources))
    }

    /// Pairs of each Rust file and what was found in it.
    pub fn rust_files(&self) -> impl Iterator<Item = (&SourceFile, &RustFile)> {
        self.rust.iter().map(|r| (&self.tree.files[r.file], r))
    }

    /// Syntax of the file at `path`, if it is Rust that parses.
    pub fn syntax(&self, path: &str) -> Option<&Syntax> {
        let file = self.tree.position(path)?;
        let at = self.rust.binary_search_by_key(&file, |r| r.file).ok()?;
        self.rust[at].syntax.as_ref().ok()
    }
}

fn parse_files(tree: &Tree, next: &AtomicUsize) -> Vec<RustFile> {
    let mut done = Vec::new();
    loop {
        let file = next.fetch_add(1, Ordering::Relaxed);
        let Some(source) = tree.files.get(file) else { return done };
        if source.language == Language::Rust {
            let text = RustText::parse(&source.text);
            let syntax = Syntax::parse(&source.text).map_err(|e| e.to_string());
            done.push(RustFile { file, text, syntax });
        }
    }
}
