//! Huge pages for the memory of VMs.
//!
//! VMMs share a VM's memory as a memfd, and Linux gives a memfd pages of 4 KiB unless the host's
//! administrator has said otherwise (`shmem_enabled`). Memory that a VMM keeps to itself has huge
//! pages on the same host. So a VM would pay for sharing: a direct read pins 512 pages instead of
//! one, and whoever copies walks through longer page tables.
//!
//! `MADV_COLLAPSE` (Linux 6.1) moves the pages of a block of 2 MiB into a huge page, for everybody
//! who maps them, whatever the host's settings are. A thread looks for blocks of which at least
//! half is there, and has this done, by another process ([`block_mover`](crate::block_mover)). It
//! never does it twice for a block: what a balloon takes out later stays out. Files that have not
//! grown are not looked at.
//!
//! Moving a block takes one millisecond, or seven where a guest is at work in it: each page is
//! taken from each CPU that has it. A guest that touches the block meanwhile waits so long.
//! The process has the usual priority for that reason: others wait for what it has locked.
//!
//! # Limits
//! - A block grows by half at most ([`MIN_PRESENT`]), and is charged to our control group. Memory
//!   that a VMM does not share grows by whole blocks at the first touch.
//! - 1/10 of a CPU ([`DUTY`]): a VM of 64 GiB is through within the hour.
//! - A process that has gone is started again within a minute ([`RETRY`]).
//! - Blocks with pages that are pinned (registered memory, a device that was passed through) stay
//!   as they are, and so do blocks for which the host has no huge page. Both are tried again, once
//!   a minute at most ([`RETRY`]).
//! - A VMM maps huge pages as such only at an address that is as far from a multiple of 2 MiB as
//!   the file's offset is. QEMU sees to that for files (`align=2M`), not for memfds.

use std::io;
use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use base::cpu::thread_time;

use crate::block_mover::BlockMover;
use crate::mapping::{BLOCK_BYTES, Mapping};

/// Pages of a block.
const BLOCK_PAGES: usize = BLOCK_BYTES / 4096;

/// Least pages of a block that are there before it is moved: the others are memory that the guest
/// has not asked for.
const MIN_PRESENT: usize = BLOCK_PAGES / 2;

/// Blocks of a mapping that are looked at, and moved, at a time. One call for several is cheaper:
/// each has all CPUs empty their lists of pages.
const STEP_BLOCKS: usize = 32;

/// Share of a CPU that may be used: one of so many parts.
const DUTY: u32 = 10;

/// Pause after a pass that moved something: guests that boot take memory all the time.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Pause after many passes that moved nothing. A pass over files that have not grown asks each of
/// them for its size.
const MAX_PAUSE: Duration = Duration::from_secs(8);

/// Pause until blocks that could not be moved are tried again, and a process that has gone is
/// started.
const RETRY: Duration = Duration::from_secs(60);

/// Way of new mappings to the thread, once there is one.
static MAPPINGS: OnceLock<Sender<Weak<Mapping>>> = OnceLock::new();

/// Starts the thread, for mappings that are made from now on. A second call does nothing.
///
/// # Errors
/// The thread cannot be started.
pub fn start(mover: BlockMover) -> io::Result<()> {
    let (sender, mappings) = channel();
    if MAPPINGS.get().is_none() {
        std::thread::Builder::new()
            .name("huge-pages".into())
            .spawn(move || run(mover, &mappings))?;
        // Of two at the same time one thread ends at once: its sender is dropped.
        let _ = MAPPINGS.set(sender);
    }
    Ok(())
}

/// Has a mapping looked after, if there is a thread.
pub(crate) fn watch(mapping: &Arc<Mapping>) {
    if let Some(mappings) = MAPPINGS.get() {
        // It fails only if the thread has panicked: memory stays as it is then.
        let _ = mappings.send(Arc::downgrade(mapping));
    }
}

