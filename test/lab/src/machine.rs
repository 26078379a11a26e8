//! QEMU's process, its sockets, and what became of it.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use base::sync::lock;
use lab_agent::proto::Request;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::{Value, json};

use crate::agent::{Agent, Failure};
use crate::console::{TAIL_LINES, fatal_line, tail};
use crate::cpus::{self, Cpu};
use crate::process::{DIE_WITH_PARENT, spawn, wait_for_exit};
use crate::qmp::Qmp;
use crate::{Lab, LabError, Qemu};

/// Time for a command, a file or a monitor command unless the caller says another.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for QEMU to start and connect its sockets.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for QEMU to end after its guest crashed, so that the error can say how.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The places of one guest's files in the run folder.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) agent: PathBuf,
    pub(crate) qmp: PathBuf,
    pub(crate) console: PathBuf,
    pub(crate) stderr: PathBuf,
}

impl Files {
    pub(crate) fn new(lab: &Lab, name: &str) -> Self {
        let path = |end: &str| lab.path(&format!("{name}.{end}"));
        Self {
            agent: path("agent"),
            qmp: path("qmp"),
            console: path("console"),
            stderr: path("stderr"),
        }
    }
}

/// QEMU with one guest, and its agent's and its monitor's sockets.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) name: String,
    pub(crate) files: Files,
    pub(crate) child: Mutex<Child>,
    pub(crate) pid: u32,
    pub(crate) agent: Agent,
    pub(crate) qmp: Mutex<Qmp>,
    pub(crate) qemu: Qemu,
}

