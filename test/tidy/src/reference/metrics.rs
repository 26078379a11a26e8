//! `metrics.md`: every metric family, from the calls that write it: `Metrics::sample`,
//! `Metrics::time`, and `head` of the renderer.
//!
//! A name or labels that cannot be found out are an error: write them as others are written.

use std::collections::{BTreeMap, HashMap};

use syn::parse::{ParseStream, Parser};
use syn::visit::{self, Visit};
use syn::{Attribute, Block, Expr, Ident, Item, Pat, Signature, Token};

use super::evaluate::{Callee, Env, MAX_DEPTH, Names, UNKNOWN, Value, literals, plain_name};
use super::markdown::{code, escape, table};
use super::source::{crate_and_source, paragraphs, parse};
use crate::error::TidyError;
use crate::tree::{Language, SourceFile, Tree};

/// Beginning of every name.
const PREFIX: &str = "millrace_";

const INTRO: &str = "# Metrics

Metrics of `millrace metrics`, of `GET /v1/metrics` on the control socket and of `GET /metrics` on the read socket, as
Prometheus reads them. Counters begin anew with the daemon. A family whose subject is not there (no qcow2 image, no
pipes) has no samples. Which are worth an alarm, and how to fetch them without root:
[monitor](../operate/monitor.md#metrics-worth-an-alarm).

";

/// A metric family.
struct Family {
    kind: String,
    help: String,
    labels: Option<Vec<String>>,
    path: String,
}

/// Makes the page.
pub fn page(tree: &Tree) -> Result<String, TidyError> {
    let mut text = INTRO.to_owned();
    let mut groups: BTreeMap<String, Vec<Vec<String>>> = BTreeMap::new();
    for (name, family) in families(tree)? {
        let Some(labels) = &family.labels else {
            let text = format!("labels of {name} cannot be found out");
            return Err(TidyError::Reference { path: family.path, text });
        };
        let labels: Vec<String> = labels.iter().map(|label| code(label)).collect();
        let unit = unit(&name).to_owned();
        let help = escape(&family.help);
        let row = vec![code(&name), family.kind.clone(), unit, labels.join(", "), help];
        groups.entry(subject(&name).to_owned()).or_default().push(row);
    }
    for (subject, rows) in &groups {
        text.push_str(&format!("## {subject}\n\n"));
        text.push_str(&table(&["Metric", "Type", "Unit", "Labels", "Meaning"], rows));
        text.push('\n');
    }
    text.push_str(&reasons(tree)?);
    Ok(text)
}

/// Names of all families.
pub fn metric_names(tree: &Tree) -> Result<Vec<String>, TidyError> {
    Ok(families(tree)?.into_keys().collect())
}

fn subject(name: &str) -> &str {
    let word = name[PREFIX.len()..].split('_').next().unwrap_or_default();
    if matches!(word, "build" | "uptime") { "daemon" } else { word }
}

fn unit(name: &str) -> &'static str {
    let name = name.strip_suffix("_total").unwrap_or(name);
    let units = [
        ("_bytes_per_s", "bytes per second"),
        ("_ops_per_s", "requests per second"),
        ("_bytes", "bytes"),
        ("_nanoseconds", "nanoseconds"),
        ("_ns", "nanoseconds"),
        ("_seconds", "seconds"),
        ("_pages", "pages"),
    ];
    let is_bytes = name.contains("_bytes_from_") || name.contains("_bytes_to_");
    let found = units.iter().find(|(suffix, _)| name.ends_with(suffix));
    found.map_or(if is_bytes { "bytes" } else { "" }, |(_, unit)| unit)
}

/// Values of the label `reason` of drops.
fn reasons(tree: &Tree) -> Result<String, TidyError> {
    const PATH: &str = "core/base/src/counter.rs";
    let problem =
        |text: &str| TidyError::Reference { path: PATH.to_owned(), text: text.to_owned() };
    let file = tree.file(PATH).ok_or_else(|| problem("is not in the tree"))?;
    let items = parse(PATH, &file.text)?.items;
    let reasons = items.iter().find_map(|item| match item {
        Item::Enum(item) if item.ident == "DropReason" => Some(item),
        _ => None,
    });
    let reasons = reasons.ok_or_else(|| problem("has no DropReason"))?;
    let row = |v: &syn::Variant| {
        vec![code(&snake_case(&v.ident.to_string())), escape(&paragraphs(&v.attrs).join(" "))]
    };
    let rows: Vec<Vec<String>> = reasons.variants.iter().map(row).collect();
    Ok(format!("## Reasons of drops\n\n{}", table(&["`reason`", "Meaning"], &rows)))
}

