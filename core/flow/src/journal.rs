//! Records of shifted connections, for the daemon that comes after one that was killed.
//!
//! They are in a file that is mapped, so that noting one is a few stores, and the kernel has them
//! whatever becomes of the process.
//!
//! A connection has the place in the file that it has in the table. Each place holds two records
//! with running numbers; the next one is written over the older, its number last. So a kill in the
//! middle of it leaves the other. Not made for a crash of the host: its VMs are gone then.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use base::shm::SharedMemory;

use crate::shift::Shift;
use crate::types::{FlowKey, MAX_FLOWS};

/// Words of a record: its number, and [`Record`].
const WORDS: usize = 12;

/// First word of the file: `MLRFLOW` and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"MLRFLOW\x01");

/// Words in front of the first record, for its alignment.
const HEAD_WORDS: usize = 8;

/// Numbers of a connection that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub key: FlowKey,
    pub macs: [u8; 12],
    pub shift: Shift,
    /// A twin had it: what that one sent is lost with it.
    pub has_twin: bool,
    /// Both sides have ended it: stragglers may come, and soon nothing.
    pub is_over: bool,
    pub send_base: Option<u32>,
    pub receive_base: Option<u32>,
    pub timestamp: Option<u32>,
    pub sent_end: u32,
    pub guest_from: u32,
    pub guest_ack: u32,
    pub guest_scale: u8,
}

/// State of a connection that the next daemon will find in the journal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct JournalMark {
    pub sent_end: u32,
    pub guest_ack: u32,
    pub is_over: bool,
}

