//! The `millrace` daemon under test: started with a generated configuration, asked over its
//! control socket, killed and started again.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use control::client::Client;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::console::tail;
use crate::process::{DIE_WITH_PARENT, children, cpu_time, spawn};
use crate::{Lab, LabError, threads};

mod config;

pub use config::Vm;

/// Time for the daemon to say that it is ready, and for the holder to listen.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// Lines of its log shown in errors.
const LOG_LINES: usize = 60;

/// Pause in which memory is put into huge pages if any is to be: the daemon looks every eight
/// seconds at least.
const HUGE_PAGES_PAUSE: Duration = Duration::from_secs(10);

/// HTTP status of a request whose work hangs.
const GATEWAY_TIMEOUT: u16 = 504;

/// Describes a daemon; [`start`](Self::start) runs it.
#[derive(Clone, Debug)]
pub struct DaemonBuilder {
    name: String,
    binary: Option<PathBuf>,
    host_cpus: Vec<usize>,
    config: config::Config,
}

/// A running daemon, and its holder if it has one. Dropping it kills both.
#[derive(Debug)]
pub struct Daemon {
    builder: DaemonBuilder,
    binary: PathBuf,
    run_dir: PathBuf,
    child: Child,
    holder: Option<Child>,
    lab: Lab,
}

impl DaemonBuilder {
    /// The program; else the one named by `MILLRACE_BIN`, else the `millrace` beside the running
    /// program's own build.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
        self
    }

    /// Adds lines to `[daemon]`.
    #[must_use]
    pub fn daemon(mut self, options: &str) -> Self {
        self.config.daemon.push_str(options);
        self.config.daemon.push('\n');
        self
    }

    /// Adds lines to `[sidecore]`, such as `spin_us = 50`.
    #[must_use]
    pub fn sidecore(mut self, options: &str) -> Self {
        self.config.sidecore.push_str(options);
        self.config.sidecore.push('\n');
        self
    }

    /// Adds a switch; `options` may hold a `[switch.uplink]` table at its end.
    #[must_use]
    pub fn switch(mut self, name: &str, options: &str) -> Self {
        self.config.switches.push_str(&format!("[[switch]]\nname = {name:?}\n{options}\n"));
        self
    }

    /// Adds a VM.
    #[must_use]
    pub fn vm(mut self, vm: Vm) -> Self {
        self.config.vms.push(vm);
        self
    }

    /// Adds text at the end of the configuration file.
    #[must_use]
    pub fn toml(mut self, text: &str) -> Self {
        self.config.more.push_str(text);
        self
    }

    /// Runs a holder beside the daemon, a child of the lab that [`Daemon::kill9`] leaves alone.
    #[must_use]
    pub fn holder(mut self) -> Self {
        self.config.holder = true;
        self
    }

    /// Host CPUs that the daemon may run on, and has before other programs; all unless set, and
    /// then none before others.
    #[must_use]
    pub fn host_cpus(mut self, cpus: &[usize]) -> Self {
        self.host_cpus = cpus.to_vec();
        self
    }

    /// Starts the holder, if any, and the daemon, and waits until it says that it is ready.
    ///
    /// # Errors
    /// There is no program; it ends or stays silent, with its log in the error.
    pub fn start(self, lab: &Lab) -> Result<Daemon, LabError> {
        let binary = match &self.binary {
            Some(path) => path.clone(),
            None => find_binary()?,
        };
        let run_dir = config::run_dir(lab.run_folder(), &self.name);
        fs::create_dir_all(&run_dir)
            .map_err(LabError::io(format!("create {}", run_dir.display())))?;
        let path = run_dir.join("millrace.toml");
        fs::write(&path, self.config.text(&run_dir))
            .map_err(LabError::io(format!("write {}", path.display())))?;
        let mut holder = None;
        if self.config.holder {
            holder = Some(start_holder(lab, &binary, &run_dir)?);
        }
        let started = start_daemon(lab, &binary, &run_dir, &self.host_cpus);
        let child = started.inspect_err(|_| stop_child(holder.as_mut()))?;
        Ok(Daemon { builder: self, binary, run_dir, child, holder, lab: lab.clone() })
    }
}

