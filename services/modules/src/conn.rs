//! Connection: bytes to frames and back.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use guest_abi::module::{
    FRAME_BYTES, Failure, Frame, MAGIC, MAX_BODY_BYTES, MAX_IN_FLIGHT, MAX_PING_BYTES,
    MAX_TEXT_BYTES, VERSION, Welcome, flag, kind,
};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::budget::{Charge, Purse};
use crate::limits::{
    FRAME_OVERHEAD_BYTES, IDLE_BYTES, LINGER, READ_BYTES, WAITING_BYTES, WRITE_PIECES,
};
use crate::ring::{Damaged, Ring};

/// Whole frame that waits to be written, shared with whoever keeps it.
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

/// Makes a frame with a body.
pub(crate) fn frame(kind: u16, flags: u16, seq: u64, parts: &[&[u8]]) -> Bytes {
    let mut bytes = vec![0; FRAME_BYTES];
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    finish(bytes, kind, flags, seq)
}

/// Welcome: the answer to a hello. `list` has the modules.
pub(crate) fn welcome(instance: u64, known_seq: u64, list: &[u8]) -> Bytes {
    let modules = list.len() / size_of::<guest_abi::module::ModuleInfo>();
    let welcome = Welcome {
        magic: U64::new(MAGIC),
        version: U16::new(VERSION),
        modules: U16::new(modules as u16),
        max_in_flight: U32::new(MAX_IN_FLIGHT),
        max_body_bytes: U32::new(MAX_BODY_BYTES),
        linger_ms: U32::new(LINGER.as_millis() as u32),
        instance: U64::new(instance),
        known_seq: U64::new(known_seq),
    };
    frame(kind::WELCOME, 0, 0, &[welcome.as_bytes(), list])
}

/// Makes a failed reply, or a goodbye.
pub(crate) fn failure(kind: u16, seq: u64, code: u32, text: &str) -> Bytes {
    finish(unfinished(code, text), kind, flag::FAILED, seq)
}

/// Makes a failed reply whose header is still to be filled in.
pub(crate) fn unfinished(code: u32, text: &str) -> Vec<u8> {
    let mut len = text.len().min(MAX_TEXT_BYTES);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    let failure = Failure { code: U32::new(code), reserved: U32::ZERO };
    let mut bytes = vec![0; FRAME_BYTES];
    bytes.extend_from_slice(failure.as_bytes());
    bytes.extend_from_slice(&text.as_bytes()[..len]);
    bytes
}

/// Fault in a peer's bytes, for its goodbye.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadFrame(pub String);

/// Reason why a connection is of no use any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// The connection has ended.
    Gone,
    /// The ring is no ring any more.
    Damaged(Damaged),
}

impl From<Errno> for Lost {
    fn from(_: Errno) -> Self {
        Self::Gone
    }
}

impl From<Damaged> for Lost {
    fn from(damaged: Damaged) -> Self {
        Self::Damaged(damaged)
    }
}

/// Parses the frame at the beginning of bytes, if it is there in whole. Checks its length and its
/// hash.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Frame, &[u8])>, BadFrame> {
    parse_stamped(bytes, 0)
}

/// Parses a frame that came by a ring with a stamp.
fn parse_stamped(bytes: &[u8], stamp: u64) -> Result<Option<(Frame, &[u8])>, BadFrame> {
    let Ok((mut frame, rest)) = Frame::read_from_prefix(bytes) else { return Ok(None) };
    frame.check ^= U64::new(stamp);
    let len = frame.len_bytes.get();
    if len > MAX_BODY_BYTES {
        return Err(BadFrame(format!("a frame of {len} bytes, the limit is {MAX_BODY_BYTES}")));
    }
    let Some(body) = rest.get(..len as usize) else { return Ok(None) };
    if xxh3_64_with_seed(body, frame.seed()) != frame.check.get() {
        let (kind, seq) = (frame.kind.get(), frame.seq.get());
        return Err(BadFrame(format!("the check of frame {seq} of kind {kind} is wrong")));
    }
    Ok(Some((frame, body)))
}

