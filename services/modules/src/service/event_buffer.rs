//! Events for the next call of a module, as the module reads them.

use guest_abi::module_call::{ALIGN, Event};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::limits::CALL_BYTES;

/// Buffer of events.
#[derive(Debug, Default)]
pub(super) struct EventBuffer {
    bytes: Vec<u8>,
}

impl EventBuffer {
    /// Adds an event.
    pub fn push(&mut self, kind: u16, flags: u16, client: u32, seq: u64, body: &[u8]) {
        let head = Event {
            len_bytes: U32::new(body.len() as u32),
            kind: U16::new(kind),
            flags: U16::new(flags),
            client: U32::new(client),
            reserved: U32::ZERO,
            seq: U64::new(seq),
        };
        let into = &mut self.bytes;
        into.extend_from_slice(head.as_bytes());
        into.extend_from_slice(body);
        into.resize(into.len().next_multiple_of(ALIGN), 0);
    }

    /// Bytes of all events.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether there is no event.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether a call has enough.
    pub fn is_full(&self) -> bool {
        self.bytes.len() >= CALL_BYTES
    }

    /// Removes all events, and gives a large buffer back.
    pub fn clear(&mut self) {
        self.bytes.clear();
        if self.bytes.capacity() > 2 * CALL_BYTES {
            self.bytes = Vec::new();
        }
    }
}
