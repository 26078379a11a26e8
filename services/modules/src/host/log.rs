//! Log of a process: its standard error reaches the daemon's log, line by line, with its VM's name
//! and within limits.

use std::io::PipeReader;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde_json::Value;

use crate::limits::{LOG_LINE_BYTES, PROCESS_LINES_PER_S, PROCESS_LOG_BYTES_PER_S};

const SECOND: Duration = Duration::from_secs(1);

/// Bytes that are read at a time.
const READ_BYTES: usize = 16 << 10;

/// The daemon's end of a process's standard error.
#[derive(Debug)]
pub(super) struct LogPipe {
    /// Reading end; none: the pipe has ended.
    pipe: Option<PipeReader>,
    vm: String,
    pid: u32,
    line: Vec<u8>,
    /// Beginning of the second that is counted.
    second: Instant,
    lines: u32,
    bytes: usize,
    /// Lines of this second that were not logged.
    dropped: u64,
    all_dropped: Arc<AtomicU64>,
}

impl LogPipe {
    pub fn new(pipe: PipeReader, vm: &str, pid: u32, dropped: &Arc<AtomicU64>) -> Self {
        // Fails for no pipe; then reading waits, for a process that writes.
        let _ = rustix::io::ioctl_fionbio(&pipe, true);
        Self {
            pipe: Some(pipe),
            vm: vm.into(),
            pid,
            line: Vec::new(),
            second: Instant::now(),
            lines: 0,
            bytes: 0,
            dropped: 0,
            all_dropped: Arc::clone(dropped),
        }
    }

    /// Descriptor to wait for; none while it has had its bytes of this second.
    pub fn watched(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().filter(|_| self.bytes < PROCESS_LOG_BYTES_PER_S).map(AsFd::as_fd)
    }

    /// Time at which there is something to do in any case.
    pub fn due(&self) -> Option<Instant> {
        let waits = self.dropped > 0 || self.bytes >= PROCESS_LOG_BYTES_PER_S;
        (waits && self.pipe.is_some()).then(|| self.second + SECOND)
    }

    /// Reads what there is.
    pub fn read(&mut self, now: Instant) {
        self.turn(now);
        let mut room = [0; READ_BYTES];
        while let Some(pipe) = self.pipe.as_ref().filter(|_| self.bytes < PROCESS_LOG_BYTES_PER_S) {
            match rustix::io::read(pipe, &mut room) {
                Ok(n @ 1..) => {
                    self.bytes += n;
                    self.take(&room[..n]);
                }
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok(_) | Err(_) => {
                    self.pipe = None;
                    self.end_line();
                    self.tell_dropped();
                }
            }
        }
    }

    fn turn(&mut self, now: Instant) {
        if now.saturating_duration_since(self.second) >= SECOND {
            self.tell_dropped();
            (self.second, self.lines, self.bytes) = (now, 0, 0);
        }
    }

    fn tell_dropped(&mut self) {
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            let (vm, pid) = (&self.vm, self.pid);
            tracing::warn!(%vm, pid, dropped, "process of modules of {vm} logs too much");
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            let (text, ends) = match piece.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (piece, false),
            };
            let room = LOG_LINE_BYTES.saturating_sub(self.line.len());
            self.line.extend_from_slice(&text[..text.len().min(room)]);
            if ends {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            return;
        }
        self.lines = self.lines.saturating_add(1);
        if self.lines > PROCESS_LINES_PER_S {
            self.dropped += 1;
            self.all_dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        log(&self.vm, self.pid, &Line::parse(&line));
    }
}

/// A line, whoever wrote it.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    level: String,
    module: String,
    text: String,
}

/// Keeps a text on one line.
fn plain(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}

impl Line {
    /// Parses a line of `tracing`, as JSON, or one that a panic, a library or the loader wrote.
    fn parse(line: &[u8]) -> Self {
        let told = |value: &Value| plain(value.as_str().unwrap_or(&value.to_string()));
        let Ok(Value::Object(mut whole)) = serde_json::from_slice::<Value>(line) else {
            let text = plain(&String::from_utf8_lossy(line));
            return Self { level: "WARN".into(), module: "-".into(), text };
        };
        let level = whole.get("level").map(told).unwrap_or_default();
        let Some(Value::Object(mut fields)) = whole.remove("fields") else {
            return Self { level, module: "-".into(), text: told(&Value::Object(whole)) };
        };
        let mut take = |name: &str| fields.remove(name).map(|value| told(&value));
        let module = take("module").unwrap_or_else(|| "-".into());
        let mut text = take("message").unwrap_or_default();
        for (name, value) in &fields {
            text += &format!(" {}={}", plain(name), told(value));
        }
        Self { level, module, text }
    }
}

fn log(vm: &str, pid: u32, Line { level, module, text }: &Line) {
    match level.as_str() {
        "ERROR" => tracing::error!(%vm, pid, %module, "{text}"),
        "INFO" => tracing::info!(%vm, pid, %module, "{text}"),
        "DEBUG" => tracing::debug!(%vm, pid, %module, "{text}"),
        "TRACE" => tracing::trace!(%vm, pid, %module, "{text}"),
        _ => tracing::warn!(%vm, pid, %module, "{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn line(level: &str, module: &str, text: &str) -> Line {
        Line { level: level.into(), module: module.into(), text: text.into() }
    }

    #[test]
    fn lines_say_who_and_what() {
        let text = br#"{"timestamp":"x","level":"INFO","fields":{"message":"it started","module":"a","n":3},"target":"t"}"#;
        assert_eq!(Line::parse(text), line("INFO", "a", "it started n=3"));
        assert_eq!(
            Line::parse(b"thread 'x' panicked\x1b[31m\xff"),
            line("WARN", "-", "thread 'x' panicked [31m\u{fffd}")
        );
        assert_eq!(Line::parse(b"[1]"), line("WARN", "-", "[1]"));
        assert_eq!(
            Line::parse(br#"{"level":"ERROR"}"#),
            line("ERROR", "-", r#"{"level":"ERROR"}"#)
        );
    }

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let dropped = Arc::new(AtomicU64::new(0));
        let mut log = LogPipe::new(reader, "vm", 7, &dropped);
        let begin = log.second;
        let mut write = |log: &mut LogPipe, n: u32, at| {
            for _ in 0..n {
                writer.write_all(b"line\n\n").unwrap();
            }
            log.read(at);
        };
        write(&mut log, PROCESS_LINES_PER_S + 5, begin);
        assert_eq!((dropped.load(Ordering::Relaxed), log.due()), (5, Some(begin + SECOND)));
        // Another second, another chance.
        write(&mut log, PROCESS_LINES_PER_S, begin + SECOND);
        assert_eq!((dropped.load(Ordering::Relaxed), log.due()), (5, None));
        // A line without an end is kept as far as it may be long.
        writer.write_all(&[b'x'; 3 * LOG_LINE_BYTES]).unwrap();
        log.read(begin + SECOND);
        assert_eq!(log.line.len(), LOG_LINE_BYTES);
        // Beyond its bytes it is not read: the process waits.
        log.bytes = PROCESS_LOG_BYTES_PER_S;
        assert!(log.watched().is_none() && log.due() == Some(begin + 2 * SECOND));
        log.read(begin + 2 * SECOND);
        assert!(log.watched().is_some());
        drop(writer);
        log.read(begin + 2 * SECOND);
        assert!(log.watched().is_none() && log.due().is_none() && log.line.is_empty());
    }
}
