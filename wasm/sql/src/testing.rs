//! Test kit: clients of the module over a host that loses what was not synced.

use std::collections::{BTreeMap, VecDeque};

use guest_abi::stream::reply_flag;
use sdk::Module;
use sdk::testing::{EventBytes, TestHost};

use crate::Sql;
use crate::packet::{self, command, get_number};

/// Reply to a client.
#[derive(Debug, Clone, PartialEq)]
pub enum SqlReply {
    /// Affected rows, number of the row that was inserted, status.
    Ok(u64, u64, u16),
    /// Code and text.
    Error(u16, String),
    /// Rows: values as text, or NULL.
    Rows(Vec<Vec<Option<Vec<u8>>>>),
}

impl SqlReply {
    /// Rows as text: columns by tabs, rows by lines.
    #[track_caller]
    pub fn text(&self) -> String {
        let Self::Rows(rows) = self else { panic!("{self:?}") };
        let value = |v: &Option<Vec<u8>>| match v {
            Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            None => "NULL".into(),
        };
        let row = |row: &Vec<Option<Vec<u8>>>| row.iter().map(value).collect::<Vec<_>>().join("\t");
        rows.iter().map(row).collect::<Vec<_>>().join("\n")
    }

    /// The error's code; 0: none.
    pub fn code(&self) -> u16 {
        if let Self::Error(code, _) = self { *code } else { 0 }
    }
}

/// A client's side.
#[derive(Debug, Default)]
struct Client {
    next_seq: u64,
    /// Requests without a reply.
    asked: VecDeque<u64>,
    input: Vec<u8>,
    is_closed: bool,
    has_more: bool,
}

/// A module, its host and its clients.
pub struct TestModule {
    pub host: TestHost,
    pub module: Option<Sql>,
    clients: BTreeMap<u32, Client>,
    /// Bytes that clients got.
    pub received: usize,
    /// Replies are released as soon as they are given.
    pub releases: bool,
}

impl TestModule {
    pub fn new(seed: u64) -> Self {
        let mut host = TestHost::new(seed);
        let module = Some(Sql::start(&mut host).unwrap());
        let clients = BTreeMap::new();
        Self { host, module, clients, received: 0, releases: true }
    }

    /// Another instance over the same files.
    pub fn restart(&mut self) {
        self.module = None;
        self.clients.clear();
        self.module = Some(Sql::start(&mut self.host).unwrap());
    }

    fn serve(&mut self, events: EventBytes) {
        let module = self.module.as_mut().unwrap();
        self.host.serve(module, &events).unwrap();
        // As the service does: without a reply that waits there is no sync.
        if self.releases && !self.host.held().is_empty() {
            self.host.release();
        }
        self.collect();
    }

    /// Takes the replies that clients got.
    pub fn collect(&mut self) {
        for reply in self.host.replies() {
            let Some(client) = self.clients.get_mut(&reply.client) else { continue };
            assert_eq!(client.asked.pop_front(), Some(reply.seq), "replies are in order");
            client.input.extend_from_slice(&reply.body[1..]);
            self.received += reply.body.len() - 1;
            client.has_more = reply.body[0] & reply_flag::MORE != 0;
            client.is_closed |= reply.body[0] & reply_flag::CLOSE != 0;
        }
    }

    fn send(&mut self, number: u32, bytes: &[u8]) {
        let client = self.clients.get_mut(&number).unwrap();
        client.next_seq += 1;
        client.asked.push_back(client.next_seq);
        let seq = client.next_seq;
        self.serve(EventBytes::default().request(number, seq, 0, bytes));
    }

    /// Lets the module go on with what takes several calls; false: it does not want to.
    pub fn wake(&mut self) -> bool {
        if self.host.wake_at_ms().is_none_or(|at| at > self.host_now()) {
            return false;
        }
        self.serve(EventBytes::default().wake());
        true
    }

    fn host_now(&mut self) -> u64 {
        use sdk::Host;
        self.host.now_ms()
    }

    /// Connects, with or without a database.
    pub fn connect(&mut self, number: u32, database: &str) -> SqlReply {
        self.clients.insert(number, Client::default());
        self.serve(EventBytes::default().opened(number, [number as u8; 16]));
        self.send(number, &[]);
        let client = self.clients.get_mut(&number).unwrap();
        let (_, greeting, used) = packet::take(&client.input).unwrap();
        if greeting[0] == 0xff {
            return error(greeting);
        }
        client.input.drain(..used);
        let mut login = (0x000f_a20fu32 & !0x20_0000).to_le_bytes().to_vec();
        if database.is_empty() {
            login[0] &= !8;
        }
        login.extend_from_slice(&[0, 0, 0, 1, 45]);
        login.extend_from_slice(&[0; 23]);
        login.extend_from_slice(b"root\0\0");
        login.extend_from_slice(database.as_bytes());
        login.extend_from_slice(b"\0mysql_native_password\0");
        self.send(number, &framed(1, &login));
        self.take_reply(number).unwrap()
    }

