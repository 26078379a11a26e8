//! What a guest's bytes go through, for the fuzzer: frames, and what a client may do.

use std::time::Instant;

use guest_abi::module::{MAX_BODY_BYTES, MAX_IN_FLIGHT, kind};

use crate::budget::Purse;
use crate::clients::{Clients, Verdict};
use crate::conn::{frame, is_clients, parse};

/// Takes bytes as those of one connection after its hello, as far as they are frames; each request is answered
/// at once if the first byte of its body is odd. Returns how many were executed.
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
                    && client.answered(seq).is_some_and(|waiting| !waiting.repeatable)
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
