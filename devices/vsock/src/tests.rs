//! A world to test the engine in: model guests, real Unix sockets, a clock that the test turns.

#![allow(non_snake_case)]

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use queue::Layout;
use queue::testing::{GuestRam, ModelDriver, ModelOptions};
use sidecore::{Ledger, Worker};
use zerocopy::IntoBytes;

use crate::engine::VsockEngine;
use crate::limits::IDLE_SOCKET_POLL_INTERVAL_NS;
use crate::metrics::VsockStats;
use crate::packet::{ConnectionKey, HEADER_LEN_BYTES, HOST_CID, Op, RawHeader, TYPE_STREAM};
use crate::port::PortSpec;
use crate::port_config::{HostPorts, VsockPortConfig};
use crate::queues::{RX, TX};
use crate::slab::SlabId;
use crate::unix_socket::{Listener, ProgramSockets};

mod abuse;
mod credits;
mod domain;
mod guests;
mod hosts;
mod lifecycle;
mod marks;
mod rounds;
mod services;

const HEADER: usize = HEADER_LEN_BYTES as usize;

/// A packet that a guest received.
#[derive(Debug, Clone)]
pub struct Packet {
    pub header: RawHeader,
    pub payload: Vec<u8>,
}

impl Packet {
    pub fn op(&self) -> u16 {
        self.header.op.get()
    }

    /// The connection, named as the guest names it.
    pub fn key(&self) -> ConnectionKey {
        ConnectionKey {
            guest_port: self.header.dst_port.get(),
            peer_cid: self.header.src_cid.get() as u32,
            peer_port: self.header.src_port.get(),
        }
    }
}

/// A guest's driver.
pub struct Guest {
    pub cid: u32,
    pub rx: ModelDriver,
    pub tx: ModelDriver,
    buffers: HashMap<u16, (u64, u32)>,
    sending: HashMap<u16, u64>,
    slots: Vec<u64>,
    pub inbox: VecDeque<Packet>,
    /// Used receive buffers are offered again.
    pub refill: bool,
}

const TX_SLOTS: usize = 64;
const TX_SLOT_BYTES: usize = HEADER + (64 << 10);

impl Guest {
    pub fn new(cid: u32, layout: Layout) -> Self {
        let options = ModelOptions { in_order: true, event_idx: true, ..Default::default() };
        let ram = GuestRam::new(16 << 20);
        let rx = ModelDriver::in_ram(Arc::clone(&ram), layout, 128, options);
        let tx = ModelDriver::in_ram(Arc::clone(&ram), layout, 256, options);
        let slots = (0..TX_SLOTS).map(|_| ram.alloc(TX_SLOT_BYTES)).collect();
        Self {
            cid,
            rx,
            tx,
            buffers: HashMap::new(),
            sending: HashMap::new(),
            slots,
            inbox: VecDeque::new(),
            refill: true,
        }
    }

    pub fn give_buffers(&mut self, count: usize, len_bytes: usize) {
        for _ in 0..count {
            let buffer = (self.rx.alloc(len_bytes), len_bytes as u32);
            let id = self.rx.offer(&[], &[buffer]);
            self.buffers.insert(id, buffer);
        }
    }

    pub fn can_send(&self) -> bool {
        !self.slots.is_empty() && self.tx.free_descriptors() >= 2
    }

    /// Sends one packet, header and payload in one buffer.
    pub fn send(&mut self, header: &RawHeader, payload: &[u8]) {
        let addr = self.slots.pop().expect("a transmit slot");
        self.tx.write(addr, header.as_bytes());
        self.tx.write(addr + HEADER as u64, payload);
        let id = self.tx.offer(&[(addr, (HEADER + payload.len()) as u32)], &[]);
        self.sending.insert(id, addr);
    }

    pub fn collect(&mut self) {
        while let Some((id, _)) = self.tx.used() {
            if let Some(addr) = self.sending.remove(&id) {
                self.slots.push(addr);
            }
        }
        while let Some((id, written)) = self.rx.used() {
            let (addr, len) = self.buffers.remove(&id).unwrap();
            if written > 0 {
                let bytes = self.rx.read(addr, written as usize);
                let header = RawHeader::from_wire(bytes[..HEADER].try_into().unwrap());
                assert_eq!(header.len.get() as usize, bytes.len() - HEADER, "used length");
                assert_eq!(header.dst_cid.get(), u64::from(self.cid));
                self.inbox.push_back(Packet { header, payload: bytes[HEADER..].to_vec() });
            }
            if self.refill {
                let id = self.rx.offer(&[], &[(addr, len)]);
                self.buffers.insert(id, (addr, len));
            }
        }
    }

