use super::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

fn pair(address: &str, client: &str) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(address).unwrap();
    let port = listener.local_addr().unwrap().port();
    let client = TcpStream::connect(format!("{client}:{port}")).unwrap();
    (listener.accept().unwrap().0, client)
}

#[test]
fn the_end_tells_what_the_connection_has_done() {
    for (address, client, family) in [
        ("127.0.0.1:0", "127.0.0.1", family::V4),
        ("[::1]:0", "[::1]", family::V6),
        ("[::]:0", "127.0.0.1", family::V4),
    ] {
        let (mut server, mut client) = pair(address, client);
        server.write_all(b"hello").unwrap();
        client.read_exact(&mut [0; 5]).unwrap();
        client.write_all(b"hi").unwrap();
        server.read_exact(&mut [0; 2]).unwrap();
        check(server.as_fd(), Role::Sink).unwrap();
        let (sink, end) = SocketSink::new(server.try_clone().unwrap().into(), UNSENT_TIME).unwrap();
        assert_eq!(end.family, family, "{address}");
        assert_eq!((end.sent_bytes.get(), end.received_bytes.get()), (5, 2));
        assert_eq!(end.local_port.get(), client.peer_addr().unwrap().port());
        assert_eq!(end.remote_port.get(), client.local_addr().unwrap().port());
        assert_eq!(end.local, end.remote);
        assert_eq!(end.local[4..15], [0; 11], "{address}");
        assert!(end.mss.get() > 500 && end.cwnd.get() > 0 && end.congestion[0] != 0);
        drop(sink);
    }
}

#[test]
fn a_cork_is_off_for_the_pipe_and_on_again_after_it() {
    let (mut server, mut client) = pair("127.0.0.1:0", "127.0.0.1");
    sockopt::set_tcp_cork(&server, true).unwrap();
    server.write_all(b"header").unwrap();
    let (sink, end) = SocketSink::new(server.try_clone().unwrap().into(), UNSENT_TIME).unwrap();
    client.read_exact(&mut [0; 6]).unwrap();
    assert_eq!(end.sent_bytes.get(), 6);
    assert!(!sockopt::tcp_cork(&server).unwrap() && !sockopt::tcp_nodelay(&server).unwrap());
    drop(sink);
    assert!(sockopt::tcp_cork(&server).unwrap());
}

#[test]
fn a_client_that_does_not_read_is_not_waited_for_long() {
    let (mut server, _client) = pair("127.0.0.1:0", "127.0.0.1");
    server.set_nonblocking(true).unwrap();
    while server.write(&[0; 1 << 16]).is_ok() {}
    let before = Instant::now();
    assert_eq!(SocketSink::new(server.into(), UNSENT_TIME).unwrap_err(), Reason::Unsent);
    assert!(before.elapsed() >= UNSENT_TIME);
}

#[test]
fn a_source_tells_what_is_unread() {
    let (mut server, mut client) = pair("127.0.0.1:0", "127.0.0.1");
    client.write_all(b"hello").unwrap();
    server.read_exact(&mut [0; 2]).unwrap();
    check(server.as_fd(), Role::Source).unwrap();
    let (source, end) = SocketSource::new(server.try_clone().unwrap().into()).unwrap();
    assert_eq!((end.received_bytes.get(), end.unread_bytes.get()), (5, 3));
    assert_eq!(end.remote_port.get(), client.local_addr().unwrap().port());
    drop(source);
    // The values stay those of one moment while more bytes come.
    let writing = std::thread::spawn(move || {
        for _ in 0..2000 {
            client.write_all(&[1; 100]).unwrap();
        }
        client
    });
    let mut read = 2;
    while read < 200_005 {
        match SocketSource::new(server.try_clone().unwrap().into()) {
            Ok((_, end)) => {
                assert_eq!(end.received_bytes.get(), read + u64::from(end.unread_bytes.get()));
            }
            Err(reason) => assert_eq!(reason, Reason::NotSettled),
        }
        read += server.read(&mut [0; 3000]).unwrap() as u64;
    }
    let client = writing.join().unwrap();

    // An urgent byte is not where the counters say.
    rustix::net::send(&client, b"!", rustix::net::SendFlags::OOB).unwrap();
    while SocketSource::new(server.try_clone().unwrap().into()).is_ok() {}
    let urgent = SocketSource::new(server.try_clone().unwrap().into());
    assert_eq!(urgent.unwrap_err(), Reason::FlowOptions);
}

