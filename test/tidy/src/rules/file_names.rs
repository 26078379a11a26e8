//! `file_names`: files and folders are named for what is in them, never with a riddle.

use std::collections::BTreeSet;

use crate::config::Config;
use crate::facts::Facts;
use crate::finding::Finding;
use crate::tree::Language;

/// Name of the rule.
pub const NAME: &str = "file_names";

/// Finds source files and their folders that have a name of the list.
pub fn find(facts: &Facts, config: &Config, out: &mut Vec<Finding>) {
    let mut folders = BTreeSet::new();
    for file in &facts.tree.files {
        if matches!(file.language, Language::Markdown | Language::Toml | Language::Other) {
            continue;
        }
        let mut check = |path: &str, stem: &str| {
            let name = stem.strip_suffix("_tests").unwrap_or(stem);
            if config.words.file_names.iter().any(|n| n == name) {
                let text = format!("`{name}` says nothing: name the type or the subject");
                out.push(Finding::new(NAME, path, 1, text));
            }
        };
        check(&file.path, file.stem());
        let mut path = file.path.as_str();
        while let Some((folder, _)) = path.rsplit_once('/') {
            if folders.insert(folder) {
                check(folder, folder.rsplit('/').next().unwrap_or(folder));
            }
            path = folder;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn riddles_are_found_in_files_and_folders() {
        let sources =
            [("a/lately.rs", ""), ("a/lately_tests.rs", ""), ("lately/b.c", ""), ("a/x.rs", "")];
        let seen = found(NAME, &sources);
        let text = "`lately` says nothing: name the type or the subject";
        assert_eq!(
            seen,
            [
                format!("a/lately.rs:1: {text}"),
                format!("a/lately_tests.rs:1: {text}"),
                format!("lately:1: {text}"),
            ]
        );
    }
}