    /// A header from this guest.
    pub fn header(&self, key: ConnectionKey, op: Op) -> RawHeader {
        RawHeader {
            src_cid: u64::from(self.cid).into(),
            dst_cid: u64::from(key.peer_cid).into(),
            src_port: key.guest_port.into(),
            dst_port: key.peer_port.into(),
            kind: TYPE_STREAM.into(),
            op: (op as u16).into(),
            buf_alloc: (256u32 << 10).into(),
            ..RawHeader::default()
        }
    }
}

/// A stream socket of a guest, as its kernel keeps it.
pub struct Sock {
    pub key: ConnectionKey,
    pub buf_alloc: u32,
    tx_cnt: u32,
    peer_buf_alloc: u32,
    peer_fwd_cnt: u32,
    fwd_cnt: u32,
    pub unread: u32,
    pub received: Vec<u8>,
    pub open: bool,
    pub reset: bool,
    pub peer_shut: u32,
    pub asked: u32,
}

impl Sock {
    pub fn new(key: ConnectionKey) -> Self {
        Self {
            key,
            buf_alloc: 256 << 10,
            tx_cnt: 0,
            peer_buf_alloc: 0,
            peer_fwd_cnt: 0,
            fwd_cnt: 0,
            unread: 0,
            received: Vec::new(),
            open: false,
            reset: false,
            peer_shut: 0,
            asked: 0,
        }
    }

    pub fn room(&self) -> u32 {
        self.peer_buf_alloc - self.tx_cnt.wrapping_sub(self.peer_fwd_cnt)
    }

    pub fn send(&mut self, guest: &mut Guest, op: Op, flags: u32, payload: &[u8]) {
        let mut header = guest.header(self.key, op);
        header.buf_alloc = self.buf_alloc.into();
        header.fwd_cnt = self.fwd_cnt.into();
        header.flags = flags.into();
        header.len = (payload.len() as u32).into();
        self.tx_cnt = self.tx_cnt.wrapping_add(payload.len() as u32);
        guest.send(&header, payload);
    }

    /// The application takes everything.
    pub fn take(&mut self) -> bool {
        self.fwd_cnt = self.fwd_cnt.wrapping_add(self.unread);
        std::mem::take(&mut self.unread) > 0
    }

    pub fn on(&mut self, p: &Packet) {
        self.peer_buf_alloc = p.header.buf_alloc.get();
        self.peer_fwd_cnt = p.header.fwd_cnt.get();
        match p.op() {
            2 => self.open = true,
            3 => self.reset = true,
            4 => self.peer_shut |= p.header.flags.get(),
            5 => {
                self.unread += p.payload.len() as u32;
                assert!(self.unread <= self.buf_alloc, "the device exceeded our credit");
                self.received.extend_from_slice(&p.payload);
            }
            7 => self.asked += 1,
            _ => {}
        }
    }
}

pub struct TestDomain {
    pub engine: VsockEngine,
    pub ledger: Ledger,
    pub guests: Vec<Guest>,
    pub ids: Vec<SlabId>,
    pub stats: Vec<Arc<VsockStats>>,
    pub now_ns: u64,
    pub dir: tempfile::TempDir,
}

impl TestDomain {
    pub fn new() -> Self {
        Self {
            engine: VsockEngine::new(true, 512 << 20, 0).unwrap(),
            ledger: Ledger::default(),
            guests: Vec::new(),
            ids: Vec::new(),
            stats: Vec::new(),
            now_ns: 0,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// One guest with CID 3, running, with 64 receive buffers of 4 KiB.
    pub fn with_guests(count: u32) -> Self {
        let mut world = Self::new();
        for i in 0..count {
            let layout = if i % 2 == 0 { Layout::Split } else { Layout::Packed };
            world.add_guest(layout, |_| {});
        }
        world
    }

    pub fn base(&self, guest: usize) -> PathBuf {
        self.dir.path().join(format!("vm{guest}"))
    }

    pub fn add_guest(&mut self, layout: Layout, change: impl FnOnce(&mut VsockPortConfig)) {
        let at = self.guests.len();
        let cid = 3 + at as u32;
        let mut config = VsockPortConfig::new(format!("vm{at}"), cid.into(), self.base(at));
        change(&mut config);
        let stats = Arc::new(VsockStats::default());
        let spec = PortSpec {
            vm: sidecore::VmId::NONE,
            cid,
            listener: Some(Listener::bind(&config.name, &config.socket).unwrap()),
            programs: ProgramSockets::at(&config.name, &config.socket).unwrap(),
            max_connections: config.max_connections,
            max_half_open: config.max_half_open,
            buffer_bytes: config.buffer_bytes,
            host_ports: config.host_ports,
            services: config.services,
            stats: Arc::clone(&stats),
        };
        let id = self.engine.add_port(spec).unwrap();
        let mut guest = Guest::new(cid, layout);
        guest.give_buffers(64, HEADER + 4096);
        self.engine.start_queue(id, guest.rx.vring(RX)).unwrap();
        self.engine.start_queue(id, guest.tx.vring(TX)).unwrap();
        self.guests.push(guest);
        self.ids.push(id);
        self.stats.push(stats);
    }

    /// One round of the engine, and of the guests' interrupt handlers.
    pub fn turn(&mut self) {
        self.now_ns += 10_000;
        self.engine.poll(self.now_ns, &mut self.ledger);
        for guest in &mut self.guests {
            guest.collect();
        }
    }

    /// Rounds until nothing has happened for a few.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..100_000 {
            // Three of them are longer than any pause between looks at Unix sockets.
            self.now_ns += IDLE_SOCKET_POLL_INTERVAL_NS / 2;
            let done = self.engine.poll(self.now_ns, &mut self.ledger);
            self.guests.iter_mut().for_each(Guest::collect);
            quiet = if done == 0 { quiet + 1 } else { 0 };
            if quiet == 3 {
                return;
            }
        }
        panic!("the engine never comes to rest");
    }

