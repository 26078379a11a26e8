//! A VM's process of modules: a thread for each of them, and this one, which takes connections from
//! the daemon and reads their hellos.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use guest_abi::module::{MAX_NAME_BYTES, ModuleInfo};
use guest_abi::module_call::MAX_FILES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use wasmtime::{Linker, Module};
use zerocopy::IntoBytes;

use crate::ModulesError;
use crate::budget::{Pot, Purse};
use crate::control::{
    self, CopyStep, FromProcess, ModuleSetup, RingSetup, STATS_OF_MESSAGE, ToProcess,
};
use crate::engine;
use crate::folder::Folder;
use crate::folder::written::Written;
use crate::handshake::{Handshake, HelloResult, refuse, send_list};
use crate::instance::{self, Limits};
use crate::instance_state::State;
use crate::limits::{
    HELLO_TIMEOUT, MAX_CLIENTS, MAX_GREETING, MODULE_MEMORY_BYTES, OWN_MEMORY_BYTES, POT_BYTES,
    SHARE_BYTES,
};
use crate::lock;
use crate::ring::{Region, Slots};
use crate::sandbox;
use crate::service::{CopyAnswer, Inbox, Message, ReportDiskUse, ReportStart, Service, Spec};

/// Number of descriptors beside those of connections and files.
const OWN_FILES: usize = 256;

/// Limit of the time in which a module's thread tells its counters.
const STATS_TIMEOUT: Duration = Duration::from_millis(500);

/// Thread of a module.
struct ModuleThread {
    inbox: Arc<Inbox>,
    thread: JoinHandle<()>,
}

/// Runs until the daemon says so, or has gone. `control` is the socket to it.
///
/// # Errors
/// It cannot be set up; the daemon is told, too.
pub fn run(control: OwnedFd) -> Result<(), ModulesError> {
    let control = Arc::new(control);
    let modules = match set_up(&control) {
        Ok(Some(modules)) => modules,
        Ok(None) => return Ok(()),
        Err(e) => {
            let told = FromProcess::Failed(e.to_string());
            // It may have gone already.
            let _ = control::send(&*control, &told, &[], SendFlags::empty());
            return Err(e);
        }
    };
    control::send(&*control, &FromProcess::Ready, &[], SendFlags::empty())?;
    Acceptor { control, modules, handshakes: Vec::new() }.run();
    Ok(())
}

/// Ends the process, should a module's thread end when it was not told to, by a panic for example:
/// the daemon starts another process, and would else hand connections to nobody.
struct Abort;

