//! File as the source of a pipe.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use guest_abi::Reason;
use guest_abi::pipe::{Extent, FileEnd, end};
use guest_abi::program::OWN_POSITION;
use rustix::fs::{
    FileType, IFlags, OFlags, SeekFrom, fcntl_getfl, fstat, fstatfs, ioctl_getflags, seek,
};
use rustix::io::{ReadWriteFlags, preadv2};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use crate::disks::Disks;
use crate::lease::{Lease, Leases};
use crate::line::{Line, ReadAnswer, ReadRequest};
use crate::placed_source::PlacedSource;
use crate::reopen::reopen_to_read;
use crate::wake::Wake;
use crate::{fiemap, sys};

// Magic numbers of `statfs(2)`.
const EXT4: i64 = 0xEF53;
const XFS: i64 = 0x5846_5342;
/// Flags of single files: content that is encrypted (FIEMAP does not report it), or that goes to
/// the journal first and to its place later.
const REFUSED_FLAGS: u32 = 0x800 | 0x4000;
/// Flag of xfs: content on the realtime device, whose blocks have numbers of their own.
const XFLAG_REALTIME: u32 = 1;

/// File that a pipe reads. Holds the program's descriptor and the lease while it lives.
#[derive(Debug)]
pub struct FileSource {
    program: OwnedFd,
    start: u64,
    uses_own_position: bool,
    len_bytes: u64,
    is_to_end: bool,
    is_cached: bool,
    method: ReadMethod,
}

/// Method by which the host reads the file.
#[derive(Debug)]
enum ReadMethod {
    /// Extents on a disk: under the lease they keep the file's bytes.
    Extents { lease: Lease, disk: u32, extents: Vec<Extent> },
    /// Placeholders, as the file may be written during the pipe.
    Placed(Box<PlacedSource>),
}

/// Checks that a program's descriptor may be read, and its file be piped.
pub fn check(program: BorrowedFd<'_>) -> Result<(), Reason> {
    let mode = fcntl_getfl(program).map_err(|_| Reason::NotPermitted)?;
    if mode.contains(OFlags::PATH) || mode & OFlags::RWMODE == OFlags::WRONLY {
        return Err(Reason::NotPermitted);
    }
    check_content(program)
}

/// Checks that a program's descriptor is of a regular file that it may read, on a file system that
/// pipes know.
pub fn check_readable(program: BorrowedFd<'_>) -> Result<(), Reason> {
    let mode = fcntl_getfl(program).map_err(|_| Reason::NotPermitted)?;
    if mode.contains(OFlags::PATH) || mode & OFlags::RWMODE == OFlags::WRONLY {
        return Err(Reason::NotPermitted);
    }
    let stat = fstat(program).map_err(|_| Reason::NotPermitted)?;
    let magic = fstatfs(program).map_err(|_| Reason::FileSystem)?.f_type as i64;
    match (FileType::from_raw_mode(stat.st_mode), magic) {
        (FileType::RegularFile, EXT4 | XFS) => Ok(()),
        (FileType::RegularFile, _) => Err(Reason::FileSystem),
        _ => Err(Reason::NotAFile),
    }
}

/// Checks that a regular file's content is on the disk unchanged.
pub fn check_content(program: BorrowedFd<'_>) -> Result<(), Reason> {
    let magic = fstatfs(program).map_err(|_| Reason::FileSystem)?.f_type as i64;
    let flags = || ioctl_getflags(program).unwrap_or(IFlags::empty()).bits();
    match magic {
        EXT4 if flags() & REFUSED_FLAGS == 0 => Ok(()),
        EXT4 => Err(Reason::Extents),
        XFS => match sys::xflags(program) {
            Ok(flags) if flags & XFLAG_REALTIME == 0 => Ok(()),
            _ => Err(Reason::Extents),
        },
        _ => Err(Reason::FileSystem),
    }
}

/// Offset in a file at which a pipe begins: the one asked for, or the descriptor's own position.
pub fn start(program: &OwnedFd, offset: u64) -> Result<u64, Reason> {
    let start = match offset {
        OWN_POSITION => seek(program, SeekFrom::Current(0)).map_err(|_| Reason::NotAFile)?,
        offset => offset,
    };
    if i64::try_from(start).is_ok() { Ok(start) } else { Err(Reason::Malformed) }
}

