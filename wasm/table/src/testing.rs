//! Test kit: requests, replies, a store on a host that can crash.

use std::collections::BTreeMap;

use guest_abi::module_call::event_flag;
use guest_abi::table::{self, Answer, Op, Reply, Row, batch_flag, op, op_flag, status};
use sdk::testing::{EventBytes, TestHost};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::{Config, Store};

/// A batch that is put together.
#[derive(Debug, Clone)]
pub struct Batch {
    tx: u64,
    flags: u16,
    wait_ms: u32,
    ops: u32,
    bytes: Vec<u8>,
}

impl Batch {
    pub fn new(tx: u64) -> Self {
        Self { tx, flags: 0, wait_ms: 0, ops: 0, bytes: Vec::new() }
    }

    /// Batch that begins its transaction.
    pub fn begin(tx: u64) -> Self {
        Self::new(tx).flags(batch_flag::BEGIN)
    }

    pub fn flags(mut self, flags: u16) -> Self {
        self.flags |= flags;
        self
    }

    pub fn wait(mut self, ms: u32) -> Self {
        self.wait_ms = ms;
        self
    }

    #[allow(clippy::too_many_arguments)]
    pub fn op(
        mut self,
        kind: u8,
        (table, index): (u32, u8),
        flags: u16,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        extra: u64,
    ) -> Self {
        let (key, value) = (key.as_ref(), value.as_ref());
        let head = Op {
            kind,
            index,
            flags: U16::new(flags),
            table: U32::new(table),
            key_bytes: U32::new(key.len() as u32),
            value_bytes: U32::new(value.len() as u32),
            extra: U64::new(extra),
        };
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        self.ops += 1;
        self
    }

    pub fn insert(self, table: u32, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        self.op(op::INSERT, (table, 0), 0, key, value, 0)
    }

    pub fn put(self, table: u32, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        self.op(op::PUT, (table, 0), 0, key, value, 0)
    }

    pub fn update(self, table: u32, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        self.op(op::UPDATE, (table, 0), 0, key, value, 0)
    }

    pub fn delete(self, table: u32, key: impl AsRef<[u8]>) -> Self {
        self.op(op::DELETE, (table, 0), 0, key, "", 0)
    }

    pub fn get(self, table: u32, key: impl AsRef<[u8]>) -> Self {
        self.op(op::GET, (table, 0), 0, key, "", 0)
    }

    pub fn get_for(self, table: u32, key: impl AsRef<[u8]>, flags: u16) -> Self {
        self.op(op::GET, (table, 0), flags, key, "", 0)
    }

    pub fn scan(self, table: u32) -> Self {
        self.op(op::SCAN, (table, 0), op_flag::NO_HIGH, "", "", 0)
    }

    pub fn lock(self, table: u32, flags: u16) -> Self {
        self.op(op::LOCK, (table, 0), flags, "", "", 0)
    }

    pub fn save(self, number: u64) -> Self {
        self.op(op::SAVEPOINT, (0, 0), 0, "", "", number)
    }

    pub fn back_to(self, number: u64) -> Self {
        self.op(op::ROLLBACK_TO, (0, 0), 0, "", "", number)
    }

    pub fn commit(self) -> Self {
        self.op(op::COMMIT, (0, 0), 0, "", "", 0)
    }

    pub fn rollback(self) -> Self {
        self.op(op::ROLLBACK, (0, 0), 0, "", "", 0)
    }

    pub fn named(self, kind: u8, name: impl AsRef<[u8]>) -> Self {
        self.op(kind, (0, 0), 0, name, "", 0)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let head = table::Batch {
            tx: U64::new(self.tx),
            ops: U32::new(self.ops),
            flags: U16::new(self.flags),
            reserved: U16::ZERO,
            wait_ms: U32::new(self.wait_ms),
            reserved2: U32::ZERO,
        };
        [head.as_bytes(), &self.bytes].concat()
    }
}

/// A term of a filter: part, test, offset, bytes, operand.
pub type Term = (u8, u8, u32, u32, Vec<u8>);

