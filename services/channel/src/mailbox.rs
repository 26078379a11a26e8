//! Mailbox: a sealed memory file that the host and one member have.
//!
//! Both sides may write anywhere at any time, so the host reads nothing of its own half back: it
//! keeps what it wrote, and writes all of it again with each change. `table_seq` is odd meanwhile;
//! a reader that sees it odd, or another number afterwards, reads again. The member's half is
//! copied once, word by word.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use base::shm::SharedMemory;
use guest_abi::channel::{GUEST_OFF, Guest, HOST_MAGIC, MAILBOX_LEN};
use rustix::fs::SealFlags;
use zerocopy::{FromBytes, FromZeros};

/// Bytes of a word, which is read and written at once.
const WORD: usize = size_of::<u64>();
const WORDS: usize = MAILBOX_LEN / WORD;
/// Words of the host's half.
pub(crate) const HOST_WORDS: usize = GUEST_OFF / WORD;
const GUEST_WORDS: usize = size_of::<Guest>() / WORD;

// Indices of the host's words that are not written with the others: see `guest_abi::channel::Host`.
const MAGIC: usize = 0;
const HEARTBEAT: usize = std::mem::offset_of!(guest_abi::channel::Host, heartbeat) / WORD;
/// Word with `table_seq` in the lower half and `regions_len` in the upper one.
const SEQ: usize = std::mem::offset_of!(guest_abi::channel::Host, table_seq) / WORD;
const SEQ_MASK: u64 = 0xffff_ffff;

/// Words of the host's half.
pub(crate) type HostHalf = [u64; HOST_WORDS];

/// Mailbox, mapped.
pub(crate) struct Mailbox {
    memory: Arc<SharedMemory>,
    /// Half that was published last; none before the first time.
    last: Option<Box<HostHalf>>,
    seq: u32,
    heartbeat: u64,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mailbox").field("seq", &self.seq).finish_non_exhaustive()
    }
}

impl Mailbox {
    /// Makes a mailbox of zeroes. Its file can be neither shortened nor lengthened, so no access
    /// faults.
    pub fn new() -> io::Result<Self> {
        let memory = SharedMemory::new("millrace-mailbox", MAILBOX_LEN)?;
        rustix::fs::fcntl_add_seals(&memory, SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self::over(memory))
    }

    /// Makes a mailbox of `memory`, which has [`MAILBOX_LEN`] bytes.
    fn over(memory: SharedMemory) -> Self {
        Self { memory: Arc::new(memory), last: None, seq: 0, heartbeat: 0 }
    }

    /// File of the mailbox, for the member.
    pub fn file(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has WORDS words, is page-aligned, and lives as long as `self`; the
        // file is sealed against shrinking. Everyone in this process accesses it through atomics.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), WORDS) }
    }

    /// Writes the host's half, if it says anything new. Its magic number, heartbeat and `table_seq`
    /// are the mailbox's own. True when it was written.
    pub fn publish(&mut self, half: &HostHalf) -> bool {
        if self.last.as_deref() == Some(half) {
            return false;
        }
        let set = |index: usize, value: u64, order| {
            self.words()[index].store(value.to_le(), order);
        };
        let upper = half[SEQ] & !SEQ_MASK;
        let odd = self.seq.wrapping_add(1);
        set(SEQ, upper | u64::from(odd), Ordering::Relaxed);
        // No word of the half before the odd number, none after the even one.
        fence(Ordering::Release);
        for (index, value) in half.iter().enumerate() {
            if ![MAGIC, HEARTBEAT, SEQ].contains(&index) {
                set(index, *value, Ordering::Relaxed);
            }
        }
        let even = odd.wrapping_add(1);
        set(SEQ, upper | u64::from(even), Ordering::Release);
        set(MAGIC, HOST_MAGIC, Ordering::Release);
        self.seq = even;
        self.last = Some(Box::new(*half));
        true
    }

    /// Counts the host's heartbeat up.
    pub fn beat(&mut self) {
        self.heartbeat += 1;
        self.words()[HEARTBEAT].store(self.heartbeat.to_le(), Ordering::Release);
    }

    /// Copies the member's half, unchecked.
    pub fn guest(&self) -> Guest {
        let half = &self.words()[HOST_WORDS..][..GUEST_WORDS];
        let mut bytes = [0; GUEST_WORDS * WORD];
        for (index, (word, to)) in half.iter().zip(bytes.chunks_exact_mut(WORD)).enumerate() {
            // The magic number is written last and read first.
            let order = if index == 0 { Ordering::Acquire } else { Ordering::Relaxed };
            to.copy_from_slice(&word.load(order).to_ne_bytes());
        }
        // The lengths are the same: a half of zeroes cannot come of it.
        Guest::read_from_bytes(&bytes).unwrap_or_else(|_| Guest::new_zeroed())
    }

    /// Clears the member's half: the guest that wrote it runs no more.
    pub fn clear_guest(&mut self) {
        for word in &self.words()[HOST_WORDS..] {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// Member's side of a mailbox, for tests.
#[cfg(any(test, feature = "testing"))]
#[allow(dead_code, clippy::unwrap_used)]
pub(crate) mod testing {
    use std::os::fd::OwnedFd;

    use zerocopy::IntoBytes;

    use super::*;

    /// Mailbox as its member has it.
    pub(crate) struct MemberSide(Mailbox);

    impl MemberSide {
        pub fn new(fd: OwnedFd) -> Self {
            Self(Mailbox::over(SharedMemory::from_fd(fd).unwrap()))
        }

        pub fn word(&self, off: usize) -> u64 {
            u64::from_le(self.0.words()[off / WORD].load(Ordering::Acquire))
        }

        /// Copies the host's half as a careful reader does.
        pub fn host_bytes(&self) -> Vec<u8> {
            loop {
                let before = self.word(SEQ * WORD) & SEQ_MASK;
                let bytes: Vec<u8> = self.0.words()[..HOST_WORDS]
                    .iter()
                    .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
                    .collect();
                fence(Ordering::Acquire);
                if before.is_multiple_of(2) && before == self.word(SEQ * WORD) & SEQ_MASK {
                    return bytes;
                }
                std::hint::spin_loop();
            }
        }

        pub fn host(&self) -> guest_abi::channel::Host {
            FromBytes::read_from_prefix(&self.host_bytes()).unwrap().0
        }

        pub fn member(&self, index: usize) -> guest_abi::channel::Member {
            let off =
                guest_abi::channel::TABLE_OFF + index * size_of::<guest_abi::channel::Member>();
            FromBytes::read_from_prefix(&self.host_bytes()[off..]).unwrap().0
        }

        /// Writes the member's half, its magic number last.
        pub fn enqueue(&self, guest: &Guest) {
            let words = guest.as_bytes().chunks_exact(WORD).enumerate().rev();
            for (index, bytes) in words {
                let value = u64::from_ne_bytes(bytes.try_into().unwrap());
                self.0.words()[HOST_WORDS + index].store(value, Ordering::Release);
            }
        }

        /// Writes any word.
        pub fn scribble(&self, off: usize, value: u64) {
            self.0.words()[off / WORD].store(value, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests;
