//! Errors of guest memory and of rings: every text names the fault, the place and the limit.

use thiserror::Error;

/// A wrong memory table or address.
///
/// Remedy: none by settings: the VM monitor or the guest broke a rule. Restart the VM; report it to
/// the monitor's makers if it repeats.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum MemoryError {
    /// The range is not (wholly) inside the VM's memory.
    #[error("guest address {addr:#x}+{len:#x} is not in the VM's memory")]
    NotMapped {
        /// First guest (or front-end user) address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The range wraps around 2^64.
    #[error("guest range {addr:#x}+{len:#x} wraps around")]
    Wraps {
        /// First address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A region overlaps one that is there.
    #[error("memory region {addr:#x}+{len:#x} overlaps another")]
    Overlaps {
        /// First guest address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Too many regions.
    ///
    /// Remedy: give the VM fewer and larger parts of memory.
    #[error("{count} memory regions; the limit is {limit}")]
    TooMany {
        /// Number of regions asked for.
        count: usize,
        /// Limit.
        limit: usize,
    },
    /// The regions are too large together.
    ///
    /// Remedy: raise `memory_limit` of the VM to what it has, hot-plugged memory included.
    #[error(
        "memory region {addr:#x}+{len:#x} makes {total:#x} bytes of memory; the limit of a port is \
         {limit:#x}"
    )]
    TooLarge {
        /// First guest address of the region that goes beyond the limit.
        addr: u64,
        /// Length of that region in bytes.
        len: u64,
        /// Bytes of all regions of the port.
        total: u64,
        /// Limit.
        limit: u64,
    },
    /// The region to remove is not in the table.
    #[error("no memory region {addr:#x}+{len:#x} to remove")]
    NoSuchRegion {
        /// First guest address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The file behind a region is shorter than the region, or not mappable.
    ///
    /// Remedy: do as the reason says: memory of VMs is shared (`share=on`) and no shorter than
    /// announced.
    #[error("memory region {addr:#x}+{len:#x} cannot be mapped: {reason}")]
    Unmappable {
        /// First guest address.
        addr: u64,
        /// Length in bytes.
        len: u64,
        /// Reason.
        reason: String,
    },
    /// The file of the dirty log is shorter than it was.
    ///
    /// Remedy: none: the migration fails. Start it again.
    #[error("the dirty log was truncated by its owner")]
    LogTruncated,
    /// The dirty log does not tell of all memory: pages that change would be lost in a migration.
    #[error("a dirty log of {len} bytes for memory up to {end:#x}; {needed} bytes are needed")]
    LogTooShort {
        /// Bytes of the log.
        len: u64,
        /// The first guest address behind all memory.
        end: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// An access hit a truncated file (SIGBUS): the region's content is gone.
    #[error("memory region {addr:#x}+{len:#x} was truncated by its owner")]
    Truncated {
        /// First guest address.
        addr: u64,
        /// Length in bytes.
        len: u64,
    },
}

/// Fault of one chain in a ring that is in order: the request fails, the port goes on. Programs of
/// the guest may name buffers (direct I/O), so a wrong buffer must not stop a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainFault {
    /// More segments than [`base::limits::MAX_CHAIN_SEGS`].
    TooManySegs,
    /// More bytes than [`base::limits::MAX_CHAIN_LEN_BYTES`].
    TooManyBytes,
    /// A buffer is not, or not wholly, in the VM's memory.
    NotMapped,
}

/// A wrong ring. The port that has it stops.
///
/// Remedy: none by settings: the guest's driver broke a rule of virtio. Its device stopped; restart
/// the VM, and look into its kernel's log.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum RingError {
    /// Queue size outside the rules.
    #[error("queue size {size}: must be {rule} and at most {limit}")]
    BadSize {
        /// Size asked for.
        size: u32,
        /// "a power of two" or "above 0".
        rule: &'static str,
        /// Limit.
        limit: u16,
    },
    /// A ring's address is not aligned as the specification says.
    #[error("{part} ring at {addr:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// Part: descriptor, driver or device.
        part: &'static str,
        /// Address.
        addr: u64,
        /// Alignment wanted.
        align: u64,
    },
    /// Ring parts overlap each other.
    #[error("{part} ring overlaps another part of the queue")]
    OverlappingParts {
        /// Part: descriptor, driver or device.
        part: &'static str,
    },
    /// Available index ran ahead by more than the queue holds.
    #[error("available index {avail} is {ahead} ahead of ours ({seen}); the queue has {size}")]
    AvailJump {
        /// The guest's index.
        avail: u16,
        /// Position of the device.
        seen: u16,
        /// Distance.
        ahead: u16,
        /// Queue size.
        size: u16,
    },
    /// A start position outside the ring, or the used index of one.
    #[error("base: {which} index {index} is outside the ring of {size}")]
    BadStart {
        /// Side: available or used.
        which: &'static str,
        /// Index of the position.
        index: u16,
        /// Ring size.
        size: u16,
    },
    /// The base that the front end set does not go with the used index.
    #[error(
        "base {base} (the next available index) is {ahead} ahead of the used index {used}; the queue has \
         {size}"
    )]
    BadBase {
        /// Base that the front end set.
        base: u16,
        /// Used index in the ring.
        used: u16,
        /// Distance.
        ahead: u16,
        /// Queue size.
        size: u16,
    },
    /// A descriptor index outside its table.
    #[error("descriptor index {index} is outside the table of {size}")]
    BadIndex {
        /// Index in the chain.
        index: u16,
        /// Table size.
        size: u16,
    },
    /// A chain longer than its table (a loop) or than our limit.
    #[error("descriptor chain at {head} has more than {limit} {unit}")]
    ChainTooLong {
        /// Head index or buffer id.
        head: u16,
        /// Limit.
        limit: u64,
        /// Unit of the limit: segments, descriptors or bytes.
        unit: &'static str,
    },
    /// A device-readable descriptor after a writable one.
    #[error("readable descriptor after a writable one in the chain at {head}")]
    ReadableAfterWritable {
        /// Head index or buffer id.
        head: u16,
    },
    /// An indirect descriptor that breaks a rule.
    #[error("indirect descriptor in the chain at {head}: {rule}")]
    BadIndirect {
        /// Head index or buffer id.
        head: u16,
        /// The broken rule.
        rule: &'static str,
    },
    /// An empty descriptor or chain.
    #[error("descriptor {index} in the chain at {head} has length 0")]
    ZeroLength {
        /// Head index or buffer id.
        head: u16,
        /// Index of the descriptor.
        index: u16,
    },
    /// The driver used a feature that was not negotiated.
    #[error("driver uses {feature}, which was not negotiated")]
    NotNegotiated {
        /// Name of the feature.
        feature: &'static str,
    },
    /// A request that lacks a part it needs (found by a device engine).
    #[error("request at {head}: {what}")]
    BadRequest {
        /// Head index or buffer id.
        head: u16,
        /// Fault, with the limit.
        what: &'static str,
    },
    /// The inflight region (shared with the front end) makes no sense.
    #[error("inflight region: {0}")]
    BadInflight(String),
    /// A memory error at a place.
    #[error("{place}: {source}")]
    Memory {
        /// Place: ring, indirect table, guest memory, inflight region.
        place: &'static str,
        /// The cause.
        source: MemoryError,
    },
}
