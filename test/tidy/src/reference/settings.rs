//! `settings.md`: every setting, from `packaging/millrace.toml.example`, which a test of the config
//! holds complete.
//!
//! The example's form is what is read here: comments in front of a table say what it is for, a
//! paragraph `Takes effect:` there when a change holds; a setting's comment stands in front of it,
//! behind it, or in the indented lines below. One that begins with `required` has no default;
//! `Default: …` or `left out: …` in it, to the full stop, is the default; else a number, a boolean
//! and a word that the comment names is.

use std::ops::Range;

use super::markdown::{code, escape, link_pages, table};
use crate::error::TidyError;
use crate::tree::Tree;

/// Path of the example.
const EXAMPLE: &str = "packaging/millrace.toml.example";

/// Beginnings of the words that name a default.
const DEFAULT_MARKS: [&str; 4] = ["Default: ", "default: ", "Left out: ", "left out: "];

const INTRO: &str = "# Settings

Settings of `/etc/millrace/millrace.toml`, by table. The same as a file to copy from:
[millrace.toml.example](../../packaging/millrace.toml.example). `millrace check` tells everything that is wrong with
a config, with file, line and column. Drop-ins, `*.toml` in `millrace.d/` beside the file, are read after it, in the order
of names: their `[[vm]]`, `[[switch]]` and `[[module]]` entries are added, their other settings override.

Sizes are integers in bytes or strings with `B`, `KiB`, `MiB`, `GiB` or `TiB`. *Example* is an example's value where the
default is another, or none.

";

/// One setting.
struct Setting {
    key: String,
    value: String,
    is_commented_out: bool,
    comment: String,
}

/// One table.
#[derive(Default)]
struct Section {
    header: String,
    comment: String,
    takes_effect: String,
    settings: Vec<Setting>,
}

/// Makes the page.
pub fn page(tree: &Tree) -> Result<String, TidyError> {
    let problem = |text: String| TidyError::Reference { path: EXAMPLE.to_owned(), text };
    let file = tree.file(EXAMPLE).ok_or_else(|| problem("is not in the tree".to_owned()))?;
    let mut text = INTRO.to_owned();
    for section in sections(&file.text) {
        let header = &section.header;
        text.push_str(&format!("## {header}\n\n"));
        if !section.comment.is_empty() {
            text.push_str(&format!("{}\n\n", sentence(&link_pages(&escape(&section.comment)))));
        }
        if !section.takes_effect.is_empty() {
            text.push_str(&format!("Takes effect: {}\n\n", section.takes_effect));
        }
        let mut rows = Vec::new();
        for setting in &section.settings {
            let key = &setting.key;
            if setting.comment.is_empty() {
                return Err(problem(format!("{header} {key} has no comment")));
            }
            rows.push(row(setting));
        }
        text.push_str(&table(&["Setting", "Type", "Default", "Example", "Meaning"], &rows));
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    Ok(text)
}

fn row(setting: &Setting) -> Vec<String> {
    let default = setting.default();
    let value = code(&setting.value);
    let is_default = default.trim_matches(['`', '"']) == setting.value.trim_matches('"');
    let example = if is_default { String::new() } else { value };
    vec![code(&setting.key), setting.type_name().to_owned(), default, example, setting.meaning()]
}

impl Setting {
    fn meaning(&self) -> String {
        let mut text = self.comment.clone();
        if let Some(default) = self.default_in_comment() {
            let end = default.end + usize::from(text[default.end..].starts_with('.'));
            text.replace_range(default.start..end, "");
            text = text.trim().trim_end_matches([';', ',']).to_owned();
        }
        sentence(&link_pages(&escape(&text)))
    }

    fn type_name(&self) -> &'static str {
        let text = self.value.trim_matches('"');
        let is_size = ["KiB", "MiB", "GiB", "TiB"].iter().any(|unit| {
            text.strip_suffix(unit).is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()))
        });
        let may_be_auto = self.comment.contains("\"auto\":");
        let may_be_path = self.comment.contains("\"/");
        match self.value.as_bytes().first() {
            _ if is_size => "size",
            Some(b'[') => "list",
            Some(b'"') if text.starts_with('/') => "path",
            _ if may_be_auto && self.comment.contains("true, false") => "boolean or `\"auto\"`",
            _ if may_be_auto && !self.comment.contains("\"spin\"") => "integer or `\"auto\"`",
            Some(b'"') => "string",
            Some(b't' | b'f') if may_be_path => "boolean or path",
            Some(b't' | b'f') => "boolean",
            _ if self.key.contains("bytes_per_s") => "size",
            _ => "integer",
        }
    }

    /// Place of `Default: …` in the comment, to the end of its sentence.
    fn default_in_comment(&self) -> Option<Range<usize>> {
        let find = |mark: &&str| self.comment.find(mark);
        let start = DEFAULT_MARKS.iter().find_map(find)?;
        let end = self.comment[start..].find(". ").map_or(self.comment.len(), |end| start + end);
        Some(start..end)
    }

    /// Default, as a cell: from the comment, else the value where it is no example.
    fn default(&self) -> String {
        let comment = self.comment.to_lowercase();
        if comment.starts_with("required") || comment.contains(". required") {
            return "required".to_owned();
        }
        if let Some(default) = self.default_in_comment() {
            let text = &self.comment[default];
            let text = text.split_once(": ").map_or(text, |(_, text)| text).trim_end_matches('.');
            let is_literal = !text.contains(' ') && text.contains(['"', '/', '0']);
            return if is_literal { code(text) } else { escape(text) };
        }
        let is_example = match self.type_name() {
            "path" | "size" => !self.value.starts_with('0'),
            "list" => self.value != "[]",
            "string" => !self.comment.contains(&self.value),
            _ => false,
        };
        match self.is_commented_out || is_example {
            true => "none".to_owned(),
            false => code(&self.value),
        }
    }
}

