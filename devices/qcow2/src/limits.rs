//! The numbers of this crate, each with its reason.

/// Smallest and largest clusters, log2 of bytes: 512 bytes to 2 MiB, as QEMU makes and takes them.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;

/// Most bytes of an L1 table, QEMU's limit: 4 million L2 tables, 2 PiB with clusters of 64 KiB. It
/// is in memory as a whole.
pub const MAX_L1_LEN_BYTES: u64 = 32 << 20;

/// Most bytes of a refcount table, QEMU's limit: files of 2 PiB with clusters of 64 KiB. It is in
/// memory as a whole.
pub const MAX_REFCOUNT_TABLE_LEN_BYTES: u64 = 8 << 20;

/// Most snapshots, QEMU's limit.
pub const MAX_SNAPSHOTS: u32 = 65_536;

/// Most bytes of the snapshot table, QEMU's limit.
pub const MAX_SNAPSHOT_TABLE_LEN_BYTES: u64 = 64 << 20;

/// Most entries of all snapshots' L1 tables together: each L2 table of a snapshot is remembered
/// with 8 bytes, so that nothing is written over it.
pub const MAX_SNAPSHOT_TABLES: u64 = 16 << 20;

/// Most bitmaps, QEMU's limit.
pub const MAX_BITMAPS: u32 = 65_535;

/// Most bytes of the bitmap directory, QEMU's limit.
pub const MAX_BITMAP_DIRECTORY_LEN_BYTES: u64 = 64 << 20;

/// Most bytes of a bitmap, QEMU's limit.
pub const MAX_BITMAP_LEN_BYTES: u64 = 512 << 20;

/// Longest name of a backing file, in bytes: it has to fit the first cluster, and QEMU takes no
/// more.
pub const MAX_BACKING_NAME_LEN_BYTES: u32 = 1023;

/// Largest disk: 2^56 is what an entry can say of a file, and sums stay in range.
pub const MAX_DISK_LEN_BYTES: u64 = 1 << 56;

/// Bytes of a slice, the piece of an L2 table that is read and kept at once: a page. Random reads
/// over a huge disk then cost a page each, and not a whole table.
pub const SLICE_LEN_BYTES: u64 = 4096;

/// Bytes of mapping entries kept in memory for an image unless its setting says otherwise, as
/// QEMU's: 256 GiB of disk with clusters of 64 KiB.
pub const DEFAULT_CACHE_LEN_BYTES: u64 = 32 << 20;

/// Least bytes of mapping entries that are kept.
pub const MIN_CACHE_LEN_BYTES: u64 = 64 << 10;

/// Slices that each queue remembers for itself, past the shared cache and its lock: 1 MiB.
pub const QUEUE_SLICES: usize = 256;

/// Bytes of refcount blocks kept in memory: 64 GiB of file with the usual clusters.
pub const REFCOUNT_CACHE_LEN_BYTES: u64 = 2 << 20;

/// Most clusters whose entries one write sets at once: 1 KiB of entries, 4 MiB of data with the
/// usual clusters, which is more than an operation has.
pub const MAX_RUN_CLUSTERS: u64 = 64;

/// Clusters are reserved so many bytes at a time, at first; each time that the reserve was used up
/// soon the next one is twice as large, or eight times where nothing was left of it.
pub const MIN_RESERVE_LEN_BYTES: u64 = 1 << 20;

/// Most bytes reserved at a time: the half that is left when the next ones are asked for lasts a
/// fast writer for 30 ms. They are holes of the file; a killed daemon leaves them as leaks until
/// the next opening.
pub const MAX_RESERVE_LEN_BYTES: u64 = 128 << 20;

/// Most clusters reserved at a time: so many refcounts are written in one go.
pub const MAX_RESERVE_CLUSTERS: u64 = 8192;

/// A file is extended by an eighth of its length, within these: each extension is one sync, and
/// takes no room.
pub const MIN_EXTENSION_LEN_BYTES: u64 = 64 << 20;

/// Most bytes of an extension of the file, see [`MIN_EXTENSION_LEN_BYTES`].
pub const MAX_EXTENSION_LEN_BYTES: u64 = 1 << 30;

/// Most clusters of a file that can be checked: a byte of memory each. 64 TiB with the usual
/// clusters.
pub const MAX_CHECK_CLUSTERS: u64 = 1 << 30;

/// Most clusters with 255 references and more that can be checked: 512 MiB of memory. Only images
/// with so many snapshots have them, 1 TiB of each with the usual clusters.
pub const MAX_CHECK_SHARED_CLUSTERS: usize = 1 << 24;

/// Clusters freed by the guest that may wait for its next FLUSH, in bytes; with more we sync.
pub const MAX_RELEASED_LEN_BYTES: u64 = 256 << 20;
