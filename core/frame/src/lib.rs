//! Ethernet frames as the data path sees them: a checked copy of the headers, and the rest where it
//! lies.
//!
//! # Theory of operation
//! A frame comes from a guest's ring or from a wire of the host's. Its virtio-net header and its
//! first [`HEAD_LEN`] bytes are copied once into a [`Head`], and everything is judged by that copy:
//! offloads ([`Vnet`]), addresses ([`Mac`]), the place of IP and transport header ([`L4`]). What is
//! delivered is the copy too, so that nobody can change a header after it was judged. The rest of
//! the frame stays in its sender's memory ([`Body`]) and is copied once, to its receiver, unless
//! all of it has to be seen or changed: then the whole frame is copied into a [`FrameBuffer`].
//!
//! What a network card would do for a receiver (filling in checksums, cutting super-packets) is
//! here as well ([`complete_checksum`], [`SegmentPlan`]); the caller knows whether it is needed.
//! Where a frame goes is not known here: this crate knows no switch, no port and no connection.
//!
//! # Limits
//! - [`HEAD_LEN`], 128 bytes of headers: two VLAN tags, IPv6 and a full TCP header are 122. Third
//!   VLAN tags and longer IPv6 extension headers are not followed.
//! - [`MAX_FRAME`], 65,557 bytes: the largest IP packet behind two VLAN tags.
//! - [`MAX_SLICES`], 1,024 pieces of a frame that leaves by a wire: what `writev` takes.
//! - [`MAX_SEGMENTS`], 128 segments of a super-packet: 64 KiB at an MSS of 536 is 122.

mod buffer;
mod checksum;
mod head;
mod l4;
mod layout;
mod mac;
mod segmentation;
mod vnet;

#[cfg(feature = "testing")]
pub mod testing;

pub use buffer::FrameBuffer;
pub use checksum::{complete_checksum, fold, sum};
pub use head::{ETH_LEN, HEAD_LEN, Head, MAX_FRAME};
pub use l4::{
    IPPROTO_ICMP, IPPROTO_ICMPV6, IPPROTO_TCP, IPPROTO_UDP, L4, be16, ether_type, flow_hash,
};
pub use layout::{Body, Frame, HeadBytes, MAX_SLICES, io_slice};
pub use mac::Mac;
pub use segmentation::{MAX_SEGMENTS, SegmentPlan};
pub use vnet::{
    Allowed, F_DATA_VALID, F_NEEDS_CSUM, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4,
    PLAIN, VNET_LEN, VNET_LEN_LEGACY, Vnet,
};
