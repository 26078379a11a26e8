//! `columns`: how wide a line may be: of code or of a comment in Rust, C and C++, of prose in
//! Markdown.
//!
//! Tabs count as the kernel's: to the next multiple of eight. Rust's exceptions are lines that
//! cannot be broken: a string literal that is too wide by itself, a row of a table in a doc
//! comment, a URL.

use crate::config::Config;
use crate::facts::Facts;
use crate::finding::Finding;
use crate::text::RustText;
use crate::tree::Language;

/// Name of the rule.
pub const NAME: &str = "columns";

const TAB_COLUMNS: usize = 8;

/// Finds lines that are too wide.
pub fn find(facts: &Facts, config: &Config, out: &mut Vec<Finding>) {
    let limit = config.limits.columns;
    for (file, rust) in facts.rust_files() {
        for (line, text, columns) in wide_lines(&file.text, limit) {
            if !may_be_wide(text, line, &rust.text, limit) {
                out.push(finding(&file.path, line, columns, limit));
            }
        }
    }
    for file in facts.tree.files_in(Language::C) {
        for (line, _, columns) in wide_lines(&file.text, limit) {
            out.push(finding(&file.path, line, columns, limit));
        }
    }
    let limit = config.limits.page_columns;
    for file in facts.tree.files_in(Language::Markdown) {
        for (line, columns) in wide_prose(&file.text, limit) {
            out.push(finding(&file.path, line, columns, limit));
        }
    }
}

/// Wide lines of Markdown outside of code and tables that could be broken.
fn wide_prose(text: &str, limit: usize) -> Vec<(usize, usize)> {
    let (mut in_code, mut wide) = (false, Vec::new());
    for (i, line) in text.lines().enumerate() {
        let words = line.trim_start();
        let is_fence = words.starts_with("```");
        in_code ^= is_fence;
        let is_prose = !in_code && !is_fence && !words.starts_with('|');
        // A command in a line of its own.
        let is_code = words.starts_with('`') && words.ends_with('`') && words.len() > 1;
        if is_prose && !is_code && width(line) > limit {
            wide.push((i + 1, width(line)));
        }
    }
    wide
}

fn finding(path: &str, line: usize, columns: usize, limit: usize) -> Finding {
    Finding::new(NAME, path, line, format!("{columns} columns, limit {limit}")).sized(columns)
}

fn wide_lines(text: &str, limit: usize) -> impl Iterator<Item = (usize, &str, usize)> {
    // No line has more columns than this without a tab.
    let is_short = move |l: &str| l.len() <= limit && !l.contains('\t');
    let lines = text.lines().enumerate().filter(move |(_, l)| !is_short(l));
    lines.map(|(i, l)| (i + 1, l, width(l))).filter(move |(_, _, columns)| *columns > limit)
}

fn width(line: &str) -> usize {
    line.chars().fold(0, |at, c| match c {
        '\t' => at / TAB_COLUMNS * TAB_COLUMNS + TAB_COLUMNS,
        _ => at + 1,
    })
}

fn may_be_wide(text: &str, line: usize, rust: &RustText, limit: usize) -> bool {
    let indent = text.len() - text.trim_start().len();
    let words = text.trim_start();
    if words.starts_with("//! |") || words.starts_with("/// |") {
        return true;
    }
    let is_comment = words.starts_with("//");
    if is_comment && words.split(' ').any(|w| w.contains("://") && indent + w.len() + 4 > limit) {
        return true;
    }
    // A comma stands behind a literal on a line of its own.
    let from = rust.literals.partition_point(|l| l.line < line);
    let mut literals = rust.literals[from..].iter().take_while(|l| l.line == line);
    literals.any(|l| indent + l.columns + 1 > limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn wide_comments_and_code_are_found() {
        let comment = format!("// {}\n", "x ".repeat(50));
        assert_eq!(found(NAME, &[("a.rs", &comment)]), ["a.rs:1: 103 columns, limit 100"]);
        assert!(found(NAME, &[("a.rs", &format!("// {}\n", "x".repeat(97)))]).is_empty());
    }

    #[test]
    fn a_literal_too_wide_by_itself_is_allowed_and_a_row_of_literals_is_not() {
        let literal = format!("const A: &str = \"{}\";\n", "x".repeat(100));
        assert!(found(NAME, &[("a.rs", &literal)]).is_empty());
        let part = "x".repeat(48);
        let row = format!("const A: [&str; 2] = [\"{part}\", \"{part}\"];\n");
        assert_eq!(found(NAME, &[("a.rs", &row)]).len(), 1);
    }

    #[test]
    fn rows_of_tables_in_doc_comments_are_allowed() {
        let row = format!("//! | {} |\n", "x ".repeat(60));
        assert!(found(NAME, &[("a.rs", &row)]).is_empty());
    }

    #[test]
    fn prose_of_pages_is_found_and_code_and_tables_are_not() {
        let long = "x ".repeat(61);
        let page = format!("```\n{long}\n```\n| {long} |\n`{long}`\n{long}\n");
        assert_eq!(found(NAME, &[("a.md", &page)]), ["a.md:6: 122 columns, limit 120"]);
    }

    #[test]
    fn tabs_of_c_count_eight_columns() {
        let line = |tabs: usize| format!("{}{}\n", "\t".repeat(tabs), "x".repeat(80));
        assert!(found(NAME, &[("a.c", &line(2))]).is_empty());
        assert_eq!(found(NAME, &[("a.c", &line(3))]), ["a.c:1: 104 columns, limit 100"]);
    }
}
