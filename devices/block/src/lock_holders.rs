//! Processes that have an image locked, for error texts.

use std::path::{Path, PathBuf};

/// Most processes that an error names.
const MAX_NAMED: usize = 4;

/// Describes the processes that have locks on a file: ` (process 7, qemu-system-x86)`; empty
/// where /proc does not tell. Locks of openings say nothing about processes (`fcntl` gives -1), so
/// each descriptor on the host is looked at: not for a loop.
pub(crate) fn describe(path: &Path) -> String {
    let Ok(stat) = rustix::fs::stat(path) else { return String::new() };
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let id = format!(" {major:02x}:{minor:02x}:{} ", stat.st_ino);
    let mut named = Vec::new();
    for process in entries(Path::new("/proc")) {
        let Some(pid) = process.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok())
        else {
            continue;
        };
        let has_lock = |info: &PathBuf| {
            let text = std::fs::read_to_string(info).unwrap_or_default();
            text.lines().any(|line| line.starts_with("lock:") && line.contains(&id))
        };
        if named.len() < MAX_NAMED && entries(&process.join("fdinfo")).any(|info| has_lock(&info)) {
            let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
            let own = if pid == std::process::id() { "this daemon, " } else { "" };
            named.push(format!("{own}process {pid}, {}", name.trim_end()));
        }
    }
    if named.is_empty() { String::new() } else { format!(" ({})", named.join("; ")) }
}

fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path()))
}
