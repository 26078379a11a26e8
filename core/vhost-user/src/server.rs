//! Thread of a port: takes one connection after the other, and runs a session on each.

use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::counter::QueueStats;
use base::event::Event;
use base::limits::{MAX_NAME_LEN_BYTES, MAX_QUEUES};
use base::peer_fd::PeerFd;
use base::sync::lock;
use queue::health::PortHealth;

use crate::device::Device;
use crate::endpoint::{Endpoint, Listener, dial};
use crate::error::VhostUserError;
use crate::failed_sessions::FailedSessions;
use crate::port_context::PortContext;
use crate::session::{End, FrontEndSession, Publisher};
use crate::session_store::SessionStore;
use crate::share::VmShare;
use crate::shared_memory::{MemoryCell, SharedRegion};
use crate::status::PortStatus;
use crate::wire::wait_for;

/// Stack of a session's thread: the deepest path (a message's control data, a JSON blob) needs
/// about 30 KiB; there may be a thousand such threads.
const STACK_LEN_BYTES: usize = 256 << 10;
/// First pause between two attempts to dial.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between two attempts to dial.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Time limit of a stop for the session's thread: longer than the limit for disks,
/// which give up before (20 s at a daemon's end).
const JOIN_LIMIT: Duration = Duration::from_secs(25);

/// Configuration of a port: its name, its endpoint, its budgets.
#[derive(Debug)]
pub struct PortConfig {
    /// Name of the port (`vm/port`): in logs, and in the holder.
    pub name: String,
    /// Endpoint of the front end.
    pub endpoint: Endpoint,
    /// Mode of the socket file, for [`Endpoint::Listen`].
    pub socket_mode: u32,
    /// Budgets shared with the other ports of the VM.
    pub share: VmShare,
}

/// Port with its thread, which ends when this is dropped (as by [`PortServer::stop`]).
pub struct PortServer {
    port: Arc<PortContext>,
    status: Arc<Mutex<PortStatus>>,
    memory: Arc<MemoryCell>,
    forget: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// Closed by the thread as it ends.
    ended: Mutex<Receiver<()>>,
    /// Time when the stop began.
    stop_began: OnceLock<Instant>,
}

impl std::fmt::Debug for PortServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortServer").field("port", &self.port.name).finish_non_exhaustive()
    }
}

/// Serves `device` at the configured place, from its own thread. A session that `session_store` has
/// for this name is gone on with first. `stats` has one entry per queue.
///
/// Fails when the configuration is wrong or the socket cannot be listened on; everything later is
/// in [`PortServer::status`].
pub fn serve_port(
    config: PortConfig,
    device: Arc<dyn Device>,
    stats: Vec<Arc<QueueStats>>,
    session_store: Arc<dyn SessionStore>,
) -> Result<PortServer, VhostUserError> {
    check_port(&config, device.as_ref(), stats.len())?;
    let endpoint = config.endpoint.describe();
    let source = ConnectionSource::new(config.endpoint, config.socket_mode)?;
    let status = PortStatus {
        name: config.name.clone(),
        kind: device.kind().name(),
        endpoint,
        ..PortStatus::default()
    };
    let new_event = || Event::new().map_err(VhostUserError::std_io("making an eventfd"));
    let alarm = new_event()?;
    let health = PortHealth::new(&config.name);
    health.set_alarm(alarm.try_clone().map_err(VhostUserError::std_io("duplicating an eventfd"))?);
    let port = Arc::new(PortContext {
        health,
        alarm,
        share: config.share,
        name: config.name,
        device,
        stats,
        session_store,
        stop: new_event()?,
        stopping: AtomicBool::new(false),
        slowed: AtomicU64::new(0),
    });
    let (alive, ended) = channel();
    let mut server = PortServer {
        port: port.clone(),
        status: Arc::new(Mutex::new(status)),
        memory: Arc::default(),
        forget: Arc::default(),
        thread: None,
        ended: Mutex::new(ended),
        stop_began: OnceLock::new(),
    };
    let (status, forget) = (server.status.clone(), server.forget.clone());
    let (memory, failed) = (server.memory.clone(), FailedSessions::default());
    let mut port_thread = PortThread { port, status, memory, forget, source, failed };
    let thread = std::thread::Builder::new()
        .name("vhost-user".to_owned())
        .stack_size(STACK_LEN_BYTES)
        .spawn(move || {
            port_thread.run();
            drop((port_thread, alive));
        })
        .map_err(VhostUserError::std_io("starting a session thread"))?;
    server.thread = Some(thread);
    Ok(server)
}

