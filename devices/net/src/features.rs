//! Virtio feature bits of a network device (virtio 1.2, 5.1.3 and 6) as masks.

/// The device completes partial checksums.
pub const CSUM: u64 = 1 << 0;
/// The driver takes frames with partial checksums.
pub const GUEST_CSUM: u64 = 1 << 1;
/// Receive offloads over the control queue.
pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
/// The MTU is announced.
pub const MTU: u64 = 1 << 3;
/// The MAC address is in config space.
pub const MAC: u64 = 1 << 5;
/// The driver takes TCP super-packets over IPv4.
pub const GUEST_TSO4: u64 = 1 << 7;
/// The driver takes TCP super-packets over IPv6.
pub const GUEST_TSO6: u64 = 1 << 8;
/// The driver takes super-packets with ECN.
pub const GUEST_ECN: u64 = 1 << 9;
/// The device takes TCP super-packets over IPv4.
pub const HOST_TSO4: u64 = 1 << 11;
/// The device takes TCP super-packets over IPv6.
pub const HOST_TSO6: u64 = 1 << 12;
/// The device takes super-packets with ECN.
pub const HOST_ECN: u64 = 1 << 13;
/// One frame may take several receive buffers.
pub const MRG_RXBUF: u64 = 1 << 15;
/// Link state in config space.
pub const STATUS: u64 = 1 << 16;
/// Control queue (kept by the VMM, or ours: see [`WHOLE_DEVICE`]).
pub const CTRL_VQ: u64 = 1 << 17;
/// Receive modes over the control queue.
pub const CTRL_RX: u64 = 1 << 18;
/// VLAN filter over the control queue.
pub const CTRL_VLAN: u64 = 1 << 19;
/// More receive modes over the control queue.
pub const CTRL_RX_EXTRA: u64 = 1 << 20;
/// The driver announces itself when it is asked to in config space.
pub const GUEST_ANNOUNCE: u64 = 1 << 21;
/// Several queue pairs.
pub const MQ: u64 = 1 << 22;
/// MAC address over the control queue.
pub const CTRL_MAC_ADDR: u64 = 1 << 23;
/// Descriptors may be laid out in any way (legacy drivers).
pub const ANY_LAYOUT: u64 = 1 << 27;
/// Indirect descriptor tables.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// Event index.
pub const EVENT_IDX: u64 = 1 << 29;
/// Virtio 1.0 or later.
pub const VERSION_1: u64 = 1 << 32;
/// Packed rings.
pub const RING_PACKED: u64 = 1 << 34;
/// Buffers are used in order.
pub const IN_ORDER: u64 = 1 << 35;
/// The driver takes UDP super-packets over IPv4.
pub const GUEST_USO4: u64 = 1 << 54;
/// The driver takes UDP super-packets over IPv6.
pub const GUEST_USO6: u64 = 1 << 55;
/// The device takes UDP super-packets.
pub const HOST_USO: u64 = 1 << 56;

/// Everything about checksums and segmentation.
pub const OFFLOADS: u64 = CSUM
    | GUEST_CSUM
    | GUEST_TSO4
    | GUEST_TSO6
    | GUEST_ECN
    | HOST_TSO4
    | HOST_TSO6
    | HOST_ECN
    | GUEST_USO4
    | GUEST_USO6
    | HOST_USO;

/// Offloads that a driver can take, and switch off over the control queue.
pub const GUEST_OFFLOADS: u64 =
    GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_USO4 | GUEST_USO6;

/// Features offered besides to front ends that leave the control queue to us. A VMM with one of its
/// own would not tell us what a driver asks of it; and QEMU's would not have us send announcements.
pub const WHOLE_DEVICE: u64 = CTRL_GUEST_OFFLOADS | CTRL_VLAN | CTRL_RX_EXTRA | GUEST_ANNOUNCE;

/// Features that every port offers. STATUS' content and the control queue are the VMM's, where it
/// has them: without the bits here QEMU would not offer them to the driver.
pub const ALWAYS: u64 = VERSION_1
    | MRG_RXBUF
    | MTU
    | STATUS
    | CTRL_VQ
    | CTRL_RX
    | CTRL_MAC_ADDR
    | ANY_LAYOUT
    | INDIRECT_DESC
    | EVENT_IDX;
