//! One load on one back end, and what a back end is.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::bed::Bed;
use super::case::Case;
use super::reading::Program;
use super::window::Window;
use super::{front, ports};
use crate::harness::error::BenchError;
use crate::harness::process::{Process, launch};

/// One load on one back end.
#[derive(Clone, Copy)]
pub struct Trial<'a> {
    /// Place where it runs.
    pub bed: &'a Bed,
    /// Case of the trial.
    pub case: &'a Case,
    /// Length of the trial.
    pub window: Window,
    /// Folder for sockets and logs of this trial alone.
    pub folder: &'a Path,
}

impl Trial<'_> {
    /// Sockets of both ports.
    pub fn sockets(&self) -> (PathBuf, PathBuf) {
        ports::sockets(self.folder)
    }

    /// Load of the front end on two network ports.
    pub fn net_load(&self, a: &Path, b: &Path) -> Program {
        front::net(self.bed, self.case, self.window, a, b)
    }

    /// Load of the front end on a disk.
    pub fn disk_load(&self, socket: &Path) -> Program {
        front::disk(self.bed, self.case, self.window, socket)
    }

    /// Launches a back end that listens at the sockets of two network ports.
    pub fn launch_net(&self, name: &str, command: &mut Command) -> Result<Running, BenchError> {
        let (a, b) = self.sockets();
        let process = launch(name, command, self.folder, &[&a, &b])?;
        Ok(Running { processes: vec![process], load: self.net_load(&a, &b) })
    }

    /// Launches a back end that listens at the socket of a disk.
    pub fn launch_disk(&self, name: &str, command: &mut Command) -> Result<Running, BenchError> {
        let socket = self.sockets().0;
        let process = launch(name, command, self.folder, &[&socket])?;
        Ok(Running { processes: vec![process], load: self.disk_load(&socket) })
    }
}

/// A back end that has been started for one load, and that load.
pub struct Running {
    /// Processes of the back end; killed when dropped.
    pub processes: Vec<Process>,
    /// Program that puts the load on it.
    pub load: Program,
}

/// One implementation in one configuration.
pub trait Backend {
    /// Name of the back end in results.
    fn name(&self) -> &'static str;

    /// Whether it is measured without vhost-user, for orientation.
    fn is_reference(&self) -> bool {
        false
    }

    /// The program that it needs and this machine may not have: by default the one of its name.
    fn needs(&self) -> &'static str {
        self.name()
    }

    /// Reason why it cannot do what a case asks of it; none when it can. `Some("")` where the case
    /// is none of its business at all.
    fn refuses(&self, case: &Case) -> Option<&'static str>;

    /// Starts it for a trial and returns when it is ready for the load.
    fn start(&self, trial: &Trial<'_>) -> Result<Running, BenchError>;
}

/// Millrace's name among the back ends.
pub const OURS: &str = "millrace";

/// The answer of those that are for the network, to a disk's case and the other way round.
pub const NOT_MINE: Option<&str> = Some("");
