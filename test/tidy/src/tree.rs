//! Files of the tree, read once.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::{fs, io};

/// Language of a file, as far as rules differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Language {
    /// Rust.
    Rust,
    /// C, C++ and their headers.
    C,
    /// Python.
    Python,
    /// Shell, by the ending or by the first line.
    Shell,
    /// Markdown.
    Markdown,
    /// TOML.
    Toml,
    /// Everything else that is text.
    Other,
}

/// One text file.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Path from the root, with `/`.
    pub path: String,
    /// Content.
    pub text: String,
    /// Language.
    pub language: Language,
}

impl SourceFile {
    /// A file with its language found from name and content.
    pub fn new(path: &str, text: &str) -> SourceFile {
        let language = language_of(path, text);
        SourceFile { path: path.to_owned(), text: text.to_owned(), language }
    }

    /// Name of the file without folder and ending.
    pub fn stem(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or(&self.path);
        name.split('.').next().unwrap_or(name)
    }
}

/// The text files of a tree, sorted by path, and the names of all files and folders.
#[derive(Debug, Default)]
pub struct Tree {
    /// Text files.
    pub files: Vec<SourceFile>,
    /// Paths of all files and folders, text or not.
    pub paths: BTreeSet<String>,
    by_path: HashMap<String, usize>,
}

impl Tree {
    /// Reads all text files under `root`. Left out: names that begin with a dot, but `.ci` and
    /// `.github`, and the paths in `skip`.
    pub fn read(root: &Path, skip: &[String]) -> io::Result<Tree> {
        let mut tree = Tree::default();
        tree.read_folder(root, "", skip)?;
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        tree.index();
        Ok(tree)
    }

    /// A tree of these files, for tests.
    pub fn from_sources(sources: &[(&str, &str)]) -> Tree {
        let mut tree = Tree::default();
        for (path, text) in sources {
            tree.add_path(path);
            tree.files.push(SourceFile::new(path, text));
        }
        tree.files.sort_by(|a, b| a.path.cmp(&b.path));
        tree.index();
        tree
    }

    /// Finds a file by its path.
    pub fn file(&self, path: &str) -> Option<&SourceFile> {
        self.by_path.get(path).map(|&i| &self.files[i])
    }

    /// Position of a file in [`Tree::files`].
    pub fn position(&self, path: &str) -> Option<usize> {
        self.by_path.get(path).copied()
    }

    /// All files of one language.
    pub fn files_in(&self, language: Language) -> impl Iterator<Item = &SourceFile> {
        self.files.iter().filter(move |f| f.language == language)
    }

    fn read_folder(&mut self, root: &Path, folder: &str, skip: &[String]) -> io::Result<()> {
        for entry in fs::read_dir(root.join(folder))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with('.') && name != ".ci" && name != ".github" {
                continue;
            }
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            if skip.contains(&path) {
                continue;
            }
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.read_folder(root, &path, skip)?;
            } else if kind.is_file()
                && let Ok(text) = String::from_utf8(fs::read(entry.path())?)
                && !text.contains('\0')
            {
                self.files.push(SourceFile { language: language_of(&path, &text), path, text });
                continue;
            }
            self.paths.insert(path);
        }
        Ok(())
    }

    fn index(&mut self) {
        for (i, file) in self.files.iter().enumerate() {
            self.by_path.insert(file.path.clone(), i);
            self.paths.insert(file.path.clone());
        }
    }

    fn add_path(&mut self, path: &str) {
        let mut folder = path;
        while let Some((parent, _)) = folder.rsplit_once('/') {
            self.paths.insert(parent.to_owned());
            folder = parent;
        }
    }
}

fn language_of(path: &str, text: &str) -> Language {
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("rs") => Language::Rust,
        Some("c" | "h" | "cc") => Language::C,
        Some("py") => Language::Python,
        Some("sh") => Language::Shell,
        Some("md") => Language::Markdown,
        Some("toml") => Language::Toml,
        _ => match text.lines().next() {
            Some(line) if line.starts_with("#!") && line.contains("python") => Language::Python,
            Some(line) if line.starts_with("#!") && line.ends_with("sh") => Language::Shell,
            _ => Language::Other,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_come_from_endings_and_first_lines() {
        assert_eq!(SourceFile::new("a/b.rs", "").language, Language::Rust);
        assert_eq!(SourceFile::new("a/b.h", "").language, Language::C);
        assert_eq!(SourceFile::new("scripts/x", "#!/usr/bin/env bash\n").language, Language::Shell);
        assert_eq!(SourceFile::new("x", "#!/usr/bin/python3\n").language, Language::Python);
        assert_eq!(SourceFile::new("seeds/any", "abc").language, Language::Other);
    }

    #[test]
    fn folders_are_paths_too() {
        let tree = Tree::from_sources(&[("a/b/c.md", "")]);
        assert!(tree.paths.contains("a/b") && tree.paths.contains("a/b/c.md"));
        assert!(tree.file("a/b/c.md").is_some_and(|f| f.stem() == "c"));
    }
}
