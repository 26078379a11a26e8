//! Channels: memory of members and their host that another party reads.
//!
//! The Rust side of `guest/kmod/include/millrace_abi.h`, which says what is where and who writes
//! it; a test compares the two. Names are the header's without their prefix; offsets and lengths
//! are bytes.
//!
//! - The *mailbox* ([`Host`], [`Member`], [`Exclude`], [`Guest`]): the host and one member have it.
//! - The member's own memory ([`Dir`] and what it leads to): its peers read it.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of these structures.
pub const VERSION: u32 = 5;

/// Magic number of [`Host`].
pub const HOST_MAGIC: u64 = u64::from_le_bytes(*b"MRHOST\0\0");
/// Magic number of [`Guest`].
pub const GUEST_MAGIC: u64 = u64::from_le_bytes(*b"MRGUEST\0");
/// Magic number of [`Dir`].
pub const DIR_MAGIC: u64 = u64::from_le_bytes(*b"MRDIR\0\0\0");
/// Magic number of [`Link`].
pub const LINK_MAGIC: u64 = u64::from_le_bytes(*b"MRLINK\0\0");

/// Bytes of a mailbox.
pub const MAILBOX_LEN: usize = 65_536;
/// Offset of the member's half.
pub const GUEST_OFF: usize = 32_768;
/// Offset of the member table, in the host's half.
pub const TABLE_OFF: usize = 4_096;
/// Offset of flows that may not be taken, in the host's half.
pub const EXCLUDE_OFF: usize = 24_576;

/// Most members of one trust domain: a member maps all others.
pub const MAX_MEMBERS: usize = 32;
/// Most hardware addresses of a member.
pub const MAX_MACS: usize = 8;
/// Most IP addresses of a member.
pub const MAX_ADDRESSES: usize = 16;
/// Most regions of a member's memory.
pub const MAX_REGIONS: usize = 8;
/// Most flows of a member that may not be taken.
pub const MAX_EXCLUDES: usize = 128;
/// Most doorbells of a member. 0: control; 1 to 8: one for each receive queue.
pub const MAX_VECTORS: u32 = 9;
/// Bytes of a name with its zero.
pub const NAME_LEN: usize = 64;

/// Bytes of a page.
pub const PAGE_LEN: u64 = 4_096;
/// Bytes of a chunk, of which rings, slots and FIFOs are made.
pub const CHUNK_LEN: usize = 65_536;
/// Most rings of a link, in one direction.
pub const MAX_QUEUES: usize = 8;
/// Entries of a ring: one chunk.
pub const RING_LEN: usize = 1_024;
/// Messages by reference on their way, per ring: one chunk.
pub const SLOTS: usize = 128;
/// Entries of the ring of released slots; above [`SLOTS`].
pub const DONE_LEN: usize = 256;
/// Most chunks of a FIFO: 2 MiB per ring.
pub const MAX_FIFO_CHUNKS: usize = 32;
/// Bytes of [`Entry::meta`].
pub const META_LEN: usize = 32;
/// Most bytes that a slot carries itself: headers.
pub const MAX_HEAD_LEN: usize = 192;
/// Most pieces of pages of a message by reference: 64 KiB in pages, unaligned.
pub const MAX_SEGS: usize = 18;
/// Most bytes of a message: 64 KiB and headers.
pub const MAX_MESSAGE_LEN: u32 = 65_920;
/// Least bytes that a message counts for [`Host::ceiling_bytes_per_s`], as a frame at the switch.
pub const MIN_CHARGE_LEN: u32 = 512;

/// Values of [`Member::state`].
pub mod member_state {
    /// Entry not used.
    pub const NONE: u32 = 0;
    /// Member has a doorbell; its kernel module has not spoken yet.
    pub const JOINED: u32 = 1;
    /// `generation` and `dir_off` are valid: links may be made.
    pub const ACTIVE: u32 = 2;
    /// Member leaves: send no more, give its pages back.
    pub const LEAVING: u32 = 3;
    /// VM is gone: it reads nothing any more.
    pub const DEAD: u32 = 4;
}

/// Values of [`Guest::state`].
pub mod guest_state {
    /// The module has not begun.
    pub const NONE: u32 = 0;
    /// Kernel module makes links.
    pub const ACTIVE: u32 = 1;
    /// Draining, by itself or because it was told to.
    pub const LEAVING: u32 = 2;
    /// Kernel module has left: nothing of it is used any more, and it uses nothing.
    pub const LEFT: u32 = 3;
}

/// Values of [`LinkStatus::state`] and [`Link::state`].
pub mod link_state {
    /// No link.
    pub const NONE: u32 = 0;
    /// Offered; the peer's offer is awaited.
    pub const OPENING: u32 = 1;
    /// Messages go both ways.
    pub const UP: u32 = 2;
    /// Draining: sends no more; waits for pages lent and borrowed.
    pub const DRAINING: u32 = 3;
    /// Nothing is lent or borrowed: the peer's memory can be unplugged.
    pub const CLOSED: u32 = 4;
}

/// Values of [`Entry::kind`].
pub mod kind {
    /// All bytes are in the FIFO.
    pub const COPY: u8 = 1;
    /// Bytes are where a slot says.
    pub const REFERENCE: u8 = 2;
}

