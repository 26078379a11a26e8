//! Tree of modules of one crate, found as the compiler finds it.

use std::collections::HashMap;

use crate::facts::Facts;
use crate::packages::{join, parent};
use crate::syntax::{Scope, Syntax};

/// Position of a module in [`Modules::all`].
pub type ModuleId = usize;

/// One module: a file, or an inline `mod` in it.
pub struct Module<'a> {
    /// File that it stands in.
    pub file: &'a str,
    /// Content.
    pub scope: &'a Scope,
    /// Module around it.
    pub parent: Option<ModuleId>,
    /// Children by name, with whether they have a visibility above private.
    pub children: HashMap<&'a str, (ModuleId, bool)>,
}

/// All modules of a crate; the first is its root.
pub struct Modules<'a> {
    /// Modules.
    pub all: Vec<Module<'a>>,
    facts: &'a Facts,
}

impl<'a> Modules<'a> {
    /// Follows `mod` items from the root file on.
    pub fn read(facts: &'a Facts, root: &str) -> Modules<'a> {
        let mut modules = Modules { all: Vec::new(), facts };
        if let Some((file, syntax)) = modules.file(root) {
            let root_file = Place { file, syntax, folder: parent(file).to_owned() };
            modules.add(&root_file, 0, None, String::new());
        }
        modules
    }

    /// Tells whether `inner` is `outer` or lies in it.
    pub fn is_within(&self, inner: ModuleId, outer: ModuleId) -> bool {
        let mut at = Some(inner);
        while let Some(id) = at {
            if id == outer {
                return true;
            }
            at = self.all[id].parent;
        }
        false
    }

    fn file(&self, path: &str) -> Option<(&'a str, &'a Syntax)> {
        let facts = self.facts;
        Some((facts.tree.file(path)?.path.as_str(), facts.syntax(path)?))
    }

    /// Adds a scope of a file with all below; `inline` are the names of inline modules around it.
    fn add(
        &mut self,
        place: &Place<'a>,
        scope: usize,
        outer: Option<ModuleId>,
        inline: String,
    ) -> ModuleId {
        let id = self.all.len();
        let scope = &place.syntax.scopes[scope];
        self.all.push(Module { file: place.file, scope, parent: outer, children: HashMap::new() });
        for child in &scope.children {
            let added = match child.scope {
                Some(inner) => Some(self.add(place, inner, Some(id), join(&inline, &child.name))),
                None => self.child_file(place, &inline, &child.name, child.path.as_deref()).map(
                    |(file, syntax)| {
                        let folder = folder_of_children(file, child.path.is_some());
                        self.add(&Place { file, syntax, folder }, 0, Some(id), String::new())
                    },
                ),
            };
            if let Some(added) = added {
                self.all[id].children.insert(&child.name, (added, child.is_public));
            }
        }
        id
    }

    fn child_file(
        &self,
        place: &Place<'a>,
        inline: &str,
        name: &str,
        path: Option<&str>,
    ) -> Option<(&'a str, &'a Syntax)> {
        if let Some(path) = path {
            let folder = if inline.is_empty() { parent(place.file) } else { &place.folder };
            return self.file(&join(&join(folder, inline), path));
        }
        let folder = join(&place.folder, inline);
        self.file(&join(&folder, &format!("{name}.rs")))
            .or_else(|| self.file(&join(&folder, &format!("{name}/mod.rs"))))
    }
}

/// A file with the folder that its children are looked for in.
struct Place<'a> {
    file: &'a str,
    syntax: &'a Syntax,
    folder: String,
}

fn folder_of_children(file: &str, has_path: bool) -> String {
    if has_path || file.ends_with("/mod.rs") {
        return parent(file).to_owned();
    }
    file.strip_suffix(".rs").unwrap_or(file).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_as_the_compiler_finds_them() {
        let facts = Facts::from_sources(&[
            ("x/src/lib.rs", "mod a; mod b; #[path = \"odd/c.rs\"] mod c; mod d { mod e; }"),
            ("x/src/a.rs", "mod f;"),
            ("x/src/a/f.rs", ""),
            ("x/src/b/mod.rs", "mod g;"),
            ("x/src/b/g.rs", ""),
            ("x/src/odd/c.rs", ""),
            ("x/src/d/e.rs", ""),
            ("x/src/unused.rs", ""),
        ]);
        let modules = Modules::read(&facts, "x/src/lib.rs");
        let mut files: Vec<_> = modules.all.iter().map(|m| m.file).collect();
        files.sort_unstable();
        files.dedup();
        assert_eq!(files.len(), 7);
        assert!(!files.contains(&"x/src/unused.rs"));
    }
}
