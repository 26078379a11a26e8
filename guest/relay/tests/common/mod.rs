//! The host's side of the protocol in this process, with faults on demand.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use guest_abi::module::{
    Failure, Frame, Hello, MAGIC, MAX_BODY_BYTES, MAX_IN_FLIGHT, ModuleInfo, VERSION, Welcome,
    failure, flag, kind,
};
use relay::Address;
use relay::raw::{self, Inbox, Received};
use tempfile::TempDir;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Faults of the host.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// One of this many requests breaks the connection, before it, behind it or within its reply.
    pub break_one_of: Option<u64>,
    /// Replies wait for others and come in the opposite order.
    pub reorder: bool,
    /// Replies have a wrong check.
    pub wrong_check: bool,
    /// No request is answered.
    pub is_silent: bool,
    /// Failure with which each connection ends instead of a welcome.
    pub goodbye: Option<u32>,
}

/// Module of the fake host.
pub trait Serve: Send {
    fn opened(&mut self, _client: u32) {}
    fn request(&mut self, client: u32, seq: u64, body: &[u8]) -> Result<Vec<u8>, u32>;
    fn closed(&mut self, _client: u32) {}
}

/// Client as the host knows it.
#[derive(Debug, Default)]
struct Known {
    number: u32,
    last_seq: u64,
    kept: BTreeMap<u64, Result<Vec<u8>, u32>>,
    connection: u64,
}

pub struct State {
    module: Box<dyn Serve>,
    clients: HashMap<[u8; 16], Known>,
    pub faults: Faults,
    pub instance: u64,
    pub executed: u64,
    pub again: u64,
    pub cancelled: Vec<u64>,
    pub connections: u64,
    pub sent_bytes: u64,
    numbers: u32,
    chance: u64,
}

impl State {
    fn dice(&mut self) -> u64 {
        self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.chance >> 33
    }

    /// Replaces the module by one without state.
    pub fn replace(&mut self, module: Box<dyn Serve>) {
        self.module = module;
        self.instance += 1;
        self.clients.clear();
    }

    pub fn clients(&self) -> usize {
        self.clients.len()
    }
}

#[derive(Clone)]
pub struct Host {
    state: Arc<Mutex<State>>,
    pub address: Address,
    _folder: Arc<TempDir>,
}

