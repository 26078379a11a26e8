//! Break-even size of pipes in this guest: the time that a pipe takes to start against the time
//! that the guest takes to copy each byte itself. Both are measured once for each stream to the
//! daemon, when the first file of it could be piped.
//!
//! The start is a whole request, as programs make it, of a file with one block into a loopback
//! connection. The daemon knows no such connection and refuses it at its last step
//! ([`guest_abi::Reason::NoFlow`]); it counts sixteen such pipes. The guest's copy is `sendfile(2)`
//! into the same connection, whose bytes are dropped at the other end.

use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::program::{Answer, MAGIC, Request, VERSION, op};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, sendfile};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recv, sendmsg, socketpair,
};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::log::log;
use crate::self_test::temporary_file;

/// Number of measurements, after one to warm up. The quickest counts: other work in the guest and
/// on its host makes a step slower, and medians of five differed by three times from boot to boot.
const ROUNDS: usize = 15;
/// Bytes of the guest's copy: more than the buffers of a connection hold, and few enough to be
/// quick.
const COPY_BYTES: u64 = 1 << 20;
/// Bytes of the pipe that is refused.
const BLOCK_BYTES: u64 = 4096;
/// Time limit of a step, longer than any step takes.
const STEP_TIME: Duration = Duration::from_secs(5);
/// Factor by which a pipe must save its start: a loopback costs the receiver's work as well, and a
/// pipe has an end too.
const MARGIN: u128 = 2;
/// Lowest result: below, a pipe was never seen to pay, as it saves less than the noise of a
/// measurement.
const MIN_KIB: u32 = 64;
/// Highest result: above, one bad measurement would all but forbid pipes.
const MAX_KIB: u32 = 64 << 10;

/// Result of the measurement, and the stream to the daemon for which it holds.
#[derive(Debug, Default)]
pub struct BreakEven {
    /// The last generation for which the measurement has begun.
    begun: AtomicU64,
    /// Generation in the high half, KiB in the low one.
    known: AtomicU64,
}

impl BreakEven {
    /// Begins the measurement. Returns true for the first caller on this stream, who is to measure.
    pub fn begin(&self, generation: u64) -> bool {
        // Generations here begin at 1.
        let mark = generation + 1;
        self.begun.fetch_max(mark, Ordering::AcqRel) < mark
    }

    /// Sets the result.
    pub fn set(&self, generation: u64, kib: u32) {
        let stamp = (generation + 1) & u64::from(u32::MAX);
        self.known.store(stamp << 32 | u64::from(kib), Ordering::Release);
    }

    /// The result in KiB; 0: not known on this stream.
    pub fn kib(&self, generation: u64) -> u32 {
        let known = self.known.load(Ordering::Acquire);
        let stamp = (generation + 1) & u64::from(u32::MAX);
        if known >> 32 == stamp { known as u32 } else { 0 }
    }
}

/// The smallest pipe that pays, in KiB: a multiple of [`MIN_KIB`]. `start` is the time that a pipe
/// takes to begin, `copy` the time that the guest takes for `copied_bytes` of its own.
pub fn min_bytes_kib(start: Duration, copy: Duration, copied_bytes: u64) -> u32 {
    // The clock has not moved: each byte is free.
    let copy_ns = copy.as_nanos().max(1);
    let bytes = (start.as_nanos() * MARGIN).saturating_mul(copied_bytes.into()) / copy_ns;
    let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(MAX_KIB);
    kib.clamp(MIN_KIB, MAX_KIB).next_multiple_of(MIN_KIB)
}

/// Measures on a file system, with `program` as the program's end of a connection to this agent.
///
/// # Errors
/// A step failed, or the daemon took the pipe, which it must refuse.
pub fn measure(device: u64, program: &OwnedFd) -> io::Result<u32> {
    let (sender, receiver) = loopback()?;
    let file = cached_file(device, BLOCK_BYTES)?;
    let start = quickest(|| refused_pipe(program, &file, &sender))?;
    let file = cached_file(device, COPY_BYTES)?;
    sender.set_nonblocking(true)?;
    let copy = quickest(|| copy(&file, &sender, &receiver))?;
    let kib = min_bytes_kib(start, copy, COPY_BYTES);
    log(format_args!(
        "pipes pay from {kib} KiB on: {start:?} to begin, {copy:?} for a MiB without one"
    ));
    Ok(kib)
}

/// Makes a connection: the program's end and the agent's.
///
/// # Errors
/// No descriptor is left.
pub fn connection() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn quickest(mut step: impl FnMut() -> io::Result<()>) -> io::Result<Duration> {
    step()?;
    let mut least = Duration::MAX;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        step()?;
        least = least.min(begun.elapsed());
    }
    Ok(least)
}

