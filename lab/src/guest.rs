//! A running guest.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use lab_agent::proto::{self, Reply, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use crate::agent::{self, Agent, Failure, unexpected};
use crate::builder::{Files, GuestBuilder};
use crate::command::{Output, Running};
use crate::console::{TAIL_LINES, fatal_line, tail};
use crate::process::{DIE_WITH_PARENT, cpu_time, spawn};
use crate::qmp::Qmp;
use crate::{Lab, LabError, apt};

/// Time for a command, a file or a monitor command unless the caller says another.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for QEMU to start and connect its sockets.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Between two looks at its CPUs.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Time for QEMU to end after its guest crashed, so that the error can say how.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A guest: QEMU with its agent. Dropping it kills it.
#[derive(Debug)]
pub struct Guest {
    name: String,
    files: Files,
    child: Mutex<Child>,
    pid: u32,
    agent: Agent,
    qmp: Mutex<Qmp>,
    addresses: Vec<(usize, String)>,
    release: OnceLock<String>,
    /// Keeps the run folder and the namespace; last, so that it goes last.
    _lab: Lab,
}

impl Guest {
    /// Describes a guest. The name is its host name and at most 16 letters long.
    #[must_use]
    pub fn builder(name: impl Into<String>) -> GuestBuilder {
        GuestBuilder::new(name)
    }

    pub(crate) fn launch(
        lab: &Lab,
        builder: GuestBuilder,
        files: Files,
        arguments: &[String],
    ) -> Result<Self, LabError> {
        let bind = |path: &Path| {
            crate::cache::remove(path)?;
            UnixListener::bind(path).map_err(LabError::io(format!("bind {}", path.display())))
        };
        let (agent, qmp) = (bind(&files.agent)?, bind(&files.qmp)?);
        let stderr = File::create(&files.stderr)
            .map_err(LabError::io(format!("create {}", files.stderr.display())))?;
        let qemu = qemu()?;
        let mut command = Command::new(DIE_WITH_PARENT[0]);
        command.args(&DIE_WITH_PARENT[1..]).arg("nsenter");
        command.arg(format!("--net={}", lab.net().path().display()));
        if !builder.host_cpus.is_empty() {
            let list: Vec<String> = builder.host_cpus.iter().map(usize::to_string).collect();
            command.args(["taskset", "-c", &list.join(",")]);
        }
        command.arg(qemu).args(arguments);
        // A Ctrl-C at the terminal is for the lab alone, which then takes its guests down.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        let child = spawn(command)?;
        let mut starting = Starting { name: &builder.name, files: &files, child };
        let connected =
            starting.accept(&agent).and_then(|agent| Ok((agent, starting.accept(&qmp)?)));
        let mut child = starting.child;
        let (agent, qmp) = connected.inspect_err(|_| {
            // Fails only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        })?;
        let pid = child.id();
        let name = builder.name;
        let io = |source| LabError::Agent { name: name.clone(), source };
        let agent = Agent::new(agent).map_err(io)?;
        let qmp = Qmp::new(qmp).map_err(LabError::io(format!("guest {name}: monitor")))?;
        Ok(Self {
            name,
            files,
            child: Mutex::new(child),
            pid,
            agent,
            qmp: Mutex::new(qmp),
            addresses: builder.addresses,
            release: OnceLock::new(),
            _lab: lab.clone(),
        })
    }

    /// Waits until the agent answers, then sets the addresses given to the builder.
    ///
    /// # Errors
    /// The guest died or took longer, each with the console's last lines.
    pub fn wait_ready(&self, time: Duration) -> Result<(), LabError> {
        let until = Instant::now() + time;
        let hello = || {
            let call = self.agent.ask(&Request::Hello { version: proto::VERSION })?;
            match call.next(until)? {
                Reply::Hello { kernel, .. } => Ok(kernel),
                other => Err(unexpected(&other)),
            }
        };
        let release = hello().map_err(|failure| self.explain(failure, "boot", time))?;
        // A second wait_ready finds it set, to the same value.
        let _ = self.release.set(release);
        let mut script = String::new();
        for (slot, address) in &self.addresses {
            script.push_str(&format!(
                "ip link set eth{slot} up && ip addr add {address} dev eth{slot} && "
            ));
        }
        if !script.is_empty() {
            script.push_str("true");
            self.sh(&script)?;
        }
        Ok(())
    }

    /// The guest's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel's release as the agent reported it; empty before
    /// [`wait_ready`](Self::wait_ready).
    #[must_use]
    pub fn release(&self) -> &str {
        self.release.get().map_or("", String::as_str)
    }

    /// Runs a shell script to its end, at most [`DEFAULT_TIMEOUT`]. A failing script is not an
    /// error here; see [`Output::ok`] and [`sh`](Self::sh).
    ///
    /// # Errors
    /// The guest died, or the agent could not run it.
    pub fn run(&self, script: &str) -> Result<Output, LabError> {
        self.run_for(script, DEFAULT_TIMEOUT)
    }

    /// Runs a shell script, killed in the guest after a time-out.
    ///
    /// # Errors
    /// The guest died, or the agent could not run it.
    pub fn run_for(&self, script: &str, time: Duration) -> Result<Output, LabError> {
        self.spawn_for(script, time)?.wait(time)
    }

    /// Runs a script that must succeed and returns its standard output without the last newline.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`LabError::GuestCommand`] when it fails.
    pub fn sh(&self, script: &str) -> Result<String, LabError> {
        self.run(script)?.ok()
    }

    /// Starts a script without a time-out and returns at once; many may run side by side.
    ///
    /// # Errors
    /// The guest died, or the agent could not start it.
    pub fn spawn(&self, script: &str) -> Result<Running<'_>, LabError> {
        self.spawn_for(script, Duration::ZERO)
    }

    fn spawn_for(&self, script: &str, time: Duration) -> Result<Running<'_>, LabError> {
        let timeout_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let request = Request::Run { timeout_ms, script: script.into() };
        let call = self.agent.ask(&request);
        let call = call.map_err(|failure| self.explain(failure, "starting a command", time))?;
        Running::new(self, call, script)
    }