fn snake_case(name: &str) -> String {
    let mut text = String::new();
    for (i, c) in name.char_indices() {
        if c.is_uppercase() && i > 0 {
            text.push('_');
        }
        text.extend(c.to_lowercase());
    }
    text
}

fn families(tree: &Tree) -> Result<BTreeMap<String, Family>, TidyError> {
    let sources = || {
        let is_source =
            |f: &&SourceFile| crate_and_source(&f.path).is_some() && !f.path.contains("test");
        tree.files_in(Language::Rust).filter(is_source)
    };
    let mut counters = HashMap::new();
    for file in sources().filter(|f| f.text.contains("counter_set! {")) {
        counters.extend(counter_sets(&parse(&file.path, &file.text)?));
    }
    let mut found = BTreeMap::new();
    let writes = [".sample(", ".time(", "head("];
    for file in sources() {
        if file.text.contains(PREFIX) && writes.iter().any(|write| file.text.contains(write)) {
            let syntax = parse(&file.path, &file.text)?;
            read_file(&file.path, &syntax, &counters, &mut found)?;
        }
    }
    Ok(found)
}

/// Fields and help texts of each `counter_set!` of a file.
fn counter_sets(file: &syn::File) -> HashMap<String, Vec<(String, String)>> {
    let mut sets = HashMap::new();
    for item in &file.items {
        let Item::Macro(item) = item else { continue };
        if item.mac.path.segments.last().is_none_or(|s| s.ident != "counter_set") {
            continue;
        }
        if let Ok((name, fields)) = counter_set.parse2(item.mac.tokens.clone()) {
            let subject = name.strip_suffix("Stats").unwrap_or(&name).to_lowercase();
            sets.insert(subject, fields);
        }
    }
    sets
}

/// Name, fields and help texts of `pub struct Name { /// Help. field, … }`.
fn counter_set(input: ParseStream<'_>) -> syn::Result<(String, Vec<(String, String)>)> {
    Attribute::parse_outer(input)?;
    input.parse::<syn::Visibility>()?;
    input.parse::<Token![struct]>()?;
    let name = input.parse::<Ident>()?.to_string();
    let body;
    syn::braced!(body in input);
    let mut fields = Vec::new();
    while !body.is_empty() {
        let docs = paragraphs(&Attribute::parse_outer(&body)?);
        fields.push((body.parse::<Ident>()?.to_string(), docs.join(" ")));
        body.parse::<Option<Token![,]>>()?;
    }
    Ok((name, fields))
}

fn read_file(
    path: &str,
    file: &syn::File,
    counters: &HashMap<String, Vec<(String, String)>>,
    found: &mut BTreeMap<String, Family>,
) -> Result<(), TidyError> {
    let mut names = Names { functions: HashMap::new(), constants: HashMap::new(), counters };
    for item in &file.items {
        match item {
            Item::Fn(item) => {
                names.functions.insert(item.sig.ident.to_string(), (&item.sig, &item.block));
            }
            Item::Const(item) => {
                names.constants.insert(item.ident.to_string(), &item.expr);
            }
            _ => {}
        }
    }
    let mut walk =
        Walk { names, found, path, problem: None, env: Env::default(), head: None, depth: 0 };
    for item in &file.items {
        match item {
            Item::Fn(item) => walk.function(&item.sig, &item.block),
            Item::Impl(item) => {
                for item in &item.items {
                    if let syn::ImplItem::Fn(item) = item {
                        walk.function(&item.sig, &item.block);
                    }
                }
            }
            _ => {}
        }
    }
    match walk.problem {
        Some(text) => Err(TidyError::Reference { path: path.to_owned(), text }),
        None => Ok(()),
    }
}

/// Walk through the functions of a file, in the order in which they run.
struct Walk<'a, 'f> {
    names: Names<'a>,
    found: &'f mut BTreeMap<String, Family>,
    path: &'f str,
    problem: Option<String>,
    env: Env<'a>,
    /// Family that `head` began: its lines follow.
    head: Option<String>,
    depth: usize,
}

impl<'a> Walk<'a, '_> {
    fn function(&mut self, sig: &'a Signature, body: &'a Block) {
        self.head = None;
        self.env = with_parameters(&Env::default(), sig, &[]);
        self.visit_block(body);
    }

    /// Takes a family's sample in; names that do not begin as all do are those of the caller.
    fn add(
        &mut self,
        name: Option<String>,
        kind: &str,
        help: Option<String>,
        labels: Option<Vec<String>>,
    ) -> Option<String> {
        let name = name.filter(|name| name.starts_with(PREFIX))?;
        let Some(help) = help.filter(|_| !name.contains(UNKNOWN)) else {
            let shown = name.replace(UNKNOWN, "{…}");
            self.problem = Some(format!("name or help of the metric {shown} cannot be found out"));
            return None;
        };
        let new =
            || Family { kind: kind.to_owned(), help, labels: None, path: self.path.to_owned() };
        let family = self.found.entry(name.clone()).or_insert_with(new);
        if let Some(labels) = labels {
            let known = family.labels.get_or_insert_default();
            for label in labels {
                if !known.contains(&label) {
                    known.push(label);
                }
            }
        }
        Some(name)
    }

    fn in_scope(&mut self, env: Env<'a>, walk: impl FnOnce(&mut Self)) {
        let outer = std::mem::replace(&mut self.env, env);
        walk(self);
        self.env = outer;
    }
}

