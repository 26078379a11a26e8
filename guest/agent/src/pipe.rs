//! Pipe of a program: from its request and descriptors to its answer.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{self, MAX_EXTENTS, Pipe, end, kind};
use guest_abi::program::{Answer, MAGIC, Request, VERSION, flag};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::behind;
use crate::disks::Disks;
use crate::ends::{CheckedFd, Sink, Source};
use crate::exchange::Exchange;
use crate::file_sink::FileSink;
use crate::file_source::FileSource;
use crate::host::Host;
use crate::identity::Identity;
use crate::lease::Leases;
use crate::line::Call;
use crate::refusals::Refusals;
use crate::socket::{SocketSink, SocketSource, UNSENT_TIME, Use};
use crate::wake::Wake;
use crate::watch::Watch;

/// State that all requests share.
#[derive(Debug)]
pub struct Shared {
    /// The daemon.
    pub host: Host,
    /// Disks of the VM.
    pub disks: Disks,
    /// Leases on files.
    pub leases: Leases,
    /// Counts of requests that the agent has refused itself.
    pub refusals: Arc<Refusals>,
    /// Whether the agent stops: pipes end then.
    pub stopping: AtomicBool,
}

impl Shared {
    /// Refuses a request without the daemon.
    pub fn refuse(&self, reason: Reason) -> PipeOutcome {
        self.refusals.count(reason);
        PipeOutcome::nothing(reason)
    }
}

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipeOutcome {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Reason why no more bytes did.
    pub reason: Reason,
    /// Nearest errno, in case no byte was moved.
    pub errno: u32,
}

impl PipeOutcome {
    /// Outcome of a request for which no byte was moved.
    pub fn nothing(reason: Reason) -> Self {
        Self { bytes: 0, reason, errno: reason.errno() }
    }

    /// The answer to the program.
    pub fn answer(self) -> Answer {
        let errno = if self.bytes > 0 { 0 } else { self.errno };
        Answer {
            magic: U32::new(MAGIC),
            version: U16::new(VERSION),
            reason: U16::new(self.reason as u16),
            errno: U32::new(errno),
            min_bytes_kib: U32::ZERO,
            moved_bytes: U64::new(self.bytes),
        }
    }
}

/// Serves a request. Returns when the pipe needs nothing of it any more. `program` is the socket
/// that it came from, `wake` the event of the calling thread.
pub fn run(
    shared: &Shared,
    request: &Request,
    (source, sink): (OwnedFd, OwnedFd),
    program: BorrowedFd<'_>,
    wake: &Arc<Wake>,
) -> PipeOutcome {
    // Taken first: the time limit covers all steps.
    let timeout = Duration::from_millis(request.timeout_ms.get().into());
    let deadline = (!timeout.is_zero()).then(|| Instant::now() + timeout);
    if request.len_bytes.get() == 0 {
        return PipeOutcome::nothing(Reason::Complete);
    }
    let watch = Watch::new(shared, program, wake, deadline);
    if request.flags.get() & flag::BEHIND != 0 {
        return behind::run(request, (source, sink), watch);
    }
    try_pipe(request, (source, sink), &watch, UNSENT_TIME)
}

/// Moves bytes by a pipe, without a fallback for those that are not moved. Waits up to
/// `unsent_time` for unsent bytes of the sink.
pub fn try_pipe(
    request: &Request,
    ends: (OwnedFd, OwnedFd),
    watch: &Watch<'_>,
    unsent_time: Duration,
) -> PipeOutcome {
    let shared = watch.shared;
    let (call, ends, len_bytes) = match begin(request, ends, watch, unsent_time) {
        Ok(begun) => begun,
        Err(reason) => return shared.refuse(reason),
    };
    let moved = Exchange::new(watch, call, ends, len_bytes).run();
    if matches!(moved.reason, Reason::NoDisk | Reason::BadExtents | Reason::DiskFailed) {
        shared.disks.forget();
    }
    moved
}

/// Checks both ends and calls the daemon. Also returns the number of bytes of the call. Cheap
/// checks come first, and sockets last, when all else is well: their counters must reach the daemon
/// at once.
fn begin(
    request: &Request,
    (source, sink): (OwnedFd, OwnedFd),
    &Watch { shared, program, wake, .. }: &Watch<'_>,
    unsent_time: Duration,
) -> Result<(Call, (Source, Sink), u64), Reason> {
    let (source, sink) = (CheckedFd::new(source, Use::Source)?, CheckedFd::new(sink, Use::Sink)?);
    let sink_kind = sink.sink_kind();
    let line = shared.host.line()?;
    let disks = (&shared.disks, &line);
    let offsets = (request.source_offset.get(), request.sink_offset.get());
    let mut len = request.len_bytes.get().min(line.max_len_bytes);
    let (mut source_end, mut sink_end) = (Vec::new(), Vec::new());

    let sink = match sink {
        CheckedFd::File(fd, stat, flags) => {
            let who = Identity::of(program).map_err(|_| Reason::NotPermitted)?;
            let file = FileSink::new(fd, (&stat, flags), offsets.1, who, disks)?;
            len = len.min(file.max_bytes());
            source.refuse_overlap(offsets.0, len, &stat, file.start())?;
            file.write_end(&mut sink_end);
            Opened::End(Sink::File(Box::new(file)))
        }
        CheckedFd::Socket(fd) => Opened::Later(fd),
    };
    let source = match source {
        CheckedFd::File(fd, stat, _) => {
            let range = (offsets.0, len, MAX_EXTENTS as usize);
            // Bytes of a placed source wait in the host's memory, from which only connections are
            // written.
            let may_place = sink_kind == end::SOCKET;
            let leases = (&shared.leases, wake, may_place);
            let file = FileSource::new(fd, stat.st_dev, range, disks, leases)?;
            len = file.len_bytes();
            file.write_end(&mut source_end);
            Opened::End(Source::File(file))
        }
        CheckedFd::Socket(fd) => Opened::Later(fd),
    };
    let sink = sink.or_open(|fd| {
        let (socket, end) = SocketSink::new(fd, unsent_time)?;
        sink_end.extend_from_slice(end.as_bytes());
        Ok(Sink::Socket(socket))
    })?;
    let source = source.or_open(|fd| {
        let (socket, end) = SocketSource::new(fd)?;
        source_end.extend_from_slice(end.as_bytes());
        Ok(Source::Socket(socket))
    })?;

    let len_bytes = U64::new(len);
    let is_cached = source.file().is_some_and(FileSource::is_cached);
    let flags = if is_cached { pipe::flag::CACHED } else { 0 };
    let kinds = (source.kind(), sink_kind);
    let pipe = Pipe { source: kinds.0, sink: kinds.1, flags, reserved: [0; 5], len_bytes };
    let body = [pipe.as_bytes(), &source_end, &sink_end].concat();
    let call = line.call(kind::PIPE, kind::DONE, &body, wake)?;
    Ok((call, (source, sink), len))
}

/// End of a pipe, or a socket that is opened last.
enum Opened<T> {
    End(T),
    Later(OwnedFd),
}

impl<T> Opened<T> {
    fn or_open(self, open: impl FnOnce(OwnedFd) -> Result<T, Reason>) -> Result<T, Reason> {
        match self {
            Self::End(end) => Ok(end),
            Self::Later(fd) => open(fd),
        }
    }
}
