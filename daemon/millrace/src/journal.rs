//! Log lines for systemd's journal, with priorities and fields, so that `journalctl -p err` and
//! `journalctl MILLRACE_PORT=web/root` find them.
//!
//! An event goes to journald's own socket (its "native protocol", systemd's
//! `JOURNAL_NATIVE_PROTOCOL`), as one datagram that is never waited for. What journald does not
//! take goes to the standard error, as a line that begins with its priority (`sd-daemon(3)`), which
//! journald reads there. The crate `tracing-journald` would leave fields out of the text, and waits
//! for a full socket.

use std::fmt::{Debug, Write as _};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Socket of journald.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Longest text of a line and of a value: journald cuts lines of 48 KiB, and so one datagram holds
/// all.
const MAX_TEXT_LEN_BYTES: usize = 16 << 10;

/// Most fields that are sent apart from the text.
const MAX_FIELDS: usize = 16;

/// Whether the standard error goes to the journal: `JOURNAL_STREAM` names its device and inode, and
/// is inherited also by those whose output goes elsewhere.
pub fn is_stderr() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = rustix::fs::fstat(io::stderr()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Prints an error of a program that has no log, or none yet: with its priority where the standard
/// error is the journal's.
pub fn print_error(text: &str) {
    eprintln!("{}", if is_stderr() { with_priority(text) } else { text.into() });
}

/// Puts the priority in front of each line of an error, as journald takes it.
fn with_priority(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(|line| format!("<3>{line}")).collect();
    lines.join("\n")
}

/// Has panics logged as errors, in place of lines without a priority.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        tracing::error!(thread = thread.name().unwrap_or("unnamed"), "{panic}");
    }));
}

/// Writes events to the journal.
pub struct Journal<W> {
    socket: Option<UnixDatagram>,
    /// Makes the writer of lines that journald's socket does not take.
    instead: W,
}

impl Journal<fn() -> io::Stderr> {
    /// Makes the journal of this host.
    pub fn of_host() -> Self {
        Self::new(Path::new(SOCKET), io::stderr)
    }
}

impl<W: Fn() -> O, O: Write> Journal<W> {
    fn new(path: &Path, instead: W) -> Self {
        Self { socket: connect(path).ok(), instead }
    }
}

fn connect(path: &Path) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.connect(path)?;
    Ok(socket)
}

impl<S, W, O> Layer<S> for Journal<W>
where
    S: Subscriber,
    W: Fn() -> O + 'static,
    O: Write,
{
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut content = EventText::default();
        event.record(&mut content);
        let (priority, target) = (priority(*event.metadata().level()), event.metadata().target());
        let text = content.line();
        let sent = self.socket.as_ref().is_some_and(|socket| {
            socket.send(&datagram(priority, target, &text, &content.fields)).is_ok()
        });
        if !sent {
            // One write, so that lines of two threads do not mix; a log that cannot be written is
            // no reason to end.
            let line = format!("<{priority}>{target}: {}\n", text.replace('\n', " "));
            let _ = (self.instead)().write_all(line.as_bytes());
        }
    }
}

/// Priority of a level, as syslog(3) counts.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Text and fields of an event.
#[derive(Default)]
struct EventText {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl EventText {
    /// The text for people: the message, then the fields.
    fn line(&self) -> String {
        let mut line = self.message.clone();
        for (name, value) in &self.fields {
            // Writing to a String cannot fail.
            let _ = write!(line, " {name}={value}");
        }
        cut(&mut line);
        line
    }

    fn add(&mut self, field: &Field, mut value: String) {
        cut(&mut value);
        if field.name() == "message" {
            self.message = value;
        } else if self.fields.len() < MAX_FIELDS {
            self.fields.push((field.name(), value));
        }
    }
}

impl Visit for EventText {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, format!("{value:?}"));
    }
}

fn cut(text: &mut String) {
    let fits = |&at: &usize| text.is_char_boundary(at);
    let end = (0..=MAX_TEXT_LEN_BYTES.min(text.len())).rev().find(fits);
    text.truncate(end.unwrap_or(0));
}

