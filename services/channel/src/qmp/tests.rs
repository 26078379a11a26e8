use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;

use tempfile::TempDir;

use super::*;

const LONG: Duration = Duration::from_secs(600);

/// A monitor that answers each line with what `answer` makes of it.
fn monitor(
    answer: impl Fn(&Value, &mut UnixStream) -> bool + Send + 'static,
) -> (TempDir, std::path::PathBuf, JoinHandle<()>) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let mut to = listener.accept().unwrap().0;
        to.write_all(b"{\"QMP\": {}}\n").unwrap();
        for line in BufReader::new(to.try_clone().unwrap()).lines() {
            let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
            if line["execute"] == "qmp_capabilities" {
                writeln!(to, "{}", json!({"return": {}, "id": line["id"]})).unwrap();
            } else if !answer(&line, &mut to) {
                return;
            }
        }
    });
    (folder, path, thread)
}

fn connect(path: &Path, timeout: Duration) -> Result<Qmp, QmpError> {
    Qmp::connect(path, timeout, Arc::new(Event::new().unwrap()))
}

#[test]
fn answers_are_matched_and_known_events_kept() {
    let (_folder, path, thread) = monitor(|line, to| {
        let stray = json!({"return": "late", "id": 77});
        let stop = json!({"event": "STOP"});
        let gone = json!({"event": "DEVICE_DELETED", "data": {"device": "d", "path": "/d"}});
        let unnamed = json!({"event": "DEVICE_DELETED", "data": {"path": "/d"}});
        let reset = json!({"event": "RESET", "data": {"guest": true}});
        for event in [stray, stop, gone, unnamed] {
            writeln!(to, "{event}").unwrap();
        }
        let answer = json!({"return": {"x": line["arguments"]["x"]}, "id": line["id"]});
        write!(to, "{answer}\n{reset}\n").unwrap();
        false
    });
    let mut qmp = connect(&path, LONG).unwrap();
    assert_eq!(qmp.run("ask", json!({"x": 3})).unwrap(), json!({"x": 3}));
    thread.join().unwrap();
    assert!(matches!(qmp.read_available(), Err(QmpError::Closed { .. })));
    assert_eq!(qmp.take_event(), Some(QmpEvent::DeviceDeleted("d".into())));
    assert_eq!(qmp.take_event(), Some(QmpEvent::GuestEnded("RESET")));
    assert_eq!(qmp.take_event(), None);
}

#[test]
fn a_refusal_has_the_commands_name_and_qemus_text() {
    let (_folder, path, _thread) = monitor(|line, to| {
        let error = json!({"class": "GenericError", "desc": "Bus 'x' not found"});
        writeln!(to, "{}", json!({"error": error, "id": line["id"]})).is_ok()
    });
    let error = connect(&path, LONG).unwrap().run("device_add", json!({})).unwrap_err();
    assert_eq!(error.to_string(), "monitor: device_add: GenericError: Bus 'x' not found");
    assert!(!error.is_final());
}

#[test]
fn nonsense_and_long_lines_are_refused() {
    for (line, text) in [
        ("nonsense\n".to_owned(), "expected ident"),
        ("x".repeat(MAX_LINE_LEN_BYTES + 2), "a line of more than 1048576 bytes"),
    ] {
        let (_folder, path, _thread) = monitor(move |_, to| to.write_all(line.as_bytes()).is_ok());
        let error = connect(&path, LONG).unwrap().run("ask", json!({})).unwrap_err();
        assert!(error.to_string().contains(text) && error.is_final(), "{error}");
    }
}

#[test]
fn an_end_a_stop_and_a_timeout_are_told_apart() {
    let (_folder, path, _thread) = monitor(|_, _| false);
    let error = connect(&path, LONG).unwrap().run("ask", json!({})).unwrap_err();
    assert!(matches!(error, QmpError::Closed { command: "ask" }), "{error}");

    let (_folder, path, _thread) = monitor(|_, _| true);
    let stop = Arc::new(Event::new().unwrap());
    let mut qmp = Qmp::connect(&path, LONG, stop.clone()).unwrap();
    stop.signal().unwrap();
    let error = qmp.run("ask", json!({})).unwrap_err();
    assert!(matches!(error, QmpError::Stopped { command: "ask" }), "{error}");

    let (_folder, path, _thread) = monitor(|_, _| true);
    let mut qmp = connect(&path, LONG).unwrap();
    qmp.timeout = Duration::from_millis(1);
    let error = qmp.run("ask", json!({})).unwrap_err();
    assert_eq!(error.to_string(), "monitor: ask: no answer within 1 ms");
}

/// A monitor that says more, and faster, than is read.
#[test]
#[allow(non_snake_case)]
fn abuse_V2_a_monitor_that_says_much_is_left_all_the_same() {
    let flood = |to: &mut UnixStream| {
        let lines = "{}\n".repeat(10_000);
        while to.write_all(lines.as_bytes()).is_ok() {}
    };
    let (_folder, path, _thread) = monitor(move |_, to| {
        flood(to);
        false
    });
    let stop = Arc::new(Event::new().unwrap());
    let mut qmp = Qmp::connect(&path, Duration::from_millis(20), stop.clone()).unwrap();
    let error = qmp.run("ask", json!({})).unwrap_err();
    assert!(matches!(error, QmpError::Timeout { .. }), "{error}");
    while !qmp.read_available().unwrap() {}
    stop.signal().unwrap();
    let error = qmp.run("ask", json!({})).unwrap_err();
    assert!(matches!(error, QmpError::Stopped { .. }), "{error}");
}

#[test]
fn a_socket_of_nobody_is_gone_and_a_busy_one_is_not() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("qmp");
    assert!(is_gone(&path));
    let listener = UnixListener::bind(&path).unwrap();
    assert!(!is_gone(&path));
    drop(listener);
    assert!(is_gone(&path));
    let error = connect(&path, LONG).unwrap_err().to_string();
    assert!(error.contains("connecting") && error.contains("qmp"), "{error}");
}

#[test]
fn descriptors_go_with_their_command() {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, recvmsg};
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut qmp = Qmp {
        socket: ours.into(),
        stop: Arc::new(Event::new().unwrap()),
        timeout: LONG,
        buffer: Vec::new(),
        events: VecDeque::new(),
        last_id: 0,
    };
    let thread = std::thread::spawn(move || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 1024];
        let mut into = [io::IoSliceMut::new(&mut bytes)];
        recvmsg(&theirs, &mut into, &mut control, RecvFlags::empty()).unwrap();
        let fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        (&theirs).write_all(b"{\"return\": {\"fd\": 5}, \"id\": 1}\n").unwrap();
        fds.len()
    });
    let event = Event::new().unwrap();
    let answer = qmp.run_with_fd("add-fd", json!({}), event.as_fd()).unwrap();
    assert_eq!(answer, json!({"fd": 5}));
    assert_eq!(thread.join().unwrap(), 1);
}
