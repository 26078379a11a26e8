//! A client that says anything to the table store: a reply to each request, or a parked one; no
//! panic. The input is a list of requests, each with its length in front.

#![cfg_attr(fuzzing, no_main)]

use harness::fuzz_target;
use sdk::Module;
use sdk::testing::{EventBytes, TestHost};
use table_module::Store;

fuzz_target!(|bytes: &[u8]| {
    let mut host = TestHost::new(1);
    let Ok(mut store) = Store::start(&mut host) else { panic!("an empty folder") };
    let (mut rest, mut seq) = (bytes, 0);
    let mut events = EventBytes::default();
    for client in 0..2 {
        events = events.opened(client, [client as u8 + 1; 16]);
    }
    while let Some((head, more)) = rest.split_at_checked(2) {
        let len = usize::from(head[0]).min(more.len());
        seq += 1;
        events = events.request(u32::from(head[1] & 1), seq, u16::from(head[1] >> 6), &more[..len]);
        rest = &more[len..];
    }
    let served = host.serve(&mut store, &events);
    assert!(served.is_ok(), "{served:?}");
    // What waits for a lock ends with its time.
    host.advance(100_000_000);
    assert!(host.serve(&mut store, &EventBytes::default()).is_ok());
});
