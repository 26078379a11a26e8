//! Syntax of one Rust file, as far as rules need it: scopes, imports, used names, functions.
//!
//! The result holds no spans and no syntax trees, so that files are parsed by several threads.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// Namespace of an item, as far as names are told apart by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemKind {
    /// Struct, enum, union or alias.
    Type,
    /// Trait.
    Trait,
    /// Function, constant or static.
    Value,
    /// `macro_rules!`.
    Macro,
}

/// An item that a scope defines.
#[derive(Clone, Debug)]
pub struct Item {
    /// Name.
    pub name: String,
    /// Namespace.
    pub kind: ItemKind,
    /// Whether it has a visibility above private.
    pub is_public: bool,
}

/// One name of a `use` item.
#[derive(Clone, Debug)]
pub struct Import {
    /// Path that is imported.
    pub path: Vec<String>,
    /// Name that it gets; empty for a glob.
    pub name: String,
    /// Whether it has a visibility above private: a re-export.
    pub is_public: bool,
}

/// A `mod` item.
#[derive(Clone, Debug)]
pub struct Child {
    /// Name.
    pub name: String,
    /// Value of `#[path]`.
    pub path: Option<String>,
    /// Scope of an inline one.
    pub scope: Option<usize>,
    /// Whether it has a visibility above private.
    pub is_public: bool,
}

/// A path that code uses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    /// Segments.
    pub path: Vec<String>,
    /// Whether the function has a local variable with the name, so that it need not be an import.
    pub is_shadowed: bool,
    /// Whether it is the name of a macro that is called.
    pub is_macro: bool,
}

/// A file, or an inline `mod` in it.
#[derive(Debug, Default)]
pub struct Scope {
    /// Items.
    pub items: Vec<Item>,
    /// Imports, those within functions too.
    pub imports: Vec<Import>,
    /// Children.
    pub children: Vec<Child>,
    /// Paths that its code uses.
    pub references: BTreeSet<Reference>,
}

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    /// Name.
    pub name: String,
    /// Line of `fn`.
    pub line: usize,
    /// Lines from `fn` to the closing brace.
    pub lines: usize,
}

/// Scopes and functions of one file. Code of tests and of the feature `testing` is not in the
/// scopes.
#[derive(Debug, Default)]
pub struct Syntax {
    /// The file's own scope and those of its inline modules.
    pub scopes: Vec<Scope>,
    /// All functions, those of tests too.
    pub functions: Vec<Function>,
}

impl Syntax {
    /// Parses a file.
    pub fn parse(text: &str) -> Result<Syntax, syn::Error> {
        let file = syn::parse_file(text)?;
        let mut collect = Collect::new();
        if is_left_out(&file.attrs) {
            collect.left_out = 1;
        }
        visit::visit_file(&mut collect, &file);
        let result = collect.out;
        drop(file);
        // The text of each file would be kept for its spans.
        proc_macro2::extra::invalidate_current_thread_spans();
        Ok(result)
    }
}

struct Collect {
    out: Syntax,
    scope: usize,
    bindings: Vec<BTreeSet<String>>,
    /// Depth of items that are only for tests: their functions count, their names do not.
    left_out: usize,
}

impl Collect {
    fn new() -> Collect {
        let out = Syntax { scopes: vec![Scope::default()], functions: Vec::new() };
        Collect { out, scope: 0, bindings: Vec::new(), left_out: 0 }
    }

    /// Scope to write to; none in code of tests.
    fn scope(&mut self) -> Option<&mut Scope> {
        if self.left_out > 0 { None } else { self.out.scopes.get_mut(self.scope) }
    }

    fn define(&mut self, name: &syn::Ident, kind: ItemKind, vis: &syn::Visibility) {
        let item = Item { name: plain(name), kind, is_public: is_public(vis) };
        // An item within a function is found by that function's code only; a name more does no
        // harm.
        if let Some(scope) = self.scope() {
            scope.items.push(item);
        }
    }

    fn refer(&mut self, path: Vec<String>, is_macro: bool) {
        let is_shadowed = path.len() == 1 && self.bindings.iter().any(|b| b.contains(&path[0]));
        if path.is_empty() || path[0] == "Self" || (path.len() == 1 && path[0] == "self") {
            return;
        }
        if let Some(scope) = self.scope() {
            scope.references.insert(Reference { path, is_shadowed, is_macro });
        }
    }

    fn function(&mut self, name: String, from: usize, to: usize) {
        self.out.functions.push(Function { name, line: from, lines: to + 1 - from });
    }

