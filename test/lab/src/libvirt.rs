//! Guests that libvirt starts: a libvirtd of the session's own, and the agents of its domains.
//!
//! The libvirtd is Debian's, as root, and has its domains run as `libvirt-qemu`, as on a host. It
//! lives in namespaces of its own (mounts, processes) beside that of the session's network: what it
//! writes is in memory, what the host's libvirt has stays unseen, and all domains end with it. In
//! there the QEMU of the session stands in the places of Debian's, as after an upgrade.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lab_agent::proto::{self, Reply, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::{Agent, Failure, unexpected};
use crate::boot::has_lost_map;
use crate::console::{TAIL_LINES, tail};
use crate::cpus::{self, Cpu};
use crate::daemon::wait_notified;
use crate::process::{DIE_WITH_PARENT, run, spawn};
use crate::{Lab, LabError, Output};

/// User and group of the QEMUs that Debian's libvirt starts.
pub const USER: (&str, &str) = ("libvirt-qemu", "kvm");

/// Files and folders of a QEMU. It loads modules from the second whatever its own place is.
const QEMU_FILES: [&str; 5] = [
    "usr/bin/qemu-system-x86_64",
    "usr/lib/x86_64-linux-gnu/qemu",
    "usr/share/qemu",
    "usr/share/seabios",
    "usr/lib/ipxe",
];

/// Replaces the folders of the host's libvirt, and QEMU. The shell stays, as process 1, to reap
/// QEMUs, whose parents end.
const SCRIPT: &str = "set -e
config=$1 root=$2; shift 2
for folder in /run /etc/libvirt /var/lib/libvirt /var/cache/libvirt; do
    mount -t tmpfs -o mode=755 tmpfs \"$folder\"
done
mount --bind \"$config/log\" /var/log/libvirt
for file; do mount --bind \"$root/$file\" \"/$file\"; done
cp \"$config\"/*.conf /etc/libvirt
libvirtd &
wait $!";

/// A running libvirtd. Dropping it ends it and its domains.
#[derive(Debug)]
pub struct Libvirt {
    child: Child,
    folder: PathBuf,
}

impl Libvirt {
    /// Starts it and waits until it answers.
    ///
    /// # Errors
    /// It is not installed, or ends.
    pub fn start(lab: &Lab) -> Result<Self, LabError> {
        let folder = lab.path("libvirt");
        let log = folder.join("log");
        let made = |what: &Path| LabError::io(format!("make {}", what.display()));
        fs::create_dir_all(&log).map_err(made(&log))?;
        let (user, group) = USER;
        let files = [
            (
                "libvirtd.conf",
                format!(
                    "unix_sock_dir = {folder:?}\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n\
                 log_outputs = \"3:file:{}\"\n",
                    log.join("libvirtd.log").display()
                ),
            ),
            (
                "qemu.conf",
                format!(
                    "user = {user:?}\ngroup = {group:?}\nsecurity_driver = \"none\"\n\
                 dynamic_ownership = 0\nstdio_handler = \"file\"\nnamespaces = []\n\
                 cgroup_controllers = []\n"
                ),
            ),
        ];
        for (name, text) in files {
            let path = folder.join(name);
            fs::write(&path, text).map_err(made(&path))?;
        }
        let notify = folder.join("notify");
        let notices = UnixDatagram::bind(&notify).map_err(made(&notify))?;
        let output = folder.join("output");
        let output = File::create(&output).map_err(made(&output))?;
        let mut command = Command::new(DIE_WITH_PARENT[0]);
        command.args(&DIE_WITH_PARENT[1..]).arg("nsenter");
        command.arg(format!("--net={}", lab.net().path().display()));
        command.args(["unshare", "--mount", "--propagation", "private", "--pid", "--fork"]);
        command.args(["--kill-child=KILL", "--mount-proc", "sh", "-c", SCRIPT, "sh"]);
        command.arg(&folder).args(qemu_words(lab)?).env("NOTIFY_SOCKET", &notify);
        let error = output.try_clone().map_err(LabError::io("duplicate a file"))?;
        command.process_group(0).stdin(Stdio::null()).stdout(output).stderr(error);
        let libvirt = Self { child: spawn(command)?, folder };
        wait_notified(&notices, &libvirt.child).map_err(|what| LabError::Daemon {
            what: format!("libvirtd {what}"),
            log: libvirt.log(),
        })?;
        Ok(libvirt)
    }

    /// Runs `virsh` to its end: its output.
    ///
    /// # Errors
    /// Its own text.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String, LabError> {
        let socket = self.folder.join("libvirt-sock");
        let uri = format!("qemu+unix:///system?socket={}", socket.display());
        let said = run(Command::new("virsh").args(["--quiet", "--connect", &uri]).args(arguments))?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// Starts a domain, and waits until its guest's agent answers at `agent`. One that the emulator
    /// ends or hangs by a fault of its own is started once more, as [`boot`](crate::boot()) does.
    ///
    /// # Errors
    /// That of `virsh`; no agent answers in time.
    pub fn boot(
        &self,
        lab: &Lab,
        domain: &str,
        agent: &AgentSocket,
        time: Duration,
    ) -> Result<Shell, LabError> {
        self.virsh(&["start", domain])?;
        match agent.accept(time) {
            Err(error) if lab.qemu()?.accelerator().is_emulator() && self.has_lost(domain) => {
                eprintln!("started once more: {error}");
                // It may be gone already, which libvirt may not know yet.
                let _ = self.virsh(&["destroy", domain]);
                self.virsh(&["start", domain])?;
                agent.accept(time)
            }
            answer => answer,
        }
    }

