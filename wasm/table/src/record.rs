//! Records: the frames of the log and of checkpoints.
//!
//! | bytes | | |
//! | --- | --- | --- |
//! | 4 | magic | `MLTR` |
//! | 4 | kind | [`kind`] |
//! | 4 | length | of the body |
//! | 4 | synced | up to this byte of the file all was durable when the record was made |
//! | 8 | number | one more than that of the record before |
//! | 8 | hash | XXH3-64 of the body |
//! | 4 | file | the low half of its number |
//! | 4 | check | of all above; no byte of it is zero |
//! | … | body | |
//! | 4 | tail | no byte of it is zero |
//!
//! # Torn or damaged
//! What was appended and not synced may be lost in any part, and lost parts are missing at the end
//! or read as zeroes. So a record that is wrong is *torn* if the file ends in it, or the end of its
//! head's check and what follows, its tail, or a whole page of it is zero; else it is *damaged*:
//! somebody changed bytes that were there.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use sdk::{Errno, File, Host};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a record before its body.
pub const HEAD_BYTES: usize = 40;
/// Bytes of a record after its body.
pub const TAIL_BYTES: usize = 4;
/// Length of the longest body: a value with its key, a transaction's buffer, and heads.
pub const MAX_RECORD_BYTES: usize = 48 << 20;
const MAGIC: [u8; 4] = *b"MLTR";
const TAIL: [u8; 4] = *b"rtlm";
const PAGE_BYTES: usize = 4096;
const CHUNK_BYTES: usize = 1 << 20;

/// Kinds of records.
pub mod kind {
    /// First record of a segment.
    pub const SEGMENT: u32 = 1;
    /// Commit of a transaction: [`crate::record_body`].
    pub const COMMIT: u32 = 2;
    /// Ops of a transaction that is not committed yet.
    pub const SPILL: u32 = 3;
    /// Transaction that has been prepared.
    pub const PREPARE: u32 = 4;
    /// Commit of a prepared transaction.
    pub const COMMIT_PREPARED: u32 = 5;
    /// Rollback of a prepared transaction.
    pub const ROLLBACK_PREPARED: u32 = 6;
    /// Change of tables.
    pub const CATALOG: u32 = 7;
    /// Values that were copied from a segment that is to go.
    pub const MOVED: u32 = 8;
    /// First record of a checkpoint.
    pub const CHECKPOINT: u32 = 16;
    /// Table.
    pub const TABLE: u32 = 17;
    /// Entries of an index.
    pub const ENTRIES: u32 = 18;
    /// Remembered clients.
    pub const CLIENTS: u32 = 19;
    /// Prepared transaction.
    pub const PREPARED: u32 = 20;
    /// Statistics of segments.
    pub const SEGMENTS: u32 = 21;
    /// Last record of a checkpoint.
    pub const END: u32 = 22;
}

/// Head of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Kind: [`kind`].
    pub kind: u32,
    /// Length of the body in bytes.
    pub len: u32,
    /// Bytes of the file that were durable when the record was made.
    pub synced: u32,
    /// Number: one more than that of the record before.
    pub number: u64,
    /// Hash of the body.
    pub hash: u64,
    /// Low half of the file's number.
    pub file: u32,
}

fn check_of(head: &[u8]) -> u32 {
    xxh3_64(head) as u32 | 0x0101_0101
}

/// Reads 32 bits in little-endian order, 0 if they are not there.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let four = bytes.get(at..).and_then(|b| b.first_chunk::<4>());
    four.map_or(0, |b| u32::from_le_bytes(*b))
}

/// Reads 64 bits in little-endian order, 0 if they are not there.
pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let eight = bytes.get(at..).and_then(|b| b.first_chunk::<8>());
    eight.map_or(0, |b| u64::from_le_bytes(*b))
}

impl Head {
    /// Encodes it.
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.synced.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.hash.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.file.to_le_bytes());
        let check = check_of(&bytes[..36]);
        bytes[36..40].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Decodes it; None: the bytes are no head.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..HEAD_BYTES)?;
        let fine = bytes.starts_with(&MAGIC) && u32_at(bytes, 36) == check_of(&bytes[..36]);
        fine.then(|| Self {
            kind: u32_at(bytes, 4),
            len: u32_at(bytes, 8),
            synced: u32_at(bytes, 12),
            number: u64_at(bytes, 16),
            hash: u64_at(bytes, 24),
            file: u32_at(bytes, 32),
        })
    }
}

/// Begins a record in a buffer, and returns its offset. The body follows.
pub fn begin(buffer: &mut Vec<u8>) -> usize {
    let at = buffer.len();
    buffer.resize(at + HEAD_BYTES, 0);
    at
}

/// Ends the record that began at `at`.
pub fn seal(buffer: &mut Vec<u8>, at: usize, kind: u32, file: u32, synced: u32, number: u64) {
    let body = buffer.get(at + HEAD_BYTES..).unwrap_or(&[]);
    let head = Head { kind, len: body.len() as u32, synced, number, hash: xxh3_64(body), file };
    if let Some(to) = buffer.get_mut(at..at + HEAD_BYTES) {
        to.copy_from_slice(&head.encode());
    }
    buffer.extend_from_slice(&TAIL);
}

/// Gives a sealed record another number.
pub fn renumber(record: &mut [u8], number: u64) {
    if let Some(head) = Head::decode(record) {
        record[..HEAD_BYTES].copy_from_slice(&Head { number, ..head }.encode());
    }
}

