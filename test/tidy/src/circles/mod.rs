//! Circles of imports between the files of a package.

mod components;
mod graph;
mod modules;
mod resolve;

use std::collections::BTreeSet;

use serde::Serialize;

pub use graph::{Arrows, arrows};

use crate::facts::Facts;

/// Files that reach each other by imports.
#[derive(Clone, Debug, Serialize)]
pub struct Circle {
    /// Package.
    pub package: String,
    /// Files, sorted.
    pub files: Vec<String>,
    /// Arrows between them.
    pub ties: Vec<Tie>,
}

/// An arrow between two files of a circle.
#[derive(Clone, Debug, Serialize)]
pub struct Tie {
    /// File that uses the names.
    pub from: String,
    /// File that defines them.
    pub to: String,
    /// Names.
    pub names: BTreeSet<String>,
}

/// Finds all circles, pairs too, the largest of each package first.
pub fn find(facts: &Facts) -> Vec<Circle> {
    let mut circles = Vec::new();
    for package in &facts.packages {
        let mut arrows = Arrows::default();
        for root in &package.roots {
            graph::add_arrows(facts, root, &mut arrows);
        }
        let mut found: Vec<Circle> = components::find(&arrows)
            .into_iter()
            .map(|files| circle(&package.name, files, &arrows))
            .collect();
        found.sort_by(|a, b| b.files.len().cmp(&a.files.len()).then(a.files.cmp(&b.files)));
        circles.append(&mut found);
    }
    circles
}

fn circle(package: &str, files: Vec<String>, arrows: &Arrows) -> Circle {
    let inside = |file: &String| files.binary_search(file).is_ok();
    let ties = arrows
        .iter()
        .filter(|((from, to), _)| inside(from) && inside(to))
        .map(|((from, to), names)| Tie { from: from.clone(), to: to.clone(), names: names.clone() })
        .collect();
    Circle { package: package.to_owned(), files, ties }
}