fn with_parameters<'a>(env: &Env<'a>, sig: &'a Signature, args: &[Value<'a>]) -> Env<'a> {
    let typed = sig.inputs.iter().filter_map(|input| match input {
        syn::FnArg::Typed(typed) => Some(&*typed.pat),
        syn::FnArg::Receiver(_) => None,
    });
    typed.enumerate().fold(env.clone(), |env, (i, pattern)| {
        env.with_pattern(pattern, args.get(i..=i).unwrap_or(&[Value::Unknown]))
    })
}

impl<'a> Visit<'a> for Walk<'a, '_> {
    fn visit_block(&mut self, block: &'a Block) {
        self.in_scope(self.env.clone(), |walk| visit::visit_block(walk, block));
    }

    fn visit_local(&mut self, local: &'a syn::Local) {
        let Some(init) = &local.init else { return };
        // A closure is looked at where it is called.
        if !matches!(&*init.expr, Expr::Closure(_)) {
            visit::visit_local(self, local);
        }
        let cells = match &local.pat {
            Pat::Tuple(_) => Vec::new(),
            _ => vec![Value::Code(&init.expr, self.env.clone())],
        };
        self.env = self.env.with_pattern(&local.pat, &cells);
    }

    fn visit_expr_for_loop(&mut self, for_loop: &'a syn::ExprForLoop) {
        match self.names.rows(&for_loop.expr, &self.env) {
            Some(rows) => {
                for row in rows {
                    let env = self.env.with_pattern(&for_loop.pat, &row);
                    self.in_scope(env, |walk| walk.visit_block(&for_loop.body));
                }
            }
            None => {
                // Labels may be made by what the loop goes over.
                self.visit_expr(&for_loop.expr);
                let env = self.env.with_pattern(&for_loop.pat, &[]);
                self.in_scope(env, |walk| walk.visit_block(&for_loop.body));
            }
        }
    }

    fn visit_expr_closure(&mut self, closure: &'a syn::ExprClosure) {
        let env = closure.inputs.iter().fold(self.env.clone(), |env, p| env.with_pattern(p, &[]));
        self.in_scope(env, |walk| walk.visit_expr(&closure.body));
    }

    fn visit_expr_call(&mut self, call: &'a syn::ExprCall) {
        visit::visit_expr_call(self, call);
        let args: Vec<&Expr> = call.args.iter().collect();
        if let ([_, name, kind, help], Some("head")) =
            (args.as_slice(), plain_name(&call.func).as_deref())
        {
            let text = |expr: &Expr| self.names.text(expr, &self.env);
            let (name, kind, help) = (text(name), text(kind).unwrap_or_default(), text(help));
            self.head = self.add(name, &kind, help, Some(Vec::new()));
            return;
        }
        let Some(callee) = self.names.callee(&call.func, &self.env) else { return };
        if self.depth >= MAX_DEPTH {
            return;
        }
        self.depth += 1;
        let values: Vec<Value<'a>> =
            call.args.iter().map(|arg| Value::Code(arg, self.env.clone())).collect();
        match callee {
            Callee::Closure(closure, env) => {
                let inputs = closure.inputs.iter().zip(&values);
                let env = inputs
                    .fold(env, |env, (p, value)| env.with_pattern(p, std::slice::from_ref(value)));
                self.in_scope(env, |walk| walk.visit_expr(&closure.body));
            }
            Callee::Function(sig, body) => {
                let env = with_parameters(&Env::default(), sig, &values);
                self.in_scope(env, |walk| walk.visit_block(body));
            }
        }
        self.depth -= 1;
    }

