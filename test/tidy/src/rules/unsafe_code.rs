//! `unsafe`: the word stands only in files that `tidy.toml` lists, each with its reason.

use crate::facts::Facts;
use crate::finding::Finding;

/// Name of the rule.
pub const NAME: &str = "unsafe";

/// Finds the first `unsafe` of each file; the size is the number of them.
pub fn find(facts: &Facts, out: &mut Vec<Finding>) {
    for (file, rust) in facts.rust_files() {
        let code = &rust.text.code;
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let mut places = code.match_indices("unsafe").map(|(at, _)| at).filter(|&at| {
            !code[..at].ends_with(is_word) && !code[at + "unsafe".len()..].starts_with(is_word)
        });
        let Some(first) = places.next() else { continue };
        let (line, count) = (code[..first].lines().count().max(1), 1 + places.count());
        let text = format!("`unsafe` {count} times, in a file that is not listed");
        out.push(Finding::new(NAME, &file.path, line, text).sized(count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    #[test]
    fn unsafe_code_is_found_in_macros_too() {
        let text =
            "#![deny(unsafe_op_in_unsafe_fn)]\n// unsafe\nm! { unsafe { f() } }\nunsafe fn g() {}";
        let expected = "a.rs:3: `unsafe` 2 times, in a file that is not listed";
        assert_eq!(found(NAME, &[("a.rs", text)]), [expected]);
    }

    #[test]
    fn comments_and_lints_are_no_unsafe_code() {
        assert!(found(NAME, &[("a.rs", "#![forbid(unsafe_code)] // unsafe")]).is_empty());
    }
}
