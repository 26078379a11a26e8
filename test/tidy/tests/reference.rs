//! The pages of `docs/reference` are what the code says.

use std::collections::BTreeSet;
use std::fs;

use tidy::reference;

#[test]
fn pages_are_current() {
    let root = tidy::find_root();
    for page in reference::generate(&reference::read_tree(&root).unwrap()).unwrap() {
        let written = fs::read_to_string(root.join(&page.path)).unwrap_or_default();
        assert!(written == page.text, "{} is out of date: run `make reference`", page.path);
    }
}

#[test]
fn each_error_has_a_remedy() {
    let tree = reference::read_tree(&tidy::find_root()).unwrap();
    let (without, all) = reference::count_without_remedy(&tree).unwrap();
    assert_eq!(without, 0, "of {all}: give the variant a doc line `Remedy: …`");
}

#[test]
fn metrics_that_pages_name_exist() {
    let tree = reference::read_tree(&tidy::find_root()).unwrap();
    let names = reference::metric_names(&tree).unwrap();
    let subjects: BTreeSet<&str> = names.iter().map(|name| subject(name)).collect();
    let mut missing = BTreeSet::new();
    for file in tree.files.iter().filter(|f| f.path.starts_with("docs/operate/")) {
        for (at, _) in file.text.match_indices("`millrace_") {
            let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
            let rest = &file.text[at + 1..];
            let name = &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())];
            // Settings of MariaDB and functions of guests' libraries begin so, too.
            let is_metric =
                subjects.contains(subject(name)) && !rest[name.len()..].starts_with('(');
            if is_metric && !names.iter().any(|n| n == name) {
                missing.insert(format!("{}: {name}", file.path));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Second word of a metric's name; empty where there is no third.
fn subject(name: &str) -> &str {
    let words = name.trim_start_matches("millrace_");
    words.split_once('_').map_or("", |(subject, _)| subject)
}
