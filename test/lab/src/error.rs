//! Errors of the lab.

use std::io;
use std::time::Duration;

use lab_agent::AgentError;

/// An error of the lab; the text names the guest or program, what was tried, and what it said.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A file, socket or process operation on the host failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its object.
        what: String,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A program on the host failed.
    #[error("{command}: {status}\n{output}")]
    HostCommand {
        /// The command line.
        command: String,
        /// How it ended.
        status: String,
        /// Output, cut to its end.
        output: String,
    },
    /// A program, package or device that the lab needs is missing.
    #[error("{what} is missing; {remedy}")]
    Missing {
        /// The thing.
        what: String,
        /// Remedy for it.
        remedy: String,
    },
    /// A request or file is outside what the lab does.
    #[error("{0}")]
    Refused(String),
    /// The guest crashed or its QEMU ended.
    #[error(
        "guest {name}: {why}\n--- last console lines ---\n{console}\n--- QEMU said ---\n{stderr}"
    )]
    GuestDied {
        /// The guest's name.
        name: String,
        /// Kernel panic, QEMU's exit, …
        why: String,
        /// The last 40 lines of its console.
        console: String,
        /// Errors that QEMU printed.
        stderr: String,
    },
    /// A CPU of the guest has halted with an interrupt in service: QEMU has lost the end of that
    /// interrupt, and the guest cannot go on.
    #[error(
        "guest {name}: CPU {cpu} has halted in interrupt {vectors}, whose end QEMU has lost\n\
         --- last console lines ---\n{console}"
    )]
    InterruptEndLost {
        /// The guest's name.
        name: String,
        /// Number of the CPU.
        cpu: usize,
        /// Vectors of the interrupts in service.
        vectors: String,
        /// The last 40 lines of its console.
        console: String,
    },
    /// The guest did not do something in time.
    #[error("guest {name}: {what} took more than {after:?}\n--- last console lines ---\n{console}")]
    GuestTimeout {
        /// The guest's name.
        name: String,
        /// Event that was waited for.
        what: String,
        /// The time-out.
        after: Duration,
        /// The last 40 lines of its console.
        console: String,
    },
    /// A command in the guest ended with an error.
    #[error("guest {name}: {script:?} ended with {code}{killed}\n{stdout}{stderr}")]
    GuestCommand {
        /// The guest's name.
        name: String,
        /// The command.
        script: String,
        /// Exit code, or 128 + signal.
        code: i32,
        /// " after its time-out", or nothing.
        killed: &'static str,
        /// Output of the command.
        stdout: String,
        /// Errors of the command.
        stderr: String,
    },
    /// The agent refused a request, or the protocol broke.
    #[error("guest {name}: {source}")]
    Agent {
        /// The guest's name.
        name: String,
        /// The agent's error.
        source: AgentError,
    },
    /// QEMU's monitor refused a command.
    #[error("guest {name}: QMP {command}: {answer}")]
    Qmp {
        /// The guest's name.
        name: String,
        /// The command.
        command: String,
        /// The error object, or what is wrong with the answer.
        answer: String,
    },
    /// The daemon did not start, ended, or gave a wrong answer.
    #[error("millrace daemon: {what}\n--- its log ---\n{log}")]
    Daemon {
        /// Event that was not expected.
        what: String,
        /// The log's last lines.
        log: String,
    },
}

impl LabError {
    /// Wraps an I/O error with what was being done.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
