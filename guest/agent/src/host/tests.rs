use super::*;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

/// Streams that a test hands out one by one.
struct Streams(mpsc::Receiver<UnixStream>);

impl Dial for Streams {
    fn dial(&self) -> io::Result<OwnedFd> {
        self.0.recv().map(OwnedFd::from).map_err(|_| io::ErrorKind::ConnectionRefused.into())
    }
}

fn read<T: FromBytes + FromZeros + IntoBytes>(stream: &mut UnixStream) -> T {
    let mut value = T::new_zeroed();
    stream.read_exact(value.as_mut_bytes()).unwrap();
    value
}

/// The daemon's end of a stream, after the handshake.
fn greeted(streams: &mpsc::Sender<UnixStream>) -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    streams.send(theirs).unwrap();
    let header: Header = read(&mut ours);
    let hello: Hello = read(&mut ours);
    assert_eq!((header.kind.get(), hello.magic.get()), (kind::HELLO, MAGIC));
    let welcome = Welcome {
        magic: U64::new(MAGIC),
        version: U16::new(VERSION),
        reserved: U16::ZERO,
        max_pipes: U32::new(4),
        max_len_bytes: U64::new(1 << 30),
    };
    say(&mut ours, kind::WELCOME, 0, welcome.as_bytes());
    ours
}

fn say(stream: &mut UnixStream, kind: u16, id: u64, body: &[u8]) {
    let header = Header::new(kind, id, body.len());
    stream.write_all(&[header.as_bytes(), body].concat()).unwrap();
}

fn done(moved: u64) -> Done {
    Done { moved_bytes: U64::new(moved), reason: U16::ZERO, reserved: [0; 6] }
}

fn line(host: &Host) -> Arc<Line> {
    loop {
        match host.line() {
            Ok(line) => return line,
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn outcome(call: &Call) -> Outcome {
    loop {
        match call.outcome() {
            Some(outcome) => return outcome,
            None => thread::sleep(Duration::from_millis(1)),
        }
    }
}

#[test]
fn answers_find_their_calls_and_a_lost_stream_ends_them() {
    let (streams, dial) = mpsc::channel();
    let host = Host::start(Streams(dial)).unwrap();
    assert_eq!(host.line().unwrap_err(), Reason::NotOffered);
    let mut daemon = greeted(&streams);
    let (line, wake) = (line(&host), Arc::new(Wake::new().unwrap()));
    assert_eq!((line.max_len_bytes, line.generation), (1 << 30, 1));
    let call = || line.call(kind::PIPE, kind::DONE, b"body", &wake).unwrap();
    let calls = [call(), call(), call()];
    let ids = [(); 3].map(|()| {
        let header: Header = read(&mut daemon);
        assert_eq!((header.kind.get(), read::<[u8; 4]>(&mut daemon)), (kind::PIPE, *b"body"));
        header.id.get()
    });
    say(&mut daemon, kind::DONE, ids[1], done(11).as_bytes());
    say(&mut daemon, kind::DONE, ids[0], done(10).as_bytes());
    assert_eq!(outcome(&calls[0]), Outcome::Done(done(10)));
    assert_eq!(outcome(&calls[1]), Outcome::Done(done(11)));
    assert_eq!(calls[2].outcome(), None);
    calls[2].cancel(Reason::TimedOut);
    let (header, cancel): (Header, Cancel) = (read(&mut daemon), read(&mut daemon));
    assert_eq!((header.kind.get(), header.id.get()), (kind::CANCEL, ids[2]));
    assert_eq!(cancel.reason.get(), Reason::TimedOut as u16);
    drop(daemon);
    assert_eq!(outcome(&calls[2]), Outcome::Lost);
    assert_eq!(line.call(kind::PIPE, kind::DONE, &[], &wake).unwrap_err(), Reason::HostGone);
    let _daemon = greeted(&streams);
    assert_eq!(self::line(&host).generation, 2);
    host.stop();
    assert_eq!(host.line().unwrap_err(), Reason::HostGone);
}

#[test]
fn answers_that_make_no_sense_end_the_stream() {
    let (streams, dial) = mpsc::channel();
    let host = Host::start(Streams(dial)).unwrap();
    let wake = Arc::new(Wake::new().unwrap());
    let done = done(1);
    let wrong: [(u16, u64, &[u8]); 4] = [
        (kind::DONE, 1, &[0; 3]),
        (kind::DONE, 77, done.as_bytes()),
        (kind::PROBED, 1, &[0; size_of::<Probed>()]),
        (kind::DONE, 1, &[0; 60_000]),
    ];
    for (kind, id, body) in wrong {
        let mut daemon = greeted(&streams);
        let line = line(&host);
        let call = line.call(kind::PIPE, kind::DONE, &[], &wake).unwrap();
        let _: Header = read(&mut daemon);
        let header = Header::new(kind, id, body.len());
        // The agent may have ended the stream before all of it is written.
        let _ = daemon.write_all(&[header.as_bytes(), body].concat());
        assert_eq!(outcome(&call), Outcome::Lost);
        assert_eq!(daemon.read(&mut [0; 1]).unwrap_or(0), 0);
        while host.line().is_ok() {
            thread::yield_now();
        }
    }
}