    fn in_function(
        &mut self,
        sig: &syn::Signature,
        block: &syn::Block,
        go: impl FnOnce(&mut Self),
    ) {
        let to = block.brace_token.span.close().end().line;
        self.function(plain(&sig.ident), sig.fn_token.span.start().line, to);
        let mut bindings = Bindings::default();
        bindings.visit_signature(sig);
        bindings.visit_block(block);
        self.bindings.push(bindings.names);
        go(self);
        self.bindings.pop();
    }

    fn in_attrs(&mut self, attrs: &[syn::Attribute], go: impl FnOnce(&mut Self)) {
        let depth = usize::from(is_left_out(attrs));
        self.left_out += depth;
        go(self);
        self.left_out -= depth;
    }

    /// Finds paths and functions in what a macro is given.
    fn tokens(&mut self, tokens: TokenStream) {
        let trees: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < trees.len() {
            match &trees[at] {
                TokenTree::Group(group) => {
                    self.tokens(group.stream());
                    at += 1;
                }
                TokenTree::Ident(ident) if ident == "fn" => {
                    self.function_of_tokens(&trees[at..]);
                    at += 1;
                }
                TokenTree::Ident(_) if !(at > 0 && is_punct(&trees, at - 1, '.')) => {
                    let (path, next) = path_of_tokens(&trees, at);
                    let is_macro = is_punct(&trees, next, '!') && !is_punct(&trees, next + 1, '=');
                    self.refer(path, is_macro);
                    at = next;
                }
                _ => at += 1,
            }
        }
    }

    fn function_of_tokens(&mut self, trees: &[TokenTree]) {
        let Some(TokenTree::Ident(name)) = trees.get(1) else { return };
        for tree in &trees[2..] {
            match tree {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                    let (from, to) = (trees[0].span().start().line, group.span_close().end().line);
                    return self.function(plain(name), from, to);
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => return,
                _ => {}
            }
        }
    }

    fn import(&mut self, tree: &syn::UseTree, path: &mut Vec<String>, is_public: bool) {
        let (path, name) = match tree {
            syn::UseTree::Path(part) => {
                path.push(plain(&part.ident));
                self.import(&part.tree, path, is_public);
                path.pop();
                return;
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, path, is_public);
                }
                return;
            }
            syn::UseTree::Name(part) if part.ident == "self" => {
                (path.clone(), path.last().cloned().unwrap_or_default())
            }
            syn::UseTree::Name(part) => (joined(path, &part.ident), plain(&part.ident)),
            syn::UseTree::Rename(part) if part.ident == "self" => {
                (path.clone(), part.rename.to_string())
            }
            syn::UseTree::Rename(part) => (joined(path, &part.ident), part.rename.to_string()),
            syn::UseTree::Glob(_) => (path.clone(), String::new()),
        };
        if let Some(scope) = self.scope() {
            scope.imports.push(Import { path, name, is_public });
        }
    }
}

