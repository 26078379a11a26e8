//! The line to a VM's agent: its stream as the daemon writes to it. [`crate::agent_session`] reads
//! from it.

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use base::sync::lock;
use guest_abi::Reason;
use guest_abi::frame::Header;
use guest_abi::pipe::{self, kind};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use crate::limits::AGENT_TIMEOUT;
use crate::range_request::RangeRequest;

/// The writing side of an agent's stream.
#[derive(Debug)]
pub(crate) struct Line {
    stream: Mutex<UnixStream>,
    /// Another descriptor of the socket, to end it while another thread writes.
    control: UnixStream,
    closed: AtomicBool,
    /// The agent's hello was right.
    proved: AtomicBool,
}

impl Line {
    /// A line over that stream.
    pub fn new(stream: &UnixStream) -> io::Result<Self> {
        Ok(Self {
            stream: Mutex::new(stream.try_clone()?),
            control: stream.try_clone()?,
            closed: AtomicBool::new(false),
            proved: AtomicBool::new(false),
        })
    }

    /// Sends a message.
    pub fn send(&self, kind: u16, id: u64, body: &(impl IntoBytes + Immutable)) {
        self.send_parts(kind, id, body.as_bytes(), &[]);
    }

    /// Sends a message whose body is in two parts.
    pub fn send_parts(&self, kind: u16, id: u64, body: &[u8], more: &[u8]) {
        let header = Header::new(kind, id, body.len() + more.len());
        let message = [header.as_bytes(), body, more].concat();
        let mut stream = lock(&self.stream);
        // An agent that takes no messages, or half of one, is of no use any more.
        if write_by(&mut stream, &message, Instant::now() + AGENT_TIMEOUT).is_err() {
            self.close();
        }
    }

    /// Tells the end of a pipe.
    pub fn send_done(&self, id: u64, moved_bytes: u64, reason: Reason) {
        let (moved_bytes, reason) = (U64::new(moved_bytes), U16::new(reason as u16));
        self.send(kind::DONE, id, &pipe::Done { moved_bytes, reason, reserved: [0; 6] });
    }

    /// Tells how many bytes of a connection that is read the guest reads itself.
    pub fn send_begun(&self, id: u64, own_bytes: u64) {
        self.send(kind::BEGUN, id, &pipe::Begun { own_bytes: U64::new(own_bytes) });
    }

    /// Asks the guest to write a range of a pipe; `bytes` are there unless it is by placeholders.
    pub fn ask_write(&self, id: u64, request: &RangeRequest, bytes: &[u8]) {
        self.send_parts(kind::TAKE, id, body_of(request).as_bytes(), bytes);
    }

    /// Asks the guest to read a range of a pipe.
    pub fn ask_read(&self, id: u64, request: &RangeRequest) {
        self.send(kind::GIVE, id, &body_of(request));
    }

    /// Whether the agent's hello was right.
    pub fn is_proved(&self) -> bool {
        self.proved.load(Ordering::Relaxed)
    }

    /// Notes that the agent's hello was right.
    pub fn prove(&self) {
        self.proved.store(true, Ordering::Relaxed);
    }

    /// Whether the stream has ended: nothing more is to be expected of the agent.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Ends the stream; its reader hears of it.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        // Fails only when it has ended.
        let _ = self.control.shutdown(Shutdown::Both);
    }
}

fn body_of(request: &RangeRequest) -> pipe::Take {
    pipe::Take {
        at: U64::new(request.range.start),
        len_bytes: U32::new(request.len_bytes() as u32),
        how: request.how,
        reserved: [0; 3],
    }
}

/// Writes all of it; the stream's own time-out is only one call's.
fn write_by(stream: &mut UnixStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if !bytes.is_empty() && Instant::now() >= until {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_an_answer_is_the_end() {
        let (mut stream, other) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let answer = vec![0; 64 << 20];
        assert!(write_by(&mut stream, &answer, Instant::now()).is_err());
        drop(other);
        assert!(write_by(&mut stream, &[0; 8], Instant::now()).is_err());
    }
}
