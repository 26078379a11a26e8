//! Whatever the guest's agent says: a hello and messages, or an error; never a panic, and nothing is
//! kept beyond the limits.

#![no_main]

use guest_abi::pipe::MAX_EXTENTS;
use libfuzzer_sys::fuzz_target;
use pipe::message::{End, Message, Reader};

fuzz_target!(|bytes: &[u8]| {
    let mut reader = Reader::new(bytes);
    if bytes.first() == Some(&16) && reader.hello().is_err() {
        return;
    }
    while let Ok((_, message)) = reader.receive() {
        if let Message::Pipe(request) = message {
            let extents = |end: &End| match end {
                End::File { extents, .. } => extents.len(),
                End::Socket(_) => 0,
            };
            assert!(extents(&request.source) + extents(&request.sink) <= MAX_EXTENTS as usize);
            assert!(request.len_bytes > 0);
        }
    }
});
