use std::os::fd::BorrowedFd;

use base::doorbell::Doorbell;
use base::testing::lingering;
use rustix::net::{SocketAddrUnix, connect, send as send_bytes};
use zerocopy::IntoBytes;

use super::*;
use crate::session_store::{SavedSession, SavedVring, SessionStore, file_key};

struct Running {
    dir: tempfile::TempDir,
    stop: std::sync::Arc<Event>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    fn start() -> Self {
        Self::start_after(|_| ())
    }

    /// A holder to which `say` has said something when it begins to look.
    fn start_after(say: impl FnOnce(&Self)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let stop = std::sync::Arc::new(Event::new().unwrap());
        let path = dir.path().join("holder.sock");
        let mut holder = Holder::listen(&path).unwrap();
        let end = stop.clone();
        let mut running = Self { dir, stop, thread: None };
        say(&running);
        let thread = std::thread::spawn(move || while holder.serve_event(&end).unwrap() {});
        running.thread = Some(thread);
        running
    }

    fn session_store(&self) -> HolderStore {
        HolderStore::new(self.dir.path().join("holder.sock"))
    }

    fn raw(&self) -> OwnedFd {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let path = self.dir.path().join("holder.sock");
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        socket
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.signal().unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn session() -> SavedSession {
    let vring = SavedVring { has_kick: true, size: Some(256), base: 7, ..Default::default() };
    SavedSession { version: 1, vrings: vec![vring; 2], ..Default::default() }
}

#[test]
fn a_ports_file_is_kept_beside_its_session() {
    let holder = Running::start();
    let (event, other) = (Event::new().unwrap(), Event::new().unwrap());
    assert!(holder.session_store().load_file("vm/a").unwrap().is_none());
    holder.session_store().save("vm/a", &session(), &[other.as_fd(), other.as_fd()]).unwrap();
    holder.session_store().save_file("vm/a", event.as_fd()).unwrap();
    // The session goes, the file stays.
    holder.session_store().forget("vm/a").unwrap();
    event.signal().unwrap();
    let back = holder.session_store().load_file("vm/a").unwrap().unwrap();
    assert!(Doorbell::from_peer(back.into()).unwrap().drain());
    assert_eq!(holder.session_store().list().unwrap(), [file_key("vm/a")]);
    holder.session_store().forget_file("vm/a").unwrap();
    assert!(holder.session_store().load_file("vm/a").unwrap().is_none());
}

#[test]
fn what_is_put_comes_back_with_its_descriptors() {
    let holder = Running::start();
    let events: Vec<Event> = (0..3).map(|_| Event::new().unwrap()).collect();
    let fds: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
    assert_eq!(session().fd_count(), fds.len());
    holder.session_store().save("vm/a", &session(), &fds).unwrap();
    holder.session_store().save("vm/b", &session(), &fds[..1]).unwrap();
    holder.session_store().save("vm/b", &session(), &fds[1..]).unwrap();
    assert_eq!(holder.session_store().list().unwrap(), ["vm/a", "vm/b"]);

    let (state, back) = holder.session_store().load("vm/a").unwrap().unwrap();
    assert_eq!((state, back.len()), (session(), 3));
    events[2].signal().unwrap();
    let twin = Doorbell::from_peer(back.into_iter().nth(2).unwrap()).unwrap();
    assert!(twin.drain());

    assert_eq!(holder.session_store().load("vm/b").unwrap().unwrap().1.len(), 2);
    holder.session_store().forget("vm/a").unwrap();
    holder.session_store().forget("vm/a").unwrap();
    assert!(holder.session_store().load("vm/a").unwrap().is_none());
    assert_eq!(holder.session_store().list().unwrap(), ["vm/b"]);
}

#[test]
fn the_largest_port_fits() {
    let holder = Running::start();
    let event = Event::new().unwrap();
    let fds = vec![event.as_fd(); MAX_FDS];
    let region = crate::session_store::SavedRegion {
        guest_addr: u64::MAX,
        user_addr: u64::MAX,
        len_bytes: u64::MAX,
        mmap_offset: u64::MAX,
    };
    let addrs = crate::session_store::SavedAddrs {
        flags: 1,
        desc: u64::MAX,
        used: u64::MAX,
        avail: u64::MAX,
        log: u64::MAX,
    };
    let vring = SavedVring {
        size: Some(u16::MAX),
        addrs: Some(addrs),
        base: u32::MAX,
        has_base: true,
        enabled: Some(false),
        polled: false,
        has_kick: true,
        has_call: true,
        has_err: true,
        running: false,
    };
    let state = SavedSession {
        regions: vec![region; base::limits::MAX_MEMORY_REGIONS],
        vrings: vec![vring; usize::from(base::limits::MAX_QUEUES)],
        has_slots: true,
        has_backend: true,
        log: Some((u64::MAX, u64::MAX)),
        ..session()
    };
    assert!(state.fd_count() <= MAX_FDS);
    holder.session_store().save("vm/large", &state, &fds).unwrap();
    let (back, fds) = holder.session_store().load("vm/large").unwrap().unwrap();
    assert_eq!((back, fds.len()), (state, MAX_FDS));
    assert!(
        holder
            .session_store()
            .save("vm/large", &session(), &vec![event.as_fd(); MAX_FDS + 1])
            .is_err()
    );
}

/// A VMM gave them to its port and has closed them since: the holder's are the last. A save that
/// had to wait for their end would be an error.
#[test]
#[allow(non_snake_case)]
fn abuse_V4_descriptors_whose_close_hangs_hold_up_no_other_port() {
    let holder = Running::start();
    let session_store = holder.session_store();
    let (fds, _peers): (Vec<_>, Vec<_>) = std::iter::repeat_with(lingering).take(2).unzip();
    session_store.save("vm/a", &session(), &[fds[0].as_fd()]).unwrap();
    session_store.save("vm/b", &session(), &[fds[1].as_fd()]).unwrap();
    drop(fds);
    let another_is_saved = || session_store.save("vm/c", &session(), &[]).unwrap();
    session_store.save("vm/a", &session(), &[]).unwrap();
    another_is_saved();
    session_store.forget("vm/b").unwrap();
    another_is_saved();
    assert_eq!(session_store.list().unwrap(), ["vm/a", "vm/c"]);
}

/// The same in a packet that is refused, and in the queue of a connection whose daemon is gone:
/// what came before it cannot be answered.
#[test]
#[allow(non_snake_case)]
fn abuse_V4_packets_with_such_descriptors_hold_up_no_port() {
    let ((refused, peer), (unread, other_peer)) = (lingering(), lingering());
    let holder = Running::start_after(|holder| {
        let (first, second) = (holder.raw(), holder.raw());
        send(first.as_fd(), Op::Put, "", b"", &[refused.as_fd()]).unwrap();
        send(second.as_fd(), Op::List, "", b"", &[]).unwrap();
        send(second.as_fd(), Op::Put, "vm/a", b"", &[unread.as_fd()]).unwrap();
        drop((refused, unread));
    });
    // They go first, should the holder hang.
    let _peers = (peer, other_peer);
    holder.session_store().save("vm/b", &session(), &[]).unwrap();
    assert_eq!(holder.session_store().list().unwrap(), ["vm/b"]);
}

#[test]
fn nonsense_closes_its_own_connection_only() {
    let holder = Running::start();
    let session_store = holder.session_store();
    let event = Event::new().unwrap();
    session_store.save("vm/a", &session(), &[event.as_fd()]).unwrap();
    let header = |magic: u32, version: u16, op: u16, name: u32, blob: u32| {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(magic.as_bytes());
        bytes.extend_from_slice(version.as_bytes());
        bytes.extend_from_slice(op.as_bytes());
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(blob.as_bytes());
        bytes
    };
    let bad = [
        vec![1, 2, 3],
        header(0, 1, 4, 0, 0),
        header(protocol::MAGIC, 9, 4, 0, 0),
        header(protocol::MAGIC, 1, 77, 0, 0),
        header(protocol::MAGIC, 1, 2, 4, 0),
        header(protocol::MAGIC, 1, 2, u32::MAX, 1),
        header(protocol::MAGIC, 1, 2, 0, u32::MAX),
        vec![0; MAX_BLOB_LEN_BYTES + 200],
    ];
    for bytes in bad {
        let socket = holder.raw();
        send_bytes(&socket, &bytes, rustix::net::SendFlags::NOSIGNAL).unwrap();
        let answer = receive(socket.as_fd(), RecvFlags::empty()).unwrap();
        assert!(matches!(answer, Received::Closed), "{answer:?}");
    }
    // Refused, but the connection lives: an answer as a question, a port without a name.
    let socket = holder.raw();
    for (op, port) in [(Op::Done, "vm/a"), (Op::Put, ""), (Op::Put, "a\nb")] {
        send(socket.as_fd(), op, port, b"", &[]).unwrap();
        let Received::Packet(answer) = receive(socket.as_fd(), RecvFlags::empty()).unwrap() else {
            panic!("closed");
        };
        assert_eq!(answer.op, Op::Refused);
    }
    assert_eq!(session_store.list().unwrap(), ["vm/a"]);
}

#[test]
fn the_number_of_ports_and_of_connections_is_limited() {
    let holder = Running::start();
    let session_store = holder.session_store();
    for i in 0..MAX_PORTS {
        session_store.save(&format!("vm{i}/p"), &session(), &[]).unwrap();
    }
    let error = session_store.save("one/more", &session(), &[]).unwrap_err().to_string();
    assert!(error.contains("1024"), "{error}");
    session_store.save("vm0/p", &session(), &[]).unwrap();
    assert_eq!(session_store.list().unwrap().len(), MAX_PORTS);

    let mut others: Vec<OwnedFd> = (0..MAX_CLIENTS).map(|_| holder.raw()).collect();
    let last = others.pop().unwrap();
    let answer = receive(last.as_fd(), RecvFlags::empty()).unwrap();
    assert!(matches!(answer, Received::Closed));
    assert!(session_store.list().is_ok());
}

#[test]
fn a_second_holder_is_refused() {
    let holder = Running::start();
    let path = holder.dir.path().join("holder.sock");
    let error = Holder::listen(&path).err().unwrap().to_string();
    assert!(error.contains("somebody listens"), "{error}");
}
