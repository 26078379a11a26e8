//! Running one shell command and sending what it prints.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::AgentError;
use crate::proto::{CHUNK_BYTES, Reply};

/// A started command.
pub(crate) struct Running {
    child: Child,
    pid: Pid,
    deadline: Option<Instant>,
}

/// Starts `/bin/sh -c script` as the leader of its own process group.
pub(crate) fn start(script: &str, timeout_ms: u64) -> Result<Running, AgentError> {
    let child = Command::new("/bin/sh")
        .arg("-c")
        .arg(script)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(AgentError::io("start /bin/sh"))?;
    let deadline = (timeout_ms > 0).then(|| Instant::now() + Duration::from_millis(timeout_ms));
    let pid = Pid::from_child(&child);
    Ok(Running { child, pid, deadline })
}

/// Sends a signal to a command's whole process group.
pub(crate) fn signal_group(pid: Pid, signal: i32) -> Result<(), AgentError> {
    let signal = Signal::from_named_raw(signal)
        .ok_or_else(|| AgentError::Refused(format!("signal {signal}: no such named signal")))?;
    kill_process_group(pid, signal)
        .map_err(|error| AgentError::io(format!("signal group {pid:?}"))(error.into()))
}

impl Running {
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends output as it comes until the command itself has ended. Background children that keep
    /// the pipes open do not delay the answer: after the end only what is already there is read.
    pub(crate) fn finish(
        mut self,
        send: &mut dyn FnMut(Reply) -> Result<(), AgentError>,
    ) -> Result<Reply, AgentError> {
        let out = self.child.stdout.take();
        let err = self.child.stderr.take();
        let (Some(mut out), Some(mut err)) = (out, err) else {
            return Err(AgentError::Refused("the command has no pipes".into()));
        };
        for fd in [out.as_fd(), err.as_fd()] {
            rustix::io::ioctl_fionbio(fd, true)
                .map_err(|error| AgentError::io("set a pipe non-blocking")(error.into()))?;
        }
        let ended = pidfd_open(self.pid, PidfdFlags::empty())
            .map_err(|error| AgentError::io("pidfd_open")(error.into()))?;
        let mut timed_out = false;
        let (mut out_open, mut err_open) = (true, true);
        loop {
            let mut fds = vec![PollFd::new(&ended, PollFlags::IN)];
            if out_open {
                fds.push(PollFd::new(&out, PollFlags::IN));
            }
            if err_open {
                fds.push(PollFd::new(&err, PollFlags::IN));
            }
            let left = self.deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                timed_out = true;
                self.deadline = None;
                signal_group(self.pid, Signal::KILL.as_raw())?;
                continue;
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut fds, left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(AgentError::io("poll a command")(error.into())),
            }
            let over = !fds[0].revents().is_empty();
            out_open = out_open && drain(&mut out, |bytes| send(Reply::Stdout(bytes)))?;
            err_open = err_open && drain(&mut err, |bytes| send(Reply::Stderr(bytes)))?;
            if over {
                break;
            }
        }
        let status = self.child.wait().map_err(AgentError::io("wait for a command"))?;
        Ok(Reply::Exit { code: exit_code(status), timed_out })
    }
}

/// The shell's convention: the exit code, or 128 plus the signal.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Sends all that can be read now; false when the pipe is at its end.
fn drain(
    pipe: &mut impl Read,
    mut send: impl FnMut(Vec<u8>) -> Result<(), AgentError>,
) -> Result<bool, AgentError> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match pipe.read(&mut chunk) {
            Ok(0) => return Ok(false),
            Ok(len) => send(chunk[..len].to_vec())?,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(AgentError::io("read a command's output")(error)),
        }
    }
}
