//! Rings of memory that clients and modules share (`guest_abi::module_ring`): the region, its
//! slots, and what one side of a slot does.
//!
//! # Theory of operation
//! A ring is a stream of bytes in memory, with one writer and one reader. Each side keeps the word
//! that it alone writes, reads the other's once, checks it, and copies bytes before anybody looks
//! at them, so a guest that writes anything at any time changes no more than its own stream.
//! Whoever finds nothing to do sets a flag, looks again, and may sleep; the other side sees the
//! flag after what it did. Both have a full barrier between storing and looking, so that at least
//! one of them sees the other.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use base::random::{OsRandom, Random};
use base::shm::SharedMemory;
use base::sync::lock;
use guest_abi::module_ring::{
    DATA_BYTES, Direction, REGION_MAGIC, REGION_VERSION, RegionHead, SLOT_BYTES, SLOTS_OFF,
    STAMP_OFF, TO_CLIENT, TO_HOST,
};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

/// The other side's word cannot be true.
///
/// Remedy: close the program of the guest that wrote into the memory; its connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a ring of {DATA_BYTES} bytes would have {bytes} in it")]
pub struct Damaged {
    /// Bytes that the ring would have in it; the limit is [`DATA_BYTES`].
    pub bytes: u64,
}

/// Opens the file of a region, made with `bytes` if it is not there: QEMU, which has it before it
/// as well, may have made it. A new one is of this mode. All of its memory is taken now, so that
/// nobody finds later that there is none.
///
/// # Errors
/// It cannot be made, or is of another length: then somebody else has it.
pub fn open(path: &Path, bytes: u64, mode: u32) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
    let file = File::from(fd);
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    if meta.len() != 0 && meta.len() != bytes {
        let why = format!("it is {} bytes long, and not {bytes}", meta.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    if meta.len() == 0 {
        file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    }
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
    mark(&file, bytes)?;
    Ok(file.into())
}

/// Makes it one that a guest can tell from other memory, before any process has begun with it.
fn mark(file: &File, bytes: u64) -> io::Result<()> {
    let mut now = [0; size_of::<u64>()];
    file.read_exact_at(&mut now, 0)?;
    if now == REGION_MAGIC.to_le_bytes() {
        return Ok(());
    }
    if now != [0; 8] {
        let why = "it is not empty, and no memory for rings";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    file.write_all_at(head_of(slots_of(bytes), [0; 16], REGION_MAGIC).as_bytes(), 0)
}

fn slots_of(bytes: u64) -> u32 {
    let slots = bytes.saturating_sub(SLOTS_OFF as u64) / SLOT_BYTES as u64;
    u32::try_from(slots).unwrap_or(u32::MAX)
}

fn head_of(slots: u32, id: [u8; 16], magic: u64) -> RegionHead {
    let (version, slots) = (U32::new(REGION_VERSION), U32::new(slots));
    RegionHead { magic: U64::new(magic), version, slots, id }
}

/// A region before this process.
#[derive(Debug)]
pub struct Region {
    memory: SharedMemory,
    slots: u32,
}

impl Region {
    /// Maps a file of `bytes`.
    ///
    /// # Errors
    /// It is of another length, or too short for a slot, or cannot be mapped.
    pub fn map(fd: OwnedFd, bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        let slots = slots_of(bytes);
        if slots == 0 {
            let why = format!("{bytes} bytes have no room for a slot");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(Self { memory: SharedMemory::of_file(fd, len)?, slots })
    }

    /// Head of the region.
    #[must_use]
    pub fn head(&self) -> RegionHead {
        let mut head = RegionHead::new_zeroed();
        let bytes = head.as_mut_bytes();
        // SAFETY: the mapping is longer than a head, and lives as long as `self`; the copy is ours
        // alone. Others may write the mapping meanwhile: any bytes will do.
        unsafe {
            std::ptr::copy_nonoverlapping(self.memory.as_ptr(), bytes.as_mut_ptr(), bytes.len());
        }
        head
    }

    /// Makes it one with this id.
    fn begin(&self, id: [u8; 16]) {
        let magic = REGION_MAGIC.to_le_bytes();
        let head = head_of(self.slots, id, 0);
        let bytes = head.as_bytes();
        // SAFETY: the mapping is longer than a head, and lives as long as `self`; the source is
        // ours alone. The magic number is written when all else is there.
        unsafe {
            let to = self.memory.as_ptr();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            fence(Ordering::SeqCst);
            std::ptr::copy_nonoverlapping(magic.as_ptr(), to, magic.len());
        }
    }

    /// Writes a word of a slot.
    pub(crate) fn write_word(&self, slot: u32, off: usize, value: u64) {
        self.u64_at(slot, off).store(value, Ordering::Release);
    }

    fn u64_at(&self, slot: u32, off: usize) -> &AtomicU64 {
        // SAFETY: inside of the mapping, which `self` keeps, and aligned: mappings and slots begin
        // at pages, and the offsets are multiples of 64. All processes of the host access it
        // atomically; what the guest does there can only change its value.
        unsafe { AtomicU64::from_ptr(self.word(slot, off).cast()) }
    }

    /// A word of a slot that is there, at one of the offsets of [`Direction`].
    fn word(&self, slot: u32, off: usize) -> *mut u8 {
        debug_assert!(slot < self.slots && off < SLOT_BYTES);
        self.memory.as_ptr().wrapping_add(SLOTS_OFF + slot as usize * SLOT_BYTES + off)
    }
}

/// One direction of a slot, as either side sees it.
#[derive(Debug)]
struct HalfRing {
    region: Arc<Region>,
    slot: u32,
    at: Direction,
}

impl HalfRing {
    fn u64_at(&self, off: usize) -> &AtomicU64 {
        self.region.u64_at(self.slot, off)
    }

    /// The flag behind a word.
    fn flag_at(&self, off: usize) -> &AtomicU32 {
        // SAFETY: as of `Region::u64_at`; it is 8 bytes behind such a word.
        unsafe { AtomicU32::from_ptr(self.region.word(self.slot, off + 8).cast()) }
    }

    /// Address of a byte of the stream, and the number of bytes from it up to the ring's end.
    fn data_at(&self, index: u64) -> (*mut u8, usize) {
        let at = (index % DATA_BYTES as u64) as usize;
        (self.region.word(self.slot, self.at.data_off + at), DATA_BYTES - at)
    }

    /// Takes the other side's wish for a bell away. True: there was one.
    fn take_flag(&self, off: usize) -> bool {
        fence(Ordering::SeqCst);
        let flag = self.flag_at(off);
        flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
    }

    fn set_flag(&self, off: usize, on: bool) {
        self.flag_at(off).store(on.into(), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

fn filled(tail: u64, head: u64) -> Result<usize, Damaged> {
    let bytes = tail.wrapping_sub(head);
    if bytes > DATA_BYTES as u64 { Err(Damaged { bytes }) } else { Ok(bytes as usize) }
}

/// The end of a direction that writes.
#[derive(Debug)]
pub struct Writer {
    half: HalfRing,
    tail: u64,
}

impl Writer {
    /// Bytes for which there is room.
    fn room(&self) -> Result<usize, Damaged> {
        let head = self.half.u64_at(self.half.at.head_off).load(Ordering::Acquire);
        Ok(DATA_BYTES - filled(self.tail, head)?)
    }

    /// Writes what there is room for: how many bytes.
    ///
    /// # Errors
    /// The reader says that it read what was never written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Damaged> {
        let len = self.room()?.min(bytes.len());
        let (to, straight) = self.half.data_at(self.tail);
        let (first, second) = bytes[..len].split_at(len.min(straight));
        let (begin, _) = self.half.data_at(0);
        // SAFETY: `to` has room for `straight` bytes, and `begin` for all of the ring; `len` is no
        // more than that. The source is not part of the mapping.
        unsafe {
            std::ptr::copy_nonoverlapping(first.as_ptr(), to, first.len());
            std::ptr::copy_nonoverlapping(second.as_ptr(), begin, second.len());
        }
        self.tail = self.tail.wrapping_add(len as u64);
        self.half.u64_at(self.half.at.tail_off).store(self.tail, Ordering::Release);
        Ok(len)
    }

    /// After writing: whether the reader is to be rung.
    #[must_use]
    pub fn must_ring(&self) -> bool {
        self.half.take_flag(self.half.at.head_off)
    }

    /// Asks to be rung when there is room. False: there is some.
    ///
    /// # Errors
    /// See [`Writer::write`].
    pub fn wait(&self) -> Result<bool, Damaged> {
        self.half.set_flag(self.half.at.tail_off, true);
        let is_full = self.room()? == 0;
        if !is_full {
            self.half.set_flag(self.half.at.tail_off, false);
        }
        Ok(is_full)
    }
}

/// The end of a direction that reads.
#[derive(Debug)]
pub struct Reader {
    half: HalfRing,
    head: u64,
}

impl Reader {
    fn there(&self) -> Result<usize, Damaged> {
        filled(self.half.u64_at(self.half.at.tail_off).load(Ordering::Acquire), self.head)
    }

    /// Whether there is something to read, or a writer that lies: reading tells.
    #[must_use]
    pub fn has_some(&self) -> bool {
        self.there() != Ok(0)
    }

    /// Appends what there is, at most so many bytes.
    ///
    /// # Errors
    /// The writer says that it wrote more than there is room for.
    pub fn read(&mut self, into: &mut Vec<u8>, most: usize) -> Result<usize, Damaged> {
        let len = self.there()?.min(most);
        let (from, straight) = self.half.data_at(self.head);
        let (begin, _) = self.half.data_at(0);
        into.reserve(len);
        let first = len.min(straight);
        // SAFETY: `from` is followed by `straight` bytes of the ring, `begin` by all of it, and
        // `into` has room for `len` more, which are all written before they count. Others may write
        // the ring meanwhile: any bytes do.
        unsafe {
            let to = into.as_mut_ptr().add(into.len());
            std::ptr::copy_nonoverlapping(from, to, first);
            std::ptr::copy_nonoverlapping(begin, to.add(first), len - first);
            into.set_len(into.len() + len);
        }
        self.head = self.head.wrapping_add(len as u64);
        self.half.u64_at(self.half.at.head_off).store(self.head, Ordering::Release);
        Ok(len)
    }

    /// After reading: whether the writer is to be rung.
    #[must_use]
    pub fn must_ring(&self) -> bool {
        self.half.take_flag(self.half.at.tail_off)
    }

    /// Asks to be rung when there is something. False: there is.
    #[must_use]
    pub fn sleep(&self) -> bool {
        self.half.set_flag(self.half.at.head_off, true);
        let may = !self.has_some();
        if !may {
            self.wake();
        }
        may
    }

    /// Needs no bell any more.
    pub fn wake(&self) {
        self.half.set_flag(self.half.at.head_off, false);
    }
}

/// Both directions of a slot, as one side sees it.
#[derive(Debug)]
pub struct Ring {
    /// Writer to the other side.
    pub writer: Writer,
    /// Reader from the other side.
    pub reader: Reader,
    /// Stamp of the connection that has the slot.
    pub stamp: u64,
    /// Given back with it.
    _place: Option<Place>,
}

impl Ring {
    fn new(
        region: &Arc<Region>,
        slot: u32,
        (out, back): (Direction, Direction),
        stamp: u64,
    ) -> Self {
        let half = |at| HalfRing { region: Arc::clone(region), slot, at };
        Self {
            writer: Writer { half: half(out), tail: 0 },
            reader: Reader { half: half(back), head: 0 },
            stamp,
            _place: None,
        }
    }

    /// Attaches a client to a slot that it was just given; none: there is no such slot.
    #[must_use]
    pub fn of_client(region: &Arc<Region>, slot: u32, stamp: u64) -> Option<Self> {
        (slot < region.slots).then(|| Self::new(region, slot, (TO_HOST, TO_CLIENT), stamp))
    }

    /// Whether the slot is still this connection's, as a client sees it.
    #[must_use]
    pub fn is_mine(&self) -> bool {
        self.reader.half.u64_at(STAMP_OFF).load(Ordering::Acquire) == self.stamp
    }
}

#[derive(Debug)]
struct Place {
    slots: Arc<Slots>,
    slot: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        // Its stamp stays, and what was said last can be read, for as long as nobody else has it.
        self.slots.free().push_back(self.slot);
    }
}

/// The slots of a region, as the host gives them away.
#[derive(Debug)]
pub struct Slots {
    region: Arc<Region>,
    id: [u8; 16],
    /// The one that is free for the longest time is the next: a client that does not know yet that
    /// its connection has ended may still write into its slot.
    free: Mutex<VecDeque<u32>>,
}

impl Slots {
    /// Begins with all slots of a region, which gets a new, random id.
    #[must_use]
    pub fn begin(region: Region) -> Arc<Self> {
        let half = || u128::from(OsRandom.next_u64());
        let id = (half() << 64 | half()).to_ne_bytes();
        (0..region.slots).for_each(|slot| region.write_word(slot, STAMP_OFF, 0));
        region.begin(id);
        let mut free: VecDeque<u32> = (0..region.slots).collect();
        // Those that another process gave away last may still be written into, see above.
        free.rotate_left(usize::from(id[0]) % free.len());
        Arc::new(Self { region: Arc::new(region), id, free: Mutex::new(free) })
    }

    fn free(&self) -> std::sync::MutexGuard<'_, VecDeque<u32>> {
        lock(&self.free)
    }

    /// Whether somebody who says this has the region before it.
    #[must_use]
    pub fn is(&self, id: &[u8; 16]) -> bool {
        self.id == *id
    }

    /// A slot with all words zero but its stamp, and its number; none: all are taken.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Option<(u32, Ring)> {
        let slot = self.free().pop_front()?;
        let stamp = OsRandom.next_u64() | 1;
        // A client that does not know of its end writes nothing from here on.
        self.region.write_word(slot, STAMP_OFF, 0);
        fence(Ordering::SeqCst);
        let mut ring = Ring::new(&self.region, slot, (TO_CLIENT, TO_HOST), stamp);
        for half in [&ring.writer.half, &ring.reader.half] {
            for off in [half.at.tail_off, half.at.head_off] {
                half.u64_at(off).store(0, Ordering::Relaxed);
                half.set_flag(off, false);
            }
        }
        self.region.write_word(slot, STAMP_OFF, stamp);
        ring._place = Some(Place { slots: Arc::clone(self), slot });
        Some((slot, ring))
    }
}

#[cfg(test)]
mod tests;
