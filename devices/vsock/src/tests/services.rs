//! Services: ports of the host that the daemon answers itself.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use rustix::fs::OFlags;

use super::*;
use crate::limits::{HIGHEST_PRIVILEGED_PORT, MAX_SERVICES};
use crate::{Domain, DomainConfig, GuestResetHook, HostService, VsockError};

const PORT: u32 = 28_018;

/// A service whose connections come out of a channel.
fn service(privileged: bool) -> (HostService, Receiver<OwnedFd>) {
    let (sender, receiver) = sync_channel(4);
    let sink = Arc::new(move |fd| drop(sender.try_send(fd)));
    (HostService { port: PORT, privileged, sink, on_guest_reset: None }, receiver)
}

/// A world whose only guest has a service.
fn world(privileged: bool) -> (TestDomain, Receiver<OwnedFd>) {
    let (mut world, (service, receiver)) = (TestDomain::new(), service(privileged));
    world.add_guest(Layout::Split, |config| config.services = vec![service]);
    (world, receiver)
}

/// Sends the request of a guest, and gives the socket with what came of it.
fn request(world: &mut TestDomain, guest: usize, from: u32, peer_cid: u32) -> Sock {
    let mut sock = Sock::new(ConnectionKey { guest_port: from, peer_cid, peer_port: PORT });
    sock.send(&mut world.guests[guest], Op::Request, 0, &[]);
    world.feed(guest, &mut sock);
    sock
}

#[test]
fn a_service_gets_a_stream_both_ways() {
    let (mut world, receiver) = world(true);
    let mut sock = request(&mut world, 0, HIGHEST_PRIVILEGED_PORT, HOST_CID);
    assert!(sock.open && !sock.reset);
    let fd = receiver.try_recv().unwrap();
    let flags = rustix::fs::fcntl_getfl(&fd).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK), "the service's end blocks");
    let on_exec = rustix::io::fcntl_getfd(&fd).unwrap();
    assert!(on_exec.contains(rustix::io::FdFlags::CLOEXEC));
    let mut stream = UnixStream::from(fd);
    sock.send(&mut world.guests[0], Op::Rw, 0, b"hello");
    world.settle();
    let mut got = [0; 5];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    stream.write_all(b"welcome").unwrap();
    world.feed(0, &mut sock);
    assert_eq!(sock.received, b"welcome");
    let connections = world.engine.list_connections(world.ids[0]);
    assert_eq!((connections.len(), connections[0].peer), (1, crate::Peer::Host));
    drop(stream);
    world.feed(0, &mut sock);
    assert_eq!(sock.peer_shut, 3, "the service has closed");
    assert_eq!((world.stats[0].opened_by_guest.get(), world.stats[0].refused.get()), (1, 0));
}

#[test]
fn a_service_sees_that_the_guest_has_gone() {
    let (mut world, receiver) = world(true);
    let mut sock = request(&mut world, 0, 1000, HOST_CID);
    let mut stream = UnixStream::from(receiver.try_recv().unwrap());
    stream.set_nonblocking(true).unwrap();
    let mut got = Vec::new();
    assert!(!drain(&mut stream, &mut got));
    sock.send(&mut world.guests[0], Op::Rst, 0, &[]);
    world.settle();
    assert!(drain(&mut stream, &mut got) && got.is_empty());
    // A guest that starts anew has no connections either.
    let _ = request(&mut world, 0, 1000, HOST_CID);
    let mut stream = UnixStream::from(receiver.try_recv().unwrap());
    stream.set_nonblocking(true).unwrap();
    world.engine.table.drop_connections(world.ids[0]);
    assert!(drain(&mut stream, &mut got));
}

#[test]
fn a_service_is_told_that_the_guest_begins_anew() {
    let (service, receiver) = service(false);
    let told = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&told);
    let gone: GuestResetHook = Arc::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let mut world = TestDomain::new();
    let service = HostService { on_guest_reset: Some(gone), ..service };
    world.add_guest(Layout::Split, |config| config.services = vec![service]);
    // Its rings are new.
    let before = told.load(Ordering::Relaxed);
    let mut sock = request(&mut world, 0, 1000, HOST_CID);
    drop(receiver.try_recv().unwrap());
    sock.send(&mut world.guests[0], Op::Rst, 0, &[]);
    world.settle();
    // One connection's end says nothing about the guest.
    assert_eq!(told.load(Ordering::Relaxed), before);
    world.engine.table.drop_connections(world.ids[0]);
    assert_eq!(told.load(Ordering::Relaxed), before + 1);
}

#[test]
fn a_sink_that_drops_the_socket_ends_the_connection() {
    let (mut world, receiver) = world(false);
    drop(receiver);
    let sock = request(&mut world, 0, 5000, HOST_CID);
    assert!(sock.open);
    assert_eq!(sock.peer_shut, 3);
}

