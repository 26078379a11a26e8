//! Runs a systemd unit's program as the unit says where there is no systemd: in guests, and on the
//! lab's host.
//!
//! Theory of operation: what a unit denies its program is part of the program, and no test of the
//! program alone sees it. Here the same kernel means are used for the same directives
//! (systemd.exec(5)): the capability bounding set, resource limits and seccomp filters; then the
//! program takes this process' place. A directive that is not known is an error, so that none is
//! left out unnoticed.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::AgentError;

mod deny;
mod unit;

use unit::Unit;

/// Becomes the program of a unit file, with what is dropped in, or another in its place; returns
/// only on failure.
///
/// # Errors
/// The unit is not understood, or the kernel refuses something.
pub fn run(files: &[&str], instead: &[&str]) -> Result<(), AgentError> {
    let read = |path: &&str| {
        let path = Path::new(path);
        fs::read_to_string(path).map_err(AgentError::file("read", path))
    };
    let texts = files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let unit = Unit::parse(texts.iter().map(String::as_str))
        .map_err(|what| AgentError::Refused(format!("{files:?}: {what}")))?;
    prepare(&unit)?;
    let own: Vec<_> = unit.command.iter().map(String::as_str).collect();
    let command = if instead.is_empty() { &own[..] } else { instead };
    let mut words = command.iter().map(OsString::from);
    let program = words.next().unwrap_or_default();
    let failed = AgentError::file("run", Path::new(&program));
    Err(failed(Command::new(&program).args(words).exec()))
}

fn prepare(unit: &Unit) -> Result<(), AgentError> {
    for folder in &unit.runtime_folders {
        let folder = Path::new("/run").join(folder);
        fs::create_dir_all(&folder).map_err(AgentError::file("make", &folder))?;
    }
    let limits = [(Resource::Nofile, unit.max_files), (Resource::Memlock, unit.max_locked_bytes)];
    for (resource, most) in limits {
        let Some(most) = most else { continue };
        // A container may have less to give.
        let most = getrlimit(resource).maximum.map_or(most, |limit| limit.min(most));
        let what = format!("set the limit of {resource:?} to {most}");
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
            .map_err(|e| AgentError::io(what)(e.into()))?;
    }
    deny::capabilities(&unit.capabilities)?;
    deny::calls(unit)
}