impl FileSource {
    /// Takes a lease and looks up the extents: at most `len_bytes` in `max_extents` of them.
    /// `device` is the number of the file system's device. Without a lease, the file may be read
    /// over placeholders.
    ///
    /// # Errors
    /// Reason why the file cannot be piped; [`Reason::EndOfFile`]: there are no bytes from the
    /// offset on.
    pub fn new(
        program: OwnedFd,
        device: u64,
        (offset, len_bytes, max_extents): (u64, u64, usize),
        (disks, line): (&Disks, &Arc<Line>),
        (leases, wake, may_place): (&Leases, &Arc<Wake>, bool),
    ) -> Result<Self, Reason> {
        let uses_own_position = offset == OWN_POSITION;
        let start = start(&program, offset)?;
        let own = reopen_to_read(&program, OFlags::empty())?;
        let place = disks.place_of(device, line)?;
        let method = match leases.take(own, wake) {
            Ok(lease) => ReadMethod::Extents { lease, disk: place.disk, extents: Vec::new() },
            Err(_) if may_place => {
                let own = reopen_to_read(&program, OFlags::empty())?;
                ReadMethod::Placed(Box::new(PlacedSource::new(own, start, device, (disks, line))?))
            }
            Err(reason) => return Err(reason),
        };
        // The size is fixed under the lease only.
        let size = fstat(method.file()).map_err(|_| Reason::NotAFile)?.st_size as u64;
        let left = size.saturating_sub(start);
        let wanted = len_bytes.min(left);
        if wanted == 0 {
            return Err(Reason::EndOfFile);
        }
        let is_cached = is_in_memory(method.file().as_fd(), start, wanted);
        let mut this = Self {
            program,
            start,
            uses_own_position,
            len_bytes: wanted,
            is_to_end: false,
            is_cached,
            method,
        };
        if let ReadMethod::Extents { lease, extents, .. } = &mut this.method {
            let file = lease.file().as_fd();
            *extents = fiemap::extents(file, start, wanted, place.base, max_extents)?;
            this.len_bytes = fiemap::len_bytes(extents);
        }
        this.is_to_end = left < len_bytes && this.len_bytes == left;
        Ok(this)
    }

    /// Kind of the end in messages.
    pub fn kind(&self) -> u8 {
        match self.method {
            ReadMethod::Extents { .. } => end::FILE,
            ReadMethod::Placed(_) => end::PLACES,
        }
    }

    /// Length of the part that is read, at least 1.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// True when the file had fewer bytes than were asked for.
    pub fn is_to_end(&self) -> bool {
        self.is_to_end
    }

    /// True when the guest has it in memory: the host need not read it from a slower disk.
    pub fn is_cached(&self) -> bool {
        self.is_cached
    }

    /// True when another process waits to write to the file.
    pub fn is_lease_broken(&self) -> bool {
        match &self.method {
            ReadMethod::Extents { lease, .. } => lease.is_broken(),
            ReadMethod::Placed(_) => false,
        }
    }

    /// Appends the description of this end to a message.
    pub fn write_end(&self, body: &mut Vec<u8>) {
        match &self.method {
            ReadMethod::Extents { disk, extents, .. } => {
                let end =
                    FileEnd { disk: U32::new(*disk), extents: U32::new(extents.len() as u32) };
                body.extend_from_slice(end.as_bytes());
                body.extend_from_slice(extents.as_bytes());
            }
            ReadMethod::Placed(placed) => placed.write_end(body),
        }
    }

    /// Reads a range that the daemon asks for. None: the request breaks the protocol.
    pub fn serve(&mut self, request: &ReadRequest) -> Option<ReadAnswer> {
        match &mut self.method {
            ReadMethod::Extents { .. } => None,
            ReadMethod::Placed(placed) => placed.serve(request, self.len_bytes),
        }
    }

    /// Reads bytes from `at` on, counted from the pipe's beginning, through the guest's memory.
    pub fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.method.file().read_exact_at(into, self.start + at)
    }

    /// Moves the program's position on by the bytes moved, if that was asked for.
    pub fn finish(self, moved_bytes: u64) {
        if self.uses_own_position && moved_bytes > 0 {
            let position = SeekFrom::Start(self.start.saturating_add(moved_bytes));
            // A regular file's position inside its size can always be set.
            let _ = seek(&self.program, position);
        }
    }
}

impl ReadMethod {
    fn file(&self) -> &File {
        match self {
            Self::Extents { lease, .. } => lease.file(),
            Self::Placed(placed) => placed.file(),
        }
    }
}

/// Number of places of a file that are sampled.
const SAMPLES: u64 = 4;

/// Whether a part of a file is in the guest's page cache, by a sample: the first byte that is not
/// ends it.
fn is_in_memory(file: BorrowedFd<'_>, start: u64, len_bytes: u64) -> bool {
    let step = len_bytes.div_ceil(SAMPLES);
    let mut samples = (0..SAMPLES).map(|n| n * step).filter(|at| *at < len_bytes);
    samples.all(|at| {
        let mut byte = [0];
        let into = &mut [io::IoSliceMut::new(&mut byte)];
        preadv2(file, into, start + at, ReadWriteFlags::NOWAIT).is_ok()
    })
}