fn run(mover: BlockMover, mappings: &Receiver<Weak<Mapping>>) {
    let mut all = Watched::new(mover);
    let mut pause = MIN_PAUSE;
    let mut tried = Instant::now();
    loop {
        let begin = all.spent();
        let wait = match all.step() {
            Step::Done => all.spent().saturating_sub(begin) * (DUTY - 1),
            Step::PassEnded { moved } => {
                pause = if moved { MIN_PAUSE } else { (pause * 2).min(MAX_PAUSE) };
                pause
            }
        };
        let until = Instant::now() + wait;
        loop {
            match mappings.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(mapping) => {
                    all.add(mapping);
                    pause = MIN_PAUSE;
                }
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        if tried.elapsed() >= RETRY {
            all.try_again();
            tried = Instant::now();
        }
    }
}

/// Outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// More is to be looked at.
    Done,
    /// All mappings were looked at from first to last block; whether any block was moved.
    PassEnded { moved: bool },
}

/// All mappings that are looked after, in turns.
struct Watched {
    mover: BlockMover,
    mappings: Vec<Blocks>,
    /// Number of the mapping whose turn it is.
    next: usize,
    /// Whether this pass has moved a block.
    moved: bool,
}

impl Watched {
    fn new(mover: BlockMover) -> Self {
        Self { mover, mappings: Vec::new(), next: 0, moved: false }
    }

    /// CPU time so far, of this thread and of the moves.
    fn spent(&self) -> Duration {
        thread_time() + self.mover.spent()
    }

    fn add(&mut self, mapping: Weak<Mapping>) {
        self.mappings.retain(|blocks| blocks.mapping.strong_count() > 0);
        self.mappings.push(Blocks {
            mapping,
            settled: Vec::new(),
            next: 0,
            seen: 0,
            failed: false,
        });
    }

    /// Has blocks that could not be moved looked at in the next pass, by a process that is there.
    fn try_again(&mut self) {
        self.mover.revive();
        let failed = self.mappings.iter_mut().filter(|blocks| blocks.failed);
        failed.for_each(|blocks| blocks.seen = 0);
    }

    /// Looks at some blocks of one mapping.
    fn step(&mut self) -> Step {
        let count = self.mappings.len();
        for _ in 0..count {
            self.next = (self.next + 1) % count;
            if let Some(moved) = self.mappings[self.next].step(&mut self.mover) {
                self.moved |= moved;
                return Step::Done;
            }
        }
        self.mappings.retain(|blocks| blocks.mapping.strong_count() > 0);
        self.mappings.iter_mut().for_each(Blocks::begin);
        Step::PassEnded { moved: std::mem::take(&mut self.moved) }
    }
}

/// Blocks of a mapping.
struct Blocks {
    mapping: Weak<Mapping>,
    /// Whether a block was moved once, or cannot be.
    settled: Vec<bool>,
    /// Next block of this pass.
    next: usize,
    /// Bytes that the file had at the begin of the pass.
    seen: u64,
    /// Whether a block could not be moved for now.
    failed: bool,
}

impl Blocks {
    /// Begins a pass: at the first block if the file has grown, else behind the last one.
    fn begin(&mut self) {
        let Some(mapping) = self.mapping.upgrade() else { return };
        let bytes = mapping.allocated_bytes();
        self.settled.resize(mapping.blocks(), false);
        if bytes > self.seen {
            self.next = 0;
            self.failed = false;
        }
        self.seen = bytes;
    }

    /// Looks at the next blocks that are not settled; says whether any was moved. None: there are
    /// no more.
    fn step(&mut self, mover: &mut BlockMover) -> Option<bool> {
        let mapping = self.mapping.upgrade()?;
        let rest = self.settled.get(self.next..)?;
        let Some(skipped) = rest.iter().position(|settled| !settled) else {
            self.next = self.settled.len();
            return None;
        };
        let first = self.next + skipped;
        let len = rest[skipped..].iter().take(STEP_BLOCKS).take_while(|settled| !**settled).count();
        self.next = first + len;
        let mut present = [0; STEP_BLOCKS * BLOCK_PAGES];
        let present = &mut present[..len * BLOCK_PAGES];
        if let Err(error) = mapping.present(first, present) {
            self.give_up(&error);
            return None;
        }
        let dense: Vec<bool> = present
            .chunks(BLOCK_PAGES)
            .map(|pages| pages.iter().filter(|page| **page & 1 == 1).count() >= MIN_PRESENT)
            .collect();
        let (mut moved, mut at) = (false, first);
        for run in dense.chunk_by(|a, b| a == b) {
            if run[0] {
                match self.collapse(mover, &mapping, at, run.len()) {
                    ControlFlow::Continue(some) => moved |= some,
                    ControlFlow::Break(some) => return Some(moved || some),
                }
            }
            at += run.len();
        }
        Some(moved)
    }

