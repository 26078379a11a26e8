//! A daemon that says anything to the agent of a guest: each call has one end, and no more waits
//! for a pipe than the limits say.

#![cfg_attr(fuzzing, no_main)]

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use agent::line::{Event, Heartbeat, Line, MAX_EVENT_BYTES, MAX_EVENTS};
use agent::wake::Wake;
use guest_abi::frame::Header;
use guest_abi::pipe::{MAX_TAKE_BYTES, kind};
use harness::{Input, fuzz_target};
use zerocopy::IntoBytes;

/// Pipes that wait.
const CALLS: u64 = 3;

/// The same bytes as messages of right lengths to calls that there are.
fn mended(bytes: &[u8]) -> Vec<u8> {
    let (mut input, mut all) = (Input(bytes), Vec::new());
    let kinds =
        [kind::PROBED, kind::BEGUN, kind::TAKE, kind::GIVE, kind::DONE, kind::PONG, kind::REFUSALS];
    while !input.is_empty() {
        let which = kinds[usize::from(input.u8()) % kinds.len()];
        let id = u64::from(input.u8()) % (CALLS + 1) + 1;
        let len = usize::from(input.u8());
        let body = input.bytes(len);
        all.extend_from_slice(Header::new(which, id, body.len()).as_bytes());
        all.extend_from_slice(body);
    }
    all
}

fn hear(bytes: &[u8]) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let line = Line::new(ours.into(), 1, 1 << 30, Heartbeat::default());
    let wake = Arc::new(Wake::new().expect("an eventfd"));
    let call = |answer| line.call(kind::PIPE, answer, b"", &wake).expect("a call");
    let calls: Vec<_> =
        (0..CALLS).map(|at| call(if at == 0 { kind::PROBED } else { kind::DONE })).collect();
    theirs.set_nonblocking(true).expect("a socket");
    // What does not fit into the socket is not said.
    let _ = std::io::Write::write(&mut &theirs, bytes);
    theirs.shutdown(Shutdown::Write).expect("a socket");
    assert!(line.read().is_err());
    line.fail_calls();
    for call in calls {
        let events: Vec<_> = std::iter::from_fn(|| call.next()).collect();
        let is_last =
            |event: &Event| matches!(event, Event::Probed(_) | Event::Done(_) | Event::Lost);
        assert!(events.last().is_some_and(is_last), "{events:?}");
        assert_eq!(events.iter().filter(|event| is_last(event)).count(), 1, "{events:?}");
        assert!(events.len() <= MAX_EVENTS + 1);
        let bytes = |event: &Event| match event {
            Event::Write(request) => {
                assert!(request.len_bytes > 0);
                let bytes = request.bytes.as_ref().map_or(0, Vec::len);
                assert!(
                    bytes <= MAX_TAKE_BYTES && [0, request.len_bytes as usize].contains(&bytes)
                );
                bytes
            }
            _ => 0,
        };
        assert!(events.iter().map(bytes).sum::<usize>() <= MAX_EVENT_BYTES);
    }
}

fuzz_target!(|bytes: &[u8]| {
    hear(bytes);
    hear(&mended(bytes));
});
