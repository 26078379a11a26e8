//! Tests of each request, on every back end and both ring layouts.

use queue::Layout;

use crate::backend::Backend;
use crate::memory::MemoryBackend;
use crate::null::NullBackend;
use crate::raw::RawBackend;
use crate::request::kind;
use crate::testing::{BOTH, Rig, RigOptions, pattern, range};

const LEN: u64 = 8 << 20;

/// A raw image in a temporary directory (on a real file system), and the directory.
fn raw(direct: bool) -> (RawBackend, tempfile::TempDir) {
    raw_in("/var/tmp", direct)
}

fn raw_in(place: &str, direct: bool) -> (RawBackend, tempfile::TempDir) {
    let dir = tempfile::tempdir_in(place).unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
    let backend = RawBackend::open(&path, direct, false, 4096).unwrap();
    (backend, dir)
}

fn every_backend(check: impl Fn(Layout, &dyn Backend)) {
    for layout in BOTH {
        check(layout, &MemoryBackend::new(LEN).unwrap());
        check(layout, &raw(false).0);
        check(layout, &raw(true).0);
        check(layout, &raw_in("/dev/shm", false).0);
    }
}

#[test]
fn what_was_written_is_read() {
    every_backend(|layout, backend| {
        let mut rig = Rig::new(layout, backend);
        for (seed, (sector, len)) in
            [(0, 4096), (64, 512 * 8), (128, 65536), (2048, 3 << 20), (16376, 4096)]
                .into_iter()
                .enumerate()
        {
            let data = pattern(seed as u64, len);
            rig.write(sector, &data);
            assert!(rig.read(sector, len) == data, "{} at {sector}", backend.kind());
        }
        assert!(rig.read(8, 4096).iter().all(|&b| b == 0), "untouched blocks are zero");
    });
}

#[test]
fn null_reads_zeroes_and_forgets() {
    for layout in BOTH {
        let mut rig = Rig::new(layout, &NullBackend::new(LEN).unwrap());
        rig.write(0, &pattern(1, 4096));
        assert_eq!(rig.read(0, 4096), vec![0; 4096]);
    }
}

#[test]
fn data_in_many_odd_pieces_arrives_in_order() {
    every_backend(|layout, backend| {
        let mut rig = Rig::new(layout, backend);
        let data = pattern(7, 16384);
        // Odd sizes and addresses: direct I/O must bounce.
        let sizes = [1usize, 511, 13, 4096, 1000, 7, 2048, 8708];
        assert_eq!(sizes.iter().sum::<usize>(), data.len());
        let mut readable = vec![rig.header(kind::OUT, 32)];
        let mut at = 0;
        for size in sizes {
            readable.push(rig.driver.buffer(&data[at..at + size]));
            at += size;
        }
        let status = rig.status_byte();
        rig.driver.offer_indirect(&readable, &[status]);
        assert_eq!(rig.settle().len(), 1);
        assert_eq!(rig.driver.read(status.0, 1), [0]);

        let header = rig.header(kind::IN, 32);
        let pieces: Vec<(u64, u32)> =
            sizes.iter().rev().map(|&n| rig.driver.buffer(&vec![0xee; n])).collect();
        let status = rig.status_byte();
        let mut writable = pieces.clone();
        writable.push(status);
        rig.driver.offer_indirect(&[header], &writable);
        assert_eq!(rig.settle()[0].1, 16385);
        let read: Vec<u8> =
            pieces.iter().flat_map(|&(addr, len)| rig.driver.read(addr, len as usize)).collect();
        assert!(read == data, "{}", backend.kind());
    });
}

#[test]
fn many_requests_in_one_batch_all_complete() {
    every_backend(|layout, backend| {
        let mut rig = Rig::new(layout, backend);
        let blocks: Vec<Vec<u8>> = (0..16).map(|i| pattern(100 + i, 4096)).collect();
        let offered: Vec<_> = blocks
            .iter()
            .enumerate()
            .map(|(i, data)| rig.send(kind::OUT, i as u64 * 8, data))
            .collect();
        assert_eq!(rig.settle().len(), 16);
        assert!(offered.iter().all(|&o| rig.status(o) == 0));
        let whole = rig.read(0, 16 * 4096);
        assert!(whole == blocks.concat());
    });
}