    /// Has blocks moved; says whether any was. `Break`: no more can be in this pass.
    fn collapse(
        &mut self,
        mover: &mut BlockMover,
        mapping: &Mapping,
        first: usize,
        len: usize,
    ) -> ControlFlow<bool, bool> {
        let mut collapse = |first: usize, len: usize| {
            let done =
                mover.collapse(mapping.file(), mapping.block_offset(first), len * BLOCK_BYTES);
            done.inspect(|()| mapping.note_huge(len))
        };
        if collapse(first, len).is_ok() {
            self.settled[first..first + len].fill(true);
            return ControlFlow::Continue(true);
        }
        // One that cannot be moved is the error of all: ask for each.
        let mut moved = false;
        for block in first..first + len {
            match collapse(block, 1) {
                Ok(()) => {
                    self.settled[block] = true;
                    moved = true;
                }
                // Somebody holds a page of it.
                Err(error) if is_held(&error) => self.failed = true,
                Err(error) => {
                    if is_passing(&error) {
                        self.failed = true;
                        self.next = self.settled.len();
                    } else {
                        self.give_up(&error);
                    }
                    return ControlFlow::Break(moved);
                }
            }
        }
        ControlFlow::Continue(moved)
    }

    /// Looks at the mapping no more: the kernel is too old, or its file has no such pages.
    fn give_up(&mut self, error: &io::Error) {
        tracing::debug!("memory of a VM has no huge pages: {error}");
        self.settled.fill(true);
    }
}

/// Whether a page of the block is in use.
fn is_held(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
}

