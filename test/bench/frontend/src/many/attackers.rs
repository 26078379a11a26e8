//! Loads that attack sessions: a process of its own for all of them, beside the one that plays the
//! others.
//!
//! It is the back end that attacks are to slow down, not the front end of the good ones: in one
//! process with it they would share its locks, and each unmapping would stop its CPU.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use crate::error::FrontendError;

use super::plan::{Behaviour, Plan};

/// Runs this program's `hostile`.
pub struct Attackers {
    process: Option<Child>,
    /// The load of each socket.
    loads: Vec<usize>,
}

impl Attackers {
    /// Begins at once.
    pub fn start(plan: &Plan) -> Result<Self, FrontendError> {
        let loads = plan.loads.iter().enumerate();
        let hostile = loads.filter(|(_, entry)| entry.behaviour == Behaviour::HostileSession);
        let (mut loads, mut sockets) = (Vec::new(), Vec::new());
        for (load, entry) in hostile {
            for socket in entry.sockets() {
                loads.push(load);
                sockets.push(socket.clone());
            }
        }
        let mut all = Self { process: None, loads };
        if !sockets.is_empty() {
            let io = FrontendError::io("starting the attackers");
            let program = std::env::current_exe().map_err(&io)?;
            let mut command = Command::new(program);
            command.arg("hostile").args(sockets).stdin(Stdio::piped()).stdout(Stdio::piped());
            all.process = Some(command.spawn().map_err(io)?);
        }
        Ok(all)
    }

    /// Ends them. Load and rounds of each.
    pub fn stop(mut self) -> Result<Vec<(usize, u64)>, FrontendError> {
        let Some(process) = &mut self.process else { return Ok(Vec::new()) };
        // Its end tells them to stop.
        drop(process.stdin.take());
        let io = FrontendError::io("waiting for the attackers");
        let mut text = String::new();
        if let Some(mut out) = process.stdout.take() {
            out.read_to_string(&mut text).map_err(&io)?;
        }
        process.wait().map_err(&io)?;
        let rounds = serde_json::from_str::<Vec<u64>>(&text).ok();
        let rounds = rounds.filter(|rounds| rounds.len() == self.loads.len());
        let rounds = rounds.ok_or_else(|| io(std::io::Error::other("they failed")))?;
        Ok(self.loads.iter().copied().zip(rounds).collect())
    }
}

impl Drop for Attackers {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            // Does nothing when it has been waited for.
            _ = process.kill();
            _ = process.wait();
        }
    }
}
