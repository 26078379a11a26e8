//! Config of a port, and the virtio config space that its driver sees.

use std::path::PathBuf;

use crate::stage::BlockStage;
use sidecore::VmId;

use crate::check_progress::CheckProgress;
use crate::error::BlockError;
use crate::limits::{
    MAX_BLOCK_LEN_BYTES, MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEG_MAX, SECTOR_LEN_BYTES, SEG_MAX,
    SERIAL_LEN_BYTES,
};
use crate::slab::JobKind;

/// Feature bits of virtio-blk (virtio 1.2, 5.2.3) and of rings (6).
pub mod feature {
    /// `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// FLUSH requests are understood.
    pub const FLUSH: u64 = 1 << 9;
    /// `topology` is valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the write cache.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// More than one queue.
    pub const MQ: u64 = 1 << 12;
    /// DISCARD requests are understood.
    pub const DISCARD: u64 = 1 << 13;
    /// WRITE ZEROES requests are understood.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Indirect descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Event index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// Virtio 1.0 and later.
    pub const VERSION_1: u64 = 1 << 32;
    /// Packed rings.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Hints for the driver about good sizes of operations. Lengths are in blocks of the port's block
/// size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Topology {
    /// Log2 of the number of blocks in a physical block.
    pub physical_block_exp: u8,
    /// Block at which the first physical block begins.
    pub alignment_offset: u8,
    /// Suggested smallest operation.
    pub min_io_blocks: u16,
    /// Suggested operation.
    pub opt_io_blocks: u32,
}

/// Back end of a disk: the place of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendConfig {
    /// A file or block device that holds the disk byte by byte.
    Raw {
        /// The image.
        path: PathBuf,
        /// Whether I/O goes past the host's page cache (O_DIRECT).
        direct: bool,
        /// Most guest memory that is registered with the kernel, which pins it; 0: none. Only with
        /// `direct`. For VMs whose VMM never takes memory back (no balloon): the kernel would go on
        /// reading and writing the old pages.
        registered_memory_bytes: u64,
    },
    /// A qcow2 image.
    Qcow2 {
        /// The image.
        path: PathBuf,
        /// The only directory (with those below it) from which backing files may come. `None`: an
        /// image that names a backing file is refused.
        backing_dir: Option<PathBuf>,
        /// External data file, for an image whose data is not in its own file.
        data_file: Option<PathBuf>,
        /// Bytes of mapping entries kept in memory; 0: the default.
        cache_len_bytes: u64,
        /// Whether I/O goes past the host's page cache (O_DIRECT).
        direct: bool,
    },
    /// Memory of the daemon. It is gone when the daemon ends, unless another process keeps its file
    /// ([`crate::memory::MemoryBackend::file`]).
    Memory {
        /// Size of the disk.
        len_bytes: u64,
    },
    /// Null device, for measurements: writes vanish, reads give zeroes.
    Null {
        /// Size of the disk.
        len_bytes: u64,
    },
}

/// Policy for a request that the storage fails (EIO, ENOSPC, …).
///
/// Held requests are not answered: the guest waits, and nothing of it is lost. They are tried again
/// with pauses of up to 5 s, and go on when one of them succeeds, or by
/// [`crate::BlockPort::resume`]. Flushes are never held: what a failed one lost cannot be written
/// again. Nor are requests that a pipe answers, that name memory which is not there, or that meet a
/// contradiction in an image: no second try mends those.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest sees every error.
    Report,
    /// Hold every request that fails.
    Hold,
    /// Hold requests that write and find no space (ENOSPC, EDQUOT), report the rest: the default of
    /// QEMU's `werror` and `rerror`.
    #[default]
    Enospc,
}

impl OnError {
    /// Whether a request is held for this error.
    pub(crate) fn holds(self, kind: JobKind, errno: i32) -> bool {
        let is_final = matches!(
            errno,
            libc::EFAULT
                | libc::EINVAL
                | libc::EOPNOTSUPP
                | libc::ENOSYS
                | libc::ENOTTY
                | libc::EUCLEAN
        );
        match self {
            Self::Report => false,
            Self::Hold => !is_final,
            Self::Enospc => kind != JobKind::Read && matches!(errno, libc::ENOSPC | libc::EDQUOT),
        }
    }
}

