//! `test_layout`: tests of `foo.rs` stand in it or in `foo/tests.rs`; no file `foo_tests.rs`, and
//! no `#[path]` attribute.

use crate::facts::Facts;
use crate::finding::Finding;

/// Name of the rule.
pub const NAME: &str = "test_layout";

/// Finds files of tests and `#[path]` attributes that break the layout.
pub fn find(facts: &Facts, out: &mut Vec<Finding>) {
    for (file, rust) in facts.rust_files() {
        if let Some(subject) = file.stem().strip_suffix("_tests") {
            let text = format!("tests of one file are `{subject}/tests.rs`, without `#[path]`");
            out.push(Finding::new(NAME, &file.path, 1, text));
        }
        for (i, line) in rust.text.code.lines().enumerate() {
            if line.trim_start().starts_with("#[path") {
                let text = "`#[path]`: let the compiler find the file by its name";
                out.push(Finding::new(NAME, &file.path, i + 1, text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn files_of_tests_and_path_attributes_are_found() {
        let text = "#[cfg(test)]\n#[path = \"b_tests.rs\"]\nmod tests;\n// #[path = \"c.rs\"]\n";
        assert_eq!(
            found(NAME, &[("a/b.rs", text), ("a/b_tests.rs", "")]),
            [
                "a/b.rs:2: `#[path]`: let the compiler find the file by its name",
                "a/b_tests.rs:1: tests of one file are `b/tests.rs`, without `#[path]`",
            ]
        );
        assert!(found(NAME, &[("a/b/tests.rs", "")]).is_empty());
    }
}