impl<'ast> Visit<'ast> for Collect {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attrs = attrs_of(item);
        self.in_attrs(attrs, |this| {
            match item {
                syn::Item::Const(i) => this.define(&i.ident, ItemKind::Value, &i.vis),
                syn::Item::Static(i) => this.define(&i.ident, ItemKind::Value, &i.vis),
                syn::Item::Fn(i) => this.define(&i.sig.ident, ItemKind::Value, &i.vis),
                syn::Item::Enum(i) => this.define(&i.ident, ItemKind::Type, &i.vis),
                syn::Item::Struct(i) => this.define(&i.ident, ItemKind::Type, &i.vis),
                syn::Item::Union(i) => this.define(&i.ident, ItemKind::Type, &i.vis),
                syn::Item::Type(i) => this.define(&i.ident, ItemKind::Type, &i.vis),
                syn::Item::Trait(i) => this.define(&i.ident, ItemKind::Trait, &i.vis),
                syn::Item::Macro(i) => {
                    if let Some(ident) = &i.ident {
                        let vis = syn::Visibility::Public(Default::default());
                        this.define(ident, ItemKind::Macro, &vis);
                    }
                }
                _ => {}
            }
            visit::visit_item(this, item);
        });
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let path = item.attrs.iter().find_map(path_attribute);
        let name = plain(&item.ident);
        let is_public = is_public(&item.vis);
        let Some((_, items)) = &item.content else {
            let child = Child { name, path, scope: None, is_public };
            if let Some(scope) = self.scope() {
                scope.children.push(child);
            }
            return;
        };
        let scope = self.out.scopes.len();
        if let Some(parent) = self.scope() {
            parent.children.push(Child { name, path, scope: Some(scope), is_public });
        }
        self.out.scopes.push(Scope::default());
        let outer = std::mem::replace(&mut self.scope, scope);
        for item in items {
            self.visit_item(item);
        }
        self.scope = outer;
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&item.tree, &mut Vec::new(), is_public(&item.vis));
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.in_function(&item.sig, &item.block, |this| visit::visit_item_fn(this, item));
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attrs = match item {
            syn::ImplItem::Const(i) => &i.attrs,
            syn::ImplItem::Fn(i) => &i.attrs,
            syn::ImplItem::Type(i) => &i.attrs,
            _ => return visit::visit_impl_item(self, item),
        };
        self.in_attrs(attrs, |this| visit::visit_impl_item(this, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.in_function(&item.sig, &item.block, |this| visit::visit_impl_item_fn(this, item));
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.in_attrs(&item.attrs, |this| match &item.default {
            Some(block) => {
                this.in_function(&item.sig, block, |this| visit::visit_trait_item_fn(this, item));
            }
            None => visit::visit_trait_item_fn(this, item),
        });
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.in_attrs(&field.attrs, |this| visit::visit_field(this, field));
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        self.in_attrs(&field.attrs, |this| visit::visit_field_value(this, field));
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.in_attrs(&variant.attrs, |this| visit::visit_variant(this, variant));
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        self.in_attrs(&arm.attrs, |this| visit::visit_arm(this, arm));
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        self.in_attrs(&local.attrs, |this| visit::visit_local(this, local));
    }

    fn visit_expr_block(&mut self, block: &'ast syn::ExprBlock) {
        self.in_attrs(&block.attrs, |this| visit::visit_expr_block(this, block));
    }

    fn visit_attribute(&mut self, attr: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attr.meta
            && !attr.path().is_ident("cfg")
        {
            self.tokens(list.tokens.clone());
        }
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.refer(path.segments.iter().map(|s| plain(&s.ident)).collect(), false);
        }
        visit::visit_path(self, path);
    }

    fn visit_pat_ident(&mut self, pat: &'ast syn::PatIdent) {
        let name = plain(&pat.ident);
        if name.starts_with(|c: char| c.is_uppercase()) {
            self.refer(vec![name], false);
        }
        visit::visit_pat_ident(self, pat);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.refer(mac.path.segments.iter().map(|s| plain(&s.ident)).collect(), true);
        self.tokens(mac.tokens.clone());
    }
}

/// Names of local variables.
#[derive(Default)]
struct Bindings {
    names: BTreeSet<String>,
}

impl<'ast> Visit<'ast> for Bindings {
    fn visit_pat_ident(&mut self, pat: &'ast syn::PatIdent) {
        self.names.insert(plain(&pat.ident));
        visit::visit_pat_ident(self, pat);
    }
}

fn attrs_of(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(i) => &i.attrs,
        syn::Item::Enum(i) => &i.attrs,
        syn::Item::Fn(i) => &i.attrs,
        syn::Item::ForeignMod(i) => &i.attrs,
        syn::Item::Impl(i) => &i.attrs,
        syn::Item::Macro(i) => &i.attrs,
        syn::Item::Mod(i) => &i.attrs,
        syn::Item::Static(i) => &i.attrs,
        syn::Item::Struct(i) => &i.attrs,
        syn::Item::Trait(i) => &i.attrs,
        syn::Item::Type(i) => &i.attrs,
        syn::Item::Union(i) => &i.attrs,
        syn::Item::Use(i) => &i.attrs,
        _ => &[],
    }
}

/// Tells whether an item is for tests only.
fn is_left_out(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|attr| match &attr.meta {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            eval_cfg(list.tokens.clone()) == Some(false)
        }
        _ => false,
    })
}

/// Value of a condition in a build without tests and without the feature `testing`; none where it
/// depends on more.
fn eval_cfg(tokens: TokenStream) -> Option<bool> {
    let trees: Vec<TokenTree> = tokens.into_iter().collect();
    let parts = trees.split(|t| matches!(t, TokenTree::Punct(p) if p.as_char() == ','));
    let values = parts.filter(|p| !p.is_empty()).map(eval_predicate).collect::<Vec<_>>();
    values.first().copied().flatten()
}