#[test]
fn what_is_unread_is_asked_again_while_more_comes() {
    let received = std::cell::Cell::new(0);
    let info = || {
        // Ten times bytes come after the first reading.
        let bytes_received = received.get();
        received.set((bytes_received + 1).min(10));
        Ok(TcpInfo { bytes_received, ..TcpInfo::new_zeroed() })
    };
    let (now, unread) = at_one_moment(info, || Ok(received.get())).unwrap();
    assert_eq!((now.bytes_received, unread), (10, 10));
    let always = || {
        received.set(received.get() + 1);
        Ok(TcpInfo { bytes_received: received.get(), ..TcpInfo::new_zeroed() })
    };
    assert_eq!(at_one_moment(always, || Ok(0)).unwrap_err(), Reason::NotSettled);
}

#[test]
fn other_sockets_and_states_are_refused_with_their_reasons() {
    let source = |fd: &dyn AsFd| SocketSource::new(fd.as_fd().try_clone_to_owned().unwrap());
    let sink =
        |fd: &dyn AsFd| SocketSink::new(fd.as_fd().try_clone_to_owned().unwrap(), UNSENT_TIME);
    let (server, client) = pair("127.0.0.1:0", "127.0.0.1");
    // Its peer has closed its side: bytes that wait are left to the ordinary read.
    drop(client);
    while source(&server).is_ok() {
        std::thread::yield_now();
    }
    assert_eq!(source(&server).unwrap_err(), Reason::NotEstablished);
    assert_eq!(sink(&server).unwrap_err(), Reason::NotEstablished);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(sink(&listener).unwrap_err(), Reason::NotEstablished);
    assert_eq!(source(&listener).unwrap_err(), Reason::NotEstablished);
    for to in [Role::Source, Role::Sink] {
        check(listener.as_fd(), to).unwrap();
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(check(udp.as_fd(), to), Err(Reason::NotTcp));
        let unix = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(check(unix.0.as_fd(), to), Err(Reason::NotTcp));
        let raw = socket2::Socket::new(
            socket2::Domain::IPV4,
            socket2::Type::RAW,
            Some(socket2::Protocol::TCP),
        );
        assert_eq!(check(raw.unwrap().as_fd(), to), Err(Reason::NotTcp));
        let mptcp = socket2::Socket::new(
            socket2::Domain::IPV4,
            socket2::Type::STREAM,
            Some(socket2::Protocol::from(IPPROTO_MPTCP as i32)),
        );
        // Some kernels lack it.
        if let Ok(mptcp) = mptcp {
            assert_eq!(check(mptcp.as_fd(), to), Err(Reason::Mptcp));
        }
    }
    let file = std::fs::File::open("/proc/self/stat").unwrap();
    assert_eq!(check(file.as_fd(), Role::Sink), Err(Reason::NotPermitted));
    let file = std::fs::File::options().write(true).open("/dev/null").unwrap();
    assert_eq!(check(file.as_fd(), Role::Source), Err(Reason::NotPermitted));
}

/// A user makes a network of his own and, in it, a connection with the addresses and ports of
/// another user's connection.
#[test]
#[allow(non_snake_case)]
fn abuse_R10_a_connection_of_another_network_is_not_the_one_of_its_name() {
    let (server, client) = pair("127.0.0.1:0", "127.0.0.1");
    check(server.as_fd(), Role::Sink).unwrap();
    let (local, remote) = (server.local_addr().unwrap(), client.local_addr().unwrap());
    let made = std::thread::spawn(move || {
        // SAFETY: only this thread's network namespace is left, and no other thread counts on that.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
        assert!(up.unwrap().success());
        let listener = TcpListener::bind(local).unwrap();
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = socket.unwrap();
        socket.bind(&remote.into()).unwrap();
        socket.connect(&local.into()).unwrap();
        (listener.accept().unwrap().0, socket)
    });
    let (forged, _client) = made.join().unwrap();
    assert_eq!((forged.local_addr().unwrap(), forged.peer_addr().unwrap()), (local, remote));
    for to in [Role::Source, Role::Sink] {
        assert_eq!(check(forged.as_fd(), to), Err(Reason::OtherNetwork));
    }
    assert_eq!(check_tcp(forged.as_fd()), Err(Reason::OtherNetwork));
}
