//! Writes in whose place a pipe's bytes are written, and reads in whose place a pipe reads: see
//! [`guest_abi::pipe`], "A file that is written" and "A file without a lease that is read".
//!
//! The guest's file system decides where bytes go and writes placeholders there, or reads over them; the
//! bytes never enter the guest. A request all of whose sectors are consecutive placeholders of one tag is
//! offered to [`PlaceholderHandler`], who may take it. It then waits, without anything of the guest's memory but
//! its status byte, until the pipe's bytes are in the file, or were read from there. What is not taken is
//! an ordinary request: nobody but the pipe's owner knows the tag, and to everyone else a placeholder is
//! data like any other, or memory to be read over.
//!
//! # Old memory
//! Memory that once had placeholders and is read over later may belong to anybody, and what was not read
//! into it would be a file's content then. So a read is looked at only if it is of whole blocks and its
//! memory begins at [`guest_abi::pipe::READ_SKEW_BYTES`] of a page: a guest's kernel reads into whole pages,
//! but for odd ends of file systems with blocks of one sector, and gives its programs' direct I/O clean
//! ones. A page's first sector is in the middle of a block for the tag's owner, so it is never the first
//! one of such a read. Who takes reads does well to take long ones only.
//!
//! # Two ways to one file
//! The bytes are written through the page cache, whatever the disk's own way is, with a descriptor of
//! their own. That is one inode, so:
//! - A flush of the queue covers what was written before: fsync(2) on any descriptor writes back and
//!   waits for all dirty pages of the inode, also for one with `O_DIRECT`; a block device's pages
//!   belong to the device, whoever opened it.
//! - What is read for a pipe is read so, too. On block devices with direct I/O it may be older than what
//!   the guest has written, unless the pages are dropped first: see [`crate::Image::may_lag`].
//! - A direct read first writes back what is dirty in its range. A direct write does so too, waits for
//!   it and drops the pages before the device gets the new data: so it cannot be overtaken by the
//!   older bytes of a placed write that was completed before. Direct and placed writes at the same time
//!   and to the same blocks have no order, as two ordinary ones have none: guests do not do that.
//! - But pages are larger than sectors. A placed write to a part of a page brings the rest of it into
//!   memory, and writes it back, perhaps over what a direct write has put there meanwhile. So on
//!   disks with direct I/O only writes of whole pages are placed.

mod answers;
mod head;

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

pub(crate) use answers::Answers;
pub(crate) use head::{PlaceholderHead, are_placeholders};

use crate::backend::Backend;
use crate::error::errno;

/// Who knows what placeholders stand for. Called on sidecores: must not wait, nor allocate.
///
/// A port that was told of it keeps it: it must not keep the port.
pub trait PlaceholderHandler: Send + Sync + fmt::Debug {
    /// Whether any are known now: an atomic. While there are none nothing is looked at.
    fn has_any(&self) -> bool;

    /// A request all of whose sectors are consecutive placeholders of one tag. It is taken (none comes
    /// back) and completed later, on any thread, or given back: then the sectors are written as they
    /// are, or read over. A queue that stops waits for those that were taken.
    fn take(&self, placed: PlaceholderRequest) -> Option<PlaceholderRequest>;
}

/// What a port and its queues share, once [`crate::BlockPort::set_placeholder_handler`] was called.
pub(crate) struct PlaceholderConfig {
    pub handler: Arc<dyn PlaceholderHandler>,
    pub target: Arc<TargetFile>,
    /// Offsets and lengths of placed writes are multiples of this.
    pub align_bytes: u64,
}

/// Where placed bytes go.
pub(crate) struct TargetFile {
    file: File,
    may_lag: bool,
    /// Its lock on the image keeps other daemons out as long as anyone may write to the file.
    _backend: Option<Arc<dyn Backend>>,
}

impl TargetFile {
    /// `may_lag`: see [`crate::Image`].
    pub fn new(file: File, may_lag: bool, backend: Option<Arc<dyn Backend>>) -> Arc<Self> {
        Arc::new(Self { file, may_lag, _backend: backend })
    }
}

/// What is done with a pipe's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceholderOp {
    /// They are read from the disk.
    Read,
    /// They are written to it.
    Write {
        /// They must be durable before the answer (`fdatasync`): the disk's write cache is off.
        sync: bool,
    },
}

/// A request that stands for a pipe's bytes. Dropped without an answer it is an I/O error for the guest.
pub struct PlaceholderRequest {
    head: PlaceholderHead,
    len_bytes: u64,
    offset: u64,
    op: PlaceholderOp,
    // Dropped before the answer is given: who waits for that may close the disk, and finds it unlocked.
    target: Arc<TargetFile>,
    answer: PendingAnswer,
}

/// Gives the answer when it is dropped.
struct PendingAnswer {
    /// None: it is not placed any more.
    answers: Option<Arc<Answers>>,
    slot: u16,
    /// 0: done.
    errno: i32,
}

impl Drop for PendingAnswer {
    fn drop(&mut self) {
        if let Some(answers) = &self.answers {
            answers.give(self.slot, self.errno);
        }
    }
}

impl PlaceholderRequest {
    /// The request of a queue's slot: as its head says, for so many bytes from `offset`.
    pub(crate) fn new(
        head: PlaceholderHead,
        (offset, len_bytes): (u64, u64),
        op: PlaceholderOp,
        target: Arc<TargetFile>,
        (answers, slot): (Arc<Answers>, u16),
    ) -> Self {
        let answer = PendingAnswer { answers: Some(answers), slot, errno: libc::EIO };
        Self { head, len_bytes, offset, op, target, answer }
    }