fn check_port(
    config: &PortConfig,
    device: &dyn Device,
    stats: usize,
) -> Result<(), VhostUserError> {
    let bad = |what, value: String, rule: String| {
        Err(VhostUserError::BadPort { port: config.name.clone(), what, value, rule })
    };
    let name = config.name.len();
    if name == 0 || name > 2 * MAX_NAME_LEN_BYTES + 1 {
        let rule = format!("1 to {} bytes", 2 * MAX_NAME_LEN_BYTES + 1);
        return bad("the name's length", name.to_string(), rule);
    }
    let queues = device.queue_count();
    if queues == 0 || queues > MAX_QUEUES {
        return bad("the number of queues", queues.to_string(), format!("1 to {MAX_QUEUES}"));
    }
    if stats != usize::from(queues) {
        return bad(
            "the number of counters",
            stats.to_string(),
            format!("one for each of {queues} queues"),
        );
    }
    Ok(())
}

impl PortServer {
    /// Returns the port's status.
    pub fn status(&self) -> PortStatus {
        let mut status = lock(&self.status).clone();
        status.broken = self.port.health.reason();
        status.log_lines_left_out = self.port.health.log().left_out();
        status.slowed = self.port.slowed.load(Ordering::Relaxed);
        status
    }

    /// Returns the memory table of the connected front end, empty before it has sent one; none
    /// while none is connected.
    pub fn memory(&self) -> Option<Arc<[SharedRegion]>> {
        self.memory.get()
    }

    /// Calls `watcher` from the session's thread whenever [`PortServer::memory`] has changed, and
    /// so also when a front end connects or is gone. It must not wait. What was before is not told:
    /// look once after this. There is one watcher; another one replaces it.
    pub fn watch_memory(&self, watcher: Arc<dyn Fn() + Send + Sync>) {
        self.memory.watch(watcher);
    }

    /// Health of the port, shared with its queues.
    pub fn health(&self) -> Arc<PortHealth> {
        self.port.health.clone()
    }

    /// Ends the session and the thread; on return nothing is in flight. A session that the holder
    /// has stays there, for the next daemon; without a holder the front end sees a disconnect.
    pub fn stop(self) {
        drop(self);
    }

    /// Stops as [`PortServer::stop`] does, but the holder forgets the session: the front end sees a
    /// disconnect.
    pub fn stop_and_forget(self) {
        self.begin_stop(true);
        drop(self);
    }

    /// Begins what [`PortServer::stop`] waits for, or [`PortServer::stop_and_forget`]: of many
    /// ports that end, one that is slow does not add its time to that of the others.
    pub fn begin_stop(&self, forget: bool) {
        self.stop_began.get_or_init(Instant::now);
        if forget {
            self.forget.store(true, Ordering::SeqCst);
        }
        self.port.stopping.store(true, Ordering::SeqCst);
        if let Err(error) = self.port.stop.signal() {
            tracing::error!(port = %self.port.name, "cannot stop the session thread: {error}");
        }
    }

    /// Waits until the port serves no more by itself: only a port on a connected
    /// [`Endpoint::Fd`] does.
    pub fn wait(mut self) {
        // Never sent to: it returns when the thread ends.
        let _ = self.ended().recv();
        self.join();
    }

    fn ended(&mut self) -> &mut Receiver<()> {
        self.ended.get_mut().unwrap_or_else(|e| e.into_inner())
    }

    /// Waits for the end of the thread, but not for ever: whoever stops a port may hold up others.
    fn join(&mut self) {
        let waited = self.stop_began.get().map(Instant::elapsed).unwrap_or_default();
        let limit = JOIN_LIMIT.saturating_sub(waited);
        if self.ended().recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(
                port = %self.port.name,
                "the session thread does not end within {} s; it is left behind, with what it has",
                JOIN_LIMIT.as_secs()
            );
            self.thread = None;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(port = %self.port.name, "the session thread panicked");
        }
    }
}

impl Drop for PortServer {
    fn drop(&mut self) {
        self.begin_stop(false);
        self.join();
    }
}

/// Runs `session` to its end, a panic included.
fn guarded(session: impl FnOnce() -> End) -> End {
    catch_unwind(AssertUnwindSafe(session))
        .unwrap_or_else(|panic| End::Panicked(base::panic::message(&*panic).to_owned()))
}

/// ConnectionSource of the next connection.
enum ConnectionSource {
    Listener(Listener),
    Dial { path: PathBuf, pause: Duration },
    Socket(Option<PeerFd>),
}