/// Values of [`Entry::client`].
pub mod client {
    /// IP packets that were taken at LOCAL_OUT.
    pub const NET: u8 = 1;
    /// Ethernet frames of the channel's own network device.
    pub const DEVICE: u8 = 2;
    /// Kept for block requests.
    pub const BLOCK: u8 = 3;
    /// The highest.
    pub const MAX: u8 = 15;
}

/// Range of guest-physical memory and its place in the member's memory file.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Region {
    /// Guest-physical address of its first byte.
    pub gpa: U64,
    /// Bytes.
    pub len: U64,
    /// Offset in the file.
    pub off: U64,
}

/// Header at offset 0 of the mailbox. Written by the host.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Host {
    /// [`HOST_MAGIC`], written last.
    pub magic: U64,
    /// [`VERSION`].
    pub version: U32,
    /// Id of this member at the doorbell server.
    pub member_id: U32,
    /// Id of the host at the doorbell server, to call it.
    pub host_id: U32,
    /// Doorbells of every member, 2 to [`MAX_VECTORS`].
    pub vectors: U32,
    /// Interval at which heartbeats are counted up.
    pub heartbeat_ms: U32,
    /// Time after which a heartbeat that stands still means death.
    pub dead_after_ms: U32,
    /// Heartbeat of the host.
    pub heartbeat: U64,
    /// Odd while table, regions or excludes are being written.
    pub table_seq: U32,
    /// Used entries of `regions`.
    pub regions_len: U32,
    /// Bytes of this member's memory file that peers see, from 0.
    pub window_len: U64,
    /// Places of its memory.
    pub regions: [Region; MAX_REGIONS],
    /// Used entries at [`EXCLUDE_OFF`].
    pub excludes_len: U32,
    /// Counted up with every change; the member answers with it.
    pub excludes_seq: U32,
    /// Trust domain, for people; zero-terminated.
    pub domain: [u8; NAME_LEN],
    /// Most bytes that this member may send in a second, to all peers together, each message
    /// counted with [`MIN_CHARGE_LEN`] at least; 0: no ceiling.
    pub ceiling_bytes_per_s: U64,
    /// Most messages that it may send in a second; 0: no ceiling.
    pub ceiling_ops_per_s: U64,
    /// Milliseconds of both ceilings that it may use at once after a pause.
    pub ceiling_burst_ms: U32,
    /// Zero.
    pub reserved: U32,
}

/// Entry of the member table: [`MAX_MEMBERS`] of them at [`TABLE_OFF`], this member's included.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Member {
    /// Id of the member at the doorbell server.
    pub id: U32,
    /// State: see [`member_state`].
    pub state: U32,
    /// Number of the member for this load of its kernel module.
    pub generation: U64,
    /// Offset of its directory page.
    pub dir_off: U64,
    /// Bytes of its memory that can be seen.
    pub window_len: U64,
    /// Physical slot that its memory is plugged into here; 0: none.
    pub slot: U32,
    /// Used entries of `macs`.
    pub macs_len: U32,
    /// Used entries of `addresses`.
    pub addresses_len: U32,
    /// Zero.
    pub reserved0: U32,
    /// VM, for people; zero-terminated.
    pub name: [u8; NAME_LEN],
    /// Six bytes each, two of padding.
    pub macs: [[u8; 8]; MAX_MACS],
    /// IPv6 addresses, or IPv4 ones as `::ffff:a.b.c.d`.
    pub addresses: [[u8; 16]; MAX_ADDRESSES],
    /// Zero.
    pub reserved: [u8; 80],
}

/// Flow that has to take the ordinary way, from this member's view. Ports in host order.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Exclude {
    /// Address of the member, as in [`Member::addresses`].
    pub local: [u8; 16],
    /// Address or port of the other end.
    pub remote: [u8; 16],
    /// Port of the member.
    pub local_port: U16,
    /// Address or port of the other end.
    pub remote_port: U16,
    /// Protocol: `IPPROTO_TCP`.
    pub protocol: U32,
}

/// Status of a member's link to one peer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct LinkStatus {
    /// Id of the peer at the doorbell server.
    pub peer_id: U32,
    /// State: see [`link_state`].
    pub state: U32,
    /// Pages of the peer that are in use here.
    pub borrowed: U32,
    /// Messages of this member that the peer still refers to.
    pub lent: U32,
    /// Number of messages.
    pub sent: U64,
    /// Number of messages.
    pub received: U64,
    /// Bytes sent.
    pub sent_bytes: U64,
    /// Bytes sent by reference.
    pub referred_bytes: U64,
    /// Messages of the peer that were wrong.
    pub refused: U64,
    /// Bytes of the received messages.
    pub received_bytes: U64,
}

