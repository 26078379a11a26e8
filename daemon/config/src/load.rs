//! Config files: found, read, merged, checked.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::check::check;
use crate::decode;
use crate::model::Config;
use crate::node::{Node, Value, from_toml, merge};
use crate::problem::{Problem, Problems, Source};
use crate::reader::Context;

/// Default path of the config file.
pub const DEFAULT_CONFIG: &str = "/etc/millrace/millrace.toml";

/// Largest config file: 1,024 ports with every setting written out take half of it.
pub const MAX_FILE_LEN_BYTES: u64 = 1 << 20;

/// Most drop-in files: one per port, when a tool writes them.
pub const MAX_DROP_INS: usize = 1024;

/// Permission bit of users that are neither the owner nor in the group.
const ANYBODY_WRITES: u32 = 0o002;

/// Permission bit of folders in which only a file's owner may replace it.
const STICKY: u32 = 0o1000;

/// Reads `path` and the drop-ins beside it (for `millrace.toml`: `millrace.d/*.toml`, in the order
/// of their names), and checks everything. The error holds every problem of all files. Files that
/// every user of the host may change are refused: the config decides what root's daemon opens and
/// runs.
pub fn load(path: &Path) -> Result<Config, Problems> {
    let mut problems = Problems::default();
    let mut sources = Vec::new();
    if let Some(folder) = path.parent().filter(|folder| anybody_replaces_in(folder)) {
        let what = format!("anybody may replace files in {}", folder.display());
        problems.push(for_anybody(folder, what));
    }
    match read(path) {
        Ok(source) => sources.push(source),
        Err(problem) => problems.push(*problem),
    }
    for file in drop_ins(path, &mut problems) {
        match read(&file) {
            Ok(source) => sources.push(source),
            Err(problem) => problems.push(*problem),
        }
    }
    from_sources(sources, problems)
}

/// Reads and checks one text, named `file` in problems.
pub fn parse(file: &Path, text: &str) -> Result<Config, Problems> {
    let source = Source { file: file.into(), text: text.into() };
    from_sources(vec![Arc::new(source)], Problems::default())
}

fn from_sources(sources: Vec<Arc<Source>>, problems: Problems) -> Result<Config, Problems> {
    let mut ctx = Context { problems, ..Context::default() };
    let mut root = Node { place: None, value: Value::Table(Vec::new()) };
    for source in &sources {
        let node = from_toml(source, &mut ctx.problems);
        merge(&mut root, node);
    }
    let config = decode::config(&mut ctx, &root);
    check(&mut ctx, &config);
    if ctx.problems.is_empty() { Ok(config) } else { Err(in_file_order(ctx.problems, &sources)) }
}

/// Sorts problems, which are found by kind: a person mends files from top to bottom.
fn in_file_order(mut all: Problems, sources: &[Arc<Source>]) -> Problems {
    all.problems.sort_by_key(|p| {
        p.location
            .as_ref()
            .map(|at| (sources.iter().position(|s| s.file == at.file), at.line, at.column))
    });
    all
}

fn drop_ins(path: &Path, problems: &mut Problems) -> Vec<PathBuf> {
    let folder = path.with_extension("d");
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(e) => {
            problems.push(unreadable(&folder, &e.to_string()));
            return Vec::new();
        }
    };
    if mode(&folder) & ANYBODY_WRITES != 0 {
        let what = format!("anybody may add drop-ins to {}", folder.display());
        problems.push(for_anybody(&folder, what));
    }
    let mut files = Vec::new();
    for entry in entries {
        match entry {
            Ok(entry) => files.push(entry.path()),
            Err(e) => problems.push(unreadable(&folder, &e.to_string())),
        }
    }
    files.retain(|f| f.extension().is_some_and(|e| e == "toml"));
    files.sort();
    if files.len() > MAX_DROP_INS {
        let mut problem = unreadable(&folder, &format!("it has {} drop-ins", files.len()));
        problem.fix = format!("the limit is {MAX_DROP_INS}");
        problem.limit = Some(MAX_DROP_INS.to_string());
        problems.push(problem);
        files.truncate(MAX_DROP_INS);
    }
    files
}

fn read(path: &Path) -> Result<Arc<Source>, Box<Problem>> {
    let file = fs::File::open(path).map_err(|e| {
        let mut problem = unreadable(path, &e.to_string());
        if e.kind() == std::io::ErrorKind::NotFound {
            problem.fix = "make it (millrace.toml.example shows every setting), or name another \
                           with --config"
                .into();
        }
        Box::new(problem)
    })?;
    let meta = file.metadata().map_err(|e| Box::new(unreadable(path, &e.to_string())))?;
    if meta.is_file() && meta.mode() & ANYBODY_WRITES != 0 {
        let what = format!("anybody may write {}", path.display());
        return Err(Box::new(for_anybody(path, what)));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_LEN_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Box::new(unreadable(path, &e.to_string())))?;
    if bytes.len() as u64 > MAX_FILE_LEN_BYTES {
        let mut problem =
            unreadable(path, &format!("it is larger than {MAX_FILE_LEN_BYTES} bytes"));
        problem.fix = "split it into drop-ins".into();
        problem.limit = Some(MAX_FILE_LEN_BYTES.to_string());
        return Err(Box::new(problem));
    }
    let text = String::from_utf8(bytes).map_err(|e| {
        let mut problem = unreadable(path, &format!("it is not UTF-8: {}", e.utf8_error()));
        problem.fix = "save it as UTF-8".into();
        Box::new(problem)
    })?;
    Ok(Arc::new(Source { file: path.into(), text }))
}

/// Permission bits of a folder; 0 where its metadata cannot be read.
fn mode(folder: &Path) -> u32 {
    folder.metadata().map_or(0, |meta| meta.mode())
}

fn anybody_replaces_in(folder: &Path) -> bool {
    mode(folder) & (ANYBODY_WRITES | STICKY) == ANYBODY_WRITES
}

fn for_anybody(path: &Path, what: String) -> Problem {
    Problem { fix: format!("run `chmod o-w {}`", path.display()), ..unread(what) }
}

fn unreadable(path: &Path, why: &str) -> Problem {
    unread(format!("cannot read {}: {why}", path.display()))
}

/// Problem of a whole file or folder.
fn unread(what: String) -> Problem {
    Problem {
        field: String::new(),
        what,
        fix: "make it readable for this user".into(),
        limit: None,
        location: None,
    }
}
