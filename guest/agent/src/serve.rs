//! Socket for programs, with a thread for each of their connections.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, Permissions};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use base::sync::lock;
use guest_abi::Reason;
use guest_abi::program::{MAGIC, Request, VERSION, flag, op};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg,
    send, shutdown, socket_with,
};
use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

use crate::AgentError;
use crate::disks::Disks;
use crate::host::{Dial, Host};
use crate::lease::Leases;
use crate::line::Heartbeat;
use crate::log::log;
use crate::measure::{self, BreakEven};
use crate::outcome::PipeOutcome;
use crate::refusals::Refusals;
use crate::request;
use crate::shared::Shared;
use crate::sys;
use crate::wake::Wake;

/// Most connections of programs at a time.
pub const MAX_CONNECTIONS: usize = 256;
/// Most connections of one user other than root.
pub const MAX_USER_CONNECTIONS: usize = 128;
/// Time after which a connection without a request is closed.
pub const IDLE_TIME: Duration = Duration::from_secs(30);
/// Time that the daemon has, when the agent stops, to end the pipes.
const STOP_TIME: Duration = Duration::from_secs(10);
/// Connections that wait in the kernel.
const BACKLOG: i32 = 128;
/// Pause before the next try when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Stack of a connection's thread: it holds no large values.
const STACK_BYTES: usize = 128 << 10;

/// Settings of an agent.
#[derive(Debug)]
pub struct Config<D> {
    /// Path of the socket to which programs connect.
    pub socket: PathBuf,
    /// Method to reach the daemon.
    pub dial: D,
    /// Whether stacked devices are accepted, see [`Disks::new`]: only for tests. Then only
    /// [`Agent::measure`] measures.
    pub any_device: bool,
    /// Heartbeat of the stream to the daemon.
    pub heartbeat: Heartbeat,
    /// Secret that identifies the agent to the daemon; empty: none.
    pub secret: Vec<u8>,
}

/// Running agent. Stops when dropped.
#[derive(Debug)]
pub struct Agent {
    server: Arc<Server>,
    accepting: Option<JoinHandle<()>>,
    socket: PathBuf,
}

#[derive(Debug)]
struct Server {
    shared: Shared,
    users: Mutex<Users>,
    /// Signalled when a connection has ended.
    left: Condvar,
    /// Wakes the accepting thread.
    wake: Wake,
    break_even: BreakEven,
    /// Whether the agent measures the break-even size by itself.
    measures: bool,
}

/// Users whose programs are connected.
#[derive(Debug, Default)]
struct Users {
    count: HashMap<u32, usize>,
    wakes: Vec<Weak<Wake>>,
    all: usize,
}

impl Agent {
    /// Listens for programs and begins to connect to the daemon.
    ///
    /// # Errors
    /// Another agent listens there; the socket cannot be made.
    pub fn start(config: Config<impl Dial>) -> Result<Self, AgentError> {
        let listener = listen_at(&config.socket)?;
        let host = Host::start(config.dial, config.heartbeat, config.secret)
            .map_err(AgentError::io("start a thread"))?;
        let shared = Shared {
            refusals: Refusals::start(host.clone()).map_err(AgentError::io("start a thread"))?,
            host,
            disks: Disks::new(config.any_device),
            leases: Leases::start().map_err(AgentError::io("listen for lease breaks"))?,
            stopping: AtomicBool::new(false),
        };
        let wake = Wake::new().map_err(AgentError::io("make an eventfd"))?;
        let (users, left, break_even) = Default::default();
        let measures = !config.any_device;
        let server = Arc::new(Server { shared, users, left, wake, break_even, measures });
        let accepting = server.clone();
        let accepting = thread::Builder::new()
            .name("accept".into())
            .spawn(move || accepting.accept_all(&listener))
            .map_err(AgentError::io("start a thread"))?;
        Ok(Self { server, accepting: Some(accepting), socket: config.socket })
    }

    /// Measures the break-even size of pipes ([`measure`]) on a file system, by its device number,
    /// in a thread of its own. Does nothing if a measurement was begun on this stream to the
    /// daemon. The agent does it by itself after the first pipe of a file.
    pub fn measure(&self, device: u64) {
        self.server.measure(device);
    }

