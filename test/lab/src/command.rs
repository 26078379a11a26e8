//! Commands in a guest.

use std::time::{Duration, Instant};

use lab_agent::proto::Reply;

use crate::LabError;
use crate::agent::{Call, Failure, MAX_OUTPUT_BYTES, unexpected};
use crate::machine::Machine;

/// Host time beyond the guest's own time-out before a command counts as lost.
const GRACE: Duration = Duration::from_secs(20);

/// Output of a finished command, and its exit status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The guest's name, for error texts.
    pub guest: String,
    /// The script.
    pub script: String,
    /// Exit code, or 128 + the signal's number.
    pub code: i32,
    /// The agent killed it because its time was over.
    pub timed_out: bool,
    /// Standard output; at most [`MAX_OUTPUT_BYTES`] together with the next.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard output without its last newline when the command succeeded.
    ///
    /// # Errors
    /// [`LabError::GuestCommand`] with all output when it did not.
    pub fn ok(self) -> Result<String, LabError> {
        if self.code == 0 {
            return Ok(self.text().trim_end_matches('\n').to_owned());
        }
        Err(LabError::GuestCommand {
            stdout: self.text(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            name: self.guest,
            script: self.script,
            code: self.code,
            killed: if self.timed_out { " after its time-out" } else { "" },
        })
    }

    /// The last line of standard output as JSON: what the agent's tools print.
    ///
    /// # Errors
    /// The command failed, or the line is no JSON.
    pub fn json(self) -> Result<serde_json::Value, LabError> {
        let (guest, script) = (self.guest.clone(), self.script.clone());
        let text = self.ok()?;
        let line = text.lines().next_back().unwrap_or("");
        serde_json::from_str(line).map_err(|error| {
            LabError::Refused(format!("guest {guest}: {script:?} printed no JSON: {error}: {line}"))
        })
    }
}

/// A command that runs in a guest. Dropping it leaves the command running.
#[derive(Debug)]
pub struct Running<'a> {
    machine: &'a Machine,
    call: Call,
    script: String,
    pid: u32,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl<'a> Running<'a> {
    pub(crate) fn new(machine: &'a Machine, call: Call, script: &str) -> Result<Self, LabError> {
        let (stdout, stderr) = Default::default();
        let mut running = Self { machine, call, script: script.into(), pid: 0, stdout, stderr };
        match running.next(Instant::now() + GRACE) {
            Ok(Reply::Started { pid }) => running.pid = pid,
            Ok(other) => return Err(running.fail(unexpected(&other), GRACE)),
            Err(failure) => return Err(running.fail(failure, GRACE)),
        }
        Ok(running)
    }

    /// The process (and group) id in the guest.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the command has printed a whole line to standard output that contains a text,
    /// such as a server's "listening", and returns that line.
    ///
    /// # Errors
    /// It ended or stayed silent; the guest died.
    pub fn wait_line(&mut self, part: &str, time: Duration) -> Result<String, LabError> {
        let until = Instant::now() + time;
        loop {
            let text = String::from_utf8_lossy(&self.stdout);
            let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
            if let Some(line) = whole.lines().find(|line| line.contains(part)) {
                return Ok(line.to_owned());
            }
            match self.next(until) {
                Ok(Reply::Exit { code, timed_out }) => {
                    let output = self.take_output(code, timed_out);
                    let said =
                        format!("{}{}", output.text(), String::from_utf8_lossy(&output.stderr));
                    return Err(LabError::Refused(format!(
                        "guest {}: {:?} ended with {code} before it printed {part:?}: {said}",
                        self.machine.name, self.script
                    )));
                }
                Ok(reply) => self.keep(reply).map_err(|failure| self.fail(failure, time))?,
                Err(failure) => return Err(self.fail(failure, time)),
            }
        }
    }

    /// Waits for the command's end.
    ///
    /// # Errors
    /// It does not end within the time (and a grace of 20 s for the agent's own time-out); the
    /// guest died.
    pub fn wait(mut self, time: Duration) -> Result<Output, LabError> {
        let until = Instant::now() + time + GRACE;
        loop {
            match self.next(until) {
                Ok(Reply::Exit { code, timed_out }) => return Ok(self.take_output(code, timed_out)),
                Ok(reply) => self.keep(reply).map_err(|failure| self.fail(failure, time))?,
                Err(failure) => return Err(self.fail(failure, time)),
            }
        }
    }

    /// Sends a signal to the command's process group.
    ///
    /// # Errors
    /// It has ended; the guest died.
    pub fn signal(&self, signal: i32) -> Result<(), LabError> {
        self.machine.signal(self.call.id(), signal)
    }

    /// Kills the command and waits for its end.
    ///
    /// # Errors
    /// It has ended already; the guest died.
    pub fn kill(self) -> Result<Output, LabError> {
        self.signal(9)?;
        self.wait(GRACE)
    }

    fn next(&self, until: Instant) -> Result<Reply, Failure> {
        self.call.next(until)
    }

    fn keep(&mut self, reply: Reply) -> Result<(), Failure> {
        let room = MAX_OUTPUT_BYTES.saturating_sub(self.stdout.len() + self.stderr.len());
        let (into, bytes) = match reply {
            Reply::Stdout(bytes) => (&mut self.stdout, bytes),
            Reply::Stderr(bytes) => (&mut self.stderr, bytes),
            other => return Err(unexpected(&other)),
        };
        into.extend_from_slice(&bytes[..bytes.len().min(room)]);
        Ok(())
    }

    fn take_output(&mut self, code: i32, timed_out: bool) -> Output {
        Output {
            guest: self.machine.name.clone(),
            script: self.script.clone(),
            code,
            timed_out,
            stdout: std::mem::take(&mut self.stdout),
            stderr: std::mem::take(&mut self.stderr),
        }
    }

    fn fail(&self, failure: Failure, time: Duration) -> LabError {
        self.machine.explain(failure, &format!("command {:?}", self.script), time)
    }
}
