//! A driver of a disk that asks for anything: each request is completed once, those that are right
//! read and write what a plain array does, and others change nothing.

#![cfg_attr(fuzzing, no_main)]

use block::fuzzing::DiskQueue;
use harness::{Input, fuzz_target};
use queue::Layout;
use queue::testing::GUEST_BASE;

const MEM_BYTES: usize = 4 << 20;
const DISK_BYTES: u64 = 64 << 10;
/// A status byte that no device writes, and what lies in buffers for the device.
const UNTOUCHED: u8 = 0xa5;
const OK: u8 = 0;

/// Request types (virtio 1.2, 5.2.6).
const KINDS: [u32; 8] = [0, 1, 4, 8, 11, 13, 0, 1];
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

struct Asked {
    kind: u32,
    offset: u64,
    data: Vec<u8>,
    /// Buffers that the device writes: data, then the status byte.
    room: Vec<(u64, u32)>,
}

/// A request of right form, with a sector and a length that may be wrong.
fn request(input: &mut Input<'_>, block: u64) -> (Asked, [u8; 16]) {
    let kind = KINDS[usize::from(input.u8()) % KINDS.len()];
    let sector = match input.u8() {
        0..240 => u64::from(input.u8()) % (DISK_BYTES / block) * (block / 512),
        240..250 => input.u16().into(),
        _ => input.u64(),
    };
    let len = match input.u8() {
        n @ 0..240 => usize::from(n % 5) * block as usize,
        n => usize::from(n),
    };
    let seed = input.u8();
    let data = match kind {
        WRITE => (0..len).map(|at| (at as u8).wrapping_mul(7) ^ seed).collect(),
        DISCARD | WRITE_ZEROES => {
            let sectors = len.to_le_bytes().map(|b| b >> 1);
            [&sector.to_le_bytes()[..], &sectors[..4], &u32::from(seed & 1).to_le_bytes()].concat()
        }
        _ => vec![0; if kind == READ { len } else { 20 }],
    };
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    (Asked { kind, offset: sector.saturating_mul(512), data, room: Vec::new() }, header)
}

/// Buffers with `bytes`, cut in two somewhere.
fn pieces(disk: &DiskQueue, bytes: &[u8], cut: u8) -> Vec<(u64, u32)> {
    let (front, back) = bytes.split_at(usize::from(cut).min(bytes.len()));
    [front, back].into_iter().filter(|p| !p.is_empty()).map(|p| disk.driver.buffer(p)).collect()
}

/// Whether a request that was answered with "done" may have been, and what it did to the array.
fn apply(asked: &Asked, model: &mut [u8], got: &[u8], read_only: bool) {
    let len = match asked.kind {
        READ | WRITE => asked.data.len() as u64,
        DISCARD | WRITE_ZEROES => {
            u64::from(asked.data[8]) * 512 + u64::from(asked.data[9]) * 131_072
        }
        _ => return,
    };
    let end = asked.offset.checked_add(len).expect("no request ends behind all bytes");
    assert!(end <= model.len() as u64, "{} at {}", len, asked.offset);
    assert!(asked.kind == READ || !read_only);
    let range = asked.offset as usize..end as usize;
    match asked.kind {
        READ => assert_eq!(got, &model[range], "read at {}", asked.offset),
        WRITE => model[range].copy_from_slice(&asked.data),
        // What is discarded reads as zeroes here.
        _ => model[range].fill(0),
    }
}