/// Text as a sentence: with a capital letter and a full stop.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase);
    let mut sentence: String = first.chain(chars).collect();
    if !sentence.is_empty() && !sentence.ends_with(['.', ':']) {
        sentence.push('.');
    }
    sentence
}

/// Tables of the example; of a table that is there twice the settings that are new.
fn sections(text: &str) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    // Comment lines since the last blank line or setting.
    let mut before: Vec<&str> = Vec::new();
    let mut at = None;
    for line in text.lines() {
        let is_indented = line.starts_with("  ");
        if line.trim().is_empty() {
            before.clear();
        } else if line.starts_with('[') {
            at = Some(enter(&mut sections, line, &before));
            before.clear();
        } else if let Some((setting, is_commented_out)) = setting(line) {
            let section = at.and_then(|i: usize| sections.get_mut(i));
            take(section, setting, is_commented_out, &before);
            before.clear();
        } else if let (true, Some(section)) = (is_indented, at.and_then(|i| sections.get_mut(i))) {
            add_line(section, line);
        } else if let Some(comment) = line.strip_prefix('#') {
            before.push(comment.trim());
        }
    }
    sections
}

/// Section of a header, which is made when it is new.
fn enter(sections: &mut Vec<Section>, line: &str, before: &[&str]) -> usize {
    let header = line.split('#').next().unwrap_or(line).trim();
    if let Some(at) = sections.iter().position(|s| s.header == header) {
        return at;
    }
    let (takes_effect, comment) = split_effect(before);
    let header = header.to_owned();
    sections.push(Section { header, comment, takes_effect, settings: Vec::new() });
    sections.len() - 1
}

/// Comment in front of a table: when its changes take effect, and the rest.
fn split_effect(before: &[&str]) -> (String, String) {
    let text = before.join(" ");
    match text.split_once("Takes effect: ") {
        Some((comment, effect)) => (effect.to_owned(), comment.trim().to_owned()),
        None => (String::new(), text),
    }
}

/// Key, value and comment of a line such as `key = value  # comment`, and whether it is commented
/// out.
fn setting(line: &str) -> Option<((&str, &str, &str), bool)> {
    let (body, is_commented_out) = match line.strip_prefix("# ") {
        Some(body) => (body, true),
        None => (line, false),
    };
    let (key, rest) = body.split_once(" = ")?;
    if key.is_empty()
        || !key.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
    {
        return None;
    }
    let end = end_of_value(rest);
    let comment = rest[end..].trim().trim_start_matches('#').trim();
    Some(((key, rest[..end].trim(), comment), is_commented_out))
}

/// Position of the comment behind a value.
fn end_of_value(text: &str) -> usize {
    let mut is_quoted = false;
    for (i, c) in text.char_indices() {
        match c {
            '"' => is_quoted = !is_quoted,
            '#' if !is_quoted => return i,
            _ => {}
        }
    }
    text.len()
}

fn take(
    section: Option<&mut Section>,
    (key, value, comment): (&str, &str, &str),
    is_commented_out: bool,
    before: &[&str],
) {
    let Some(section) = section else { return };
    let before = before.join(" ");
    let comment = match (before.is_empty(), comment.is_empty()) {
        (true, _) => comment.to_owned(),
        (false, true) => before,
        (false, false) => format!("{} {}", sentence(&before), sentence(comment)),
    };
    match section.settings.iter_mut().find(|s| s.key == key) {
        // A second example: its comment goes on.
        Some(known) if !known.is_commented_out || is_commented_out => {
            if known.comment.is_empty() {
                known.comment = comment;
            }
        }
        _ => section.settings.push(Setting {
            key: key.to_owned(),
            value: value.to_owned(),
            is_commented_out,
            comment,
        }),
    }
}

/// Adds an indented comment line to the setting above.
fn add_line(section: &mut Section, line: &str) {
    if let Some(setting) = section.settings.last_mut() {
        let text = line.trim().trim_start_matches('#').trim();
        setting.comment = format!("{} {text}", setting.comment).trim().to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "# Head.\n\n# A thing.\n# Takes effect: at once.\n[thing]\n\
        mode = \"a#b\"  # \"a#b\" or \"c\"\n                # and more\n\
        # Path of it. Default: none\n# path = \"/x\"\nsize = \"1MiB\" # of it\n\
        count = 3   # required, 1 to 4\n";

    #[test]
    fn settings_have_type_default_and_meaning() {
        let tree = Tree::from_sources(&[(EXAMPLE, SOURCE)]);
        let text = page(&tree).unwrap();
        let (_, tables) = text.split_once("## [thing]\n\n").unwrap();
        assert_eq!(
            tables,
            "A thing.\n\nTakes effect: at once.\n\n\
             | Setting | Type | Default | Example | Meaning |\n|---|---|---|---|---|\n\
             | `mode` | string | `\"a#b\"` | – | \"a#b\" or \"c\" and more. |\n\
             | `path` | path | none | `\"/x\"` | Path of it. |\n\
             | `size` | size | none | `\"1MiB\"` | Of it. |\n\
             | `count` | integer | required | `3` | Required, 1 to 4. |\n"
        );
    }

    #[test]
    fn a_setting_without_comment_is_refused() {
        let tree = Tree::from_sources(&[(EXAMPLE, "[a]\nb = 1\n")]);
        let error = page(&tree).unwrap_err().to_string();
        assert!(error.contains("[a] b has no comment"), "{error}");
    }
}
