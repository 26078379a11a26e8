//! Machine and commit that a run belongs to.

use std::path::Path;
use std::process::Command;

use crate::harness::results::Machine;

/// Describes this machine, for a run without guests. What cannot be read is called "unknown": a run
/// is not worth losing for it.
pub fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    Machine {
        cpu: cpu_model(&read("/proc/cpuinfo")),
        cores: base::cpu::allowed_cpus().map_or(1, |c| c.len() as u32),
        kernel: or_unknown(read("/proc/sys/kernel/osrelease").trim()),
        guests: None,
    }
}

fn cpu_model(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find(|l| l.starts_with("model name"));
    or_unknown(line.and_then(|l| l.split_once(':')).map_or("", |(_, name)| name.trim()))
}

fn or_unknown(text: &str) -> String {
    if text.is_empty() { "unknown".into() } else { text.into() }
}

/// The commit of the checkout at `folder`, with `-dirty` when tracked files have changes.
pub fn commit(folder: &Path) -> String {
    let git = |args: &[&str]| {
        let out = Command::new("git").arg("-C").arg(folder).args(args).output().ok()?;
        out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_string())
    };
    let Some(hash) = git(&["rev-parse", "--short=12", "HEAD"]) else { return or_unknown("") };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
    if changed.is_none_or(|c| c.is_empty()) { hash } else { format!("{hash}-dirty") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_cpu_model() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags: x\n";
        assert_eq!(cpu_model(text), "Some CPU @ 2 GHz");
        assert_eq!(cpu_model("processor: 0\n"), "unknown");
    }

    #[test]
    fn this_machine_has_cores_and_a_kernel() {
        let m = machine();
        assert!(m.cores >= 1);
        assert_ne!(m.kernel, "unknown");
    }

    #[test]
    fn a_folder_without_a_repository_has_no_commit() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(commit(dir.path()), "unknown");
    }
}