    /// Ends all pipes and waits for them, for a limited time; then ends the rest.
    fn stop(&mut self) {
        let server = &self.server;
        server.shared.stopping.store(true, Ordering::Release);
        server.wake.ring();
        if let Some(accepting) = self.accepting.take() {
            // The thread has no result, and a panic was logged already.
            let _ = accepting.join();
        }
        let _ = fs::remove_file(&self.socket);
        let users = lock(&server.users);
        users.wakes.iter().filter_map(Weak::upgrade).for_each(|wake| wake.ring());
        let some = |users: &mut Users| users.all > 0;
        let waited = server.left.wait_timeout_while(users, STOP_TIME, some);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        server.shared.refusals.stop();
        server.shared.host.stop();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Makes the folder and the socket. Removes the socket of a dead agent.
fn listen_at(path: &Path) -> Result<OwnedFd, AgentError> {
    let what = format!("listen on {}", path.display());
    let errno = |error: Errno| AgentError::io(&what)(error);
    let new = || {
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(errno)
    };
    if let Some(folder) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o755).create(folder);
        made.map_err(AgentError::io(format!("make {}", folder.display())))?;
    }
    let address = SocketAddrUnix::new(path).map_err(errno)?;
    match connect(&new()?, &address) {
        Ok(()) => return Err(AgentError::Served(path.display().to_string())),
        Err(Errno::NOENT) => {}
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(AgentError::io(&what))?,
        Err(error) => return Err(errno(error)),
    }
    let listener = new()?;
    bind(&listener, &address).map_err(errno)?;
    fs::set_permissions(path, Permissions::from_mode(0o666)).map_err(AgentError::io(&what))?;
    listen(&listener, BACKLOG).map_err(errno)?;
    // A connection may end before it is accepted.
    rustix::io::ioctl_fionbio(&listener, true).map_err(errno)?;
    Ok(listener)
}

impl Server {
    fn accept_all(self: &Arc<Self>, listener: &OwnedFd) {
        while !self.shared.stopping.load(Ordering::Acquire) {
            match accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(program) => self.take(program),
                Err(Errno::AGAIN) => {
                    let listener = PollFd::new(listener, PollFlags::IN);
                    // The loop covers an interrupted poll.
                    let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN), listener], None);
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    log(format_args!("accept a connection of a program: {error}"));
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
        while let Ok(program) = accept_with(listener, SocketFlags::CLOEXEC) {
            refuse(&program);
        }
    }

    /// Starts a thread for a connection, or refuses it.
    fn take(self: &Arc<Self>, program: OwnedFd) {
        let Ok([_, user, _]) = sys::peer_credentials(program.as_fd()) else { return };
        let wake = Wake::new().ok().map(Arc::new);
        let program = Arc::new(program);
        let started = wake.filter(|wake| lock(&self.users).enter(user, wake)).is_some_and(|wake| {
            let (server, program) = (self.clone(), program.clone());
            let thread = thread::Builder::new().name("program".into()).stack_size(STACK_BYTES);
            let slot = ConnectionSlot { server, user };
            thread
                .spawn(move || {
                    slot.server.serve(&program, &wake);
                    drop(program);
                })
                .is_ok()
        });
        if !started {
            self.shared.refusals.count(Reason::AgentBusy);
            refuse(&program);
        }
    }

    /// Serves the requests of a program, one after the other.
    fn serve(self: &Arc<Self>, program: &OwnedFd, wake: &Arc<Wake>) {
        while self.wait_for_request(program, wake) {
            let Some((request, fds)) = receive(program) else { return };
            // Read before the pipe closes the descriptor.
            let device = fds.first().filter(|_| self.measures).and_then(device_of);
            let moved = self.handle(&request, fds, program, wake);
            let is_query = request.op.get() == op::QUERY && moved.reason == Reason::Complete;
            let least = if is_query { self.break_even_kib() } else { 0 };
            if !answer(program, moved, least) {
                return;
            }
            if let Some(device) = device.filter(|_| moved.bytes > 0) {
                self.measure(device);
            }
        }
        refuse(program);
    }

    /// Break-even size in KiB; 0: not known.
    fn break_even_kib(&self) -> u32 {
        self.shared.host.line().map_or(0, |line| self.break_even.kib(line.generation))
    }

    /// Measures like [`Agent::measure`].
    fn measure(self: &Arc<Self>, device: u64) {
        let Ok(generation) = self.shared.host.line().map(|line| line.generation) else { return };
        if !self.break_even.begin(generation) {
            return;
        }
        let server = self.clone();
        let measuring = move || match server.try_measure(device) {
            Ok(kib) => server.break_even.set(generation, kib),
            Err(error) => {
                log(format_args!("the break-even size of pipes could not be measured: {error}"))
            }
        };
        if let Err(error) = thread::Builder::new().name("measure".into()).spawn(measuring) {
            log(format_args!("the break-even size of pipes could not be measured: {error}"));
        }
    }

    /// Measures over a connection like that of a program.
    fn try_measure(self: &Arc<Self>, device: u64) -> std::io::Result<u32> {
        let (program, own) = measure::connection()?;
        let wake = Arc::new(Wake::new()?);
        let server = self.clone();
        let serving = thread::Builder::new().name("measured".into()).stack_size(STACK_BYTES);
        serving.spawn(move || server.serve(&own, &wake))?;
        measure::measure(device, &program)
    }

    /// Waits for a request. Returns false when none comes for long, or the agent stops.
    fn wait_for_request(&self, program: &OwnedFd, wake: &Arc<Wake>) -> bool {
        let time = Timespec::try_from(IDLE_TIME).ok();
        loop {
            if self.shared.stopping.load(Ordering::Acquire) {
                return false;
            }
            let mut fds =
                [PollFd::new(program, PollFlags::IN), PollFd::new(&**wake, PollFlags::IN)];
            match poll(&mut fds, time.as_ref()) {
                Ok(0) => return false,
                Ok(_) if !fds[0].revents().is_empty() => return true,
                // Rung for a pipe that is over, or for the end.
                Ok(_) => wake.clear(),
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    fn handle(
        &self,
        request: &Request,
        fds: Vec<OwnedFd>,
        program: &OwnedFd,
        wake: &Arc<Wake>,
    ) -> PipeOutcome {
        let known = request.magic.get() == MAGIC && request.version.get() == VERSION;
        if !known || request.flags.get() & !flag::BEHIND != 0 {
            return self.shared.refuse(Reason::Malformed);
        }
        match (request.op.get(), <[OwnedFd; 2]>::try_from(fds)) {
            (op::PIPE, Ok([source, sink])) => {
                request::run(&self.shared, request, (source, sink), program.as_fd(), wake)
            }
            (op::QUERY, Err(fds)) if fds.is_empty() => {
                PipeOutcome::nothing(self.shared.host.line().err().unwrap_or(Reason::Complete))
            }
            _ => self.shared.refuse(Reason::Malformed),
        }
    }
}

/// Slot of a connection among the limits; free again when dropped.
struct ConnectionSlot {
    server: Arc<Server>,
    user: u32,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        lock(&self.server.users).leave(self.user);
        self.server.left.notify_all();
    }
}

impl Users {
    fn enter(&mut self, user: u32, wake: &Arc<Wake>) -> bool {
        let most = if user == 0 { MAX_CONNECTIONS } else { MAX_USER_CONNECTIONS };
        let count = self.count.get(&user).copied().unwrap_or(0);
        if self.all >= MAX_CONNECTIONS || count >= most {
            return false;
        }
        self.count.insert(user, count + 1);
        self.all += 1;
        self.wakes.retain(|wake| wake.strong_count() > 0);
        self.wakes.push(Arc::downgrade(wake));
        true
    }

    fn leave(&mut self, user: u32) {
        self.all -= 1;
        match self.count.get_mut(&user) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.count.remove(&user)),
        }
    }
}

