//! Client of QEMU's monitor (QEMU documentation, `interop/qmp-spec`): one JSON object a line.
//!
//! Answers are matched by `id`, so an answer that comes after its time-out is not taken for another
//! command's. Descriptors go with the bytes of the command that uses them. Events that we know are
//! kept until somebody takes them; others are dropped.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::event::Event;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};

use crate::error::QmpError;
use crate::poll_until::poll_until;

/// Time for a command: QEMU answers from its main loop, which a slow disk can hold up.
pub(crate) const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Most bytes of a line.
pub(crate) const MAX_LINE_LEN_BYTES: usize = 1 << 20;
/// Most events that are kept; older ones are dropped.
pub(crate) const MAX_EVENTS: usize = 256;
/// Bytes read at once.
const READ_LEN_BYTES: usize = 4096;
/// Most reads in a row: a monitor that sends without an end is not read to it.
const MAX_READS: usize = 4;

/// Event that QEMU sends by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum QmpEvent {
    /// Event `DEVICE_DELETED` of a device with an id.
    DeviceDeleted(String),
    /// Event `RESET` or `SHUTDOWN`: what ran in the guest runs no more.
    GuestEnded(&'static str),
}

/// Connection with a monitor.
#[derive(Debug)]
pub(crate) struct Qmp {
    socket: OwnedFd,
    /// Ends any wait when it is rung.
    stop: Arc<Event>,
    timeout: Duration,
    buffer: Vec<u8>,
    events: VecDeque<QmpEvent>,
    last_id: u64,
}