impl Drop for Abort {
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// Modules of the process.
struct Modules {
    threads: HashMap<String, ModuleThread>,
    /// List of them, as a welcome has it.
    list: Arc<Vec<u8>>,
}

/// Code of a module, loaded: with an engine of its own, whose epoch its deadlines count up.
struct Loaded {
    module: Module,
    linker: Arc<Linker<State>>,
}

fn load(setup: &ModuleSetup, code: OwnedFd) -> Result<Loaded, ModulesError> {
    let engine = engine::engine()?;
    let module = engine::load_open(&engine, &setup.name, code.into())?;
    Ok(Loaded { module, linker: Arc::new(instance::linker(&engine)?) })
}

fn set_up(control: &Arc<OwnedFd>) -> Result<Option<Modules>, ModulesError> {
    let Some((ToProcess::Setup { vm, modules, ring, needs_ring }, mut fds)) =
        control::receive(&**control)?
    else {
        return Ok(None);
    };
    let region = ring.and_then(|ring| Some((ring, fds.pop()?)));
    if fds.len() != 2 * modules.len() {
        return Err(ModulesError::Control(format!("{} descriptors", fds.len())));
    }
    crate::deadline::init()?;
    // The first look at a clock finds the kernel's page of them, by a call that is not allowed
    // later.
    let _ = base::cpu::thread_time();
    let (mut fds, mut parts) = (fds.into_iter(), Vec::new());
    for setup in &modules {
        let (Some(code), Some(folder)) = (fds.next(), fds.next()) else { return Ok(None) };
        parts.push((load(setup, code)?, folder));
    }
    // Whoever has the folders is told to let go of them now, and not before.
    control::send(&**control, &FromProcess::Loaded, &[], SendFlags::empty())?;
    for (setup, (_, folder)) in modules.iter().zip(&parts) {
        let what = format!("the folder of module {}", setup.name);
        if !lock::wait_for(&what, folder, control)? {
            return Ok(None);
        }
    }
    let ring = match &region {
        Some((_, fd)) if !lock::wait_for("the memory for rings", fd, control)? => return Ok(None),
        Some((setup, fd)) => begin_rings(*setup, fd),
        None => None,
    };
    let list = Arc::new(list_modules(&modules)?);
    give_up_rights(&modules, &parts)?;
    let barrier = Arc::new(Barrier::new(modules.len() + 1));
    let (mut threads, pot) = (HashMap::new(), Pot::new(POT_BYTES));
    for (setup, (loaded, folder)) in modules.into_iter().zip(parts) {
        let name = setup.name.clone();
        let Loaded { module, linker } = loaded;
        let spec = Spec {
            name: name.clone(),
            module,
            linker,
            limits: Limits {
                deadline: Duration::from_millis(setup.deadline_ms.into()),
                memory_bytes: setup.memory_bytes,
            },
            cpu_percent: setup.cpu_percent,
            list: Arc::clone(&list),
            purse: Purse::new(&pot, SHARE_BYTES),
            ring: ring.clone(),
            needs_ring,
            report_start: report_start(&name, control),
            report_disk_use: report_disk_use(control),
        };
        threads.insert(name, start(spec, folder, setup.disk_bytes, &barrier)?);
    }
    // A thread that has just begun gives itself a name and a stack for signals: that is over here.
    barrier.wait();
    sandbox::leave_calls()?;
    // Only now a module's own code may run.
    barrier.wait();
    tracing::debug!(%vm, "modules of {vm} are confined");
    Ok(Some(Modules { threads, list }))
}

/// Gives up all rights that the modules do not need, but for system calls. Before there are
/// threads, which inherit that.
fn give_up_rights(
    modules: &[ModuleSetup],
    parts: &[(Loaded, OwnedFd)],
) -> Result<(), ModulesError> {
    let memory_bytes = modules
        .iter()
        .map(|m| m.memory_bytes + MODULE_MEMORY_BYTES + SHARE_BYTES as u64)
        .sum::<u64>()
        + OWN_MEMORY_BYTES
        + POT_BYTES as u64;
    // Whatever one module's clients and files take, the others have theirs.
    let files = modules.len() * (2 * MAX_CLIENTS + MAX_FILES) + MAX_GREETING + OWN_FILES;
    let largest = modules.iter().map(|m| m.disk_bytes).max().unwrap_or(0);
    sandbox::give_up_rights(memory_bytes, files as u64, largest)?;
    sandbox::leave_folders(parts.iter().map(|(_, folder)| folder.as_fd()))
}

/// Maps a region for rings: its slots, and how long to look at them. Without it clients have their
/// sockets, at most.
fn begin_rings(setup: RingSetup, fd: &OwnedFd) -> Option<(Arc<Slots>, Duration)> {
    let region = fd.try_clone().and_then(|fd| Region::map(fd, setup.bytes));
    let region =
        region.inspect_err(|e| tracing::error!("memory for rings cannot be mapped: {e}")).ok()?;
    Some((Slots::begin(region), Duration::from_micros(setup.spin_us.into())))
}

fn list_modules(modules: &[ModuleSetup]) -> Result<Vec<u8>, ModulesError> {
    let mut list = Vec::new();
    for setup in modules {
        let mut name = [0; MAX_NAME_BYTES];
        let bytes = setup.name.as_bytes();
        let room = name.get_mut(..bytes.len());
        let room = room.ok_or_else(|| ModulesError::Control(format!("name {}", setup.name)))?;
        room.copy_from_slice(bytes);
        let hash = engine::from_hex(&setup.hash)
            .ok_or_else(|| ModulesError::Control(format!("hash {}", setup.hash)))?;
        list.extend_from_slice(ModuleInfo { name, hash }.as_bytes());
    }
    Ok(list)
}

/// Reports to the daemon how a module's first start went.
fn report_start(name: &str, control: &Arc<OwnedFd>) -> ReportStart {
    let (module, control) = (name.to_owned(), Arc::clone(control));
    Some(Box::new(move |went: Result<(), String>| {
        let told = FromProcess::Started { module, failed: went.err() };
        // A daemon that has gone is noticed elsewhere.
        let _ = control::send(&*control, &told, &[], SendFlags::empty());
    }))
}

/// Reports to the daemon what was done with files. A daemon that is busy is told later.
fn report_disk_use(control: &Arc<OwnedFd>) -> ReportDiskUse {
    let control = Arc::clone(control);
    Box::new(move |used| {
        control::send(&*control, &FromProcess::Used(used), &[], SendFlags::DONTWAIT).is_ok()
    })
}

fn start(
    spec: Spec,
    folder: OwnedFd,
    disk_bytes: u64,
    barrier: &Arc<Barrier>,
) -> Result<ModuleThread, ModulesError> {
    let name = spec.name.clone();
    let inbox = Arc::new(Inbox::new()?);
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)
        .map_err(ModulesError::io("making an epoll set"))?;
    let folder = Folder::new(folder, disk_bytes)
        .map_err(ModulesError::io(format!("module {name}: reading its folder")))?;
    let (told, barrier) = (Arc::clone(&inbox), Arc::clone(barrier));
    let thread = std::thread::Builder::new()
        .name(format!("module-{name}"))
        .spawn(move || {
            barrier.wait();
            barrier.wait();
            let last_word = Abort;
            match Service::new(spec, folder, told, epoll).and_then(|mut service| service.run()) {
                Ok(()) => std::mem::forget(last_word),
                Err(e) => tracing::error!("{e}"),
            }
        })
        .map_err(ModulesError::io("starting a module's thread"))?;
    Ok(ModuleThread { inbox, thread })
}

