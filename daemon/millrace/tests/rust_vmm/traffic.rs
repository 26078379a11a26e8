//! Traffic of the tests' guests on their devices: sectors, frames, a connection.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use block::config::feature;
use frontend::frame::{STATION_A, STATION_B, Station, write_headers, write_payload};
use queue::dirty::LOG_PAGE_BYTES;
use serde_json::{Value, json};
use vsock::packet::{ConnectionKey, HEADER_LEN_BYTES, HOST_CID, Op, RawHeader};
use zerocopy::{FromBytes, IntoBytes};

use crate::common::{Daemon, IN, OUT, Place};
use crate::order::Order;
use crate::vmm::{LIMIT, Vmm, wait_readable};

/// The guest's address of vsock.
const CID: u32 = 3;
const HOST_PORT: u32 = 1024;
/// Length of a virtio-net header, version 1.
const NET_HEADER_BYTES: usize = 12;
const FRAME_BYTES: usize = 600;
pub const DISK_BYTES: u64 = 1 << 20;
const SECTOR_BYTES: usize = 512;
/// `VIRTIO_NET_F_MAC`, `VIRTIO_NET_F_STATUS`.
const NET_FEATURES: u64 = 1 << 5 | 1 << 16;
/// `VIRTIO_BLK_T_FLUSH`.
const FLUSH: u32 = 4;

/// A daemon's ports for all of it, with MODE of the sockets and WHOLE network devices. Receivers
/// are waited for as long as can be.
pub const CONFIG: &str = "
[[switch]]
name='lan'
hold_us=1000000
[[vm]]
name='a'
[[vm.net]]
name='n'
switch='lan'
mac='02:00:00:00:00:0a'
mode='MODE'
whole_device=WHOLE
addresses=['10.99.0.10']
[[vm]]
name='b'
[[vm.net]]
name='n'
switch='lan'
mac='02:00:00:00:00:0b'
mode='MODE'
whole_device=WHOLE
addresses=['10.99.0.11']
[[vm]]
name='c'
[[vm.disk]]
name='d'
format='raw'
mode='MODE'
path='@/disk.img'
[vm.vsock]
cid=3
mode='MODE'
path='@/v'
";

/// Kinds of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Net,
    Disk,
    Vsock,
}

/// A buffer in pages of its own.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    addr: u64,
    len: usize,
}

impl Buffer {
    fn new(vmm: &Vmm, len: usize) -> Self {
        let addr = vmm.ram.alloc_aligned(len, LOG_PAGE_BYTES);
        // What comes next begins in a page of its own, too.
        vmm.ram.alloc_aligned(1, LOG_PAGE_BYTES);
        Self { addr, len }
    }

    fn with(vmm: &Vmm, bytes: &[u8]) -> Self {
        let buffer = Self::new(vmm, bytes.len());
        vmm.ram.write(buffer.addr, bytes);
        buffer
    }

    fn part(self) -> (u64, u32) {
        (self.addr, self.len as u32)
    }

    fn read(self, vmm: &Vmm) -> Vec<u8> {
        vmm.ram.read(self.addr, self.len)
    }

    fn page(self) -> u64 {
        self.addr / LOG_PAGE_BYTES
    }
}

/// Requests on the way.
enum Pending {
    Disk { sector: u64, fill: u8, status: [Buffer; 2], data: Buffer },
    Frame { frame: Vec<u8>, room: Buffer },
    Vsock { guest_port: u32 },
}

/// The devices of one kind, all driven in the same order, and what goes through them.
pub struct Traffic {
    pub kind: Kind,
    /// Two network cards, which talk to each other, or one device.
    pub vmms: Vec<Vmm>,
    host: Option<UnixListener>,
    image: PathBuf,
    /// Content that the image is to have.
    content: Vec<u8>,
    pending: VecDeque<Pending>,
    /// Receive buffers of the vsock device, in the order of the ring.
    vsock_room: VecDeque<Buffer>,
    round: u8,
    /// Pages that the devices wrote since the last [`Traffic::take_pages`], per VMM.
    written: Vec<Vec<u64>>,
}

impl Traffic {
    /// Makes a guest that is not connected. The place's daemon serves [`CONFIG`].
    pub fn new(kind: Kind, order: &'static Order, place: &Place) -> Self {
        let vmm = |socket: &str, queues, features| {
            Vmm::new(order, &place.socket(socket), queues, features)
        };
        let vmms = match kind {
            Kind::Net => vec![vmm("a-n.sock", 2, NET_FEATURES), vmm("b-n.sock", 2, NET_FEATURES)],
            Kind::Disk => vec![vmm("c-d.sock", 1, feature::FLUSH | feature::CONFIG_WCE)],
            Kind::Vsock => vec![vmm("c-vsock.sock", 3, 0)],
        };
        let host = (kind == Kind::Vsock).then(|| listen(&place.path(&format!("v_{HOST_PORT}"))));
        let written = vmms.iter().map(|_| Vec::new()).collect();
        let (pending, vsock_room) = (VecDeque::new(), VecDeque::new());
        let (image, content) = (place.path("disk.img"), vec![0; DISK_BYTES as usize]);
        Self { kind, vmms, host, image, content, pending, vsock_room, round: 0, written }
    }