    /// Sends a signal to a running command's process group.
    pub(crate) fn signal(&self, target: u32, signal: i32) -> Result<(), LabError> {
        let until = Instant::now() + DEFAULT_TIMEOUT;
        let send = || self.agent.ask(&Request::Signal { target, signal })?.done(until);
        send().map(|_| ()).map_err(|failure| self.explain(failure, "a signal", DEFAULT_TIMEOUT))
    }

    /// Puts a host file into the guest with its permissions, checked by hash.
    ///
    /// # Errors
    /// The file cannot be read or written; the guest died.
    pub fn put(&self, host: impl AsRef<Path>, guest: &str) -> Result<(), LabError> {
        let host = host.as_ref();
        let (mode, content) =
            agent::host_file(host).map_err(LabError::io(format!("read {}", host.display())))?;
        self.put_bytes(guest, mode, &content)
    }

    /// Puts bytes into a file of the guest.
    ///
    /// # Errors
    /// The file cannot be written; the guest died.
    pub fn put_bytes(&self, guest: &str, mode: u32, content: &[u8]) -> Result<(), LabError> {
        agent::put(&self.agent, guest, mode, content, DEFAULT_TIMEOUT)
            .map_err(|failure| self.explain(failure, "putting a file", DEFAULT_TIMEOUT))
    }

    /// Reads a file of the guest, checked by hash.
    ///
    /// # Errors
    /// The file cannot be read; the guest died.
    pub fn get(&self, guest: &str) -> Result<Vec<u8>, LabError> {
        agent::get(&self.agent, guest, DEFAULT_TIMEOUT)
            .map_err(|failure| self.explain(failure, "getting a file", DEFAULT_TIMEOUT))
    }

    /// Runs a command of QEMU's monitor.
    ///
    /// # Errors
    /// [`LabError::Qmp`] with QEMU's own error object.
    pub fn qmp(
        &self,
        command: &str,
        arguments: serde_json::Value,
    ) -> Result<serde_json::Value, LabError> {
        let mut qmp = self.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        qmp.run(command, &arguments, DEFAULT_TIMEOUT).map_err(|answer| LabError::Qmp {
            name: self.name.clone(),
            command: command.into(),
            answer,
        })
    }

    /// Monitor events that came with answers since the last call.
    #[must_use]
    pub fn qmp_events(&self) -> Vec<serde_json::Value> {
        self.qmp.lock().unwrap_or_else(PoisonError::into_inner).take_events()
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// CPU time QEMU has used so far (user and system, all threads; steps of 10 ms).
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn cpu_time(&self) -> Result<Duration, LabError> {
        cpu_time(self.pid)
    }

    /// The console's last lines.
    #[must_use]
    pub fn console_tail(&self, lines: usize) -> String {
        tail(&self.files.console, lines)
    }

    /// The console's file.
    #[must_use]
    pub fn console_path(&self) -> PathBuf {
        self.files.console.clone()
    }

    /// True until QEMU has ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait(), Ok(None))
    }