/// Acceptor: takes connections until their hello is there.
struct Acceptor {
    control: Arc<OwnedFd>,
    modules: Modules,
    handshakes: Vec<Handshake>,
}

impl Acceptor {
    fn run(mut self) {
        while self.turn() {}
        let Modules { threads, .. } = self.modules;
        threads.values().for_each(|module| module.inbox.send(Message::End));
        for (name, module) in threads {
            if module.thread.join().is_err() {
                tracing::error!(module = %name, "the thread of module {name} panicked");
            }
        }
    }

    /// Waits for the daemon and for hellos. False: it is over.
    fn turn(&mut self) -> bool {
        let now = Instant::now();
        self.handshakes.retain(|g| now.duration_since(g.since) < HELLO_TIMEOUT);
        let mut fds = vec![PollFd::new(&*self.control, PollFlags::IN)];
        fds.extend(self.handshakes.iter().map(|g| PollFd::new(&g.fd, PollFlags::IN)));
        let oldest = self.handshakes.iter().map(|g| g.since + HELLO_TIMEOUT).min();
        let timeout = oldest.and_then(|at| {
            let left = at.saturating_duration_since(now) + Duration::from_millis(1);
            Timespec::try_from(left).ok()
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                tracing::error!("waiting for the daemon: {e}");
                return false;
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        // In order of their coming: the last one of a client is the one that counts.
        let mut gone = 0;
        for at in 0..self.handshakes.len() {
            if ready[at + 1] && self.hear(at - gone) {
                gone += 1;
            }
        }
        !ready[0] || self.on_daemon()
    }

    /// Reads a hello. True: the handshake is over.
    fn hear(&mut self, at: usize) -> bool {
        let heard =
            self.handshakes[at].read_hello(|module| self.modules.threads.contains_key(module));
        if matches!(heard, HelloResult::Partial) {
            return false;
        }
        let Handshake { fd, of_guest, .. } = self.handshakes.remove(at);
        match heard {
            HelloResult::Partial | HelloResult::Gone => {}
            HelloResult::List => send_list(&fd, &self.modules.list),
            HelloResult::Refused(code, text) => refuse(&fd, code, &text),
            HelloResult::Client { module, client } => {
                if let Some(thread) = self.modules.threads.get(&module) {
                    thread.inbox.send(Message::Connection { fd, client, of_guest });
                }
            }
        }
        true
    }

    fn on_daemon(&mut self) -> bool {
        match control::receive::<ToProcess>(&*self.control) {
            Ok(Some((ToProcess::Connection { of_guest }, fds))) => {
                for fd in fds {
                    if self.handshakes.len() >= MAX_GREETING {
                        self.handshakes.remove(0);
                    }
                    self.handshakes.push(Handshake::new(fd, of_guest));
                }
                true
            }
            Ok(Some((ToProcess::GuestGone, _))) => {
                self.handshakes.retain(|handshake| !handshake.of_guest);
                self.modules.threads.values().for_each(|m| m.inbox.send(Message::GuestGone));
                true
            }
            Ok(Some((ToProcess::Stats, _))) => self.tell_stats(),
            Ok(Some((ToProcess::Copy { module, turn, step }, _))) => {
                self.copy(&module, turn, step);
                true
            }
            Ok(Some((ToProcess::End | ToProcess::Setup { .. }, _)) | None) => false,
            Err(e) => {
                tracing::error!("{e}");
                false
            }
        }
    }

    /// A module that is in a call answers after it.
    fn copy(&self, module: &str, turn: u64, step: CopyStep) {
        let control = Arc::clone(&self.control);
        let tell = move |written: Result<Written, String>| {
            let told = FromProcess::Copied { turn, written };
            // A daemon that has gone is noticed elsewhere.
            let _ = control::send(&*control, &told, &[], SendFlags::empty());
        };
        match self.modules.threads.get(module) {
            Some(thread) => thread.inbox.send(Message::Copy(step, CopyAnswer(Box::new(tell)))),
            None => tell(Err(format!("there is no module {module}"))),
        }
    }

    fn tell_stats(&mut self) -> bool {
        let (sender, receiver) = sync_channel(self.modules.threads.len());
        let ask = |to: &SyncSender<_>, m: &ModuleThread| m.inbox.send(Message::Stats(to.clone()));
        self.modules.threads.values().for_each(|module| ask(&sender, module));
        drop(sender);
        let until = Instant::now() + STATS_TIMEOUT;
        let mut all = Vec::new();
        // A module in a long call is left out.
        while let Ok(stats) = receiver.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            all.push(stats);
        }
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        // None is an answer, too: the last message is there in any case.
        let at = all.len().saturating_sub(1) / STATS_OF_MESSAGE * STATS_OF_MESSAGE;
        let rest = all.split_off(at);
        let parts = all.chunks(STATS_OF_MESSAGE).map(|part| (part.to_vec(), false));
        parts.chain([(rest, true)]).all(|(stats, last)| {
            let told = FromProcess::Stats { stats, last };
            control::send(&*self.control, &told, &[], SendFlags::empty()).is_ok()
        })
    }
}
