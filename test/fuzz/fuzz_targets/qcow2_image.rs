//! A small qcow2 image with changed words, opened, served for a while and closed: no panic, no
//! endless loop, and the guest's data never goes to where the header is.

#![cfg_attr(fuzzing, no_main)]

use std::sync::Arc;

use harness::fuzz_target;
use qcow2::testing::{Bytes, Recorder};
use qcow2::{Chain, Clear, Image, Options, Plan, Scratch, Store};

/// Byte that the guest writes.
const GUEST: u8 = 0xa5;
const COPIED: u64 = 1 << 63;
const DISK_LEN_BYTES: u64 = 64 << 10;

/// Takes bytes from the input; zeroes behind its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn number(&mut self, len: usize) -> u64 {
        let n = len.min(self.0.len());
        let (taken, rest) = self.0.split_at(n);
        self.0 = rest;
        taken.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
    }
}

/// Clusters: header, refcount table, block of counts, L1 table, L2 table, three of data, a
/// snapshot's L1 table, the snapshot table.
fn image(kind: u64) -> Bytes {
    let bits = 9 + (kind & 3) as u32;
    let is_v3 = kind & 4 != 0;
    // Extended entries need larger clusters.
    let (bits, features) = if kind & 8 != 0 && is_v3 { (14, 16) } else { (bits, 0) };
    let cluster = 1u64 << bits;
    let entry_len = if features == 0 { 8 } else { 16 };
    let l1_entries = DISK_LEN_BYTES.div_ceil(cluster / entry_len * cluster);
    let mut bytes = Bytes::default();
    bytes.set_len(10 * cluster);
    let mut put = |at: u64, value: u64, len: usize| {
        bytes.write(&value.to_be_bytes()[8 - len..], at);
    };
    let header = [
        (0, 0x5146_49fb, 4),
        (4, if is_v3 { 3 } else { 2 }, 4),
        (20, u64::from(bits), 4),
        (24, DISK_LEN_BYTES, 8),
        (36, l1_entries, 4),
        (40, 3 * cluster, 8),
        (48, cluster, 8),
        (56, 1, 4),
        (60, 1, 4),
        (64, 9 * cluster, 8),
    ];
    header.into_iter().for_each(|(at, value, len)| put(at, value, len));
    if is_v3 {
        let dirty = kind >> 4 & 1;
        [(72, features | dirty, 8), (96, 4, 4), (100, 104, 4)]
            .into_iter()
            .for_each(|(at, value, len)| put(at, value, len));
    }
    put(cluster, 2 * cluster, 8);
    (0..10).for_each(|n| put(2 * cluster + n * 2, 1, 2));
    put(3 * cluster, (4 * cluster) | COPIED, 8);
    let table = 4 * cluster;
    for n in 0..2 {
        put(table + n * entry_len, ((5 + n) * cluster) | COPIED, 8);
        if entry_len == 16 {
            put(table + n * 16 + 8, 0xff00_0000_00ff, 8);
        }
    }
    put(table + 2 * entry_len, (1 << 62) | (7 * cluster), 8);
    [(0, 8 * cluster, 8), (8, 1, 4), (12, 1 << 16 | 1, 4)]
        .into_iter()
        .for_each(|(at, value, len)| put(9 * cluster + at, value, len));
    bytes
}

fn serve(chain: &Chain, store: &Recorder, input: &mut Input<'_>) -> std::io::Result<()> {
    let mut view = chain.view(Arc::new(|| {}));
    let mut scratch = Scratch::default();
    let disk = chain.top().len_bytes().min(1 << 40);
    while !input.0.is_empty() && disk >= 512 {
        let what = input.number(1);
        let offset = input.number(2) * 512 % disk;
        let len = (1 + input.number(1) % 64).min((disk - offset).div_ceil(512)) * 512;
        let data = vec![GUEST; len as usize];
        let _ = match what % 8 {
            0 | 1 => match chain.plan(&mut view, offset, len) {
                Plan::InPlace { host, len } => store.write_at(&data[..len as usize], host),
                Plan::Allocate(allocation) if what & 8 != 0 => {
                    chain.abandon(allocation, what & 16 != 0);
                    Ok(())
                }
                Plan::Allocate(allocation) => {
                    store.write_at(&data[..allocation.len as usize], allocation.host)?;
                    let mut entries = [0; qcow2::chain::plan::MAX_ENTRIES_LEN_BYTES];
                    let len = allocation.encode(&mut entries);
                    store.write_at(&entries[..len], allocation.entries_offset())?;
                    chain.commit(allocation);
                    Ok(())
                }
                _ => Ok(()),
            },
            2 => chain.write(&mut view, &mut scratch, &data, offset),
            3 => {
                let how = Clear::Zero { may_unmap: what & 8 != 0 };
                chain.clear(&mut view, &mut scratch, offset..offset + len, how)
            }
            4 => chain.clear(&mut view, &mut scratch, offset..offset + len, Clear::Discard),
            5 => chain.read(&mut view, &mut scratch, &mut vec![0; len as usize], offset),
            6 => chain.top().sync().and_then(|()| chain.top().maintain()),
            _ => {
                let _ = chain.grow(&mut view, disk / 512 * 512 + len);
                Ok(())
            }
        };
    }
    chain.top().close()
}

fuzz_target!(|input: &[u8]| {
    let mut input = Input(input);
    let mut bytes = image(input.number(1));
    for _ in 0..input.number(1) % 8 {
        // Tables are in the first clusters.
        let at = (input.number(2) % bytes.len().max(1)) & !3;
        let value = match input.number(1) {
            n @ 0..128 => (n / 8) << (9 + n % 8) | (n & 1) << 63,
            n @ 128..160 => n & 7,
            _ => input.number(8),
        };
        bytes.write(&value.to_be_bytes(), at);
    }
    if input.number(1) == 1 {
        let len = input.number(2) % bytes.len();
        bytes.set_len(len);
    }
    let store = Arc::new(Recorder::new(bytes.clone()));
    let options = Options::new("fuzz", true);
    let opened = Image::open(store.clone() as Arc<dyn Store>, None, &options, &mut |_| {});
    let Ok((image, _)) = opened else {
        assert!(store.take_log().is_empty(), "refused, and changed");
        return;
    };
    let _ = serve(&Chain::new(image, Vec::new()), &store, &mut input);
    let (mut before, mut after) = ([0; 24], [0; 24]);
    bytes.read(&mut before, 0);
    store.bytes().read(&mut after, 0);
    assert_eq!(before, after, "the header was written over");
});
