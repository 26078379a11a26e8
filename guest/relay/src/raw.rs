//! Frames by themselves: making them, and finding them in a stream. For tests also wrong ones.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use guest_abi::module::{
    FRAME_BYTES, Frame, Hello, MAGIC, MAX_BODY_BYTES, MAX_PING_BYTES, VERSION,
};
use guest_abi::module::{MAX_NAME_BYTES, MAX_TEXT_BYTES, kind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::address::{self, Address};
use crate::error::WireError;

/// Least bytes that a socket is read with.
const READ_BYTES: usize = 64 << 10;
/// Largest empty buffer that is kept.
const KEPT_BYTES: usize = 512 << 10;

/// Makes the frame of a body, with its check.
pub fn frame(kind: u16, flags: u16, seq: u64, body: &[u8]) -> Frame {
    let mut frame = Frame::new(kind, flags, seq, body.len());
    frame.check = U64::new(xxh3_64_with_seed(body, frame.seed()));
    frame
}

/// Appends a frame and its body.
pub fn put(into: &mut Vec<u8>, kind: u16, flags: u16, seq: u64, body: &[u8]) {
    into.extend_from_slice(frame(kind, flags, seq, body).as_bytes());
    into.extend_from_slice(body);
}

/// Makes a hello for this version.
pub fn hello(client: [u8; 16], module: [u8; MAX_NAME_BYTES]) -> Hello {
    Hello {
        magic: U64::new(MAGIC),
        lowest: U16::new(VERSION),
        highest: U16::new(VERSION),
        reserved: U32::ZERO,
        client,
        module,
    }
}

/// Received frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// `guest_abi::module::kind`.
    pub kind: u16,
    /// `guest_abi::module::flag`s.
    pub flags: u16,
    /// Number of the request.
    pub seq: u64,
    /// Body of the frame.
    pub body: Vec<u8>,
}

/// Longest body of a frame of a kind.
fn limit(frame_kind: u16, max_body: u32) -> u32 {
    match frame_kind {
        kind::PING | kind::PONG => MAX_PING_BYTES as u32,
        kind::GOODBYE => (MAX_TEXT_BYTES + size_of::<guest_abi::module::Failure>()) as u32,
        kind::CANCEL => 0,
        _ => max_body,
    }
}

/// Inbox: finds frames in bytes that come in pieces.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// Room for the next bytes; never empty. Report their number to [`Inbox::filled`].
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > KEPT_BYTES {
                self.bytes = Vec::new();
            }
        }
        if self.bytes.len() - self.end < READ_BYTES && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < READ_BYTES {
            // Grows with the bytes that have come, not with the length that a frame claims.
            self.bytes.resize((self.bytes.len() * 2).max(2 * READ_BYTES), 0);
        }
        &mut self.bytes[self.end..]
    }

    /// Notes that `len` bytes were put into [`Inbox::room`].
    pub fn filled(&mut self, len: usize) {
        self.end = (self.end + len).min(self.bytes.len());
    }

    /// Returns the next frame, if it is complete. After an error the stream is useless.
    ///
    /// # Errors
    /// It is too long, or its check is wrong.
    pub fn next(&mut self, max_body: u32) -> Result<Option<Received>, WireError> {
        let bytes = &self.bytes[self.start..self.end];
        let Ok((frame, rest)) = Frame::read_from_prefix(bytes) else { return Ok(None) };
        let (kind, len) = (frame.kind.get(), frame.len_bytes.get());
        let limit = limit(kind, max_body);
        if len > limit {
            return Err(WireError::TooLong { kind, len, limit });
        }
        let Some(body) = rest.get(..len as usize) else { return Ok(None) };
        let seq = frame.seq.get();
        if xxh3_64_with_seed(body, frame.seed()) != frame.check.get() {
            return Err(WireError::Check { kind, seq });
        }
        let received = Received { kind, flags: frame.flags.get(), seq, body: body.to_vec() };
        self.start += FRAME_BYTES + len as usize;
        Ok(Some(received))
    }

    /// Whether the inbox has no part of a frame.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

/// Connection that sends any bytes, for tests of the host.
#[derive(Debug)]
pub struct Raw {
    socket: std::os::unix::net::UnixStream,
    inbox: Inbox,
}

