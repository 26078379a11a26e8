//! A VM that sends any frames (IP, ARP, neighbour discovery, super-packets), bound to its
//! addresses, and an uplink from which any come: nothing leaves with another's address, and other
//! VMs reach each other as before.

#![cfg_attr(fuzzing, no_main)]

use std::sync::Arc;

use flow::{FlowEvent, FlowWatch};
use harness::{Input, fuzz_target};
use net::PortHook;
use net::fuzzing::Switch;
use net::testing::model_wire;
use pipe::PipeHook;

/// Beginnings of frames of the hostile VM, so that what follows them is looked at: destination,
/// source, kind.
const OURS: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const FRIEND: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

/// Watch of pipes that belong to nobody.
struct Unwatched;

impl FlowWatch for Unwatched {
    fn flow_event(&self, _: u64, _: FlowEvent) {}
}

fn pipes() -> Box<dyn PortHook> {
    let (wire, _) = model_wire();
    Box::new(PipeHook::new(Arc::new(Unwatched), wire, Arc::default(), None))
}

fn frame(input: &mut Input<'_>) -> Vec<u8> {
    let (how, len) = (input.u8(), usize::from(input.u8()));
    let mut frame = if how & 1 == 0 { vec![0; 12] } else { input.bytes(12).to_vec() };
    frame.resize(12, 0);
    frame.extend(if how & 2 == 0 { FRIEND } else { [0xff; 6] });
    frame.extend(OURS);
    if how & 4 != 0 {
        frame.extend([0x81, 0, 0, how >> 3]);
    }
    frame.extend(match how >> 3 & 7 {
        0 | 1 => [8, 0, 0x45],
        2 | 3 => [8, 6, 0],
        4 | 5 => [0x86, 0xdd, 0x60],
        _ => [input.u8(), input.u8(), input.u8()],
    });
    frame.extend(input.bytes(len));
    // Longer than an input has bytes.
    if how & 0x80 != 0 {
        frame.resize(frame.len() + usize::from(input.u8()) * 16, 0x5a);
    }
    frame
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let choice = input.u8();
    let mut switch = Switch::new(choice, (choice & 4 != 0).then(pipes));
    switch.turn(1);
    for _ in 0..40 {
        if input.is_empty() {
            break;
        }
        let what = input.u8();
        match what % 8 {
            0..4 => switch.send(&frame(&mut input), usize::from(what >> 5)),
            4 => {
                let len = usize::from(input.u8());
                switch.send(input.bytes(len), 1);
            }
            5 => {
                let mut came = frame(&mut input);
                // Nobody outside has the hostile VM's address: see `turn`.
                came[23] = 0x99;
                switch.comes(&came);
            }
            _ => switch.turn(u64::from(input.u8()) << (what >> 3)),
        }
    }
    switch.turn(1);
    switch.check_others();
});