/// Config of a [`crate::BlockPort`].
pub struct BlockPortConfig {
    /// `vm/port`, for logs and metrics.
    pub name: String,
    /// The VM's account.
    pub vm: VmId,
    /// The place of the bytes.
    pub backend: BackendConfig,
    /// Whether requests that would change the disk are refused.
    pub read_only: bool,
    /// Virtqueues, 1 to [`base::limits::MAX_DISK_QUEUES`].
    pub queues: u16,
    /// Data segments of a request that the driver is told of, 1 to [`MAX_SEG_MAX`]; two less than
    /// the ring has descriptors, or some drivers do not start. Longer requests are served all the
    /// same.
    pub seg_max: u32,
    /// Logical block size in bytes: a power of two, 512 to 4,096.
    pub block_size: u32,
    /// Whether blocks may be larger than `block_size` where direct I/O demands that.
    pub auto_block_size: bool,
    /// Hints for the driver.
    pub topology: Topology,
    /// Serial number (GET ID), at most 20 bytes.
    pub serial: String,
    /// Whether the write cache is on at first; else every write is durable before it completes.
    pub writeback: bool,
    /// Policy for requests that the storage fails.
    pub on_error: OnError,
    /// Whether packed rings are offered.
    pub packed: bool,
    /// Whether the event index is offered.
    pub event_idx: bool,
    /// Progress of the check of an image that was not closed (qcow2).
    pub check_progress: CheckProgress,
    /// Interposition, first to last on the way from the VM. With any, data passes through bounce
    /// buffers, and all queues run on one sidecore.
    pub stages: Vec<Box<dyn BlockStage>>,
}

impl BlockPortConfig {
    /// A config with the usual values: one queue, 512-byte blocks, write cache on, packed rings and
    /// event index offered.
    pub fn new(name: impl Into<String>, backend: BackendConfig) -> Self {
        Self {
            name: name.into(),
            vm: VmId::NONE,
            backend,
            read_only: false,
            queues: 1,
            seg_max: SEG_MAX,
            block_size: 512,
            auto_block_size: false,
            topology: Topology::default(),
            serial: String::new(),
            writeback: true,
            on_error: OnError::default(),
            packed: true,
            event_idx: true,
            check_progress: CheckProgress::default(),
            stages: Vec::new(),
        }
    }

    /// Checks every value against its limit.
    pub fn check(&self) -> Result<(), BlockError> {
        let wrong = |what, value: String, rule: String| {
            Err(BlockError::Config { port: self.name.clone(), what, value, rule })
        };
        let limit = base::limits::MAX_NAME_LEN_BYTES;
        if self.name.is_empty() || self.name.len() > limit {
            let rule = format!("1 to {limit} bytes long");
            return wrong("the name's length", self.name.len().to_string(), rule);
        }
        let limit = base::limits::MAX_DISK_QUEUES;
        if self.queues == 0 || self.queues > limit {
            return wrong("queues", self.queues.to_string(), format!("1 to {limit}"));
        }
        if !(1..=MAX_SEG_MAX).contains(&self.seg_max) {
            return wrong("seg_max", self.seg_max.to_string(), format!("1 to {MAX_SEG_MAX}"));
        }
        if !self.block_size.is_power_of_two()
            || !(512..=MAX_BLOCK_LEN_BYTES).contains(&self.block_size)
        {
            let rule = "512, 1024, 2048 or 4096".to_string();
            return wrong("block_size", self.block_size.to_string(), rule);
        }
        if self.serial.len() > SERIAL_LEN_BYTES || self.serial.bytes().any(|b| b == 0) {
            let rule = format!("at most {SERIAL_LEN_BYTES} bytes without a zero byte");
            return wrong("serial", format!("{:?}", self.serial), rule);
        }
        if let BackendConfig::Raw { direct: false, registered_memory_bytes: 1.., .. } = self.backend
        {
            let rule = "0 for disks that are not direct".to_string();
            return wrong("registered_memory_bytes", "set".to_string(), rule);
        }
        // 2^12 blocks of 4 KiB are 16 MiB: no disk has larger physical blocks.
        if self.topology.physical_block_exp > 12 {
            let value = self.topology.physical_block_exp.to_string();
            return wrong("topology.physical_block_exp", value, "0 to 12".to_string());
        }
        Ok(())
    }

