//! Evaluator of the code that writes metrics, as far as names, help texts and labels need it.
//!
//! Known are literals, `let` and constants, `format!`, closures and functions of the same file,
//! loops over arrays of tuples and over fields of a `counter_set!`. All else is unknown.

use std::collections::HashMap;
use std::rc::Rc;

use proc_macro2::{TokenStream, TokenTree};
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::{Block, Expr, Lit, Member, Pat, Signature, Stmt, Token};

/// Character that stands for an unknown part of a text.
pub const UNKNOWN: char = '\0';

/// Calls within calls that are followed.
pub const MAX_DEPTH: usize = 8;

/// Value of a name.
#[derive(Clone)]
pub enum Value<'a> {
    /// Code, with the names that it sees.
    Code(&'a Expr, Env<'a>),
    /// Text.
    Text(String),
    /// Keys of labels.
    Keys(Vec<String>),
    /// Anything else.
    Unknown,
}

/// Names in scope; the innermost is found first.
#[derive(Clone, Default)]
pub struct Env<'a>(Option<Rc<Binding<'a>>>);

struct Binding<'a> {
    name: String,
    value: Value<'a>,
    above: Env<'a>,
}

impl<'a> Env<'a> {
    /// The same names and one more.
    pub fn with(&self, name: &str, value: Value<'a>) -> Env<'a> {
        Env(Some(Rc::new(Binding { name: name.to_owned(), value, above: self.clone() })))
    }

    /// The same names and those of a pattern: of a tuple those of its cells.
    pub fn with_pattern(&self, pattern: &Pat, cells: &[Value<'a>]) -> Env<'a> {
        match pattern {
            Pat::Ident(ident) => self
                .with(&ident.ident.to_string(), cells.first().cloned().unwrap_or(Value::Unknown)),
            Pat::Type(typed) => self.with_pattern(&typed.pat, cells),
            Pat::Reference(inner) => self.with_pattern(&inner.pat, cells),
            Pat::Paren(inner) => self.with_pattern(&inner.pat, cells),
            Pat::Tuple(tuple) => {
                tuple.elems.iter().enumerate().fold(self.clone(), |env, (i, pat)| {
                    env.with_pattern(pat, cells.get(i..=i).unwrap_or_default())
                })
            }
            _ => self.clone(),
        }
    }

    fn get(&self, name: &str) -> Option<&Value<'a>> {
        let mut env = self;
        while let Some(binding) = &env.0 {
            if binding.name == name {
                return Some(&binding.value);
            }
            env = &binding.above;
        }
        None
    }
}

/// Names of one file that are found from everywhere in it, and counter sets of all files.
pub struct Names<'a> {
    /// Functions and methods.
    pub functions: HashMap<String, (&'a Signature, &'a Block)>,
    /// Constants.
    pub constants: HashMap<String, &'a Expr>,
    /// Fields and help texts of each `counter_set!`, by what it counts: `switch` of `SwitchStats`.
    pub counters: &'a HashMap<String, Vec<(String, String)>>,
}

/// Function or closure that is called.
pub enum Callee<'a> {
    /// Closure.
    Closure(&'a syn::ExprClosure, Env<'a>),
    /// Function of the file.
    Function(&'a Signature, &'a Block),
}