    /// Whether an access of a domain that was booting has got lost in the emulator.
    fn has_lost(&self, domain: &str) -> bool {
        let monitor = |command: &str| {
            let answer = self.virsh(&["qemu-monitor-command", domain, "--hmp", command]);
            answer.unwrap_or_default()
        };
        let looks = || cpus::look_twice(|| Cpu::look(monitor));
        has_lost_map(&self.log()) || cpus::stuck(&looks()).is_some()
    }

    /// Last lines of all that it and its domains said.
    #[must_use]
    pub fn log(&self) -> String {
        let qemu = self.folder.join("log/qemu");
        let logs = fs::read_dir(qemu).into_iter().flatten().filter_map(|it| Some(it.ok()?.path()));
        let own = ["output", "log/libvirtd.log"].map(|name| self.folder.join(name));
        own.into_iter().chain(logs).map(|path| tail(&path, TAIL_LINES) + "\n").collect()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("libvirtd at the end:\n{}", self.log());
        }
        // Fails only when it has ended already. With process 1 go all others.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Root of the session's QEMU, and its files that stand in the places of Debian's; none of those
/// where it is Debian's.
fn qemu_words(lab: &Lab) -> Result<Vec<PathBuf>, LabError> {
    let qemu = lab.qemu()?;
    let root = qemu.program().ancestors().nth(3).unwrap_or(Path::new("/"));
    let host = Path::new("/");
    let is_there = |file: &&str| root.join(file).exists() && host.join(file).exists();
    let files = QEMU_FILES.into_iter().filter(|file| root != host && is_there(file));
    Ok(std::iter::once(root.to_path_buf()).chain(files.map(PathBuf::from)).collect())
}

/// Socket to which a QEMU connects its guest's agent.
#[derive(Debug)]
pub struct AgentSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl AgentSocket {
    /// Makes it in the session's run folder, for QEMUs of all users.
    ///
    /// # Errors
    /// The name is taken.
    pub fn bind(lab: &Lab, name: &str) -> Result<Self, LabError> {
        let path = lab.path(name);
        let made = || LabError::io(format!("make {}", path.display()));
        let listener = UnixListener::bind(&path).map_err(made())?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).map_err(made())?;
        Ok(Self { listener, path })
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until a QEMU has connected and its guest's agent answers.
    ///
    /// # Errors
    /// None does so in time.
    pub fn accept(&self, time: Duration) -> Result<Shell, LabError> {
        let until = Instant::now() + time;
        let late = || LabError::Refused(format!("{}: no agent in {time:?}", self.path.display()));
        let limit = Timespec::try_from(time).ok();
        let failed = |error: rustix::io::Errno| LabError::io("wait for a QEMU")(error.into());
        let ready = poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], limit.as_ref());
        if ready.map_err(failed)? == 0 {
            return Err(late());
        }
        let (stream, _) =
            self.listener.accept().map_err(LabError::io("take a QEMU's connection"))?;
        let name = self.path.display().to_string();
        let agent =
            Agent::new(stream).map_err(|source| LabError::Agent { name: name.clone(), source })?;
        let shell = Shell { agent, name };
        let call = shell.agent.ask(&Request::Hello { version: proto::VERSION });
        match call.and_then(|call| call.next(until)).map_err(|failure| shell.explain(failure))? {
            Reply::Hello { .. } => Ok(shell),
            other => Err(shell.explain(unexpected(&other))),
        }
    }
}

/// The agent of a guest that another program started.
#[derive(Debug)]
pub struct Shell {
    agent: Agent,
    name: String,
}

impl Shell {
    /// Runs a script that must succeed and returns its standard output without the last newline.
    ///
    /// # Errors
    /// It fails, or takes longer; the guest is gone.
    pub fn sh(&self, script: &str, time: Duration) -> Result<String, LabError> {
        self.run(script, time).map_err(|failure| self.explain(failure))?.ok()
    }

    fn run(&self, script: &str, time: Duration) -> Result<Output, Failure> {
        let until = Instant::now() + time;
        let timeout_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let call = self.agent.ask(&Request::Run { timeout_ms, script: script.into() })?;
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match call.next(until)? {
                Reply::Started { .. } => {}
                Reply::Stdout(bytes) => stdout.extend(bytes),
                Reply::Stderr(bytes) => stderr.extend(bytes),
                Reply::Exit { code, timed_out } => {
                    let (guest, script) = (self.name.clone(), script.into());
                    return Ok(Output { guest, script, code, timed_out, stdout, stderr });
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    fn explain(&self, failure: Failure) -> LabError {
        LabError::Refused(match failure {
            Failure::Gone => format!("the guest of {} is gone", self.name),
            Failure::Late => format!("the guest of {} is silent", self.name),
            Failure::Agent(error) => format!("the guest of {}: {error}", self.name),
        })
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.agent.close();
    }
}
