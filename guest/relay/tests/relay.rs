//! Tests of the relay between programs and the modules themselves, with a host in this process.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[allow(dead_code, reason = "shared with the client's tests")]
mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::{Faults, Host, Native, Serve, wait_until};
use guest_abi::module::failure;
use http_module::Http;
use kv_module::Kv;
use relay::link::Plan;
use relay::serve::{Config, Relay};
use relay::{Address, Listen};
use tempfile::TempDir;

/// Relay in a thread.
struct Running {
    folder: TempDir,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    tcp: Option<std::net::SocketAddr>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.take();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn plan(host: Address) -> Plan {
    let (patience, silence) = (Duration::from_millis(500), Duration::from_secs(5));
    Plan { host, patience, first_line: Vec::new(), is_greeted: false, silence }
}

fn run(plan: Plan, listen: Option<Listen>, max_connections: usize) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let unix = Listen::Unix(folder.path().join("s"));
    let listen = listen.unwrap_or(unix);
    let is_tcp = matches!(listen, Listen::Tcp(_));
    let module = "fake".into();
    let relay = Relay::new(Config { plan, module, listen, mode: 0o600, max_connections }).unwrap();
    let tcp = is_tcp.then(|| relay.tcp_address().unwrap());
    let (told, stop) = UnixStream::pair().unwrap();
    let thread = Some(thread::spawn(move || relay.run(told).unwrap()));
    Running { folder, stop: Some(stop), thread, tcp }
}