impl<'a> Names<'a> {
    /// Callee of a call by a plain name.
    pub fn callee(&self, function: &Expr, env: &Env<'a>) -> Option<Callee<'a>> {
        let name = plain_name(function)?;
        match env.get(&name) {
            Some(value) => closure(value).map(|(closure, env)| Callee::Closure(closure, env)),
            None => self.functions.get(&name).map(|(sig, body)| Callee::Function(sig, body)),
        }
    }

    /// Text of an expression, with [`UNKNOWN`] for parts that are not known.
    pub fn text(&self, expr: &Expr, env: &Env<'_>) -> Option<String> {
        match expr {
            Expr::Lit(lit) => match &lit.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            Expr::Reference(inner) => self.text(&inner.expr, env),
            Expr::Paren(inner) => self.text(&inner.expr, env),
            Expr::Unary(inner) => self.text(&inner.expr, env),
            Expr::MethodCall(call) if call.args.is_empty() => self.text(&call.receiver, env),
            Expr::Path(_) => {
                let name = plain_name(expr)?;
                match env.get(&name) {
                    Some(Value::Text(text)) => Some(text.clone()),
                    Some(Value::Code(code, env)) => self.text(code, env),
                    Some(_) => None,
                    None => self.text(self.constants.get(&name)?, &Env::default()),
                }
            }
            Expr::Macro(call) if call.mac.path.is_ident("format") => {
                self.format(&arguments(&call.mac.tokens)?, env)
            }
            Expr::If(choice) => {
                let (_, other) = choice.else_branch.as_ref()?;
                match self.condition(&choice.cond, env)? {
                    true => self.text(tail(&choice.then_branch)?, env),
                    false => self.text(other, env),
                }
            }
            Expr::Block(block) => self.text(tail(&block.block)?, env),
            _ => None,
        }
    }

    fn format(&self, args: &Punctuated<Expr, Token![,]>, env: &Env<'_>) -> Option<String> {
        let mut args = args.iter();
        let format = self.text(args.next()?, env)?;
        let mut text = String::new();
        let mut rest = format.as_str();
        while let Some((before, after)) = rest.split_once('{') {
            text.push_str(before);
            let (hole, after) = after.split_once('}')?;
            rest = after;
            let value = match hole {
                "" => self.text(args.next()?, env),
                name => match env.get(name) {
                    Some(Value::Text(text)) => Some(text.clone()),
                    Some(Value::Code(code, env)) => self.text(code, env),
                    _ => None,
                },
            };
            text.push_str(&value.unwrap_or(UNKNOWN.to_string()));
        }
        text.push_str(rest);
        Some(text)
    }

    fn condition(&self, expr: &Expr, env: &Env<'_>) -> Option<bool> {
        match expr {
            Expr::Path(_) => match env.get(&plain_name(expr)?)? {
                Value::Code(code, env) => self.condition(code, env),
                _ => None,
            },
            Expr::Macro(call) if call.mac.path.is_ident("matches") => {
                let (value, words) = matches_arguments(&call.mac.tokens)?;
                let value = self.text(&value, env)?;
                Some(words.contains(&value))
            }
            _ => None,
        }
    }

    /// Tuples of the array that a loop goes over.
    pub fn rows(&self, expr: &'a Expr, env: &Env<'a>) -> Option<Vec<Vec<Value<'a>>>> {
        match expr {
            Expr::Reference(inner) => self.rows(&inner.expr, env),
            Expr::Array(array) => {
                let row = |elem: &'a Expr| match elem {
                    Expr::Tuple(tuple) => {
                        Some(tuple.elems.iter().map(|e| Value::Code(e, env.clone())).collect())
                    }
                    _ => None,
                };
                array.elems.iter().map(row).collect()
            }
            Expr::Path(_) => {
                let name = plain_name(expr)?;
                match env.get(&name) {
                    Some(Value::Code(code, env)) => self.rows(code, env),
                    Some(_) => None,
                    None => self.rows(self.constants.get(&name)?, &Env::default()),
                }
            }
            Expr::MethodCall(call) => match call.method.to_string().as_str() {
                "iter" | "into_iter" => self.rows(&call.receiver, env),
                "filter" => {
                    let mut rows = self.rows(&call.receiver, env)?;
                    let Expr::Closure(closure) = call.args.first()? else { return None };
                    let Expr::Macro(test) = &*closure.body else { return None };
                    let (_, words) = matches_arguments(&test.mac.tokens)?;
                    rows.retain(|row| {
                        matches!(row.first(), Some(Value::Code(code, env))
                        if self.text(code, env).is_some_and(|text| words.contains(&text)))
                    });
                    Some(rows)
                }
                "values" => {
                    let fields = self.counters.get(&owner_of_stats(&call.receiver)?)?;
                    let row = |(name, help): &(String, String)| {
                        vec![Value::Text(name.clone()), Value::Unknown, Value::Text(help.clone())]
                    };
                    Some(fields.iter().map(row).collect())
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Keys of labels that an expression makes.
    pub fn keys(&self, expr: &Expr, env: &Env<'_>, depth: usize) -> Option<Vec<String>> {
        if depth > MAX_DEPTH {
            return None;
        }
        let keys = |expr: &Expr| self.keys(expr, env, depth);
        match expr {
            Expr::Reference(inner) => keys(&inner.expr),
            Expr::Paren(inner) => keys(&inner.expr),
            Expr::Tuple(tuple) => Some(vec![self.text(tuple.elems.first()?, env)?]),
            Expr::Array(array) => concat(array.elems.iter().map(keys)),
            Expr::Macro(call) if call.mac.path.is_ident("vec") => {
                concat(arguments(&call.mac.tokens)?.iter().map(keys))
            }
            Expr::Path(path) if path.path.is_ident("None") => Some(Vec::new()),
            Expr::Path(_) => match env.get(&plain_name(expr)?)? {
                Value::Keys(keys) => Some(keys.clone()),
                Value::Code(code, env) => self.keys(code, env, depth + 1),
                _ => None,
            },
            Expr::MethodCall(call) => match call.method.to_string().as_str() {
                "chain" => concat([keys(&call.receiver), keys(call.args.first()?)].into_iter()),
                "map" => {
                    let Expr::Closure(closure) = call.args.first()? else { return None };
                    if keys(&call.receiver).is_some_and(|keys| keys.is_empty()) {
                        return Some(Vec::new());
                    }
                    let cells = [Value::Unknown];
                    let env =
                        closure.inputs.iter().fold(env.clone(), |e, p| e.with_pattern(p, &cells));
                    self.keys(&closure.body, &env, depth + 1)
                }
                "clone" | "collect" | "concat" | "iter" | "into_iter" => keys(&call.receiver),
                _ => None,
            },
            Expr::Call(call) => self.keys_of_call(call, env, depth),
            Expr::Block(block) => {
                let env = after_lets(&block.block.stmts, env);
                self.keys(tail(&block.block)?, &env, depth + 1)
            }
            _ => None,
        }
    }

    fn keys_of_call(
        &self,
        call: &syn::ExprCall,
        env: &Env<'_>,
        depth: usize,
    ) -> Option<Vec<String>> {
        if let Expr::Path(path) = &*call.func
            && plain_name(&call.func).is_none_or(|name| name == "Some")
        {
            return match path.path.segments.last()?.ident.to_string().as_str() {
                "new" => Some(Vec::new()),
                "once" | "Some" => match call.args.first()? {
                    // Only whether there is one counts.
                    Expr::Lit(_) => Some(vec![String::new()]),
                    inner => self.keys(inner, env, depth + 1),
                },
                _ => None,
            };
        }
        let name = plain_name(&call.func)?;
        let (closure, of_closure) = closure(env.get(&name)?)?;
        let env =
            closure.inputs.iter().zip(&call.args).fold(of_closure, |e, (p, arg)| {
                e.with_pattern(p, &[Value::Code(arg, env.clone())])
            });
        self.keys(&closure.body, &env, depth + 1)
    }
}

/// Closure that a value is, or refers to.
fn closure<'a>(value: &Value<'a>) -> Option<(&'a syn::ExprClosure, Env<'a>)> {
    let Value::Code(code, env) = value else { return None };
    match code {
        Expr::Closure(closure) => Some((closure, env.clone())),
        Expr::Reference(inner) => closure(&Value::Code(&inner.expr, env.clone())),
        _ => closure(env.get(&plain_name(code)?)?),
    }
}

fn concat(parts: impl Iterator<Item = Option<Vec<String>>>) -> Option<Vec<String>> {
    parts.collect::<Option<Vec<_>>>().map(|parts| parts.concat())
}

fn after_lets<'a>(stmts: &'a [Stmt], env: &Env<'a>) -> Env<'a> {
    stmts.iter().fold(env.clone(), |env, stmt| match stmt {
        Stmt::Local(local) => {
            let value = match &local.init {
                Some(init) => Value::Code(&init.expr, env.clone()),
                None => Value::Unknown,
            };
            env.with_pattern(&local.pat, &[value])
        }
        _ => env,
    })
}

fn tail(block: &Block) -> Option<&Expr> {
    match block.stmts.last()? {
        Stmt::Expr(expr, None) => Some(expr),
        _ => None,
    }
}

/// Name that an expression is, if it is one.
pub fn plain_name(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Path(path) => path.path.get_ident().map(ToString::to_string),
        _ => None,
    }
}

/// Name of what has the counters: `switch` of `entry.switch.stats()`.
fn owner_of_stats(expr: &Expr) -> Option<String> {
    let Expr::MethodCall(call) = expr else { return None };
    match &*call.receiver {
        Expr::Field(field) => match &field.member {
            Member::Named(name) => Some(name.to_string()),
            Member::Unnamed(_) => None,
        },
        other => plain_name(other),
    }
}

/// Arguments of a macro that takes expressions.
fn arguments(tokens: &TokenStream) -> Option<Punctuated<Expr, Token![,]>> {
    Punctuated::parse_terminated.parse2(tokens.clone()).ok()
}

/// Value and words of `matches!(value, "a" | "b")`.
fn matches_arguments(tokens: &TokenStream) -> Option<(Expr, Vec<String>)> {
    let is_comma = |t: &TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ',');
    let mut tokens = tokens.clone().into_iter();
    let value: TokenStream = tokens.by_ref().take_while(|t| !is_comma(t)).collect();
    Some((syn::parse2(value).ok()?, literals(&tokens.collect())))
}

/// String literals among tokens.
pub fn literals(tokens: &TokenStream) -> Vec<String> {
    let mut found = Vec::new();
    for token in tokens.clone() {
        match token {
            TokenTree::Group(group) => found.extend(literals(&group.stream())),
            TokenTree::Literal(_) => {
                if let Ok(text) = syn::parse2::<syn::LitStr>(token.into()) {
                    found.push(text.value());
                }
            }
            _ => {}
        }
    }
    found
}