/// Whether no block can be moved for now: the host has no huge page, or the process has gone.
fn is_passing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOMEM) || error.kind() == io::ErrorKind::UnexpectedEof
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, Ordering};

    use base::shm::SharedMemory;
    use rustix::fs::FallocateFlags;

    use super::*;
    use crate::block_mover;

    /// Blocks of the test's memory.
    const BLOCKS: usize = 8;

    /// Nothing yet, with a thread that moves blocks until it is dropped.
    fn watched() -> Watched {
        served_by(|theirs| block_mover::serve(&theirs).unwrap())
    }

    /// Nothing yet, with a thread for each time that a process is started.
    fn served_by(serve: fn(OwnedFd)) -> Watched {
        let start = move || {
            let (ours, theirs) = block_mover::sockets()?;
            std::thread::spawn(move || serve(theirs));
            Ok(ours)
        };
        Watched::new(BlockMover::new(Box::new(start)))
    }

    fn memory() -> SharedMemory {
        SharedMemory::new("huge", BLOCKS * BLOCK_BYTES).unwrap()
    }

    fn map(file: &SharedMemory) -> Arc<Mapping> {
        Arc::new(Mapping::new(file.as_fd(), 0, (BLOCKS * BLOCK_BYTES) as u64, None).unwrap())
    }

    /// Writes a number at the begin of each of these pages of a block.
    fn touch(file: &SharedMemory, block: usize, pages: usize) {
        for page in 0..pages {
            let at = (block * BLOCK_BYTES + page * 4096) as u64;
            rustix::io::pwrite(file, &(at + 1).to_le_bytes(), at).unwrap();
        }
    }

    /// Compares these pages of a block.
    fn check(file: &SharedMemory, block: usize, pages: usize) {
        for page in 0..pages {
            let at = (block * BLOCK_BYTES + page * 4096) as u64;
            let mut found = [0; 8];
            rustix::io::pread(file, &mut found, at).unwrap();
            assert_eq!(u64::from_le_bytes(found), at + 1);
        }
    }

    /// Pages that the file has in a block.
    fn resident(mapping: &Mapping, block: usize) -> usize {
        let mut present = [0; BLOCK_PAGES];
        mapping.present(block, &mut present).unwrap();
        present.iter().filter(|page| **page & 1 == 1).count()
    }

    /// Passes until one moves nothing. A huge page may be lacking for a moment.
    fn pass(all: &mut Watched) {
        let mut quiet = 0;
        while quiet < 3 {
            match all.step() {
                Step::PassEnded { moved: false } => quiet += 1,
                Step::PassEnded { moved: true } => quiet = 0,
                Step::Done => {}
            }
        }
    }

    #[test]
    fn blocks_that_are_half_there_become_huge_pages_and_keep_their_bytes() {
        let file = memory();
        let mapping = map(&file);
        let present =
            [BLOCK_PAGES, BLOCK_PAGES, 1, MIN_PRESENT, MIN_PRESENT - 1, 0, 0, BLOCK_PAGES];
        present.iter().enumerate().for_each(|(block, pages)| touch(&file, block, *pages));
        let mut all = watched();
        all.add(Arc::downgrade(&mapping));
        pass(&mut all);
        assert_eq!(mapping.huge_bytes(), 4 * BLOCK_BYTES as u64);
        let grown = [BLOCK_PAGES, BLOCK_PAGES, 1, BLOCK_PAGES, MIN_PRESENT - 1, 0, 0, BLOCK_PAGES];
        for (block, (pages, grown)) in present.into_iter().zip(grown).enumerate() {
            assert_eq!(resident(&mapping, block), grown, "of block {block}");
            check(&file, block, pages);
        }
    }

    #[test]
    fn a_process_that_has_gone_is_started_again() {
        static HAS_GONE: AtomicBool = AtomicBool::new(false);
        let mut all = served_by(|theirs| {
            if HAS_GONE.swap(true, Ordering::Relaxed) {
                block_mover::serve(&theirs).unwrap();
            }
        });
        let file = memory();
        let mapping = map(&file);
        touch(&file, 0, BLOCK_PAGES);
        all.add(Arc::downgrade(&mapping));
        pass(&mut all);
        assert_eq!(mapping.huge_bytes(), 0);
        all.try_again();
        pass(&mut all);
        assert_eq!(mapping.huge_bytes(), BLOCK_BYTES as u64);
        check(&file, 0, BLOCK_PAGES);
    }

    #[test]
    fn a_file_is_looked_at_when_it_has_grown() {
        let file = memory();
        let mapping = map(&file);
        let mut all = watched();
        all.add(Arc::downgrade(&mapping));
        pass(&mut all);
        assert_eq!(all.step(), Step::PassEnded { moved: false });
        touch(&file, 5, BLOCK_PAGES);
        // The pass that sees that it has grown, then that of its blocks.
        assert_eq!(all.step(), Step::PassEnded { moved: false });
        assert_eq!(all.step(), Step::Done);
        pass(&mut all);
        assert_eq!(mapping.huge_bytes(), BLOCK_BYTES as u64);
    }

    #[test]
    fn what_a_balloon_took_out_stays_out() {
        let file = memory();
        let mapping = map(&file);
        (0..BLOCKS).for_each(|block| touch(&file, block, BLOCK_PAGES));
        let mut all = watched();
        all.add(Arc::downgrade(&mapping));
        pass(&mut all);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file.as_fd(), punch, BLOCK_BYTES as u64, 4096).unwrap();
        pass(&mut all);
        assert_eq!(resident(&mapping, 1), BLOCK_PAGES - 1);
    }

    #[test]
    fn mappings_have_their_turns_and_go() {
        let files: Vec<SharedMemory> = (0..3).map(|_| memory()).collect();
        let mut mappings: Vec<Arc<Mapping>> = files.iter().map(map).collect();
        let mut all = watched();
        for (file, mapping) in files.iter().zip(&mappings) {
            touch(file, 0, BLOCK_PAGES);
            all.add(Arc::downgrade(mapping));
        }
        mappings.pop();
        pass(&mut all);
        assert!(mappings.iter().all(|mapping| mapping.huge_bytes() == BLOCK_BYTES as u64));
        assert_eq!(all.mappings.len(), 2);
        mappings.clear();
        pass(&mut all);
        assert!(all.mappings.is_empty());
    }
}
