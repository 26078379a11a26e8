//! A running guest.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use base::sync::lock;
use lab_agent::proto::{self, Reply, Request};

use crate::agent::{self, Failure, unexpected};
use crate::builder::GuestBuilder;
use crate::command::{Output, Running};
use crate::console::{TAIL_LINES, fatal_line};
use crate::machine::{DEFAULT_TIMEOUT, Files, Machine};
use crate::process::{cpu_time, wait_for_exit};
use crate::{Lab, LabError, Qemu};

/// Time between two looks at a guest that boots, whether its CPUs can still go on.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// The same of one that is to show whether it starts at all.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// A guest: QEMU with its agent. Dropping it kills it.
#[derive(Debug)]
pub struct Guest {
    machine: Machine,
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
        qemu: Qemu,
        arguments: &[String],
    ) -> Result<Self, LabError> {
        let (name, cpus) = (builder.name, &builder.host_cpus);
        Ok(Self {
            machine: Machine::start(lab, name, files, qemu, cpus, arguments)?,
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
        let release = self.hello(self.machine.qemu.accelerator().boot_time(time))?;
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

    /// The kernel's release, by the agent's first answer. A guest that cannot go on is told at
    /// once.
    fn hello(&self, time: Duration) -> Result<String, LabError> {
        let failed = |failure| self.machine.explain(failure, "boot", time);
        let until = Instant::now() + time;
        let hello = self.machine.agent.ask(&Request::Hello { version: proto::VERSION });
        let call = hello.map_err(failed)?;
        loop {
            match call.next(until.min(Instant::now() + LOOK_INTERVAL)) {
                Ok(Reply::Hello { kernel, .. }) => return Ok(kernel),
                Ok(other) => return Err(failed(unexpected(&other))),
                Err(Failure::Late) => {
                    self.machine.lost_interrupt_end().map_or(Ok(()), Err)?;
                    if Instant::now() >= until {
                        return Err(failed(Failure::Late));
                    }
                }
                Err(failure) => return Err(failed(failure)),
            }
        }
    }

    /// Waits until the agent answers, as long as QEMU has used less than `cpu` of CPU time and
    /// `time` is not over.
    ///
    /// # Errors
    /// [`LabError::GuestTimeout`] beyond either; the guest died.
    pub(crate) fn has_started(&self, cpu: Duration, time: Duration) -> Result<(), LabError> {
        let failed = |failure| self.machine.explain(failure, "its start", time);
        let until = Instant::now() + time;
        let hello = self.machine.agent.ask(&Request::Hello { version: proto::VERSION });
        let call = hello.map_err(failed)?;
        let may_go_on = || Instant::now() < until && self.cpu_time().is_ok_and(|used| used < cpu);
        loop {
            match call.next(Instant::now() + PROBE_INTERVAL) {
                Ok(Reply::Hello { .. }) => return Ok(()),
                Ok(other) => return Err(failed(unexpected(&other))),
                Err(Failure::Late) if may_go_on() => {}
                Err(failure) => return Err(failed(failure)),
            }
        }
    }

    /// The guest's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.machine.name
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
        let call = self.machine.agent.ask(&request);
        let call =
            call.map_err(|failure| self.machine.explain(failure, "starting a command", time))?;
        Running::new(&self.machine, call, script)
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
        agent::put(&self.machine.agent, guest, mode, content, DEFAULT_TIMEOUT)
            .map_err(|failure| self.machine.explain(failure, "putting a file", DEFAULT_TIMEOUT))
    }

    /// Reads a file of the guest, checked by hash.
    ///
    /// # Errors
    /// The file cannot be read; the guest died.
    pub fn get(&self, guest: &str) -> Result<Vec<u8>, LabError> {
        agent::get(&self.machine.agent, guest, DEFAULT_TIMEOUT)
            .map_err(|failure| self.machine.explain(failure, "getting a file", DEFAULT_TIMEOUT))
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
        self.machine.qmp(command, &arguments)
    }

    /// Monitor events that came with answers since the last call.
    #[must_use]
    pub fn qmp_events(&self) -> Vec<serde_json::Value> {
        lock(&self.machine.qmp).take_events()
    }

    /// QEMU that runs it.
    pub(crate) fn qemu(&self) -> &Qemu {
        &self.machine.qemu
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.machine.pid
    }

    /// CPU time QEMU has used so far (user and system, all threads; steps of 10 ms).
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn cpu_time(&self) -> Result<Duration, LabError> {
        cpu_time(self.machine.pid)
    }

    /// The console's last lines.
    #[must_use]
    pub fn console_tail(&self, lines: usize) -> String {
        self.machine.console_tail(lines)
    }

    /// The console's file.
    #[must_use]
    pub fn console_path(&self) -> PathBuf {
        self.machine.files.console.clone()
    }

    /// True until QEMU has ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.machine.is_running()
    }

    /// Fails with the crash's story when the guest's console tells of one or QEMU has ended.
    ///
    /// # Errors
    /// [`LabError::GuestDied`].
    pub fn check(&self) -> Result<(), LabError> {
        self.machine.check()
    }

    /// Flushes the guest's file systems and ends it in order.
    ///
    /// # Errors
    /// It does not end in time, or ends otherwise.
    pub fn shutdown(self, time: Duration) -> Result<(), LabError> {
        let asked = self.machine.agent.ask(&Request::Shutdown);
        let _call = asked.map_err(|failure| self.machine.explain(failure, "a shutdown", time))?;
        let what = format!("guest {}: wait for QEMU", self.machine.name);
        if !wait_for_exit(self.machine.pid, time).map_err(LabError::io(&what))? {
            return Err(self.machine.late("the shutdown", time));
        }
        let mut child = lock(&self.machine.child);
        let status = child.wait().map_err(LabError::io(what))?;
        drop(child);
        let crash = fatal_line(&self.console_tail(usize::MAX)).is_some();
        if status.success() && !crash { Ok(()) } else { Err(self.machine.death()) }
    }

    /// Kills QEMU at once, as a host's crash would.
    pub fn kill(&self) {
        self.machine.kill();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A test that fails for another reason than a guest's silence does not ask.
        if std::thread::panicking() {
            let (console, cpus) = (self.console_tail(TAIL_LINES), self.machine.where_cpus_are());
            eprintln!("guest {} at the end:\n{console}{cpus}", self.machine.name);
        }
        self.kill();
        self.machine.agent.close();
    }
}
