//! Arrows between the files of one crate.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::modules::{ModuleId, Modules};
use super::resolve::{Resolver, Target};
use crate::facts::Facts;
use crate::syntax::ItemKind;

/// Names by arrow: the file that uses them, and the file that defines them.
pub type Arrows = BTreeMap<(String, String), BTreeSet<String>>;

/// Arrows of the crate with this root file.
pub fn arrows(facts: &Facts, root: &str) -> Arrows {
    let mut arrows = Arrows::new();
    add_arrows(facts, root, &mut arrows);
    arrows
}

/// Adds the arrows of the crate with this root file.
pub fn add_arrows(facts: &Facts, root: &str, arrows: &mut Arrows) {
    let modules = Modules::read(facts, root);
    let macros = macros_of(&modules);
    let mut resolver = Resolver::new(&modules);
    let mut add = |from: ModuleId, target: Option<Target>, name: &str| {
        let Some(Target::Item(to, _)) = target else { return };
        let (from, to) = (modules.all[from].file, modules.all[to].file);
        if from != to {
            let names = arrows.entry((from.to_owned(), to.to_owned())).or_default();
            names.insert(name.to_owned());
        }
    };
    for (id, module) in modules.all.iter().enumerate() {
        for reference in &module.scope.references {
            let found = resolver.resolve(id, &reference.path, reference.is_shadowed);
            let name = reference.path.iter().find(|n| is_item_name(n));
            let name = name.or(reference.path.last()).map_or("", String::as_str);
            match (found, reference.path.as_slice()) {
                // A macro's name holds in all files after its own, without an import.
                (None, [single]) if reference.is_macro => {
                    let to = macros.get(single.as_str()).map(|&m| Target::Item(m, None));
                    add(id, to, name);
                }
                _ => add(id, found, name),
            }
        }
        for import in module.scope.imports.iter().filter(|i| !i.is_public) {
            // Methods of a trait are called without its name.
            let found = resolver.import(id, import);
            if let Some(Target::Item(_, Some(ItemKind::Trait))) = found {
                add(id, found, import.path.last().map_or("", String::as_str));
            }
        }
    }
}

/// Tells whether a segment names a type or constant, which says more than the module around it.
fn is_item_name(segment: &str) -> bool {
    segment.starts_with(|c: char| c.is_uppercase())
}

fn macros_of<'a>(modules: &Modules<'a>) -> HashMap<&'a str, ModuleId> {
    let mut macros = HashMap::new();
    for (id, module) in modules.all.iter().enumerate() {
        for item in module.scope.items.iter().filter(|i| i.kind == ItemKind::Macro) {
            macros.insert(item.name.as_str(), id);
        }
    }
    macros
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Arrows between files named without folder and ending, with the names that they bring.
    fn shape(sources: &[(&str, &str)]) -> Vec<String> {
        let sources: Vec<(String, &str)> =
            sources.iter().map(|(path, text)| (format!("x/src/{path}"), *text)).collect();
        let sources: Vec<(&str, &str)> = sources.iter().map(|(p, t)| (p.as_str(), *t)).collect();
        let short =
            |path: &str| path.trim_start_matches("x/src/").trim_end_matches(".rs").to_owned();
        arrows(&Facts::from_sources(&sources), "x/src/lib.rs")
            .into_iter()
            .map(|((from, to), names)| {
                let names: Vec<_> = names.into_iter().collect();
                format!("{} -> {}: {}", short(&from), short(&to), names.join(" "))
            })
            .collect()
    }

    #[test]
    fn a_re_export_leads_to_the_file_that_defines() {
        let shape = shape(&[
            ("lib.rs", "mod a; mod b; pub use b::Thing; pub use b::*;"),
            ("a.rs", "use crate::Thing; fn f(t: Thing) { crate::other() }"),
            ("b.rs", "pub struct Thing; pub fn other() {}"),
        ]);
        assert_eq!(shape, ["a -> b: Thing other"]);
    }

    #[test]
    fn a_parents_own_use_is_an_arrow_and_its_re_export_is_none() {
        let shape = shape(&[
            ("lib.rs", "mod a; mod c; pub use a::A; pub use c::C; fn f() -> A { A::new() }"),
            ("a.rs", "pub struct A;"),
            ("c.rs", "pub struct C;"),
        ]);
        assert_eq!(shape, ["lib -> a: A"]);
    }

    #[test]
    fn an_item_of_the_parent_is_an_arrow_up() {
        let shape = shape(&[
            ("lib.rs", "mod a; pub struct Above; use a::A; fn f(_: A) {}"),
            ("a.rs", "use super::Above; pub struct A(Above);"),
        ]);
        assert_eq!(shape, ["a -> lib: Above", "lib -> a: A"]);
    }

    #[test]
    fn a_private_import_for_children_belongs_to_the_children() {
        let shape = shape(&[
            ("lib.rs", "mod a; mod b; use b::B;"),
            ("a.rs", "use super::*; fn f(_: B) {}"),
            ("b.rs", "pub struct B;"),
        ]);
        assert_eq!(shape, ["a -> b: B"]);
    }

    #[test]
    fn a_module_is_no_item_and_what_it_holds_is() {
        let shape = shape(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b; fn f() { b::run(b::Way::Here) }"),
            ("b.rs", "mod c; pub use c::run; pub enum Way { Here }"),
            ("b/c.rs", "pub fn run() {}"),
        ]);
        assert_eq!(shape, ["a -> b: Way", "a -> b/c: run"]);
    }

    #[test]
    fn a_trait_that_is_only_imported_is_an_arrow() {
        let shape = shape(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::Disk as _; fn f(x: u8) { x.read() }"),
            ("b.rs", "pub trait Disk { fn read(&self); }"),
        ]);
        assert_eq!(shape, ["a -> b: Disk"]);
    }

    #[test]
    fn an_impl_in_another_file_names_the_type() {
        let shape = shape(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "impl crate::b::Flow { fn f(&self) {} }"),
            ("b.rs", "pub struct Flow;"),
        ]);
        assert_eq!(shape, ["a -> b: Flow"]);
    }

    #[test]
    fn a_local_variable_is_no_name_of_a_glob() {
        let shape = shape(&[
            ("lib.rs", "mod a; pub fn count() {}"),
            ("a.rs", "use super::*; fn f() { let count = 1; g(count) } fn g(_: u8) {}"),
        ]);
        assert!(shape.is_empty(), "{shape:?}");
    }

    #[test]
    fn macros_lead_to_their_file() {
        let shape = shape(&[
            ("lib.rs", "#[macro_use] mod a; mod b;"),
            ("a.rs", "macro_rules! twice { () => { $crate::b::one() } }"),
            ("b.rs", "pub fn one() {} fn two() { twice!() }"),
        ]);
        assert_eq!(shape, ["a -> b: one", "b -> a: twice"]);
    }

    #[test]
    fn other_crates_are_no_arrows() {
        let shape = shape(&[
            ("lib.rs", "mod a; pub use serde; pub use std::io::*;"),
            (
                "a.rs",
                "use crate::serde::Serialize; use tokio::net; fn f(r: crate::Read) { net::x() }",
            ),
        ]);
        assert!(shape.is_empty(), "{shape:?}");
    }
}