/// Bits of a record's word of flags.
mod flag {
    pub const V6: u64 = 1;
    pub const HAS_TWIN: u64 = 2;
    pub const HAS_BASE: u64 = 4;
    pub const HAS_TIMESTAMP: u64 = 8;
    pub const IS_OVER: u64 = 1 << 17;
    /// First bit of the guest's window scale.
    pub const SCALE: u32 = 8;
    pub const HAS_RECEIVE_BASE: u64 = 1 << 16;
    /// First bit of the number of the peer's first byte.
    pub const RECEIVE_BASE: u32 = 32;
}

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn halves(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

fn address_words(address: IpAddr) -> [u64; 2] {
    let v6 = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let bits = v6.to_bits();
    [(bits >> 64) as u64, bits as u64]
}

fn address(words: [u64; 2], is_v6: bool) -> Option<IpAddr> {
    let v6 = Ipv6Addr::from_bits(u128::from(words[0]) << 64 | u128::from(words[1]));
    if is_v6 { Some(v6.into()) } else { v6.to_ipv4_mapped().map(IpAddr::V4) }
}

impl Record {
    fn words(&self) -> [u64; WORDS - 1] {
        let FlowKey { local, remote, local_port, remote_port } = self.key;
        let (local, remote) = (address_words(local), address_words(remote));
        let bit = |is, bit| if is { bit } else { 0 };
        let flags = bit(self.key.local.is_ipv6(), flag::V6)
            | bit(self.has_twin, flag::HAS_TWIN)
            | bit(self.send_base.is_some(), flag::HAS_BASE)
            | bit(self.timestamp.is_some(), flag::HAS_TIMESTAMP)
            | bit(self.is_over, flag::IS_OVER)
            | u64::from(self.guest_scale) << flag::SCALE
            | bit(self.receive_base.is_some(), flag::HAS_RECEIVE_BASE)
            | u64::from(self.receive_base.unwrap_or(0)) << flag::RECEIVE_BASE;
        let [a, b, c, d, e, f, g, h, i, j, k, l] = self.macs;
        [
            local[0],
            local[1],
            remote[0],
            remote[1],
            u64::from_be_bytes([a, b, c, d, e, f, g, h]),
            pair(u32::from_be_bytes([i, j, k, l]), pair16(local_port, remote_port)),
            pair(self.shift.send, self.shift.receive),
            pair(self.shift.timestamp, self.guest_from),
            pair(self.send_base.unwrap_or(0), self.timestamp.unwrap_or(0)),
            pair(self.sent_end, self.guest_ack),
            flags,
        ]
    }

    /// None when these words were not written by [`Record::words`].
    fn from_words(words: &[u64; WORDS - 1]) -> Option<Self> {
        let [l0, l1, r0, r1, mac0, mac1, shifts, clock, bases, ends, flags] = *words;
        let has = |bit| flags & bit != 0;
        let ((mac1, ports), (send, receive)) = (halves(mac1), halves(shifts));
        let ((timestamp, guest_from), (base, last)) = (halves(clock), halves(bases));
        let (sent_end, guest_ack) = halves(ends);
        let mut macs = [0; 12];
        macs[..8].copy_from_slice(&mac0.to_be_bytes());
        macs[8..].copy_from_slice(&mac1.to_be_bytes());
        Some(Self {
            key: FlowKey {
                local: address([l0, l1], has(flag::V6))?,
                remote: address([r0, r1], has(flag::V6))?,
                local_port: (ports >> 16) as u16,
                remote_port: ports as u16,
            },
            macs,
            shift: Shift { send, receive, timestamp },
            has_twin: has(flag::HAS_TWIN),
            is_over: has(flag::IS_OVER),
            send_base: has(flag::HAS_BASE).then_some(base),
            receive_base: has(flag::HAS_RECEIVE_BASE)
                .then_some((flags >> flag::RECEIVE_BASE) as u32),
            timestamp: has(flag::HAS_TIMESTAMP).then_some(last),
            sent_end,
            guest_from,
            guest_ack,
            guest_scale: (flags >> flag::SCALE) as u8,
        })
    }
}

fn pair16(high: u16, low: u16) -> u32 {
    u32::from(high) << 16 | u32::from(low)
}

/// Records of a port's connections, in a mapped file.
#[derive(Debug)]
pub struct Journal {
    memory: SharedMemory,
    /// Number of the last record.
    number: u64,
}

impl Journal {
    /// Opens the file, or makes it; one that makes no sense is made anew. Its folder is the
    /// daemon's own.
    pub fn open(path: &Path) -> io::Result<Self> {
        let words = HEAD_WORDS + MAX_FLOWS * 2 * WORDS;
        let open = || SharedMemory::in_file(path, words * size_of::<u64>());
        let mut journal = Self { memory: open()?, number: 0 };
        let is_fresh = journal.words()[0].load(Ordering::Relaxed) == 0;
        if !is_fresh && journal.words()[0].load(Ordering::Relaxed) != MAGIC {
            std::fs::remove_file(path)?;
            journal.memory = open()?;
        }
        journal.words()[0].store(MAGIC, Ordering::Relaxed);
        let numbers = journal.words()[HEAD_WORDS..].iter().step_by(WORDS);
        journal.number = numbers.map(|n| n.load(Ordering::Relaxed)).max().unwrap_or(0);
        Ok(journal)
    }

    fn words(&self) -> &[AtomicU64] {
        let (start, len) = (self.memory.as_ptr(), self.memory.len_bytes() / size_of::<u64>());
        // SAFETY: the mapping is of pages, so aligned, and lives as long as `self`. It is only used
        // as atomics here, and a record that another process wrote is checked word by word.
        unsafe { std::slice::from_raw_parts(start.cast::<AtomicU64>(), len) }
    }

    /// Both records of a place.
    fn place(&self, slot: u32) -> [&[AtomicU64]; 2] {
        let first = HEAD_WORDS + slot as usize * 2 * WORDS;
        let words = &self.words()[first..first + 2 * WORDS];
        [&words[..WORDS], &words[WORDS..]]
    }

    /// Notes a connection.
    pub(crate) fn put(&mut self, slot: u32, record: &Record) {
        self.number += 1;
        let [first, second] = self.place(slot);
        let number = |half: &[AtomicU64]| half[0].load(Ordering::Relaxed);
        let older = if number(first) <= number(second) { first } else { second };
        older[0].store(0, Ordering::Release);
        for (word, value) in older[1..].iter().zip(record.words()) {
            word.store(value, Ordering::Release);
        }
        older[0].store(self.number, Ordering::Release);
    }

    /// Forgets what is in a place.
    pub(crate) fn clear(&mut self, slot: u32) {
        // The older one first: it must not come back.
        let [first, second] = self.place(slot);
        let first_is_older = first[0].load(Ordering::Relaxed) <= second[0].load(Ordering::Relaxed);
        let order = if first_is_older { [first, second] } else { [second, first] };
        order.iter().for_each(|half| half[0].store(0, Ordering::Release));
    }

    /// All records with their places.
    pub(crate) fn records(&self) -> Vec<(u32, Record)> {
        let of_slot = |slot| {
            let newer =
                self.place(slot).into_iter().max_by_key(|half| half[0].load(Ordering::Acquire))?;
            if newer[0].load(Ordering::Acquire) == 0 {
                return None;
            }
            let mut words = [0; WORDS - 1];
            for (to, from) in words.iter_mut().zip(&newer[1..]) {
                *to = from.load(Ordering::Acquire);
            }
            Record::from_words(&words).map(|record| (slot, record))
        };
        (0..MAX_FLOWS as u32).filter_map(of_slot).collect()
    }
}

#[cfg(test)]
mod tests;