impl Running {
    fn path(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn connect(&self) -> UnixStream {
        let socket = UnixStream::connect(self.path()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket
    }
}

fn ask(socket: &mut (impl Read + Write), text: &[u8], answer: &str) {
    socket.write_all(text).unwrap();
    let mut got = vec![0; answer.len()];
    socket.read_exact(&mut got).unwrap();
    assert_eq!(String::from_utf8_lossy(&got), answer);
}

fn to_end(socket: &mut impl Read) -> Vec<u8> {
    let mut got = Vec::new();
    socket.read_to_end(&mut got).unwrap();
    got
}

#[test]
fn a_memcached_client_uses_the_cache() {
    let host = Host::start(Native::<Kv>::start());
    let relay = run(plan(host.address.clone()), None, 8);
    let mut one = relay.connect();
    ask(&mut one, b"set a 0 0 5\r\nhello\r\n", "STORED\r\n");
    ask(&mut relay.connect(), b"get a\r\n", "VALUE a 0 5\r\nhello\r\nEND\r\n");
    // In pieces, and several at once.
    for byte in b"get a\r" {
        one.write_all(&[*byte]).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    ask(&mut one, b"\ndelete a\r\n", "VALUE a 0 5\r\nhello\r\nEND\r\nDELETED\r\n");
    one.write_all(b"quit\r\n").unwrap();
    assert!(to_end(&mut one).is_empty());
    wait_until("the host to forget both", || host.state().clients() == 0);
}

#[test]
fn large_values_go_both_ways_and_a_half_closed_program_gets_all() {
    let host = Host::start(Native::<Kv>::start());
    let relay = run(plan(host.address.clone()), None, 8);
    let value = "0123456789abcdef".repeat(1 << 16);
    let mut one = relay.connect();
    ask(&mut one, format!("set a 0 0 1048576\r\n{value}\r\n").as_bytes(), "STORED\r\n");
    one.write_all(format!("get{}\r\n", " a".repeat(40)).as_bytes()).unwrap();
    one.shutdown(Shutdown::Write).unwrap();
    let got = to_end(&mut one);
    let item = format!("VALUE a 0 1048576\r\n{value}\r\n");
    assert!(got == format!("{}END\r\n", item.repeat(40)).as_bytes());
    // A program that closes at once is served, too.
    let mut quick = relay.connect();
    quick.write_all(b"set b 0 0 1 noreply\r\n1\r\nget a a a a a a a a a\r\n").unwrap();
    drop(quick);
    let is_over = || host.state().connections == 2 && host.state().clients() == 0;
    wait_until("the host to have seen both", is_over);
    ask(&mut relay.connect(), b"get b\r\n", "VALUE b 0 1\r\n1\r\nEND\r\n");
}

#[test]
fn a_program_that_does_not_read_holds_up_its_own_bytes_only() {
    let host = Host::start(Native::<Kv>::start());
    let relay = run(plan(host.address.clone()), None, 8);
    let mut slow = relay.connect();
    let value = "x".repeat(1 << 20);
    ask(&mut slow, format!("set a 0 0 1048576\r\n{value}\r\n").as_bytes(), "STORED\r\n");
    slow.write_all(format!("get{}\r\n", " a".repeat(200)).as_bytes()).unwrap();
    let mut last = 0;
    wait_until("the host to be left alone", || {
        thread::sleep(Duration::from_millis(100));
        let sent = host.state().sent_bytes;
        let before = std::mem::replace(&mut last, sent);
        sent == before && sent > 100
    });
    assert!(last < 3 << 20, "{last}");
    ask(&mut relay.connect(), b"version\r\n", "VERSION 0.1.0-millrace\r\n");
    slow.shutdown(Shutdown::Write).unwrap();
    assert_eq!(to_end(&mut slow).len(), 200 * ((1 << 20) + 21) + 5);
}

#[test]
fn programs_do_not_notice_broken_connections() {
    let host = Host::start(Native::<Kv>::start());
    host.state().faults = Faults { break_one_of: Some(4), reorder: true, ..Faults::default() };
    let relay = run(plan(host.address.clone()), None, 8);
    let mut socket = relay.connect();
    let mut writer = socket.try_clone().unwrap();
    let writer = thread::spawn(move || {
        writer.write_all(b"set n 0 0 1\r\n0\r\n").unwrap();
        for _ in 0..200 {
            writer.write_all(&b"incr n 1\r\n".repeat(10)).unwrap();
            thread::sleep(Duration::from_micros(200));
        }
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let got = String::from_utf8(to_end(&mut socket)).unwrap();
    writer.join().unwrap();
    let numbers: Vec<u32> = got.lines().skip(1).map(|line| line.parse().unwrap()).collect();
    assert_eq!(numbers, (1..=2000).collect::<Vec<_>>());
    assert!(host.state().connections > 3);
}

#[test]
fn a_web_server_gets_what_was_published() {
    let host = Host::start(Native::<Http>::start());
    let publish =
        Plan { first_line: b"millrace-publish/1\r\n".to_vec(), ..plan(host.address.clone()) };
    let publish = run(publish, None, 8);
    let body = "0123456789".repeat(300_000);
    let len = body.len();
    let mut publisher = publish.connect();
    let put = format!("PUT /a.txt HTTP/1.1\r\nHost: a\r\nContent-Length: {len}\r\n\r\n{body}");
    publisher.write_all(put.as_bytes()).unwrap();
    publisher.shutdown(Shutdown::Write).unwrap();
    assert!(to_end(&mut publisher).starts_with(b"HTTP/1.1 201 "));

    let listen = Listen::Tcp("127.0.0.1:0".parse().unwrap());
    let relay = run(plan(host.address.clone()), Some(listen), 8);
    let mut reader = TcpStream::connect(relay.tcp.unwrap()).unwrap();
    let request = "GET /a.txt HTTP/1.1\r\nHost: a\r\n\r\n";
    let close = "GET /a.txt HTTP/1.1\r\nHost: a\r\nRange: bytes=5-9\r\nConnection: close\r\n\r\n";
    reader.write_all(format!("{request}{request}{close}").as_bytes()).unwrap();
    let got = String::from_utf8(to_end(&mut reader)).unwrap();
    assert_eq!(got.matches(&body).count(), 2);
    assert!(got.ends_with("\r\n\r\n56789") && got.contains("HTTP/1.1 206 "));
    // A program that still sends can read a refusal.
    let mut refused = TcpStream::connect(relay.tcp.unwrap()).unwrap();
    let _ = refused.write_all(put.as_bytes());
    refused.shutdown(Shutdown::Write).unwrap();
    assert!(to_end(&mut refused).starts_with(b"HTTP/1.1 405 "));
}

#[test]
fn a_module_that_was_replaced_ends_streams() {
    let host = Host::start(Native::<Kv>::start());
    let relay = run(plan(host.address.clone()), None, 8);
    let mut socket = relay.connect();
    ask(&mut socket, b"set a 0 0 1\r\n1\r\nget", "STORED\r\n");
    wait_until("all to be there", || host.state().executed >= 1);
    host.state().faults.break_one_of = Some(1);
    host.state().replace(Box::new(Native::<Kv>::start()));
    let _ = socket.write_all(b" a\r\n");
    let after = to_end(&mut socket);
    assert!(after.is_empty(), "{after:?}");
    host.state().faults = Faults::default();
    ask(&mut relay.connect(), b"get a\r\n", "END\r\n");
}

#[test]
fn connections_beyond_the_limit_wait() {
    let host = Host::start(Native::<Kv>::start());
    let relay = run(plan(host.address.clone()), None, 2);
    let (mut one, mut two) = (relay.connect(), relay.connect());
    ask(&mut one, b"version\r\n", "VERSION 0.1.0-millrace\r\n");
    ask(&mut two, b"version\r\n", "VERSION 0.1.0-millrace\r\n");
    let mut three = relay.connect();
    three.write_all(b"version\r\n").unwrap();
    three.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(three.read(&mut [0]).is_err());
    drop(one);
    three.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    ask(&mut three, b"", "VERSION 0.1.0-millrace\r\n");
}

/// Module whose service is no stream, and fails.
struct Failing(Result<Vec<u8>, u32>);

impl Serve for Failing {
    fn request(&mut self, _: u32, _: u64, _: &[u8]) -> Result<Vec<u8>, u32> {
        self.0.clone()
    }
}

#[test]
fn hosts_that_fail_end_connections() {
    for answer in [Err(failure::STOPPED), Ok(Vec::new()), Ok(vec![0; 300_000])] {
        let host = Host::start(Failing(answer));
        let relay = run(plan(host.address.clone()), None, 8);
        let mut socket = relay.connect();
        socket.write_all(b"x").unwrap();
        assert!(to_end(&mut socket).is_empty());
    }
    let relay = run(plan(Address::Unix("/nonexistent/host".into())), None, 8);
    let begun = Instant::now();
    assert!(to_end(&mut relay.connect()).is_empty());
    assert!(begun.elapsed() >= Duration::from_millis(400));
    let host = Host::start(Native::<Kv>::start());
    host.state().faults.goodbye = Some(failure::LIMIT);
    let relay = run(plan(host.address.clone()), None, 8);
    assert!(to_end(&mut relay.connect()).is_empty());
}

#[test]
fn a_silent_host_is_given_up_and_found_again() {
    let host = Host::start(Native::<Kv>::start());
    host.state().faults.is_silent = true;
    let silence = Duration::from_millis(500);
    let relay = run(Plan { silence, ..plan(host.address.clone()) }, None, 8);
    let mut socket = relay.connect();
    socket.write_all(b"version\r\n").unwrap();
    wait_until("another connection", || host.state().connections > 1);
    host.state().faults.is_silent = false;
    ask(&mut socket, b"", "VERSION 0.1.0-millrace\r\n");
    assert_eq!(host.state().executed, 1);
}