/// Connection: a stream of frames that does not block.
#[derive(Debug)]
pub(crate) struct Conn {
    fd: OwnedFd,
    /// Ring that frames go by; the socket then only has bells.
    ring: Option<Ring>,
    /// Number of bells that were rung.
    pub bells: u64,
    /// Bytes that were read of its ring, and not counted yet.
    pub ring_bytes: u64,
    /// Number of the client.
    pub client: u32,
    /// Whether its requests are taken by a ring alone.
    pub needs_ring: bool,
    input: Vec<u8>,
    /// Offset of the next frame in `input`.
    begin: usize,
    output: VecDeque<Bytes>,
    /// Bytes of the first frame of `output` that are written.
    written: usize,
    waiting_bytes: usize,
    /// Memory of the process that its buffers take.
    charge: Charge,
    /// Time since which that is more than an idle connection's.
    holds_since: Option<Instant>,
    /// Whether its peer sends no more.
    pub ended: bool,
    /// Whether it is watched for something to read, and for room to write.
    pub watched: (bool, bool),
    /// Whether it has ended and is not watched any more.
    pub forgotten: bool,
}

impl Conn {
    pub fn new(fd: OwnedFd, client: u32, purse: &Arc<Purse>) -> Self {
        Self {
            fd,
            ring: None,
            bells: 0,
            ring_bytes: 0,
            client,
            needs_ring: false,
            input: Vec::new(),
            begin: 0,
            output: VecDeque::new(),
            written: 0,
            waiting_bytes: 0,
            charge: Charge::new(purse),
            holds_since: None,
            ended: false,
            watched: (true, false),
            forgotten: false,
        }
    }

    /// Bytes that came and were not taken.
    fn held_bytes(&self) -> usize {
        self.input.len() - self.begin
    }

    /// The header of its next frame, once it is there.
    fn next_head(&self) -> Option<Frame> {
        Frame::read_from_prefix(&self.input[self.begin..]).ok().map(|(head, _)| head)
    }

    /// Whether its next frame may come by a ring alone. Its header is enough: nothing is kept for
    /// who has none.
    pub fn asks_too_early(&self) -> bool {
        let is_request = |head: Frame| {
            head.kind.get() == kind::REQUEST || head.len_bytes.get() as usize > MAX_PING_BYTES
        };
        self.needs_ring && self.ring.is_none() && self.next_head().is_some_and(is_request)
    }

    /// Bytes of its next frame, as far as they are known and it may come.
    fn wanted_bytes(&self) -> usize {
        let head = self.next_head().filter(|_| !self.asks_too_early());
        FRAME_BYTES + head.map_or(0, |head| head.len_bytes.get() as usize)
    }

    /// Bytes of memory that it holds.
    pub fn charged_bytes(&self) -> usize {
        self.charge.bytes()
    }

    fn count(&mut self) {
        let output = self.waiting_bytes + self.output.len() * FRAME_OVERHEAD_BYTES;
        self.charge.set(self.input.capacity() + output);
        if self.charge.bytes() <= IDLE_BYTES {
            self.holds_since = None;
        } else if self.holds_since.is_none() {
            self.holds_since = Some(Instant::now());
        }
    }

    /// Bytes that would be free without it, and since when it holds some; none: it is idle.
    pub fn holds(&self) -> Option<(usize, Instant)> {
        Some((self.charge.bytes(), self.holds_since?))
    }