/// Header at [`GUEST_OFF`] of the mailbox. Written by the member; the host copies it and believes
/// nothing.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Guest {
    /// [`GUEST_MAGIC`], written last.
    pub magic: U64,
    /// [`VERSION`].
    pub version: U32,
    /// State: see [`guest_state`].
    pub state: U32,
    /// Number of this load of the kernel module, another one each time.
    pub generation: U64,
    /// Offset of its [`Dir`].
    pub dir_off: U64,
    /// Heartbeat, counted up.
    pub heartbeat: U64,
    /// The excludes that hold: no packet of those flows is taken any more. What was taken before
    /// may still be on its way.
    pub excludes_seq: U32,
    /// Zero.
    pub reserved: U32,
    /// Links, by the index of the peer in the table.
    pub links: [LinkStatus; MAX_MEMBERS],
}

/// Entry of the directory: the place of the link to one peer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct DirEntry {
    /// Id of the peer.
    pub peer_id: U32,
    /// Zero.
    pub reserved: U32,
    /// Generation of the peer that the link is meant for.
    pub peer_generation: U64,
    /// Offset of the link; 0: no link.
    pub link_off: U64,
}

/// Directory page: the root of everything that peers read.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Dir {
    /// [`DIR_MAGIC`].
    pub magic: U64,
    /// [`VERSION`].
    pub version: U32,
    /// Id of the owner.
    pub member_id: U32,
    /// Number of the owner for this load.
    pub generation: U64,
    /// Counted up every [`Host::heartbeat_ms`].
    pub heartbeat: U64,
    /// Entries, by the index of the peer in the owner's table.
    pub links: [DirEntry; MAX_MEMBERS],
}

/// Places of the parts of one ring.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct LinkQueue {
    /// Offset of a [`QueueState`], a page.
    pub state_off: U64,
    /// Offset of the ring: [`RING_LEN`] of [`Entry`].
    pub ring_off: U64,
    /// Offset of the slots: [`SLOTS`] of [`Slot`].
    pub slots_off: U64,
    /// Used entries of `fifo_off`.
    pub fifo_chunks: U32,
    /// Zero.
    pub reserved: U32,
    /// Offsets of the chunks of the FIFO.
    pub fifo_off: [U64; MAX_FIFO_CHUNKS],
}

/// Header page of a link from the owner to one peer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Link {
    /// [`LINK_MAGIC`].
    pub magic: U64,
    /// [`VERSION`].
    pub version: U32,
    /// State of the owner's side: see [`link_state`].
    pub state: U32,
    /// Id of the owner.
    pub from_id: U32,
    /// Id of the peer.
    pub to_id: U32,
    /// Number of the owner for this load.
    pub from_generation: U64,
    /// Number of the peer's load that is meant.
    pub to_generation: U64,
    /// Number of rings, 1 to [`MAX_QUEUES`].
    pub queues: U32,
    /// Bits of [`client`]s whose messages the owner takes now.
    pub clients: U32,
    /// Rings of the link.
    pub queue: [LinkQueue; MAX_QUEUES],
}

/// State of one pair of rings, by the owner: its own that it fills, and the peer's of the same
/// number that it empties. Indices run freely; events are as in the virtio specification, 2.7.10.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct QueueState {
    /// Entries of the own ring.
    pub produced: U32,
    /// Padding to the next cache line.
    pub pad0: [u8; 60],
    /// Position of `taken` at which to ring: the own ring was full.
    pub taken_event: U32,
    /// Position of `done` at which to ring: slots are scarce.
    pub done_event: U32,
    /// Padding to the next cache line.
    pub pad1: [u8; 56],
    /// Entries of the peer's ring.
    pub taken: U32,
    /// Entries of `done_slots`.
    pub done: U32,
    /// Padding to the next cache line.
    pub pad2: [u8; 56],
    /// Position of the peer's `produced` at which to ring.
    pub produced_event: U32,
    /// Whether (not 0) to send no references, since the receiver has a backlog.
    pub want_copies: U32,
    /// Padding to the next cache line.
    pub pad3: [u8; 56],
    /// Slots of the peer that were released.
    pub done_slots: [U16; DONE_LEN],
}

/// Entry of a ring.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Entry {
    /// Kind: see [`kind`].
    pub kind: u8,
    /// Client: see [`client`].
    pub client: u8,
    /// Number of the slot, by reference.
    pub slot: U16,
    /// Bytes of the message without `meta`.
    pub len: U32,
    /// Position in the FIFO at which a copy begins; it runs freely.
    pub fifo_pos: U32,
    /// Position of the FIFO after this entry, of either kind.
    pub fifo_end: U32,
    /// Data of the client.
    pub meta: [u8; META_LEN],
    /// Zero.
    pub reserved: [u8; 16],
}

/// Piece of the owner's memory. Never across the end of a page.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Seg {
    /// Offset in the memory file.
    pub off: U64,
    /// Bytes.
    pub len: U32,
    /// Zero.
    pub reserved: U32,
}

/// Message by reference: `head_len` bytes of `head`, then the segments.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Slot {
    /// Used bytes of `head`.
    pub head_len: U32,
    /// Used entries of `segs`.
    pub segs_len: U32,
    /// Headers.
    pub head: [u8; MAX_HEAD_LEN],
    /// Segments with the rest.
    pub segs: [Seg; MAX_SEGS],
    /// Zero.
    pub reserved: [u8; 24],
}

#[cfg(test)]
mod tests;
