//! Entry points for the fuzzer: frames, requests of a client, and memory that it shares.

use std::sync::Arc;
use std::time::Instant;

use guest_abi::module::{MAX_BODY_BYTES, MAX_IN_FLIGHT, kind};
use guest_abi::module_ring::{DATA_BYTES, MIN_REGION_BYTES, TO_CLIENT, TO_HOST};
use rustix::fs::MemfdFlags;

use crate::budget::Purse;
use crate::clients::{Clients, Verdict};
use crate::conn::{frame, is_clients, parse};
use crate::ring::{Damaged, Region, Ring, Slots};

/// Takes bytes as those of one connection after its hello, as far as they are frames; each request
/// is answered at once if the first byte of its body is odd. Returns how many were executed.
///
/// # Panics
/// Something is kept beyond the limits, or executed twice.
#[must_use]
pub fn frames(mut bytes: &[u8]) -> usize {
    let (mut clients, now) = (Clients::new(&Purse::alone()), Instant::now());
    let Some((number, _)) = clients.find([1; 16], now) else { return 0 };
    let (mut executed, mut repeatable) = (std::collections::BTreeSet::new(), 0);
    while let Ok(Some((head, body))) = parse(bytes) {
        assert!(body.len() <= MAX_BODY_BYTES as usize);
        bytes = &bytes[guest_abi::module::FRAME_BYTES + body.len()..];
        if !is_clients(head.kind.get()) {
            break;
        }
        let seq = head.seq.get();
        let Some(client) = clients.get_mut(number) else { break };
        if head.kind.get() != kind::REQUEST {
            continue;
        }
        match client.accept(seq, head.flags.get(), now) {
            Verdict::Execute => {
                let first = executed.insert(seq);
                let again = head.flags.get() & guest_abi::module::flag::REPEATABLE != 0;
                repeatable += usize::from(again);
                assert!(first || again, "request {seq} was executed twice");
                if body.first().is_some_and(|b| b % 2 == 1)
                    && client.take_answered(seq).is_some_and(|waiting| !waiting.repeatable)
                {
                    client.keep(seq, &frame(kind::REPLY, 0, seq, &[body]));
                }
            }
            Verdict::Bad(_) => break,
            Verdict::Resend(_) | Verdict::Wait | Verdict::Refuse(..) => {}
        }
        assert!(client.waiting().count() <= MAX_IN_FLIGHT as usize);
    }
    executed.len() + repeatable
}

/// A region whose slots a guest writes into as it likes.
#[derive(Debug)]
pub struct Shared {
    slots: Arc<Slots>,
    guests: Region,
}

impl Shared {
    /// Makes memory with three slots, of which one is used.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new() -> std::io::Result<Self> {
        let file = rustix::fs::memfd_create("ring", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, MIN_REGION_BYTES)?;
        let guests = Region::map(file.try_clone()?, MIN_REGION_BYTES)?;
        Ok(Self { slots: Slots::begin(Region::map(file, MIN_REGION_BYTES)?), guests })
    }

    /// Does what the bytes say: things that a guest does with one slot, and the host in between,
    /// nine bytes each. Returns the number of bytes that the host read.
    ///
    /// # Panics
    /// The host read or wrote more than there can be.
    #[must_use]
    pub fn ring(&self, bytes: &[u8]) -> usize {
        let Some((slot, mut ring)) = self.slots.take() else { return 0 };
        let (mut into, mut all) = (Vec::new(), 0);
        for step in bytes.chunks_exact(9) {
            let value = step[1..].iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
            let word = match step[0] % 8 {
                0 => TO_HOST.tail_off,
                1 => TO_CLIENT.head_off,
                2 => TO_HOST.head_off,
                3 => TO_CLIENT.tail_off,
                _ => {
                    all += host_does(&mut ring, step[0], value, &mut into).unwrap_or(0);
                    continue;
                }
            };
            self.guests.write_word(slot, word, value);
        }
        all
    }
}

fn host_does(ring: &mut Ring, what: u8, value: u64, into: &mut Vec<u8>) -> Result<usize, Damaged> {
    let len = value as usize % (2 * DATA_BYTES);
    into.clear();
    match what % 4 {
        0 => {
            let read = ring.reader.read(into, len)?;
            assert!(read <= len.min(DATA_BYTES) && into.len() == read);
            return Ok(read);
        }
        1 => {
            into.resize(len, 7);
            assert!(ring.writer.write(into)? <= len.min(DATA_BYTES));
        }
        2 => {
            let _ = (ring.reader.sleep(), ring.reader.must_ring());
        }
        _ => {
            let _ = (ring.writer.wait()?, ring.writer.must_ring());
        }
    }
    Ok(0)
}