fn eval_predicate(trees: &[TokenTree]) -> Option<bool> {
    match trees {
        [TokenTree::Ident(name)] if name == "test" => Some(false),
        [TokenTree::Ident(name), TokenTree::Punct(_), value]
            if name == "feature" && value.to_string() == "\"testing\"" =>
        {
            Some(false)
        }
        [TokenTree::Ident(name), TokenTree::Group(group)] => {
            let trees: Vec<TokenTree> = group.stream().into_iter().collect();
            let values: Vec<_> = trees
                .split(|t| matches!(t, TokenTree::Punct(p) if p.as_char() == ','))
                .filter(|p| !p.is_empty())
                .map(eval_predicate)
                .collect();
            match name.to_string().as_str() {
                "not" => values.first().copied().flatten().map(|v| !v),
                "all" if values.contains(&Some(false)) => Some(false),
                "any" if values.iter().all(|v| *v == Some(false)) => Some(false),
                _ => None,
            }
        }
        _ => None,
    }
}

fn path_attribute(attr: &syn::Attribute) -> Option<String> {
    match &attr.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

fn is_public(vis: &syn::Visibility) -> bool {
    match vis {
        syn::Visibility::Inherited => false,
        syn::Visibility::Restricted(part) => !part.path.is_ident("self"),
        syn::Visibility::Public(_) => true,
    }
}

fn plain(ident: &proc_macro2::Ident) -> String {
    let name = ident.to_string();
    name.strip_prefix("r#").map(str::to_owned).unwrap_or(name)
}

fn joined(path: &[String], last: &proc_macro2::Ident) -> Vec<String> {
    let mut path = path.to_vec();
    path.push(plain(last));
    path
}

fn is_punct(trees: &[TokenTree], at: usize, c: char) -> bool {
    matches!(trees.get(at), Some(TokenTree::Punct(p)) if p.as_char() == c)
}

/// Path that begins at a token, and the position after it.
fn path_of_tokens(trees: &[TokenTree], from: usize) -> (Vec<String>, usize) {
    let mut path = Vec::new();
    let mut at = from;
    while let Some(TokenTree::Ident(ident)) = trees.get(at) {
        path.push(plain(ident));
        at += 1;
        if !(is_punct(trees, at, ':') && is_punct(trees, at + 1, ':')) {
            break;
        }
        if !matches!(trees.get(at + 2), Some(TokenTree::Ident(_))) {
            break;
        }
        at += 2;
    }
    (path, at.max(from + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(text: &str) -> Vec<String> {
        let syntax = Syntax::parse(text).unwrap();
        syntax.scopes[0].references.iter().map(|r| r.path.join("::")).collect()
    }

    #[test]
    fn names_in_macros_are_seen() {
        let seen = paths("fn f() { log!(\"{}\", crate::limits::MAX, a.field, size = other()); }");
        assert!(seen.contains(&"crate::limits::MAX".to_owned()), "{seen:?}");
        assert!(seen.contains(&"other".to_owned()) && !seen.contains(&"field".to_owned()));
    }

    #[test]
    fn code_of_tests_is_left_out() {
        let text = "#[cfg(test)] mod tests { use super::*; fn f() { a::b() } }
            #[cfg(any(test, feature = \"testing\"))] fn g() { c::d() }
            #[cfg(not(test))] fn h() { e::f() }";
        let syntax = Syntax::parse(text).unwrap();
        assert_eq!(paths(text), ["e::f"]);
        assert_eq!(syntax.functions.len(), 3);
        assert!(syntax.scopes[0].children.is_empty());
    }

    #[test]
    fn imports_are_listed_with_their_names() {
        let syntax = Syntax::parse("pub use a::{self, b as c, d::*}; use crate::e;").unwrap();
        let seen: Vec<_> = syntax.scopes[0]
            .imports
            .iter()
            .map(|i| (i.path.join("::"), i.name.as_str(), i.is_public))
            .collect();
        let expected =
            [("a", "a", true), ("a::b", "c", true), ("a::d", "", true), ("crate::e", "e", false)];
        assert_eq!(seen, expected.map(|(path, name, public)| (path.to_owned(), name, public)));
    }

    #[test]
    fn functions_are_measured_in_macros_too() {
        let syntax =
            Syntax::parse("proptest! {\n fn f(a in 0..3) {\n }\n}\nfn g() {\n\n}\n").unwrap();
        let seen: Vec<_> =
            syntax.functions.iter().map(|f| (f.name.as_str(), f.line, f.lines)).collect();
        assert_eq!(seen, [("f", 2, 2), ("g", 5, 3)]);
    }
}
