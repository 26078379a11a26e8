//! Whether VMs' memory is put into huge pages.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use anyhow::Context;
use queue::block_mover::{self, BlockMover};

/// The daemon's own program.
const PROGRAM: &str = "/proc/self/exe";

/// Mount point of control groups (cgroups(7), version 2).
const GROUPS: &str = "/sys/fs/cgroup";

/// Has VMs' memory put into huge pages from now on, unless that is not wanted, or nobody says so
/// and the daemon's memory is limited: huge pages are charged to its control group, and its limit
/// was made without them. Unit tests, whose program is another one, do without.
pub fn start(wanted: Option<bool>) {
    if wanted == Some(false) || cfg!(test) {
        return;
    }
    if let Some(limit) = memory_limit().filter(|_| wanted.is_none()) {
        tracing::info!(
            "VMs' memory is left in small pages, because the daemon's memory is limited by {}: \
             huge_pages = true has it put into huge ones",
            limit.display()
        );
        return;
    }
    if let Err(e) = start_mover() {
        tracing::warn!("VMs' memory is left in small pages: {e:#}");
    }
}

/// Starts the process that moves memory, and the thread that tells it what.
fn start_mover() -> anyhow::Result<()> {
    queue::huge_pages::start(BlockMover::new(Box::new(start_process))).context("a thread for it")
}

/// Starts a process that moves memory; the socket to it.
fn start_process() -> io::Result<OwnedFd> {
    // Nobody else waits for its end. The thread comes first: a process that it cannot be started
    // for would be left as a zombie.
    let (tell, told) = mpsc::channel::<Child>();
    let wait = move || told.recv().map(|mut process| process.wait());
    std::thread::Builder::new().name("pages-end".into()).spawn(wait)?;
    let (ours, theirs) = block_mover::sockets()?;
    let mut command = Command::new(PROGRAM);
    command.arg("huge-pages-process").stdin(theirs).stdout(Stdio::null());
    // The thread waits until it has got it, or this end is dropped.
    let _ = tell.send(command.spawn()?);
    Ok(ours)
}

/// The file that limits the memory of this process, if there is any.
fn memory_limit() -> Option<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_of(Path::new(GROUPS), own_group(&own)?)
}

/// Path of the group in `/proc/self/cgroup`.
fn own_group(text: &str) -> Option<&Path> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new(path))
}

/// The limit of a group, or of one that it is in.
fn limit_of(groups: &Path, group: &Path) -> Option<PathBuf> {
    let files = group.ancestors().map(|group| groups.join(group).join("memory.max"));
    files.into_iter().find(|file| fs::read_to_string(file).is_ok_and(|text| text.trim() != "max"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_found_at_the_group_and_at_those_around_it() {
        let groups = tempfile::tempdir().unwrap();
        let own = own_group("1:name=x:/y\n0::/system.slice/millrace.service\n").unwrap();
        assert_eq!(own, Path::new("system.slice/millrace.service"));
        fs::create_dir_all(groups.path().join(own)).unwrap();
        let (inner, outer) = (own.join("memory.max"), Path::new("system.slice/memory.max"));
        let limit = || limit_of(groups.path(), own);
        assert_eq!(limit(), None);
        fs::write(groups.path().join(&inner), "max\n").unwrap();
        assert_eq!(limit(), None);
        fs::write(groups.path().join(outer), "8589934592\n").unwrap();
        assert_eq!(limit(), Some(groups.path().join(outer)));
        fs::write(groups.path().join(&inner), "1073741824\n").unwrap();
        assert_eq!(limit(), Some(groups.path().join(inner)));
    }
}
