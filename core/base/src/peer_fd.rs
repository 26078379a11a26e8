//! Descriptors that came from a peer, and their close.
//!
//! A `close` can wait for as long as the maker of the file likes: a TCP socket that lingers, a file
//! of a FUSE server that does not answer, a Unix socket with one of these in its queue. The last
//! reference to a VM's memory takes a while, too: the kernel frees its pages. So a descriptor from
//! a peer is a [`PeerFd`], and its drop hands the descriptor to threads that do nothing but close.
//! Nothing waits for those threads.
//!
//! # Limits
//! - 16 threads at most, each with one descriptor at a time; they end when nothing came for 5 s. As
//!   many more are for descriptors whose `close` is known to end: those that their owner has
//!   checked, memory files, eventfds. One VM can have all of the first 16 hang, and the memory of
//!   other VMs is freed all the same.
//! - A socket that waits for its close is open for its peer: [`PeerFd::hang_up`] ends it at once.
//! - 1,024 descriptors wait at most. One that comes when all threads hang and the list is full is
//!   closed by the thread that drops it, which most likely serves the hostile peer. A process with
//!   one thread for all peers calls [`never_wait`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::Shutdown;

use crate::event::check_eventfd;
use crate::sync::{self, lock};

/// Most threads that close.
const MAX_CLOSERS: usize = 16;

/// Most descriptors that wait for a closing thread.
const MAX_WAITING: usize = 1024;

/// A thread without work ends after this.
const PATIENCE: Duration = Duration::from_secs(5);

/// Stack of a thread that calls `close` only.
const STACK_LEN_BYTES: usize = 64 << 10;

/// A descriptor from a peer. Its drop does not wait for the `close`.
#[derive(Debug)]
pub struct PeerFd {
    /// None only within `drop` and `into_checked`.
    fd: Option<OwnedFd>,
    closers: &'static Closers,
}

impl PeerFd {
    /// Marks the descriptor as one whose `close` is known to end (memory takes the time that its
    /// pages take). It does not wait behind others.
    pub fn checked(mut self) -> Self {
        self.closers = &CHECKED;
        self
    }

    /// Returns the plain descriptor, for a caller that has made sure that its `close` does not
    /// wait.
    pub fn into_checked(mut self) -> OwnedFd {
        match self.fd.take() {
            Some(fd) => fd,
            None => unreachable!("only taken when the value goes"),
        }
    }

    /// Shuts a socket down: its peer sees the end at once, whenever the descriptor is closed.
    pub fn hang_up(&self) {
        // One that is gone has seen it.
        let _ = rustix::net::shutdown(self, Shutdown::Both);
    }

    /// A second descriptor of the same file.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.as_fd().try_clone_to_owned().map(Self::from)
    }
}

impl From<OwnedFd> for PeerFd {
    fn from(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), closers: &UNCHECKED }
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("only taken when the value goes"),
        }
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            let closers = if is_quick(fd.as_fd()) { &CHECKED } else { self.closers };
            closers.close(fd);
        }
    }
}

/// Whether the descriptor is of a kind whose `close` waits for nobody: a file in memory, or an
/// eventfd. The check waits for nobody either.
fn is_quick(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok() || check_eventfd(fd).is_ok()
}

/// Lifts the limit of waiting descriptors for the rest of this process: no thread that drops a
/// descriptor ever closes it by itself.
pub fn never_wait() {
    NEVER_WAIT.store(true, Ordering::Relaxed);
}

static NEVER_WAIT: AtomicBool = AtomicBool::new(false);

/// Waits until all dropped descriptors are closed, for tests that count them.
pub fn settle() {
    while !(CHECKED.is_idle() && UNCHECKED.is_idle()) {
        std::thread::yield_now();
    }
}

/// Threads for descriptors whose `close` is known to end.
static CHECKED: Closers = Closers::new();
/// Threads for all other descriptors: a hostile peer can have all of them hang.
static UNCHECKED: Closers = Closers::new();

