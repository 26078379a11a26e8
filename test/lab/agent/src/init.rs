//! Process 1 of a small VM: mounts, modules, then the agent as its child.
//!
//! The kernel command line steers it: `lab.name=NAME` (host name), `lab.mods=a,b` (modules to load
//! besides the agent's own, in this order, with what they need), `lab.root=vda` (mount that disk
//! and run all commands inside it).

use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::mount::{MountFlags, mount, mount_bind};

use crate::{AgentError, modprobe, serve};

const PATH: &str = "/sbin:/usr/sbin:/bin:/usr/bin";

/// Runs as process 1 and never returns to the kernel: when something fails, the text goes to the
/// console (where the lab looks for `lab-init:`) and the VM ends.
pub fn main() -> ! {
    if let Err(error) = start() {
        eprintln!("lab-init: {error}");
    }
    shutdown()
}

/// Flushes the file systems and powers the VM off.
pub fn shutdown() -> ! {
    rustix::fs::sync();
    if let Err(error) = rustix::system::reboot(rustix::system::RebootCommand::PowerOff) {
        eprintln!("lab-init: power off: {error}");
    }
    loop {
        sleep(Duration::from_secs(3600));
    }
}

fn start() -> Result<(), AgentError> {
    mount_basics()?;
    let cmdline =
        fs::read_to_string("/proc/cmdline").map_err(AgentError::file("read", "/proc/cmdline"))?;
    let option = |name: &str| {
        cmdline.split_ascii_whitespace().find_map(|word| word.strip_prefix(name)).unwrap_or("")
    };
    let name = option("lab.name=");
    rustix::system::sethostname(name.as_bytes())
        .map_err(|error| AgentError::io(format!("host name {name:?}"))(error.into()))?;
    // A guest answers on its IPv6 addresses at once instead of after a second's detection.
    for scope in ["default", "all"] {
        let path = format!("/proc/sys/net/ipv6/conf/{scope}/accept_dad");
        fs::write(&path, "0").map_err(AgentError::file("write", &path))?;
    }
    let mut modules = vec!["virtio_pci", "virtio_console"];
    modules.extend(option("lab.mods=").split(',').filter(|name| !name.is_empty()));
    for module in modules {
        modprobe::load(module)?;
    }
    let up = Command::new("/bin/busybox").args(["ip", "link", "set", "lo", "up"]).status();
    up.map_err(AgentError::io("bring the loopback up"))?;
    let root = match option("lab.root=") {
        "" => None,
        disk => Some(mount_root(disk)?),
    };
    run_and_reap(root.as_deref())
}

fn mount_at(source: &str, target: &str, kind: &str) -> Result<(), AgentError> {
    fs::create_dir_all(target).map_err(AgentError::file("create folder", target))?;
    mount(source, target, kind, MountFlags::empty(), None)
        .map_err(|error| AgentError::file("mount", target)(error.into()))
}

fn mount_basics() -> Result<(), AgentError> {
    mount_at("proc", "/proc", "proc")?;
    mount_at("sysfs", "/sys", "sysfs")?;
    // The kernel may have mounted it already.
    if !Path::new("/dev/null").exists() {
        mount_at("devtmpfs", "/dev", "devtmpfs")?;
    }
    mount_at("devpts", "/dev/pts", "devpts")?;
    mount_at("tmpfs", "/dev/shm", "tmpfs")?;
    mount_at("tmpfs", "/tmp", "tmpfs")?;
    mount_at("tmpfs", "/run", "tmpfs")
}

/// Mounts a root disk with the guest's own kernel file systems inside.
fn mount_root(disk: &str) -> Result<PathBuf, AgentError> {
    let device = format!("/dev/{disk}");
    wait_for("a root disk", || Path::new(&device).exists().then_some(()))?;
    mount_at(&device, "/newroot", "ext4")?;
    for folder in ["proc", "sys", "dev", "run", "tmp"] {
        let inside = format!("/newroot/{folder}");
        fs::create_dir_all(&inside).map_err(AgentError::file("create folder", &inside))?;
        rustix::mount::mount_bind_recursive(format!("/{folder}"), &inside)
            .map_err(|error| AgentError::file("bind", &inside)(error.into()))?;
    }
    // The agent's own program stays reachable inside.
    let lab = "/newroot/lab";
    fs::create_dir_all(lab).map_err(AgentError::file("create folder", lab))?;
    mount_bind("/lab", lab).map_err(|error| AgentError::file("bind", lab)(error.into()))?;
    Ok("/newroot".into())
}

/// Starts the agent and reaps every process until the agent itself ends, which ends the VM.
fn run_and_reap(root: Option<&Path>) -> Result<(), AgentError> {
    let mut agent = Command::new("/proc/self/exe");
    agent.arg0("agent").arg("serve").env("PATH", PATH).env("HOME", "/root").stdin(Stdio::null());
    if let Some(root) = root {
        agent.arg(root);
    }
    let agent = agent.spawn().map_err(AgentError::io("start the agent"))?;
    let agent = rustix::process::Pid::from_child(&agent);
    loop {
        match rustix::process::wait(rustix::process::WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == agent => {
                let status = std::process::ExitStatus::from_raw(status.as_raw());
                return Err(AgentError::Refused(format!("the agent ended: {status}")));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(AgentError::io("wait for children")(error.into())),
        }
    }
}

/// Serves the host on the first virtio-serial port; with `root`, commands and files live there.
///
/// # Errors
/// The port does not appear within 10 s, or the protocol breaks.
pub fn serve_port(root: Option<&str>) -> Result<(), AgentError> {
    let path = wait_for("a virtio-serial port /dev/vport*p1", agent_port)?;
    let port = File::options()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(AgentError::file("open", &path))?;
    if let Some(root) = root {
        rustix::process::chroot(root)
            .map_err(|error| AgentError::file("chroot", root)(error.into()))?;
        rustix::process::chdir("/")
            .map_err(|error| AgentError::file("chdir", "/")(error.into()))?;
    }
    let to = port.try_clone().map_err(AgentError::file("duplicate", &path))?;
    serve::serve(port, to)
}

fn agent_port() -> Option<PathBuf> {
    let ports = fs::read_dir("/dev").ok()?;
    ports.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with("vport") && name.ends_with("p1")
    })
}

/// Looks every 2 ms for up to 10 s: devtmpfs has no event that a program without udev could wait
/// for.
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, AgentError> {
    for _ in 0..5000 {
        if let Some(found) = look() {
            return Ok(found);
        }
        sleep(Duration::from_millis(2));
    }
    Err(AgentError::Refused(format!("{what} did not appear within 10 s")))
}
