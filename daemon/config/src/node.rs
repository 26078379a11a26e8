//! Nodes: TOML and JSON in one shape, so that a port is written the same way in a file and in a
//! request.

use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::problem::{Place, Problem, Problems, Source};

/// A value and its place in the source.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) place: Option<Place>,
    pub(crate) value: Value,
}

/// Value of a setting, of TOML or JSON.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    Str(String),
    /// Wide enough for every integer of TOML and JSON; wider ones become [`Value::Other`].
    Int(i128),
    Bool(bool),
    Array(Vec<Node>),
    Table(Vec<Entry>),
    /// A kind no setting has (float, date, null), by name.
    Other(&'static str),
}

/// One key of a table.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_place: Option<Place>,
    pub(crate) node: Node,
}

impl Value {
    /// The kind's name for error texts.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Str(_) => "a string",
            Self::Int(_) => "an integer",
            Self::Bool(_) => "a boolean",
            Self::Array(_) => "an array",
            Self::Table(_) => "a table",
            Self::Other(kind) => kind,
        }
    }
}

/// Parses one TOML text. Syntax errors go to `problems`; the part that could be read is returned
/// all the same, so that its other errors are found in the same run.
pub(crate) fn from_toml(source: &Arc<Source>, problems: &mut Problems) -> Node {
    let (table, errors) = DeTable::parse_recoverable(&source.text);
    for error in errors {
        let offset = error.span().map_or(0, |s| s.start);
        problems.push(Problem {
            field: String::new(),
            what: format!("not TOML: {}", error.message()),
            fix: "mend the syntax (https://toml.io)".into(),
            limit: None,
            location: Some(Place { source: Arc::clone(source), offset }.location()),
        });
    }
    let place = Some(Place { source: Arc::clone(source), offset: table.span().start });
    Node { place, value: toml_table(source, table.get_ref()) }
}

fn toml_table(source: &Arc<Source>, table: &DeTable<'_>) -> Value {
    let mut entries: Vec<Entry> = table
        .iter()
        .map(|(key, value)| Entry {
            key: key.get_ref().to_string(),
            key_place: Some(Place { source: Arc::clone(source), offset: key.span().start }),
            node: toml_value(source, value),
        })
        .collect();
    // The parser sorts by name; problems are told in the order of the file.
    entries.sort_by_key(|e| e.key_place.as_ref().map_or(0, |p| p.offset));
    Value::Table(entries)
}

fn toml_value(source: &Arc<Source>, value: &Spanned<DeValue<'_>>) -> Node {
    let place = Some(Place { source: Arc::clone(source), offset: value.span().start });
    let value = match value.get_ref() {
        DeValue::String(s) => Value::Str(s.to_string()),
        DeValue::Integer(n) => match i128::from_str_radix(n.as_str(), n.radix()) {
            Ok(n) => Value::Int(n),
            Err(_) => Value::Other("an integer out of any range"),
        },
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Float(_) => Value::Other("a float"),
        DeValue::Datetime(_) => Value::Other("a date"),
        DeValue::Array(items) => {
            Value::Array(items.iter().map(|i| toml_value(source, i)).collect())
        }
        DeValue::Table(table) => toml_table(source, table),
    };
    Node { place, value }
}

/// Converts JSON, which has no places.
pub(crate) fn from_json(json: &serde_json::Value) -> Node {
    use serde_json::Value as Json;
    let value = match json {
        Json::String(s) => Value::Str(s.clone()),
        Json::Bool(b) => Value::Bool(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => Value::Int(n.into()),
            (_, Some(n)) => Value::Int(n.into()),
            _ => Value::Other("a float"),
        },
        Json::Null => Value::Other("null"),
        Json::Array(items) => Value::Array(items.iter().map(from_json).collect()),
        Json::Object(map) => Value::Table(
            map.iter()
                .map(|(key, v)| Entry { key: key.clone(), key_place: None, node: from_json(v) })
                .collect(),
        ),
    };
    Node { place: None, value }
}

/// Merges a drop-in into the config read so far: lists of tables grow, tables merge key by key,
/// anything else is overridden.
pub(crate) fn merge(base: &mut Node, over: Node) {
    match (&mut base.value, over.value) {
        (Value::Table(entries), Value::Table(more)) => {
            for entry in more {
                match entries.iter_mut().find(|e| e.key == entry.key) {
                    Some(old) if mergeable(&old.node, &entry.node) => {
                        merge(&mut old.node, entry.node);
                    }
                    Some(old) => *old = entry,
                    None => entries.push(entry),
                }
            }
        }
        (Value::Array(items), Value::Array(more)) => items.extend(more),
        (_, value) => *base = Node { place: over.place, value },
    }
}

/// Whether two values merge: tables do, and `[[..]]` lists grow; a plain list such as `cpus` is
/// overridden as a scalar is.
fn mergeable(old: &Node, new: &Node) -> bool {
    let of_tables = |items: &[Node]| items.iter().any(|i| matches!(i.value, Value::Table(_)));
    match (&old.value, &new.value) {
        (Value::Table(_), Value::Table(_)) => true,
        (Value::Array(a), Value::Array(b)) => of_tables(a) && of_tables(b),
        _ => false,
    }
}
