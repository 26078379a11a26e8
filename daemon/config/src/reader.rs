//! Reader of one table: takes settings one by one and remembers their keys, so that all others can
//! be reported as unknown. Every problem is noted and a default taken: one run finds all.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::node::{Entry, Node, Value};
use crate::problem::{Place, Problem, Problems};
use crate::value::{MAX_SOCKET_PATH_LEN_BYTES, check_name, nearest, parse_size};

/// Longest string taken as a setting: a path may be 4,096 bytes, nothing else comes near.
const MAX_STRING_LEN_BYTES: usize = 4096;

/// Longest list taken as a setting.
pub(crate) const MAX_LIST_LEN: usize = 1024;

/// Problems found so far and the place of each setting met.
#[derive(Debug, Default)]
pub(crate) struct Context {
    pub(crate) problems: Problems,
    pub(crate) places: HashMap<String, Place>,
    /// Names of tables in the answer to a request, whose sender does not know their numbers; empty
    /// for files.
    pub(crate) names: HashMap<String, String>,
    /// The table that the request adds, and what its sender calls it.
    pub(crate) own: Option<(String, &'static str)>,
}

impl Context {
    /// Notes a problem of the setting `field`, at its place or that of the table around it.
    pub(crate) fn note(&mut self, field: &str, what: String, fix: String, limit: Option<String>) {
        let mut at = field;
        let location = loop {
            if let Some(place) = self.places.get(at) {
                break Some(place.location());
            }
            match at.rfind(['.', '[']) {
                Some(cut) => at = &at[..cut],
                None => break None,
            }
        };
        let field = self.shown(field);
        self.problems.push(Problem { field, what, fix, limit, location });
    }

    /// Notes that two settings contradict each other: at the second of them, or at that of the
    /// request. `what` ends in front of the name of the other.
    pub(crate) fn conflict(&mut self, what: &str, first: &str, second: &str, fix: &str) {
        let is_own = |field| self.of_request(field).is_some();
        let (other, at) =
            if is_own(first) && !is_own(second) { (second, first) } else { (first, second) };
        let what = format!("{what} {}", self.shown(other));
        self.note(at, what, fix.into(), None);
    }

    /// Name of a setting in the request, as its sender wrote it; none: it is not the request's.
    fn of_request(&self, field: &str) -> Option<String> {
        let (prefix, kind) = self.own.as_ref()?;
        let rest = field.strip_prefix(prefix.as_str())?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{kind}{rest}"))
    }

    /// Name of a setting for the author of the file or request.
    fn shown(&self, field: &str) -> String {
        if let Some(own) = self.of_request(field) {
            return own;
        }
        let tables = field.match_indices('.').map(|(at, _)| at).rev();
        for table in std::iter::once(field.len()).chain(tables) {
            if let Some(name) = self.names.get(&field[..table]) {
                return match field[table..].strip_prefix('.') {
                    Some(key) => format!("{key} of {name}"),
                    None => name.clone(),
                };
            }
        }
        field.into()
    }
}

/// One table being read.
pub(crate) struct Reader<'c, 'n> {
    pub(crate) ctx: &'c mut Context,
    pub(crate) path: String,
    entries: &'n [Entry],
    known: Vec<&'static str>,
}

impl<'c, 'n> Reader<'c, 'n> {
    /// Reads `node`, which should be a table, under the name `path`.
    pub(crate) fn new(ctx: &'c mut Context, path: String, node: &'n Node) -> Self {
        if let Some(place) = &node.place {
            ctx.places.insert(path.clone(), place.clone());
        }
        let entries = match &node.value {
            Value::Table(entries) => entries.as_slice(),
            other => {
                let what = format!("is {}, not a table", other.kind());
                ctx.note(&path, what, "write it as a table".into(), None);
                &[]
            }
        };
        Self { ctx, path, entries, known: Vec::new() }
    }

