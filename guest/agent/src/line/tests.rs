use super::*;
use crate::host::{Dial, Host};
use guest_abi::pipe::{Hello, MAGIC, VERSION, Welcome};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread;

/// Streams that a test deals out one by one.
pub(crate) struct Streams(pub mpsc::Receiver<UnixStream>);

impl Dial for Streams {
    fn dial(&self) -> io::Result<OwnedFd> {
        self.0.recv().map(OwnedFd::from).map_err(|_| io::ErrorKind::ConnectionRefused.into())
    }
}

/// Time longer than any step takes.
const LONG: Duration = Duration::from_secs(30);

fn read<T: FromBytes + FromZeros + IntoBytes>(stream: &mut UnixStream) -> T {
    let mut value = T::new_zeroed();
    stream.read_exact(value.as_mut_bytes()).unwrap();
    value
}

/// The daemon's end of a stream, after the handshake.
pub(crate) fn greeted(streams: &mpsc::Sender<UnixStream>) -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(LONG)).unwrap();
    streams.send(theirs).unwrap();
    let header: Header = read(&mut ours);
    let hello: Hello = read(&mut ours);
    assert_eq!((header.kind.get(), hello.magic.get()), (kind::HELLO, MAGIC));
    let mut secret = vec![0; header.body_len().unwrap() - size_of::<Hello>()];
    ours.read_exact(&mut secret).unwrap();
    assert!([&b""[..], b"its secret"].contains(&&secret[..]), "{secret:?}");
    let welcome = Welcome {
        magic: U64::new(MAGIC),
        version: U16::new(VERSION),
        reserved: U16::ZERO,
        max_pipes: U32::new(4),
        max_len_bytes: U64::new(1 << 30),
    };
    send(&mut ours, kind::WELCOME, 0, welcome.as_bytes());
    ours
}

fn send(stream: &mut UnixStream, kind: u16, id: u64, body: &[u8]) {
    let header = Header::new(kind, id, body.len());
    stream.write_all(&[header.as_bytes(), body].concat()).unwrap();
}

fn done(moved: u64) -> Done {
    Done { moved_bytes: U64::new(moved), reason: U16::ZERO, reserved: [0; 6] }
}

fn taking(at: u64, how: u8, bytes: &[u8]) -> Vec<u8> {
    let (at, len_bytes) = (U64::new(at), U32::new(bytes.len().max(1) as u32));
    [Take { at, len_bytes, how, reserved: [0; 3] }.as_bytes(), bytes].concat()
}

pub(crate) fn line(host: &Host) -> Arc<Line> {
    loop {
        match host.line() {
            Ok(line) => return line,
            Err(_) => thread::yield_now(),
        }
    }
}

pub(crate) fn event(call: &Call) -> Event {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LONG, "no event");
        match call.next() {
            Some(event) => return event,
            None => thread::yield_now(),
        }
    }
}

/// A daemon and a line to it.
fn pair(heartbeat: Heartbeat) -> (UnixStream, Arc<Line>, Host) {
    let (streams, dial) = mpsc::channel();
    let host = Host::start(Streams(dial), heartbeat, b"its secret".to_vec()).unwrap();
    let daemon = greeted(&streams);
    (daemon, line(&host), host)
}

