//! `functions` and `files`: how many lines a function and a file may have.
//!
//! A function counts from its signature to its closing brace, without doc comments and attributes.

use crate::config::Config;
use crate::facts::Facts;
use crate::finding::Finding;
use crate::tree::{Language, SourceFile};

/// Name of the rule for functions.
pub const FUNCTIONS: &str = "functions";
/// Name of the rule for files.
pub const FILES: &str = "files";

/// Finds functions and files that are too long.
pub fn find(facts: &Facts, config: &Config, out: &mut Vec<Finding>) {
    for file in &facts.tree.files {
        let functions = match file.language {
            Language::Rust => rust_functions(facts, file),
            Language::C => c_functions(&file.text),
            Language::Python => python_functions(&file.text),
            Language::Shell => shell_functions(&file.text),
            _ => continue,
        };
        let limit = config.limits.function_lines;
        for (name, line, lines) in functions.into_iter().filter(|f| f.2 > limit) {
            let text = format!("`{name}` has {lines} lines, limit {limit}");
            out.push(Finding::new(FUNCTIONS, &file.path, line, text).sized(lines));
        }
        let (lines, limit) = (file.text.lines().count(), config.limits.file_lines);
        if lines > limit {
            let text = format!("has {lines} lines, limit {limit}");
            out.push(Finding::new(FILES, &file.path, 1, text).sized(lines));
        }
    }
}

/// Name, first line and number of lines of a function.
type Length = (String, usize, usize);

fn rust_functions(facts: &Facts, file: &SourceFile) -> Vec<Length> {
    let functions = facts.syntax(&file.path).map_or(&[][..], |s| &s.functions);
    functions.iter().map(|f| (f.name.clone(), f.line, f.lines)).collect()
}

/// Functions of C and C++: a brace alone on its line begins the body, one at the margin ends it.
fn c_functions(text: &str) -> Vec<Length> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    let mut from = None;
    for (i, line) in lines.iter().enumerate() {
        if *line == "{" {
            let is_end = |l: &&str| l.is_empty() || l.starts_with(['}', '#']) || l.ends_with("*/");
            let above = lines[..i].iter().rposition(is_end).map_or(0, |at| at + 1);
            from = Some(above);
        } else if line.starts_with('}')
            && let Some(first) = from.take()
        {
            let head = lines[first].split('(').next().unwrap_or_default();
            let name = head.rsplit([' ', '*']).next().unwrap_or(head);
            found.push((name.to_owned(), first + 1, i + 1 - first));
        }
    }
    found
}

/// Functions of Python, by their indentation.
fn python_functions(text: &str) -> Vec<Length> {
    let lines: Vec<&str> = text.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let Some(head) = line.trim_start().strip_prefix("def ") else { continue };
        let is_outside = |l: &&str| !l.trim().is_empty() && indent(l) <= indent(line);
        // The signature may end with a bracket at the margin of `def`.
        let is_bracket = |l: &str| l.trim_start().starts_with(')');
        let after = lines[i + 1..].iter().position(|l| is_outside(l) && !is_bracket(l));
        let body = &lines[i..after.map_or(lines.len(), |n| i + 1 + n)];
        let last = body.iter().rposition(|l| !l.trim().is_empty()).unwrap_or(0);
        found.push((head.split('(').next().unwrap_or(head).to_owned(), i + 1, last + 1));
    }
    found
}

/// Functions of shell scripts: `name() {` to a brace at the margin.
fn shell_functions(text: &str) -> Vec<Length> {
    let mut found = Vec::new();
    let mut open: Option<(String, usize)> = None;
    for (i, line) in text.lines().enumerate() {
        if let Some(name) = line.strip_suffix("() {") {
            open = Some((name.to_owned(), i));
        } else if line.starts_with('}')
            && let Some((name, first)) = open.take()
        {
            found.push((name, first + 1, i + 1 - first));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn a_function_of_71_lines_is_found_and_one_of_70_is_not() {
        let function =
            |lines: usize| format!("/// Doc.\n#[test]\nfn f() {{{}}}\n", "\n".repeat(lines - 1));
        let text = function(71);
        assert_eq!(found(FUNCTIONS, &[("a.rs", &text)]), ["a.rs:3: `f` has 71 lines, limit 70"]);
        assert!(found(FUNCTIONS, &[("a.rs", &function(70))]).is_empty());
    }

    #[test]
    fn functions_of_other_languages_are_measured() {
        let c = "int a;\n\n/* Doc. */\nstatic int *f(int a,\n\tint b)\n{\n\tif (a) {\n\t}\n}\n";
        assert_eq!(c_functions(c), [("f".to_owned(), 4, 6)]);
        let python = "class A:\n    def f(\n        self,\n    ):\n        pass\n\n    x = 1\n";
        assert_eq!(python_functions(python), [("f".to_owned(), 2, 4)]);
        assert_eq!(shell_functions("f() {\n    a\n}\n"), [("f".to_owned(), 1, 3)]);
    }

    #[test]
    fn a_file_of_801_lines_is_found() {
        let text = "// x\n".repeat(801);
        assert_eq!(found(FILES, &[("a.rs", &text)]), ["a.rs:1: has 801 lines, limit 800"]);
        assert!(found(FILES, &[("a.md", &text)]).is_empty());
    }
}
