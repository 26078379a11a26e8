//! Parser of virtio-blk requests: the one place that reads their bytes.
//!
//! Header and ranges are copied once out of guest memory, then checked, then used (D1). Every
//! number is checked against the disk with sums that cannot overflow (C4, R9).

use queue::{Chain, ChainFault, Seg};

use crate::limits::{MAX_RANGE_SECTORS, MAX_RANGES, SECTOR_LEN_BYTES};

/// Bytes of the header: type, reserved, sector (virtio 1.2, 5.2.6).
pub(crate) const HEADER_LEN_BYTES: usize = 16;

/// Bytes of one range of DISCARD and WRITE ZEROES: sector, sectors, flags.
const RANGE_LEN_BYTES: usize = 16;

/// Request types (virtio 1.2, 5.2.6).
pub(crate) mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
}

/// The status byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Ok = 0,
    IoErr = 1,
    Unsupported = 2,
}

/// Reason for which a request is refused before any I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Refusal {
    /// The readable part is shorter than a header.
    ShortHeader,
    /// The request type is unknown or was not offered.
    UnknownType,
    /// Sector and length leave the disk.
    OutOfRange,
    /// Sector or length is not a multiple of the block size.
    Misaligned,
    /// The disk is read-only.
    ReadOnly,
    /// Ranges of DISCARD or WRITE ZEROES: their count, length or flags.
    BadRanges,
    /// More segments than [`base::limits::MAX_CHAIN_SEGS`], or more bytes than
    /// [`base::limits::MAX_CHAIN_LEN_BYTES`].
    TooLong,
    /// A buffer is not in the VM's memory.
    NotMapped,
}

impl From<ChainFault> for Refusal {
    fn from(fault: ChainFault) -> Self {
        match fault {
            ChainFault::TooManySegs | ChainFault::TooManyBytes => Self::TooLong,
            ChainFault::NotMapped => Self::NotMapped,
        }
    }
}

impl Refusal {
    /// Number of reasons.
    pub const COUNT: usize = 8;

    /// All, in the order of their counters.
    pub const ALL: [Self; Self::COUNT] = [
        Self::ShortHeader,
        Self::UnknownType,
        Self::OutOfRange,
        Self::Misaligned,
        Self::ReadOnly,
        Self::BadRanges,
        Self::TooLong,
        Self::NotMapped,
    ];

    /// The name used in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::ShortHeader => "short_header",
            Self::UnknownType => "unknown_type",
            Self::OutOfRange => "out_of_range",
            Self::Misaligned => "misaligned",
            Self::ReadOnly => "read_only",
            Self::BadRanges => "bad_ranges",
            Self::TooLong => "too_long",
            Self::NotMapped => "not_mapped",
        }
    }
}

/// Range of the disk, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Range {
    pub offset: u64,
    pub len: u64,
    /// Whether WRITE ZEROES may give the blocks back.
    pub unmap: bool,
}

/// The ranges of one request.
pub(crate) type Ranges = [Range; MAX_RANGES];

/// A checked request. Ranges are returned beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    Read(Range),
    Write(Range),
    Flush,
    GetId,
    /// Number of ranges to discard.
    Discard(u8),
    /// Number of ranges to zero.
    WriteZeroes(u8),
}

/// Size and abilities of a disk, against which requests are checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    /// Size of the disk now.
    pub len_bytes: u64,
    /// Logical block size.
    pub block_size: u32,
    pub read_only: bool,
    /// Whether DISCARD was negotiated.
    pub discard: bool,
    /// Whether WRITE ZEROES was negotiated.
    pub write_zeroes: bool,
}

