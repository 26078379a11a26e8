//! One module's thread: connections in, calls of the module, replies out.
//!
//! # Theory of operation
//! The thread sleeps until a connection has something, or the module asked to be woken. It reads what came
//! on all of them and hands it over in one call, as one batch; so transactions that commit at the same time
//! are one batch, and the sync after it makes all of them durable at once. While a sync runs, what comes
//! next waits in the sockets and is the next batch. Replies that need no sync leave before it.
//!
//! Clients whose connection goes by a ring are looked at, for a while, before the thread sleeps ([`rings`]).

mod calls;
mod frames;
mod inbox;
mod life;
mod rings;
mod room;
mod still;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::random::{OsRandom, Random};
use guest_abi::module::{MAGIC, MAX_BODY_BYTES, MAX_IN_FLIGHT, VERSION, Welcome, failure, kind};
use guest_abi::module_call::{ALIGN, Event, event};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventFlags};
use wasmtime::{Linker, Module};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::ModulesError;
use crate::budget::Purse;
use crate::clients::{Client, ClientId, Clients};
use crate::conn::{Bytes, Conn, failure as failed, frame};
use crate::control::Used;
use crate::deadline::Ticker;
use crate::folder::{Counts, Folder};
use crate::instance::{Limits, State};
use crate::limits::{LINGER, READ_BYTES};
use crate::ring::Slots;
use crate::share::CpuShare;
use crate::stats::Meter;

pub(crate) use self::inbox::{Copied, Inbox, Told};
use self::life::Life;
use self::rings::{Look, Rings};

/// A module as a process runs it.
pub(crate) struct Spec {
    pub name: String,
    pub module: Module,
    pub linker: Arc<Linker<State>>,
    pub limits: Limits,
    /// Share of a core, in percent.
    pub cpu_percent: u32,
    /// The modules of this VM, as a welcome lists them.
    pub list: Arc<Vec<u8>>,
    /// What its clients make it hold.
    pub purse: Arc<Purse>,
    /// Memory that clients may use in place of their sockets, and how long to look at it before sleeping.
    pub ring: Option<(Arc<Slots>, Duration)>,
    /// Requests of the guest are taken by it alone.
    pub needs_ring: bool,
    /// Is told how the first start went; an error: why it failed.
    pub started: Started,
    /// Is told what it did with its files.
    pub used: TellUsed,
}

/// Is told now and then; false: it could not be, and hears more later.
pub(crate) type TellUsed = Box<dyn FnMut(Used) -> bool + Send>;

/// Is told once.
pub(crate) type Started = Option<Box<dyn FnOnce(Result<(), String>) + Send>>;

/// The event of the inbox; connections have their place in the list.
const INBOX: u64 = u64::MAX;

/// Events of the kernel that are taken at a time.
const READY: usize = 256;

/// One module's thread.
pub(crate) struct Service {
    spec: Spec,
    inbox: Arc<Inbox>,
    epoll: OwnedFd,
    life: Life,
    /// Which life it is: random, and counted up.
    instance: u64,
    conns: Vec<Option<Conn>>,
    rings: Rings,
    clients: Clients,
    /// The connection whose frames are taken first.
    first: usize,
    /// Connections that have frames which did not fit in the last call.
    more: bool,
    /// Clients may have been without a connection for too long at this time.
    look_at: Option<Instant>,
    events: Vec<u8>,
    purse: Arc<Purse>,
    /// What a connection is read into at first.
    read: Box<[u8]>,
    meter: Meter,
    /// What was told to be used of the disk, and when.
    told_used: (Counts, Instant),
    /// Bytes that went by rings since then.
    ring_bytes: u64,
    /// Nothing is called up to here: somebody copies the files.
    held_until: Option<Instant>,
    share: Option<CpuShare>,
    /// Nothing is called up to here: it has computed too much.
    rests_until: Option<Instant>,
    /// When that was last looked at.
    share_at: Instant,
    ending: bool,
}

impl Service {
    /// On the thread that will run it. `epoll` is a set of its own.
    pub fn new(
        spec: Spec,
        folder: Folder,
        inbox: Arc<Inbox>,
        epoll: OwnedFd,
    ) -> Result<Self, ModulesError> {
        epoll::add(&epoll, &*inbox, epoll::EventData::new_u64(INBOX), EventFlags::IN)
            .map_err(ModulesError::io("watching the inbox"))?;
        let mut meter = Meter::default();
        meter.told.name.clone_from(&spec.name);
        let share = CpuShare::new(spec.cpu_percent);
        let purse = Arc::clone(&spec.purse);
        // What it looks for in vain would be taken off its share.
        let spin = spec.ring.as_ref().filter(|_| share.is_none()).map(|(_, spin)| *spin);
        let rings = Rings::new(spin.unwrap_or_default());
        Ok(Self {
            spec,
            inbox,
            epoll,
            life: Life::soon(folder),
            // Room for counting up, and never 0.
            instance: OsRandom.next_u64() >> 1 | 1,
            conns: Vec::new(),
            rings,
            clients: Clients::new(&purse),
            first: 0,
            more: false,
            look_at: None,
            events: Vec::new(),
            purse,
            read: vec![0; READ_BYTES].into(),
            meter,
            told_used: (Counts::default(), Instant::now()),
            ring_bytes: 0,
            held_until: None,
            share,
            rests_until: None,
            share_at: Instant::now(),
            ending: false,
        })
    }