    /// Feature bits that the port offers.
    pub(crate) fn features(&self) -> u64 {
        let mut bits = feature::VERSION_1
            | feature::INDIRECT_DESC
            | feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::TOPOLOGY
            | feature::CONFIG_WCE;
        let mut offer = |bit, yes| bits |= if yes { bit } else { 0 };
        offer(feature::MQ, self.queues > 1);
        offer(feature::RO, self.read_only);
        offer(feature::RING_PACKED, self.packed);
        offer(feature::EVENT_IDX, self.event_idx);
        offer(feature::WRITE_ZEROES, !self.read_only);
        // A stage is shown data only; a discard would change the disk past it.
        offer(feature::DISCARD, !self.read_only && self.stages.is_empty());
        bits
    }
}

/// Bytes of `struct virtio_blk_config` with everything virtio 1.2 knows (5.2.4).
const SPACE_LEN_BYTES: usize = 96;

/// Most config bytes vhost-user can ask for (`VHOST_USER_MAX_CONFIG_SIZE`); what is beyond the
/// structure reads as zeroes, so that newer front ends can ask for newer fields.
pub const MAX_CONFIG_LEN_BYTES: u32 = 256;

/// Offset of `writeback`, the one field a driver may write.
pub const WRITEBACK_OFFSET: u32 = 32;

/// Values of a config space.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConfigSpace {
    pub len_bytes: u64,
    pub seg_max: u32,
    pub block_size: u32,
    pub topology: Topology,
    pub writeback: bool,
    pub queues: u16,
    pub features: u64,
}

impl ConfigSpace {
    /// `struct virtio_blk_config`, little endian.
    fn encode(&self) -> [u8; SPACE_LEN_BYTES] {
        let mut space = [0u8; SPACE_LEN_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.len_bytes / SECTOR_LEN_BYTES).to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(20, &self.block_size.to_le_bytes());
        put(24, &[self.topology.physical_block_exp, self.topology.alignment_offset]);
        put(26, &self.topology.min_io_blocks.to_le_bytes());
        put(28, &self.topology.opt_io_blocks.to_le_bytes());
        put(32, &[u8::from(self.writeback)]);
        put(34, &self.queues.to_le_bytes());
        let alignment = self.block_size / SECTOR_LEN_BYTES as u32;
        if self.features & feature::DISCARD != 0 {
            put(36, &MAX_RANGE_SECTORS.to_le_bytes());
            put(40, &(MAX_RANGES as u32).to_le_bytes());
            put(44, &alignment.to_le_bytes());
        }
        if self.features & feature::WRITE_ZEROES != 0 {
            put(48, &MAX_RANGE_SECTORS.to_le_bytes());
            put(52, &(MAX_RANGES as u32).to_le_bytes());
            put(56, &[1]);
        }
        space
    }