impl ConnectionSource {
    fn new(endpoint: Endpoint, mode: u32) -> Result<Self, VhostUserError> {
        Ok(match endpoint {
            Endpoint::Listen(path) => Self::Listener(Listener::bind(&path, mode)?),
            Endpoint::Dial(path) => Self::Dial { path, pause: Duration::ZERO },
            Endpoint::Fd(fd) => {
                let listens = rustix::net::sockopt::socket_acceptconn(&fd)
                    .map_err(VhostUserError::io("looking at the socket descriptor"))?;
                if listens {
                    let listener = Listener::from_fd(fd);
                    Self::Listener(
                        listener.map_err(VhostUserError::std_io("the listening socket"))?,
                    )
                } else {
                    Self::Socket(Some(fd.into()))
                }
            }
        })
    }

    fn listener(&self) -> Option<&Listener> {
        match self {
            Self::Listener(listener) => Some(listener),
            _ => None,
        }
    }
}

/// State of the port's thread.
struct PortThread {
    port: Arc<PortContext>,
    status: Arc<Mutex<PortStatus>>,
    memory: Arc<MemoryCell>,
    forget: Arc<AtomicBool>,
    source: ConnectionSource,
    failed: FailedSessions,
}

impl PortThread {
    fn run(&mut self) {
        if let Some(session) = self.take_over() {
            self.serve(session);
        }
        while !self.port.is_stopping() {
            let socket = match self.next_connection() {
                Ok(Some(socket)) => socket,
                Ok(None) => break,
                Err(error) => {
                    self.note_error(&error);
                    // Out of descriptors, most likely; do not spin.
                    self.pause(LONGEST_PAUSE);
                    continue;
                }
            };
            match FrontEndSession::new(self.port.clone(), socket, self.publisher()) {
                Ok(session) => self.serve(session),
                Err(error) => self.note_error(&error),
            }
        }
        if self.forget.load(Ordering::SeqCst)
            && let Err(error) = self.port.session_store.forget(&self.port.name)
        {
            tracing::warn!(port = %self.port.name, "the holder still has the session: {error}");
        }
        lock(&self.status).finished = true;
    }

    /// Takes over the session of an earlier daemon, if the store has one that can go on.
    fn take_over(&mut self) -> Option<FrontEndSession> {
        let name = &self.port.name;
        let (saved, fds) = match self.port.session_store.load(name) {
            Ok(found) => found?,
            Err(error) => {
                self.note_error(&error);
                return None;
            }
        };
        match FrontEndSession::restore(self.port.clone(), &saved, fds, self.publisher()) {
            Ok(session) => {
                tracing::info!(port = %name, "going on with the session of an earlier daemon");
                lock(&self.status).resumed += 1;
                Some(session)
            }
            Err(error) => {
                self.note_error(&error);
                if let Err(error) = self.port.session_store.forget(name) {
                    self.note_error(&error);
                }
                None
            }
        }
    }

    fn serve(&mut self, mut session: FrontEndSession) {
        let few = self.failed.is_few();
        let left_out = few.then(|| self.port.health.log().admit()).flatten();
        let is_logged = left_out.is_some();
        if is_logged {
            tracing::info!(port = %self.port.name, left_out, "front end connected");
        }
        let mut status = lock(&self.status);
        status.connected = true;
        status.sessions += 1;
        drop(status);
        let begin = Instant::now();
        let end = guarded(|| session.run(|socket| self.idle(socket)));
        let mut status = lock(&self.status);
        status.disconnected();
        status.last_error = None;
        drop(status);
        self.memory.clear();
        base::trim::note();
        match end {
            End::Closed => {
                if is_logged {
                    tracing::info!(port = %self.port.name, "front end disconnected");
                }
                self.shorten_pause(begin.elapsed(), session.is_heard());
            }
            End::Stopped => {}
            // The pause goes on growing: dialling a front end that we cannot talk to is no use.
            End::Failed(error) if is_logged => self.note_error(&error),
            End::Failed(error) => lock(&self.status).last_error = Some(error.to_string()),
            End::Panicked(what) => self.clean_up_after_panic(what),
        }
        self.note_failed(&session);
        // Last: a front end that sees the hang-up finds the reason in the status.
        drop(session);
        // One that comes and goes does not send many messages, and has as much done.
        self.port.keep_pace(0);
    }

    /// Cleans up after a session that panicked: its queues stop, its front end may come again.
    fn clean_up_after_panic(&self, what: String) {
        let error = VhostUserError::Panicked(what);
        self.port.health.fail(None, &error);
        self.note_error(&error);
        lock(&self.status).panics += 1;
        let device = &self.port.device;
        let ended = guarded(|| {
            device.session_ends(false);
            device.set_notifier(None);
            device.connected(false);
            device.reset();
            End::Stopped
        });
        if let End::Panicked(what) = ended {
            tracing::error!(port = %self.port.name, "the device panicked, too: {what}");
        }
        if let Err(error) = self.port.session_store.forget(&self.port.name) {
            self.note_error(&error);
        }
    }

