//! A connection whose guest, peer and twin send any segments while a pipe comes and goes: no panic,
//! and what is left of a segment is never longer than it was, nor less than its headers.

#![cfg_attr(fuzzing, no_main)]

use flow::fuzzing::Connection;
use harness::{Input, fuzz_target};

/// First numbers of the two directions: one of them is about to begin anew.
const STARTS: [u32; 2] = [0xffff_ff00, 0x9000_0000];

/// A segment of the direction `from`, by IPv4.
fn segment(input: &mut Input<'_>, from: usize, syn: bool) -> Vec<u8> {
    let flags = if syn { input.u8() & 0x10 | 2 } else { input.u8() & 0x3d | 0x10 };
    let number = |start: u32, input: &mut Input<'_>| start.wrapping_add(input.u16().into());
    let seq = if syn { STARTS[from] } else { number(STARTS[from], input) };
    let ack = number(STARTS[1 - from], input);
    let (window, words) = (input.u16(), usize::from(input.u8()) % 11);
    let options = input.bytes(words * 4).to_vec();
    let payload_len = usize::from(input.u8()) * if words % 2 == 0 { 1 } else { 40 };
    let header_len = 20 + options.len().next_multiple_of(4);
    let total = 20 + header_len + payload_len;
    let mut frame = if from == 0 { [2; 6].to_vec() } else { [4; 6].to_vec() };
    frame.extend(if from == 0 { [4; 6] } else { [2; 6] });
    frame.extend([8, 0, 0x45, 0, (total >> 8) as u8, total as u8, 0, 1, 0x40, 0, 64, 6, 0, 0]);
    let addresses = [[10, 0, 0, 1], [10, 0, 0, 2]];
    frame.extend([addresses[from], addresses[1 - from]].concat());
    let ports = [1000u16, 80];
    frame.extend([ports[from].to_be_bytes(), ports[1 - from].to_be_bytes()].concat());
    frame.extend([seq.to_be_bytes(), ack.to_be_bytes()].concat());
    frame.extend([(header_len as u8 / 4) << 4, flags]);
    frame.extend(window.to_be_bytes());
    frame.extend([0; 4]);
    frame.extend(options);
    frame.resize(14 + 20 + header_len + payload_len, 0);
    frame
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let syn = segment(&mut input, 0, true);
    let Some(mut connection) = Connection::begin(&syn) else { return };
    for _ in 0..64 {
        if input.is_empty() {
            return;
        }
        let what = input.u8();
        match what % 8 {
            0..2 => connection.guest_sends(&mut segment(&mut input, 0, false)),
            2..4 => connection.peer_sends(&segment(&mut input, 1, what & 0x80 != 0), what & 8 == 0),
            4 => connection.twin_sends(&mut segment(&mut input, 0, false)),
            5 => {
                let len = usize::from(input.u8());
                let mut raw = input.bytes(len).to_vec();
                connection.peer_sends(&raw, true);
                connection.guest_sends(&mut raw);
            }
            _ => connection.pipe(what >> 3, input.u16().into()),
        }
    }
});
