//! Twins in the place of others.

use super::*;

/// The peer has so many bytes, and takes the rest: what comes is all that was not sent before, and
/// the others again when they are asked for.
fn take_rest(bed: &mut Bed, (twin, state): (&Twin, &TwinState), bytes: &[u8], got: usize) {
    let mut have = vec![false; bytes.len()];
    have[..got].fill(true);
    let next = |have: &[bool]| have.iter().position(|got| !got).unwrap_or(have.len());
    let until = std::time::Instant::now() + PATIENCE;
    while twin.unacked_bytes().unwrap() > 0 {
        assert!(std::time::Instant::now() < until);
        let seen = bed.tap.tcp();
        let at = seen.seq.wrapping_sub(SEND_SEQ) as usize;
        assert_eq!(seen.payload, bytes[at..at + seen.payload.len()]);
        have[at..at + seen.payload.len()].fill(true);
        bed.acknowledge(state, next(&have) as u32, &seen);
    }
    assert_eq!(next(&have), bytes.len());
}

/// A twin with these bytes, of which the first were sent before.
fn relief(bed: &Bed, state: &TwinState, bytes: &[u8], sent_bytes: usize) -> Twin {
    let (sent, unsent) = bytes.split_at(sent_bytes);
    let twin = inside(&bed.namespace, || Twin::create_with(state, sent)).unwrap();
    twin.make_room(bytes.len()).unwrap();
    twin.give_all(unsent).unwrap();
    twin
}

/// Another twin goes on where one was, with what that had sent and what it had not; also for a peer
/// that has got more than the new one knows of.
#[test]
fn a_relief_goes_on_with_copies() {
    for got in [0, 3 * MSS, 5 * MSS] {
        let mut bed = bed(V4);
        let mut state = bed.state(4000, ALL);
        state.rtt_us = 20_000;
        let bytes = content(40 * MSS);
        let twin = relief(&bed, &state, &bytes, 5 * MSS);
        assert_eq!(twin.unacked_bytes().unwrap() as usize, bytes.len());
        take_rest(&mut bed, (&twin, &state), &bytes, got);
        twin.close_silently();
    }
}

/// The peer took some of what was sent, and then no more: its window is closed, and it stays so for
/// longer than the kernel waits for a peer in the beginning.
#[test]
fn a_relief_outlives_a_closed_window() {
    let mut bed = bed(V4);
    let state = TwinState { rtt_us: 20_000, send_window_bytes: 0, ..bed.state(4000, ALL) };
    let bytes = content(40 * MSS);
    let (twin, sent) = (relief(&bed, &state, &bytes, 2 * MSS), 2 * MSS);
    twin.wait_as_usual().unwrap();
    for _ in 0..2 {
        let seen = bed.tap.tcp();
        let at = seen.seq.wrapping_sub(SEND_SEQ) as usize;
        assert!(at + seen.payload.len() <= sent, "nothing beyond its window");
        bed.answer(&state, (0, 0), &seen);
    }
    assert!(twin.info().unwrap().is_established());
    take_rest(&mut bed, (&twin, &state), &bytes, 0);
}