impl Qmp {
    /// Connects, reads the greeting and leaves the negotiation behind. `timeout` is that of each
    /// command.
    pub fn connect(path: &Path, timeout: Duration, stop: Arc<Event>) -> Result<Self, QmpError> {
        let mut qmp = Self::over(dial(path)?, stop, timeout);
        let command = "the greeting";
        let until = Instant::now() + timeout;
        let greeting = loop {
            if let Some(line) = qmp.take_line(command)? {
                break line;
            }
            qmp.fill(command, until)?;
        };
        if greeting.get("QMP").is_none() {
            return Err(bad(command, format!("not one of QMP: {:.100}", greeting.to_string())));
        }
        qmp.run("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Makes a connection of a fresh socket.
    pub(crate) fn over(socket: OwnedFd, stop: Arc<Event>, timeout: Duration) -> Self {
        let (buffer, events) = Default::default();
        Self { socket, stop, timeout, buffer, events, last_id: 0 }
    }

    /// Number of bytes that are no whole line yet.
    #[cfg(feature = "testing")]
    pub(crate) fn kept_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Runs a command and returns what it returns.
    pub fn run(&mut self, command: &'static str, arguments: Value) -> Result<Value, QmpError> {
        self.exchange(command, arguments, None)
    }

    /// Runs a command that takes a descriptor (`getfd`, `add-fd`).
    pub fn run_with_fd(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: BorrowedFd<'_>,
    ) -> Result<Value, QmpError> {
        self.exchange(command, arguments, Some(fd))
    }

    /// Reads lines without waiting, up to a limit. True when it was reached: there may be more.
    pub fn read_available(&mut self) -> Result<bool, QmpError> {
        let command = "listening for events";
        for _ in 0..MAX_READS {
            if !self.read_some(command)? {
                return Ok(false);
            }
            while let Some(line) = self.take_line(command)? {
                self.keep_event(&line);
            }
        }
        Ok(true)
    }

    /// Takes the oldest event.
    pub fn take_event(&mut self) -> Option<QmpEvent> {
        self.events.pop_front()
    }

    fn exchange(
        &mut self,
        command: &'static str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Value, QmpError> {
        self.last_id += 1;
        let id = self.last_id;
        let mut line = json!({"execute": command, "arguments": arguments, "id": id}).to_string();
        line.push('\n');
        let until = Instant::now() + self.timeout;
        self.send(command, line.as_bytes(), fd, until)?;
        let mut result = None;
        loop {
            // Lines behind the answer are events: none may stay in the buffer, where no poll sees
            // it.
            while let Some(mut line) = self.take_line(command)? {
                if line.get("id").and_then(Value::as_u64) != Some(id) {
                    self.keep_event(&line);
                } else if let Some(value) = line.get_mut("return") {
                    result = Some(Ok(value.take()));
                } else {
                    let text = |key| line["error"][key].as_str().unwrap_or("?").to_owned();
                    let (class, text) = (text("class"), text("desc"));
                    result = Some(Err(QmpError::Refused { command, class, text }));
                }
            }
            if let Some(result) = result {
                return result;
            }
            self.fill(command, until)?;
        }
    }

    fn keep_event(&mut self, line: &Value) {
        let event = match line.get("event").and_then(Value::as_str) {
            Some("DEVICE_DELETED") => match line["data"]["device"].as_str() {
                Some(device) => QmpEvent::DeviceDeleted(device.to_owned()),
                None => return,
            },
            Some("RESET") => QmpEvent::GuestEnded("RESET"),
            Some("SHUTDOWN") => QmpEvent::GuestEnded("SHUTDOWN"),
            _ => return,
        };
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Sends a line; the descriptor goes with its first byte.
    fn send(
        &self,
        command: &'static str,
        mut bytes: &[u8],
        fd: Option<BorrowedFd<'_>>,
        until: Instant,
    ) -> Result<(), QmpError> {
        let fds: &[BorrowedFd<'_>] = fd.as_slice();
        let mut fds = Some(fds).filter(|fds| !fds.is_empty());
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if let Some(fds) = fds {
                // There is room for one.
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(sent) => {
                    bytes = bytes.get(sent..).unwrap_or_default();
                    fds = None;
                }
                Err(Errno::AGAIN) => self.wait_for(PollFlags::OUT, command, until)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(QmpError::Closed { command }),
                Err(error) => return Err(QmpError::Io { command, source: error.into() }),
            }
        }
        Ok(())
    }

    /// Waits for more bytes and reads them. Not longer than `until`, however many there are.
    fn fill(&mut self, command: &'static str, until: Instant) -> Result<(), QmpError> {
        self.wait_for(PollFlags::IN, command, until)?;
        self.read_some(command).map(drop)
    }

    fn wait_for(
        &self,
        flags: PollFlags,
        command: &'static str,
        until: Instant,
    ) -> Result<(), QmpError> {
        let mut fds = [PollFd::new(&self.socket, flags), PollFd::new(&*self.stop, PollFlags::IN)];
        poll_until(&mut fds, Some(until)).map_err(|source| QmpError::Io { command, source })?;
        if !fds[1].revents().is_empty() {
            return Err(QmpError::Stopped { command });
        }
        if Instant::now() >= until {
            let timeout_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
            return Err(QmpError::Timeout { command, timeout_ms });
        }
        Ok(())
    }

    /// Reads once; false when there is nothing yet.
    fn read_some(&mut self, command: &'static str) -> Result<bool, QmpError> {
        let mut bytes = [0; READ_LEN_BYTES];
        match rustix::net::recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Err(QmpError::Closed { command }),
            Ok((count, _)) => {
                self.buffer.extend_from_slice(&bytes[..count]);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(QmpError::Io { command, source: error.into() }),
        }
    }

    /// Takes the next whole line, if there is one.
    fn take_line(&mut self, command: &'static str) -> Result<Option<Value>, QmpError> {
        let end = self.buffer.iter().position(|byte| *byte == b'\n');
        if end.unwrap_or(self.buffer.len()) > MAX_LINE_LEN_BYTES {
            let why = format!("a line of more than {MAX_LINE_LEN_BYTES} bytes");
            return Err(bad(command, why));
        }
        let Some(end) = end else { return Ok(None) };
        let line: Vec<u8> = self.buffer.drain(..=end).collect();
        let value: Value = serde_json::from_slice(&line).map_err(|error| {
            bad(command, format!("{error}: {:.100}", String::from_utf8_lossy(&line)))
        })?;
        Ok(Some(value))
    }
}

impl AsFd for Qmp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn bad(command: &'static str, why: String) -> QmpError {
    QmpError::BadLine { command, why }
}

/// Connects without waiting: a socket whose backlog is full would keep us for as long as its first
/// client likes.
fn dial(path: &Path) -> Result<OwnedFd, QmpError> {
    let failed =
        |what| move |source: io::Error| QmpError::Connect { path: path.to_owned(), what, source };
    let socket = base::socket::stream().map_err(|e| failed("making a socket")(e.into()))?;
    base::socket::connect(&socket, path).map_err(failed("connecting"))?;
    Ok(socket)
}

/// Whether the monitor's socket has no listener: the VM of an earlier daemon is gone.
pub(crate) fn is_gone(path: &Path) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    let refused = |source: &io::Error| matches!(source.kind(), NotFound | ConnectionRefused);
    matches!(dial(path), Err(QmpError::Connect { source, .. }) if refused(&source))
}

#[cfg(test)]
mod tests;