#[test]
fn abuse_I_an_unprivileged_port_does_not_reach_a_privileged_service() {
    let (mut world, receiver) = world(true);
    // A program of the host does not stand in for the service either.
    let listener = world.listen(0, PORT);
    listener.set_nonblocking(true).unwrap();
    for from in [HIGHEST_PRIVILEGED_PORT + 1, 1 << 16 | 1023, u32::MAX] {
        let sock = request(&mut world, 0, from, HOST_CID);
        assert!(sock.reset && !sock.open, "port {from}");
    }
    assert!(receiver.try_recv().is_err() && listener.accept().is_err());
    assert_eq!((world.stats[0].unprivileged.get(), world.stats[0].refused.get()), (3, 3));
    assert_eq!(world.stats[0].connections.get(), 0);
    assert!(request(&mut world, 0, 0, HOST_CID).open, "port 0 is below 1,024");
    assert!(receiver.try_recv().is_ok() && listener.accept().is_err());
}

#[test]
fn abuse_I_another_guest_does_not_reach_a_service() {
    let (mut world, receiver) = world(false);
    world.add_guest(Layout::Packed, |_| {});
    // Its own host has no such port.
    assert!(request(&mut world, 1, 7, HOST_CID).reset);
    // Under the first guest's CID there is the first guest, who is asked.
    let mut sock = Sock::new(ConnectionKey { guest_port: 8, peer_cid: 3, peer_port: PORT });
    sock.send(&mut world.guests[1], Op::Request, 0, &[]);
    let asked = world.packet(0);
    assert_eq!((asked.op(), asked.key().peer_cid, asked.key().guest_port), (1, 4, PORT));
    assert!(receiver.try_recv().is_err());
    // Nor does it by a lie about who it is.
    let mut header =
        world.guests[1].header(ConnectionKey { peer_cid: HOST_CID, ..sock.key }, Op::Request);
    header.src_cid = 3.into();
    world.guests[1].send(&header, &[]);
    world.settle();
    assert_eq!(world.stats[1].malformed.get(), 1);
    assert!(receiver.try_recv().is_err());
}

#[test]
fn abuse_R10_a_service_has_no_more_connections_than_the_port() {
    let (mut world, (service, receiver)) = (TestDomain::new(), service(true));
    world.add_guest(Layout::Split, |config| {
        config.services = vec![service];
        config.max_connections = 2;
    });
    let opened = (1..=3).filter(|from| request(&mut world, 0, *from, HOST_CID).open).count();
    assert_eq!((opened, receiver.try_iter().count()), (2, 2));
    assert_eq!((world.stats[0].refused.get(), world.stats[0].unprivileged.get()), (1, 0));
}

#[test]
fn allowed_host_ports_do_not_matter_to_services() {
    let (mut world, (service, receiver)) = (TestDomain::new(), service(true));
    world.add_guest(Layout::Packed, |config| {
        config.services = vec![service];
        config.host_ports = HostPorts::Only(Vec::new());
    });
    assert!(request(&mut world, 0, 1, HOST_CID).open);
    assert!(receiver.try_recv().is_ok());
}

#[test]
fn services_that_cannot_be_are_refused() {
    let config = sidecore::SidecoreConfig { yield_when_idle: true, ..Default::default() };
    let clock = Arc::new(base::clock::MonotonicClock);
    let core = sidecore::Sidecore::spawn(config, Arc::clone(&clock) as _).unwrap();
    let domain = Domain::new(&core, DomainConfig::new("tenant", false), clock).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let add = |ports: &[u32]| {
        let mut config = VsockPortConfig::new("vm", 3, dir.path().join("vm"));
        let numbered = |&port| HostService { port, ..service(true).0 };
        config.services = ports.iter().map(numbered).collect();
        domain.add_port(config)
    };
    let twice = add(&[5, 6, 5]).unwrap_err();
    assert!(matches!(twice, VsockError::ServiceTwice { port: 5, .. }));
    assert_eq!(twice.to_string(), "port vm: service port 5 is given twice");
    for ports in [&[0][..], &[u32::MAX], &[1; MAX_SERVICES + 1]] {
        let e = add(ports).unwrap_err();
        assert!(matches!(e, VsockError::OutOfRange { .. }), "{e}");
    }
    let all: Vec<u32> = (1..=MAX_SERVICES as u32).collect();
    add(&all).unwrap();
    drop(domain);
    core.shutdown();
}

#[test]
fn a_client_from_before_a_restart_is_told_at_once_and_one_that_stayed_is_not() {
    for forgets in [true, false] {
        let (mut world, _receiver) = world(true);
        let sock = request(&mut world, 0, HIGHEST_PRIVILEGED_PORT, HOST_CID);
        assert!(sock.open);
        let id = world.ids[0];
        if forgets {
            world.engine.table.drop_connections(id);
        }
        let queues = [RX, TX].map(|index| world.engine.stop_queue(id, index).unwrap());
        for queue in queues {
            world.engine.start_queue(id, queue).unwrap();
        }
        world.settle();
        let told = world.guests[0].inbox.drain(..).filter(|p| p.key() == sock.key).count();
        assert_eq!(told, usize::from(forgets));
    }
}
