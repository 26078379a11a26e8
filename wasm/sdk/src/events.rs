//! The events of one call.

use guest_abi::module_call as abi;
use zerocopy::FromBytes;

/// Event for a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// A client is there.
    Opened {
        /// The host's number for it.
        client: u32,
        /// Id that the client gave itself.
        id: [u8; 16],
    },
    /// A request.
    Request {
        /// Number of the client.
        client: u32,
        /// Number of the request.
        seq: u64,
        /// `guest_abi::module_call::event_flag`s.
        flags: u16,
        /// Bytes of the request.
        body: &'a [u8],
    },
    /// The client gives up waiting for a reply.
    Cancel {
        /// Number of the client.
        client: u32,
        /// Number of the request.
        seq: u64,
    },
    /// A client has gone for good.
    Closed {
        /// Number of the client.
        client: u32,
    },
    /// The module asked to be called.
    Wake,
    /// The process is about to end.
    Ending,
}

/// Iterates over the events of a call. The host made them: one that is not as the specification
/// says ends the iteration.
#[derive(Debug, Clone, Copy)]
pub struct Events<'a> {
    rest: &'a [u8],
}

impl<'a> Events<'a> {
    /// Reads the events in a buffer.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for Events<'a> {
    type Item = Event<'a>;

    fn next(&mut self) -> Option<Event<'a>> {
        let (head, rest) = abi::Event::read_from_prefix(self.rest).ok()?;
        let len = head.len_bytes.get() as usize;
        let body = rest.get(..len)?;
        let filled = len.next_multiple_of(abi::ALIGN).min(rest.len());
        self.rest = &rest[filled..];
        let (client, seq) = (head.client.get(), head.seq.get());
        Some(match head.kind.get() {
            abi::event::OPENED => Event::Opened { client, id: body.try_into().ok()? },
            abi::event::REQUEST => Event::Request { client, seq, flags: head.flags.get(), body },
            abi::event::CANCEL => Event::Cancel { client, seq },
            abi::event::CLOSED => Event::Closed { client },
            abi::event::WAKE => Event::Wake,
            abi::event::ENDING => Event::Ending,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;
    use zerocopy::little_endian::{U16, U32, U64};

    fn event(kind: u16, client: u32, seq: u64, body: &[u8]) -> Vec<u8> {
        let head = abi::Event {
            len_bytes: U32::new(body.len() as u32),
            kind: U16::new(kind),
            flags: U16::new(1),
            client: U32::new(client),
            reserved: U32::ZERO,
            seq: U64::new(seq),
        };
        let mut bytes = [head.as_bytes(), body].concat();
        bytes.resize(bytes.len().next_multiple_of(abi::ALIGN), 0);
        bytes
    }

    #[test]
    fn events_follow_each_other_at_multiples_of_eight() {
        let bytes = [
            event(abi::event::OPENED, 3, 0, &[7; 16]),
            event(abi::event::REQUEST, 3, 1, b"abc"),
            event(abi::event::CLOSED, 3, 0, b""),
        ];
        let bytes = bytes.concat();
        let all: Vec<_> = Events::new(&bytes).collect();
        assert_eq!(
            all,
            [
                Event::Opened { client: 3, id: [7; 16] },
                Event::Request { client: 3, seq: 1, flags: 1, body: b"abc" },
                Event::Closed { client: 3 },
            ]
        );
    }

    #[test]
    fn what_is_cut_short_or_unknown_ends_them() {
        let whole = event(abi::event::REQUEST, 1, 1, b"abcdefgh");
        for len in 0..whole.len() {
            assert_eq!(Events::new(&whole[..len]).next(), None);
        }
        assert_eq!(Events::new(&event(99, 1, 1, b"")).next(), None);
    }
}
