//! A host that says anything to a client of its modules: events or an error, each request is
//! answered at most once, and no more is kept than was sent. Frames need the right hash to be
//! looked at, so the input is taken as frames, too.

#![cfg_attr(fuzzing, no_main)]

use std::collections::BTreeSet;

use guest_abi::module::{MAGIC, MAX_IN_FLIGHT, VERSION, Welcome, kind};
use harness::{Input, fuzz_target};
use relay::raw;
use relay::session::{Event, Session};
use zerocopy::{FromZeros, IntoBytes};

/// The same bytes as frames whose hashes are right, behind a welcome that may be.
fn mended(bytes: &[u8]) -> Vec<u8> {
    let (mut input, mut all) = (Input(bytes), Vec::new());
    let mut welcome = Welcome::new_zeroed();
    welcome.magic = MAGIC.into();
    welcome.version = VERSION.into();
    welcome.max_in_flight = (u32::from(input.u8()) % 8).into();
    welcome.max_body_bytes = 64.into();
    raw::put(&mut all, kind::WELCOME, 0, 0, welcome.as_bytes());
    while !input.is_empty() {
        let (kind, flags, seq) = (input.u8() % 12, input.u8() % 8, input.u8() % 16);
        let len = usize::from(input.u8() % 96);
        raw::put(&mut all, kind.into(), flags.into(), seq.into(), input.bytes(len));
    }
    all
}

fn hear(session: &mut Session, mut bytes: &[u8], piece: usize) {
    let mut answered = BTreeSet::new();
    while !bytes.is_empty() {
        let room = session.room();
        let len = bytes.len().min(room.len()).min(piece);
        room[..len].copy_from_slice(&bytes[..len]);
        session.filled(len);
        bytes = &bytes[len..];
        loop {
            match session.next_event() {
                Ok(None) => break,
                Err(_) => return,
                Ok(Some(Event::Reply { seq, .. })) => {
                    assert!(answered.insert(seq), "two replies to {seq}");
                }
                Ok(Some(_)) => {}
            }
            assert!(session.max_in_flight() <= MAX_IN_FLIGHT as usize);
            if session.request(vec![1; session.max_body_bytes().min(16)], false).is_ok() {
                assert!(session.is_up() || session.in_flight() > 0);
            }
            assert!(session.in_flight() <= session.max_in_flight());
            session.sent(session.to_send().len());
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let (first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let mut session = Session::new([1; 16], [b'm'; guest_abi::module::MAX_NAME_BYTES]);
    for said in [bytes.to_vec(), mended(rest)] {
        session.connected();
        hear(&mut session, &said, usize::from(*first).max(1));
        session.disconnected();
    }
});
