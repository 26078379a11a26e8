//! Log lines about front ends. The log is one for all threads of a process, so these tests have
//! their own.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, Once};

use queue::Layout;
use queue::testing::ModelDriver;
use rustix::event::{EventfdFlags, eventfd};
use vhost_user::DeviceKind;
use vhost_user::codec::{self, Request, feature};
use vhost_user::testing::*;
use zerocopy::IntoBytes;

/// All that was logged.
static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Begins to write it down.
fn listen() {
    static BEGIN: Once = Once::new();
    BEGIN.call_once(|| tracing_subscriber::fmt().with_ansi(false).with_writer(|| Log).init());
}

/// The lines so far with these words.
fn lines(words: &str) -> Vec<String> {
    let text = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    text.lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
}

/// Descriptors that block who writes to them, or that somebody else reads.
fn no_channels() -> Vec<OwnedFd> {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let datagrams = UnixDatagram::unbound().unwrap();
    vec![reader, writer, event, tcp.into(), listener.into(), datagrams.into(), memfd(4096)]
}

#[test]
fn abuse_V4_V15_only_a_unix_stream_socket_is_a_back_end_channel() {
    listen();
    let told = || lines("refused: SET_BACKEND_REQ_FD: the descriptor is not a Unix stream socket");
    let (device, _server, front) = simple(DeviceKind::Block);
    front.hello(BASIC);
    let (ours, theirs) = pair();
    for (refused, fd) in no_channels().iter().enumerate() {
        front.ok(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
        assert!(device.notifier().is_some(), "{refused}");
        assert_eq!(front.ack(Request::SetBackendReqFd, &[], &[fd.as_fd()]), Some(1), "{refused}");
        assert_eq!(told().len(), refused + 1);
        // The session goes on without, also without the one before.
        assert!(device.notifier().is_none(), "{refused}");
    }
    assert!(told()[0].contains("WARN") && told()[0].contains("port=vm/port"), "{}", told()[0]);
    // Who asked for no answer gets none.
    front.send(Request::SetBackendReqFd, &[], &[memfd(4096).as_fd()]);
    assert_eq!(front.get_u64(Request::GetStatus), 0);
    front.ok(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
    assert_eq!(device.notifier().unwrap().config_changed(), Ok(()));
    assert_eq!(FrontEnd::on(ours).reply().header.request, 2);
}

/// Takes what the driver offered and writes to it; whether the log has its page.
fn is_logged(device: &FakeDevice, driver: &mut ModelDriver, log: &OwnedFd) -> bool {
    let target = driver.alloc(4096);
    let id = driver.offer(&[], &[(target, 64)]);
    device.with_vring(0, |vring| {
        let mut batch = queue::Batch::new(1, 1);
        assert_eq!(vring.pop(&mut batch, 1), 1);
        vring.queue.mark_written(batch.get(0).writable, 64);
        vring.push(&[queue::Completion { id, ndesc: 1, written: 64 }]);
    });
    assert_eq!(driver.used(), Some((id, 64)));
    let (page, mut byte) = (target / 4096, [0]);
    assert_eq!(rustix::io::pread(log, &mut byte, page / 8), Ok(1));
    byte[0] & 1 << (page % 8) != 0
}

/// QEMU asks for a log before it gives one, and starts nothing in between. A front end that does
/// loses pages, and is told so.
#[test]
fn abuse_B9_a_queue_that_starts_with_logging_and_without_a_log_is_told_of() {
    listen();
    let told = || lines("a queue starts with VHOST_F_LOG_ALL and without a log");
    let (device, server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    let log = memfd(1 << 20);
    front.hello(BASIC | feature::LOG_ALL);
    front.set_memory(&driver);
    assert_eq!(told(), [] as [String; 0]);
    front.start_ring(0, &driver, 0);
    let [line] = &told()[..] else { panic!("{:?}", told()) };
    assert!(line.contains("WARN") && line.contains("port=vm/port"), "{line}");
    assert!(line.contains("are lost to a migration until SET_LOG_BASE"), "{line}");
    // It is served all the same.
    assert!(!is_logged(&device, &mut driver, &log) && !server.status().logging);

    let body = codec::Log { size: 1 << 20, offset: 0 };
    front.send(Request::SetLogBase, body.as_bytes(), &[log.as_fd()]);
    assert_eq!(front.reply().body, body.as_bytes());
    assert!(is_logged(&device, &mut driver, &log) && server.status().logging);
    let base = front.get_base(0);
    front.start_ring(0, &driver, base);
    assert!(is_logged(&device, &mut driver, &log));
    assert_eq!(told().len(), 1);
}
