//! The disk: what the host wrote is summed, and each block of the second half gets content of its
//! own, is read back and compared. Several requests are under way at once.

use alloc::vec;
use alloc::vec::Vec;

use virtio_drivers::device::blk::{BlkReq, BlkResp, SECTOR_SIZE, VirtIOBlk};
use virtio_drivers::transport::pci::PciTransport;

use crate::memory::Identity;
use crate::serial::say;

type Disk = VirtIOBlk<Identity, PciTransport>;

/// Size of a request: several pages, and no power of two.
const BLOCK_BYTES: usize = 9 * SECTOR_SIZE;
/// Requests under way at once: as many as the driver's ring holds.
const DEPTH: usize = 16;

/// A request and its buffer.
struct Slot {
    header: BlkReq,
    data: Vec<u8>,
    status: BlkResp,
    block: usize,
    token: Option<u16>,
}

/// Reads, writes and compares the whole disk.
pub fn exercise(transport: PciTransport) {
    let mut disk = Disk::new(transport).expect("a disk");
    let blocks = usize::try_from(disk.capacity()).expect("a size") * SECTOR_SIZE / BLOCK_BYTES;
    say!("foreign: disk of {} sectors, {blocks} blocks", disk.capacity());
    let half = blocks / 2;
    let mut sum = 0u64;
    for_all(&mut disk, 0..half, false, |block, data| {
        // Requests end in any order.
        let here = data.iter().fold(block as u64, |sum, byte| mix(sum, *byte));
        sum = sum.wrapping_add(here);
    });
    say!("foreign: read sum {sum:016x}");
    for_all(&mut disk, half..blocks, true, |_, _| {});
    disk.flush().expect("a flush");
    for_all(&mut disk, half..blocks, false, |block, data| {
        let mut wanted = vec![0; data.len()];
        fill(block, &mut wanted);
        assert!(wanted == data, "block {block} differs");
    });
    let mut serial = [0; 20];
    let len = disk.device_id(&mut serial).expect("a serial number");
    say!("foreign: serial {:?}", core::str::from_utf8(&serial[..len]));
    say!("foreign: disk done");
}

fn mix(sum: u64, byte: u8) -> u64 {
    (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
}

/// Content of a block that this guest writes.
fn fill(block: usize, data: &mut [u8]) {
    let mut state = block as u64 + 1;
    for byte in data {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = (state >> 56) as u8;
    }
}

/// Reads or writes blocks, as many at once as the ring takes.
fn for_all(
    disk: &mut Disk,
    mut blocks: core::ops::Range<usize>,
    write: bool,
    mut done: impl FnMut(usize, &[u8]),
) {
    let mut slots: Vec<Slot> = (0..DEPTH).map(|_| Slot::new()).collect();
    let mut under_way = 0;
    loop {
        for slot in slots.iter_mut().filter(|slot| slot.token.is_none()) {
            let Some(block) = blocks.next() else { break };
            slot.start(disk, block, write);
            under_way += 1;
        }
        if under_way == 0 {
            return;
        }
        let Some(token) = disk.peek_used() else {
            core::hint::spin_loop();
            continue;
        };
        let slot = slots.iter_mut().find(|slot| slot.token == Some(token)).expect("a request");
        slot.end(disk, token, write);
        under_way -= 1;
        done(slot.block, &slot.data);
    }
}

impl Slot {
    fn new() -> Self {
        let (header, status) = (BlkReq::default(), BlkResp::default());
        Self { header, data: vec![0; BLOCK_BYTES], status, block: 0, token: None }
    }

    fn start(&mut self, disk: &mut Disk, block: usize, write: bool) {
        self.block = block;
        let sector = block * BLOCK_BYTES / SECTOR_SIZE;
        let (header, status) = (&mut self.header, &mut self.status);
        let token = if write {
            fill(block, &mut self.data);
            // SAFETY: the slot is not touched until `end`.
            unsafe { disk.write_blocks_nb(sector, header, &self.data, status) }
        } else {
            self.data.fill(0);
            // SAFETY: as above.
            unsafe { disk.read_blocks_nb(sector, header, &mut self.data, status) }
        };
        self.token = Some(token.expect("room in the ring"));
    }

    fn end(&mut self, disk: &mut Disk, token: u16, write: bool) {
        let (header, status) = (&self.header, &mut self.status);
        let ended = if write {
            // SAFETY: these are the buffers of that request.
            unsafe { disk.complete_write_blocks(token, header, &self.data, status) }
        } else {
            // SAFETY: as above.
            unsafe { disk.complete_read_blocks(token, header, &mut self.data, status) }
        };
        ended.unwrap_or_else(|error| panic!("block {}: {error}", self.block));
        self.token = None;
    }
}
