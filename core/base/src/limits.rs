//! Limits shared by several crates, each with its reason.

/// Largest virtqueue, in descriptors: the most that the specification allows (virtio 1.2, 2.6), and
/// crosvm's default; QEMU and DPDK stop at 1,024 for network and disk. The rings lie in the guest's
/// memory.
pub const MAX_QUEUE_SIZE: u16 = 32_768;

/// Most queue pairs of a network port: Linux asks for one per CPU, and hashes flows onto fewer as
/// well.
pub const MAX_QUEUE_PAIRS: u16 = 16;

/// Most virtqueues of a disk. QEMU asks for one per CPU, and exits when the back end has fewer.
pub const MAX_DISK_QUEUES: u16 = 32;

/// Most virtqueues of one port: all queue pairs and the control queue behind them. vhost-user
/// indexes fit in a byte.
pub const MAX_QUEUES: u16 = 2 * MAX_QUEUE_PAIRS + 1;

/// Most segments (guest buffers after translation) of one descriptor chain. Linux sends at most 19
/// for a frame and `seg_max` + 2 for a disk request; Windows drivers send up to 1,026 descriptors,
/// whatever `seg_max` says. Each of 1,024 may lie over two memory regions.
pub const MAX_CHAIN_SEGS: usize = 2048;

/// Most bytes of one descriptor chain, readable and writable together. A disk request of 254
/// segments of 64 KiB is 16 MiB; 64 MiB leaves room and stays far from 32-bit overflow.
pub const MAX_CHAIN_LEN_BYTES: u32 = 64 << 20;

/// Most memory regions of one VM, announced to the VMM as the number of memory slots. Others
/// announce 509; QEMU with memory hot-plug uses at most 256.
pub const MAX_MEMORY_REGIONS: usize = 64;

/// Most bytes of one VM's memory regions, together. More than any host has; a sparse file costs its
/// owner nothing, so without a limit one VM could fill the daemon's address space.
pub const MAX_MEMORY_BYTES: u64 = 16 << 40;

/// Least bytes of files that the ports of one VM may map, on small hosts too: VMMs give memory that
/// may be plugged in later, far more than there is, as a sparse file.
pub const MIN_VM_MAPPED_BYTES: u64 = 1 << 40;

/// Most mappings of one VM, its dirty logs among them: eight tables of [`MAX_MEMORY_REGIONS`], of
/// which requests in flight keep the older ones. The process has 16,384.
pub const MAX_VM_MAPPINGS: u64 = 512;

/// Most bytes of peers' files that the process maps at a time: half of the 128 TiB that user space
/// has on x86-64 and arm64. The rest is for our own rings, stacks and heap, whose failure to map
/// would end more than one port.
pub const MAX_MAPPED_BYTES: u64 = 64 << 40;

/// Most ports of one daemon: each session has one (mostly sleeping) thread.
pub const MAX_PORTS: usize = 1024;

/// Most bytes of a port's or VM's name: it becomes a metric label and a file name.
pub const MAX_NAME_LEN_BYTES: usize = 64;