fn right(disk: &mut DiskQueue, input: &mut Input<'_>, model: &mut [u8], how: (u64, bool)) {
    let (block, read_only) = how;
    let (mut asked, header) = request(input, block);
    let (cut, to_device) = (input.u8(), matches!(asked.kind, WRITE | DISCARD | WRITE_ZEROES));
    let mut readable = pieces(disk, &header, cut);
    let room = vec![UNTOUCHED; asked.data.len()];
    if to_device {
        readable.extend(pieces(disk, &asked.data, cut));
    } else if asked.kind != FLUSH {
        asked.room = pieces(disk, &room, cut);
    }
    asked.room.push(disk.driver.buffer(&[UNTOUCHED]));
    let id = disk.driver.offer(&readable, &asked.room);
    disk.settle();
    let (used, written) = disk.driver.used().expect("a request that is completed");
    assert_eq!((used, disk.driver.used()), (id, None));
    let got = asked.room.iter().flat_map(|&(addr, len)| disk.driver.read(addr, len as usize));
    let mut got: Vec<u8> = got.collect();
    assert!(written as usize <= got.len());
    match got.pop() {
        Some(OK) => {
            let full = got.len() as u32 + 1;
            assert!(written == full || asked.kind == GET_ID || asked.kind == FLUSH, "{written}");
            apply(&asked, model, &got, read_only);
        }
        Some(status) => assert!((1..=2).contains(&status), "status {status}"),
        None => unreachable!("a status byte was offered"),
    }
}

/// Buffers of any kind and order. False when the port has stopped.
fn wrong(disk: &mut DiskQueue, input: &mut Input<'_>) -> bool {
    let (count, writable) = (usize::from(input.u8()) % 6, usize::from(input.u8()) % 6);
    let buffers = |input: &mut Input<'_>, disk: &DiskQueue, count| {
        let buffer = |_| {
            let len = usize::from(input.u8());
            let (bytes, place) = (input.bytes(len), input.u8());
            let (addr, len) = disk.driver.buffer(if bytes.is_empty() { &[0] } else { bytes });
            match place {
                250.. => (addr.wrapping_add(u64::from(place) << 20), len),
                _ => (addr, len),
            }
        };
        (0..count).map(buffer).collect::<Vec<_>>()
    };
    let readable = buffers(input, disk, count);
    let room = buffers(input, disk, writable);
    if readable.is_empty() && room.is_empty() {
        return true;
    }
    let id = disk.driver.offer(&readable, &room);
    disk.settle();
    if disk.is_broken() {
        // Only without a place for the status, or with a place that is no memory.
        let is_memory = |&(addr, _): &(u64, u32)| addr < GUEST_BASE + MEM_BYTES as u64;
        let all_is_memory = readable.iter().chain(&room).all(is_memory);
        assert!(room.is_empty() || !all_is_memory, "{readable:x?} {room:x?}");
        assert_eq!(disk.driver.used(), None);
        return false;
    }
    let (used, written) = disk.driver.used().expect("a request that is completed");
    assert_eq!((used, disk.driver.used()), (id, None));
    let len = room.iter().map(|&(_, len)| u64::from(len)).sum::<u64>();
    assert!(u64::from(written) <= len, "{written} of {len} bytes written");
    true
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let choice = input.u8();
    let layout = if choice & 1 == 0 { Layout::Split } else { Layout::Packed };
    let (block, read_only) = (if choice & 2 == 0 { 512 } else { 4096 }, choice & 12 == 12);
    let disk = DiskQueue::new(layout, MEM_BYTES, DISK_BYTES, block, read_only);
    let mut disk = disk.expect("memory");
    let mut model = vec![0; DISK_BYTES as usize];
    let mut is_known = true;
    for _ in 0..32 {
        if input.is_empty() {
            break;
        }
        if input.u8() % 4 == 0 {
            if !wrong(&mut disk, &mut input) {
                return;
            }
            // It may have been a write that is right.
            is_known = false;
        } else if is_known || input.u8() & 1 == 0 {
            if !is_known {
                model = all(&mut disk);
                is_known = true;
            }
            right(&mut disk, &mut input, &mut model, (block.into(), read_only));
        }
    }
});

/// Reads the whole disk.
fn all(disk: &mut DiskQueue) -> Vec<u8> {
    let header = disk.driver.buffer(&[0; 16]);
    let data = disk.driver.buffer(&[UNTOUCHED; DISK_BYTES as usize]);
    let status = disk.driver.buffer(&[UNTOUCHED]);
    disk.driver.offer(&[header], &[data, status]);
    disk.settle();
    assert!(disk.driver.used().is_some());
    assert_eq!(disk.driver.read(status.0, 1), [OK]);
    disk.driver.read(data.0, DISK_BYTES as usize)
}
