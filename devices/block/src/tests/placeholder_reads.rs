//! Reads over placeholders: which they are, and how they end.

use guest_abi::pipe::{BLOCK_BYTES, READ_SKEW_BYTES};
use queue::Layout;

use super::placeholders::Bench;
use crate::placeholder::{PlaceholderOp, PlaceholderRequest};
use crate::request::kind;
use crate::testing::placeholders::{TAG, sectors};
use crate::testing::{BOTH, Offered, Rig, UNTOUCHED, pattern};

/// Offers a read into memory that begins at `skew` of a page and has these bytes, in parts of
/// `part`.
fn ask(rig: &mut Rig, sector: u64, skew: usize, bytes: &[u8], part: usize) -> Offered {
    let header = rig.header(kind::IN, sector);
    let page = rig.driver.ram().alloc_aligned(skew + bytes.len(), BLOCK_BYTES as u64);
    let data = page + skew as u64;
    rig.driver.write(data, bytes);
    let mut room: Vec<_> = (0..bytes.len())
        .step_by(part)
        .map(|at| (data + at as u64, part.min(bytes.len() - at) as u32))
        .collect();
    let status = rig.status_byte();
    room.push(status);
    let id = rig.driver.offer(&[header], &room);
    Offered { id, data, status: status.0 }
}

impl Bench {
    fn is_taken(&mut self, at: u64, len: usize, part: usize) -> (Offered, PlaceholderRequest) {
        let offered = ask(&mut self.rig, 24, READ_SKEW_BYTES, &sectors(TAG, at, len), part);
        self.poll();
        (offered, self.taken.try_recv().unwrap())
    }

    /// Asserts that a read with this memory goes to the disk as any other.
    fn is_read(&mut self, sector: u64, skew: usize, memory: &[u8]) {
        let content = pattern(7, memory.len());
        self.disk.state().cache[sector as usize * 512..][..content.len()].copy_from_slice(&content);
        let offered = ask(&mut self.rig, sector, skew, memory, memory.len());
        assert_eq!(self.rig.finish(offered), (0, memory.len() as u32 + 1));
        assert!(self.taken.try_recv().is_err());
        assert!(self.rig.driver.read(offered.data, memory.len()) == content);
    }
}

#[test]
fn a_placed_read_waits_without_the_disk_and_leaves_the_memory_alone() {
    for layout in BOTH {
        for part in [512, 3584, 8192] {
            let mut bench = Bench::new(layout, true);
            let (offered, read) = bench.is_taken(1024, 8192, part);
            assert_eq!((read.tag(), read.at(), read.len_bytes()), (TAG, 1024, 8192));
            assert_eq!((read.offset(), read.op()), (24 * 512, PlaceholderOp::Read));
            bench.poll();
            assert_eq!((bench.rig.driver.used(), bench.rig.status(offered)), (None, UNTOUCHED));
            read.complete(Ok(()));
            assert_eq!(bench.rig.finish(offered), (0, 8193));
            assert!(bench.rig.driver.read(offered.data, 8192) == sectors(TAG, 1024, 8192));
            assert!(bench.log().is_empty());
            assert_eq!((bench.rig.stats.reads.get(), bench.rig.stats.placeholders.get()), (1, 1));
        }
    }
}

#[test]
fn a_dropped_read_is_an_io_error() {
    let mut bench = Bench::new(Layout::Packed, true);
    let (offered, read) = bench.is_taken(0, 4096, 4096);
    drop(read);
    assert_eq!(bench.rig.finish(offered).0, 1);
}

#[test]
fn a_read_that_is_given_back_is_read() {
    let mut bench = Bench::new(Layout::Split, true);
    bench.is_read(8, READ_SKEW_BYTES, &sectors([9; 16], 0, 8192));
}

#[test]
fn abuse_I_memory_that_had_placeholders_is_read_over() {
    let mut bench = Bench::new(Layout::Split, true);
    // Pages that were a pipe's, at each sector: whoever reads whole blocks into pages begins at 0.
    for skew in (0..BLOCK_BYTES).step_by(512).filter(|skew| *skew != READ_SKEW_BYTES) {
        bench.is_read(8, skew, &sectors(TAG, 3584, 8192));
    }
    // A block device's single sectors, and other parts of blocks.
    for len in [512, 3584, 4096 + 512] {
        bench.is_read(8, READ_SKEW_BYTES, &sectors(TAG, 0, len));
    }
    // Not all of it.
    let mut memory = sectors(TAG, 0, 8192);
    memory[8192 - 512] ^= 1;
    bench.is_read(8, READ_SKEW_BYTES, &memory);
}

#[test]
fn without_a_pipe_nothing_is_looked_at() {
    let mut bench = Bench::new(Layout::Split, true);
    bench.handler.any.store(false, std::sync::atomic::Ordering::Relaxed);
    bench.is_read(8, READ_SKEW_BYTES, &sectors(TAG, 0, 8192));
}

#[test]
fn without_a_write_cache_nothing_is_flushed_for_a_read() {
    let mut bench = Bench::new(Layout::Packed, true);
    let (offered, read) = bench.is_taken(0, 4096, 4096);
    bench.rig.engine.set_writeback(false);
    read.complete(Ok(()));
    assert_eq!(bench.rig.finish(offered), (0, 4097));
    assert!(bench.log().is_empty());
}
