//! The holder: the command that is one, and how the daemon finds or starts one.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use config::{Config, HolderConfig};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::process::Signal;
use vhost_user::holder::HolderStore;
use vhost_user::{NullStore, SessionStore};

use crate::{cli, exit, hand_over, log, process};

/// Longest time until a started holder listens: it does nothing else before.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two attempts to reach a holder that starts.
const START_POLL: Duration = Duration::from_millis(5);

/// `millrace holder`.
pub fn run(args: &cli::Holder) -> anyhow::Result<u8> {
    log::init("info", false)?;
    if args.detach {
        // Leaves the daemon's session and folder, so that neither its terminal nor a file system
        // that is to be unmounted takes the holder along.
        rustix::process::setsid().context("leaving the daemon's session")?;
        std::env::set_current_dir("/").context("changing to /")?;
    }
    vhost_user::holder::run(&args.socket)?;
    Ok(exit::OK)
}

/// Session store of this daemon, and the holders behind it.
pub struct Holders {
    /// Store that the ports use.
    pub session_store: Arc<dyn SessionStore>,
    /// The holder's socket, if there is one.
    pub socket: Option<PathBuf>,
    /// Sockets of holders that earlier daemons used, and that had something at the start.
    pub before: Vec<PathBuf>,
}

/// Finds or starts the holder that the config names. Where it names none, `default` is taken if it
/// is there: that must not keep ports from their VMs.
pub fn open_session_store(config: &Config, default: Option<&Path>) -> anyhow::Result<Holders> {
    let (session_store, socket) = match (&config.daemon.holder, default) {
        (HolderConfig::Default, Some(path)) => external(path).unwrap_or_else(|e| {
            let why = process::describe(&e);
            tracing::error!("{why}; a restart of the daemon will disconnect the VMMs");
            nobody()
        }),
        _ => configured(config)?,
    };
    let (run_dir, own) = (&config.daemon.run_dir, own_socket(config));
    let (session_store, before) =
        hand_over::with_earlier_holders(run_dir, &own, session_store, socket.as_deref());
    Ok(Holders { session_store, socket, before })
}

/// Socket of the holder that a daemon starts itself.
fn own_socket(config: &Config) -> PathBuf {
    config.daemon.run_dir.join("holder.sock")
}

/// Session store, and the socket of its holder.
type Configured = (Arc<dyn SessionStore>, Option<PathBuf>);

fn nobody() -> Configured {
    (Arc::new(NullStore), None)
}

/// Waits for a holder that is started elsewhere, such as by its unit. One that starts together with
/// this daemon may not listen yet: its unit does not say when.
fn external(path: &Path) -> anyhow::Result<Configured> {
    let session_store = HolderStore::new(path.into());
    let late = format!(
        "no holder answers on {} (daemon.holder): start millrace-holder.service, or for a daemon run by \
         hand write `holder = true`",
        path.display()
    );
    wait_until_it_answers(&session_store, late, || Ok(()))?;
    Ok((Arc::new(session_store), Some(path.into())))
}

fn configured(config: &Config) -> anyhow::Result<Configured> {
    let path = match &config.daemon.holder {
        HolderConfig::Default | HolderConfig::None => return Ok(nobody()),
        HolderConfig::External(path) => return external(path),
        HolderConfig::Own => {
            let path = own_socket(config);
            start_own(&path)?;
            path
        }
    };
    Ok((Arc::new(HolderStore::new(path.clone())), Some(path)))
}

/// Drops kept sessions whose port is not in `names` any more: their VMMs see a disconnect instead
/// of a device that never answers.
pub fn forget_others(path: &Path, names: &HashSet<String>) {
    let session_store = HolderStore::new(path.into());
    let kept = session_store.list().unwrap_or_else(|e| {
        tracing::error!("listing the holder's sessions: {e}");
        Vec::new()
    });
    for name in kept.iter().filter(|n| !names.contains(*n)) {
        tracing::warn!(port = %name, "the holder has a session of a port that is gone; dropped");
        if let Err(e) = session_store.forget(name) {
            tracing::error!(port = %name, "dropping the session: {e}");
        }
    }
}

/// Finds the holder of an earlier daemon, or starts one.
fn start_own(path: &Path) -> anyhow::Result<()> {
    let session_store = HolderStore::new(path.into());
    if session_store.list().is_ok() {
        tracing::info!("found the holder on {}", path.display());
        return Ok(());
    }
    let program = std::env::current_exe().context("finding this program for the holder")?;
    let mut child = Command::new(&program)
        .arg("holder")
        .arg("--detach")
        .arg("--socket")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // Its own service manager socket would make systemd take its messages for ours.
        .env_remove("NOTIFY_SOCKET")
        .spawn()
        .with_context(|| format!("starting {} holder", program.display()))?;
    let late = "the holder does not answer".into();
    let answers = wait_until_it_answers(&session_store, late, || {
        match child.try_wait().context("waiting for the holder")? {
            Some(status) => bail!("the holder ended at once: {status}"),
            None => Ok(()),
        }
    });
    if answers.is_err() {
        // Fails only when it has ended already.
        let _ = child.kill();
    }
    answers?;
    tracing::info!(process = child.id(), "started a holder on {}", path.display());
    watch(child);
    Ok(())
}

/// Waits until the holder answers. Ends early, with its error, when `check` fails; after
/// [`START_TIMEOUT`] the error begins with `late`.
fn wait_until_it_answers(
    session_store: &HolderStore,
    late: String,
    mut check: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        let Err(last) = session_store.list() else {
            return Ok(());
        };
        check()?;
        if begin.elapsed() > START_TIMEOUT {
            return Err(last).context(late);
        }
        std::thread::sleep(START_POLL);
    }
}

/// Ends a daemon's own holder that is not used any more, once it has nothing left.
pub fn end_left(run_dir: &Path, before: &[PathBuf]) {
    for path in before.iter().filter(|path| path.starts_with(run_dir)) {
        if HolderStore::new(path.clone()).list().is_ok_and(|left| left.is_empty()) {
            end_own(path);
        }
    }
}

/// Ends the holder that we, or a daemon before us, started on `path`: nothing is to be kept.
pub fn end_own(path: &Path) {
    if let Err(e) = end(path) {
        tracing::error!("ending the holder on {}: {}", path.display(), process::describe(&e));
    }
}

fn end(path: &Path) -> anyhow::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    base::socket::connect(&socket, path).context("reaching it")?;
    // The process that listens; it is alive, since it was connected to.
    let holder = socket_peercred(&socket).context("asking who it is")?;
    rustix::process::kill_process(holder.pid, Signal::TERM).context("ending its process")?;
    std::fs::remove_file(path).context("removing its socket")
}

/// Logs an error when the holder ends before the daemon.
fn watch(mut child: Child) {
    let watcher = std::thread::Builder::new().name("holder-watch".into()).spawn(move || {
        let ended = child.wait();
        tracing::error!(?ended, "the holder ended: a restart will disconnect the VMMs");
    });
    if let Err(e) = watcher {
        tracing::warn!("no thread to watch the holder: {e}");
    }
}