    fn field(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    /// Notes a problem of `key`.
    pub(crate) fn bad(&mut self, key: &str, what: impl Into<String>, fix: impl Into<String>) {
        let field = self.field(key);
        self.ctx.note(&field, what.into(), fix.into(), None);
    }

    /// The value of `key`, which is known from now on.
    pub(crate) fn get(&mut self, key: &'static str) -> Option<&'n Node> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        let entries: &'n [Entry] = self.entries;
        let node = &entries.iter().find(|e| e.key == key)?.node;
        if let Some(place) = &node.place {
            let field = self.field(key);
            self.ctx.places.insert(field, place.clone());
        }
        Some(node)
    }

    fn wrong_kind(&mut self, key: &str, value: &Value, wanted: &str) {
        self.bad(key, format!("is {}", value.kind()), format!("write {wanted}"));
    }

    /// Reads a string.
    pub(crate) fn string(&mut self, key: &'static str) -> Option<&'n str> {
        match &self.get(key)?.value {
            Value::Str(s) if s.len() > MAX_STRING_LEN_BYTES => {
                let what = format!("has {} bytes", s.len());
                self.limit(key, what, MAX_STRING_LEN_BYTES);
                None
            }
            Value::Str(s) if s.contains('\0') => {
                self.bad(key, "has a zero byte", "leave it out");
                None
            }
            Value::Str(s) => Some(s),
            other => {
                self.wrong_kind(key, other, "a string in quotes");
                None
            }
        }
    }

    /// Notes that the value of `key` is beyond `limit`.
    pub(crate) fn limit(&mut self, key: &str, what: String, limit: impl ToString) {
        let field = self.field(key);
        let limit = limit.to_string();
        self.ctx.note(&field, what, format!("the limit is {limit}"), Some(limit));
    }

    /// Reads a string that must be there.
    pub(crate) fn required(&mut self, key: &'static str, example: &str) -> Option<&'n str> {
        let here = self.entries.iter().any(|e| e.key == key);
        let value = self.string(key);
        if !here {
            self.bad(key, "is missing", format!("add `{key} = {example}`"));
        }
        value
    }

    /// Reads a name that must be there.
    pub(crate) fn name(&mut self) -> String {
        let Some(name) = self.required("name", "\"...\"") else {
            return String::new();
        };
        self.checked_name("name", name)
    }

    /// Checks the value of `key` as a name.
    pub(crate) fn checked_name(&mut self, key: &str, name: &str) -> String {
        if let Err(what) = check_name(name) {
            let fix = "use letters, digits, `.`, `_` and `-`, at most 64, a letter or digit first";
            self.bad(key, what, fix);
        }
        name.into()
    }

    /// Reads a boolean.
    pub(crate) fn bool(&mut self, key: &'static str, default: bool) -> bool {
        match self.get(key).map(|n| &n.value) {
            None => default,
            Some(Value::Bool(b)) => *b,
            Some(other) => {
                self.wrong_kind(key, other, "true or false");
                default
            }
        }
    }

    /// Reads a boolean; none where the daemon is to choose.
    pub(crate) fn bool_or_auto(&mut self, key: &'static str) -> Option<bool> {
        match self.get(key).map(|n| &n.value)? {
            Value::Bool(b) => Some(*b),
            Value::Str(s) if s == "auto" => None,
            other => {
                self.bad(key, format!("is {}", other.kind()), "write \"auto\", true or false");
                None
            }
        }
    }

    /// Reads an integer inside `range`.
    pub(crate) fn int(
        &mut self,
        key: &'static str,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> u64 {
        match self.get(key) {
            None => default,
            Some(node) => self.int_of(key, node, range).unwrap_or(default),
        }
    }

    /// Takes the integer of `node`, the value of `key`.
    pub(crate) fn int_of(
        &mut self,
        key: &str,
        node: &Node,
        range: RangeInclusive<u64>,
    ) -> Option<u64> {
        let Value::Int(n) = node.value else {
            self.wrong_kind(key, &node.value, "an integer");
            return None;
        };
        let value = u64::try_from(n).ok().filter(|n| range.contains(n));
        if value.is_none() {
            let limit = format!("{} to {}", range.start(), range.end());
            self.limit(key, format!("is {n}"), limit);
        }
        value
    }

    /// Reads a size in bytes: an integer, or a string with a unit.
    pub(crate) fn size(&mut self, key: &'static str) -> Option<u64> {
        let node = self.get(key)?;
        match &node.value {
            Value::Int(_) => self.int_of(key, node, 0..=u64::MAX),
            Value::Str(s) => {
                let size = parse_size(s);
                if size.is_none() {
                    let fix = "write a number with B, KiB, MiB, GiB or TiB: \"64MiB\"";
                    self.bad(key, format!("{s:?} is no size"), fix);
                }
                size
            }
            other => {
                self.wrong_kind(key, other, "a size: \"64MiB\"");
                None
            }
        }
    }

    /// Reads one of these words; the first is the default.
    pub(crate) fn choice<T: Copy>(&mut self, key: &'static str, words: &[(&str, T)]) -> T {
        let default = words[0].1;
        let Some(chosen) = self.string(key) else {
            return default;
        };
        if let Some((_, value)) = words.iter().find(|(word, _)| *word == chosen) {
            return *value;
        }
        let all: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
        self.bad(key, format!("{chosen:?} is unknown"), format!("write {}", all.join(" or ")));
        default
    }

    /// Reads an absolute path.
    pub(crate) fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        let path = PathBuf::from(self.string(key)?);
        self.absolute(key, &path).then_some(path)
    }

    /// Whether `path`, the value of `key`, is absolute; notes it when not.
    pub(crate) fn absolute(&mut self, key: &str, path: &std::path::Path) -> bool {
        if !path.is_absolute() {
            let what = format!("{:?} is not an absolute path", path.display().to_string());
            self.bad(key, what, "begin it with `/`: the daemon has no working directory");
        }
        path.is_absolute()
    }

    /// Checks that a socket path fits into `sun_path`, with `spare` bytes left.
    pub(crate) fn socket_fits(&mut self, key: &str, path: &std::path::Path, spare: usize) {
        let len = path.as_os_str().len();
        let limit = MAX_SOCKET_PATH_LEN_BYTES - spare;
        if len > limit {
            let field = self.field(key);
            let what = format!("{} has {len} bytes", path.display());
            let fix = format!("a Unix socket's path has at most {limit} here: shorten it");
            self.ctx.note(&field, what, fix, Some(limit.to_string()));
        }
    }

    /// Reads a list, each item with the name of its field.
    pub(crate) fn list(&mut self, key: &'static str) -> Vec<(String, &'n Node)> {
        let Some(node) = self.get(key) else {
            return Vec::new();
        };
        let Value::Array(items) = &node.value else {
            let wanted = match node.value {
                Value::Table(_) => "it in double brackets, [[...]], once for each entry",
                _ => "a list",
            };
            self.wrong_kind(key, &node.value, wanted);
            return Vec::new();
        };
        if items.len() > MAX_LIST_LEN {
            self.limit(key, format!("has {} entries", items.len()), MAX_LIST_LEN);
        }
        let field = self.field(key);
        let named = |(i, item)| (format!("{field}[{i}]"), item);
        items.iter().take(MAX_LIST_LEN).enumerate().map(named).collect()
    }

    /// Notes keys that were not read: they are no settings.
    pub(crate) fn finish(self) {
        for entry in self.entries {
            if self.known.iter().any(|k| *k == entry.key) {
                continue;
            }
            let fix = match nearest(&entry.key, &self.known) {
                Some(word) => format!("did you mean `{word}`?"),
                None => format!("take it out; known are {}", self.known.join(", ")),
            };
            let key: String = entry.key.chars().take(64).collect();
            let field = self.field(&key);
            let location = entry.key_place.as_ref().map(Place::location);
            let what = "is not a setting".into();
            self.ctx.problems.push(Problem { field, what, fix, limit: None, location });
        }
    }
}
