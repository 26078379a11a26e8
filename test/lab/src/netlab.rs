//! A private network namespace with bridges and TAPs.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process::{DIE_WITH_PARENT, run, spawn};
use crate::{LabError, apt};

/// A network namespace that lives as long as this value and the processes in it. Its name is only
/// a process id, so nothing is left behind even after a SIGKILL, and two labs never meet.
#[derive(Debug)]
pub struct NetLab {
    /// `cat` in the namespace; it ends when its input pipe closes with this process.
    keeper: Child,
}

impl NetLab {
    /// Makes the namespace and brings its loopback up. Needs root.
    ///
    /// # Errors
    /// Not root, or a program is missing.
    pub fn new() -> Result<Self, LabError> {
        let mut command = Command::new(DIE_WITH_PARENT[0]);
        command.args(&DIE_WITH_PARENT[1..]).args(["unshare", "--net", "cat"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut keeper = spawn(command)?;
        // The echo says that `unshare` has done its work and `cat` runs inside.
        let mut echo = [0; 1];
        let answered = match (&mut keeper.stdin, &mut keeper.stdout) {
            (Some(to), Some(from)) => to.write_all(b"x").and_then(|()| from.read_exact(&mut echo)),
            _ => Ok(()),
        };
        let mut lab = Self { keeper };
        if let Err(error) = answered {
            let mut said = String::new();
            if let Some(mut stderr) = lab.keeper.stderr.take() {
                // Only for the text of the error that is already certain.
                let _ = stderr.read_to_string(&mut said);
            }
            let what = format!("make a network namespace: {}", said.trim());
            return Err(LabError::io(what)(error));
        }
        lab.ip(&["link", "set", "lo", "up"])?;
        Ok(lab)
    }

    /// The namespace's file, for `setns`.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.keeper.id()).into()
    }

    /// A command that will run in the namespace.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg(program);
        command
    }

    /// Runs `ip` with some arguments in the namespace.
    ///
    /// # Errors
    /// `ip`'s own text.
    pub fn ip(&self, arguments: &[&str]) -> Result<(), LabError> {
        apt::need("ip")?;
        run(self.command("ip").args(arguments)).map(|_| ())
    }

    /// Makes a bridge that forwards at once (no spanning tree, no multicast snooping).
    ///
    /// # Errors
    /// The name is taken or the kernel refuses.
    pub fn bridge(&self, name: &str) -> Result<(), LabError> {
        let options = ["type", "bridge", "stp_state", "0", "forward_delay", "0"];
        self.ip(&[&["link", "add", name][..], &options, &["mcast_snooping", "0"]].concat())?;
        self.ip(&["link", "set", name, "up"])
    }

    /// Makes a TAP that QEMU or a daemon can open, up, and in a bridge if one is named.
    ///
    /// # Errors
    /// The name is taken or the kernel refuses.
    pub fn tap(&self, name: &str, bridge: Option<&str>) -> Result<(), LabError> {
        self.ip(&["tuntap", "add", "dev", name, "mode", "tap", "vnet_hdr"])?;
        match bridge {
            Some(bridge) => self.ip(&["link", "set", name, "master", bridge, "up"]),
            None => self.ip(&["link", "set", name, "up"]),
        }
    }

    /// Gives an interface of the namespace an address such as `10.0.0.254/24`.
    ///
    /// # Errors
    /// `ip`'s own text.
    pub fn address(&self, ifname: &str, address: &str) -> Result<(), LabError> {
        // "nodad" belongs to IPv6 only.
        let nodad: &[&str] = if address.contains(':') { &["nodad"] } else { &[] };
        self.ip(&[&["addr", "add", address, "dev", ifname], nodad].concat())
    }

    /// Runs a closure in a thread that has moved into the namespace; sockets it opens belong there
    /// for ever.
    ///
    /// # Errors
    /// The thread cannot move; a panic of the closure.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, LabError> {
        let path = self.path();
        let what = format!("enter {}", path.display());
        let namespace = File::open(&path).map_err(LabError::io(&what))?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                use std::os::fd::AsFd;
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), network).map(|()| work())
            });
            match thread.join() {
                Ok(done) => done.map_err(|error| LabError::io(what)(error.into())),
                Err(_) => Err(LabError::Refused("the closure in the namespace panicked".into())),
            }
        })
    }
}

impl Drop for NetLab {
    fn drop(&mut self) {
        // It is a plain `cat`; when it is gone already there is nothing to do.
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}