impl Raw {
    /// Connects; reading and writing then wait for at most `timeout`.
    ///
    /// # Errors
    /// No listener is there.
    pub fn connect(address: &Address, timeout: Duration) -> io::Result<Self> {
        let socket = address.dial()?;
        wait_until_connected(&socket, timeout)?;
        Self::new(socket, timeout)
    }

    /// Wraps a connected stream of any family.
    ///
    /// # Errors
    /// It is no socket.
    pub fn new(socket: OwnedFd, timeout: Duration) -> io::Result<Self> {
        // Only read, write, shut down, and options of all sockets: it need not be a Unix one.
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(timeout))?;
        socket.set_write_timeout(Some(timeout))?;
        Ok(Self { socket, inbox: Inbox::default() })
    }

    /// Sends any bytes.
    ///
    /// # Errors
    /// The connection ended, or takes nothing.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.write_all(bytes)
    }

    /// Sends a valid frame.
    ///
    /// # Errors
    /// Those of [`Raw::send_bytes`].
    pub fn send(&mut self, kind: u16, flags: u16, seq: u64, body: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(FRAME_BYTES + body.len());
        put(&mut bytes, kind, flags, seq, body);
        self.send_bytes(&bytes)
    }

    /// Receives the next frame; none: the other side has closed.
    ///
    /// # Errors
    /// None came in time, or the bytes are no frame ([`WireError`] within).
    pub fn receive(&mut self) -> io::Result<Option<Received>> {
        loop {
            if let Some(frame) = self.inbox.next(MAX_BODY_BYTES).map_err(io::Error::other)? {
                return Ok(Some(frame));
            }
            match self.socket.read(self.inbox.room()) {
                Ok(0) if self.inbox.is_empty() => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(len) => self.inbox.filled(len),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Closes the sending side.
    ///
    /// # Errors
    /// The connection is lost.
    pub fn finish(&self) -> io::Result<()> {
        self.socket.shutdown(std::net::Shutdown::Write)
    }
}

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

/// Waits until connecting has ended.
pub(crate) fn wait_until_connected(socket: &OwnedFd, timeout: Duration) -> io::Result<()> {
    match poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&timespec(timeout))) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) => address::outcome(socket),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_abi::module::flag;
    use proptest::prelude::*;

    fn push(inbox: &mut Inbox, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = inbox.room();
            let len = bytes.len().min(room.len());
            room[..len].copy_from_slice(&bytes[..len]);
            inbox.filled(len);
            bytes = &bytes[len..];
        }
    }

    #[test]
    fn every_changed_bit_of_a_frame_is_found() {
        let mut right = Vec::new();
        put(&mut right, kind::REPLY, flag::FAILED, 7, b"body");
        for bit in 0..right.len() * 8 {
            let mut wrong = right.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let mut inbox = Inbox::default();
            push(&mut inbox, &wrong);
            // A longer frame may wait for bytes that never come.
            assert!(!matches!(inbox.next(MAX_BODY_BYTES), Ok(Some(_))), "bit {bit}");
        }
    }

    #[test]
    fn lengths_have_limits_for_each_kind() {
        for (kind, len) in [(kind::PONG, 65), (kind::GOODBYE, 521), (kind::REPLY, 1001)] {
            let mut inbox = Inbox::default();
            push(&mut inbox, Frame::new(kind, 0, 1, len).as_bytes());
            assert!(matches!(inbox.next(1000), Err(WireError::TooLong { .. })));
        }
    }

    proptest! {
        #[test]
        fn frames_are_found_however_they_come(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
            cuts in prop::collection::vec(1..400usize, 1..20),
        ) {
            let mut stream = Vec::new();
            for (seq, body) in bodies.iter().enumerate() {
                put(&mut stream, kind::REPLY, 0, seq as u64, body);
            }
            let (mut inbox, mut found, mut rest) = (Inbox::default(), Vec::new(), &stream[..]);
            for cut in cuts.iter().cycle() {
                let (piece, after) = rest.split_at((*cut).min(rest.len()));
                push(&mut inbox, piece);
                while let Some(frame) = inbox.next(MAX_BODY_BYTES).unwrap() {
                    prop_assert_eq!(frame.seq, found.len() as u64);
                    found.push(frame.body);
                }
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert!(inbox.is_empty());
            prop_assert_eq!(found, bodies);
        }

        #[test]
        fn any_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let mut inbox = Inbox::default();
            push(&mut inbox, &bytes);
            while let Ok(Some(_)) = inbox.next(MAX_BODY_BYTES) {}
        }
    }
}