/// Reason why there is no next record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// The file ends here.
    End,
    /// The next record was not wholly written.
    Torn,
    /// The next record was changed.
    Damaged(String),
    /// The next record cannot be read.
    Failed(Errno),
}

/// Reader of a file's records, one after the other.
#[derive(Debug)]
pub struct Reader {
    file: File,
    number: u32,
    len: u64,
    /// Offset of the next record.
    pub at: u64,
    buffer: Vec<u8>,
    buffer_at: u64,
    body: core::ops::Range<usize>,
}

impl Reader {
    /// Begins at a place of a file. `number` is the file's number in the heads of its records.
    pub fn new(host: &mut dyn Host, file: File, number: u32, at: u64) -> Result<Self, Errno> {
        let len = host.len(file)?;
        Ok(Self { file, number, len, at, buffer: Vec::new(), buffer_at: at, body: 0..0 })
    }

    /// Goes on with another handle of the file.
    pub fn set_file(&mut self, file: File) {
        self.file = file;
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.len
    }

    /// Reads bytes of the file, as many as there are.
    fn fill(&mut self, host: &mut dyn Host, at: u64, want: usize) -> Result<&[u8], Errno> {
        let want = want.min(self.len.saturating_sub(at) as usize);
        let end = self.buffer_at + self.buffer.len() as u64;
        if at < self.buffer_at || at + want as u64 > end {
            let len = want.max(CHUNK_BYTES).min(self.len.saturating_sub(at) as usize);
            self.buffer.resize(len, 0);
            let read = host.read(self.file, at, &mut self.buffer)?;
            self.buffer.truncate(read);
            self.buffer_at = at;
        }
        let from = (at - self.buffer_at) as usize;
        let to = self.buffer.len().min(from + want);
        Ok(self.buffer.get(from..to).unwrap_or(&[]))
    }

    /// Reads the next record: its head, and the offset of its body in the file.
    pub fn next(&mut self, host: &mut dyn Host) -> Result<(Head, u64), Stop> {
        let at = self.at;
        if at >= self.len {
            return Err(Stop::End);
        }
        let (number, len) = (self.number, self.len);
        let bytes = self.fill(host, at, HEAD_BYTES + TAIL_BYTES).map_err(Stop::Failed)?;
        let Some(head) = Head::decode(bytes) else { return Err(bad_head(bytes, number, at)) };
        let whole = HEAD_BYTES + head.len as usize + TAIL_BYTES;
        if head.file != number || head.len as usize > MAX_RECORD_BYTES {
            let text = format!("record of file {} with {} bytes", head.file, head.len);
            return Err(Stop::Damaged(text));
        }
        let bytes = self.fill(host, at, whole).map_err(Stop::Failed)?;
        // Also without its tail alone: what follows must have its place.
        if at + whole as u64 > len {
            return Err(Stop::Torn);
        }
        let Some(body) = bytes.get(HEAD_BYTES..HEAD_BYTES + head.len as usize) else {
            return Err(Stop::Failed(Errno::IO));
        };
        if xxh3_64(body) != head.hash {
            return Err(bad_body(bytes, whole, number, at));
        }
        self.at = at + whole as u64;
        let from = (at - self.buffer_at) as usize + HEAD_BYTES;
        self.body = from..from + head.len as usize;
        Ok((head, at + HEAD_BYTES as u64))
    }

    /// Body of the record that was read last.
    pub fn body(&self) -> &[u8] {
        self.buffer.get(self.body.clone()).unwrap_or(&[])
    }

    /// Whether a whole record follows that was made when the byte at `self.at` was durable already:
    /// then the bytes there are damaged, whatever they look like.
    pub fn was_durable(&mut self, host: &mut dyn Host) -> Result<bool, Errno> {
        let (bad, mut at) = (self.at, self.at + 1);
        while at < self.len {
            let bytes = self.fill(host, at, CHUNK_BYTES)?;
            let found = bytes.windows(MAGIC.len()).position(|w| w == MAGIC);
            let Some(found) = found else {
                at += (bytes.len().max(MAGIC.len()) - (MAGIC.len() - 1)) as u64;
                continue;
            };
            at += found as u64;
            self.at = at;
            let next = self.next(host).map(|(head, ..)| head);
            self.at = bad;
            if next.is_ok_and(|head| u64::from(head.synced) > bad) {
                return Ok(true);
            }
            at += 1;
        }
        Ok(false)
    }
}

fn bad_head(bytes: &[u8], number: u32, at: u64) -> Stop {
    // No byte of the check is zero, nor are the four that follow it: they are the beginning of a
    // body, which is a kind or the low half of a number that is never zero, or a tail.
    let torn = bytes.len() < HEAD_BYTES || bytes[HEAD_BYTES - 1..].iter().all(|&b| b == 0);
    if torn { Stop::Torn } else { Stop::Damaged(format!("file {number}, byte {at}: no record")) }
}

fn bad_body(bytes: &[u8], whole: usize, number: u32, at: u64) -> Stop {
    let zero = |b: &[u8]| b.iter().all(|&b| b == 0);
    let no_tail = bytes.len() < whole || zero(&bytes[whole - TAIL_BYTES..]);
    let to_page = (PAGE_BYTES - (at as usize % PAGE_BYTES)) % PAGE_BYTES;
    let mut pages = bytes.get(to_page..).unwrap_or(&[]).chunks_exact(PAGE_BYTES);
    if no_tail || pages.any(zero) {
        return Stop::Torn;
    }
    Stop::Damaged(format!("file {number}, record at byte {at}: its {whole} bytes were changed"))
}
