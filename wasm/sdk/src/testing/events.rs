//! Events for a module under test.

use std::vec::Vec;

use guest_abi::module_call as abi;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// Events, as the host puts them into a module's buffer.
#[derive(Debug, Clone, Default)]
pub struct EventBytes {
    pub(super) bytes: Vec<u8>,
}

impl EventBytes {
    /// Begins without any.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an event of any kind.
    pub fn event(mut self, kind: u16, flags: u16, client: u32, seq: u64, body: &[u8]) -> Self {
        let head = abi::Event {
            len_bytes: U32::new(body.len() as u32),
            kind: U16::new(kind),
            flags: U16::new(flags),
            client: U32::new(client),
            reserved: U32::ZERO,
            seq: U64::new(seq),
        };
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(body);
        self.bytes.resize(self.bytes.len().next_multiple_of(abi::ALIGN), 0);
        self
    }

    /// A client came.
    pub fn opened(self, client: u32, id: [u8; 16]) -> Self {
        self.event(abi::event::OPENED, 0, client, 0, &id)
    }

    /// A request; [`abi::event_flag`].
    pub fn request(self, client: u32, seq: u64, flags: u16, body: &[u8]) -> Self {
        self.event(abi::event::REQUEST, flags, client, seq, body)
    }

    /// A client gives up waiting.
    pub fn cancel(self, client: u32, seq: u64) -> Self {
        self.event(abi::event::CANCEL, 0, client, seq, &[])
    }

    /// A client went.
    pub fn closed(self, client: u32) -> Self {
        self.event(abi::event::CLOSED, 0, client, 0, &[])
    }

    /// Time to wake up.
    pub fn wake(self) -> Self {
        self.event(abi::event::WAKE, 0, 0, 0, &[])
    }

    /// The end.
    pub fn ending(self) -> Self {
        self.event(abi::event::ENDING, 0, 0, 0, &[])
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
