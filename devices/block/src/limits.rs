//! The numbers of this crate, each with its reason.

/// Bytes of a sector: the unit of the protocol, whatever the block size (virtio 1.2, 5.2.4).
pub const SECTOR_LEN_BYTES: u64 = 512;

/// Largest block of a disk: guests have no pages smaller than this, and Linux takes no larger ones.
pub const MAX_BLOCK_LEN_BYTES: u32 = 4096;

/// Most data segments of a request that we announce (`seg_max`) unless the config says otherwise:
/// with the header and the status byte they fit the smallest usual ring, of 128 (QEMU's default).
/// Linux before 4.14 and FreeBSD insist on that.
pub const SEG_MAX: u32 = 126;

/// Most data segments that the config may have announced, for rings of 256 and more.
pub const MAX_SEG_MAX: u32 = MAX_OP_SEGS as u32 - 2;

/// Most buffers of one operation below us, and segments of a request that each slot has room for:
/// with the header and the status byte, a request of [`MAX_SEG_MAX`] segments.
pub const MAX_OP_SEGS: usize = 256;

/// Requests of a queue in flight with more segments than [`MAX_OP_SEGS`]: 256 KiB of lists. Such
/// requests are large (Windows drivers send 1 MiB in them), and further ones wait in the ring.
pub const WIDE_COUNT: u16 = 8;

/// Most requests of one queue in flight. Each holds 8 KiB of segment lists; SPDK and the kernel
/// gain nothing beyond 256 on one queue, and the rest waits in the ring, where it costs nothing.
pub const MAX_IN_FLIGHT: u16 = 256;

/// Most chains taken from the ring at once: enough to spread one system call over many requests,
/// few enough that another port's turn comes soon.
pub const BATCH_CHAINS: usize = 64;

/// Most bytes of one operation below us. Larger requests go in steps, so that one of them cannot
/// hold up a sidecore for the time of a 64 MiB copy.
pub const STEP_LEN_BYTES: u32 = 1 << 20;

/// Most bytes of an operation of a disk that works while the sidecore waits (memory, tmpfs, null),
/// and while others on the sidecore may want something: 13 µs of copying, the most by which a VM
/// goes beyond its turn of a round. Less would be a system call of tmpfs for too few bytes.
pub const SHORT_STEP_LEN_BYTES: u32 = 128 << 10;

/// Bytes started in one poll, for the same reason: about 100 µs of copying. A step that was begun
/// below it is still started.
pub const POLL_BUDGET_BYTES: u64 = 1 << 20;

/// Bytes of direct I/O that count as one of a poll's budget and of a step: their pages are pinned
/// and not copied. So a poll hands over up to 4 MiB, which devices take as one request where its
/// parts adjoin, and the requests of Linux drivers (up to 1,280 KiB) go in one step.
pub const DIRECT_SHARE: u64 = 4;

/// Least charge of a request: taking one through its steps costs about as much as copying 4 KiB.
pub const MIN_CHARGE_BYTES: u64 = 4096;

/// Bytes of a DISCARD that are charged as one, where it goes to a device or a file system. It moves
/// no data: extents or mappings are struck out, 1 GiB in one to a few milliseconds, in which the
/// same device moves 4 MiB or more. So the largest request (16 GiB) is charged what the largest
/// read is. Disks in memory free page after page while the sidecore waits: there it is charged in
/// full.
pub const DISCARD_SHARE: u64 = 256;

/// Most bytes of one DISCARD below us: a whole range, so that the device is told in one go.
pub const DISCARD_STEP_LEN_BYTES: u64 = 1 << 30;

/// Most bytes of one WRITE ZEROES below us. Each step is charged before the next one begins: as
/// much as the largest read, 16 calls for the largest range.
pub const ZERO_STEP_LEN_BYTES: u64 = 64 << 20;

/// Length of a bounce buffer: 128 KiB is what file systems read ahead and disks take at once.
pub const BOUNCE_LEN_BYTES: u32 = 128 << 10;

/// Bounce buffers of a queue: 4 MiB, allocated only for direct I/O and for ports with stages.
pub const BOUNCE_COUNT: u16 = 32;

/// Most ranges in one DISCARD or WRITE ZEROES request: Linux merges at most so many bios into one
/// usefully, and they are stored in the request's slot.
pub const MAX_RANGES: usize = 16;

/// Most sectors of one range: 1 GiB, so that the file system gives them back in one go without
/// being held for seconds.
pub const MAX_RANGE_SECTORS: u32 = 2 << 20;

/// Length of a registered buffer: 1 GiB is the most that io_uring takes.
pub const BUFFER_LEN_BYTES: usize = 1 << 30;

/// Guest memory that is filled at once before it is registered: about a millisecond.
pub const FILL_LEN_BYTES: usize = 4 << 20;

/// Most disks of a queue that end their operations after a change of its memory table. A table
/// changes when memory is plugged, and operations end in milliseconds: more is a front end that
/// plays with it, and each keeps a whole VM's memory pinned.
pub const MAX_FORMER_DISKS: usize = 4;

/// Most registered buffers of a queue: io_uring's own limit (IORING_MAX_REG_BUFFERS), 16 TiB of
/// guest memory. Before Linux 5.13 it is 1,024.
pub const MAX_BUFFERS: usize = 1 << 14;

/// Times an operation is repeated after EINTR or EAGAIN before the guest gets an error.
pub const MAX_RETRIES: u8 = 8;

/// Nanoseconds from the first error of the storage to the next try of a held request. Each further
/// pause is twice as long: a full file system is not freed faster than somebody notices.
pub const HOLD_MIN_NS: u64 = 100_000_000;

/// Most nanoseconds between two tries of held requests: how late a guest goes on at most when there
/// is room again and nobody says so. A try every 5 s costs nothing.
pub const HOLD_MAX_NS: u64 = 5_000_000_000;

/// Bytes of a serial number (virtio 1.2, 5.2.6: VIRTIO_BLK_ID_BYTES).
pub const SERIAL_LEN_BYTES: usize = 20;

/// Largest disk: 2^63 bytes is what a file offset can say; one MiB less keeps sums in range.
pub const MAX_DISK_LEN_BYTES: u64 = (1 << 63) - (1 << 20);

/// Largest memory disk, and how far one can grow: only touched pages cost memory.
pub const MAX_MEMORY_DISK_LEN_BYTES: u64 = 64 << 30;

/// Least nanoseconds between two log lines of a queue about failed requests: a guest can cause
/// as many as it likes.
pub const LOG_INTERVAL_NS: u64 = 1_000_000_000;
