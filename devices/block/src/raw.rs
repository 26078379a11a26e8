//! A file or block device that holds the disk byte by byte, through io_uring.
//!
//! Guest memory goes into the kernel directly: no copy of ours. Each queue has its own ring. A
//! batch is handed over in parts, see [`hand_over`](crate::hand_over). Completions are read from
//! the shared ring; with cooperative task running the kernel does not interrupt the polling
//! sidecore, it sets a flag that the next [`Disk::flush_submissions`] answers with an enter. The
//! ring rings an eventfd only while its owner sleeps.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use base::counter::Counter;
use base::event::Event;
use base::io::{Disk, DiskDone, DiskOp, IoSlice};
use base::sync::lock;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::fs::{Mode, OFlags};

use crate::backend::{Backend, Demands};
use crate::error::BlockError;
use crate::gate::Gate;
use crate::hand_over::HandOver;
use crate::image_file::{self, ImageFile, OpenMode};
use crate::limits::{MAX_BLOCK_LEN_BYTES, MAX_DISK_LEN_BYTES, STEP_LEN_BYTES};
use crate::registered_memory::RegisteredBuffers;
use crate::resident::ResidentDisk;

/// Slot of the registered file that a ring's operations are done on.
const IO_FILE: types::Fixed = types::Fixed(0);

/// Slot of the claim's file, which is only kept open ([`Disk::keep_open`]); empty at first.
const CLAIM_FILE: u32 = 1;

/// Slot of the opening that has the image's lock: the kernel closes it, and so unlocks the image of
/// a killed daemon, when the ring's last request is done.
const LOCK_FILE: usize = 2;

/// Token of an operation that does nothing; those of requests have 32 bits.
const NOTHING: u64 = u64::MAX;

/// Block size of a disk, as the config gives it.
#[derive(Debug, Clone, Copy)]
enum BlockSize {
    Fixed(u32),
    AtLeast(u32),
}

/// The raw back end of a port: one image file or block device.
#[derive(Debug)]
pub struct RawBackend {
    file: Arc<ImageFile>,
    path: PathBuf,
    len_bytes: Arc<AtomicU64>,
    /// Bytes of a block. The disk has whole blocks, whatever the length of its file.
    block_size: u32,
    demands: Demands,
    /// Whether the file is on tmpfs or ramfs.
    is_resident: bool,
    gate: Option<Arc<Gate>>,
    spare: Arc<SpareFiles>,
}

/// Openings of the image that no ring uses now. A write-back error that the kernel has for one of
/// them waits for the next ring that takes it.
pub(crate) type SpareFiles = Mutex<Vec<File>>;

/// A ring's own opening of the image.
///
/// The kernel tells each opening once that pages could not be written (errseq_t). Were one shared,
/// another queue's flush could take the error, and this one's succeed and be answered first.
pub(crate) struct RingFile {
    /// `None`: the ring shares the image's own opening.
    file: Option<File>,
    spare: Arc<SpareFiles>,
}

impl RingFile {
    /// Takes a spare opening, or makes a new one.
    pub(crate) fn take(spare: &Arc<SpareFiles>, image: &ImageFile) -> Self {
        let free = lock(spare).pop();
        Self { file: free.or_else(|| open_again(image)), spare: Arc::clone(spare) }
    }

    /// Takes or makes an opening that goes through the page cache, whatever the image itself does.
    /// It is never shared: an error where it cannot be made.
    pub(crate) fn take_buffered(spare: &Arc<SpareFiles>, image: &ImageFile) -> io::Result<Self> {
        let free = lock(spare).pop();
        let file = free.map_or_else(|| image_file::open_buffered(image), Ok)?;
        Ok(Self { file: Some(file), spare: Arc::clone(spare) })
    }
}

impl Drop for RingFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            lock(&self.spare).push(file);
        }
    }
}

