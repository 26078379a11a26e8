//! Counts the system calls of a daemon, or of one of its threads.
#![allow(dead_code, clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A running strace.
pub struct Strace {
    child: Child,
    /// Open to the end: it says farewell, too.
    _stderr: BufReader<ChildStderr>,
    summary: PathBuf,
}

impl Strace {
    /// Returns when it is attached to what `args` say; its summary goes to a file.
    pub fn attach(args: &[&str], summary: &Path) -> Self {
        Self::start(&[&["-c"], args].concat(), summary)
    }

    /// Returns when it is attached to what `args` say; the calls themselves go to a file.
    pub fn log(args: &[&str], log: &Path) -> Self {
        Self::start(args, log)
    }

    fn start(args: &[&str], summary: &Path) -> Self {
        let mut child = Command::new("strace")
            .arg("-o")
            .arg(summary)
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        stderr.read_line(&mut said).unwrap();
        assert!(said.contains("attached"), "{said}");
        Self { child, _stderr: stderr, summary: summary.into() }
    }

    /// Ends it: the system calls since, and its summary.
    pub fn finish(mut self) -> (u64, String) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        self.child.wait().unwrap();
        let text = std::fs::read_to_string(&self.summary).unwrap();
        let total = text.lines().rev().find(|line| line.ends_with("total"));
        // "100.00    1.23        10      1234        5 total": calls are the fourth column. No
        // line: there was no call.
        let calls =
            total.map_or(0, |total| total.split_whitespace().nth(3).unwrap().parse().unwrap());
        (calls, text)
    }
}