/// Receives a request with its descriptors; none when the program has gone. A request of another
/// length, or with more descriptors, becomes a malformed one.
fn receive(program: &OwnedFd) -> Option<(Request, Vec<OwnedFd>)> {
    let mut bytes = [0; size_of::<Request>() + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        match recvmsg(program, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(_) => return None,
            Ok(got) => break got,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 {
        return None;
    }
    let cut = got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let mut request = Request::new_zeroed();
    if got.bytes == size_of::<Request>() && !cut {
        request.as_mut_bytes().copy_from_slice(&bytes[..got.bytes]);
    }
    Some((request, fds))
}

/// Ends a connection. A program whose request is received and not answered must assume that bytes
/// were moved. So the kernel receives no more requests, those that wait are answered, and so is the
/// one that may be sent next.
fn refuse(program: &OwnedFd) {
    // Fails when the program has exited.
    let _ = shutdown(program, Shutdown::Read);
    let busy = || answer(program, PipeOutcome::nothing(Reason::AgentBusy), 0);
    while busy() && receive(program).is_some() {}
}

/// Device number of the file system of a regular file.
fn device_of(fd: &OwnedFd) -> Option<u64> {
    let stat = fstat(fd).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some(stat.st_dev)
}

/// Sends an answer. Returns false when the program has exited. Never waits: a program that reads no
/// answers counts as exited.
fn answer(program: &OwnedFd, moved: PipeOutcome, min_bytes_kib: u32) -> bool {
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut answer = moved.answer();
    answer.min_bytes_kib = U32::new(min_bytes_kib);
    send(program, answer.as_bytes(), flags).is_ok()
}
