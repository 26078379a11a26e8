//! A trust domain of two guests, of which one is hostile, for the fuzzer.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use queue::Layout;
use queue::testing::{GuestRam, ModelDriver, ModelOptions};
use sidecore::{Ledger, VmId, Worker};
use zerocopy::{FromBytes, IntoBytes};

use crate::engine::VsockEngine;
use crate::limits::{DRAIN_TIMEOUT_NS, IDLE_SOCKET_POLL_INTERVAL_NS, LOWEST_BUFFER_BYTES};
use crate::metrics::VsockStats;
use crate::packet::{HEADER_LEN_BYTES, RawHeader};
use crate::port::PortSpec;
use crate::port_config::HostPorts;
use crate::queues::{RX, TX};
use crate::slab::SlabId;
use crate::unix_socket::ProgramSockets;

/// Most connections of a guest.
const MAX_CONNECTIONS: u32 = 8;
/// Most connections that wait for an answer.
const MAX_HALF_OPEN: u32 = 4;
/// Number of descriptors of a ring.
const RING: u16 = 64;
/// Receive buffers of a guest, and their length.
const BUFFERS: usize = 24;
const BUFFER_BYTES: usize = HEADER_LEN_BYTES as usize + 1024;

/// Driver of one guest.
pub struct Guest {
    /// Transmit queue.
    pub tx: ModelDriver,
    rx: ModelDriver,
    cid: u32,
    id: SlabId,
    buffers: HashMap<u16, (u64, u32)>,
    /// Receive buffers that are not offered.
    spare: Vec<(u64, u32)>,
}

/// Trust domain of two guests for the fuzzer.
pub struct Domain {
    /// Guests; the first is the hostile one.
    pub guests: Vec<Guest>,
    engine: VsockEngine,
    ledger: Ledger,
    now_ns: u64,
}

impl std::fmt::Debug for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Domain").finish_non_exhaustive()
    }
}

impl Domain {
    /// Makes a domain of two guests; host programs listen at `<folder>/vm<cid>_<port>`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(layout: Layout, folder: &Path) -> std::io::Result<Self> {
        let engine = VsockEngine::new(true, 1 << 20, 0)?;
        let ledger = Ledger::default();
        let mut domain = Self { guests: Vec::new(), engine, ledger, now_ns: 0 };
        for cid in [3, 4] {
            let programs = ProgramSockets::at("fuzz", &folder.join(format!("vm{cid}")));
            let spec = PortSpec {
                vm: VmId::NONE,
                cid,
                programs: programs.map_err(std::io::Error::other)?,
                max_connections: MAX_CONNECTIONS,
                max_half_open: MAX_HALF_OPEN,
                buffer_bytes: LOWEST_BUFFER_BYTES,
                host_ports: HostPorts::All,
                services: Vec::new(),
                listener: None,
                stats: Arc::new(VsockStats::default()),
            };
            let id = domain.engine.add_port(spec)?;
            let options = ModelOptions { in_order: true, event_idx: true, ..Default::default() };
            let ram = GuestRam::new(1 << 20);
            let rx = ModelDriver::in_ram(Arc::clone(&ram), layout, RING, options);
            let tx = ModelDriver::in_ram(ram, layout, RING, options);
            for (index, driver) in [(RX, &rx), (TX, &tx)] {
                let started = domain.engine.start_queue(id, driver.vring(index));
                started.map_err(std::io::Error::other)?;
            }
            domain.guests.push(Guest {
                tx,
                rx,
                cid,
                id,
                buffers: HashMap::new(),
                spare: Vec::new(),
            });
        }
        Ok(domain)
    }

    /// Runs a round. Returns the packets that each guest got. Used buffers are offered again, but
    /// by the hostile guest only if `is_reading`.
    ///
    /// # Panics
    /// A guest got what is no packet for it, or has more connections than there may be.
    pub fn turn(&mut self, ns: u64, is_reading: bool) -> [Vec<(RawHeader, Vec<u8>)>; 2] {
        for (at, guest) in self.guests.iter_mut().enumerate() {
            while guest.buffers.len() < BUFFERS && (is_reading || at > 0) {
                guest.offer();
            }
        }
        self.now_ns += ns;
        self.engine.poll(self.now_ns, &mut self.ledger);
        for guest in &mut self.guests {
            while guest.tx.used().is_some() {}
            let Some(port) = self.engine.table.ports.get(guest.id) else { continue };
            assert!(port.open <= MAX_CONNECTIONS, "{} connections", port.open);
            assert!(port.half_open <= MAX_HALF_OPEN, "{} are half open", port.half_open);
            assert!(port.keys.len() <= MAX_CONNECTIONS as usize);
            for end in port.keys.values().filter_map(|&id| self.engine.table.endpoints.get(id)) {
                assert!(end.conn.unread() <= LOWEST_BUFFER_BYTES, "{} bytes", end.conn.unread());
            }
        }
        let [hostile, friend] = &mut self.guests[..] else { return Default::default() };
        [hostile.collect(), friend.collect()]
    }

    /// Runs rounds until all connections of the hostile guest that only wait are over.
    pub fn settle(&mut self) {
        for _ in 0..8 {
            self.turn(DRAIN_TIMEOUT_NS, true);
            self.turn(IDLE_SOCKET_POLL_INTERVAL_NS, true);
        }
    }
}

impl Guest {
    fn offer(&mut self) {
        let spare = self.spare.pop();
        let buffer = spare.unwrap_or_else(|| (self.rx.alloc(BUFFER_BYTES), BUFFER_BYTES as u32));
        let id = self.rx.offer(&[], &[buffer]);
        self.buffers.insert(id, buffer);
    }

    /// Sends a packet.
    pub fn send(&mut self, header: &RawHeader, payload: &[u8]) {
        let buffer = self.tx.buffer(&[header.as_bytes(), payload].concat());
        self.tx.offer(&[buffer], &[]);
    }

    /// Makes a header from this guest, with room for answers.
    #[must_use]
    pub fn header(&self, dst_cid: u64, op: u16, src_port: u32, dst_port: u32) -> RawHeader {
        RawHeader {
            src_cid: u64::from(self.cid).into(),
            dst_cid: dst_cid.into(),
            src_port: src_port.into(),
            dst_port: dst_port.into(),
            kind: crate::packet::TYPE_STREAM.into(),
            op: op.into(),
            buf_alloc: (64u32 << 10).into(),
            ..RawHeader::default()
        }
    }

    fn collect(&mut self) -> Vec<(RawHeader, Vec<u8>)> {
        let mut packets = Vec::new();
        while let Some((id, written)) = self.rx.used() {
            let buffer = self.buffers.remove(&id);
            let Some((addr, len)) = buffer else { panic!("{id} was not offered") };
            self.spare.push((addr, len));
            assert!(written <= len, "{written} of {len} bytes written");
            if written == 0 {
                continue;
            }
            let bytes = self.rx.read(addr, written as usize);
            let (header, payload) = match RawHeader::read_from_prefix(&bytes) {
                Ok((header, payload)) => (header, payload),
                Err(_) => panic!("a packet of {written} bytes"),
            };
            assert_eq!(header.len.get() as usize, payload.len(), "used length");
            assert_eq!(header.dst_cid.get(), u64::from(self.cid));
            assert!((1..=7).contains(&header.op.get()));
            packets.push((header, payload.to_vec()));
        }
        packets
    }
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest").field("cid", &self.cid).finish_non_exhaustive()
    }
}