/// Reads and checks the request in `chain`, whose writable part has room for a status byte.
/// `ranges` receives those of DISCARD and WRITE ZEROES.
#[inline]
pub(crate) fn parse(
    chain: &Chain<'_>,
    disk: &Geometry,
    ranges: &mut Ranges,
) -> Result<Request, (Status, Refusal)> {
    let mut header = [0u8; HEADER_LEN_BYTES];
    if queue::seg::copy_out(chain.readable, 0, &mut header) < HEADER_LEN_BYTES {
        return Err((Status::IoErr, Refusal::ShortHeader));
    }
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    let data_out = u64::from(chain.readable_len) - HEADER_LEN_BYTES as u64;
    match u32::from_le_bytes([t0, t1, t2, t3]) {
        kind::IN => {
            let data_in = u64::from(chain.writable_len.saturating_sub(1));
            disk.range(sector, data_in).map(Request::Read).map_err(io_err)
        }
        kind::OUT => {
            disk.writable().map_err(io_err)?;
            disk.range(sector, data_out).map(Request::Write).map_err(io_err)
        }
        kind::FLUSH => Ok(Request::Flush),
        kind::GET_ID => Ok(Request::GetId),
        kind::DISCARD if disk.discard || disk.read_only => {
            disk.writable().map_err(io_err)?;
            disk.ranges(chain.readable, data_out, false, ranges).map(Request::Discard)
        }
        kind::WRITE_ZEROES if disk.write_zeroes || disk.read_only => {
            disk.writable().map_err(io_err)?;
            disk.ranges(chain.readable, data_out, true, ranges).map(Request::WriteZeroes)
        }
        _ => Err((Status::Unsupported, Refusal::UnknownType)),
    }
}

fn io_err(refusal: Refusal) -> (Status, Refusal) {
    (Status::IoErr, refusal)
}

impl Geometry {
    fn writable(&self) -> Result<(), Refusal> {
        if self.read_only { Err(Refusal::ReadOnly) } else { Ok(()) }
    }

    /// Checks that `len` bytes from `sector` are on the disk, and whole blocks.
    fn range(&self, sector: u64, len: u64) -> Result<Range, Refusal> {
        let offset = sector.checked_mul(SECTOR_LEN_BYTES).ok_or(Refusal::OutOfRange)?;
        let end = offset.checked_add(len).ok_or(Refusal::OutOfRange)?;
        // A device may end within a block of the disk's; files are padded to whole ones.
        let disk_end = self.len_bytes - self.len_bytes % SECTOR_LEN_BYTES;
        if end > disk_end {
            return Err(Refusal::OutOfRange);
        }
        if !(offset | len).is_multiple_of(u64::from(self.block_size)) {
            return Err(Refusal::Misaligned);
        }
        Ok(Range { offset, len, unmap: false })
    }

    /// Copies and checks the ranges that follow the header.
    fn ranges(
        &self,
        readable: &[Seg],
        data_len: u64,
        zeroes: bool,
        out: &mut Ranges,
    ) -> Result<u8, (Status, Refusal)> {
        let bad = io_err(Refusal::BadRanges);
        let count = data_len / RANGE_LEN_BYTES as u64;
        let whole = data_len.is_multiple_of(RANGE_LEN_BYTES as u64);
        if !whole || count == 0 || count > MAX_RANGES as u64 {
            return Err(bad);
        }
        let mut bytes = [0u8; MAX_RANGES * RANGE_LEN_BYTES];
        let bytes = &mut bytes[..data_len as usize];
        if queue::seg::copy_out(readable, HEADER_LEN_BYTES, bytes) < bytes.len() {
            return Err(bad);
        }
        for (range, raw) in out.iter_mut().zip(bytes.chunks_exact(RANGE_LEN_BYTES)) {
            *range = self.one_range(raw, zeroes)?;
        }
        Ok(count as u8)
    }

    /// `struct virtio_blk_discard_write_zeroes` (virtio 1.2, 5.2.6).
    fn one_range(&self, raw: &[u8], zeroes: bool) -> Result<Range, (Status, Refusal)> {
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = *raw else {
            return Err(io_err(Refusal::BadRanges));
        };
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        // Bit 0 is "unmap", for WRITE ZEROES only; the others are reserved (5.2.6.2).
        if flags & !u32::from(zeroes) != 0 {
            return Err((Status::Unsupported, Refusal::BadRanges));
        }
        let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
        if sectors > MAX_RANGE_SECTORS {
            return Err(io_err(Refusal::BadRanges));
        }
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let range = self.range(sector, u64::from(sectors) * SECTOR_LEN_BYTES).map_err(io_err)?;
        Ok(Range { unmap: flags & 1 != 0, ..range })
    }
}
