//! Memory for placeholders that fits direct I/O: blocks to write, and a buffer to read over.

use std::fs::File;
use std::io;

use guest_abi::pipe::{BLOCK_BYTES, PLACEHOLDER_MAGIC, Placeholder, READ_SKEW_BYTES, SECTOR_BYTES};
use rustix::io::{Errno, pread, pwrite};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Sector of the disk.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Sector {
    head: Placeholder,
    rest: [u8; SECTOR_BYTES - size_of::<Placeholder>()],
}

/// Block in memory that begins at a page, as direct I/O requires.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Block([Sector; BLOCK_BYTES / SECTOR_BYTES]);

/// Blocks for placeholders with one tag, or for reading: not for both, as the bytes behind a
/// placeholder's head must stay zero.
#[derive(Debug)]
pub struct Blocks {
    tag: [u8; 16],
    blocks: Vec<Block>,
}

impl Blocks {
    /// Blocks of `len_bytes`, a multiple of [`BLOCK_BYTES`].
    pub fn new(tag: [u8; 16], len_bytes: usize) -> Self {
        let blocks = (0..len_bytes / BLOCK_BYTES).map(|_| Block::new_zeroed()).collect();
        Self { tag, blocks }
    }

    /// Size of all blocks.
    pub fn room_bytes(&self) -> usize {
        self.blocks.len() * BLOCK_BYTES
    }

    /// Writes one piece of placeholders, which stand for at most `len_bytes` bytes of the pipe from
    /// `at` on: a multiple of a sector. Returns the number of bytes written, also such a multiple.
    ///
    /// # Errors
    /// Those of `pwrite(2)`.
    /// Those of `pwrite(2)`.
    pub fn write(
        &mut self,
        file: &File,
        offset: u64,
        at: u64,
        len_bytes: usize,
    ) -> Result<usize, Errno> {
        let len = len_bytes.min(self.room_bytes());
        let sectors = self.blocks.iter_mut().flat_map(|block| &mut block.0);
        let magic = U64::new(PLACEHOLDER_MAGIC);
        for (sector, at) in sectors.take(len / SECTOR_BYTES).zip((at..).step_by(SECTOR_BYTES)) {
            sector.head = Placeholder { magic, at: U64::new(at), tag: self.tag };
        }
        let written = pwrite(file, &self.blocks.as_bytes()[..len], offset)?;
        // A half-written sector does not count: it is written again.
        match written / SECTOR_BYTES * SECTOR_BYTES {
            0 => Err(Errno::IO),
            written => Ok(written),
        }
    }

    /// Reads one piece of a range that was written as placeholders.
    ///
    /// # Errors
    /// Those of `pread(2)`; also the end of the file.
    pub fn read(&mut self, file: &File, offset: u64, len_bytes: usize) -> io::Result<&[u8]> {
        let len = len_bytes.min(self.room_bytes());
        match pread(file, &mut self.blocks.as_mut_bytes()[..len], offset)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => Ok(&self.blocks.as_bytes()[..read]),
        }
    }

    /// Offsets of sectors that were read and are still placeholders of this tag. The daemon
    /// replaces a sector as a whole, and no other bytes have the tag.
    pub fn remaining(tag: [u8; 16], bytes: &[u8]) -> Vec<u64> {
        let is_left = |sector: &[u8]| {
            Placeholder::ref_from_prefix(sector)
                .is_ok_and(|(head, _)| head.magic.get() == PLACEHOLDER_MAGIC && head.tag == tag)
        };
        let sectors = bytes.chunks(SECTOR_BYTES).enumerate();
        sectors
            .filter(|(_, sector)| is_left(sector))
            .map(|(n, _)| (n * SECTOR_BYTES) as u64)
            .collect()
    }
}

/// Memory with placeholders that is read over. It begins off a page boundary: see
/// [`guest_abi::pipe`].
#[derive(Debug)]
pub struct OverReadBuffer {
    tag: [u8; 16],
    blocks: Vec<Block>,
}

impl OverReadBuffer {
    /// Memory of `len_bytes`, a multiple of [`BLOCK_BYTES`].
    pub fn new(tag: [u8; 16], len_bytes: usize) -> Self {
        // One more block, for the part that does not fit into the first one.
        let blocks = (0..=len_bytes / BLOCK_BYTES).map(|_| Block::new_zeroed()).collect();
        Self { tag, blocks }
    }

    fn memory(&mut self) -> &mut [u8] {
        let len = (self.blocks.len() - 1) * BLOCK_BYTES;
        &mut self.blocks.as_mut_bytes()[READ_SKEW_BYTES..][..len]
    }

    /// Reads one piece over placeholders, which stand for at most `len_bytes` bytes of the pipe
    /// from `at` on: a multiple of a block. Returns the number of bytes; fewer only at the end of
    /// the file. The bytes are not in the memory: the daemon, which knows the tag, has them.
    ///
    /// # Errors
    /// Those of `pread(2)`.
    pub fn read(
        &mut self,
        file: &File,
        offset: u64,
        at: u64,
        len_bytes: usize,
    ) -> Result<usize, Errno> {
        let (tag, magic) = (self.tag, U64::new(PLACEHOLDER_MAGIC));
        let memory = self.memory();
        let len = len_bytes.min(memory.len());
        let memory = &mut memory[..len];
        for (sector, at) in memory.chunks_mut(SECTOR_BYTES).zip((at..).step_by(SECTOR_BYTES)) {
            let head = Placeholder { magic, at: U64::new(at), tag };
            // A sector has room for the placeholder's head.
            let _ = head.write_to_prefix(sector);
        }
        pread(file, memory, offset)
    }

    /// Whether all of the first `len_bytes` are still placeholders.
    pub fn is_untouched(&mut self, len_bytes: usize) -> bool {
        let tag = self.tag;
        Blocks::remaining(tag, &self.memory()[..len_bytes]).len() == len_bytes / SECTOR_BYTES
    }
}