#[test]
fn flush_and_get_id() {
    every_backend(|layout, backend| {
        let mut rig = Rig::new(layout, backend);
        let flush = rig.send(kind::FLUSH, 0, &[]);
        assert_eq!(rig.finish(flush), (0, 1));
        let id = rig.ask(kind::GET_ID, 0, 20);
        assert_eq!(rig.finish(id), (0, 21));
        assert_eq!(rig.driver.read(id.data, 20), b"serial-1\0\0\0\0\0\0\0\0\0\0\0\0");
        // Less and more room than a serial number has.
        let short = rig.ask(kind::GET_ID, 0, 4);
        assert_eq!(rig.finish(short), (0, 5));
        assert_eq!(rig.driver.read(short.data, 4), b"seri");
        let long = rig.ask(kind::GET_ID, 0, 64);
        assert_eq!(rig.finish(long), (0, 65));
        assert_eq!(rig.driver.read(long.data + 20, 44), vec![0; 44]);
        assert_eq!((rig.stats.flushes.get(), rig.stats.get_ids.get()), (1, 3));
    });
}

#[test]
fn zeroes_and_discards_take_several_ranges() {
    every_backend(|layout, backend| {
        let mut rig = Rig::new(layout, backend);
        let data = pattern(3, 1 << 20);
        rig.write(0, &data);
        // With and without leave to unmap, an empty range, and one large enough to punch.
        let ranges = [range(8, 8, 0), range(0, 0, 0), range(64, 16, 1), range(1024, 512, 1)];
        let zeroes = rig.send(kind::WRITE_ZEROES, 0, &ranges.concat());
        assert_eq!(rig.finish(zeroes), (0, 1));
        let mut expect = data.clone();
        for (sector, sectors) in [(8, 8), (64, 16), (1024, 512)] {
            expect[sector * 512..(sector + sectors) * 512].fill(0);
        }
        assert!(rig.read(0, 1 << 20) == expect, "{}", backend.kind());
        let discard = rig.send(kind::DISCARD, 0, &[range(0, 8, 0), range(512, 256, 0)].concat());
        assert_eq!(rig.finish(discard), (0, 1));
        let rest = rig.read(8, 4096);
        assert!(rest == expect[4096..8192], "a discard leaves its neighbours alone");
    });
}

#[test]
fn zeroes_are_written_where_the_file_system_cannot_zero() {
    // tmpfs has no FALLOC_FL_ZERO_RANGE.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(LEN).unwrap();
    let backend = RawBackend::open(&path, false, false, 512).unwrap();
    for layout in BOTH {
        let mut rig = Rig::new(layout, &backend);
        rig.write(0, &pattern(3, 3 << 20));
        let before = rig.stats.disk_ops.get();
        let zeroes = rig.send(kind::WRITE_ZEROES, 0, &range(1, 4097, 0));
        assert_eq!(rig.finish(zeroes), (0, 1));
        assert!(rig.stats.disk_ops.get() > before + 1, "the fallback takes several operations");
        let read = rig.read(0, 3 << 20);
        assert!(read[..512] == pattern(3, 3 << 20)[..512]);
        assert!(read[512..4098 * 512].iter().all(|&b| b == 0));
        assert!(read[4098 * 512..] == pattern(3, 3 << 20)[4098 * 512..]);
    }
}

#[test]
fn a_file_that_ends_early_reads_as_zeroes() {
    for (place, layout) in ["/var/tmp", "/dev/shm"].into_iter().flat_map(|p| BOTH.map(|l| (p, l))) {
        let (backend, dir) = raw_in(place, false);
        let mut rig = Rig::new(layout, &backend);
        let file = std::fs::File::options().write(true).open(dir.path().join("disk.img")).unwrap();
        file.set_len(0).unwrap();
        file.set_len(LEN).unwrap();
        rig.write(0, &pattern(1, 8192));
        file.set_len(5000).unwrap();
        let mut expect = pattern(1, 8192);
        expect[5000..].fill(0);
        assert!(rig.read(0, 8192) == expect);
        assert_eq!(rig.read(4096, 4096), vec![0; 4096]);
    }
}

#[test]
fn read_only_disks_refuse_every_change() {
    for layout in BOTH {
        let backend = MemoryBackend::new(LEN).unwrap();
        let options = RigOptions { read_only: true, ..RigOptions::default() };
        let mut rig = Rig::with_disk(layout, backend.open_queue(64).unwrap(), options);
        for (kind, data) in [
            (kind::OUT, pattern(1, 512)),
            (kind::DISCARD, range(0, 1, 0)),
            (kind::WRITE_ZEROES, range(0, 1, 0)),
        ] {
            let offered = rig.send(kind, 0, &data);
            assert_eq!(rig.finish(offered), (1, 1), "type {kind}");
        }
        assert_eq!(rig.stats.refused[crate::Refusal::ReadOnly as usize].get(), 3);
        assert_eq!(rig.read(0, 512), vec![0; 512]);
    }
}
