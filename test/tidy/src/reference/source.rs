//! Source files that reference pages are made of.

use syn::{Attribute, Expr, Lit, Meta};

use crate::error::TidyError;

/// Parses a Rust file of the tree.
pub fn parse(path: &str, text: &str) -> Result<syn::File, TidyError> {
    syn::parse_file(text)
        .map_err(|error| TidyError::Reference { path: path.to_owned(), text: error.to_string() })
}

/// Paragraphs of a doc comment, each in one line, links to items written as code.
pub fn paragraphs(attrs: &[Attribute]) -> Vec<String> {
    let mut paragraphs = vec![String::new()];
    for attr in attrs.iter().filter(|a| a.path().is_ident("doc")) {
        let Meta::NameValue(pair) = &attr.meta else { continue };
        let Expr::Lit(value) = &pair.value else { continue };
        let Lit::Str(line) = &value.lit else { continue };
        let line = line.value();
        match (line.trim(), paragraphs.last_mut()) {
            ("", _) => paragraphs.push(String::new()),
            (line, Some(last)) if last.is_empty() => last.push_str(line),
            (line, Some(last)) => *last = format!("{last} {line}"),
            (_, None) => {}
        }
    }
    paragraphs.retain(|p| !p.is_empty());
    paragraphs.iter().map(|p| p.replace("[`", "`").replace("`]", "`")).collect()
}

/// Wings with the daemon's crates.
const WINGS: [&str; 4] = ["core", "devices", "services", "daemon"];

/// Name of the daemon's crate that a file is a source of, and the file's path below `src`.
pub fn crate_and_source(path: &str) -> Option<(&str, &str)> {
    let (wing, rest) = path.split_once('/')?;
    if WINGS.contains(&wing) { rest.split_once("/src/") } else { None }
}
