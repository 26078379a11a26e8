//! The crate's face: a domain on a real sidecore, ports as sessions use them.

use base::clock::MonotonicClock;
use sidecore::{Sidecore, SidecoreConfig};
use vhost_user::device::{Device, DeviceKind};

use super::*;
use crate::{Domain, DomainConfig, Peer, VsockError, VsockPort};

fn sidecore() -> Sidecore {
    let config = SidecoreConfig { yield_when_idle: true, ..SidecoreConfig::default() };
    Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap()
}

struct House {
    core: Sidecore,
    domain: Option<Domain>,
    dir: tempfile::TempDir,
}

impl House {
    fn new() -> Self {
        let core = sidecore();
        let config = DomainConfig::new("tenant", true);
        let domain = Some(Domain::new(&core, config, Arc::new(MonotonicClock)).unwrap());
        Self { core, domain, dir: tempfile::tempdir().unwrap() }
    }

    fn domain(&self) -> &Domain {
        self.domain.as_ref().unwrap()
    }

    fn config(&self, cid: u64) -> VsockPortConfig {
        let name = format!("vm{cid}");
        VsockPortConfig::new(name.clone(), cid, self.dir.path().join(name))
    }

    fn running_guest(&self, cid: u32) -> (Guest, Arc<VsockPort>) {
        let port = self.domain().add_port(self.config(cid.into())).unwrap();
        let mut guest = Guest::new(cid, Layout::Split);
        guest.give_buffers(32, HEADER + 4096);
        port.activate(port.features()).unwrap();
        port.start_queue(guest.rx.vring(RX)).unwrap();
        port.start_queue(guest.tx.vring(TX)).unwrap();
        (guest, port)
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.domain = None;
        self.core.shutdown();
    }
}

/// The next packet of a guest that sleeps until it is interrupted, as a kernel does.
fn packet(guest: &mut Guest) -> Packet {
    use std::os::fd::AsFd;
    loop {
        guest.collect();
        if guest.rx.kick_needed() {
            guest.rx.kick_event().signal().unwrap();
        }
        if let Some(p) = guest.inbox.pop_front() {
            return p;
        }
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(
            guest.rx.call_event().as_fd(),
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, None).unwrap();
        guest.rx.interrupted();
    }
}

fn send(sock: &mut Sock, guest: &mut Guest, op: Op, payload: &[u8]) {
    sock.send(guest, op, 0, payload);
    guest.tx.kick_event().signal().unwrap();
}

#[test]
fn a_sleeping_sidecore_wakes_for_guests_and_host_programs() {
    let house = House::new();
    let (mut guest, port) = house.running_guest(3);
    let mut stream = UnixStream::connect(house.dir.path().join("vm3")).unwrap();
    stream.write_all(b"CONNECT 1234\n").unwrap();
    let request = packet(&mut guest);
    let mut sock = Sock::new(request.key());
    sock.on(&request);
    send(&mut sock, &mut guest, Op::Response, &[]);
    let expected = format!("OK {}\n", sock.key.peer_port);
    let mut line = vec![0; expected.len()];
    stream.read_exact(&mut line).unwrap();
    assert_eq!(line, expected.as_bytes());
    for round in 0u8..50 {
        stream.write_all(&[round; 100]).unwrap();
        while sock.received.len() < 100 {
            let p = packet(&mut guest);
            sock.on(&p);
        }
        sock.take();
        assert_eq!(std::mem::take(&mut sock.received), [round; 100]);
        send(&mut sock, &mut guest, Op::Rw, &[!round; 70]);
        let mut answer = [0; 70];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [!round; 70]);
    }
    let list = port.connections().unwrap();
    assert_eq!(list.len(), 1);
    assert_eq!((list[0].guest_port, list[0].peer, list[0].state), (1234, Peer::Host, "open"));
    assert_eq!((list[0].bytes_to_guest, list[0].bytes_from_guest), (5000, 3500));
    assert_eq!(port.stats().connections.get(), 1);
    // A kick is counted when the sidecore next sleeps; after each call it tries to.
    let counted = (0..10_000).any(|_| {
        port.connections().unwrap();
        guest.tx.stats().kicks.get() > 0
    });
    assert!(counted, "kicks are counted");
    port.reset();
    assert_eq!(stream.read(&mut line).unwrap(), 0, "a reset ends the connections");
    assert!(port.connections().unwrap().is_empty());
}

#[test]
fn queues_stop_and_come_back_as_they_were() {
    let house = House::new();
    let (mut guest, port) = house.running_guest(3);
    let mut sock = Sock::new(ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 9 });
    send(&mut sock, &mut guest, Op::Request, &[]);
    assert_eq!(packet(&mut guest).op(), 3);
    let rx = port.stop_queue(RX).unwrap().unwrap();
    let tx = port.stop_queue(TX).unwrap().unwrap();
    assert_eq!((rx.queue.position().avail, rx.queue.position().used), (1, 1));
    assert_eq!((tx.queue.position().avail, tx.queue.position().used), (1, 1));
    assert!(port.stop_queue(RX).unwrap().is_none());
    assert!(port.stop_queue(77).unwrap().is_none());
    port.start_queue(rx).unwrap();
    port.start_queue(tx).unwrap();
    assert!(port.start_queue(guest.rx.vring(RX)).is_err(), "it runs already");
    assert!(port.start_queue(guest.rx.vring(3)).is_err(), "there are three");
    port.update_memory(guest.rx.memory()).unwrap();
    send(&mut sock, &mut guest, Op::Request, &[]);
    assert_eq!(packet(&mut guest).op(), 3);
}