#[test]
fn messages_find_their_calls_in_their_order() {
    let (mut daemon, line, _host) = pair(Heartbeat::default());
    let wake = Arc::new(Wake::new().unwrap());
    let call = || line.call(kind::PIPE, kind::DONE, b"body", &wake).unwrap();
    let calls = [call(), call()];
    let ids = [(); 2].map(|()| {
        let header: Header = read(&mut daemon);
        assert_eq!((header.kind.get(), read::<[u8; 4]>(&mut daemon)), (kind::PIPE, *b"body"));
        header.id.get()
    });
    let longest = vec![7; MAX_TAKE_BYTES];
    send(&mut daemon, kind::BEGUN, ids[1], &11_u64.to_le_bytes());
    send(&mut daemon, kind::TAKE, ids[0], &taking(5, take::BYTES, &longest));
    send(&mut daemon, kind::TAKE, ids[1], &taking(6, take::PLACES, &[]));
    send(&mut daemon, kind::DONE, ids[1], done(12).as_bytes());
    send(&mut daemon, kind::DONE, ids[0], done(10).as_bytes());
    let bytes = Some(longest);
    let len_bytes = MAX_TAKE_BYTES as u32;
    assert_eq!(event(&calls[0]), Event::Write(WriteRequest { at: 5, len_bytes, bytes }));
    assert_eq!(event(&calls[0]), Event::Done(done(10)));
    assert_eq!(event(&calls[1]), Event::Begun(11));
    assert_eq!(event(&calls[1]), Event::Write(WriteRequest { at: 6, len_bytes: 1, bytes: None }));
    assert!(calls[1].has_next());
    assert_eq!(event(&calls[1]), Event::Done(done(12)));
    assert!(!calls[0].has_next() && calls[1].next().is_none());

    let call = call();
    let (header, _): (Header, [u8; 4]) = (read(&mut daemon), read(&mut daemon));
    call.cancel(Reason::TimedOut);
    call.answer_own(7, None);
    call.answer_own(8, Some(&SocketEnd::new_zeroed()));
    call.answer_write(&WriteRequest { at: 9, len_bytes: 10, bytes: None }, 28);
    let id = header.id.get();
    let (header, cancel): (Header, Cancel) = (read(&mut daemon), read(&mut daemon));
    assert_eq!((header.kind.get(), header.id.get()), (kind::CANCEL, id));
    assert_eq!(cancel.reason.get(), Reason::TimedOut as u16);
    let (header, own): (Header, Own) = (read(&mut daemon), read(&mut daemon));
    assert_eq!((header.kind.get(), header.body_len()), (kind::OWN, Some(8)));
    assert_eq!(own.own_bytes.get(), 7);
    let header: Header = read(&mut daemon);
    assert_eq!((header.kind.get(), header.body_len()), (kind::OWN, Some(96)));
    let _: (Own, SocketEnd) = (read(&mut daemon), read(&mut daemon));
    let (header, taken): (Header, Taken) = (read(&mut daemon), read(&mut daemon));
    assert_eq!((header.kind.get(), header.id.get()), (kind::TAKEN, id));
    assert_eq!((taken.at.get(), taken.len_bytes.get(), taken.errno.get()), (9, 10, 28));
}

/// Messages that break the protocol, each in one part.
#[test]
fn messages_that_make_no_sense_end_the_stream() {
    let done = done(1);
    let mut wrong_len = taking(0, take::BYTES, &[1; 5]);
    wrong_len.pop();
    let mut no_len = taking(0, take::PLACES, &[]);
    no_len[8] = 0;
    let wrong: [(u16, u64, &[u8]); 12] = [
        (kind::DONE, 1, &[0; 3]),
        (kind::DONE, 77, done.as_bytes()),
        (kind::PROBED, 1, &[0; size_of::<Probed>()]),
        (kind::DONE, 1, &[0; 60_000]),
        (kind::BEGUN, 1, &[0; 9]),
        (kind::TAKE, 77, &taking(0, take::PLACES, &[])),
        (kind::TAKE, 1, &taking(0, take::PLACES, &[1])),
        (kind::TAKE, 1, &wrong_len),
        (kind::TAKE, 1, &no_len),
        (kind::TAKE, 1, &taking(0, 3, &[])),
        (kind::TAKE, 1, &taking(0, take::BYTES, &[0; MAX_TAKE_BYTES + 1])),
        (kind::PONG, 1, &[]),
    ];
    for (kind, id, body) in wrong {
        let (mut daemon, line, host) = pair(Heartbeat::default());
        let wake = Arc::new(Wake::new().unwrap());
        let call = line.call(kind::PIPE, kind::DONE, &[], &wake).unwrap();
        let _: Header = read(&mut daemon);
        let header = Header::new(kind, id, body.len());
        // The agent may end the stream before all of it is written.
        let _ = daemon.write_all(&[header.as_bytes(), body].concat());
        assert_eq!(event(&call), Event::Lost, "{kind}");
        assert_eq!(daemon.read(&mut [0; 1]).unwrap_or(0), 0);
        host.stop();
    }
}

#[test]
fn probes_have_one_answer() {
    let (mut daemon, line, _host) = pair(Heartbeat::default());
    let wake = Arc::new(Wake::new().unwrap());
    let call = line.call(kind::PROBE, kind::PROBED, &[], &wake).unwrap();
    send(&mut daemon, kind::BEGUN, 1, &[0; 8]);
    assert_eq!(event(&call), Event::Lost);
}