/// The value of a scan with a filter.
pub fn filter(high: impl AsRef<[u8]>, examine: u32, terms: &[Term]) -> Vec<u8> {
    let high = high.as_ref();
    let head = table::Filter {
        high_bytes: U32::new(high.len() as u32),
        terms: U32::new(terms.len() as u32),
        examine: U32::new(examine),
        reserved: U32::ZERO,
    };
    let mut bytes = [head.as_bytes(), high].concat();
    for (part, test, offset, len, operand) in terms {
        let term = table::Term {
            part: *part,
            test: *test,
            reserved: U16::ZERO,
            offset: U32::new(*offset),
            len_bytes: U32::new(*len),
            operand_bytes: U32::new(operand.len() as u32),
        };
        bytes.extend_from_slice(term.as_bytes());
        bytes.extend_from_slice(operand);
    }
    bytes
}

/// A row of an answer: key, primary key, value.
pub type RowBytes = (Vec<u8>, Vec<u8>, Vec<u8>);

/// A reply taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchReply {
    pub status: u16,
    pub flags: u16,
    pub done: u32,
    pub text: String,
    pub answers: Vec<OpAnswer>,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpAnswer {
    pub op: u32,
    pub rows: Vec<RowBytes>,
    pub more: bool,
    /// Key at which a filter stopped looking.
    pub stopped: Option<Vec<u8>>,
    pub bytes: Vec<u8>,
}

impl BatchReply {
    pub fn read(body: &[u8]) -> Self {
        let (head, rest) = Reply::read_from_prefix(body).unwrap();
        let (text, mut rest) = rest.split_at(head.text_bytes.get() as usize);
        let mut answers = Vec::new();
        for _ in 0..head.answers.get() {
            let (answer, after) = Answer::read_from_prefix(rest).unwrap();
            let (bytes, after) = after.split_at(answer.len_bytes.get() as usize);
            rest = after;
            let (mut rows, mut at) = (Vec::new(), bytes);
            for _ in 0..answer.rows.get() {
                let (row, after) = Row::read_from_prefix(at).unwrap();
                let (key, after) = after.split_at(row.key_bytes.get() as usize);
                let (primary, after) = after.split_at(row.primary_bytes.get() as usize);
                let (value, after) = after.split_at(row.value_bytes.get() as usize);
                rows.push((key.to_vec(), primary.to_vec(), value.to_vec()));
                at = after;
            }
            let stopped = (answer.more.get() == 2).then(|| at.to_vec());
            assert!(answer.rows.get() == 0 || at.is_empty() || stopped.is_some());
            let (op, more) = (answer.op.get(), answer.more.get() == 1);
            answers.push(OpAnswer { op, rows, more, stopped, bytes: bytes.to_vec() });
        }
        assert!(rest.is_empty(), "{} bytes after the answers", rest.len());
        let text = String::from_utf8(text.to_vec()).unwrap();
        let (status, flags, done) = (head.status.get(), head.flags.get(), head.done.get());
        assert_eq!(status == status::OK, text.is_empty(), "{text}");
        Self { status, flags, done, text, answers }
    }

    /// Keys and values of the rows of an answer.
    pub fn rows(&self, answer: usize) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        self.answers[answer].rows.iter().map(|(k, _, v)| (text(k), text(v))).collect()
    }

    /// The value of the one row of an answer.
    pub fn value(&self, answer: usize) -> Option<String> {
        self.rows(answer).pop().map(|(_, value)| value)
    }

    pub fn ok(self) -> Self {
        assert_eq!(self.status, status::OK, "{}", self.text);
        self
    }

    pub fn is(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", self.text);
        self
    }
}

/// A store and its host.
pub struct TestStore {
    pub host: TestHost,
    pub store: Store,
    pub config: Config,
    seqs: BTreeMap<u32, u64>,
    replies: BTreeMap<(u32, u64), BatchReply>,
}

/// Small limits, so that little makes much happen.
pub fn small() -> Config {
    Config {
        segment_bytes: 4096,
        spill_bytes: 512,
        checkpoint_bytes: 8192,
        reserve_bytes: 16 << 10,
        steps: 500,
        ..Config::default()
    }
}

impl TestStore {
    pub fn new() -> Self {
        Self::with(1, Config::default())
    }

