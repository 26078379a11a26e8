//! A ring: memory that a program of a guest and the module's process share, in place of the socket
//! between them.
//!
//! A VM has one *region* for all its rings: a file of the host that is a memory device of the
//! guest, such as QEMU's `ivshmem-plain`, whose second memory BAR it is. What is in it, all
//! little-endian:
//!
//! | at | is | written by |
//! | --- | --- | --- |
//! | 0 | [`RegionHead`] | the host |
//! | [`SLOTS_OFF`] + n × [`SLOT_BYTES`] | slot n, of one connection | both |
//!
//! A slot has two directions, each a ring of [`DATA_BYTES`] bytes and four words:
//!
//! | word | is | written by |
//! | --- | --- | --- |
//! | tail (u64) | bytes that were ever written | the writer |
//! | waits (u32) | not 0: ring me when there is room | the writer; the reader takes it away |
//! | head (u64) | bytes that were ever read | the reader |
//! | sleeps (u32) | not 0: ring me when there are bytes | the reader; the writer takes it away |
//!
//! Behind them, at [`STAMP_OFF`], is the slot's *stamp* (u64, written by the host): who has the
//! slot. It is random, another one for each connection, and stays until another one has the slot.
//!
//! Byte `i` of all that was ever written is at `i % DATA_BYTES` of the ring. Offsets from the
//! slot's beginning are [`TO_HOST`] and [`TO_CLIENT`]: each of the four cache lines there is
//! written by one side.
//!
//! # How a connection gets one
//! After its welcome and before anything else a client that has the region before it sends a frame
//! of kind [`kind::RING`](crate::module::kind::RING) with a [`RingWanted`], and waits for the
//! answer: a frame of the same kind with a [`RingGranted`], or a failed one, and then the socket is
//! used as before, if the host takes requests by it. With the grant both sides have changed over:
//! all frames that follow go by the ring, both ways. The socket stays: when it ends, so does the
//! connection.
//!
//! # Whose slot it is
//! A connection may have ended, and its slot may be somebody else's, before a client knows it. So a
//! client looks at the stamp whenever it is about to read or write, and takes another one than its
//! own for the end of its connection. When the socket ends it first reads what is there still, such
//! as a goodbye. And the `check` of each frame that goes by a ring is exclusive-or'ed with the
//! stamp, so that what is left of another connection is never taken for a frame.
//!
//! # Sleeping
//! Whoever wants to sleep sets its word (`sleeps`, or `waits` when a ring is full), then looks once
//! more, and sleeps on the socket. Whoever wrote or read something then looks at the other's word;
//! if it is not 0, it sets it to 0 and sends a *bell*: one byte by the socket, of any value.
//! Between storing and looking both sides need a full memory barrier. Bells say no more than: look
//! at everything again; there may be some that nobody needs.
//!
//! # Trust
//! The guest can write everything in its region. The host believes none of it: it keeps its own
//! copy of the words that are its own, and looks only at `tail`, `head` and the flags of the other
//! side; a difference of more than [`DATA_BYTES`] ends the connection, with
//! [`failure::RING`](crate::module::failure::RING). Bytes are copied out of the ring before they
//! are looked at. All programs of a guest that can reach the region can read each other's rings: it
//! is for one service.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of a region: `MLRCRING`.
pub const REGION_MAGIC: u64 = u64::from_le_bytes(*b"MLRCRING");

/// Version of this page.
pub const REGION_VERSION: u32 = 1;

/// Offset at which slots begin.
pub const SLOTS_OFF: usize = 4096;

/// Bytes of a slot: its words in a page, and two rings.
pub const SLOT_BYTES: usize = 256 << 10;

/// Bytes of a ring.
pub const DATA_BYTES: usize = (SLOT_BYTES - 4096) / 2;

/// Least bytes of a region: three slots. A BAR's size is a power of two.
pub const MIN_REGION_BYTES: u64 = 1 << 20;

/// Most bytes of a region: as many slots as a module has clients.
pub const MAX_REGION_BYTES: u64 = 1 << 30;

/// Offset of the stamp in a slot.
pub const STAMP_OFF: usize = 256;

/// Offsets of the parts of a direction in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Direction {
    /// Offset of `tail`, u64; `waits`, u32, is behind it.
    pub tail_off: usize,
    /// Offset of `head`, u64; `sleeps`, u32, is behind it.
    pub head_off: usize,
    /// Offset of the ring.
    pub data_off: usize,
}

/// Direction in which the client writes and the host reads.
pub const TO_HOST: Direction = Direction { tail_off: 0, head_off: 64, data_off: 4096 };

/// Direction in which the host writes and the client reads.
pub const TO_CLIENT: Direction =
    Direction { tail_off: 128, head_off: 192, data_off: 4096 + DATA_BYTES };

/// Header at offset 0 of a region.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct RegionHead {
    /// [`REGION_MAGIC`], written last.
    pub magic: U64,
    /// [`REGION_VERSION`].
    pub version: U32,
    /// Slots of the region.
    pub slots: U32,
    /// Random id, another one for each process of the host: a client that knows it has this region
    /// before it.
    pub id: [u8; 16],
}

/// Request of a client for a slot.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct RingWanted {
    /// [`RegionHead::id`], as the client sees it.
    pub id: [u8; 16],
}

/// Answer of the host with a slot, whose words are all zero.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct RingGranted {
    /// Number of the slot.
    pub slot: U32,
    /// Zero.
    pub reserved: U32,
    /// Stamp of the slot; not zero.
    pub stamp: U64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_where_the_specification_says() {
        assert_eq!((size_of::<RegionHead>(), DATA_BYTES), (32, 129_024));
        assert_eq!((size_of::<RingWanted>(), size_of::<RingGranted>()), (16, 16));
        assert_eq!(TO_CLIENT.data_off + DATA_BYTES, SLOT_BYTES);
        let slots = (MIN_REGION_BYTES as usize - SLOTS_OFF) / SLOT_BYTES;
        assert_eq!(slots, 3);
    }
}