    /// Logs now and then that a front end comes and goes for ever, with the likely reason.
    fn note_failed(&mut self, session: &FrontEndSession) {
        let has_served = session.has_served() || self.port.is_stopping();
        let is_due = self.failed.note(has_served, Instant::now());
        if self.failed.is_few() {
            return;
        }
        let mut status = lock(&self.status);
        let reason = status.last_error.take().unwrap_or_else(|| session.reason_to_leave());
        let error = VhostUserError::Fruitless { count: self.failed.count(), reason };
        if is_due {
            tracing::warn!(port = %self.port.name, "{error}");
        }
        status.last_error = Some(error.to_string());
    }

    /// Shortens the pause after a real session: dial again at once, or soon when it was short. A
    /// front end that accepts, says nothing and closes is dialled ever more seldom.
    fn shorten_pause(&mut self, lived: Duration, heard: bool) {
        if let ConnectionSource::Dial { pause, .. } = &mut self.source {
            match (lived >= LONGEST_PAUSE, heard) {
                (true, _) => *pause = Duration::ZERO,
                (false, true) => *pause = FIRST_PAUSE,
                (false, false) => {}
            }
        }
    }

    fn note_error(&self, error: &VhostUserError) {
        if let Some(left_out) = self.port.health.log().admit() {
            tracing::warn!(port = %self.port.name, left_out, "{error}");
        }
        lock(&self.status).last_error = Some(error.to_string());
    }

    fn publisher(&self) -> Publisher {
        let (status, memory) = (self.status.clone(), self.memory.clone());
        Box::new(move |session| {
            session.describe(&mut lock(&status));
            memory.publish(session.regions());
        })
    }

    /// Waits for the next connection; none when there will be none any more.
    fn next_connection(&mut self) -> Result<Option<PeerFd>, VhostUserError> {
        self.pause(self.failed.pause());
        loop {
            if self.port.is_stopping() {
                return Ok(None);
            }
            let (path, wait) = match &mut self.source {
                ConnectionSource::Socket(socket) => return Ok(socket.take()),
                ConnectionSource::Listener(listener) => match listener.accept()? {
                    Some(socket) => return Ok(Some(socket)),
                    None => {
                        wait_for(&[listener.as_fd(), self.port.stop.as_fd()], None)?;
                        continue;
                    }
                },
                ConnectionSource::Dial { path, pause } => {
                    let wait = *pause;
                    *pause = (*pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                    (path.clone(), wait)
                }
            };
            self.pause(wait);
            if self.port.is_stopping() {
                return Ok(None);
            }
            if let Some(socket) = dial(&path)? {
                return Ok(Some(socket));
            }
        }
    }

    /// Waits, but not longer than until the stop.
    fn pause(&self, wait: Duration) {
        if wait > Duration::ZERO {
            // A failed poll is a short pause.
            let _ = wait_for(&[self.port.stop.as_fd()], Some(wait));
        }
    }

    /// Waits until the session's socket has something or the port breaks, sending away whoever else
    /// comes.
    fn idle(&self, socket: BorrowedFd<'_>) -> Result<(), VhostUserError> {
        let (stop, alarm) = (self.port.stop.as_fd(), self.port.alarm.as_fd());
        let Some(listener) = self.source.listener() else {
            return wait_for(&[socket, stop, alarm], None).map(drop);
        };
        let ready = wait_for(&[socket, stop, listener.as_fd(), alarm], None)?;
        // What the session's socket says comes first: when the front end has hung up and come
        // again, the new connection is not a second one.
        if ready[0] || !ready[2] || self.port.is_stopping() {
            return Ok(());
        }
        // It may have done so while the poll went from the one to the other.
        if wait_for(&[socket], Some(Duration::ZERO))?[0] {
            return Ok(());
        }
        match listener.accept() {
            Ok(None) => {}
            Ok(Some(second)) => {
                lock(&self.status).refused += 1;
                second.hang_up();
                if let Some(left_out) = self.port.health.log().admit() {
                    tracing::warn!(
                        port = %self.port.name,
                        left_out,
                        "second connection refused: one front end is connected"
                    );
                }
                self.port.keep_pace(0);
            }
            Err(error) => {
                // Out of descriptors or memory: no reason to end the session that works. The
                // stranger stays in the queue, so it is not looked at for a while.
                tracing::warn!(port = %self.port.name, "second connection not accepted: {error}");
                wait_for(&[socket, stop], Some(LONGEST_PAUSE))?;
            }
        }
        Ok(())
    }
}
