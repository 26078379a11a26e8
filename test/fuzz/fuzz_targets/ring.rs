//! A hostile driver: arbitrary bytes in every part of a ring and in the memory around it, while the
//! device pops, copies, completes and changes its memory table. Nothing may panic, and every byte
//! that is touched must be guest memory.
#![cfg_attr(fuzzing, no_main)]

use harness::fuzz_target;
use queue::seg::{copy_across, copy_in, copy_out, fill_zero};
use queue::testing::{GUEST_BASE, ModelDriver, ModelOptions, RawDesc};
use queue::{Batch, ChainBuf, Completion, Layout, Queue};

/// Small, so that random addresses hit it.
const MEM_BYTES: usize = 64 << 10;

/// The input, read front to back; zeroes at its end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn u16(&mut self) -> u16 {
        u16::from(self.u8()) | u16::from(self.u8()) << 8
    }

    fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    /// Mostly inside guest memory, at times at its end or anywhere.
    fn addr(&mut self) -> u64 {
        match self.u8() % 8 {
            0 => u64::from(self.u32()) << 32 | u64::from(self.u32()),
            1 => GUEST_BASE + MEM_BYTES as u64 - u64::from(self.u8()),
            2 => u64::MAX - u64::from(self.u8()),
            _ => GUEST_BASE + u64::from(self.u16()),
        }
    }

    fn desc(&mut self) -> RawDesc {
        let len = if self.u8().is_multiple_of(8) { self.u32() } else { u32::from(self.u8()) * 16 };
        let flags =
            if self.u8().is_multiple_of(4) { self.u16() } else { u16::from(self.u8() & 0x87) };
        RawDesc { addr: self.addr(), len, flags, tail: u16::from(self.u8() % 20) }
    }
}

/// Touches every byte of every chain and completes it.
fn serve(batch: &Batch, held: &mut ChainBuf, out: &mut Vec<Completion>) {
    let mut bytes = [0; 512];
    for i in 0..batch.len() {
        let chain = batch.get(i);
        copy_out(chain.readable, 3, &mut bytes);
        copy_across(chain.readable, 1, chain.writable, 2, usize::MAX);
        copy_in(chain.writable, 5, &bytes);
        fill_zero(chain.writable, 0, 64);
        out.push(Completion { id: chain.id, ndesc: chain.ndesc, written: chain.writable_len });
        if held.load(batch, i) {
            fill_zero(held.chain().writable, 1, usize::MAX);
        }
    }
}

fn step(input: &mut Bytes<'_>, driver: &ModelDriver, queue: &mut Queue, state: &mut State) {
    let (setup, ram) = (driver.setup(), driver.ram());
    match input.u8() % 12 {
        0 | 1 => driver.set_desc(input.u16() % setup.size, input.desc()),
        2 => {
            let addr = GUEST_BASE + u64::from(input.u16() & 0xff0);
            ram.store_desc(addr, setup.layout, input.desc());
        }
        3 => driver.set_avail_idx(queue.position().avail.wrapping_add(u16::from(input.u8() % 20))),
        4 => driver.set_avail_entry(input.u16() % setup.size, input.u16() % 40),
        5 => {
            driver.set_used_event(input.u16());
            driver.set_driver_flags(input.u16());
        }
        6 => ram.store_u16(GUEST_BASE + u64::from(input.u16() & 0xfffe), input.u16()),
        7 | 8 => {
            let result = queue.pop(&mut state.batch, usize::from(input.u8() % 40));
            if result.is_ok() {
                queue.unpop(&mut state.batch, usize::from(input.u8() % 8));
            }
            serve(&state.batch, &mut state.held, &mut state.done);
        }
        9 => {
            let n = usize::from(input.u8()).min(state.done.len());
            let done: Vec<Completion> = state.done.drain(..n).collect();
            queue.push(&done);
            queue.take_notify();
        }
        10 => {
            queue.enable_kicks();
            queue.disable_kicks();
        }
        _ => {
            let memory = driver.memory();
            if queue.set_memory(memory.with_log(None)).is_err() {
                state.done.clear();
            }
        }
    }
}

struct State {
    batch: Batch,
    held: ChainBuf,
    done: Vec<Completion>,
}

fuzz_target!(|data: &[u8]| {
    let mut input = Bytes(data);
    let choice = input.u8();
    let layout = if choice & 1 == 0 { Layout::Split } else { Layout::Packed };
    let options = ModelOptions {
        event_idx: choice & 2 != 0,
        indirect: choice & 4 == 0,
        in_order: choice & 8 != 0,
        mem_bytes: MEM_BYTES,
    };
    let size = if layout == Layout::Split { 1 << (choice >> 4 & 3) } else { 1 + (choice >> 4) };
    let driver = ModelDriver::with_options(layout, u16::from(size), options);
    let mut queue = driver.queue();
    let mut state = State { batch: Batch::new(16, 64), held: ChainBuf::new(64), done: Vec::new() };
    for _ in 0..200 {
        if input.0.is_empty() {
            break;
        }
        step(&mut input, &driver, &mut queue, &mut state);
    }
});