/// Opens an image once more, without a lock of its own. None for one that nobody writes, and where
/// the system refuses it (no /proc, or the file is another user's by now): then the queues share an
/// opening, and only the first failed flush of two at the same time is sure to be told.
fn open_again(image: &ImageFile) -> Option<File> {
    let itself = format!("/proc/self/fd/{}", image.get().as_raw_fd());
    let flags = rustix::fs::fcntl_getfl(image.get()).ok()?;
    if flags & OFlags::ACCMODE == OFlags::RDONLY {
        return None;
    }
    let flags = flags & (OFlags::ACCMODE | OFlags::DIRECT) | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(itself, flags, Mode::empty())
        .inspect_err(|e| tracing::warn!("queues of a disk share an opening of its image: {e}"))
        .ok()
        .map(File::from)
}

impl RawBackend {
    /// Opens and locks the image. Refused where direct I/O asks for larger blocks than
    /// `block_size`.
    pub fn open(
        path: &Path,
        direct: bool,
        read_only: bool,
        block_size: u32,
    ) -> Result<Self, BlockError> {
        Self::open_with(path, direct, read_only, BlockSize::Fixed(block_size))
    }

    /// Opens and locks the image; blocks are of `block_size`, or larger where direct I/O asks for
    /// that ([`RawBackend::block_size`]). Refused if the image has a partition table of other
    /// blocks: its guest would not find its partitions any more.
    pub fn open_auto(
        path: &Path,
        direct: bool,
        read_only: bool,
        block_size: u32,
    ) -> Result<Self, BlockError> {
        let backend = Self::open_with(path, direct, read_only, BlockSize::AtLeast(block_size))?;
        let table = image_file::partition_table_block_size(backend.file.get())
            .map_err(BlockError::file("cannot read the partition table of", path))?;
        match table.filter(|&table| table != backend.block_size) {
            Some(table) => Err(BlockError::ForeignBlockSize {
                path: path.to_path_buf(),
                table,
                block_size: backend.block_size,
            }),
            None => Ok(backend),
        }
    }

    /// Bytes of the disk's blocks.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    fn open_with(
        path: &Path,
        direct: bool,
        read_only: bool,
        block_size: BlockSize,
    ) -> Result<Self, BlockError> {
        let (BlockSize::Fixed(mut bytes) | BlockSize::AtLeast(mut bytes)) = block_size;
        let file = image_file::open_image(path, OpenMode { read_only, direct })?;
        // Such a disk is served while the sidecore waits: zeroing goes in small pieces.
        let max_range_bytes =
            if image_file::is_resident(file.get()) { u64::from(STEP_LEN_BYTES) } else { u64::MAX };
        let mut demands = Demands { max_range_bytes, ..Demands::NONE };
        if direct {
            let (mem_align, offset_align) = image_file::direct_alignment(file.get());
            let may_raise = matches!(block_size, BlockSize::AtLeast(_));
            if offset_align > bytes && !(may_raise && offset_align <= MAX_BLOCK_LEN_BYTES) {
                let (path, align) = (path.to_path_buf(), offset_align);
                return Err(BlockError::DirectAlignment { path, align, block_size: bytes });
            }
            bytes = bytes.max(offset_align);
            demands = Demands { mem_align, offset_align, ..demands };
        }
        let is_resident = image_file::is_resident(file.get());
        // A tmpfs is no device: nothing waits there.
        let gate = if is_resident { None } else { Gate::of(file.get()).ok() };
        let this = Self {
            is_resident,
            gate,
            file: Arc::new(file),
            path: path.to_path_buf(),
            len_bytes: Arc::default(),
            block_size: bytes,
            demands,
            spare: Arc::default(),
        };
        this.resize(None)?;
        Ok(this)
    }

    /// Openings that no ring has.
    #[cfg(test)]
    pub(crate) fn spare_openings(&self) -> usize {
        lock(&self.spare).len()
    }

    /// Has its disks register guest memory of at most `max_bytes`. Disks on tmpfs do not: they have
    /// no ring.
    pub fn registering_memory(mut self, max_bytes: u64) -> Self {
        self.demands.max_registered_bytes = if self.is_resident { 0 } else { max_bytes };
        self
    }
}

