//! Self-tests of a file system: the daemon finds the bytes on a disk where the file system reports
//! them, it can replace placeholders, and it sees reads over placeholders.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{HOLE, NO_DISK, PROBE_BLOCK_BYTES, Probe, ProbePlaces, Probed, kind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, fstat, major, minor};
use rustix::rand::{GetRandomFlags, getrandom};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::line::{Call, Event, Line};
use crate::placeholders::{Blocks, OverReadBuffer};
use crate::wake::Wake;
use crate::{fiemap, mounts};

/// Time that the daemon has to answer.
const PROBE_TIME: Duration = Duration::from_secs(5);

/// Writes a secret into a file on a device and lets the daemon look for it. Returns the disk's
/// number. The file system begins at `base` on the disk.
///
/// # Errors
/// The daemon has not found it, or a step failed.
pub fn read(device: u64, base: u64, line: &Arc<Line>) -> Result<u32, Reason> {
    let (file, secret) = secret_file(device)?;
    let len = PROBE_BLOCK_BYTES as u64;
    let extents = fiemap::extents(file.as_fd(), 0, len, base, 1)?;
    let offset = match extents.as_slice() {
        [whole] if whole.len_bytes.get() == len && whole.offset.get() != HOLE => whole.offset.get(),
        _ => return Err(Reason::SelfTest),
    };
    let probe = Probe { offset: U64::new(offset), secret };
    let probed = ask(kind::PROBE, probe.as_bytes(), line)?;
    match (probed.disk.get(), Reason::from_number(probed.reason.get())) {
        (NO_DISK, Reason::Complete) => Err(Reason::NoDisk),
        (NO_DISK, reason) => Err(reason),
        (disk, _) => Ok(disk),
    }
}

/// Writes placeholders into a file on a device and checks that the daemon has replaced them.
///
/// # Errors
/// It has not, or a step failed.
pub fn write(device: u64, disk: u32, line: &Arc<Line>) -> Result<(), Reason> {
    let file = temporary_file(device, OFlags::DIRECT)?;
    let (tag, secret) = (random()?, random()?);
    announce(kind::PROBE_WRITE, (disk, tag, secret), line)?;
    let written = Blocks::new(tag, PROBE_BLOCK_BYTES).write(&file, 0, 0, PROBE_BLOCK_BYTES);
    if written != Ok(PROBE_BLOCK_BYTES) {
        return Err(Reason::SelfTest);
    }
    let mut blocks = Blocks::new(tag, PROBE_BLOCK_BYTES);
    let read = blocks.read(&file, 0, PROBE_BLOCK_BYTES).map_err(|_| Reason::SelfTest)?;
    let is_replaced = read == secret.repeat(PROBE_BLOCK_BYTES / secret.len());
    if is_replaced { Ok(()) } else { Err(Reason::SelfTest) }
}

/// Reads a secret over placeholders and checks that the memory still has these; the daemon checks
/// that it sees the secret.
///
/// # Errors
/// The memory has changed, or a step failed.
pub fn read_over(device: u64, disk: u32, line: &Arc<Line>) -> Result<(), Reason> {
    let ((file, secret), tag) = (secret_file(device)?, random()?);
    let direct = crate::reopen::reopen_to_read(&file, OFlags::DIRECT)?;
    announce(kind::PROBE_READ, (disk, tag, secret), line)?;
    let mut over = OverReadBuffer::new(tag, PROBE_BLOCK_BYTES);
    let read = over.read(&direct, 0, 0, PROBE_BLOCK_BYTES);
    let is_seen = read == Ok(PROBE_BLOCK_BYTES) && over.is_untouched(PROBE_BLOCK_BYTES);
    if is_seen { Ok(()) } else { Err(Reason::SelfTest) }
}

/// Makes a file on the disk with one block that repeats a secret.
fn secret_file(device: u64) -> Result<(File, [u8; 32]), Reason> {
    let (file, secret) = (temporary_file(device, OFlags::empty())?, random::<32>()?);
    let block = secret.repeat(PROBE_BLOCK_BYTES / secret.len());
    std::io::Write::write_all(&mut &file, &block).map_err(|_| Reason::SelfTest)?;
    file.sync_all().map_err(|_| Reason::SelfTest)?;
    Ok((file, secret))
}

/// Announces placeholders to the daemon.
fn announce(
    kind: u16,
    (disk, tag, secret): (u32, [u8; 16], [u8; 32]),
    line: &Arc<Line>,
) -> Result<(), Reason> {
    let probe = ProbePlaces { disk: U32::new(disk), reserved: U32::ZERO, tag, secret };
    match Reason::from_number(ask(kind, probe.as_bytes(), line)?.reason.get()) {
        Reason::Complete => Ok(()),
        reason => Err(reason),
    }
}

fn random<const N: usize>() -> Result<[u8; N], Reason> {
    let mut bytes = [0; N];
    let got = getrandom(&mut bytes, GetRandomFlags::empty());
    if got == Ok(N) { Ok(bytes) } else { Err(Reason::SelfTest) }
}

/// Makes a file without a name somewhere on a device: it is deleted when closed.
pub(crate) fn temporary_file(device: u64, flags: OFlags) -> Result<File, Reason> {
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(|_| Reason::SelfTest)?;
    let mut reason = Reason::SelfTest;
    for mount in mounts::parse(&table) {
        if mount.device != (major(device), minor(device)) {
            continue;
        }
        // Content goes to the journal first, and to its place later.
        if mount.options.split(',').any(|option| option == "data=journal") {
            return Err(Reason::FileSystem);
        }
        match open_at(&mount.point, device, flags) {
            Ok(file) => return Ok(file),
            Err(rustix::io::Errno::OPNOTSUPP) => reason = Reason::FileSystem,
            // Read-only, a mount of a single file, or hidden below another mount.
            Err(_) => {}
        }
    }
    Err(reason)
}

fn open_at(folder: &Path, device: u64, flags: OFlags) -> rustix::io::Result<File> {
    let flags = flags | OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?;
    if fstat(&file)?.st_dev == device { Ok(file.into()) } else { Err(rustix::io::Errno::XDEV) }
}

fn ask(kind: u16, probe: &[u8], line: &Arc<Line>) -> Result<Probed, Reason> {
    let wake = Arc::new(Wake::new().map_err(|_| Reason::SelfTest)?);
    let call = line.call(kind, kind::PROBED, probe, &wake)?;
    match wait(&call, &wake) {
        Some(Event::Probed(probed)) => Ok(probed),
        Some(_) => Err(Reason::HostGone),
        None => Err(Reason::SelfTest),
    }
}

/// The answer, or none after the time limit.
fn wait(call: &Call, wake: &Wake) -> Option<Event> {
    let until = Instant::now() + PROBE_TIME;
    loop {
        if let Some(event) = call.next() {
            return Some(event);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        let left = Timespec::try_from(left).ok();
        // The loop covers an interrupted poll.
        let _ = poll(&mut [PollFd::new(wake, PollFlags::IN)], left.as_ref());
        wake.clear();
    }
}
