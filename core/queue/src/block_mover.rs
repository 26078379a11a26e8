//! Moves of blocks into huge pages, by a process that does nothing else.
//!
//! `MADV_COLLAPSE` begins by having each CPU empty its lists of pages, and keeps the caller's
//! address space locked until the last one has. A host that leaves a CPU's kernel worker waiting
//! (35 s were seen, under load: "workqueue lockup" in its log) would thereby stop all threads of
//! the daemon that map memory, or touch a page for the first time, its polling threads among them.
//! A huge page is the file's, so any process may ask for it.
//!
//! The daemon sends a file and a range of it, and gets an errno and the CPU time that it took: one
//! message each on a socket that keeps their bounds. The process ends when that is closed; one that
//! ended before is started again by [`BlockMover::revive`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use base::cpu::thread_time;
use base::packet;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::mapping;

/// Length of a request, offset and length, and of an answer, errno and nanoseconds.
const MESSAGE_BYTES: usize = 16;

/// Two numbers as a message has them.
fn message(first: u64, second: u64) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[..8].copy_from_slice(&first.to_ne_bytes());
    bytes[8..].copy_from_slice(&second.to_ne_bytes());
    bytes
}

/// The two numbers of a message.
fn numbers(bytes: [u8; MESSAGE_BYTES]) -> (u64, u64) {
    let number = |at: usize| std::array::from_fn(|n| bytes[at + n]);
    (u64::from_ne_bytes(number(0)), u64::from_ne_bytes(number(8)))
}

/// A pair of sockets: for a [`BlockMover`], and for [`serve`].
///
/// # Errors
/// The process has too many descriptors.
pub fn sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Starts a process that [serves](serve) the other end of the socket it returns.
pub type Start = Box<dyn FnMut() -> io::Result<OwnedFd> + Send>;

/// The daemon's end.
pub struct BlockMover {
    start: Start,
    /// None: the process has gone.
    socket: Option<OwnedFd>,
    /// CPU time of all moves so far.
    spent: Duration,
}

impl BlockMover {
    /// Starts the process. One that does not start is tried again as one that has gone.
    pub fn new(start: Start) -> Self {
        let mut mover = Self { start, socket: None, spent: Duration::ZERO };
        mover.revive();
        mover
    }

    /// Starts the process unless it is there.
    pub(crate) fn revive(&mut self) {
        if self.socket.is_some() {
            return;
        }
        match (self.start)() {
            Ok(socket) => {
                tracing::debug!("the process that moves VMs' memory into huge pages has started");
                self.socket = Some(socket);
            }
            Err(e) => tracing::warn!(
                "the process that moves VMs' memory into huge pages does not start: {e}"
            ),
        }
    }

    /// CPU time that the moves took.
    pub(crate) fn spent(&self) -> Duration {
        self.spent
    }

    /// Has blocks of a file moved, and waits for it. `offset` is a multiple of a block's length.
    ///
    /// # Errors
    /// That of `madvise(2)`, or [`io::ErrorKind::UnexpectedEof`]: nobody serves any more.
    pub(crate) fn collapse(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
    ) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        let (errno, spent_ns) = match ask(socket, message(offset, len as u64), file) {
            Ok(answer) => answer,
            Err(e) => {
                tracing::warn!("the process that moves VMs' memory into huge pages has gone: {e}");
                self.socket = None;
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        };
        self.spent += Duration::from_nanos(spent_ns);
        if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno as i32)) }
    }
}

/// Sends a request with its file, and waits for the answer.
fn ask(
    socket: &OwnedFd,
    request: [u8; MESSAGE_BYTES],
    file: BorrowedFd<'_>,
) -> io::Result<(u64, u64)> {
    packet::send(socket, &request, &[file], SendFlags::empty())?;
    let mut answer = [0; MESSAGE_BYTES];
    let got = rustix::io::retry_on_intr(|| rustix::io::read(socket, &mut answer))?;
    if got == MESSAGE_BYTES {
        Ok(numbers(answer))
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Moves blocks until nobody has the other end of the socket.
///
/// # Errors
/// The socket is none of [`sockets`].
pub fn serve(socket: impl AsFd) -> io::Result<()> {
    let (socket, mut request) = (socket.as_fd(), [0; MESSAGE_BYTES]);
    while let Some((bytes, files)) = packet::receive(socket, &mut request)? {
        let (MESSAGE_BYTES, [file]) = (bytes, &files[..]) else {
            return Err(io::Error::other(format!("{bytes} bytes with {} files", files.len())));
        };
        let (offset, len) = numbers(request);
        let begin = thread_time();
        let done = mapping::collapse(file.as_fd(), offset, len as usize);
        let errno = done.err().map_or(0, |e| e.raw_os_error().unwrap_or(libc::EINVAL));
        let spent_ns = thread_time().saturating_sub(begin).as_nanos() as u64;
        match packet::send(socket, &message(errno as u64, spent_ns), &[], SendFlags::empty()) {
            Ok(()) => {}
            Err(Errno::PIPE) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use base::shm::SharedMemory;

    use super::*;
    use crate::mapping::BLOCK_BYTES;

    #[test]
    fn errors_are_told_and_a_process_that_has_gone_too() {
        let (ours, server) = served();
        let mut sockets = vec![served().0, ours.try_clone().unwrap()];
        let start = move || sockets.pop().ok_or(io::ErrorKind::NotFound.into());
        let mut mover = BlockMover::new(Box::new(start));
        let file = SharedMemory::new("moved", BLOCK_BYTES).unwrap();
        // Nothing is there to be moved beyond the file's end, and no memory is made for it.
        let beyond = mover.collapse(file.as_fd(), 4 * BLOCK_BYTES as u64, BLOCK_BYTES);
        assert_eq!(beyond.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let odd = mover.collapse(file.as_fd(), 1, BLOCK_BYTES);
        assert_eq!(odd.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        rustix::net::shutdown(&ours, rustix::net::Shutdown::Both).unwrap();
        server.join().unwrap();
        let mut collapse = || mover.collapse(file.as_fd(), 0, BLOCK_BYTES).unwrap_err();
        assert_eq!(collapse().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(collapse().kind(), io::ErrorKind::UnexpectedEof, "until it is started again");
        mover.revive();
        let odd = mover.collapse(file.as_fd(), 1, BLOCK_BYTES);
        assert_eq!(odd.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    /// The daemon's end of a socket, and the thread that serves the other one.
    fn served() -> (OwnedFd, std::thread::JoinHandle<()>) {
        let (ours, theirs) = sockets().unwrap();
        (ours, std::thread::spawn(move || serve(&theirs).unwrap()))
    }

    #[test]
    fn a_request_without_a_file_ends_the_process() {
        let (ours, theirs) = sockets().unwrap();
        rustix::io::write(&ours, &message(0, 1)).unwrap();
        assert!(serve(&theirs).is_err());
        rustix::io::write(&ours, &[0; 3]).unwrap();
        assert!(serve(&theirs).is_err());
    }

    #[test]
    fn numbers_come_as_they_went() {
        assert_eq!(numbers(message(7, u64::MAX)), (7, u64::MAX));
    }
}
