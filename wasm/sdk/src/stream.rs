//! Modules that speak a protocol of bytes: the module's side of `guest_abi::stream`.
//!
//! # Theory of operation
//! A module has an [`Executor`] for each client. [`Streams`] gives it the bytes that have come and
//! are not used yet, and takes its output, cut into replies. An executor does one thing at each
//! step: a command, or a piece of a long answer. It is called again until it waits for more bytes,
//! or until there is enough for a reply; then the client has to ask for the rest, and what it sends
//! meanwhile is kept.
//!
//! The output depends on the bytes that came and not on where they were cut, if each step uses a
//! whole command or nothing.
//!
//! # Limits
//! - Of a client's bytes that are not used, and of what was said and not asked for: [`Limits`]. A
//!   client beyond, or one whose numbers have a gap, gets a reply that ends its stream.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use guest_abi::stream::{PIECE_BYTES, reply_flag};

use crate::{Event, Host};

pub use guest_abi::stream::{CHUNK_BYTES, WINDOW_BYTES};

/// Progress of an executor after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More may follow at once: bytes were used, or a reply was written.
    GoOn,
    /// More bytes have to come first.
    Wait,
    /// The stream ends with what was said.
    Close,
}

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Number of bytes of the input that are used.
    pub used: usize,
    /// Progress: what is to follow.
    pub next: Progress,
}

impl Step {
    /// Goes on behind a number of bytes.
    pub fn go_on(used: usize) -> Self {
        Self { used, next: Progress::GoOn }
    }

    /// Waits for more bytes.
    pub fn wait() -> Self {
        Self { used: 0, next: Progress::Wait }
    }

    /// Ends the stream.
    pub fn close() -> Self {
        Self { used: 0, next: Progress::Close }
    }
}

/// Executor of the protocol for one client.
pub trait Executor: Default {
    /// State that all clients of a module share.
    type Shared;

    /// Does one thing: uses bytes from the front of `input` and adds to `out`.
    fn step(
        &mut self,
        shared: &mut Self::Shared,
        host: &mut dyn Host,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Step;

    /// Cleans up after a client that has gone.
    fn end(&mut self, shared: &mut Self::Shared, host: &mut dyn Host) {
        let _ = (shared, host);
    }
}

/// Limits of what a module keeps for its clients.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Limit of bytes that an executor has not used, as it waits for more.
    pub unused_bytes: usize,
    /// Limit of bytes of all clients together.
    pub all_bytes: usize,
    /// Limit of clients.
    pub clients: usize,
}

#[derive(Debug, Default)]
struct Stream<T> {
    executor: T,
    last_seq: u64,
    input: Vec<u8>,
    out: Vec<u8>,
    is_closed: bool,
}

/// Streams of a module's clients.
#[derive(Debug)]
pub struct Streams<T> {
    limits: Limits,
    streams: BTreeMap<u32, Stream<T>>,
    held_bytes: usize,
}

impl<T: Executor> Streams<T> {
    /// Begins without any.
    pub fn new(limits: Limits) -> Self {
        Self { limits, streams: BTreeMap::new(), held_bytes: 0 }
    }

    /// Number of streams.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether there is no stream.
    pub fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// Number of bytes that are kept for clients.
    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Takes an event. Requests are answered at once.
    pub fn take(&mut self, shared: &mut T::Shared, host: &mut dyn Host, event: Event<'_>) {
        match event {
            Event::Opened { client, .. } => {
                self.remove(client, shared, host);
                // One too many has no stream: its requests are answered with the end.
                if self.streams.len() < self.limits.clients {
                    self.streams.insert(client, Stream::default());
                }
            }
            Event::Closed { client } => self.remove(client, shared, host),
            Event::Request { client, seq, body, .. } => {
                let reply = self.answer(client, seq, body, shared, host);
                // A client that has gone needs none.
                let _ = host.reply(client, seq, 0, &reply);
            }
            Event::Cancel { .. } | Event::Wake | Event::Ending => {}
        }
    }

    fn remove(&mut self, client: u32, shared: &mut T::Shared, host: &mut dyn Host) {
        if let Some(mut stream) = self.streams.remove(&client) {
            self.held_bytes -= stream.held_bytes();
            stream.end(shared, host);
        }
    }

    fn answer(
        &mut self,
        client: u32,
        seq: u64,
        body: &[u8],
        shared: &mut T::Shared,
        host: &mut dyn Host,
    ) -> Vec<u8> {
        let Some(stream) = self.streams.get_mut(&client) else { return [reply_flag::CLOSE].into() };
        let before = stream.held_bytes();
        if seq == stream.last_seq + 1 && !stream.is_closed {
            stream.last_seq = seq;
            let is_open = stream.run(body, shared, host);
            let others = self.held_bytes - before;
            if stream.input.len() > self.limits.unused_bytes + WINDOW_BYTES
                || (is_open
                    && stream.out.is_empty()
                    && stream.input.len() > self.limits.unused_bytes)
                || others + stream.held_bytes() > self.limits.all_bytes
            {
                stream.end(shared, host);
            } else if !is_open {
                stream.end_input(shared, host);
            }
        } else if !stream.is_closed {
            stream.end(shared, host);
        }
        let reply = stream.piece();
        self.held_bytes = self.held_bytes - before + stream.held_bytes();
        reply
    }
}

impl<T: Executor> Stream<T> {
    fn held_bytes(&self) -> usize {
        self.input.len() + self.out.len()
    }

    /// Steps until there is nothing more to do, or enough to say. False: the stream ends.
    fn run(&mut self, body: &[u8], shared: &mut T::Shared, host: &mut dyn Host) -> bool {
        let mut joined = Vec::new();
        let all = if self.input.is_empty() {
            body
        } else {
            joined = core::mem::take(&mut self.input);
            joined.extend_from_slice(body);
            &joined
        };
        let (mut used, mut is_open) = (0, true);
        while self.out.len() <= PIECE_BYTES {
            let step = self.executor.step(shared, host, &all[used..], &mut self.out);
            used += step.used.min(all.len() - used);
            is_open = step.next != Progress::Close;
            if step.next != Progress::GoOn {
                break;
            }
        }
        // What waits for more is not copied each time that some comes.
        self.input = if used == 0 && !joined.is_empty() { joined } else { all[used..].to_vec() };
        is_open
    }

    /// Nothing that comes is of interest any more.
    fn end_input(&mut self, shared: &mut T::Shared, host: &mut dyn Host) {
        if !self.is_closed {
            self.executor.end(shared, host);
        }
        self.input = Vec::new();
        self.is_closed = true;
    }

    /// Nothing is said any more, either.
    fn end(&mut self, shared: &mut T::Shared, host: &mut dyn Host) {
        self.end_input(shared, host);
        self.out = Vec::new();
    }

    /// The next reply.
    fn piece(&mut self) -> Vec<u8> {
        let len = self.out.len().min(PIECE_BYTES);
        let mut reply = Vec::with_capacity(len + 1);
        reply.push(0);
        reply.extend_from_slice(&self.out[..len]);
        self.out.drain(..len);
        if self.out.is_empty() {
            reply[0] = if self.is_closed { reply_flag::CLOSE } else { 0 };
        } else {
            reply[0] = reply_flag::MORE;
        }
        // What is left is counted by its length.
        self.out.shrink_to_fit();
        reply
    }
}

#[cfg(not(target_arch = "wasm32"))]
pub mod testing;

#[cfg(test)]
mod tests;