/// Threads that close descriptors.
#[derive(Debug)]
struct Closers {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<OwnedFd>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
}

impl Closers {
    const fn new() -> Self {
        let state = State { waiting: VecDeque::new(), threads: 0, idle: 0 };
        Self { state: Mutex::new(state), work: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn is_idle(&self) -> bool {
        let state = self.lock();
        state.waiting.is_empty() && state.idle == state.threads
    }

    fn close(&'static self, fd: OwnedFd) {
        let mut state = self.lock();
        if state.idle <= state.waiting.len() && state.threads < MAX_CLOSERS {
            state.threads += 1;
            // Under the lock: the thread looks for work when this one is listed.
            let started = std::thread::Builder::new()
                .name("closer".into())
                .stack_size(STACK_LEN_BYTES)
                .spawn(|| self.run());
            if started.is_err() {
                state.threads -= 1;
            }
        }
        let is_full = state.threads == 0 || state.waiting.len() >= MAX_WAITING;
        if is_full && !NEVER_WAIT.load(Ordering::Relaxed) {
            drop(state);
            return drop(fd);
        }
        state.waiting.push_back(fd);
        drop(state);
        self.work.notify_one();
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(fd) = state.waiting.pop_front() {
                drop(state);
                drop(fd);
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (woken, timeout) = sync::wait_timeout(&self.work, state, PATIENCE);
            state = woken;
            state.idle -= 1;
            if timeout.timed_out() && state.waiting.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::Instant;

    use super::*;
    use crate::testing::lingering;

    /// Waits until somebody has closed the other end.
    fn is_closed(reader: OwnedFd) {
        assert_eq!(rustix::io::read(&reader, &mut [0u8; 1]), Ok(0));
    }

    #[test]
    fn abuse_V4_descriptors_whose_close_hangs_hold_up_nobody() {
        static SOME: Closers = Closers::new();
        let (fds, peers): (Vec<_>, Vec<_>) =
            std::iter::repeat_with(lingering).take(MAX_CLOSERS - 1).unzip();
        let began = Instant::now();
        fds.into_iter().for_each(|fd| SOME.close(fd));
        assert!(began.elapsed() < Duration::from_secs(300), "the caller lingered");
        // One thread is left, which closes for all others.
        for _ in 0..100 {
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            SOME.close(writer);
            is_closed(reader);
        }
        assert!(SOME.lock().threads <= MAX_CLOSERS);
        drop(peers);
    }

    /// One VM can have all threads hang that close what nobody checked: the memory of others is
    /// freed.
    #[test]
    fn abuse_V4_memory_and_eventfds_are_closed_beside_what_hangs() {
        let (fds, peers): (Vec<_>, Vec<_>) =
            std::iter::repeat_with(lingering).take(MAX_CLOSERS).unzip();
        fds.into_iter().for_each(|fd| drop(PeerFd::from(fd)));
        for _ in 0..100 {
            let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            let link = format!("/proc/self/fd/{}", memory.as_raw_fd());
            let inode = rustix::fs::fstat(&memory).unwrap().st_ino;
            drop(PeerFd::from(memory));
            // Closed, whatever has the number now.
            let is_there = || rustix::fs::stat(&*link).is_ok_and(|stat| stat.st_ino == inode);
            while is_there() {
                std::thread::yield_now();
            }
            let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            assert!(is_quick(bell.as_fd()));
        }
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(!is_quick(reader.as_fd()));
        drop(peers);
    }

    #[test]
    fn a_dropped_descriptor_is_closed_and_a_checked_one_is_not() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (fd, number) = (PeerFd::from(writer.try_clone().unwrap()), writer.as_raw_fd());
        let kept = PeerFd::from(writer).into_checked();
        assert_eq!(kept.as_raw_fd(), number);
        drop((fd.try_clone().unwrap(), fd));
        drop(kept);
        is_closed(reader);
    }
}