impl Machine {
    /// Starts QEMU in the lab's network namespace, on these CPUs of the host or on all; returns
    /// when it has connected its sockets.
    pub(crate) fn start(
        lab: &Lab,
        name: String,
        files: Files,
        qemu: Qemu,
        host_cpus: &[usize],
        arguments: &[String],
    ) -> Result<Self, LabError> {
        let bind = |path: &Path| {
            crate::cache::remove(path)?;
            UnixListener::bind(path).map_err(LabError::io(format!("bind {}", path.display())))
        };
        let (agent, qmp) = (bind(&files.agent)?, bind(&files.qmp)?);
        let stderr = File::create(&files.stderr)
            .map_err(LabError::io(format!("create {}", files.stderr.display())))?;
        let mut command = Command::new(DIE_WITH_PARENT[0]);
        command.args(&DIE_WITH_PARENT[1..]).arg("nsenter");
        command.arg(format!("--net={}", lab.net().path().display()));
        if !host_cpus.is_empty() {
            let list: Vec<String> = host_cpus.iter().map(usize::to_string).collect();
            command.args(["taskset", "-c", &list.join(",")]);
        }
        command.arg(qemu.program()).args(arguments);
        // A Ctrl-C at the terminal is for the lab alone, which then takes its guests down.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let child = spawn(command)?;
        let mut starting = Starting { name: &name, files: &files, child };
        let connected =
            starting.accept(&agent).and_then(|agent| Ok((agent, starting.accept(&qmp)?)));
        let mut child = starting.child;
        let (agent, qmp) = connected.inspect_err(|_| {
            // Fails only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        })?;
        let pid = child.id();
        let io = |source| LabError::Agent { name: name.clone(), source };
        let agent = Agent::new(agent).map_err(io)?;
        let qmp = Qmp::new(qmp).map_err(LabError::io(format!("guest {name}: monitor")))?;
        let (child, qmp) = (Mutex::new(child), Mutex::new(qmp));
        Ok(Self { name, files, child, pid, agent, qmp, qemu })
    }

    /// The console's last lines.
    pub(crate) fn console_tail(&self, lines: usize) -> String {
        tail(&self.files.console, lines)
    }

    /// Whether QEMU has not ended yet.
    pub(crate) fn is_running(&self) -> bool {
        matches!(lock(&self.child).try_wait(), Ok(None))
    }

    /// Fails when the guest's console tells of a crash or QEMU has ended.
    pub(crate) fn check(&self) -> Result<(), LabError> {
        if self.is_running() && fatal_line(&self.console_tail(usize::MAX)).is_none() {
            return Ok(());
        }
        Err(self.death())
    }

    /// Runs a command of QEMU's monitor.
    pub(crate) fn qmp(&self, command: &str, arguments: &Value) -> Result<Value, LabError> {
        lock(&self.qmp).run(command, arguments, DEFAULT_TIMEOUT).map_err(|answer| LabError::Qmp {
            name: self.name.clone(),
            command: command.into(),
            answer,
        })
    }

    /// Sends a signal to a running command's process group.
    pub(crate) fn signal(&self, target: u32, signal: i32) -> Result<(), LabError> {
        let until = Instant::now() + DEFAULT_TIMEOUT;
        let send = || self.agent.ask(&Request::Signal { target, signal })?.done(until);
        send().map(|_| ()).map_err(|failure| self.explain(failure, "a signal", DEFAULT_TIMEOUT))
    }

    /// Kills QEMU at once.
    pub(crate) fn kill(&self) {
        let mut child = lock(&self.child);
        // Fails only when it has ended already.
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Turns a failed request into an error that says what became of the guest.
    pub(crate) fn explain(&self, failure: Failure, what: &str, after: Duration) -> LabError {
        match failure {
            Failure::Gone => {
                // The socket closes a moment before QEMU's exit status is there; the error is
                // the same, only less exact, when it takes longer.
                let _ = wait_for_exit(self.pid, END_TIMEOUT);
                self.death()
            }
            // A guest that crashed without ending QEMU looks like a slow one.
            Failure::Late => self.check().err().unwrap_or_else(|| self.late(what, after)),
            Failure::Agent(source) => LabError::Agent { name: self.name.clone(), source },
        }
    }

    pub(crate) fn late(&self, what: &str, after: Duration) -> LabError {
        LabError::GuestTimeout {
            name: self.name.clone(),
            what: what.into(),
            after,
            console: self.console_tail(TAIL_LINES) + &self.where_cpus_are(),
        }
    }

    fn cpus(&self) -> Vec<Cpu> {
        Cpu::look(|command| self.monitor(command))
    }

    /// State of its CPUs, twice, and of their interrupt controllers: a guest that hangs says
    /// nothing itself.
    pub(crate) fn where_cpus_are(&self) -> String {
        let looks = cpus::look_twice(|| self.cpus());
        let pointers = looks.iter().flatten().map(|cpu| format!("\n{}", cpu.pointer));
        let held = looks[1].iter().flat_map(Cpu::interrupts);
        pointers.chain(held.map(|line| format!("\n{line}"))).collect()
    }

    /// The error of a CPU that the emulator has left in an interrupt for ever, see
    /// [`LabError::InterruptEndLost`]. None of a guest that has crashed, whatever its CPUs do.
    pub(crate) fn lost_interrupt_end(&self) -> Option<LabError> {
        if !self.qemu.accelerator().is_emulator() {
            return None;
        }
        self.check().ok()?;
        let looks = cpus::look_twice(|| self.cpus());
        let (cpu, vectors) = cpus::stuck(&looks)?;
        Some(LabError::InterruptEndLost {
            name: self.name.clone(),
            cpu,
            vectors,
            console: self.console_tail(TAIL_LINES),
        })
    }

    /// QEMU's answer to a command for people; empty if there is none, for it only adds to an error.
    fn monitor(&self, command: &str) -> String {
        let answer = self.qmp("human-monitor-command", &json!({"command-line": command}));
        answer.ok().and_then(|text| text.as_str().map(String::from)).unwrap_or_default()
    }

    pub(crate) fn death(&self) -> LabError {
        let mut child = lock(&self.child);
        died(&self.name, &self.files, &mut child)
    }
}

/// QEMU between its start and its first connections.
struct Starting<'a> {
    name: &'a str,
    files: &'a Files,
    child: Child,
}

impl Starting<'_> {
    /// Waits for QEMU to connect, or to end.
    fn accept(&mut self, listener: &UnixListener) -> Result<UnixStream, LabError> {
        let what = format!("guest {}: wait for QEMU's connection", self.name);
        let io = |error: rustix::io::Errno| LabError::io(&what)(error.into());
        let ended = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).map_err(io)?;
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN),
        ];
        let time = Timespec::try_from(START_TIMEOUT).ok();
        let ready = poll(&mut fds, time.as_ref()).map_err(io)?;
        if fds[0].revents().contains(PollFlags::IN) {
            return Ok(listener.accept().map_err(LabError::io(what))?.0);
        }
        if ready == 0 {
            return Err(LabError::GuestTimeout {
                name: self.name.into(),
                what: "QEMU's start".into(),
                after: START_TIMEOUT,
                console: tail(&self.files.stderr, TAIL_LINES),
            });
        }
        Err(died(self.name, self.files, &mut self.child))
    }
}

/// The error for a guest that is gone: the kernel's own words if there are any.
fn died(name: &str, files: &Files, child: &mut Child) -> LabError {
    let console = tail(&files.console, usize::MAX);
    let ended = match child.try_wait() {
        Ok(Some(status)) => format!("QEMU ended: {status}"),
        Ok(None) => "QEMU still runs".into(),
        Err(error) => format!("QEMU: {error}"),
    };
    let why = match fatal_line(&console) {
        Some(line) => format!("{line} ({ended})"),
        None => ended,
    };
    LabError::GuestDied {
        name: name.into(),
        why,
        console: tail(&files.console, TAIL_LINES),
        stderr: tail(&files.stderr, TAIL_LINES),
    }
}
