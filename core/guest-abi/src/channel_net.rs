//! Channels: messages between the network parts of two members' kernel modules.
//!
//! The last part of `guest/kmod/include/millrace_abi.h`; see [`crate::channel`].

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[cfg(doc)]
use crate::channel::client;

/// Bit in [`NetMeta::flags`] of a message between the clients themselves: no bytes, `gso_type` has
/// its kind.
pub const CONTROL: u8 = 0x80;
/// [`NetMeta::gso_type`] with [`CONTROL`]: the mark with the number `hash` came by `gso_size`
/// queues more, and so did all that these were given before it.
pub const ARRIVED: u8 = 1;
/// [`NetMeta::gso_type`] with [`CONTROL`]: a mark, which shall be answered. Another form of it is a
/// frame of its own, on the ordinary way.
pub const MARK: u8 = 2;

/// EtherType of a mark's frame: "local experimental" (IEEE 802).
pub const ETHERTYPE: u16 = 0x88b5;
/// First bytes of [`NetMark`]: `1MRN`.
pub const MARK_MAGIC: u32 = u32::from_le_bytes(*b"1MRN");

/// Mark behind the Ethernet header of its frame.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NetMark {
    /// [`MARK_MAGIC`].
    pub magic: U32,
    /// Id of the sender.
    pub from_id: U32,
    /// Id of the member that is to answer.
    pub to_id: U32,
    /// Number of the mark.
    pub token: U32,
}

/// [`crate::channel::Entry::meta`] of [`client::NET`] and [`client::DEVICE`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NetMeta {
    /// [`CONTROL`], or as in `struct virtio_net_hdr` (virtio specification 5.1.6), with the next
    /// four; offsets are from the message's first byte.
    pub flags: u8,
    /// Field of `struct virtio_net_hdr`: see `flags`.
    pub gso_type: u8,
    /// Field of `struct virtio_net_hdr`: see `flags`.
    pub hdr_len: U16,
    /// Field of `struct virtio_net_hdr`: see `flags`.
    pub gso_size: U16,
    /// Field of `struct virtio_net_hdr`: see `flags`.
    pub csum_start: U16,
    /// Field of `struct virtio_net_hdr`: see `flags`.
    pub csum_offset: U16,
    /// Ethernet header of the route, or of the frame.
    pub eth: [u8; 14],
    /// Hash of the flow (0: none), or the subject of [`CONTROL`].
    pub hash: U32,
    /// Zero.
    pub reserved: [u8; 4],
}
