//! `abuse_codes`: codes in names of hostile tests (`abuse_R10_…`) and rows of the threat model
//! match each other.

use std::collections::BTreeMap;

use crate::facts::Facts;
use crate::finding::Finding;
use crate::tree::{Language, SourceFile};

/// Name of the rule.
pub const NAME: &str = "abuse_codes";

const PAGE: &str = "docs/internals/threat-model.md";
const MARK: &str = "abuse_";

/// Finds codes of tests without a row, and rows without a test.
pub fn find(facts: &Facts, out: &mut Vec<Finding>) {
    let tests = codes_of_tests(facts);
    let Some(page) = facts.tree.file(PAGE) else {
        if !tests.is_empty() {
            out.push(Finding::new(NAME, PAGE, 1, "is missing, and tests have its codes"));
        }
        return;
    };
    let rows = rows(page);
    for (code, (path, line)) in &tests {
        if !rows.contains_key(code) {
            let text = format!("code `{code}` has no row in {PAGE}");
            out.push(Finding::new(NAME, path, *line, text));
        }
    }
    for (code, line) in rows.iter().filter(|(code, _)| !tests.contains_key(*code)) {
        let text = format!("code `{code}` is shown by no test `{MARK}{code}_…`");
        out.push(Finding::new(NAME, PAGE, *line, text));
    }
}

/// Codes with the first place that has each.
fn codes_of_tests(facts: &Facts) -> BTreeMap<String, (String, usize)> {
    let mut codes = BTreeMap::new();
    for (file, rust) in facts.rust_files() {
        add_codes(&file.path, &rust.text.code, &mut codes);
    }
    for file in &facts.tree.files {
        if matches!(file.language, Language::C | Language::Python | Language::Shell) {
            add_codes(&file.path, &file.text, &mut codes);
        }
    }
    codes
}

fn add_codes(path: &str, text: &str, codes: &mut BTreeMap<String, (String, usize)>) {
    if !text.contains(MARK) {
        return;
    }
    for (i, line) in text.lines().enumerate() {
        for (at, _) in line.match_indices(MARK) {
            let is_inner = line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let Some((code, _)) = line[at + MARK.len()..].split_once('_') else { continue };
            if !is_inner && is_code(code) {
                codes.entry(code.to_owned()).or_insert_with(|| (path.to_owned(), i + 1));
            }
        }
    }
}

/// Codes of the page's tables: the first cell of a row.
fn rows(page: &SourceFile) -> BTreeMap<String, usize> {
    let cell = |line: &str| Some(line.strip_prefix('|')?.split('|').next()?.trim().to_owned());
    let lines = page.text.lines().enumerate();
    let cells = lines.filter_map(|(i, l)| Some((cell(l)?.replace('`', ""), i + 1)));
    cells.filter(|(code, _)| is_code(code)).collect()
}

fn is_code(word: &str) -> bool {
    let mut chars = word.chars();
    chars.next().is_some_and(|c| c.is_ascii_uppercase()) && chars.all(|c| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn codes_and_rows_match_each_other() {
        let page = "| Code | What |\n|---|---|\n| D1 | a |\n| `X` | b |\n";
        let test = "fn abuse_D1_rings() {}\nfn abuse_R10_log() {}\n// abuse_C3_x\n";
        assert_eq!(
            found(NAME, &[(PAGE, page), ("a.rs", test)]),
            [
                "a.rs:2: code `R10` has no row in docs/internals/threat-model.md",
                "docs/internals/threat-model.md:4: code `X` is shown by no test `abuse_X_…`",
            ]
        );
    }

    #[test]
    fn a_page_that_is_missing_is_found() {
        assert_eq!(found(NAME, &[("a.rs", "fn abuse_X_a() {}")]).len(), 1);
        assert!(found(NAME, &[("a.rs", "fn abuse_of_power() {}")]).is_empty());
    }
}
