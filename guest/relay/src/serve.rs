//! Relay: accepts programs' connections, and gives each its turn. One thread.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use guest_abi::module::MAX_NAME_BYTES;
use guest_abi::stream::CHUNK_BYTES;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt::set_tcp_nodelay};

use crate::address::{Listen, module_name};
use crate::client::new_id;
use crate::error::RelayError;
use crate::link::{Link, Plan, Turn, Turning};
use crate::log::log;
use crate::poller::{Poller, Ready};
use crate::session::Session;

/// Most connections of programs by default.
pub const MAX_CONNECTIONS: usize = 256;
/// Period of the timer while there are links.
const TICK: Duration = Duration::from_secs(1);
/// Period of the timer while a link waits for the host, or for its end.
const SOON: Duration = Duration::from_millis(50);

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST: u64 = 2;

/// Settings of a relay.
#[derive(Debug)]
pub struct Config {
    /// Settings that all connections share.
    pub plan: Plan,
    /// Name of the module.
    pub module: String,
    /// Address at which programs connect.
    pub listen: Listen,
    /// Mode of a Unix socket.
    pub mode: u32,
    /// Most connections.
    pub max_connections: usize,
}

/// Relay that listens.
#[derive(Debug)]
pub struct Relay {
    plan: Plan,
    module: [u8; MAX_NAME_BYTES],
    listener: OwnedFd,
    is_tcp: bool,
    can_accept: bool,
    max_connections: usize,
    poller: Poller,
    links: Vec<Option<Box<Link>>>,
    again: VecDeque<usize>,
    scratch: Vec<u8>,
    ticked_at: Instant,
    told_at: Option<Instant>,
    untold: u64,
}

impl Relay {
    /// Listens.
    ///
    /// # Errors
    /// The address cannot be had.
    pub fn new(config: Config) -> Result<Self, RelayError> {
        let module = module_name(&config.module)?;
        let listener = listen(&config.listen, config.mode)?;
        let io = RelayError::io::<io::Error>;
        let poller = Poller::new().map_err(io("wait for connections"))?;
        poller.add(&listener, LISTENER).map_err(io("wait for connections"))?;
        Ok(Self {
            plan: config.plan,
            module,
            listener,
            is_tcp: matches!(config.listen, Listen::Tcp(_)),
            can_accept: true,
            max_connections: config.max_connections,
            poller,
            links: Vec::new(),
            again: VecDeque::new(),
            scratch: vec![0; CHUNK_BYTES],
            ticked_at: Instant::now(),
            told_at: None,
            untold: 0,
        })
    }

    /// Address of the TCP listener, for tests that let the kernel choose a port.
    ///
    /// # Errors
    /// It is no TCP address.
    pub fn tcp_address(&self) -> io::Result<std::net::SocketAddr> {
        TcpListener::from(self.listener.try_clone()?).local_addr()
    }

    /// Serves until `stop` can be read.
    ///
    /// # Errors
    /// Waiting is not possible.
    pub fn run(mut self, stop: UnixStream) -> Result<(), RelayError> {
        let io = RelayError::io::<io::Error>;
        self.poller.add(&stop, STOP).map_err(io("wait for signals"))?;
        let mut ready = Vec::new();
        loop {
            let timeout = self.timeout();
            self.poller.wait(timeout, &mut ready).map_err(io("wait for connections"))?;
            for event in ready.drain(..) {
                match event.token {
                    LISTENER => self.can_accept = true,
                    STOP if !event.can_read => {}
                    STOP => {
                        self.links.iter_mut().flatten().for_each(|link| link.end());
                        return Ok(());
                    }
                    _ => self.mark(event),
                }
            }
            self.accept();
            self.turns();
            self.tick();
        }
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let mut links = self.links.iter().flatten();
        let has_room = self.count() < self.max_connections;
        if (self.can_accept && has_room) || links.any(|link| link.is_waiting()) {
            return Some(SOON);
        }
        (self.count() > 0).then_some(TICK)
    }

    fn count(&self) -> usize {
        self.links.iter().flatten().count()
    }

    fn mark(&mut self, event: Ready) {
        let (index, is_host) = ((event.token - FIRST) / 2, (event.token - FIRST) % 2 == 1);
        let index = index as usize;
        let Some(Some(link)) = self.links.get_mut(index) else { return };
        if is_host {
            link.host_ready(event)
        } else {
            link.local_ready(event)
        }
        self.again.push_back(index);
    }