    /// Serves until it is told to end. An error: without deadlines nothing is run.
    pub fn run(&mut self) -> Result<(), ModulesError> {
        let _ticker = Ticker::new(self.spec.module.engine())?;
        while !self.ending {
            self.end_pause();
            self.keep_alive();
            self.wait();
            self.expire();
            self.collect();
            self.call();
            self.flush_all();
            self.rest_between_calls();
            self.tell_used();
            self.keep_room();
        }
        self.finish();
        Ok(())
    }

    /// When there is something to do, whatever happens.
    fn due(&mut self) -> Option<Instant> {
        if self.more && !self.holds_requests() {
            return Some(Instant::now());
        }
        let pause = self.pause();
        let wake = match &mut self.life {
            _ if pause.is_some() => pause,
            Life::Running(instance) => instance.state().wake,
            Life::Waiting { until, .. } => Some(*until),
            Life::Over => None,
        };
        [wake, self.look_at].into_iter().flatten().min()
    }

    /// Sleeps until something happens, and takes it.
    fn wait(&mut self) {
        let until = self.due();
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let timeout = match self.look_at_rings(until) {
            Look::No => return,
            Look::Now => Some(Duration::ZERO),
            Look::Wait => until.map(left),
        };
        // Rounded up: a moment too early would be a turn for nothing.
        let round = |t: Duration| if t.is_zero() { t } else { t + Duration::from_micros(999) };
        let timeout = timeout.map(round);
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let mut room = [const { std::mem::MaybeUninit::uninit() }; READY];
        let ready: Vec<(u64, EventFlags)> =
            match epoll::wait(&self.epoll, &mut room[..], timeout.as_ref()) {
                Ok((events, _)) => events.iter().map(|e| (e.data.u64(), e.flags)).collect(),
                Err(_) => return,
            };
        for (data, flags) in ready {
            if data == INBOX {
                self.inbox.take().into_iter().for_each(|told| self.take(told));
            } else {
                self.on_ready(data as usize, flags);
            }
        }
    }

    fn take(&mut self, told: Told) {
        match told {
            Told::Connection { fd, client, of_guest } => self.connect(fd, client, of_guest),
            Told::GuestGone => self.guest_gone(),
            Told::Stats(to) => {
                // Whoever asked may have given up.
                let _ = to.try_send(self.stats());
            }
            Told::Copy(step, to) => (to.0)(self.copy_step(step)),
            Told::End => self.ending = true,
        }
    }

