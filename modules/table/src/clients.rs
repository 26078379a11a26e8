//! Clients: what they wait for, and what they have done.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use guest_abi::table::MAX_REMEMBERED;

use crate::deed::Note;
use crate::wire::{Head, Range};

/// A request that waits for its turn.
#[derive(Debug)]
pub struct Queued {
    /// Its number.
    pub seq: u64,
    /// `guest_abi::module_call::event_flag`.
    pub flags: u16,
    /// What it says.
    pub body: Vec<u8>,
    /// The client gave up.
    pub cancelled: bool,
}

/// Where a scan goes on.
#[derive(Debug)]
pub struct Cursor {
    /// What is left of its range.
    pub range: Range,
    /// Where its answer begins.
    pub answer_at: usize,
    /// Rows that it has.
    pub rows: u32,
    /// Bytes of keys and values that it has.
    pub bytes: u64,
    /// Entries that a filter was tried on.
    pub examined: u32,
}

/// Where a reply goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct To {
    /// The host's number for the client.
    pub client: u32,
    /// Which client with that number.
    pub epoch: u64,
    /// The request.
    pub seq: u64,
    /// It waits until all is durable.
    pub durable: bool,
}

/// A request that is executed.
#[derive(Debug)]
pub struct Running {
    /// Where its reply goes.
    pub to: To,
    /// The batch.
    pub head: Head,
    /// The next op's place in the body.
    pub at: usize,
    /// The next op.
    pub op: u32,
    /// The reply so far.
    pub out: Vec<u8>,
    /// Answers in it.
    pub answers: u32,
    /// The transaction.
    pub tx: u64,
    /// Until when the op waits.
    pub deadline_ms: Option<u64>,
    /// That moment is over.
    pub timed_out: bool,
    /// Its transaction's snapshot is the right one.
    pub begun: bool,
    /// The client gave up.
    pub cancelled: bool,
    /// Of the op, if it is a scan.
    pub cursor: Option<Cursor>,
    /// Who, for the log.
    pub note: Note,
    /// What it says; empty while it is executed.
    pub body: Vec<u8>,
}

/// A client.
#[derive(Debug)]
pub struct Client {
    /// Its own id.
    pub id: [u8; 16],
    /// Which client with the host's number.
    pub epoch: u64,
    /// Its transaction: its own number for it, and the store's.
    pub tx: Option<(u64, u64)>,
    /// What comes next.
    pub queue: VecDeque<Queued>,
    /// What was begun and waits.
    pub active: Option<Box<Running>>,
    /// A commit waits for the log.
    pub busy: bool,
    /// Its turn comes.
    pub is_ready: bool,
}

/// Which of the last 64 requests of a client were done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Done {
    /// The highest.
    pub highest: u64,
    /// Bit n: `highest - n`.
    pub mask: u64,
    /// When the last was; a higher number is later.
    pub stamp: u64,
}

impl Done {
    /// One more.
    pub fn add(&mut self, seq: u64) {
        if seq > self.highest {
            let shift = u32::try_from(seq - self.highest).unwrap_or(u32::MAX);
            self.mask = self.mask.checked_shl(shift).unwrap_or(0) | 1;
            self.highest = seq;
        } else if let Ok(bit @ 0..64) = u32::try_from(self.highest - seq) {
            self.mask |= 1 << bit;
        }
    }

    /// Whether it was done.
    pub fn has(&self, seq: u64) -> bool {
        let bit = self.highest.checked_sub(seq).and_then(|bit| u32::try_from(bit).ok());
        bit.is_some_and(|bit| bit < 64 && self.mask >> bit & 1 == 1)
    }
}

/// The clients that did something last.
#[derive(Debug, Default)]
pub struct Remembered {
    /// By their own id.
    pub clients: BTreeMap<[u8; 16], Done>,
    stamp: u64,
}

/// When so many more than necessary are known, the oldest are forgotten.
const SPARE: usize = 256;

impl Remembered {
    /// It was done.
    pub fn add(&mut self, note: Note) {
        self.stamp += 1;
        let done = self.clients.entry(note.client).or_default();
        done.add(note.seq);
        done.stamp = self.stamp;
        self.trim();
    }

    /// Puts back what a checkpoint knows.
    pub fn put(&mut self, client: [u8; 16], done: Done) {
        self.stamp = self.stamp.max(done.stamp);
        self.clients.insert(client, done);
        self.trim();
    }

    fn trim(&mut self) {
        if self.clients.len() <= MAX_REMEMBERED + SPARE {
            return;
        }
        let mut stamps: Vec<u64> = self.clients.values().map(|d| d.stamp).collect();
        stamps.sort_unstable();
        let from = stamps.get(stamps.len() - MAX_REMEMBERED).copied().unwrap_or(0);
        self.clients.retain(|_, d| d.stamp >= from);
    }

    /// Whether it was done.
    pub fn has(&self, note: Note) -> bool {
        self.clients.get(&note.client).is_some_and(|done| done.has(note.seq))
    }
}