/// An event in journald's native protocol.
fn datagram(priority: u8, target: &str, text: &str, fields: &[(&str, String)]) -> Vec<u8> {
    let mut out = Vec::with_capacity(256 + text.len());
    put(&mut out, "PRIORITY", &priority.to_string());
    put(&mut out, "SYSLOG_IDENTIFIER", "millrace");
    put(&mut out, "TARGET", target);
    put(&mut out, "MESSAGE", text);
    for (name, value) in fields {
        put(&mut out, &format!("MILLRACE_{}", field_name(name)), value);
    }
    out
}

/// Makes a field's name as journald takes it: capital letters, digits and `_`, at most 64 in all.
fn field_name(name: &str) -> String {
    let fit = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    name.chars().map(fit).take(48).collect()
}

/// `NAME=value` and a line feed; a value with line feeds goes with its length, so that none of its
/// lines is taken for a field.
fn put(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        out.push(b'\n');
        out.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        out.push(b'=');
    }
    out.extend_from_slice(value.as_bytes());
    out.push(b'\n');
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case)]

    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Lines that are written instead.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    /// Logs by a journal whose socket is `path`; returns what was written instead.
    fn logged(path: &Path, log: impl FnOnce()) -> String {
        let lines = Lines::default();
        let instead = lines.clone();
        let journal = Journal::new(path, move || instead.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(journal), log);
        lines.text()
    }

    fn log_one_of_each() {
        tracing::error!(port = %"web/root", requests = 7, "not started: no such file");
        tracing::warn!("late");
        tracing::info!("ready");
        tracing::debug!("polled");
    }

    #[test]
    fn abuse_S3_journald_gets_priority_text_and_fields() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let journald = UnixDatagram::bind(&path).unwrap();
        assert_eq!(logged(&path, log_one_of_each), "");
        let receive = || {
            let mut buffer = [0; 4096];
            let n = journald.recv(&mut buffer).unwrap();
            String::from_utf8(buffer[..n].to_vec()).unwrap()
        };
        assert_eq!(
            receive(),
            "PRIORITY=3\nSYSLOG_IDENTIFIER=millrace\nTARGET=millrace::journal::tests\n\
             MESSAGE=not started: no such file port=web/root requests=7\n\
             MILLRACE_PORT=web/root\nMILLRACE_REQUESTS=7\n"
        );
        for (priority, text) in [(4, "late"), (6, "ready"), (7, "polled")] {
            let entry = receive();
            assert!(entry.starts_with(&format!("PRIORITY={priority}\n")), "{entry}");
            assert!(entry.ends_with(&format!("MESSAGE={text}\n")), "{entry}");
        }
    }

    #[test]
    fn abuse_S3_without_journald_lines_begin_with_their_priority() {
        let dir = tempfile::tempdir().unwrap();
        let lines = logged(&dir.path().join("nobody"), || {
            log_one_of_each();
            tracing::error!("two\nlines");
        });
        assert_eq!(
            lines,
            "<3>millrace::journal::tests: not started: no such file port=web/root requests=7\n\
             <4>millrace::journal::tests: late\n\
             <6>millrace::journal::tests: ready\n\
             <7>millrace::journal::tests: polled\n\
             <3>millrace::journal::tests: two lines\n"
        );
    }

    #[test]
    fn abuse_S3_errors_without_a_log_have_their_priority_in_each_line() {
        assert_eq!(
            with_priority("m.toml:1:1: a\nm.toml:2:1: b"),
            "<3>m.toml:1:1: a\n<3>m.toml:2:1: b"
        );
    }

    #[test]
    fn a_journald_that_reads_nothing_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _journald = UnixDatagram::bind(&path).unwrap();
        let lines = logged(&path, || (0..10_000).for_each(|n| tracing::info!("line {n}")));
        assert!(lines.ends_with("line 9999\n"), "the last line is lost");
    }

    #[test]
    fn a_value_cannot_bring_a_field_of_its_own() {
        let fields = [("na-me", "a\nPRIORITY=0".to_owned())];
        let sent = datagram(6, "t", "x", &fields);
        let mut wanted = b"MILLRACE_NA_ME\n".to_vec();
        wanted.extend_from_slice(&12u64.to_le_bytes());
        wanted.extend_from_slice(b"a\nPRIORITY=0\n");
        assert!(sent.ends_with(&wanted), "{sent:?}");
        let mut long = "ä".repeat(MAX_TEXT_LEN_BYTES);
        cut(&mut long);
        assert_eq!(long.len(), MAX_TEXT_LEN_BYTES);
    }
}