    /// Lets time pass with nothing else happening.
    pub fn wait_ns(&mut self, ns: u64) {
        self.now_ns += ns;
        self.settle();
    }

    /// The next packet for a guest; rounds until there is one.
    pub fn packet(&mut self, guest: usize) -> Packet {
        for _ in 0..10_000 {
            if let Some(p) = self.guests[guest].inbox.pop_front() {
                return p;
            }
            self.turn();
        }
        panic!("no packet for guest {guest}");
    }

    pub fn no_packet(&mut self, guest: usize) {
        self.settle();
        let packet = self.guests[guest].inbox.pop_front();
        assert!(packet.is_none(), "unexpected {packet:?}");
    }

    /// Packets of a guest for `sock`, until nothing more comes.
    pub fn feed(&mut self, guest: usize, sock: &mut Sock) {
        self.settle();
        while let Some(p) = self.guests[guest].inbox.pop_front() {
            assert_eq!(p.key(), sock.key);
            sock.on(&p);
        }
    }

    /// A host program listening for `port`.
    pub fn listen(&self, guest: usize, port: u32) -> UnixListener {
        let mut path = self.base(guest).into_os_string();
        path.push(format!("_{port}"));
        UnixListener::bind(path).unwrap()
    }

    /// A connection of a guest to a host program.
    pub fn connect_out(
        &mut self,
        guest: usize,
        listener: &UnixListener,
        from: u32,
        to: u32,
    ) -> (Sock, UnixStream) {
        let mut sock =
            Sock::new(ConnectionKey { guest_port: from, peer_cid: HOST_CID, peer_port: to });
        sock.send(&mut self.guests[guest], Op::Request, 0, &[]);
        self.feed(guest, &mut sock);
        assert!(sock.open, "refused");
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        (sock, stream)
    }

    /// A connection of a host program to a guest that accepts.
    pub fn connect_in(&mut self, guest: usize, port: u32) -> (Sock, UnixStream) {
        let mut stream = UnixStream::connect(self.base(guest)).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
        let request = self.packet(guest);
        assert_eq!((request.op(), request.key().guest_port), (1, port));
        let mut sock = Sock::new(request.key());
        sock.on(&request);
        sock.send(&mut self.guests[guest], Op::Response, 0, &[]);
        self.feed(guest, &mut sock);
        let mut line = [0u8; 32];
        let n = stream.read(&mut line).unwrap();
        assert_eq!(line[..n], *format!("OK {}\n", sock.key.peer_port).as_bytes());
        (sock, stream)
    }
}

/// Everything there is to read now; true when the stream has ended.
pub fn drain(stream: &mut UnixStream, into: &mut Vec<u8>) -> bool {
    let mut bytes = vec![0; 64 << 10];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(n) => into.extend_from_slice(&bytes[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return false,
            Err(e) => panic!("{e}"),
        }
    }
}

/// Bytes that show where they belong.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    use base::random::{Random, Seeded};
    let mut random = Seeded::new(seed);
    let mut bytes: Vec<u8> =
        (0..len.div_ceil(8)).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

#[test]
fn host_ports_are_ranges() {
    let some = HostPorts::Only(vec![1..=3, 10..=10]);
    assert!(some.allows(1) && some.allows(3) && some.allows(10));
    assert!(!some.allows(0) && !some.allows(4) && !some.allows(11));
    assert!(HostPorts::All.allows(u32::MAX));
}
