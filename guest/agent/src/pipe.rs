//! One request of a program, from its descriptors to its answer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{MAX_EXTENTS, Pipe, SocketEnd, end, kind};
use guest_abi::program::{Answer, MAGIC, Request, VERSION};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::disks::Disks;
use crate::file::{self, FileSource};
use crate::host::{Call, Host, Outcome};
use crate::lease::Leases;
use crate::socket::{self, SocketSink};
use crate::wake::Wake;

/// What all requests share.
#[derive(Debug)]
pub struct Shared {
    /// The daemon.
    pub host: Host,
    /// Its disks.
    pub disks: Disks,
    /// Leases on files.
    pub leases: Leases,
    /// The agent ends: so do pipes.
    pub stopping: AtomicBool,
}

/// What came of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// So many bytes arrived.
    pub bytes: u64,
    /// Why not more.
    pub reason: Reason,
}

impl Moved {
    /// Nothing was moved.
    pub fn nothing(reason: Reason) -> Self {
        Self { bytes: 0, reason }
    }

    /// As the program gets it.
    pub fn answer(self) -> Answer {
        let errno = if self.bytes > 0 { 0 } else { self.reason.errno() };
        Answer {
            magic: U32::new(MAGIC),
            version: U16::new(VERSION),
            reason: U16::new(self.reason as u16),
            errno: U32::new(errno),
            reserved: U32::ZERO,
            moved_bytes: U64::new(self.bytes),
        }
    }
}

/// What bytes come from. More kinds are to come.
#[derive(Debug)]
enum Source {
    File(FileSource),
}

/// Where bytes go. More kinds are to come.
#[derive(Debug)]
enum Sink {
    /// The socket is only held, for its cork.
    Socket { _held: SocketSink, end: Box<SocketEnd> },
}

impl Source {
    fn kind(&self) -> u8 {
        match self {
            Self::File(_) => end::FILE,
        }
    }

    fn len_bytes(&self) -> u64 {
        match self {
            Self::File(file) => file.len_bytes(),
        }
    }

    fn write_end(&self, body: &mut Vec<u8>) {
        match self {
            Self::File(file) => file.write_end(body),
        }
    }

    /// Why the pipe must end although nobody asked for it.
    fn ends(&self) -> Option<Reason> {
        match self {
            Self::File(file) => file.lease_broken().then_some(Reason::LeaseBroken),
        }
    }

    /// The reason when all of it was moved, which may be less than was asked for.
    fn complete(&self) -> Reason {
        match self {
            Self::File(file) if file.to_the_end() => Reason::EndOfFile,
            Self::File(_) => Reason::Complete,
        }
    }

    fn finish(self, moved_bytes: u64) {
        match self {
            Self::File(file) => file.finish(moved_bytes),
        }
    }
}

impl Sink {
    fn kind(&self) -> u8 {
        match self {
            Self::Socket { .. } => end::SOCKET,
        }
    }

    fn write_end(&self, body: &mut Vec<u8>) {
        match self {
            Self::Socket { end, .. } => body.extend_from_slice(end.as_bytes()),
        }
    }
}

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Socket,
}

fn kind_of(fd: BorrowedFd<'_>) -> Result<Kind, Reason> {
    let stat = fstat(fd).map_err(|_| Reason::NotPermitted)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(Kind::File),
        FileType::Socket => Ok(Kind::Socket),
        _ => Err(Reason::NotAFile),
    }
}

/// Moves what a request asks for; returns when nothing of it is needed any more. `program` is the
/// socket it came from, `wake` that of the calling thread.
pub fn run(
    shared: &Shared,
    request: &Request,
    (source, sink): (OwnedFd, OwnedFd),
    program: BorrowedFd<'_>,
    wake: &Arc<Wake>,
) -> Moved {
    // From the beginning: the time covers whatever it takes.
    let timeout = Duration::from_millis(request.timeout_ms.get().into());
    let deadline = (!timeout.is_zero()).then(|| Instant::now() + timeout);
    if request.len_bytes.get() == 0 {
        return Moved::nothing(Reason::Complete);
    }
    let begun = begin(shared, request, source, sink, wake);
    let (call, source, sink) = match begun {
        Ok(begun) => begun,
        Err(reason) => return Moved::nothing(reason),
    };
    let watch = Watch { shared, program, wake, deadline };
    let (outcome, ended) = watch.until_done(&call, &source);
    let moved = judge(outcome, ended, &source);
    if matches!(moved.reason, Reason::NoDisk | Reason::BadExtents | Reason::DiskFailed) {
        shared.disks.forget();
    }
    source.finish(moved.bytes);
    drop(sink);
    moved
}