    fn on_ready(&mut self, at: usize, flags: EventFlags) {
        let Some(Some(conn)) = self.conns.get_mut(at) else { return };
        let readable = flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR);
        if conn.has_ring() {
            return self.on_bell(at);
        }
        self.more = true;
        if readable {
            self.fill(at);
        }
    }

    /// A connection said hello.
    fn connect(&mut self, fd: OwnedFd, id: ClientId, of_guest: bool) {
        let now = Instant::now();
        let found = self.clients.find(id, now).or_else(|| {
            let oldest = self.clients.longest_gone()?;
            self.close_client(oldest);
            self.clients.find(id, now)
        });
        let Some((number, new)) = found else {
            let text = "too many clients of this module are connected";
            let _ = crate::conn::last_words(&fd, &failed(kind::GOODBYE, 0, failure::LIMIT, text));
            return;
        };
        if let Some(old) = self.clients.get_mut(number).and_then(|c| c.conn) {
            self.goodbye(old, failure::REPLACED, "the same client has connected again");
        }
        let at = self.conns.iter().position(Option::is_none).unwrap_or(self.conns.len());
        let data = epoll::EventData::new_u64(at as u64);
        if let Err(e) = epoll::add(&self.epoll, &fd, data, EventFlags::IN) {
            if new {
                // Nobody was told of it.
                self.clients.remove(number);
            }
            return tracing::warn!(module = %self.spec.name, "watching a connection: {e}");
        }
        let mut conn = Conn::new(fd, number, &self.purse);
        conn.needs_ring = self.spec.needs_ring && of_guest;
        let Some(client) = self.clients.get_mut(number) else { return };
        (client.conn, client.of_guest) = (Some(at), of_guest);
        conn.push(welcome(self.instance, client.highest, &self.spec.list));
        match self.conns.get_mut(at) {
            Some(free) => *free = Some(conn),
            None => self.conns.push(Some(conn)),
        }
        if new {
            self.tell(event::OPENED, number, 0, &id);
        }
    }

    /// Says why, and closes once that is written, as far as it can be written at once.
    fn goodbye(&mut self, at: usize, code: u32, text: &str) {
        if let Some(conn) = self.conns.get_mut(at).and_then(Option::as_mut) {
            conn.push(failed(kind::GOODBYE, 0, code, text));
            let _ = conn.flush();
        }
        self.disconnect(at);
    }

    fn disconnect(&mut self, at: usize) {
        let Some(conn) = self.conns.get_mut(at).and_then(Option::take) else { return };
        self.rings.forget(at);
        self.meter.told.bells += conn.bells;
        self.ring_bytes += conn.ring_bytes;
        let _ = epoll::delete(&self.epoll, conn.as_fd());
        let now = Instant::now();
        self.clients.disconnected(conn.client, now);
        self.look_at.get_or_insert(now + LINGER);
    }

    /// What a guest's clients have ends with the guest: locks of transactions, too.
    fn guest_gone(&mut self) {
        let of_guest = |(number, client): (u32, &mut Client)| client.of_guest.then_some(number);
        let gone: Vec<u32> = self.clients.iter_mut().filter_map(of_guest).collect();
        for number in gone {
            if let Some(at) = self.clients.get_mut(number).and_then(|client| client.conn) {
                self.disconnect(at);
            }
            self.close_client(number);
        }
    }

    /// A client has gone for good.
    fn close_client(&mut self, number: u32) {
        if self.clients.remove(number).is_some() {
            self.tell(event::CLOSED, number, 0, &[]);
        }
    }

    /// Tells an instance, if there is one: the next one is told which clients there are.
    fn tell(&mut self, kind: u16, client: u32, seq: u64, body: &[u8]) {
        if matches!(self.life, Life::Running(_)) {
            push_event(&mut self.events, kind, 0, client, seq, body);
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        if self.look_at.is_none_or(|at| now < at) {
            return;
        }
        let (expired, next) = self.clients.expired(now);
        expired.into_iter().for_each(|number| self.close_client(number));
        self.look_at = next;
    }

    fn flush_all(&mut self) {
        for at in 0..self.conns.len() {
            let Some(conn) = &mut self.conns[at] else { continue };
            let had_output = conn.has_output();
            if had_output && let Err(lost) = conn.flush() {
                self.lost(at, &lost);
                continue;
            }
            self.ring_bytes += std::mem::take(&mut conn.ring_bytes);
            if conn.has_ring() && (had_output || conn.has_ring_input()) {
                self.rings.wake(at);
            }
            self.watch(at);
        }
    }

    /// Watches a connection for what it is to do next.
    fn watch(&mut self, at: usize) {
        let Some(conn) = &mut self.conns[at] else { return };
        if conn.ended {
            // It would be ready for ever, and may have to wait until its last frames are taken.
            if !std::mem::replace(&mut conn.forgotten, true) {
                let _ = epoll::delete(&self.epoll, conn.as_fd());
            }
            return;
        }
        // Bells are heard in any case.
        let by_ring = conn.has_ring();
        let wanted = (by_ring || conn.may_read(), !by_ring && conn.has_output());
        if wanted == conn.watched {
            return;
        }
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, wanted.0);
        flags.set(EventFlags::OUT, wanted.1);
        let data = epoll::EventData::new_u64(at as u64);
        if epoll::modify(&self.epoll, conn.as_fd(), data, flags).is_ok() {
            conn.watched = wanted;
        } else {
            self.disconnect(at);
        }
    }
}

/// Adds an event to the buffer of a call.
fn push_event(into: &mut Vec<u8>, kind: u16, flags: u16, client: u32, seq: u64, body: &[u8]) {
    let head = Event {
        len_bytes: U32::new(body.len() as u32),
        kind: U16::new(kind),
        flags: U16::new(flags),
        client: U32::new(client),
        reserved: U32::ZERO,
        seq: U64::new(seq),
    };
    into.extend_from_slice(head.as_bytes());
    into.extend_from_slice(body);
    into.resize(into.len().next_multiple_of(ALIGN), 0);
}

/// The answer to a hello. `list` has the modules.
pub(crate) fn welcome(instance: u64, known_seq: u64, list: &[u8]) -> Bytes {
    let modules = list.len() / size_of::<guest_abi::module::ModuleInfo>();
    let welcome = Welcome {
        magic: U64::new(MAGIC),
        version: U16::new(VERSION),
        modules: U16::new(modules as u16),
        max_in_flight: U32::new(MAX_IN_FLIGHT),
        max_body_bytes: U32::new(MAX_BODY_BYTES),
        linger_ms: U32::new(LINGER.as_millis() as u32),
        instance: U64::new(instance),
        known_seq: U64::new(known_seq),
    };
    frame(kind::WELCOME, 0, 0, &[welcome.as_bytes(), list])
}