impl Backend for RawBackend {
    fn kind(&self) -> &'static str {
        "raw"
    }

    fn open_queue(&self, depth: u16) -> Result<Box<dyn Disk>, BlockError> {
        if self.is_resident {
            let (file, len) = (Arc::clone(&self.file), Arc::clone(&self.len_bytes));
            return Ok(Box::new(ResidentDisk::on_image(file, len, depth)));
        }
        let io_file = RingFile::take(&self.spare, &self.file);
        let len_bytes = Arc::clone(&self.len_bytes);
        let disk = Event::new()
            .and_then(|e| {
                RawDisk::new(Arc::clone(&self.file), io_file, len_bytes, depth, Arc::new(e))
            })
            .map_err(BlockError::resource("making an io_uring"))?;
        Ok(Box::new(disk))
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }

    fn demands(&self) -> Demands {
        self.demands
    }

    fn gate(&self) -> Option<Arc<Gate>> {
        self.gate.clone()
    }

    fn in_place(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.get().as_fd())
    }

    /// Looks at the size again: the owner of the file changes it. A last block that the file has in
    /// part is a whole one of the disk, as with QEMU: the missing part reads as zeroes, and a write
    /// of it makes the file longer.
    fn resize(&self, new_len_bytes: Option<u64>) -> Result<u64, BlockError> {
        let file_len = image_file::len_bytes(self.file.get())
            .map_err(BlockError::file("cannot read the size of", &self.path))?;
        if file_len == 0 {
            return Err(BlockError::Empty { path: self.path.clone() });
        }
        // A device cannot grow: its end stays where it is.
        let unit =
            if image_file::is_regular(self.file.get()) { u64::from(self.block_size) } else { 1 };
        let len = file_len.min(MAX_DISK_LEN_BYTES).next_multiple_of(unit);
        if let Some(asked) = new_len_bytes.filter(|asked| ![len, file_len].contains(asked)) {
            let reason = format!("the file has {file_len} bytes; change the file, then ask again");
            return Err(BlockError::Resize { len_bytes: asked, reason });
        }
        self.len_bytes.store(len, Ordering::Relaxed);
        Ok(len)
    }

    fn sync(&self) -> Result<(), BlockError> {
        self.file.get().sync_data().map_err(BlockError::file("cannot sync", &self.path))
    }
}

/// Ring of one queue on a file.
pub(crate) struct RawDisk {
    ring: IoUring,
    event: Arc<Event>,
    _io_file: RingFile,
    /// Open (and locked) as long as any ring uses it.
    _file: Arc<ImageFile>,
    len_bytes: Arc<AtomicU64>,
    /// Operations taken and not reaped, at most `depth`: the completion ring cannot overflow.
    in_flight: u32,
    depth: u32,
    hand_over: HandOver,
    buffers: RegisteredBuffers,
}

impl RawDisk {
    /// A ring on an opening of its own of the image `file`, which has the lock: the kernel keeps
    /// both until the last operation is over. It rings `event`, which others may ring, too.
    pub(crate) fn new(
        file: Arc<ImageFile>,
        io_file: RingFile,
        len_bytes: Arc<AtomicU64>,
        depth: u16,
        event: Arc<Event>,
    ) -> io::Result<Self> {
        let depth = u32::from(depth.max(1));
        let ring = build_ring(depth)?;
        let mut files = [-1; LOCK_FILE + 1];
        files[LOCK_FILE] = file.get().as_raw_fd();
        let own = io_file.file.as_ref().unwrap_or(file.get());
        files[IO_FILE.0 as usize] = own.as_raw_fd();
        let is_direct = rustix::fs::fcntl_getfl(own)?.contains(OFlags::DIRECT);
        ring.submitter().register_files(&files)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(Self {
            ring,
            event,
            _io_file: io_file,
            _file: file,
            len_bytes,
            in_flight: 0,
            depth,
            hand_over: HandOver::new(is_direct),
            buffers: RegisteredBuffers::default(),
        })
    }
}

/// A ring with cooperative task running (Linux 5.19), or a plain one. Not DEFER_TASKRUN: it ties
/// the ring to one thread, and queues move between sidecores.
fn build_ring(depth: u32) -> io::Result<IoUring> {
    let entries = depth.next_power_of_two();
    let cooperative = IoUring::builder()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .setup_submit_all()
        .build(entries);
    match cooperative {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        other => other,
    }
}