    pub fn order(&self) -> &'static Order {
        self.vmms[0].order
    }

    /// In this order: the card that is sent to before the one that sends first.
    pub fn each(&mut self, act: impl Fn(&mut Vmm)) {
        self.vmms.iter_mut().rev().for_each(act);
    }

    /// The VMMs are gone, and the daemon knows.
    pub fn hang_up(&mut self, daemon: &Daemon) {
        self.each(Vmm::hang_up);
        if self.order().listens {
            // The next connection comes after the end of this one.
            return self.each(Vmm::dial);
        }
        self.wait(daemon, "connected", json!(false));
    }

    /// Waits until the ports' status says so.
    pub fn wait(&self, daemon: &Daemon, key: &str, value: Value) {
        let ports: &[(&str, &str)] = match self.kind {
            Kind::Net => &[("a", "n"), ("b", "n")],
            Kind::Disk => &[("c", "d")],
            Kind::Vsock => &[("c", "vsock")],
        };
        for (vm, port) in ports {
            daemon.wait_port(vm, port, &[(key, value.clone())]);
        }
    }

    /// One piece of I/O in each direction, checked.
    pub fn run(&mut self) {
        self.offer();
        self.finish();
        if self.kind == Kind::Net {
            self.offer_frame(1, STATION_B, 0, STATION_A);
            self.finish();
        }
    }

    /// The requests of [`Traffic::run`], for a device that may or may not be there.
    pub fn offer(&mut self) {
        self.round += 1;
        match self.kind {
            Kind::Net => self.offer_frame(0, STATION_A, 1, STATION_B),
            Kind::Disk => self.offer_sector(),
            Kind::Vsock => self.offer_connection(),
        }
    }

    /// Waits for all that was offered, and checks it.
    pub fn finish(&mut self) {
        while let Some(pending) = self.pending.pop_front() {
            match pending {
                Pending::Disk { sector, fill, status, data } => {
                    self.finish_sector(sector, fill, status, data);
                }
                Pending::Frame { frame, room } => self.finish_frame(&frame, room),
                Pending::Vsock { guest_port } => self.finish_connection(guest_port),
            }
        }
    }

    /// The pages that devices wrote, per VMM.
    pub fn take_pages(&mut self) -> Vec<Vec<u64>> {
        self.written.iter_mut().map(std::mem::take).collect()
    }

    fn wrote(&mut self, vmm: usize, buffer: Buffer) {
        self.written[vmm].push(buffer.page());
    }

    fn offer_sector(&mut self) {
        let vmm = &mut self.vmms[0];
        let (sector, fill) = (u64::from(self.round), self.round);
        let status = [Buffer::with(vmm, &[0xff]), Buffer::with(vmm, &[0xff])];
        let data = Buffer::new(vmm, SECTOR_BYTES);
        let write = Buffer::with(vmm, &head(OUT, sector));
        let content = Buffer::with(vmm, &[fill; SECTOR_BYTES]);
        // The sector before has been written by the last round, or is empty.
        let read = Buffer::with(vmm, &head(IN, sector - 1));
        let ring = &mut vmm.rings[0];
        ring.driver.stage(&[write.part(), content.part()], &[status[0].part()]);
        ring.driver.stage(&[read.part()], &[data.part(), status[1].part()]);
        ring.driver.publish();
        ring.kick();
        self.pending.push_back(Pending::Disk { sector, fill, status, data });
    }

    fn finish_sector(&mut self, sector: u64, fill: u8, status: [Buffer; 2], data: Buffer) {
        let vmm = &mut self.vmms[0];
        vmm.rings[0].wait_used();
        vmm.rings[0].wait_used();
        for status in status {
            assert_eq!(status.read(vmm), [0], "sector {sector}");
        }
        assert_eq!(data.read(vmm), vec![fill - 1; SECTOR_BYTES], "before sector {sector}");
        [status[0], status[1], data].into_iter().for_each(|buffer| self.wrote(0, buffer));
        let begin = sector as usize * SECTOR_BYTES;
        self.content[begin..begin + SECTOR_BYTES].fill(fill);
        self.flush();
        let mut found = vec![0; self.content.len()];
        File::open(&self.image).unwrap().read_exact_at(&mut found, 0).unwrap();
        assert!(found == self.content, "the image after sector {sector} was written and flushed");
    }

    fn flush(&mut self) {
        let vmm = &mut self.vmms[0];
        let (request, status) = (Buffer::with(vmm, &head(FLUSH, 0)), Buffer::with(vmm, &[0xff]));
        let ring = &mut vmm.rings[0];
        ring.driver.offer(&[request.part()], &[status.part()]);
        ring.kick();
        ring.wait_used();
        assert_eq!(status.read(vmm), [0], "flush");
        self.wrote(0, status);
    }

    fn offer_frame(&mut self, from: usize, sender: Station, to: usize, receiver: Station) {
        let room = Buffer::new(&self.vmms[to], NET_HEADER_BYTES + FRAME_BYTES);
        let ring = &mut self.vmms[to].rings[0];
        ring.driver.offer(&[], &[room.part()]);
        ring.kick();
        let mut frame = vec![0; FRAME_BYTES];
        write_headers(&mut frame, sender, receiver);
        write_payload(&mut frame, u64::from(self.round));
        let buffer = Buffer::with(&self.vmms[from], &[&[0; NET_HEADER_BYTES], &frame[..]].concat());
        let ring = &mut self.vmms[from].rings[1];
        ring.driver.offer(&[buffer.part()], &[]);
        ring.kick();
        self.pending.push_back(Pending::Frame { frame, room });
    }

    /// Checks that a frame came to the card with its receiver's address, and to no other.
    fn finish_frame(&mut self, frame: &[u8], room: Buffer) {
        let to = usize::from(frame[..6] == STATION_B.mac);
        self.vmms[to].rings[0].wait_used();
        assert_eq!(room.read(&self.vmms[to])[NET_HEADER_BYTES..], *frame);
        self.vmms[1 - to].rings[1].wait_used();
        self.wrote(to, room);
    }

    fn offer_connection(&mut self) {
        let guest_port = 5000 + u32::from(self.round);
        for _ in 0..2 {
            self.offer_room();
        }
        self.send(guest_port, Op::Request, &[]);
        self.pending.push_back(Pending::Vsock { guest_port });
    }

    fn offer_room(&mut self) {
        let room = Buffer::new(&self.vmms[0], HEADER_LEN_BYTES as usize + 256);
        let ring = &mut self.vmms[0].rings[0];
        ring.driver.offer(&[], &[room.part()]);
        ring.kick();
        self.vsock_room.push_back(room);
    }

    fn send(&mut self, guest_port: u32, op: Op, content: &[u8]) {
        let key = ConnectionKey { guest_port, peer_cid: HOST_CID, peer_port: HOST_PORT };
        let back = RawHeader::to_guest(key, CID, op);
        let header = RawHeader {
            src_cid: back.dst_cid,
            dst_cid: back.src_cid,
            src_port: back.dst_port,
            dst_port: back.src_port,
            len: (content.len() as u32).into(),
            buf_alloc: (1 << 16).into(),
            ..back
        };
        let packet = Buffer::with(&self.vmms[0], &[header.as_bytes(), content].concat());
        let ring = &mut self.vmms[0].rings[1];
        ring.driver.offer(&[packet.part()], &[]);
        ring.kick();
    }

    /// The next packet to the guest that says more than how much room there is.
    fn receive(&mut self) -> (RawHeader, Vec<u8>) {
        loop {
            self.vmms[0].rings[0].wait_used();
            let room = self.vsock_room.pop_front().expect("a buffer for each packet");
            self.wrote(0, room);
            self.offer_room();
            let bytes = room.read(&self.vmms[0]);
            let (header, content) = RawHeader::read_from_prefix(&bytes).unwrap();
            if header.op.get() != Op::CreditUpdate as u16 {
                return (header, content[..header.len.get() as usize].to_vec());
            }
        }
    }

    fn finish_connection(&mut self, guest_port: u32) {
        let (header, _) = self.receive();
        assert_eq!((header.op.get(), header.dst_port.get()), (Op::Response as u16, guest_port));
        let listener = self.host.as_ref().expect("a listener");
        wait_readable(listener.as_raw_fd(), "no connection to the host");
        let (mut host, _) = listener.accept().unwrap();
        host.set_read_timeout(Some(LIMIT)).unwrap();
        self.send(guest_port, Op::Rw, b"from the guest");
        let mut bytes = [0; 14];
        host.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"from the guest");
        host.write_all(b"from the host").unwrap();
        let (header, content) = self.receive();
        assert_eq!(header.op.get(), Op::Rw as u16);
        assert_eq!(content, b"from the host");
        // The guest ends it, so that the host's end of it is not news later.
        self.send(guest_port, Op::Rst, &[]);
        assert_eq!(host.read(&mut bytes).unwrap_or(0), 0);
        // The packets of the guest: request, content, reset.
        for _ in 0..3 {
            self.vmms[0].rings[1].wait_used();
        }
    }

    /// The guest boots again: what was posted is forgotten, and the rings are fresh.
    pub fn reboot(&mut self) {
        self.vsock_room.clear();
        self.each(Vmm::renew_rings);
    }
}

/// The first part of a disk request.
fn head(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn listen(path: &Path) -> UnixListener {
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path).unwrap()
}