    /// Fills `out` from `offset`; false when that is beyond [`MAX_CONFIG_LEN_BYTES`].
    pub fn read(&self, offset: u32, out: &mut [u8]) -> bool {
        let end = u64::from(offset) + out.len() as u64;
        if end > u64::from(MAX_CONFIG_LEN_BYTES) {
            return false;
        }
        let space = self.encode();
        for (i, byte) in out.iter_mut().enumerate() {
            *byte = space.get(offset as usize + i).copied().unwrap_or(0);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigSpace {
            len_bytes: 0x1234_5600,
            seg_max: 77,
            block_size: 4096,
            topology: Topology {
                physical_block_exp: 3,
                alignment_offset: 1,
                min_io_blocks: 8,
                opt_io_blocks: 64,
            },
            writeback: true,
            queues: 4,
            features: u64::MAX,
        }
    }

    #[test]
    fn fields_stand_where_the_specification_puts_them() {
        let mut bytes = [0xffu8; 96];
        assert!(space().read(0, &mut bytes));
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), 0x1234_5600 / 512);
        assert_eq!(u32_at(8), 0, "size_max is not offered");
        assert_eq!(u32_at(12), 77);
        assert_eq!(u32_at(20), 4096);
        assert_eq!(bytes[24..28], [3, 1, 8, 0]);
        assert_eq!(u32_at(28), 64);
        assert_eq!(bytes[32..36], [1, 0, 4, 0]);
        assert_eq!((u32_at(36), u32_at(40), u32_at(44)), (MAX_RANGE_SECTORS, 16, 8));
        assert_eq!((u32_at(48), u32_at(52)), (MAX_RANGE_SECTORS, 16));
        assert_eq!(bytes[56], 1);
        assert!(bytes[57..].iter().all(|&b| b == 0), "no secure erase, no zones");
    }

    #[test]
    fn partial_reads_agree_with_whole_ones_and_the_end_is_guarded() {
        let mut whole = [0u8; 96];
        assert!(space().read(0, &mut whole));
        for offset in 0..96usize {
            for len in 0..(96 - offset).min(9) {
                let mut part = vec![0xee; len];
                assert!(space().read(offset as u32, &mut part));
                assert_eq!(part, whole[offset..offset + len]);
            }
        }
        let mut tail = [1u8; 6];
        assert!(space().read(250, &mut tail));
        assert_eq!(tail, [0; 6]);
        assert!(!space().read(251, &mut tail));
        assert!(!space().read(u32::MAX, &mut tail));
    }

    #[test]
    fn values_outside_their_limits_are_refused_with_a_text_that_names_them() {
        let good = || BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 1 << 20 });
        assert!(good().check().is_ok());
        let mut cases: Vec<(BlockPortConfig, &str)> = Vec::new();
        let mut add = |what, change: &dyn Fn(&mut BlockPortConfig)| {
            let mut config = good();
            change(&mut config);
            cases.push((config, what));
        };
        add("queues", &|c| c.queues = 0);
        add("queues", &|c| c.queues = 33);
        add("seg_max", &|c| c.seg_max = 0);
        add("seg_max", &|c| c.seg_max = 255);
        add("block_size", &|c| c.block_size = 0);
        add("block_size", &|c| c.block_size = 1000);
        add("block_size", &|c| c.block_size = 8192);
        add("serial", &|c| c.serial = "x".repeat(21));
        add("serial", &|c| c.serial = "a\0b".into());
        add("name", &|c| c.name = String::new());
        add("name", &|c| c.name = "n".repeat(65));
        add("physical_block_exp", &|c| c.topology.physical_block_exp = 13);
        let direct =
            |direct| BackendConfig::Raw { path: "/i".into(), direct, registered_memory_bytes: 1 };
        add("registered_memory_bytes is set", &|c| c.backend = direct(false));
        assert!(BlockPortConfig::new("d", direct(true)).check().is_ok());
        for (config, what) in cases {
            let text = config.check().unwrap_err().to_string();
            assert!(text.contains(what), "{text}");
        }
    }

    #[test]
    fn read_only_disks_offer_nothing_that_writes() {
        let mut config = BlockPortConfig::new("d", BackendConfig::Null { len_bytes: 512 });
        config.read_only = true;
        let bits = config.features();
        assert_ne!(bits & feature::RO, 0);
        assert_eq!(bits & (feature::DISCARD | feature::WRITE_ZEROES), 0);
    }

    /// Linux before 4.14 and FreeBSD do not start where a request of `seg_max` segments, with
    /// header and status byte, does not fit the ring; QEMU's has 128 descriptors.
    #[test]
    #[allow(non_snake_case)]
    fn abuse_B3_what_is_announced_fits_the_smallest_usual_ring() {
        let config = BlockPortConfig::new("d", BackendConfig::Null { len_bytes: 512 });
        assert_eq!(config.seg_max + 2, 128);
        let most = BlockPortConfig { seg_max: MAX_SEG_MAX, ..config };
        assert!(most.check().is_ok());
    }
}