/// The submission entry of one operation.
fn entry(op: DiskOp) -> squeue::Entry {
    match op {
        DiskOp::Read { offset, bufs, count, .. } => {
            opcode::Readv::new(IO_FILE, bufs, count).offset(offset).build()
        }
        DiskOp::Write { offset, bufs, count, .. } => {
            opcode::Writev::new(IO_FILE, bufs, count).offset(offset).build()
        }
        DiskOp::Flush => opcode::Fsync::new(IO_FILE).flags(types::FsyncFlags::DATASYNC).build(),
        DiskOp::Discard { offset, len_bytes } => {
            fallocate(offset, len_bytes, libc::FALLOC_FL_PUNCH_HOLE)
        }
        DiskOp::WriteZeroes { offset, len_bytes, may_unmap } => {
            let mode =
                if may_unmap { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
            fallocate(offset, len_bytes, mode)
        }
    }
}

/// A `fallocate` operation. With both modes the range reads as zeroes afterwards, on files and on
/// block devices; the size stays.
fn fallocate(offset: u64, len: u64, mode: i32) -> squeue::Entry {
    let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
    opcode::Fallocate::new(IO_FILE, len).offset(offset).mode(mode).build()
}

/// Entry of an operation with a single buffer, which needs no list: the kernel then copies no
/// `iovec`. In a registered buffer it has no pages to look up either.
///
/// # Safety
/// `bufs` points at `count` buffers.
unsafe fn single(op: DiskOp, buffers: &RegisteredBuffers) -> Option<squeue::Entry> {
    match op {
        DiskOp::Read { offset, bufs, count: 1, .. } => {
            // SAFETY: by the contract there is one.
            let buf = unsafe { bufs.read() };
            let len = u32::try_from(buf.iov_len).ok()?;
            let base = buf.iov_base.cast();
            Some(match buffers.find(&buf) {
                Some(at) => opcode::ReadFixed::new(IO_FILE, base, len, at).offset(offset).build(),
                None => opcode::Read::new(IO_FILE, base, len).offset(offset).build(),
            })
        }
        DiskOp::Write { offset, bufs, count: 1, .. } => {
            // SAFETY: as above.
            let buf = unsafe { bufs.read() };
            let len = u32::try_from(buf.iov_len).ok()?;
            let base = buf.iov_base.cast_const().cast();
            Some(match buffers.find(&buf) {
                Some(at) => opcode::WriteFixed::new(IO_FILE, base, len, at).offset(offset).build(),
                None => opcode::Write::new(IO_FILE, base, len).offset(offset).build(),
            })
        }
        _ => None,
    }
}

impl Disk for RawDisk {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        if self.in_flight >= self.depth {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // SAFETY: the caller vouches for the buffer list.
        let entry = unsafe { single(op, &self.buffers) }.unwrap_or_else(|| entry(op));
        let entry = entry.user_data(u64::from(token));
        let waiting = self.ring.submission().len() as u32;
        if self.hand_over.goes_first(&op, waiting, self.in_flight.saturating_sub(waiting)) {
            // An error comes again, and is told, at the end of the batch.
            let _ = self.flush_submissions();
        }
        // SAFETY: list and buffers stay valid until the completion is reaped, says the caller; the
        // file is registered with this ring and kept open by it.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))?;
        self.in_flight += 1;
        Ok(())
    }

    fn flush_submissions(&mut self) -> io::Result<()> {
        let queue = self.ring.submission();
        let needed = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if !needed {
            return Ok(());
        }
        let waiting = self.ring.submission().len() as u32;
        if self.hand_over.go(waiting) {
            let nothing = opcode::Nop::new().build().user_data(NOTHING);
            // Without room for it, the kernel joins nothing.
            // SAFETY: it has no buffers.
            let _ = unsafe { self.ring.submission().push(&nothing) };
        }
        match self.ring.submit() {
            Ok(_) => Ok(()),
            // Nothing is lost: what was not taken is still in the ring for the next call.
            Err(e) if is_passing(&e) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        let mut room = done.capacity() - done.len();
        let mut queue = self.ring.completion();
        while room > 0 {
            let Some(cqe) = queue.next() else { break };
            if cqe.user_data() == NOTHING {
                continue;
            }
            room -= 1;
            let result = u32::try_from(cqe.result()).map_err(|_| -cqe.result());
            done.push(DiskDone { token: cqe.user_data() as u32, result });
            self.in_flight -= 1;
        }
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.event.as_raw_fd())
    }

    fn set_wakeups(&mut self, on: bool) {
        let queue = self.ring.completion();
        if on {
            queue.enable_eventfd();
            // The owner's next look at the ring must come after the kernel can see the flag.
            fence(Ordering::SeqCst);
        } else {
            queue.disable_eventfd();
        }
    }

    /// The kernel closes registered files when the ring's last request is done.
    fn keep_open(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.submitter().register_files_update(CLAIM_FILE, &[file.as_raw_fd()]).map(drop)
    }

    /// The kernel pins the pages until the ring's last request is done.
    unsafe fn set_memory(&mut self, memory: &[IoSlice], used: Arc<Counter>) -> io::Result<()> {
        if memory.is_empty() {
            self.buffers = RegisteredBuffers::default();
            return Ok(());
        }
        let (list, buffers) = RegisteredBuffers::cut(memory, used)?;
        // SAFETY: mapped, says the caller; the pages stay the ring's whatever becomes of the
        // addresses, and the caller says that nothing else is submitted under these.
        unsafe { self.ring.submitter().register_buffers(&list) }?;
        self.buffers = buffers;
        Ok(())
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }
}

fn is_passing(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ring of a new file with these bytes, on a file system that has io_uring at work.
    fn disk(bytes: &[u8], direct: bool) -> RawDisk {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let image =
            image_file::open_image(file.path(), OpenMode { read_only: false, direct }).unwrap();
        let io_file = RingFile::take(&Arc::default(), &image);
        let event = Arc::new(Event::new().unwrap());
        RawDisk::new(Arc::new(image), io_file, Arc::default(), 32, event).unwrap()
    }

    /// Waits for so many operations.
    fn reap(disk: &mut RawDisk, count: usize) -> Vec<DiskDone> {
        let mut done = Vec::with_capacity(32);
        let begin = std::time::Instant::now();
        while done.len() < count {
            disk.flush_submissions().unwrap();
            disk.reap(&mut done);
            assert!(begin.elapsed().as_secs() < 10, "{} of {count}", done.len());
        }
        done
    }

    #[test]
    fn a_batch_is_handed_over_in_growing_parts() {
        let mut disk = disk(&[], false);
        let mut began = Vec::new();
        for n in 0..32 {
            // SAFETY: a flush has no buffers.
            unsafe { disk.submit(n, DiskOp::Flush) }.unwrap();
            if disk.ring.submission().len() == 1 {
                began.push(n);
            }
        }
        assert_eq!(began, [0, 2, 4, 6, 9, 13, 19, 28]);
        let done = reap(&mut disk, 32);
        assert!(done.iter().all(|d| d.result == Ok(0)), "{done:?}");
    }

    #[test]
    fn what_joins_two_reads_is_no_operation_of_anybody() {
        #[repr(align(4096))]
        struct Page([u8; 4096]);
        let bytes = [[1; 4096], [2; 4096]].concat();
        let mut disk = disk(&bytes, true);
        let mut pages = [Page([0; 4096]), Page([0; 4096])];
        for (n, page) in pages.iter_mut().enumerate() {
            let buf = IoSlice { iov_base: page.0.as_mut_ptr().cast(), iov_len: 4096 };
            let (offset, len_bytes) = (4096 * n as u64, 4096);
            let op = DiskOp::Read { offset, bufs: &raw const buf, count: 1, len_bytes };
            // SAFETY: the page stays until the end of the test; a list of one is not kept.
            unsafe { disk.submit(n as u32, op) }.unwrap();
        }
        disk.flush_submissions().unwrap();
        assert!(disk.ring.submission().is_empty());
        let mut done = reap(&mut disk, 2);
        done.sort_unstable_by_key(|d| d.token);
        assert_eq!(
            done.iter().map(|d| (d.token, d.result)).collect::<Vec<_>>(),
            [(0, Ok(4096)), (1, Ok(4096))]
        );
        assert_eq!((pages[0].0[0], pages[1].0[4095], disk.in_flight), (1, 2, 0));
        assert!(disk.ring.completion().is_empty());
    }
}