    fn visit_expr_method_call(&mut self, call: &'a syn::ExprMethodCall) {
        visit::visit_expr_method_call(self, call);
        let args: Vec<&Expr> = call.args.iter().collect();
        let method = call.method.to_string();
        match (method.as_str(), args.as_slice()) {
            ("sample" | "time", [name, help, labels, _]) => {
                let name = self.names.text(name, &self.env);
                let kind = match &name {
                    _ if method == "time" => "histogram",
                    Some(name) if name.ends_with("_total") => "counter",
                    _ => "gauge",
                };
                let help = self.names.text(help, &self.env);
                let labels = self.names.keys(labels, &self.env, 0);
                self.add(name, kind, help, labels);
            }
            ("push", [label]) => {
                let Some(name) = plain_name(&call.receiver) else { return };
                let keys = |expr| self.names.keys(expr, &self.env, 0);
                if let (Some(before), Some(new)) = (keys(&call.receiver), keys(label)) {
                    self.env = self.env.with(&name, Value::Keys([before, new].concat()));
                } else if keys(label).is_some() {
                    self.env = self.env.with(&name, Value::Unknown);
                }
            }
            _ => {}
        }
    }

    /// Finds labels in the format strings behind a `head`.
    fn visit_macro(&mut self, call: &'a syn::Macro) {
        let Some(family) = self.head.as_ref().and_then(|name| self.found.get_mut(name)) else {
            return;
        };
        let labels = family.labels.get_or_insert_default();
        for literal in literals(&call.tokens) {
            for (end, _) in literal.match_indices("=\"") {
                let is_key = |c: char| c.is_ascii_lowercase() || c == '_';
                let key = literal[..end].rsplit(|c| !is_key(c)).next().unwrap_or_default();
                if !key.is_empty() && !labels.iter().any(|label| label == key) {
                    labels.push(key.to_owned());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTERS: &str = "base::counter_set! {
    /// Counters.
    pub struct SwitchStats {
        /// Frames, all.
        floods,
        /// Open now.
        open,
    }
}
pub enum DropReason {
    /// Too big.
    TooBig,
}
";

    const HEADS: &str = r#"
const TABLE: [(&str, &str); 2] = [("a", "Of a."), ("b", "Of b.")];
fn write_all(out: &mut String) {
    for (name, help) in TABLE.iter().filter(|(name, _)| matches!(*name, "b")) {
        head(out, &format!("millrace_x_{name}"), "gauge", help);
        for x in labels() {
            writeln!(out, "{{{x}}}");
        }
    }
}
fn labels() -> Vec<String> {
    vec![format!("vm=\"{}\",port=\"{}\"", 1, 2)]
}
"#;

    const SAMPLES: &str = r#"
fn port(vm: &str, all: &mut Metrics) {
    let labels = || vec![("vm", vm.to_owned())];
    disk(&labels, all);
    let mut add = |name: &str, help| {
        all.sample(&format!("millrace_port_{name}_total"), help, labels(), 1);
    };
    add("lost", "Lost.");
}
fn disk(labels: &dyn Fn() -> Labels, all: &mut Metrics) {
    let mut of_queue = labels();
    of_queue.push(("queue", 1));
    all.time("millrace_disk_latency_nanoseconds", "Time.", of_queue.clone(), 1);
}
fn switch(switch: &Switch, all: &mut Metrics) {
    for (name, value, help) in switch.stats().values() {
        let total = if matches!(name, "open") { "" } else { "_total" };
        all.sample(&format!("millrace_switch_{name}{total}"), help, Vec::new(), value);
    }
}
"#;

    fn shown(sources: &[(&str, &str)]) -> Result<Vec<String>, TidyError> {
        let found = families(&Tree::from_sources(sources))?;
        let show = |(name, family): (String, Family)| {
            let labels = family.labels.map_or("?".to_owned(), |labels| labels.join(","));
            format!("{name} {} [{labels}] {}", family.kind, family.help)
        };
        Ok(found.into_iter().map(show).collect())
    }

    #[test]
    fn names_labels_and_help_are_found_through_tables_closures_and_calls() {
        let sources = [
            ("core/base/src/counter.rs", COUNTERS),
            ("core/a/src/heads.rs", HEADS),
            ("core/a/src/samples.rs", SAMPLES),
        ];
        assert_eq!(
            shown(&sources).unwrap(),
            [
                "millrace_disk_latency_nanoseconds histogram [vm,queue] Time.",
                "millrace_port_lost_total counter [vm] Lost.",
                "millrace_switch_floods_total counter [] Frames, all.",
                "millrace_switch_open gauge [] Open now.",
                "millrace_x_b gauge [vm,port] Of b.",
            ]
        );
        let text = reasons(&Tree::from_sources(&sources)).unwrap();
        assert!(text.ends_with("| `too_big` | Too big. |\n"), "{text}");
    }

    #[test]
    fn a_name_that_is_not_known_is_an_error() {
        let source = "fn f(x: &str) { all.sample(&format!(\"millrace_{x}\"), \"H.\", vec![], 1); }";
        let error = shown(&[("core/a/src/b.rs", source)]).unwrap_err().to_string();
        assert!(
            error.contains("core/a/src/b.rs: name or help of the metric millrace_{…}"),
            "{error}"
        );
    }
}
