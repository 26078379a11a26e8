//! Front ends of ports that were not started: they are turned away at once, and the log says why.
//! Without this a VMM finds no socket, and libvirt waits for it without a word.
//!
//! One thread listens for all such ports.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use base::event::Event;
use base::peer_fd::PeerFd;
use base::socket::{self, SocketFile};
use base::sync::lock;
use config::{EndpointConfig, SocketMode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketFlags;

/// Front ends that wait while another one of their port was just turned away.
const BACKLOG: i32 = 8;

/// Pause between two front ends of a port: one that comes again at once keeps neither its VMM nor
/// us busy.
const PAUSE: Duration = Duration::from_secs(1);

/// Pause between two lines in the log for a port.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// The ports that turn front ends away, and their thread.
pub struct TurnedAway(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Event,
}

#[derive(Default)]
struct State {
    doors: Vec<Arc<Door>>,
    is_stopped: bool,
}

struct Door {
    name: String,
    why: String,
    /// Listening socket; it may hold connections that were not accepted, and bytes and descriptors
    /// sent on them.
    listener: PeerFd,
}

/// A port's socket while nothing is behind it. Its path is free once this is dropped.
pub struct Closed {
    shared: Arc<Shared>,
    door: Arc<Door>,
    _file: SocketFile,
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.shared.change(|state| state.doors.retain(|door| !Arc::ptr_eq(door, &self.door)));
    }
}

impl TurnedAway {
    /// Starts the thread.
    pub fn start() -> anyhow::Result<Self> {
        let changed = Event::new().context("making an eventfd")?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed });
        let run = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("millrace-away".into());
        thread.spawn(move || run.run()).context("starting a thread for ports that do not run")?;
        Ok(Self(shared))
    }

    /// Listens for a port that was not started. Nothing where the VMM listens, or the socket cannot
    /// be made.
    pub fn listen(
        &self,
        name: &str,
        endpoint: &EndpointConfig,
        mode: u32,
        why: &str,
    ) -> Option<Closed> {
        if endpoint.mode == SocketMode::Dial {
            return None;
        }
        let bound = socket::listen(&endpoint.socket, mode, BACKLOG);
        let (listener, _file) = bound
            .inspect_err(|e| tracing::debug!(port = %name, "no socket to turn away at: {e}"))
            .ok()?;
        let door = Arc::new(Door { name: name.into(), why: why.into(), listener: listener.into() });
        self.0.change(|state| state.doors.push(Arc::clone(&door)));
        Some(Closed { shared: Arc::clone(&self.0), door, _file })
    }
}

impl Drop for TurnedAway {
    fn drop(&mut self) {
        self.0.change(|state| state.is_stopped = true);
    }
}

/// A door, and when the thread last looked at it.
struct Watched {
    door: Arc<Door>,
    /// Time before which it is not looked at.
    open_at: Instant,
    log_at: Instant,
    /// Front ends turned away since the last line in the log.
    count: u64,
}

impl Watched {
    fn new(door: Arc<Door>) -> Self {
        let now = Instant::now();
        Self { door, open_at: now, log_at: now, count: 0 }
    }

    /// Takes one front end, says why, and closes its connection.
    fn turn_away(&mut self) {
        let now = Instant::now();
        self.open_at = now + PAUSE;
        let accepted = rustix::net::accept_with(&self.door.listener, SocketFlags::CLOEXEC);
        // It went by itself, or there is no descriptor for it: it is looked at again.
        let Ok(front_end) = accepted.map(PeerFd::from) else { return };
        self.count += 1;
        if self.log_at <= now {
            let Door { name, why, .. } = &*self.door;
            tracing::error!(
                port = %name,
                times = self.count,
                "a front end was turned away, since the port was not started: {why}"
            );
            (self.log_at, self.count) = (now + LOG_PAUSE, 0);
        }
        // Last: who sees the end finds the reason in the log.
        front_end.hang_up();
    }
}

impl Shared {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut lock(&self.state));
        if let Err(e) = self.changed.signal() {
            tracing::error!("waking the thread for ports that do not run: {e}");
        }
    }

    fn run(&self) {
        let mut watched: Vec<Watched> = Vec::new();
        loop {
            {
                let state = lock(&self.state);
                if state.is_stopped {
                    return;
                }
                watched.retain(|w| state.doors.iter().any(|door| Arc::ptr_eq(door, &w.door)));
                for door in &state.doors {
                    if !watched.iter().any(|w| Arc::ptr_eq(&w.door, door)) {
                        watched.push(Watched::new(Arc::clone(door)));
                    }
                }
            }
            self.wait(&mut watched);
        }
    }

    /// Waits for front ends at doors that are open, for the next one that opens, or for a change.
    fn wait(&self, watched: &mut [Watched]) {
        let now = Instant::now();
        let next = watched.iter().map(|w| w.open_at).filter(|at| *at > now).min();
        let limit = next.and_then(|at| Timespec::try_from(at - now).ok());
        let mut open: Vec<&mut Watched> = watched.iter_mut().filter(|w| w.open_at <= now).collect();
        let listeners = open.iter().map(|w| PollFd::new(&w.door.listener, PollFlags::IN));
        let mut fds: Vec<_> =
            listeners.chain([PollFd::new(&self.changed, PollFlags::IN)]).collect();
        if let Err(e) = poll(&mut fds, limit.as_ref())
            && e != rustix::io::Errno::INTR
        {
            tracing::error!("waiting at ports that do not run: {e}");
            std::thread::sleep(PAUSE);
        }
        let came: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        for (watched, _) in open.iter_mut().zip(came).filter(|(_, came)| *came) {
            watched.turn_away();
        }
        self.changed.drain();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn front_ends_are_turned_away_until_the_port_is_started() {
        let dir = tempfile::tempdir().unwrap();
        let away = TurnedAway::start().unwrap();
        let endpoint = |name: &str, mode| EndpointConfig { socket: dir.path().join(name), mode };
        let listen = |name: &str, mode| away.listen(name, &endpoint(name, mode), 0o600, "no image");
        let [a, b] = ["a", "b"].map(|name| listen(name, SocketMode::Listen).unwrap());
        assert!(listen("c", SocketMode::Dial).is_none());
        assert!(listen("a", SocketMode::Listen).is_none(), "its path is taken");
        for name in ["a", "b", "a"] {
            let mut front = UnixStream::connect(dir.path().join(name)).unwrap();
            assert_eq!(front.read(&mut [0]).unwrap(), 0, "the VMM sees the end at once");
        }
        drop(a);
        assert!(!dir.path().join("a").exists());
        // The path is free at once.
        let again = listen("a", SocketMode::Listen).unwrap();
        drop((again, b));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    }
}
