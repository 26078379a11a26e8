//! `doc_lines`: the first line of a doc comment stands alone, since tools show it alone.

use crate::config::Config;
use crate::facts::Facts;
use crate::finding::Finding;
use crate::text::Comment;

/// Name of the rule.
pub const NAME: &str = "doc_lines";

/// Finds doc comments with a bad first line.
pub fn find(facts: &Facts, config: &Config, out: &mut Vec<Finding>) {
    for (file, rust) in facts.rust_files() {
        for block in blocks(&rust.text.comments) {
            if let Some(text) = fault(&block.text, block.lines, &config.words.doc_openings) {
                out.push(Finding::new(NAME, &file.path, block.line, text));
            }
        }
    }
}

/// First line of a doc comment.
struct Block {
    line: usize,
    text: String,
    lines: usize,
}

/// Doc comments: neighbouring lines with the same mark.
fn blocks(comments: &[Comment]) -> Vec<Block> {
    let mut blocks: Vec<(Block, &str)> = Vec::new();
    for comment in comments.iter().filter(|c| c.is_alone) {
        let Some((mark, text)) = doc_text(&comment.text) else { continue };
        match blocks.last_mut() {
            Some((last, m)) if *m == mark && last.line + last.lines == comment.line => {
                last.lines += 1;
            }
            _ => {
                let text = text.trim().to_owned();
                blocks.push((Block { line: comment.line, text, lines: 1 }, mark));
            }
        }
    }
    blocks.into_iter().map(|(block, _)| block).collect()
}

fn doc_text(comment: &str) -> Option<(&'static str, &str)> {
    match comment.strip_prefix("///") {
        Some(text) if !text.starts_with('/') => Some(("///", text)),
        _ => comment.strip_prefix("//!").map(|text| ("//!", text)),
    }
}

fn fault(line: &str, lines: usize, openings: &[String]) -> Option<String> {
    let first = line.chars().next()?;
    let word: String = line.chars().take_while(|c| c.is_alphanumeric() || *c == '\'').collect();
    let word = word.strip_suffix("'s").unwrap_or(&word);
    if openings.iter().any(|o| o == word) {
        return Some(format!("begins with `{word}`: name the thing, \"{}\"", start(line)));
    }
    if first.is_lowercase() {
        return Some(format!("begins with a small letter: \"{}\"", start(line)));
    }
    if word == "See" && lines == 1 {
        return Some(format!("says only where else to look: \"{}\"", start(line)));
    }
    None
}

fn start(line: &str) -> String {
    line.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    fn count(text: &str) -> usize {
        found(NAME, &[("a.rs", text)]).len()
    }

    #[test]
    fn riddles_are_found() {
        let text = "/// Of its second.\nfn f() {}\n\n/// A frame.\n/// Its second line.\nfn g() {}";
        let seen = found(NAME, &[("a.rs", text)]);
        assert_eq!(seen, ["a.rs:1: begins with `Of`: name the thing, \"Of its second.\""]);
    }

    #[test]
    fn small_letters_and_mere_pointers_are_found() {
        assert_eq!(count("//! a module"), 1);
        assert_eq!(count("/// See [`f`]."), 1);
        assert_eq!(count("/// See [`f`].\n/// Then more."), 0);
    }

    #[test]
    fn names_numbers_and_links_may_begin() {
        assert_eq!(count("/// `a` of b.\nx!();\n/// 3 of them.\ny!();\n/// [`a`]: b."), 0);
        assert_eq!(count("// of no interest\n//// of no interest"), 0);
    }

    #[test]
    fn doc_comments_in_macros_and_not_in_strings_are_seen() {
        assert_eq!(
            count("m! {\n    /// Of x.\n    fn f() {}\n}\nconst A: &str = \"\n/// Of x\n\";"),
            1
        );
    }
}
