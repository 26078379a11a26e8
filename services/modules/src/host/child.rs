//! A process of modules, as its parent sees it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, pidfd_open};

use super::config::VmModulesConfig;
use super::log::LogPipe;
use super::prepared::Prepared;
use crate::control::{self, ToProcess};
use crate::folder::written::Written;
use crate::limits::END_TIMEOUT;
use crate::{ModuleStats, ModulesError};

/// Time between two logs of a killed process that has not ended.
const REMIND: Duration = Duration::from_secs(30);

/// Process of modules.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pidfd: OwnedFd,
    pub control: OwnedFd,
    pub log: LogPipe,
    pub since: Instant,
    pub ready: bool,
    /// Answers to who waits for counters.
    pub stats_requests: Vec<SyncSender<Vec<ModuleStats>>>,
    /// Counters that have come already.
    pub stats: Vec<ModuleStats>,
    /// Step of a copy that is waited for.
    pub pending_copy: Option<PendingCopy>,
}

/// Step of a copy that is waited for.
#[derive(Debug)]
pub(super) struct PendingCopy {
    /// Number of the step: answers to earlier ones may come late.
    pub turn: u64,
    pub to: SyncSender<Result<Written, String>>,
}

impl Process {
    /// Starts one. Lines that it logs beyond the limit are counted in `dropped`.
    pub fn spawn(
        config: &VmModulesConfig,
        prepared: &[Prepared],
        dropped: &Arc<AtomicU64>,
    ) -> Result<Self, ModulesError> {
        let what = "starting a process of modules";
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(ModulesError::io(what))?;
        let mut parts = Vec::new();
        for Prepared { code, folder, .. } in prepared {
            for path in [code, folder] {
                let file = std::fs::File::open(path)
                    .map_err(ModulesError::io(format!("opening {}", path.display())))?;
                parts.push(OwnedFd::from(file));
            }
        }
        // Opened anew: each process locks it for itself.
        let ring = config.ring.as_ref();
        let region = ring.map(|ring| reopened(&ring.file)).transpose();
        let region = region.map_err(ModulesError::io("opening the memory for rings"))?;
        let (program, arguments) = config
            .command
            .split_first()
            .ok_or_else(|| ModulesError::Control("no command".into()))?;
        let (log, stderr) = std::io::pipe().map_err(ModulesError::io(what))?;
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(stderr)
            .current_dir("/")
            .spawn()
            .map_err(ModulesError::io(what))?;
        let log = LogPipe::new(log, &config.vm, child.id(), dropped);
        let modules = prepared.iter().map(|p| p.setup.clone()).collect();
        let setup = ToProcess::Setup {
            vm: config.vm.clone(),
            modules,
            ring: ring.map(|ring| ring.setup),
            needs_ring: config.needs_ring,
        };
        let fds: Vec<BorrowedFd<'_>> = parts.iter().chain(&region).map(AsFd::as_fd).collect();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(ModulesError::io(what));
        // The socket is empty, and a set-up is no longer than it.
        let sent = control::send(&ours, &setup, &fds, SendFlags::DONTWAIT);
        match pidfd.and_then(|pidfd| sent.map(|()| pidfd)) {
            Ok(pidfd) => Ok(Self {
                child,
                pidfd,
                control: ours,
                log,
                since: Instant::now(),
                ready: false,
                stats_requests: Vec::new(),
                stats: Vec::new(),
                pending_copy: None,
            }),
            Err(e) => {
                // It has had nothing to do yet: it ends at once.
                let _ = child.kill();
                let _ = child.wait();
                Err(e)
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to end: in time if it serves, at once otherwise.
    pub fn end(self) -> EndingProcess {
        let told = self.ready
            && control::send(&self.control, &ToProcess::End, &[], SendFlags::DONTWAIT).is_ok();
        let patience = if told { END_TIMEOUT } else { Duration::ZERO };
        let now = Instant::now();
        EndingProcess {
            process: self,
            told: now,
            next: now + patience,
            patient: told,
            killed: false,
        }
    }
}

fn reopened(file: &OwnedFd) -> std::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(std::fs::OpenOptions::new().read(true).write(true).open(path)?.into())
}

/// Process that is to end, and is killed if it does not.
#[derive(Debug)]
pub(super) struct EndingProcess {
    pub process: Process,
    told: Instant,
    /// Time at which it is killed, or logged again.
    next: Instant,
    /// Whether it was given time.
    patient: bool,
    killed: bool,
}

impl EndingProcess {
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.process.pidfd.as_fd()
    }

    /// Time at which it is to be looked at.
    pub fn due(&self) -> Instant {
        self.next
    }

    /// Status, once it has ended.
    pub fn poll_status(&mut self, vm: &str, now: Instant) -> Option<std::io::Result<ExitStatus>> {
        if let Some(ended) = self.process.child.try_wait().transpose() {
            self.process.log.read(now);
            return Some(ended);
        }
        if now >= self.next {
            let (pid, waited) = (self.process.pid(), now - self.told);
            if self.killed {
                tracing::error!(
                    %vm,
                    pid,
                    ?waited,
                    "killed process of modules of {vm} does not end: its folders stay locked"
                );
            } else if self.patient {
                tracing::warn!(
                    %vm,
                    pid,
                    ?waited,
                    "process of modules of {vm} does not end and is killed"
                );
            }
            // It is our child, and not waited for yet: the number is still its own.
            let _ = self.process.child.kill();
            (self.killed, self.next) = (true, now + REMIND);
        }
        None
    }
}