#[test]
fn the_config_space_is_the_cid() {
    let house = House::new();
    let port = house.domain().add_port(house.config(0x0102_0304)).unwrap();
    assert_eq!((port.kind(), port.has_config(), port.queue_count()), (DeviceKind::Vsock, true, 3));
    let mut config = [0xff; 8];
    port.read_config(0, &mut config).unwrap();
    assert_eq!(config, [4, 3, 2, 1, 0, 0, 0, 0]);
    let mut part = [0xff; 2];
    port.read_config(2, &mut part).unwrap();
    assert_eq!(part, [2, 1]);
    // Guests may read behind it: a refusal would leave some front ends waiting for the bytes.
    port.read_config(1, &mut config).unwrap();
    assert_eq!(config, [3, 2, 1, 0, 0, 0, 0, 0]);
    port.read_config(u32::MAX, &mut part).unwrap();
    assert_eq!(part, [0, 0]);
    assert!(port.write_config(0, &[0]).is_err());
}

#[test]
fn bad_ports_are_refused_with_the_limit() {
    let house = House::new();
    let refused = |change: fn(&mut VsockPortConfig), text: &str| {
        let mut config = house.config(3);
        change(&mut config);
        let error = house.domain().add_port(config).unwrap_err().to_string();
        assert!(error.contains(text), "{error:?} lacks {text:?}");
    };
    refused(|c| c.cid = 2, "CID 2 is outside 3..=4294967294");
    refused(|c| c.cid = (1 << 32) - 1, "4294967295");
    refused(|c| c.max_connections = 0, "max_connections 0 is outside 1..=16384");
    refused(|c| c.max_connections = 16_385, "16385");
    refused(|c| c.max_half_open = 1025, "max_half_open 1025 is outside 1..=1024");
    refused(|c| c.buffer_bytes = 100, "buffer_bytes 100 is outside 4096..=1048576");
    refused(|c| c.socket = "/".repeat(97).into(), "97 bytes; the limit is 96");
    refused(|c| c.name = String::new(), "length of the name 0");
    refused(
        |c| c.socket = "/nowhere/at/all".into(),
        "vm3: its Unix socket /nowhere/at/all: opening its folder",
    );
    house.domain().add_port(house.config(3)).unwrap();
    let mut same = house.config(3);
    same.name = "other".into();
    let error = house.domain().add_port(same).unwrap_err();
    assert!(matches!(error, VsockError::CidTaken { .. }), "{error}");
}

#[test]
fn removed_ports_leave_nothing() {
    let house = House::new();
    let (_guest, port) = house.running_guest(3);
    let path = house.dir.path().join("vm3");
    assert!(path.exists());
    house.domain().remove_port("vm3").unwrap();
    assert!(!path.exists() && house.domain().ports().is_empty());
    assert!(matches!(house.domain().remove_port("vm3"), Err(VsockError::NoPort(_))));
    // Its session may still call: nothing happens to those who came after.
    let guest = Guest::new(3, Layout::Split);
    assert!(port.start_queue(guest.rx.vring(RX)).is_err());
    assert!(port.stop_queue(RX).unwrap().is_none());
    port.reset();
    house.domain().add_port(house.config(3)).unwrap();
    assert!(port.start_queue(guest.rx.vring(RX)).is_err());
}

#[test]
fn a_port_that_hosts_may_not_call_has_no_socket() {
    let house = House::new();
    let mut config = house.config(3);
    config.host_connects = false;
    house.domain().add_port(config).unwrap();
    assert!(!house.dir.path().join("vm3").exists());
}

#[test]
fn a_dropped_domain_takes_its_sockets_along() {
    let mut house = House::new();
    let port = house.domain().add_port(house.config(3)).unwrap();
    house.domain = None;
    assert!(!house.dir.path().join("vm3").exists());
    assert!(port.connections().is_err());
    port.reset();
    assert_eq!(house.core.stats().panics.get(), 0);
}

#[test]
fn abuse_V3_a_call_that_would_block_holds_up_nobody() {
    let house = House::new();
    let (mut bad, _bad_port) = house.running_guest(3);
    let (mut good, _good_port) = house.running_guest(4);
    // The VMM fills its eventfd, and takes back what we set when we got it.
    base::testing::fill_and_block(bad.rx.call_event());
    let key = ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 };
    for guest in [&mut bad, &mut good] {
        let header = guest.header(key, Op::Request);
        guest.send(&header, &[]);
        guest.tx.kick_event().signal().unwrap();
    }
    assert_eq!(packet(&mut good).op(), 3);
    // Its own answer is in its ring: it has only itself not to be told.
    assert_eq!(packet(&mut bad).op(), 3);
    assert!(bad.rx.health().is_live());
    assert_eq!(house.core.stats().stalls.get(), 0);
    assert!(good.rx.health().is_live());
}
