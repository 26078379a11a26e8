//! `syntax`: every Rust file parses, so that no other rule passes by it.

use crate::facts::Facts;
use crate::finding::Finding;

/// Name of the rule.
pub const NAME: &str = "syntax";

/// Finds Rust files that do not parse.
pub fn find(facts: &Facts, out: &mut Vec<Finding>) {
    for (file, rust) in facts.rust_files() {
        if let Err(error) = &rust.syntax {
            out.push(Finding::new(NAME, &file.path, 1, format!("does not parse: {error}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn a_file_that_does_not_parse_is_found() {
        assert_eq!(found(NAME, &[("a.rs", "fn f( {"), ("b.rs", "fn f() {}")]).len(), 1);
    }
}
