//! A connection: bytes to frames and back.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use guest_abi::module::{FRAME_BYTES, Failure, Frame, MAX_BODY_BYTES, MAX_TEXT_BYTES, flag, kind};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::limits::{READ_BYTES, WAITING_BYTES, WRITE_PIECES};

/// A whole frame that waits to be written, shared with whoever keeps it.
pub(crate) type Bytes = Rc<Vec<u8>>;

/// Fills in the header of a frame whose body is there already.
pub(crate) fn finish(mut bytes: Vec<u8>, kind: u16, flags: u16, seq: u64) -> Bytes {
    let at = FRAME_BYTES.min(bytes.len());
    let (head, body) = bytes.split_at_mut(at);
    let mut frame = Frame::new(kind, flags, seq, body.len());
    frame.check = U64::new(xxh3_64_with_seed(body, frame.seed()));
    if head.len() == FRAME_BYTES {
        head.copy_from_slice(frame.as_bytes());
    }
    Rc::new(bytes)
}

/// A frame with this body.
pub(crate) fn frame(kind: u16, flags: u16, seq: u64, parts: &[&[u8]]) -> Bytes {
    let mut bytes = vec![0; FRAME_BYTES];
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    finish(bytes, kind, flags, seq)
}

/// A failed reply, or a goodbye.
pub(crate) fn failure(kind: u16, seq: u64, code: u32, text: &str) -> Bytes {
    let mut len = text.len().min(MAX_TEXT_BYTES);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    let failure = Failure { code: U32::new(code), reserved: U32::ZERO };
    frame(kind, flag::FAILED, seq, &[failure.as_bytes(), &text.as_bytes()[..len]])
}

/// What is wrong with a peer's bytes, for its goodbye.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bad(pub String);

/// The frame at the beginning of these bytes, if it is there in whole. Checks its length and its hash.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Frame, &[u8])>, Bad> {
    let Ok((frame, rest)) = Frame::read_from_prefix(bytes) else { return Ok(None) };
    let len = frame.len_bytes.get();
    if len > MAX_BODY_BYTES {
        return Err(Bad(format!("a frame of {len} bytes, the limit is {MAX_BODY_BYTES}")));
    }
    let Some(body) = rest.get(..len as usize) else { return Ok(None) };
    if xxh3_64_with_seed(body, frame.seed()) != frame.check.get() {
        let (kind, seq) = (frame.kind.get(), frame.seq.get());
        return Err(Bad(format!("the check of frame {seq} of kind {kind} is wrong")));
    }
    Ok(Some((frame, body)))
}

/// A stream of frames that does not block.
#[derive(Debug)]
pub(crate) struct Conn {
    fd: OwnedFd,
    /// Which client it is.
    pub client: u32,
    input: Vec<u8>,
    /// Where the next frame begins in `input`.
    begin: usize,
    output: VecDeque<Bytes>,
    /// Bytes of the first frame of `output` that are written.
    written: usize,
    waiting_bytes: usize,
    /// Its peer sends no more.
    pub ended: bool,
    /// It is watched for room to write, or not watched for something to read.
    pub watched: (bool, bool),
}

impl Conn {
    pub fn new(fd: OwnedFd, client: u32) -> Self {
        Self {
            fd,
            client,
            input: Vec::new(),
            begin: 0,
            output: VecDeque::new(),
            written: 0,
            waiting_bytes: 0,
            ended: false,
            watched: (true, false),
        }
    }

    /// Bytes that came and were not taken.
    fn held_bytes(&self) -> usize {
        self.input.len() - self.begin
    }

    /// Bytes of its next frame, as far as they are known.
    fn wanted_bytes(&self) -> usize {
        let head = Frame::read_from_prefix(&self.input[self.begin..]);
        FRAME_BYTES + head.map_or(0, |(head, _)| head.len_bytes.get() as usize)
    }

    /// Bytes of a frame that has not come in whole.
    pub fn partial_bytes(&self) -> usize {
        let held = self.held_bytes();
        if held < self.wanted_bytes() { held } else { 0 }
    }

    /// Whether it may be read: its client takes its replies, and the module what was read.
    pub fn may_read(&self) -> bool {
        let room = self.held_bytes() < READ_BYTES.max(self.wanted_bytes());
        room && !self.ended && self.waiting_bytes < WAITING_BYTES
    }

    /// Whether there is something to write.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Reads what there is, up to [`READ_BYTES`].
    pub fn fill(&mut self) -> Result<(), Errno> {
        if self.begin > 0 && (self.begin == self.input.len() || self.begin >= READ_BYTES) {
            self.input.drain(..self.begin);
            self.begin = 0;
            // A long row's room does not stay.
            if self.input.capacity() > 4 * READ_BYTES && self.input.len() < READ_BYTES {
                self.input.shrink_to(READ_BYTES);
            }
        }
        let len = self.input.len();
        self.input.reserve(READ_BYTES);
        let room = rustix::buffer::spare_capacity(&mut self.input);
        match rustix::net::recv(&self.fd, room, RecvFlags::DONTWAIT) {
            Ok(_) => self.ended = self.input.len() == len,
            // Interrupted: it is still ready the next time.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// The next whole frame.
    pub fn next(&self) -> Result<Option<(Frame, &[u8])>, Bad> {
        parse(&self.input[self.begin..])
    }

    /// That frame was taken.
    pub fn advance(&mut self, body_bytes: usize) {
        self.begin = (self.begin + FRAME_BYTES + body_bytes).min(self.input.len());
    }

    /// Adds a frame.
    pub fn push(&mut self, bytes: Bytes) {
        self.waiting_bytes += bytes.len();
        self.output.push_back(bytes);
    }

    /// Writes what its peer takes.
    pub fn flush(&mut self) -> Result<(), Errno> {
        while !self.output.is_empty() {
            let pieces: Vec<IoSlice<'_>> = self
                .output
                .iter()
                .take(WRITE_PIECES)
                .enumerate()
                .map(|(i, b)| IoSlice::new(&b[if i == 0 { self.written } else { 0 }..]))
                .collect();
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let mut none = SendAncillaryBuffer::default();
            match rustix::net::sendmsg(&self.fd, &pieces, &mut none, flags) {
                Ok(n) => self.forget(n),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn forget(&mut self, mut n: usize) {
        self.waiting_bytes -= n;
        while let Some(first) = self.output.front() {
            let rest = first.len() - self.written;
            if n < rest {
                self.written += n;
                return;
            }
            n -= rest;
            self.written = 0;
            self.output.pop_front();
        }
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Sends a frame to one that is about to be closed, as far as it takes it.
pub(crate) fn last_words(fd: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Whether only a goodbye may follow: kinds that a client does not send.
pub(crate) fn is_clients(kind: u16) -> bool {
    matches!(kind, kind::REQUEST | kind::CANCEL | kind::PING | kind::GOODBYE)
}

#[cfg(test)]
#[path = "conn_tests.rs"]
mod tests;
