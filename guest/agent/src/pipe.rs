//! Pipe of a program: from its request and descriptors to its answer.

use std::os::fd::OwnedFd;
use std::time::Duration;

use guest_abi::Reason;
use guest_abi::pipe::{self, MAX_EXTENTS, Pipe, end, kind};
use guest_abi::program::Request;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::ends::{CheckedFd, Sink, Source};
use crate::exchange::Exchange;
use crate::file_sink::FileSink;
use crate::file_source::FileSource;
use crate::identity::Identity;
use crate::line::Call;
use crate::outcome::PipeOutcome;
use crate::socket::{Role, SocketSink, SocketSource};
use crate::watch::Watch;

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
    let (source, sink) = (CheckedFd::new(source, Role::Source)?, CheckedFd::new(sink, Role::Sink)?);
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
