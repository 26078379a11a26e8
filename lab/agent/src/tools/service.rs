//! Runs a systemd unit's program as the unit says, in a guest that has no systemd.
//!
//! Theory of operation: what a unit denies its program is part of the program, and no test of the program alone
//! sees it. Here the same kernel means are used for the same directives (systemd.exec(5)): the capability
//! bounding set, resource limits and seccomp filters; then the program takes this process' place. A directive
//! that is not known is an error, so that none is left out unnoticed.

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

/// Becomes the program of a unit file; returns only on failure.
///
/// # Errors
/// The unit is not understood, or the kernel refuses something.
pub fn run(path: &Path) -> Result<(), AgentError> {
    let text = fs::read_to_string(path).map_err(AgentError::file("read", path))?;
    let unit = Unit::parse(&text)
        .map_err(|what| AgentError::Refused(format!("{}: {what}", path.display())))?;
    prepare(&unit)?;
    let mut words = unit.command.iter().map(OsString::from);
    let program = words.next().unwrap_or_default();
    let failed = AgentError::file("run", Path::new(&program));
    Err(failed(Command::new(&program).args(words).exec()))
}

fn prepare(unit: &Unit) -> Result<(), AgentError> {
    for folder in &unit.runtime_folders {
        let folder = Path::new("/run").join(folder);
        fs::create_dir_all(&folder).map_err(AgentError::file("make", &folder))?;
    }
    if let Some(files) = unit.max_files {
        let limit = Rlimit { current: Some(files), maximum: Some(files) };
        let was = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, limit).map_err(|e| {
            AgentError::io(format!("set the limit of files from {was:?}"))(e.into())
        })?;
    }
    deny::capabilities(&unit.capabilities)?;
    deny::calls(unit)
}
