//! Ends of a pipe: a file or a connection, as the source or the sink.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use guest_abi::Reason;
use guest_abi::pipe::end;
use rustix::fs::{FileType, OFlags, Stat, fstat};

use crate::file_sink::{self, FileSink};
use crate::file_source::{self, FileSource};
use crate::socket::{self, Role, SocketSink, SocketSource};

/// A program's descriptor, after the cheap checks.
#[derive(Debug)]
pub enum CheckedFd {
    /// A regular file that can be piped, and the descriptor's flags if it is a sink.
    File(OwnedFd, Box<Stat>, OFlags),
    /// A TCP socket.
    Socket(OwnedFd),
}

impl CheckedFd {
    /// Checks a descriptor.
    ///
    /// # Errors
    /// Reason why it is no end of a pipe.
    pub fn new(fd: OwnedFd, role: Role) -> Result<Self, Reason> {
        let stat = fstat(&fd).map_err(|_| Reason::NotPermitted)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let flags = match role {
                    Role::Source => file_source::check(fd.as_fd()).map(|()| OFlags::empty())?,
                    Role::Sink => file_sink::check(fd.as_fd())?,
                };
                Ok(Self::File(fd, Box::new(stat), flags))
            }
            FileType::Socket => socket::check(fd.as_fd(), role).map(|()| Self::Socket(fd)),
            _ => Err(Reason::NotAFile),
        }
    }

    /// Kind of the end in messages, if it is a sink.
    pub fn sink_kind(&self) -> u8 {
        match self {
            Self::File(..) => end::PLACES,
            Self::Socket(_) => end::SOCKET,
        }
    }

    /// Refuses a file as its own sink where the ranges overlap, like `copy_file_range(2)`.
    ///
    /// # Errors
    /// [`Reason::Malformed`]: the ranges overlap.
    pub fn refuse_overlap(
        &self,
        offset: u64,
        len_bytes: u64,
        into: &Stat,
        start: u64,
    ) -> Result<(), Reason> {
        let Self::File(fd, stat, _) = self else { return Ok(()) };
        if (stat.st_dev, stat.st_ino) != (into.st_dev, into.st_ino) {
            return Ok(());
        }
        let from = file_source::start(fd, offset)?;
        let len = len_bytes.min((stat.st_size as u64).saturating_sub(from));
        let apart = from.saturating_add(len) <= start || start.saturating_add(len) <= from;
        if apart { Ok(()) } else { Err(Reason::Malformed) }
    }
}

/// End of a pipe that bytes come from.
#[derive(Debug)]
pub enum Source {
    /// A part of a file.
    File(FileSource),
    /// A connection.
    Socket(SocketSource),
}

/// End of a pipe that bytes go to.
#[derive(Debug)]
pub enum Sink {
    /// A file.
    File(Box<FileSink>),
    /// A connection.
    Socket(SocketSink),
}

impl Source {
    /// Reason for which the pipe must end without a request of the program.
    pub fn end_reason(&self) -> Option<Reason> {
        match self {
            Self::File(file) => file.is_lease_broken().then_some(Reason::LeaseBroken),
            Self::Socket(_) => None,
        }
    }

    /// Kind of the end in messages.
    pub fn kind(&self) -> u8 {
        match self {
            Self::File(file) => file.kind(),
            Self::Socket(_) => end::SOCKET,
        }
    }

    /// Reason for the end when the whole source was moved, which may be less than was asked for.
    pub fn complete_reason(&self) -> Reason {
        match self {
            Self::File(file) if file.is_to_end() => Reason::EndOfFile,
            _ => Reason::Complete,
        }
    }

    /// The file, if the source is one.
    pub fn file(&self) -> Option<&FileSource> {
        match self {
            Self::File(file) => Some(file),
            Self::Socket(_) => None,
        }
    }

    /// The file to read from, if the source is one.
    pub fn file_mut(&mut self) -> Option<&mut FileSource> {
        match self {
            Self::File(file) => Some(file),
            Self::Socket(_) => None,
        }
    }

    /// The connection, if the source is one.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::File(_) => None,
            Self::Socket(socket) => Some(socket.as_fd()),
        }
    }

    /// Moves the program's position on.
    pub fn finish(self, moved_bytes: u64) {
        match self {
            Self::File(file) => file.finish(moved_bytes),
            Self::Socket(_) => {}
        }
    }
}

impl Sink {
    /// Moves the program's position on.
    pub fn finish(self, moved_bytes: u64) {
        match self {
            Self::File(file) => file.finish(moved_bytes),
            Self::Socket(_) => {}
        }
    }
}