    pub fn with(seed: u64, config: Config) -> Self {
        let mut host = TestHost::new(seed);
        let store = Store::start_with(&mut host, config).unwrap();
        let (seqs, replies) = (BTreeMap::new(), BTreeMap::new());
        let mut world = Self { host, store, config, seqs, replies };
        world.open_all();
        world
    }

    /// The clients that a world has.
    pub const CLIENTS: u32 = 6;

    pub fn id(client: u32) -> [u8; 16] {
        [client as u8 + 1; 16]
    }

    fn open_all(&mut self) {
        for client in 0..Self::CLIENTS {
            self.serve(&EventBytes::new().opened(client, Self::id(client)));
        }
    }

    pub fn serve(&mut self, events: &EventBytes) {
        self.host.serve(&mut self.store, events).unwrap();
        self.collect();
    }

    fn collect(&mut self) {
        for reply in self.host.replies() {
            let said = BatchReply::read(&reply.body);
            let old = self.replies.insert((reply.client, reply.seq), said);
            assert!(old.is_none(), "answered twice: {} {}", reply.client, reply.seq);
        }
    }

    pub fn next_seq(&mut self, client: u32) -> u64 {
        let seq = self.seqs.entry(client).or_default();
        *seq += 1;
        *seq
    }

    /// Sends a request; its number.
    pub fn send(&mut self, client: u32, ask: &Batch) -> u64 {
        let seq = self.next_seq(client);
        self.send_as(client, seq, 0, ask);
        seq
    }

    pub fn send_as(&mut self, client: u32, seq: u64, flags: u16, ask: &Batch) {
        self.serve(&EventBytes::new().request(client, seq, flags, &ask.bytes()));
    }

    /// Sends a request again.
    pub fn again(&mut self, client: u32, seq: u64, ask: &Batch) -> BatchReply {
        self.send_as(client, seq, event_flag::AGAIN, ask);
        self.wait(client, seq)
    }

    /// Takes the reply to a request, if it came.
    pub fn take_reply(&mut self, client: u32, seq: u64) -> Option<BatchReply> {
        self.replies.remove(&(client, seq))
    }

    /// Lets the store work until it wants nothing now.
    pub fn idle(&mut self) {
        for _ in 0..100_000 {
            if self.host.wake_at_ms().is_none_or(|at| at > sdk::Host::now_ms(&mut self.host)) {
                return;
            }
            self.serve(&EventBytes::new().wake());
        }
        panic!("the store never rests");
    }

    pub fn release(&mut self) {
        self.host.release();
        self.collect();
    }

    /// Waits for an answer that must come.
    pub fn wait(&mut self, client: u32, seq: u64) -> BatchReply {
        if let Some(said) = self.take_reply(client, seq) {
            return said;
        }
        for _ in 0..10_000 {
            self.release();
            if let Some(said) = self.take_reply(client, seq) {
                return said;
            }
            assert!(self.host.advance_to_wake(), "request {seq} of {client} is not answered");
            self.serve(&EventBytes::new().wake());
        }
        panic!("request {seq} of {client} is never answered");
    }

    pub fn call(&mut self, client: u32, ask: &Batch) -> BatchReply {
        let seq = self.send(client, ask);
        self.wait(client, seq)
    }

    pub fn create(&mut self, name: &str, indexes: u64) -> u32 {
        let ask = Batch::new(0).op(op::CREATE, (0, 0), 0, name, "definition", indexes);
        let said = self.call(0, &ask).ok();
        u32::from_le_bytes(said.answers[0].bytes[..4].try_into().unwrap())
    }

    /// All rows of a table.
    pub fn all(&mut self, table: u32) -> Vec<(String, String)> {
        self.call(Self::CLIENTS - 1, &Batch::new(0).scan(table)).ok().rows(0)
    }

    /// Starts the store anew on the files that the host has.
    pub fn start(&mut self) -> Result<(), sdk::Errno> {
        self.replies.clear();
        self.store = Store::start_with(&mut self.host, self.config)?;
        self.open_all();
        Ok(())
    }

    /// The process ends and starts again.
    pub fn restart(&mut self) {
        self.host.kill();
        self.start().unwrap();
    }

    pub fn crash(&mut self) {
        self.host.crash();
        self.start().unwrap();
    }
}
