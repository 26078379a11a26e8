//! Entry points for the fuzzer: whatever a client may send.

use crate::lex::Lexer;
use crate::{bulk, packet, plan};

/// A client's first packet, and a statement.
pub fn statement(bytes: &[u8]) {
    let _ = packet::login(bytes);
    let _ = packet::take(bytes);
    let _ = Lexer::new(bytes, 0).all();
    let _ = plan::plan(bytes);
    if let Ok(Some(bulk)) = bulk::parse(bytes) {
        let mut at = bulk.at;
        while let Ok(bulk::Row::Values(_, false)) = bulk::row(bytes, &mut at) {}
    }
}

/// A client that says all that: bytes of its stream, and then lines as statements on a table.
#[cfg(not(target_arch = "wasm32"))]
pub fn client(bytes: &[u8]) {
    use sdk::Module;
    use sdk::testing::{EventBytes, TestHost};

    let mut host = TestHost::new(1);
    // A statement has a few looks at the clock.
    host.tick_ms = 10;
    let Ok(mut sql) = crate::Sql::start(&mut host) else { return };
    let packet = |number: u8, payload: &[u8]| {
        let len = (payload.len().min(packet::MAX_PAYLOAD_BYTES) as u32).to_le_bytes();
        [&len[..3], &[number], payload].concat()
    };
    let query = |text: &[u8]| packet(0, &[&[packet::command::QUERY], text].concat());
    let mut login = packet::capability::OURS.to_le_bytes().to_vec();
    login.extend_from_slice(&[0; 28]);
    login.extend_from_slice(b"\0\0\0");
    let mut said = std::vec![std::vec::Vec::new(), packet(1, &login)];
    for text in
        ["CREATE DATABASE d", "USE d", "CREATE TABLE t (a INT PRIMARY KEY, b TEXT, KEY (b))"]
    {
        said.push(query(text.as_bytes()));
    }
    said.extend(bytes.split(|&b| b == b'\n').take(20).map(query));
    said.push(bytes.to_vec());
    let mut seq = 0;
    let mut events = EventBytes::default().opened(0, [1; 16]);
    for part in said {
        seq += 1;
        events = events.request(0, seq, 0, &part);
    }
    let _ = host.serve(&mut sql, &events);
    for _ in 0..1000 {
        if host.wake_at_ms().is_none() {
            break;
        }
        host.advance_to_wake();
        let _ = host.serve(&mut sql, &EventBytes::default().wake());
    }
    let _ = host.serve(&mut sql, &EventBytes::default().closed(0));
}