    /// One without a queue, and where its answer comes: for tests and simulators of who takes it.
    pub fn detached(
        tag: [u8; 16],
        at: u64,
        (offset, len_bytes): (u64, u64),
        op: PlaceholderOp,
        file: File,
    ) -> io::Result<(Self, Answer)> {
        let answers = Arc::new(Answers::new(1)?);
        answers.set_wakeups(true);
        let (target, own) = (TargetFile::new(file, false, None), (Arc::clone(&answers), 0));
        let this = Self::new(PlaceholderHead { tag, at }, (offset, len_bytes), op, target, own);
        Ok((this, Answer(answers)))
    }

    /// The pipe's secret: who knows all of it may write, or have read.
    pub fn tag(&self) -> [u8; 16] {
        self.head.tag
    }

    /// Offset of the first byte in the pipe: any number, less than 2^64 together with the
    /// length. No more is known of it, it is the guest's number.
    pub fn at(&self) -> u64 {
        self.head.at
    }

    /// How many bytes: a multiple of 512, at least that and at most 64 MiB.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Where the bytes are in [`PlaceholderRequest::file`]; a multiple of 512. All of it is on the disk.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The disk's file or device, for reading and writing through the page cache. Only this request's
    /// range may be touched, and only before the answer.
    pub fn file(&self) -> &File {
        &self.target.file
    }

    /// Cached pages of the file may be older than what the guest has written: see
    /// [`crate::Image::may_lag`].
    pub fn may_lag(&self) -> bool {
        self.target.may_lag
    }

    /// What is to be done.
    pub fn op(&self) -> PlaceholderOp {
        self.op
    }

    /// The bytes are in the file, or are not needed there any more, or that could not be done: the guest
    /// gets its status, if its queue still runs. May be called on any thread; wakes the sidecore if it
    /// sleeps.
    pub fn complete(mut self, result: io::Result<()>) {
        self.answer.errno = result.err().map_or(0, |e| errno(&e));
    }

    /// Whether it is the one of this slot.
    pub(crate) fn is_of(&self, answers: &Arc<Answers>, slot: u16) -> bool {
        let same = |ours: &Arc<Answers>| Arc::ptr_eq(ours, answers);
        self.answer.slot == slot && self.answer.answers.as_ref().is_some_and(same)
    }

    /// It is an ordinary request from now on.
    pub(crate) fn forget(mut self) {
        self.answer.answers = None;
    }
}

impl fmt::Debug for PlaceholderRequest {
    /// Without the tag: it is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlaceholderRequest")
            .field("at", &self.head.at)
            .field("len_bytes", &self.len_bytes)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

/// The answer to a [`PlaceholderRequest::detached`].
#[derive(Debug)]
pub struct Answer(Arc<Answers>);

impl Answer {
    /// The answer, if it has been given and was not taken yet.
    pub fn get(&self) -> Option<io::Result<()>> {
        let mut done = Vec::with_capacity(1);
        self.0.reap(&mut done);
        let result = done.pop()?.result;
        Some(result.map(drop).map_err(io::Error::from_raw_os_error))
    }

    /// Waits for it.
    pub fn wait(&self) -> io::Result<()> {
        loop {
            if let Some(result) = self.get() {
                return result;
            }
            let mut fds = [rustix::event::PollFd::new(&self.0.event, rustix::event::PollFlags::IN)];
            // A signal only makes us look again.
            let _ = rustix::event::poll(&mut fds, None);
            self.0.event.drain();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write() -> (PlaceholderRequest, Answer) {
        let file = tempfile::tempfile().unwrap();
        PlaceholderRequest::detached(
            [7; 16],
            1024,
            (512, 2048),
            PlaceholderOp::Write { sync: true },
            file,
        )
        .unwrap()
    }

    #[test]
    fn a_detached_write_says_what_it_is_and_is_answered_once() {
        let (write, answer) = write();
        assert_eq!((write.tag(), write.at()), ([7; 16], 1024));
        assert_eq!((write.offset(), write.len_bytes()), (512, 2048));
        assert_eq!((write.op(), write.may_lag()), (PlaceholderOp::Write { sync: true }, false));
        assert!(!format!("{write:?}").contains("7, 7"), "the tag is a secret");
        assert!(answer.get().is_none());
        write.complete(Ok(()));
        assert!(answer.get().unwrap().is_ok());
        assert!(answer.get().is_none());
    }

    #[test]
    fn errors_keep_their_number_and_a_dropped_write_is_one() {
        let (one, answer) = write();
        one.complete(Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(answer.wait().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        let (one, answer) = write();
        one.complete(Err(io::ErrorKind::TimedOut.into()));
        assert_eq!(answer.wait().unwrap_err().raw_os_error(), Some(libc::EIO));
        // 0 would be no error.
        let (one, answer) = write();
        one.complete(Err(io::Error::from_raw_os_error(0)));
        assert_eq!(answer.wait().unwrap_err().raw_os_error(), Some(libc::EIO));
        let (one, answer) = write();
        drop(one);
        assert_eq!(answer.wait().unwrap_err().raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn whoever_waits_is_woken() {
        let (write, answer) = write();
        let other = std::thread::spawn(move || answer.wait());
        write.complete(Ok(()));
        other.join().unwrap().unwrap();
    }
}
