//! `errors.md`: every variant of the daemon's error enums, with its text, meaning and remedy.
//!
//! The text is that of `#[error("…")]`, the meaning the doc comment, the remedy a paragraph of it
//! that begins with `Remedy:`. Such a paragraph of the enum holds for variants without their own.

use std::collections::BTreeMap;

use syn::punctuated::Punctuated;
use syn::{Attribute, Expr, Fields, Item, Lit, Token};

use super::markdown::{code, escape, link_pages, table};
use super::source::{crate_and_source, paragraphs, parse};
use crate::error::TidyError;
use crate::tree::{Language, Tree};

const INTRO: &str = "# Errors

Errors of the daemon and of its commands by crate: the text, what it means, and what helps. `{name}` stands for a
name, a number or the text of a cause. A cause's own text follows after a colon: look for it here as well, and in the
manual pages of system calls. What is seen of a whole VM is in [troubleshoot](../operate/troubleshoot.md).

";

/// Word that a doc paragraph with a remedy begins with.
const REMEDY: &str = "Remedy:";

/// One error: a variant, or a struct.
struct Fault {
    message: String,
    meaning: String,
    remedy: String,
}

/// An error type.
struct Group {
    path: String,
    name: String,
    meaning: String,
    faults: Vec<Fault>,
}

/// Makes the page.
pub fn page(tree: &Tree) -> Result<String, TidyError> {
    let mut text = INTRO.to_owned();
    for (name, groups) in &crates(tree)? {
        text.push_str(&format!("## {name}\n\n"));
        for group in groups {
            let (name, path) = (&group.name, &group.path);
            text.push_str(&format!("### {name}\n\n"));
            let meaning = escape(&group.meaning);
            text.push_str(format!("{meaning} In [{path}](../../{path}).\n\n").trim_start());
            let rows: Vec<Vec<String>> = group.faults.iter().map(row).collect();
            text.push_str(&table(&["Text", "Meaning", "Remedy"], &rows));
            text.push('\n');
        }
    }
    text.truncate(text.trim_end().len());
    text.push('\n');
    Ok(text)
}

/// Numbers of errors without a remedy, and of all.
pub fn count_without_remedy(tree: &Tree) -> Result<(usize, usize), TidyError> {
    let crates = crates(tree)?;
    let faults: Vec<&Fault> = crates.values().flatten().flat_map(|group| &group.faults).collect();
    let without = faults.iter().filter(|fault| fault.remedy.is_empty()).count();
    Ok((without, faults.len()))
}

fn row(fault: &Fault) -> Vec<String> {
    vec![fault.message.clone(), escape(&fault.meaning), link_pages(&escape(&fault.remedy))]
}

/// Error types by crate, in the order of files and lines.
fn crates(tree: &Tree) -> Result<BTreeMap<String, Vec<Group>>, TidyError> {
    let mut crates: BTreeMap<String, Vec<Group>> = BTreeMap::new();
    for file in tree.files_in(Language::Rust) {
        let Some((name, path)) = crate_and_source(&file.path) else { continue };
        if path.contains("test") || !file.text.contains("Error") {
            continue;
        }
        let items = parse(&file.path, &file.text)?.items;
        let groups: Vec<Group> = items.iter().filter_map(|i| group(&file.path, i)).collect();
        if !groups.is_empty() {
            crates.entry(name.to_owned()).or_default().extend(groups);
        }
    }
    Ok(crates)
}

fn group(path: &str, item: &Item) -> Option<Group> {
    let (ident, attrs) = match item {
        Item::Enum(item) => (&item.ident, &item.attrs),
        Item::Struct(item) => (&item.ident, &item.attrs),
        _ => return None,
    };
    if !is_error(attrs) {
        return None;
    }
    let docs = Docs::of(attrs);
    let faults = match item {
        Item::Enum(item) => {
            let fault = |v: &syn::Variant| fault(&v.attrs, &v.fields, &docs.remedy);
            item.variants.iter().filter_map(fault).collect()
        }
        Item::Struct(item) => fault(attrs, &item.fields, "").into_iter().collect(),
        _ => return None,
    };
    // A struct's own doc comment is that of its only row.
    let meaning = if matches!(item, Item::Enum(_)) { docs.meaning } else { String::new() };
    Some(Group { path: path.to_owned(), name: ident.to_string(), meaning, faults })
}

fn fault(attrs: &[Attribute], fields: &Fields, remedy: &str) -> Option<Fault> {
    let docs = Docs::of(attrs);
    let remedy = if docs.remedy.is_empty() { remedy.to_owned() } else { docs.remedy };
    Some(Fault { message: message(attrs, fields)?, meaning: docs.meaning, remedy })
}

