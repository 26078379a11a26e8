//! Placeholder requests: guest I/O whose data the host replaces with a pipe's. See
//! [`guest_abi::pipe`], "A file that is written" and "A file without a lease that is read".
//!
//! The guest's file system decides where bytes go and writes placeholders there, or reads over
//! them; the bytes never enter the guest. A request all of whose sectors are consecutive
//! placeholders of one tag is offered to the port's [`PlaceholderHandler`], which may take it. It
//! then waits, without anything of the guest's memory but its status byte, until the pipe's bytes
//! are in the file, or were read from there. A request that is not taken is an ordinary one: nobody
//! but the pipe's owner knows the tag, and to everyone else a placeholder is data like any other,
//! or memory to be read over. *Placed* writes and reads are those that a handler took.
//!
//! # Old memory
//! Memory that once had placeholders and is read over later may belong to any program, which would
//! see the placeholders as the file's content. So a read is inspected only if it is of whole blocks
//! and its memory begins at [`guest_abi::pipe::READ_SKEW_BYTES`] of a page: a guest's kernel reads
//! into whole pages, but for odd ends of file systems with blocks of one sector, and gives its
//! programs' direct I/O clean ones. A page's first sector is in the middle of a block for the tag's
//! owner, so it is never the first one of such a read. A handler should take long reads only.
//!
//! # Two ways to one file
//! The pipe's bytes are written through the page cache with a descriptor of their own, also where
//! the disk's own I/O goes past it. Both are one inode, so:
//! - A flush of the queue covers what was written before: fsync(2) on any descriptor writes back
//!   and waits for all dirty pages of the inode, also for one with `O_DIRECT`; a block device's
//!   pages belong to the device, whoever opened it.
//! - Reads for a pipe go through the page cache, too. On block devices with direct I/O they may be
//!   older than the guest's writes, unless the pages are dropped first: see
//!   [`crate::Image::may_lag`].
//! - A direct read first writes back what is dirty in its range. A direct write does so too, waits
//!   for it and drops the pages before the device gets the new data: so it cannot be overtaken by
//!   the older bytes of a placed write that was completed before. Direct and placed writes at the
//!   same time and to the same blocks have no order, as two ordinary ones have none: guests do not
//!   do that.
//! - But pages are larger than sectors. A placed write to a part of a page brings the rest of it
//!   into memory, and writes it back, perhaps over what a direct write has put there meanwhile. So
//!   on disks with direct I/O only writes of whole pages are placed.

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

/// Handler of placeholder requests. It is called on sidecores: it must neither wait nor allocate.
///
/// A port keeps its handler, so the handler must not keep the port.
pub trait PlaceholderHandler: Send + Sync + fmt::Debug {
    /// Whether any placeholders are expected now, by a load of an atomic. Else nothing is
    /// inspected.
    fn has_any(&self) -> bool;

    /// Takes a request all of whose sectors are consecutive placeholders of one tag (`None` comes
    /// back) and completes it later, on any thread; or gives it back: then the sectors are written
    /// as they are, or read over. A queue that stops waits for the requests that were taken.
    fn take(&self, placed: PlaceholderRequest) -> Option<PlaceholderRequest>;
}

/// Handler of a port with its terms, which all queues share: see
/// [`crate::BlockPort::set_placeholder_handler`].
pub(crate) struct PlaceholderConfig {
    pub handler: Arc<dyn PlaceholderHandler>,
    pub target: Arc<TargetFile>,
    /// Alignment of the offsets and lengths of placed writes.
    pub align_bytes: u64,
}

/// File or device that a pipe's bytes are written to, and read from.
pub(crate) struct TargetFile {
    file: File,
    may_lag: bool,
    /// Back end, whose lock on the image keeps other daemons out as long as the file is open.
    _backend: Option<Arc<dyn Backend>>,
}

impl TargetFile {
    /// `may_lag`: see [`crate::Image`].
    pub fn new(file: File, may_lag: bool, backend: Option<Arc<dyn Backend>>) -> Arc<Self> {
        Arc::new(Self { file, may_lag, _backend: backend })
    }
}

/// Operation on a pipe's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceholderOp {
    /// The bytes are read from the disk.
    Read,
    /// The bytes are written to the disk.
    Write {
        /// Whether they must be durable before the answer (`fdatasync`): the write cache is off.
        sync: bool,
    },
}

/// Placeholder request. Dropped without an answer it is an I/O error for the guest.
pub struct PlaceholderRequest {
    head: PlaceholderHead,
    len_bytes: u64,
    offset: u64,
    op: PlaceholderOp,
    // Dropped before the answer is given: a thread that waits for it may close the disk, and finds
    // it unlocked.
    target: Arc<TargetFile>,
    answer: PendingAnswer,
}

/// Answer to the queue, given when it is dropped.
struct PendingAnswer {
    /// Answers of the queue; `None`: the request is an ordinary one again.
    answers: Option<Arc<Answers>>,
    slot: u16,
    /// Errno of the answer; 0: success.
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
    /// The request of a queue's slot: its head, and its range on the disk.
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

    /// A request without a queue, and its answer: for tests and simulators of handlers.
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

    /// Secret of the pipe: a guest that knows all of it may have the bytes written, or read.
    pub fn tag(&self) -> [u8; 16] {
        self.head.tag
    }

    /// Offset of the first byte in the pipe: any number, less than 2^64 together with the
    /// length. It is the guest's number, and not checked otherwise.
    pub fn at(&self) -> u64 {
        self.head.at
    }

    /// Length in bytes: a multiple of 512, at least that and at most 64 MiB.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Offset of the bytes in [`PlaceholderRequest::file`]; a multiple of 512. The whole range is
    /// on the disk.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The disk's file or device, for reading and writing through the page cache. Only this
    /// request's range may be touched, and only before the answer.
    pub fn file(&self) -> &File {
        &self.target.file
    }

    /// Whether cached pages of the file may be older than the guest's writes: see
    /// [`crate::Image::may_lag`].
    pub fn may_lag(&self) -> bool {
        self.target.may_lag
    }

    /// The operation to do.
    pub fn op(&self) -> PlaceholderOp {
        self.op
    }

    /// Answers the request: the bytes are in the file, or are not needed there any more, or there
    /// was an error. The guest gets its status, if its queue still runs. May be called on any
    /// thread; wakes the sidecore if it sleeps.
    pub fn complete(mut self, result: io::Result<()>) {
        self.answer.errno = result.err().map_or(0, |e| errno(&e));
    }

    /// Whether it is the request of this slot.
    pub(crate) fn is_of(&self, answers: &Arc<Answers>, slot: u16) -> bool {
        let same = |ours: &Arc<Answers>| Arc::ptr_eq(ours, answers);
        self.answer.slot == slot && self.answer.answers.as_ref().is_some_and(same)
    }

    /// Forgets the answer: it is an ordinary request from now on.
    pub(crate) fn forget(mut self) {
        self.answer.answers = None;
    }
}

impl fmt::Debug for PlaceholderRequest {
    /// Leaves the tag out: it is a secret.
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

    /// Waits for the answer.
    pub fn wait(&self) -> io::Result<()> {
        loop {
            if let Some(result) = self.get() {
                return result;
            }
            let mut fds = [rustix::event::PollFd::new(&self.0.event, rustix::event::PollFlags::IN)];
            // A signal only makes the loop look again.
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