    /// Accepts connections while there is room.
    fn accept(&mut self) {
        while self.can_accept && self.count() < self.max_connections {
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    if let Err(error) = self.open(socket) {
                        self.log_limited(&format!("take a connection: {error}"));
                    }
                }
                Err(Errno::AGAIN) => self.can_accept = false,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // Out of descriptors: tried again soon.
                Err(error) => {
                    self.log_limited(&format!("take a connection: {error}"));
                    return;
                }
            }
        }
    }

    fn open(&mut self, socket: OwnedFd) -> io::Result<()> {
        if self.is_tcp {
            set_tcp_nodelay(&socket, true)?;
        }
        let free = self.links.iter().position(Option::is_none);
        let index = free.unwrap_or(self.links.len());
        let token = FIRST + 2 * index as u64;
        self.poller.add(&socket, token)?;
        let session = Session::new(new_id()?, self.module);
        let link = Link::new(socket, session, token + 1, &self.plan, Instant::now());
        match self.links.get_mut(index) {
            Some(place) => *place = Some(Box::new(link)),
            None => self.links.push(Some(Box::new(link))),
        }
        self.again.push_back(index);
        Ok(())
    }

    /// Gives each link with work one turn.
    fn turns(&mut self) {
        for _ in 0..self.again.len() {
            let Some(index) = self.again.pop_front() else { return };
            self.turn(index, |link, turning| link.turn(turning));
        }
    }

    /// Checks the time limits of all links.
    fn tick(&mut self) {
        let now = Instant::now();
        let is_time = now.saturating_duration_since(self.ticked_at) >= TICK;
        for index in 0..self.links.len() {
            let is_waiting = self.links[index].as_ref().is_some_and(|link| link.is_waiting());
            if is_time || is_waiting {
                self.turn(index, |link, turning| {
                    link.tick(turning.plan, turning.now)?;
                    link.turn(turning)
                });
            }
        }
        if is_time {
            self.ticked_at = now;
        }
    }

    fn turn(
        &mut self,
        index: usize,
        does: impl FnOnce(&mut Link, &mut Turning<'_>) -> Result<Turn, RelayError>,
    ) {
        let Some(Some(link)) = self.links.get_mut(index) else { return };
        let (plan, poller, now) = (&self.plan, &self.poller, Instant::now());
        match does(link, &mut Turning { plan, poller, now, scratch: &mut self.scratch }) {
            Ok(Turn::Idle) => {}
            Ok(Turn::Again) => self.again.push_back(index),
            Ok(Turn::Done) => self.links[index] = None,
            Err(error) => {
                self.links[index] = None;
                self.log_limited(&error.to_string());
            }
        }
    }

    /// Logs at most one line a second.
    fn log_limited(&mut self, text: &str) {
        if self.told_at.is_some_and(|at| at.elapsed() < TICK) {
            self.untold += 1;
            return;
        }
        match std::mem::take(&mut self.untold) {
            0 => log(format_args!("millrace-relay: {text}")),
            n => log(format_args!("millrace-relay: {text} ({n} lines before it left out)")),
        }
        self.told_at = Some(Instant::now());
    }
}

fn listen(address: &Listen, mode: u32) -> Result<OwnedFd, RelayError> {
    let listening = |error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse => RelayError::Taken(address.to_string()),
        _ => RelayError::io(format!("listen at {address}"))(error),
    };
    match address {
        Listen::Tcp(tcp) => {
            let listener = TcpListener::bind(tcp).map_err(listening)?;
            listener.set_nonblocking(true).map_err(listening)?;
            Ok(listener.into())
        }
        Listen::Unix(path) => {
            remove_stale(path).map_err(listening)?;
            let listener = UnixListener::bind(path).map_err(listening)?;
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(listening)?;
            listener.set_nonblocking(true).map_err(listening)?;
            Ok(listener.into())
        }
    }
}

/// Removes a socket without a listener, and nothing else.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if !found.file_type().is_socket() => Err(io::ErrorKind::AlreadyExists.into()),
        Ok(_) => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
            _ => Err(io::ErrorKind::AddrInUse.into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_and_a_file_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let at = Listen::Unix(path.clone());
        let live = listen(&at, 0o600).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&at, 0o600), Err(RelayError::Taken(_))));
        drop(live);
        listen(&at, 0o666).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        assert!(listen(&at, 0o600).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
    }
}
