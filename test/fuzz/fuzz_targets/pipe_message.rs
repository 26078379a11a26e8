//! A guest's agent that says anything: a hello and messages, or an error; never a panic, and
//! nothing is kept beyond the limits.

#![cfg_attr(fuzzing, no_main)]

use guest_abi::pipe::{MAX_EXTENTS, MAX_TAKE_BYTES};
use harness::fuzz_target;
use pipe::message::{End, Message, MessageReader};

fuzz_target!(|bytes: &[u8]| {
    let mut reader = MessageReader::new(bytes);
    if bytes.first() == Some(&16) && reader.read_hello(b"").is_err() {
        return;
    }
    while let Ok((_, message)) = reader.receive() {
        match message {
            Message::Pipe(request) => {
                let extents = |end: &End| match end {
                    End::File { extents, .. } => extents.len(),
                    End::Socket(_) | End::Places(_) => 0,
                };
                assert!(extents(&request.source) + extents(&request.sink) <= MAX_EXTENTS as usize);
                assert!(request.len_bytes > 0);
            }
            Message::Answer(answer) => assert!(answer.len_bytes() <= MAX_TAKE_BYTES),
            _ => {}
        }
    }
});