fn is_error(attrs: &[Attribute]) -> bool {
    attrs.iter().filter(|a| a.path().is_ident("derive")).any(|attr| {
        let paths = attr.parse_args_with(Punctuated::<syn::Path, Token![,]>::parse_terminated);
        let is_error = |p: &syn::Path| p.segments.last().is_some_and(|s| s.ident == "Error");
        paths.is_ok_and(|paths| paths.iter().any(is_error))
    })
}

/// Text of `#[error(…)]`, as a cell.
fn message(attrs: &[Attribute], fields: &Fields) -> Option<String> {
    let attr = attrs.iter().find(|a| a.path().is_ident("error"))?;
    let args = attr.parse_args_with(Punctuated::<Expr, Token![,]>::parse_terminated).ok()?;
    let Some(Expr::Lit(first)) = args.first() else {
        let cause = fields.iter().next().map(|f| type_name(&f.ty)).unwrap_or_default();
        return Some(format!("that of {}", code(&cause)));
    };
    let Lit::Str(format) = &first.lit else { return None };
    let text = plain_format(&format.value(), args.iter().skip(1).map(argument_name));
    let is_cause = text.starts_with('{') && text.find('}') == Some(text.len() - 1);
    Some(if is_cause { "as the cause says".to_owned() } else { code(&text) })
}

/// Format string with the name of a field in each hole, and doubled braces as one.
fn plain_format(format: &str, mut arguments: impl Iterator<Item = Option<String>>) -> String {
    let mut text = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '{' | '}' if chars.peek() == Some(&c) => {
                chars.next();
                text.push(c);
            }
            '{' => {
                let hole: String = chars.by_ref().take_while(|c| *c != '}').collect();
                let name = match hole.split(':').next().unwrap_or_default() {
                    "" => arguments.next().flatten(),
                    name if name.starts_with(|c: char| c.is_ascii_digit()) => None,
                    name => Some(name.to_owned()),
                };
                text.push_str(&format!("{{{}}}", name.as_deref().unwrap_or("…")));
            }
            c => text.push(c),
        }
    }
    text
}

/// Name of the field that an argument shows: `path` of `path.display()`.
fn argument_name(argument: &Expr) -> Option<String> {
    match argument {
        Expr::Path(path) => path.path.get_ident().map(ToString::to_string),
        Expr::MethodCall(call) => argument_name(&call.receiver),
        _ => None,
    }
}

fn type_name(ty: &syn::Type) -> String {
    match ty {
        syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
        _ => None,
    }
    .unwrap_or_default()
}

/// Doc comment of an error.
#[derive(Default)]
struct Docs {
    meaning: String,
    remedy: String,
}

impl Docs {
    fn of(attrs: &[Attribute]) -> Docs {
        let mut docs = Docs::default();
        for paragraph in paragraphs(attrs) {
            match paragraph.strip_prefix(REMEDY) {
                Some(remedy) => docs.remedy = capitalized(remedy.trim()),
                None if docs.meaning.is_empty() => docs.meaning = paragraph,
                None => docs.meaning = format!("{} {paragraph}", docs.meaning),
            }
        }
        docs
    }
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|c| c.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
/// Fault of a thing.
///
/// Remedy: ask.
#[derive(Debug, thiserror::Error)]
pub enum ThingError {
    /// It is wrong,
    /// see [`Thing`].
    ///
    /// Remedy: write {it} anew.
    #[error("{what} {}: {source:?} {{x}}", path.display())]
    Wrong { what: u8, path: PathBuf, source: Other },
    /// Other.
    #[error(transparent)]
    Other(#[from] Other),
}
#[derive(Debug)]
pub enum NoError { A }
"#;

    #[test]
    fn texts_meanings_and_remedies_are_taken_from_variants() {
        let tree = Tree::from_sources(&[("core/a/src/error.rs", SOURCE)]);
        let text = page(&tree).unwrap();
        assert!(text.contains("## a\n\n### ThingError\n\nFault of a thing. In ["), "{text}");
        let row =
            "| `{what} {path}: {source} {x}` | It is wrong, see `Thing`. | Write {it} anew. |\n";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("| that of `Other` | Other. | Ask. |\n"), "{text}");
        assert!(!text.contains("NoError"), "{text}");
        assert_eq!(count_without_remedy(&tree).unwrap(), (0, 2));
    }
}
