//! Pipes in the background: parts of a file that a program believes to be sent. Like bytes in a
//! socket's buffer they arrive, or the connection ends, even when the program exits first.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use guest_abi::Reason;
use guest_abi::program::{OWN_POSITION, Request};
use rustix::event::PollFlags;
use rustix::io::{Errno, pread};
use rustix::net::{SendFlags, send, sockopt};

use crate::outcome::PipeOutcome;
use crate::pipe::try_pipe;
use crate::watch::Watch;
use crate::{file_source, socket};

/// Time that a peer has when the program has exited: after about as much, the kernel gives up a
/// peer that acknowledges nothing of a closed connection.
pub const ALONE_TIME: Duration = Duration::from_secs(60);
/// Time that bytes which the program sent before may take to be sent: the program does not wait.
pub const UNSENT_TIME: Duration = Duration::from_secs(1);
/// Bytes that are read and sent at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Moves a part by a pipe, and sends the bytes that the pipe does not move.
///
/// Takes only a file on a file system that pipes know, and a TCP connection: reads and writes of
/// other descriptors by root may differ from those of the program.
pub fn run(request: &Request, (source, sink): (OwnedFd, OwnedFd), watch: Watch<'_>) -> PipeOutcome {
    if let Err(reason) =
        file_source::check_readable(source.as_fd()).and(socket::check_tcp(sink.as_fd()))
    {
        return watch.shared.refuse(reason);
    }
    let watch = watch.in_background(ALONE_TIME);
    let (at, len) = (request.source_offset.get(), request.len_bytes.get());
    let own = source.try_clone().and_then(|source| Ok((source, sink.try_clone()?)));
    let (Ok((own_source, own_sink)), true) = (own, at != OWN_POSITION) else {
        return PipeOutcome::nothing(Reason::Malformed);
    };
    let moved = try_pipe(request, (source, sink), &watch, UNSENT_TIME);
    // Where a lost pipe ended is not known.
    if moved.bytes == len || moved.reason == Reason::Lost || at.checked_add(len).is_none() {
        return moved;
    }
    let rest = (at + moved.bytes, len - moved.bytes);
    watch.restart_time();
    let bytes = moved.bytes + send_part(own_source.as_fd(), rest, own_sink.as_fd(), &watch);
    if bytes < len && watch.has_program_exited() {
        // Only this tells the peer that bytes are missing. Fails when the connection has ended.
        let _ = sockopt::set_socket_linger(&own_sink, Some(Duration::ZERO));
    }
    PipeOutcome { bytes, ..moved }
}

/// Sends a part of a file. Returns the number of bytes sent.
fn send_part(
    file: BorrowedFd<'_>,
    (mut at, len): (u64, u64),
    sink: BorrowedFd<'_>,
    watch: &Watch<'_>,
) -> u64 {
    let (mut buffer, end) = (vec![0; PIECE_BYTES], at + len);
    let begun = at;
    while at < end && !watch.is_time_over() {
        let want = (end - at).min(PIECE_BYTES as u64) as usize;
        let got = match pread(file, &mut buffer[..want], at) {
            // The file was truncated.
            Ok(0) => break,
            Ok(got) => got,
            Err(Errno::INTR) => continue,
            Err(_) => break,
        };
        match send(sink, &buffer[..got], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => {
                at += sent as u64;
                watch.restart_time();
            }
            // At the end of the agent, bytes that the socket does not take are lost.
            Err(Errno::AGAIN) if watch.is_cancelled() => break,
            Err(Errno::AGAIN) => watch.wait_for(true, Some((sink, PollFlags::OUT)), None),
            Err(Errno::INTR) => {}
            Err(_) => break,
        }
    }
    at - begun
}