    /// Fails with the crash's story when the guest's console tells of one or QEMU has ended.
    ///
    /// # Errors
    /// [`LabError::GuestDied`].
    pub fn check(&self) -> Result<(), LabError> {
        if self.is_running() && fatal_line(&self.console_tail(usize::MAX)).is_none() {
            return Ok(());
        }
        Err(self.death())
    }

    /// Flushes the guest's file systems and ends it in order.
    ///
    /// # Errors
    /// It does not end in time, or ends otherwise.
    pub fn shutdown(self, time: Duration) -> Result<(), LabError> {
        let asked = self.agent.ask(&Request::Shutdown);
        let _call = asked.map_err(|failure| self.explain(failure, "a shutdown", time))?;
        let what = format!("guest {}: wait for QEMU", self.name);
        if !wait_for_exit(self.pid, time).map_err(LabError::io(&what))? {
            return Err(self.late("the shutdown", time));
        }
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let status = child.wait().map_err(LabError::io(what))?;
        drop(child);
        let crash = fatal_line(&self.console_tail(usize::MAX)).is_some();
        if status.success() && !crash { Ok(()) } else { Err(self.death()) }
    }

    /// Kills QEMU at once, as a host's crash would.
    pub fn kill(&self) {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
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

    fn late(&self, what: &str, after: Duration) -> LabError {
        LabError::GuestTimeout {
            name: self.name.clone(),
            what: what.into(),
            after,
            console: self.console_tail(TAIL_LINES) + &self.where_cpus_are(),
        }
    }

    /// State of its CPUs, twice, and of their interrupt controllers: a guest that hangs
    /// says nothing itself. A CPU that has halted (`HLT=1`) with an interrupt in service (`ISR`)
    /// takes no other of its class or below. Seen with QEMU 7.2 emulating two CPUs, not with 10.0.
    /// Until 8.2 a CPU may use the memory map that another one has just changed with what it
    /// remembers of the old one (tcg_commit()): then the end of its interrupt may go elsewhere,
    /// which would explain it.
    ///
    /// Seen once with 7.2 and four CPUs, at boot: all are at the head of
    /// `sched_clock_idle_wakeup_event` or in the handler of int3, and stay so. Linux patches a jump
    /// there. It goes back to where an int3 has gone meanwhile: the emulator kept its translation,
    /// see [`LabError::is_emulators_fault_at_boot`].
    fn where_cpus_are(&self) -> String {
        let mut text = String::new();
        let mut cpus = 0;
        for _ in 0..2 {
            let registers = self.monitor("info registers -a");
            if registers.is_empty() {
                break;
            }
            let pointers = registers.lines().map(str::trim).filter(|line| line.starts_with("RIP="));
            cpus = pointers.clone().count();
            pointers.for_each(|line| text.push_str(&format!("\n{line}")));
            std::thread::sleep(LOOK_AGAIN);
        }
        for cpu in 0..cpus {
            let controller = self.monitor(&format!("info lapic {cpu}"));
            let held = |line: &&str| line.starts_with("ISR") || line.starts_with("IRR");
            let held = controller.lines().map(str::trim).filter(held);
            held.for_each(|line| text.push_str(&format!("\nCPU {cpu} {line}")));
        }
        text
    }

    /// QEMU's answer to a command for people; empty if there is none, for it only adds to an error.
    fn monitor(&self, command: &str) -> String {
        let answer = self.qmp("human-monitor-command", json!({"command-line": command}));
        answer.ok().and_then(|text| text.as_str().map(String::from)).unwrap_or_default()
    }

    fn death(&self) -> LabError {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        died(&self.name, &self.files, &mut child)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A test that fails for another reason than a guest's silence does not ask.
        if std::thread::panicking() {
            let (console, cpus) = (self.console_tail(TAIL_LINES), self.where_cpus_are());
            eprintln!("guest {} at the end:\n{console}{cpus}", self.name);
        }
        self.kill();
        self.agent.close();
    }
}

/// Debian's QEMU, or the one whose full path `MILLRACE_QEMU` gives.
fn qemu() -> Result<PathBuf, LabError> {
    apt::need(&std::env::var("MILLRACE_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into()))
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

/// Waits for a process to end; false when the time is over first.
fn wait_for_exit(pid: u32, time: Duration) -> std::io::Result<bool> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else { return Ok(true) };
    let ended = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(true),
        other => other?,
    };
    let time = Timespec::try_from(time).ok();
    Ok(poll(&mut [PollFd::new(&ended, PollFlags::IN)], time.as_ref())? > 0)
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
