//! One line per step with the time since the start; on a terminal also a bar that stays below.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const BAR_WIDTH: usize = 24;

/// Writes progress. Lines go where the caller says, normally standard error, so that tables and
/// JSON on standard output stay clean.
pub struct Progress {
    out: Box<dyn Write + Send>,
    started: Instant,
    terminal: bool,
    bar: Option<Bar>,
}

struct Bar {
    done: usize,
    of: usize,
    label: String,
}

impl Progress {
    /// To standard error; with a bar when that is a terminal.
    pub fn stderr() -> Progress {
        Progress::to(Box::new(std::io::stderr()), std::io::stderr().is_terminal())
    }

    /// To any writer.
    pub fn to(out: Box<dyn Write + Send>, terminal: bool) -> Progress {
        Progress { out, started: Instant::now(), terminal, bar: None }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// One finished or begun step, on a line of its own.
    pub fn step(&mut self, text: &str) {
        let line = line_text(self.elapsed(), text);
        self.clear_bar();
        // Progress that cannot be shown must not end a measurement.
        let _ = writeln!(self.out, "{line}");
        self.draw_bar();
    }

    /// How far we are; only shown on a terminal.
    pub fn bar(&mut self, done: usize, of: usize, label: &str) {
        self.clear_bar();
        self.bar = Some(Bar { done, of, label: label.to_string() });
        self.draw_bar();
    }

    /// Takes the bar away.
    pub fn end_bar(&mut self) {
        self.clear_bar();
        self.bar = None;
        let _ = self.out.flush();
    }

    fn clear_bar(&mut self) {
        if self.terminal && self.bar.is_some() {
            let _ = write!(self.out, "\r\x1b[K");
        }
    }

    fn draw_bar(&mut self) {
        if let (true, Some(bar)) = (self.terminal, &self.bar) {
            let text = bar_text(bar.done, bar.of, &bar.label);
            let _ = write!(self.out, "{text}");
            let _ = self.out.flush();
        }
    }
}

fn line_text(elapsed: Duration, text: &str) -> String {
    format!("[{:6.1} s] {text}", elapsed.as_secs_f64())
}

fn bar_text(done: usize, of: usize, label: &str) -> String {
    let filled = (done * BAR_WIDTH).checked_div(of).unwrap_or(0).min(BAR_WIDTH);
    format!("[{}{}] {done}/{of} {label}", "#".repeat(filled), "-".repeat(BAR_WIDTH - filled))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Text of a line and a bar, on a terminal or in a file.
    fn shown(terminal: bool) -> String {
        let sink = Sink::default();
        let mut p = Progress::to(Box::new(sink.clone()), terminal);
        p.bar(1, 2, "half");
        p.step("one");
        p.end_bar();
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn lines_and_bars_read_well() {
        assert_eq!(line_text(Duration::from_millis(12_345), "boot"), "[  12.3 s] boot");
        assert_eq!(bar_text(6, 12, "tcp_rr"), "[############------------] 6/12 tcp_rr");
        assert_eq!(bar_text(0, 0, "x"), "[------------------------] 0/0 x");
        assert_eq!(bar_text(99, 12, "x"), "[########################] 99/12 x");
    }

    #[test]
    fn a_file_gets_lines_and_never_a_bar() {
        let text = shown(false);
        assert!(text.ends_with("one\n") && text.lines().count() == 1, "{text:?}");
        assert!(!text.contains('\x1b') && !text.contains('\r'), "{text:?}");
    }

    #[test]
    fn a_terminal_keeps_the_bar_below_the_lines() {
        let text = shown(true);
        let line = text.find("one\n").unwrap();
        assert!(text[..line].contains("\r\x1b[K"), "bar is wiped before a line: {text:?}");
        assert!(text[line..].contains("1/2 half"), "and drawn again after it: {text:?}");
        assert!(text.ends_with("\r\x1b[K"), "{text:?}");
    }
}