    /// Bytes that its buffer may grow by when it is filled.
    pub fn growth_bytes(&self) -> usize {
        let len = self.held_bytes() + READ_BYTES;
        if len <= self.input.capacity() { 0 } else { len.max(2 * self.input.capacity()) }
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

    /// Reads what there is, up to [`READ_BYTES`], by way of `room`, which is so long.
    pub fn fill(&mut self, room: &mut [u8]) -> Result<(), Lost> {
        if self.ring.is_some() {
            return self.fill_from_ring();
        }
        if let Some(n) = self.receive(room)? {
            self.forget_taken();
            self.input.extend_from_slice(&room[..n]);
            self.ended = n == 0;
            self.count();
        }
        Ok(())
    }

    /// Reads what the socket has; none: nothing.
    fn receive(&self, room: &mut [u8]) -> Result<Option<usize>, Errno> {
        match rustix::net::recv(&self.fd, room, RecvFlags::DONTWAIT) {
            Ok((n, _)) => Ok(Some(n)),
            // Interrupted: it is still ready the next time.
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn forget_taken(&mut self) {
        self.input.drain(..self.begin);
        self.begin = 0;
    }

    /// The next whole frame.
    pub fn next(&self) -> Result<Option<(Frame, &[u8])>, BadFrame> {
        let stamp = self.ring.as_ref().map_or(0, |ring| ring.stamp);
        parse_stamped(&self.input[self.begin..], stamp)
    }

    /// Removes a frame that was taken.
    pub fn advance(&mut self, body_bytes: usize) {
        self.begin = (self.begin + FRAME_BYTES + body_bytes).min(self.input.len());
        if self.begin == self.input.len() {
            self.begin = 0;
            self.input.clear();
            // A long row's room does not stay.
            self.input.shrink_to(IDLE_BYTES);
            self.count();
        }
    }

    /// Adds a frame.
    pub fn push(&mut self, bytes: Bytes) {
        self.waiting_bytes += bytes.len();
        self.output.push_back(bytes);
        self.count();
    }

    /// Writes what its peer takes.
    pub fn flush(&mut self) -> Result<(), Lost> {
        if self.ring.is_some() {
            return self.flush_to_ring();
        }
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
                Err(e) => return Err(e.into()),
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
                break;
            }
            n -= rest;
            self.written = 0;
            self.output.pop_front();
        }
        self.count();
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A frame's header as it goes by a ring with this stamp.
fn stamped(head: &[u8], stamp: u64) -> [u8; FRAME_BYTES] {
    let mut bytes = [0; FRAME_BYTES];
    if let Ok(mut frame) = Frame::read_from_bytes(head) {
        frame.check ^= U64::new(stamp);
        bytes.copy_from_slice(frame.as_bytes());
    }
    bytes
}

impl Conn {
    pub fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// Whether nothing is on its way, so that it can go on by a ring.
    pub fn may_change_over(&self) -> bool {
        self.ring.is_none() && self.held_bytes() == 0 && !self.has_output()
    }

    pub fn change_over(&mut self, ring: Ring) {
        self.ring = Some(ring);
    }

    pub fn socket(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether its ring has something that may be read.
    pub fn has_ring_input(&self) -> bool {
        self.may_read() && self.ring.as_ref().is_some_and(|ring| ring.reader.has_some())
    }

    /// Puts the ring to sleep: its client rings from now on. False: there is something. One that
    /// must not be read sleeps, too: it is looked at when its client has taken its replies, which
    /// rings.
    pub fn ring_sleeps(&self) -> bool {
        let Some(ring) = &self.ring else { return true };
        ring.reader.sleep() || !self.may_read()
    }

    /// Takes the bells that the socket has, by way of `room`: one that rings on and on has a turn
    /// for all that fit there. A peer that closed it without hearing ours has ended as any other.
    pub fn hear_bells(&mut self, room: &mut [u8]) {
        self.ended |= matches!(self.receive(room), Ok(Some(0)) | Err(_));
        if let Some(ring) = &self.ring {
            ring.reader.wake();
        }
    }

    fn fill_from_ring(&mut self) -> Result<(), Lost> {
        self.forget_taken();
        let Some(ring) = &mut self.ring else { return Ok(()) };
        let read = ring.reader.read(&mut self.input, READ_BYTES)?;
        self.ring_bytes += read as u64;
        if read > 0 && ring.reader.must_ring() {
            self.ring_bell();
        }
        self.count();
        Ok(())
    }

    fn flush_to_ring(&mut self) -> Result<(), Lost> {
        while let (Some(ring), Some(first)) = (&mut self.ring, self.output.front()) {
            let n = match first.get(..FRAME_BYTES).filter(|_| self.written < FRAME_BYTES) {
                Some(head) => ring.writer.write(&stamped(head, ring.stamp)[self.written..])?,
                None => ring.writer.write(&first[self.written..])?,
            };
            if n > 0 {
                self.ring_bytes += n as u64;
                self.forget(n);
            } else if ring.writer.wait()? {
                break;
            }
        }
        if let Some(ring) = &self.ring
            && ring.writer.must_ring()
        {
            self.ring_bell();
        }
        Ok(())
    }

    /// Rings. A socket that takes no bell has some that were not heard.
    fn ring_bell(&mut self) {
        let _ = rustix::net::send(&self.fd, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        self.bells += 1;
    }
}

/// Sends a frame to one that is about to be closed, as far as it takes it.
pub(crate) fn last_words(fd: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
}

/// Whether only a goodbye may follow: kinds that a client does not send.
pub(crate) fn is_clients(kind: u16) -> bool {
    matches!(kind, kind::REQUEST | kind::CANCEL | kind::PING | kind::GOODBYE | kind::RING)
}

#[cfg(test)]
mod tests;