#[test]
fn more_than_a_pipe_can_hear_ends_the_stream() {
    for (bytes, fits) in [(vec![], MAX_EVENTS), (vec![1; MAX_TAKE_BYTES], 4)] {
        let (mut daemon, line, _host) = pair(Heartbeat::default());
        let wake = Arc::new(Wake::new().unwrap());
        let call = line.call(kind::PIPE, kind::DONE, &[], &wake).unwrap();
        let how = if bytes.is_empty() { take::PLACES } else { take::BYTES };
        for at in 0..fits as u64 {
            send(&mut daemon, kind::TAKE, 1, &taking(at, how, &bytes));
        }
        // Receiving makes room.
        let mut want = (0..).map(|at| {
            Event::Write(WriteRequest {
                at,
                len_bytes: bytes.len().max(1) as u32,
                bytes: Some(bytes.clone()).filter(|bytes| !bytes.is_empty()),
            })
        });
        assert_eq!(event(&call), want.next().unwrap());
        send(&mut daemon, kind::TAKE, 1, &taking(fits as u64, how, &bytes));
        // One message too many.
        let _ = daemon.write_all(
            &[Header::new(kind::TAKE, 1, 16 + bytes.len()).as_bytes(), &taking(99, how, &bytes)]
                .concat(),
        );
        assert_eq!(daemon.read(&mut [0; 64]).unwrap_or(0), HEADER_BYTES);
        assert_eq!(daemon.read(&mut [0; 64]).unwrap_or(0), 0);
        for _ in 0..fits {
            assert_eq!(event(&call), want.next().unwrap());
        }
        assert_eq!(event(&call), Event::Lost);
    }
}

/// Waits as a pipe does, in the heartbeat's own steps.
fn beat_until(line: &Line, is_over: impl Fn() -> bool) {
    while !is_over() {
        thread::sleep(line.beat());
    }
}

/// Waits like [`beat_until`], with a daemon that always answers before the next check.
fn beat_in_turns_until(line: &Line, is_over: impl Fn() -> bool) {
    while !is_over() {
        thread::sleep(line.beat());
        while lock(&line.beat).ping.is_some() {
            thread::yield_now();
        }
    }
}

const FAST: Heartbeat = Heartbeat { period: Duration::from_millis(2), misses: 5 };

#[test]
fn a_silent_daemon_is_asked_and_given_up() {
    let (mut daemon, line, _host) = pair(FAST);
    let wake = Arc::new(Wake::new().unwrap());
    let call = line.call(kind::PIPE, kind::DONE, &[], &wake).unwrap();
    beat_until(&line, || call.has_next());
    assert_eq!(event(&call), Event::Lost);
    let (pipe, ping): (Header, Header) = (read(&mut daemon), read(&mut daemon));
    assert_eq!((pipe.kind.get(), ping.kind.get()), (kind::PIPE, kind::PING));
    assert_eq!((ping.len_bytes.get(), daemon.read(&mut [0; 1]).unwrap()), (0, 0));
}

#[test]
fn a_daemon_that_answers_is_not_given_up() {
    let (mut daemon, line, _host) = pair(FAST);
    let wake = Arc::new(Wake::new().unwrap());
    let call = line.call(kind::PIPE, kind::DONE, &[], &wake).unwrap();
    let answering = thread::spawn(move || {
        let pipe: Header = read(&mut daemon);
        // Many times the heartbeat's limit.
        for _ in 0..20 {
            let ping: Header = read(&mut daemon);
            assert_eq!(ping.kind.get(), kind::PING);
            send(&mut daemon, kind::PONG, ping.id.get(), &[]);
        }
        send(&mut daemon, kind::DONE, pipe.id.get(), done(1).as_bytes());
        daemon
    });
    beat_in_turns_until(&line, || call.has_next());
    assert_eq!(event(&call), Event::Done(done(1)));
    // The stream is idle while no call waits.
    let mut daemon = answering.join().unwrap();
    daemon.set_nonblocking(true).unwrap();
    while daemon.read(&mut [0; 64]).is_ok() {}
    thread::sleep(10 * FAST.period);
    assert!(daemon.read(&mut [0; 1]).is_err());
}