    /// The client goes.
    pub fn close(&mut self, number: u32) {
        self.clients.remove(&number);
        self.serve(EventBytes::default().closed(number));
    }

    /// Asks, without waiting.
    pub fn ask(&mut self, number: u32, sql: impl AsRef<[u8]>) {
        let payload = [&[command::QUERY], sql.as_ref()].concat();
        for chunk in framed(0, &payload).chunks(100_000) {
            self.send(number, chunk);
        }
    }

    /// Takes the reply to a client, if all of it is there.
    pub fn take_reply(&mut self, number: u32) -> Option<SqlReply> {
        loop {
            if let Some((told, used)) = parse(&self.clients[&number].input) {
                self.clients.get_mut(&number).unwrap().input.drain(..used);
                return Some(told);
            }
            let client = &self.clients[&number];
            if client.has_more && client.asked.is_empty() {
                self.send(number, &[]);
            } else if !self.wake() {
                return None;
            }
        }
    }

    /// Asks and waits.
    #[track_caller]
    pub fn sql(&mut self, number: u32, sql: impl AsRef<[u8]>) -> SqlReply {
        self.ask(number, sql);
        self.take_reply(number).expect("an answer")
    }

    /// Asks and waits; the reply is OK.
    #[track_caller]
    pub fn ok(&mut self, number: u32, sql: &str) -> (u64, u64) {
        match self.sql(number, sql) {
            SqlReply::Ok(affected, id, _) => (affected, id),
            other => panic!("{sql}: {other:?}"),
        }
    }

    /// Any packet.
    pub fn command(&mut self, number: u32, kind: u8, body: &[u8]) -> Option<SqlReply> {
        self.send(number, &framed(0, &[&[kind], body].concat()));
        self.take_reply(number)
    }

    pub fn is_closed(&self, number: u32) -> bool {
        self.clients[&number].is_closed
    }

    /// Sends bytes as they are.
    pub fn raw(&mut self, number: u32, bytes: &[u8]) {
        self.send(number, bytes);
    }
}

/// A database `d` and a client 1 of it.
pub fn world() -> TestModule {
    let mut world = TestModule::new(1);
    assert_eq!(world.connect(1, "").code(), 0);
    world.ok(1, "CREATE DATABASE d");
    world.ok(1, "USE d");
    world
}

pub fn framed(number: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (payload.len() as u32).to_le_bytes()[..3].to_vec();
    bytes.push(number);
    bytes.extend_from_slice(payload);
    bytes
}

fn error(payload: &[u8]) -> SqlReply {
    let code = u16::from_le_bytes([payload[1], payload[2]]);
    SqlReply::Error(code, String::from_utf8_lossy(&payload[9..]).into_owned())
}

/// The answer in front, and its bytes.
fn parse(input: &[u8]) -> Option<(SqlReply, usize)> {
    let (mut number, first, mut used) = packet::take(input)?;
    match first[0] {
        0 => {
            let (affected, rest) = get_number(&first[1..])?;
            let (id, rest) = get_number(rest)?;
            return Some((
                SqlReply::Ok(affected, id, u16::from_le_bytes([rest[0], rest[1]])),
                used,
            ));
        }
        0xff => return Some((error(first), used)),
        _ => {}
    }
    let columns = get_number(first)?.0 as usize;
    let mut next = |used: &mut usize| {
        let (n, payload, len) = packet::take(&input[*used..])?;
        number = number.wrapping_add(1);
        assert_eq!(n, number, "packets are numbered");
        *used += len;
        Some(payload)
    };
    for _ in 0..=columns {
        next(&mut used)?;
    }
    let mut rows = Vec::new();
    loop {
        let payload = next(&mut used)?;
        if payload[0] == 0xfe && payload.len() == 5 {
            return Some((SqlReply::Rows(rows), used));
        }
        if payload[0] == 0xff {
            return Some((error(payload), used));
        }
        let (mut rest, mut row) = (payload, Vec::new());
        for _ in 0..columns {
            if rest[0] == 0xfb {
                row.push(None);
                rest = &rest[1..];
            } else {
                let (len, behind) = get_number(rest)?;
                row.push(Some(behind[..len as usize].to_vec()));
                rest = &behind[len as usize..];
            }
        }
        rows.push(row);
    }
}
