//! Resolution of paths to the file that defines an item.

use super::modules::{ModuleId, Modules};
use crate::syntax::{Import, ItemKind};

/// End of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A module.
    Module(ModuleId),
    /// An item that a module defines. The kind is missing where only its place is known: a macro
    /// made it.
    Item(ModuleId, Option<ItemKind>),
    /// An item of another crate.
    External,
}

/// Position of a name in a path: only modules and types have names in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    Prefix,
    Final,
}

/// Looks paths up in the modules of one crate.
pub struct Resolver<'m, 'a> {
    modules: &'m Modules<'a>,
    /// Names that are being looked up, so that imports of each other end.
    open: Vec<(ModuleId, String, Want)>,
}

impl<'m, 'a> Resolver<'m, 'a> {
    /// A resolver for these modules.
    pub fn new(modules: &'m Modules<'a>) -> Resolver<'m, 'a> {
        Resolver { modules, open: Vec::new() }
    }

    /// Resolves a path that code of `from` uses. Names that come from a glob are left out where
    /// `no_globs` is set.
    pub fn resolve(&mut self, from: ModuleId, path: &[String], no_globs: bool) -> Option<Target> {
        self.open.clear();
        if no_globs
            && let [name] = path
            && !self.has_name(from, name)
        {
            return None;
        }
        self.path(from, path, Want::Final)
    }

    /// Resolves the path of an import.
    pub fn import(&mut self, from: ModuleId, import: &Import) -> Option<Target> {
        self.open.clear();
        self.import_path(from, import, Want::Final)
    }

    fn has_name(&self, module: ModuleId, name: &str) -> bool {
        let scope = self.modules.all[module].scope;
        scope.items.iter().any(|i| i.name == name) || scope.imports.iter().any(|i| i.name == name)
    }

    fn path(&mut self, from: ModuleId, path: &[String], want: Want) -> Option<Target> {
        let (first, mut rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => Target::Module(0),
            "self" => Target::Module(from),
            "super" => Target::Module(self.modules.all[from].parent?),
            name => {
                let want = if rest.is_empty() { want } else { Want::Prefix };
                self.name(from, name, want, from)?
            }
        };
        while let Some((name, after)) = rest.split_first() {
            let Target::Module(module) = at else { return Some(at) };
            at = if name == "super" {
                Target::Module(self.modules.all[module].parent?)
            } else if name == "self" {
                at
            } else {
                let want = if after.is_empty() { want } else { Want::Prefix };
                match self.name(module, name, want, from) {
                    Some(target) => target,
                    None if self.has_external_glob(module) => Target::External,
                    None => Target::Item(module, None),
                }
            };
            rest = after;
        }
        Some(at)
    }

    /// Path of an import: its first name may be a crate's.
    fn import_path(&mut self, from: ModuleId, import: &Import, want: Want) -> Option<Target> {
        let want = if import.name.is_empty() { Want::Prefix } else { want };
        self.path(from, &import.path, want).or(Some(Target::External))
    }

    /// Looks a name up in a module, for code of `user`.
    fn name(&mut self, at: ModuleId, name: &str, want: Want, user: ModuleId) -> Option<Target> {
        if self.open.iter().any(|(m, n, w)| *m == at && n == name && *w == want) {
            return None;
        }
        self.open.push((at, name.to_owned(), want));
        let found = self.name_unguarded(at, name, want, user);
        self.open.pop();
        found
    }

    fn name_unguarded(
        &mut self,
        at: ModuleId,
        name: &str,
        want: Want,
        user: ModuleId,
    ) -> Option<Target> {
        let scope = self.modules.all[at].scope;
        let child = self.modules.all[at].children.get(name).map(|c| Target::Module(c.0));
        let item = scope
            .items
            .iter()
            .find(|i| i.name == name && (want == Want::Final || is_prefix(i.kind)))
            .map(|i| Target::Item(at, Some(i.kind)));
        let own = if want == Want::Prefix { child.or(item) } else { item };
        if own.is_some() {
            return own;
        }
        for import in scope.imports.iter().filter(|i| i.name == name) {
            match self.import_path(at, import, want) {
                Some(Target::Module(_)) if want == Want::Final && child.is_some() => {}
                Some(Target::Item(_, Some(kind))) if want == Want::Prefix && !is_prefix(kind) => {}
                found => return found,
            }
        }
        child.or_else(|| self.name_in_globs(at, name, want, user))
    }

    fn name_in_globs(
        &mut self,
        at: ModuleId,
        name: &str,
        want: Want,
        user: ModuleId,
    ) -> Option<Target> {
        let scope = self.modules.all[at].scope;
        for glob in scope.imports.iter().filter(|i| i.name.is_empty()) {
            if let Some(Target::Module(module)) = self.import_path(at, glob, want)
                && module != at
                && self.may_see(module, name, at)
                && let Some(found) = self.name(module, name, want, user)
                && found != Target::External
            {
                return Some(found);
            }
        }
        None
    }

    /// Tells whether a glob import in `user` brings the name: private ones go to what lies within.
    fn may_see(&self, module: ModuleId, name: &str, user: ModuleId) -> bool {
        if self.modules.is_within(user, module) {
            return true;
        }
        let Some(found) = self.modules.all.get(module) else { return false };
        let is_public = found.children.get(name).is_some_and(|c| c.1)
            || found.scope.items.iter().any(|i| i.name == name && i.is_public)
            || found.scope.imports.iter().any(|i| i.name == name && i.is_public);
        is_public || found.scope.imports.iter().any(|i| i.name.is_empty() && i.is_public)
    }

    fn has_external_glob(&mut self, module: ModuleId) -> bool {
        let scope = self.modules.all[module].scope;
        let is_external = |this: &mut Self, import: &Import| {
            this.import_path(module, import, Want::Prefix) == Some(Target::External)
        };
        scope.imports.iter().any(|i| i.name.is_empty() && is_external(self, i))
    }
}

fn is_prefix(kind: ItemKind) -> bool {
    matches!(kind, ItemKind::Type | ItemKind::Trait)
}