/// Looks at both ends and asks the daemon. The cheap checks come first, and the socket is touched
/// last, when all else is well.
fn begin(
    shared: &Shared,
    request: &Request,
    source: OwnedFd,
    sink: OwnedFd,
    wake: &Arc<Wake>,
) -> Result<(Call, Source, Sink), Reason> {
    match (kind_of(source.as_fd())?, kind_of(sink.as_fd())?) {
        (Kind::File, Kind::Socket) => {
            file::check(source.as_fd())?;
            socket::check(sink.as_fd())?;
        }
        _ => return Err(Reason::PairUnsupported),
    }
    let line = shared.host.line()?;
    let len_bytes = request.len_bytes.get().min(line.max_len_bytes);
    let range = (request.source_offset.get(), len_bytes, MAX_EXTENTS as usize);
    let source = FileSource::new(source, range, (&shared.disks, &line), (&shared.leases, wake))?;
    let (sink, end) = SocketSink::new(sink)?;
    let sink = Sink::Socket { _held: sink, end: Box::new(end) };
    let source = Source::File(source);
    let (source_kind, sink_kind) = (source.kind(), sink.kind());
    let len_bytes = U64::new(source.len_bytes());
    let pipe = Pipe { source: source_kind, sink: sink_kind, reserved: [0; 6], len_bytes };
    let mut body = pipe.as_bytes().to_vec();
    source.write_end(&mut body);
    sink.write_end(&mut body);
    let call = line.call(kind::PIPE, kind::DONE, &body, wake)?;
    Ok((call, source, sink))
}

/// The daemon's word, or what is known without it.
fn judge(outcome: Outcome, ended: Option<Reason>, source: &Source) -> Moved {
    let Outcome::Done(done) = outcome else {
        return Moved::nothing(Reason::Lost);
    };
    let bytes = done.moved_bytes.get().min(source.len_bytes());
    let reason = match Reason::from_number(done.reason.get()) {
        _ if bytes == source.len_bytes() => source.complete(),
        // It was us who knew why.
        Reason::Cancelled => ended.unwrap_or(Reason::Cancelled),
        Reason::Complete => Reason::Unknown,
        reason => reason,
    };
    Moved { bytes, reason }
}

/// What a pipe under way is watched for.
struct Watch<'a> {
    shared: &'a Shared,
    program: BorrowedFd<'a>,
    wake: &'a Arc<Wake>,
    deadline: Option<Instant>,
}

impl Watch<'_> {
    /// Waits for the daemon's answer, and asks it to end the pipe when there is a reason; which one.
    fn until_done(&self, call: &Call, source: &Source) -> (Outcome, Option<Reason>) {
        let (mut ended, mut gone) = (None, false);
        loop {
            self.wake.clear();
            if let Some(outcome) = call.outcome() {
                return (outcome, ended);
            }
            if ended.is_none() {
                ended = self.ends(source, gone);
                if let Some(reason) = ended {
                    call.cancel(reason);
                }
            }
            gone = self.wait(ended.is_none());
        }
    }

    fn ends(&self, source: &Source, gone: bool) -> Option<Reason> {
        if gone || self.shared.stopping.load(Ordering::Acquire) {
            return Some(Reason::Cancelled);
        }
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        source.ends().or(late.then_some(Reason::TimedOut))
    }

    /// Sleeps until something may have happened; true when the program has gone. Not interested in
    /// the program, it waits for the daemon alone.
    fn wait(&self, interested: bool) -> bool {
        let program = PollFd::from_borrowed_fd(self.program, PollFlags::RDHUP);
        let mut fds = [PollFd::new(self.wake, PollFlags::IN), program];
        let count = if interested { 2 } else { 1 };
        let left = self.deadline.filter(|_| interested);
        let left = left.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // A millisecond more, so that it does not wake before the time.
        let left = left.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        // Interrupted, the caller looks again.
        let _ = poll(&mut fds[..count], left.as_ref());
        let hung_up = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        interested && fds[1].revents().intersects(hung_up)
    }
}
