//! `links`: files of the tree that comments and Markdown name exist.
//!
//! Looked at are relative links of Markdown, and words such as `docs/…` in Markdown and comments.

use crate::config::{Config, is_under};
use crate::facts::Facts;
use crate::finding::Finding;
use crate::packages::{join, parent};
use crate::tree::{Language, SourceFile};

/// Name of the rule.
pub const NAME: &str = "links";

/// Finds links and paths that lead nowhere.
pub fn find(facts: &Facts, config: &Config, out: &mut Vec<Finding>) {
    let roots = &config.words.link_roots;
    let mut check = |file: &SourceFile, line: usize, path: &str| {
        let is_made = config.skip.iter().any(|made| is_under(path, made));
        if !path.is_empty() && !is_made && !facts.tree.paths.contains(path) {
            let text = format!("`{path}` is not in the tree");
            out.push(Finding::new(NAME, &file.path, line, text));
        }
    };
    for (file, rust) in facts.rust_files() {
        for comment in &rust.text.comments {
            for path in paths(&comment.text, roots) {
                check(file, comment.line, path);
            }
        }
    }
    for file in &facts.tree.files {
        for (i, line) in file.text.lines().enumerate() {
            for path in paths(comment_of(line, file.language), roots) {
                check(file, i + 1, path);
            }
        }
    }
    for file in facts.tree.files_in(Language::Markdown) {
        for (i, line) in file.text.lines().enumerate() {
            let targets = targets(line);
            for target in &targets {
                check(file, i + 1, &join(parent(&file.path), target));
            }
            for path in paths(line, roots).filter(|p| !targets.iter().any(|t| t.contains(p))) {
                check(file, i + 1, path);
            }
        }
    }
}

/// Part of a line that is a comment, in languages other than Rust, as far as one line shows it.
fn comment_of(line: &str, language: Language) -> &str {
    let marks: &[&str] = match language {
        Language::C if line.trim_start().starts_with('*') => return line,
        Language::C => &["/*", "//"],
        Language::Python | Language::Shell | Language::Toml => &["# "],
        _ => return "",
    };
    marks.iter().find_map(|mark| line.find(mark).map(|at| &line[at..])).unwrap_or_default()
}

/// Relative targets of Markdown links, without their anchors.
fn targets(line: &str) -> Vec<&str> {
    let targets = line.match_indices("](").filter_map(|(at, mark)| {
        let target = line[at + mark.len()..].split([')', ' ']).next()?;
        let is_outside = target.contains("://") || target.starts_with("mailto:");
        let path = target.split('#').next()?;
        (!is_outside && !path.is_empty()).then_some(path)
    });
    targets.collect()
}

/// Words of a line that begin with one of the root folders. Patterns (`docs/*.md`) are none.
fn paths<'a>(line: &'a str, roots: &'a [String]) -> impl Iterator<Item = &'a str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./@".contains(c);
    roots.iter().flat_map(move |root| {
        line.match_indices(root.as_str()).filter_map(move |(at, _)| {
            let after = line[at + root.len()..].strip_prefix('/')?;
            let rest = after.split(|c| !is_part(c)).next()?;
            let is_pattern = after[rest.len()..].starts_with(['*', '{', '<', '$', '…', '[']);
            let path = &line[at..at + root.len() + 1 + rest.len()];
            let is_whole = !line[..at].ends_with(|c: char| is_part(c) || c == '}');
            (is_whole && !is_pattern).then(|| path.trim_end_matches(['/', '.']))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn links_that_lead_nowhere_are_found() {
        let page = "[a](b.md#x) [c](../crates/d.rs) [e](https://docs/f) [g](#h) `docs/i.md`\n";
        let comment =
            "// See docs/b.md, docs/gone.md.\nlet a = \"docs/gone.md\"; // other/docs/x\n";
        let seen = found(NAME, &[("docs/a.md", page), ("crates/d.rs", comment)]);
        assert_eq!(
            seen,
            [
                "crates/d.rs:1: `docs/b.md` is not in the tree",
                "crates/d.rs:1: `docs/gone.md` is not in the tree",
                "docs/a.md:1: `docs/b.md` is not in the tree",
                "docs/a.md:1: `docs/i.md` is not in the tree",
            ]
        );
    }

    #[test]
    fn comments_of_other_languages_are_seen() {
        let c = "/*\n * docs/gone.md\n */\nf(\"docs/gone.md\"); // docs/gone.md\n";
        let shell = "#!/bin/sh\ncat docs/gone.md # docs/gone.md\n";
        let seen = found(NAME, &[("docs/a.md", ""), ("b.c", c), ("c", shell)]);
        let text = "`docs/gone.md` is not in the tree";
        assert_eq!(
            seen,
            [format!("b.c:2: {text}"), format!("b.c:4: {text}"), format!("c:2: {text}")]
        );
    }

    #[test]
    fn links_to_files_and_folders_and_patterns_are_right() {
        let page = "[a](a.md) docs/ crates/d.rs: `crates/*` docs/{name}.md crates/…\n";
        let seen = found(NAME, &[("docs/a.md", page), ("crates/d.rs", "")]);
        assert!(seen.is_empty(), "{seen:?}");
    }
}
