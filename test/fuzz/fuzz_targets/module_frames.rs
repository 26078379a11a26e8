//! A program of a guest that says anything to its modules: frames, or an error; no panic, nothing
//! is executed twice that changes something, and no more is kept than the limits say. Frames need
//! the right hash to be looked at, so the input is taken as headers and bodies, too.

#![cfg_attr(fuzzing, no_main)]

use guest_abi::module::Frame;
use harness::fuzz_target;
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// The same bytes with lengths that fit and hashes that are right.
fn mended(mut bytes: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    while let Ok((mut frame, rest)) = Frame::read_from_prefix(bytes) {
        let len = (frame.len_bytes.get() as usize % 64).min(rest.len());
        let (body, rest) = rest.split_at(len);
        frame.len_bytes = U32::new(len as u32);
        // Mostly requests, with numbers that meet each other.
        frame.kind.set(frame.kind.get() % 8 + 1);
        frame.flags.set(frame.flags.get() % 4);
        frame.seq.set(frame.seq.get() % 256);
        frame.check = U64::new(xxh3_64_with_seed(body, frame.seed()));
        all.extend_from_slice(frame.as_bytes());
        all.extend_from_slice(body);
        bytes = rest;
    }
    all
}

fuzz_target!(|bytes: &[u8]| {
    let _ = modules::fuzzing::frames(bytes);
    let _ = modules::fuzzing::frames(&mended(bytes));
});