impl Host {
    pub fn start(module: impl Serve + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("host");
        let listener = UnixListener::bind(&path).unwrap();
        let state = Arc::new(Mutex::new(State {
            module: Box::new(module),
            clients: HashMap::new(),
            faults: Faults::default(),
            instance: 1,
            executed: 0,
            again: 0,
            cancelled: Vec::new(),
            connections: 0,
            sent_bytes: 0,
            numbers: 0,
            chance: 12345,
        }));
        let shared = state.clone();
        thread::spawn(move || {
            for socket in listener.incoming().map_while(Result::ok) {
                let state = shared.clone();
                thread::spawn(move || Connection::new(socket, state).run());
            }
        });
        Self { state, address: Address::Unix(path), _folder: Arc::new(folder) }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

struct Connection {
    socket: UnixStream,
    state: Arc<Mutex<State>>,
    inbox: Inbox,
    id: [u8; 16],
    number: u64,
    waiting: Vec<Vec<u8>>,
}

/// Error: the connection is over.
struct Over;

impl Connection {
    fn new(socket: UnixStream, state: Arc<Mutex<State>>) -> Self {
        let number = {
            let mut state = state.lock().unwrap();
            state.connections += 1;
            state.connections
        };
        Self { socket, state, inbox: Inbox::default(), id: [0; 16], number, waiting: Vec::new() }
    }

    fn run(mut self) {
        let _ = self.serve();
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    fn serve(&mut self) -> Result<(), Over> {
        let hello = self.next()?;
        self.hello(&hello)?;
        loop {
            let frame = self.next()?;
            match frame.kind {
                kind::REQUEST => self.request(&frame)?,
                kind::CANCEL => self.state.lock().unwrap().cancelled.push(frame.seq),
                kind::PING if self.state.lock().unwrap().faults.is_silent => {}
                kind::PING => self.send(kind::PONG, 0, 0, &frame.body)?,
                kind::GOODBYE => {
                    let mut state = self.state.lock().unwrap();
                    if let Some(known) = state.clients.remove(&self.id) {
                        state.module.closed(known.number);
                    }
                    return Err(Over);
                }
                _ => return self.goodbye(failure::BAD_FRAME),
            }
        }
    }

    fn next(&mut self) -> Result<Received, Over> {
        loop {
            match self.inbox.next(MAX_BODY_BYTES) {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(_) => {
                    self.goodbye(failure::BAD_FRAME)?;
                    return Err(Over);
                }
            }
            let has_waiting = !self.waiting.is_empty();
            let timeout = has_waiting.then_some(Duration::from_millis(3));
            self.socket.set_read_timeout(timeout).unwrap();
            match self.socket.read(self.inbox.room()) {
                Ok(0) => return Err(Over),
                Ok(len) => self.inbox.filled(len),
                Err(_) if has_waiting => self.flush()?,
                Err(_) => return Err(Over),
            }
        }
    }

    fn hello(&mut self, frame: &Received) -> Result<(), Over> {
        let Ok(hello) = Hello::read_from_bytes(&frame.body) else {
            return self.goodbye(failure::BAD_FRAME);
        };
        let mut state = self.state.lock().unwrap();
        if let Some(code) = state.faults.goodbye {
            drop(state);
            return self.goodbye(code);
        }
        let has_module = hello.module != [0; 32];
        if has_module && !hello.module.starts_with(b"fake") {
            drop(state);
            return self.goodbye(failure::NO_MODULE);
        }
        let mut known_seq = 0;
        if has_module {
            let instance = state.instance;
            self.id = hello.client;
            if !state.clients.contains_key(&self.id) {
                let number = state.numbers;
                state.numbers += 1;
                state.module.opened(number);
                state.clients.insert(self.id, Known { number, ..Known::default() });
            }
            let known = state.clients.get_mut(&self.id).unwrap();
            known.connection = self.number;
            known_seq = known.last_seq;
            assert!(instance > 0);
        }
        let instance = if has_module { state.instance } else { 0 };
        drop(state);
        self.send(kind::WELCOME, 0, 0, &welcome(instance, known_seq))
    }

    fn request(&mut self, frame: &Received) -> Result<(), Over> {
        let mut state = self.state.lock().unwrap();
        let dice = state.dice();
        let fate = match state.faults.break_one_of {
            Some(n) if dice.is_multiple_of(n) => dice / n % 3,
            _ => 3,
        };
        if fate == 0 {
            return Err(Over);
        }
        let State { clients, module, executed, again, .. } = &mut *state;
        *again += u64::from(frame.flags & flag::AGAIN != 0);
        let Some(known) = clients.get_mut(&self.id).filter(|k| k.connection == self.number) else {
            drop(state);
            return self.goodbye(failure::REPLACED);
        };
        if frame.seq > known.last_seq {
            known.last_seq = frame.seq;
            *executed += 1;
            known.kept.insert(frame.seq, module.request(known.number, frame.seq, &frame.body));
        }
        let answer = known.kept[&frame.seq].clone();
        let oldest = (frame.seq + 1).saturating_sub(u64::from(MAX_IN_FLIGHT));
        known.kept.retain(|seq, _| *seq >= oldest);
        let (faults, is_silent) = (state.faults, state.faults.is_silent);
        drop(state);
        if fate == 1 {
            return Err(Over);
        }
        let mut reply = Vec::new();
        match answer {
            Ok(body) => raw::put(&mut reply, kind::REPLY, 0, frame.seq, &body),
            Err(code) => raw::put(&mut reply, kind::REPLY, flag::FAILED, frame.seq, &text(code)),
        }
        if fate == 2 {
            self.flush()?;
            let _ = self.socket.write_all(&reply[..reply.len() / 2]);
            return Err(Over);
        }
        if faults.wrong_check {
            reply[16] ^= 1;
        }
        if is_silent {
            return Ok(());
        }
        self.waiting.push(reply);
        if !faults.reorder || self.waiting.len() >= 8 { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Over> {
        while let Some(reply) = self.waiting.pop() {
            self.socket.write_all(&reply).map_err(|_| Over)?;
            self.state.lock().unwrap().sent_bytes += reply.len() as u64;
        }
        Ok(())
    }

    fn send(&mut self, kind: u16, flags: u16, seq: u64, body: &[u8]) -> Result<(), Over> {
        let mut bytes = Vec::new();
        raw::put(&mut bytes, kind, flags, seq, body);
        self.socket.write_all(&bytes).map_err(|_| Over)
    }

    fn goodbye(&mut self, code: u32) -> Result<(), Over> {
        self.send(kind::GOODBYE, 0, 0, &text(code))?;
        Err(Over)
    }
}

fn text(code: u32) -> Vec<u8> {
    let failure = Failure { code: U32::new(code), reserved: U32::ZERO };
    [failure.as_bytes(), b"as the test wants it"].concat()
}

fn welcome(instance: u64, known_seq: u64) -> Vec<u8> {
    let welcome = Welcome {
        magic: U64::new(MAGIC),
        version: U16::new(VERSION),
        modules: U16::new(1),
        max_in_flight: U32::new(MAX_IN_FLIGHT),
        max_body_bytes: U32::new(MAX_BODY_BYTES),
        linger_ms: U32::new(5000),
        instance: U64::new(instance),
        known_seq: U64::new(known_seq),
    };
    let mut info = ModuleInfo { name: [0; 32], hash: [0xcd; 32] };
    info.name[..4].copy_from_slice(b"fake");
    [welcome.as_bytes(), info.as_bytes()].concat()
}

/// Module that returns the body reversed; `fail` fails.
pub struct Backwards;

impl Serve for Backwards {
    fn request(&mut self, _: u32, _: u64, body: &[u8]) -> Result<Vec<u8>, u32> {
        if body == b"fail" {
            return Err(failure::STOPPED);
        }
        Ok(body.iter().rev().copied().collect())
    }
}

/// Module as it runs in the host, natively.
pub struct Native<M> {
    host: sdk::testing::TestHost,
    module: M,
}

impl<M: sdk::Module> Native<M> {
    pub fn start() -> Self {
        let mut host = sdk::testing::TestHost::new(1);
        let module = M::start(&mut host).unwrap();
        Self { host, module }
    }

    fn event(&mut self, events: &sdk::testing::EventBytes) {
        self.host.serve(&mut self.module, events).unwrap();
    }
}

impl<M: sdk::Module + Send> Serve for Native<M> {
    fn opened(&mut self, client: u32) {
        self.event(&sdk::testing::EventBytes::new().opened(client, [1; 16]));
    }

    fn request(&mut self, client: u32, seq: u64, body: &[u8]) -> Result<Vec<u8>, u32> {
        self.event(&sdk::testing::EventBytes::new().request(client, seq, 0, body));
        Ok(self.host.replies().remove(0).body)
    }

    fn closed(&mut self, client: u32) {
        self.event(&sdk::testing::EventBytes::new().closed(client));
    }
}

/// Waits for an effect of another thread.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if is_so() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("not in 10 s: {what}");
}

/// Bytes of a frame's head, for tests that spoil one.
pub fn head(frame: &Frame) -> Vec<u8> {
    frame.as_bytes().to_vec()
}