impl Daemon {
    /// Describes a daemon; the name is that of its folder and at most a few letters.
    #[must_use]
    pub fn builder(name: impl Into<String>) -> DaemonBuilder {
        let (binary, host_cpus, config) = Default::default();
        DaemonBuilder { name: name.into(), binary, host_cpus, config }
    }

    /// The vhost-user socket of a VM's port (`vsock` for its vsock device).
    #[must_use]
    pub fn socket(&self, vm: &str, port: &str) -> PathBuf {
        self.run_dir.join(format!("{vm}-{port}.sock"))
    }

    /// The host's end of a VM's vsock: programs connect to it, and the guest's connections to the
    /// host arrive at `<path>_<port>`.
    #[must_use]
    pub fn vsock_path(&self, vm: &str) -> PathBuf {
        self.run_dir.join(format!("{vm}.vsock"))
    }

    /// The daemon's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The holder's process id.
    #[must_use]
    pub fn holder_pid(&self) -> Option<u32> {
        self.holder.as_ref().map(Child::id)
    }

    /// CPU time used so far by the daemon since its last start.
    ///
    /// # Errors
    /// It has ended.
    pub fn cpu_time(&self) -> Result<Duration, LabError> {
        cpu_time(self.pid())
    }

    /// The daemon's process and those that it has started, its holder apart.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        std::iter::once(self.pid()).chain(children(self.pid())).collect()
    }

    /// The last lines of its log, all starts in one.
    #[must_use]
    pub fn log_tail(&self, lines: usize) -> String {
        tail(&log_path(&self.run_dir), lines)
    }

    /// True until the daemon has ended.
    ///
    /// # Errors
    /// The operating system does not say.
    pub fn is_running(&mut self) -> Result<bool, LabError> {
        let ended = self.child.try_wait().map_err(LabError::io("look after the daemon"))?;
        Ok(ended.is_none())
    }

    /// Sends a request to the control socket and returns the answer's JSON.
    ///
    /// # Errors
    /// The daemon cannot be reached, or answers with an error, whose text is in ours.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, LabError> {
        Ok(self.answer(method, path, body)?.json())
    }

    /// `GET /v1/status`.
    ///
    /// # Errors
    /// As [`request`](Self::request).
    pub fn status(&self) -> Result<Value, LabError> {
        self.request("GET", "/v1/status", None)
    }

    /// `GET /v1/metrics`: Prometheus text.
    ///
    /// # Errors
    /// As [`request`](Self::request).
    pub fn metrics(&self) -> Result<String, LabError> {
        Ok(self.answer("GET", "/v1/metrics", None)?.body)
    }

    /// Sum of a metric over all its series that have these labels, for example
    /// `metric_sum("millrace_queue_requests_total", &[("kind", "net")])`.
    ///
    /// # Errors
    /// As [`metrics`](Self::metrics).
    pub fn metric_sum(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64, LabError> {
        Ok(metric_sum(&self.metrics()?, name, labels))
    }

    /// Waits until it moves no memory of VMs into huge pages any more: that is work of the minute
    /// after they booted.
    ///
    /// # Errors
    /// It still does after `time`; else as [`metrics`](Self::metrics).
    pub fn wait_for_huge_pages(&self, time: Duration) -> Result<(), LabError> {
        let moved = || self.metric_sum("millrace_vm_huge_bytes", &[]);
        let (end, mut before) = (Instant::now() + time, moved()?);
        while Instant::now() < end {
            std::thread::sleep(HUGE_PAGES_PAUSE);
            let now = moved()?;
            if now.total_cmp(&before).is_eq() {
                return Ok(());
            }
            before = now;
        }
        Err(self.error(format!("it moves memory after {time:?} still")))
    }

    /// Client of its control socket.
    #[must_use]
    pub fn control(&self) -> Client {
        Client::new(&self.run_dir.join("control.sock"))
    }

    fn answer(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<control::client::Answer, LabError> {
        let answer = self
            .control()
            .request(method, path, body)
            .map_err(|error| self.error(format!("{method} {path}: {error}")))?;
        if answer.is_success() {
            return Ok(answer);
        }
        let what = format!("{method} {path}: {}: {}", answer.status, answer.error());
        let hangs = answer.status == GATEWAY_TIMEOUT;
        let threads = hangs.then(|| format!("; its threads:\n{}", threads::shown(self.pid())));
        Err(self.error(what + &threads.unwrap_or_default()))
    }

    /// Kills the daemon at once, as a crash would, and leaves the holder.
    pub fn kill9(&mut self) {
        stop_child(Some(&mut self.child));
    }

    /// Starts the daemon again with the same configuration, killing it first if it runs.
    ///
    /// # Errors
    /// As [`DaemonBuilder::start`].
    pub fn restart(&mut self) -> Result<(), LabError> {
        self.kill9();
        let cpus = &self.builder.host_cpus;
        self.child = start_daemon(&self.lab, &self.binary, &self.run_dir, cpus)?;
        Ok(())
    }

    /// Asks the daemon to end (SIGTERM) and waits for it; the holder stays until drop.
    ///
    /// # Errors
    /// It takes longer, or ends with an error.
    pub fn stop(&mut self, time: Duration) -> Result<(), LabError> {
        let pid = Pid::from_child(&self.child);
        let failed = |error: rustix::io::Errno| LabError::io("end the daemon")(error.into());
        let ended = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
        kill_process(pid, Signal::TERM).map_err(failed)?;
        let timeout = Timespec::try_from(time).ok();
        let ready = poll(&mut [PollFd::new(&ended, PollFlags::IN)], timeout.as_ref());
        if ready.map_err(failed)? == 0 {
            return Err(self.error(format!("still runs {time:?} after SIGTERM")));
        }
        let status = self.child.wait().map_err(LabError::io("wait for the daemon"))?;
        if status.success() { Ok(()) } else { Err(self.error(format!("ended with {status}"))) }
    }

    fn error(&self, what: String) -> LabError {
        LabError::Daemon { what, log: self.log_tail(LOG_LINES) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("daemon at the end:\n{}", self.log_tail(LOG_LINES));
        }
        self.kill9();
        stop_child(self.holder.as_mut());
    }
}

fn stop_child(child: Option<&mut Child>) {
    if let Some(child) = child {
        // Fails only when it has ended already.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn log_path(run_dir: &Path) -> PathBuf {
    run_dir.join("log")
}

/// `MILLRACE_BIN`, or `millrace` in the folder of the running program or the one above (a test
/// runs in `deps`).
fn find_binary() -> Result<PathBuf, LabError> {
    if let Some(path) = std::env::var_os("MILLRACE_BIN") {
        return Ok(path.into());
    }
    let own = std::env::current_exe().map_err(LabError::io("find the running program"))?;
    let mut folders = own.ancestors().skip(1).take(2);
    folders
        .find_map(|folder| Some(folder.join("millrace")).filter(|path| path.is_file()))
        .ok_or_else(|| LabError::Missing {
            what: "the millrace program".into(),
            remedy: "build it (cargo build -p millrace) or set MILLRACE_BIN".into(),
        })
}

/// A command whose output goes to the log and that dies with the lab.
fn logged(run_dir: &Path) -> Result<Command, LabError> {
    let path = log_path(run_dir);
    let what = format!("open {}", path.display());
    let log = File::options().create(true).append(true).open(path).map_err(LabError::io(&what))?;
    let errors = log.try_clone().map_err(LabError::io(what))?;
    let mut command = Command::new(DIE_WITH_PARENT[0]);
    command.args(&DIE_WITH_PARENT[1..]).process_group(0);
    command.stdin(Stdio::null()).stdout(log).stderr(errors);
    Ok(command)
}

/// Starts the holder and waits until its socket takes connections.
fn start_holder(lab: &Lab, binary: &Path, run_dir: &Path) -> Result<Child, LabError> {
    let socket = run_dir.join("holder.sock");
    crate::cache::remove(&socket)?;
    let mut command = logged(run_dir)?;
    command.args(as_service(lab, &["millrace-holder.service"])?);
    command.arg(binary).arg("holder").arg("--socket").arg(&socket);
    let mut child = spawn(command)?;
    let until = Instant::now() + READY_TIMEOUT;
    // The holder announces nothing, so the socket's file is looked for.
    while !socket.exists() {
        let ended = child.try_wait().map_err(LabError::io("look after the holder"))?;
        if ended.is_some() || Instant::now() > until {
            stop_child(Some(&mut child));
            let what = match ended {
                Some(status) => format!("the holder ended: {status}"),
                None => format!("the holder made no socket within {READY_TIMEOUT:?}"),
            };
            return Err(LabError::Daemon { what, log: tail(&log_path(run_dir), LOG_LINES) });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(child)
}

/// Starts the daemon in the lab's namespace and waits for its `READY=1` (`sd_notify(3)`).
fn start_daemon(
    lab: &Lab,
    binary: &Path,
    run_dir: &Path,
    host_cpus: &[usize],
) -> Result<Child, LabError> {
    let notify = run_dir.join("notify");
    crate::cache::remove(&notify)?;
    let notices =
        UnixDatagram::bind(&notify).map_err(LabError::io(format!("bind {}", notify.display())))?;
    let mut command = logged(run_dir)?;
    command.args(["nsenter", &format!("--net={}", lab.net().path().display())]);
    if !host_cpus.is_empty() {
        let list: Vec<String> = host_cpus.iter().map(usize::to_string).collect();
        command.args(["taskset", "-c", &list.join(","), "nice", "-n", "-20"]);
    }
    command.args(as_service(lab, &units(run_dir)?)?);
    command.arg(binary).args(["serve", "-c"]).arg(run_dir.join("millrace.toml"));
    command.env("NOTIFY_SOCKET", &notify).env_remove("WATCHDOG_USEC");
    let mut child = spawn(command)?;
    wait_notified(&notices, &child).map_err(|what| {
        stop_child(Some(&mut child));
        LabError::Daemon { what, log: tail(&log_path(run_dir), LOG_LINES) }
    })?;
    Ok(child)
}

/// The daemon's unit, and what an operator drops in for VMs with pipes and for VMs with modules.
fn units(run_dir: &Path) -> Result<Vec<&'static str>, LabError> {
    let path = run_dir.join("millrace.toml");
    let config = fs::read_to_string(&path);
    let config = config.map_err(LabError::io(format!("read {}", path.display())))?;
    let drop_ins =
        [("[vm.pipes]", "millrace-pipes.conf"), ("[vm.modules]", "millrace-modules.conf")];
    let wanted = drop_ins.iter().filter(|(table, _)| config.contains(table)).map(|(_, unit)| *unit);
    Ok(std::iter::once("millrace.service").chain(wanted).collect())
}

/// Words in front of a program's command, so that it has what its unit gives it and no more.
fn as_service(lab: &Lab, units: &[&str]) -> Result<Vec<OsString>, LabError> {
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
    let mut words = vec![crate::program::agent(lab.cache())?.into(), "service".into()];
    words.extend(units.iter().map(|unit| packaging.join(unit).into()));
    words.push("--".into());
    Ok(words)
}

/// Waits for `READY=1`; the error says why it will not come.
pub(crate) fn wait_notified(notices: &UnixDatagram, child: &Child) -> Result<(), String> {
    let failed = |error: rustix::io::Errno| format!("wait until it is ready: {error}");
    let ended = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).map_err(failed)?;
    let until = Instant::now() + READY_TIMEOUT;
    let mut message = [0; 4096];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok();
        let mut fds = [PollFd::new(notices, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
        if poll(&mut fds, left.as_ref()).map_err(failed)? == 0 {
            return Err(format!("was not ready within {READY_TIMEOUT:?}"));
        }
        if !fds[0].revents().contains(PollFlags::IN) {
            return Err("ended before it was ready".into());
        }
        let len = notices.recv(&mut message).map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&message[..len]);
        if text.lines().any(|line| line == "READY=1") {
            return Ok(());
        }
    }
}

/// Sum of a metric's samples in the text of a daemon's metrics, as [`Daemon::metric_sum`] gives it.
#[must_use]
pub fn metric_sum(text: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let wanted: Vec<String> = labels.iter().map(|(k, v)| format!("{k}=\"{v}\"")).collect();
    let series = text.lines().filter(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            && wanted.iter().all(|label| line.contains(label.as_str()))
    });
    series.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_takes_the_series_with_all_labels() {
        let text = "# HELP a x\na{vm=\"x\",queue=\"0\"} 1\na{vm=\"x\",queue=\"1\"} 2\n\
                    a{vm=\"y\",queue=\"1\"} 4\nab{vm=\"x\"} 8\n";
        assert_eq!(metric_sum(text, "a", &[]), 7.0);
        assert_eq!(metric_sum(text, "a", &[("vm", "x"), ("queue", "1")]), 2.0);
    }
}