fn loopback() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let sender = TcpStream::connect(listener.local_addr()?)?;
    let own = sender.local_addr()?;
    // Any process of the guest may connect: only our own end is accepted.
    loop {
        let (receiver, peer) = listener.accept()?;
        if peer == own {
            return Ok((sender, receiver));
        }
    }
}

/// Makes a file in the page cache, opened for reading only, as a lease requires.
fn cached_file(device: u64, len_bytes: u64) -> io::Result<File> {
    let refused = |reason: Reason| io::Error::other(reason.text());
    let mut file = temporary_file(device, OFlags::empty()).map_err(refused)?;
    file.write_all(&vec![0x5A; len_bytes as usize])?;
    // FIEMAP would write this back in the first round only.
    file.sync_data()?;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn refused_pipe(program: &OwnedFd, file: &File, sink: &TcpStream) -> io::Result<()> {
    let request = Request {
        magic: U32::new(MAGIC),
        version: U16::new(VERSION),
        op: U16::new(op::PIPE),
        flags: U32::ZERO,
        timeout_ms: U32::new(STEP_TIME.as_millis() as u32),
        source_offset: U64::ZERO,
        sink_offset: U64::ZERO,
        len_bytes: U64::new(BLOCK_BYTES),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [file.as_fd(), sink.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(program, &[IoSlice::new(request.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    let mut answer = Answer::new_zeroed();
    let (len, _) = recv(program, answer.as_mut_bytes(), RecvFlags::empty())?;
    let answer = Answer::read_from_bytes(&answer.as_bytes()[..len])
        .map_err(|_| io::Error::other("the agent has ended"))?;
    match Reason::from_number(answer.reason.get()) {
        Reason::NoFlow => Ok(()),
        other => Err(io::Error::other(other.text())),
    }
}

/// Copies the file through the guest, with the sender and the receiver on one CPU: in one thread.
fn copy(file: &File, sender: &TcpStream, receiver: &TcpStream) -> io::Result<()> {
    let (mut sent, mut received) = (0, 0);
    while received < COPY_BYTES {
        if sent < COPY_BYTES {
            let left = (COPY_BYTES - sent) as usize;
            match sendfile(sender, file, Some(&mut sent), left) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        received += drop_bytes(receiver)?;
    }
    Ok(())
}

/// Waits for bytes and drops those that are there, without a copy. Returns their number.
fn drop_bytes(receiver: &TcpStream) -> io::Result<u64> {
    let time = Timespec::try_from(STEP_TIME).ok();
    if poll(&mut [PollFd::new(receiver, PollFlags::IN)], time.as_ref())? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // TCP drops bytes read with `MSG_TRUNC`, and uses only the length of the buffer.
    let mut room = [0; 64 << 10];
    let (_, taken) = recv(receiver, &mut room, RecvFlags::TRUNC | RecvFlags::DONTWAIT)?;
    if taken == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(taken as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_a_multiple_within_limits() {
        let (us, mib) = (Duration::from_micros, 1 << 20);
        let least = |start, copy| min_bytes_kib(us(start), us(copy), mib);
        // 2 * 300 / 1000 MiB: 614.4 KiB.
        assert_eq!(least(300, 1000), 640);
        assert_eq!(least(250, 1000), 512);
        assert_eq!(least(251, 1000), 576);
        assert_eq!((least(0, 1000), least(1, 1000)), (64, 64));
        assert_eq!((least(1_000_000, 1), least(1, 0)), (64 << 10, 64 << 10));
        assert_eq!(min_bytes_kib(Duration::MAX, us(0), u64::MAX), 64 << 10);
    }

    #[test]
    fn a_measurement_holds_for_its_stream() {
        let least = BreakEven::default();
        assert!(least.begin(0) && !least.begin(0));
        assert_eq!(least.kib(0), 0);
        least.set(0, 128);
        assert_eq!((least.kib(0), least.kib(1)), (128, 0));
        assert!(least.begin(1) && !least.begin(0));
    }

    #[test]
    fn bytes_are_copied_and_dropped() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), vec![7; COPY_BYTES as usize]).unwrap();
        let file = File::open(folder.path().join("f")).unwrap();
        let (sender, receiver) = loopback().unwrap();
        sender.set_nonblocking(true).unwrap();
        copy(&file, &sender, &receiver).unwrap();
        copy(&file, &sender, &receiver).unwrap();
        receiver.set_nonblocking(true).unwrap();
        let left = recv(&receiver, &mut [0_u8; 1], RecvFlags::empty()).unwrap_err();
        assert_eq!(left, Errno::AGAIN);
    }
}
