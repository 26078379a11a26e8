//! Messages between the guest's agent and the daemon.
//!
//! The agent connects from a privileged vsock port (below 1,024, which the guest's kernel gives to
//! root, and to whom root gives `CAP_NET_BIND_SERVICE`) to port [`PORT`] of the host, says
//! [`Hello`] and is told [`Welcome`], or the stream ends. Then it may have many exchanges at a
//! time, each with an id of its own:
//!
//! | agent says | daemon answers | |
//! | --- | --- | --- |
//! | [`Probe`] | [`Probed`] | which disk of the VM has these bytes there |
//! | [`ProbePlaces`] | [`Probed`] | a placeholder is about to be written, or read over |
//! | [`Pipe`] with its ends | [`Done`] | move bytes from a source to a sink |
//! | [`Own`] | | a socket's bytes that came before the pipe's are where they belong |
//! | [`Taken`] | | the bytes of a [`Take`] are written, or read, or could not be |
//! | [`Cancel`] | (the [`Done`] of the pipe) | end the pipe of that id soon |
//! | ping, no body | pong, no body | who does not answer is gone |
//! | [`Refusal`]s | | how many pipes the agent has refused itself, and why |
//!
//! A pipe is answered once, when no byte of its source is needed any more: a receiver has
//! acknowledged what was moved. Ids of pipes that are not answered yet must differ. Until then
//! the daemon may say, with the pipe's id:
//!
//! | daemon says | agent answers | |
//! | --- | --- | --- |
//! | [`Begun`] | [`Own`] | of a socket that is read: which bytes the guest has got itself |
//! | [`Take`] | [`Taken`] | of a file that is written: these bytes are there |
//! | [`Take`] ([`kind::GIVE`]) | [`Taken`] ([`kind::GIVEN`]) | of a file without a lease that is read: these bytes are wanted |
//!
//! # A file that is written
//! The guest's file system decides where bytes go, so the guest writes, and the bytes never enter
//! it. The agent writes *placeholders* with direct I/O: sectors of [`SECTOR_BYTES`] that begin with
//! a [`Placeholder`]. The disk's engine knows them by their tag, which is the pipe's secret, and
//! writes the pipe's bytes instead. What it has not seen by the [`Taken`] it sends again as bytes,
//! and the agent writes them as ordinary ones; so also what is not a whole block of [`BLOCK_BYTES`]
//! of the file. [`Done`] comes after the last [`Taken`].
//!
//! # A file without a lease that is read
//! Somebody has it open for writing, so what lies where may change at any time. The guest's file
//! system reads, and the bytes never enter the guest: the agent asks for them with direct I/O, into
//! memory that is filled with placeholders. The disk's engine knows them as above, hands the range
//! of the disk over and ends the request without touching that memory, once the daemon has a copy.
//! Until then the file system keeps the blocks for the file. What the engine has not seen by the
//! [`Taken`] (holes, what is in the guest's memory alone) is wanted again as bytes, and so is what
//! is not in whole blocks.
//!
//! Memory that is used for something else later still has placeholders in it, and a file system may
//! read over them. So those of a read begin at [`READ_SKEW_BYTES`] of a page, where nobody else's
//! reads of whole blocks begin; others are not followed.
//!
//! # A socket that is read
//! What has come to the guest when the pipe begins is the guest's to read: [`Begun`] says how many
//! bytes from the program's position in the stream on that is, at most the pipe's length. The agent
//! reads just these from the program's socket, waiting for those still on their way, writes them to
//! the sink and says so with [`Own`]. The daemon's own bytes follow; `Done` counts them alone.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Vsock port of the host for agents.
pub const PORT: u32 = 28_018;

/// First bytes of [`Hello`] and [`Welcome`]: `MLRCPIPE`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"MLRCPIPE");

/// Path of QEMU's `-fw_cfg name=opt/millrace/secret,file=…` in the guest, for root alone.
pub const SECRET_PATH: &str = "/sys/firmware/qemu_fw_cfg/by_name/opt/millrace/secret/raw";

/// Lengths of a VM's secret, in bytes, without the end of line that may follow it in its file.
pub const SECRET_BYTES: core::ops::RangeInclusive<usize> = 16..=64;

/// Version of these messages.
pub const VERSION: u16 = 1;

/// Most extents of a pipe, both ends together.
pub const MAX_EXTENTS: u32 = 2048;

/// Most [`Refusal`]s of a message: more reasons than there are.
pub const MAX_REFUSALS: usize = 128;

/// Kinds of messages: see [`crate::frame::Header::kind`].
pub mod kind {
    /// [`super::Hello`], agent to daemon, the first message.
    pub const HELLO: u16 = 1;
    /// [`super::Welcome`], its answer.
    pub const WELCOME: u16 = 2;
    /// [`super::Probe`], agent to daemon.
    pub const PROBE: u16 = 3;
    /// [`super::Probed`], its answer.
    pub const PROBED: u16 = 4;
    /// [`super::Pipe`] and its ends, agent to daemon.
    pub const PIPE: u16 = 5;
    /// [`super::Done`], its answer.
    pub const DONE: u16 = 6;
    /// [`super::Cancel`], agent to daemon.
    pub const CANCEL: u16 = 7;
    /// [`super::ProbePlaces`] of a write, agent to daemon.
    pub const PROBE_WRITE: u16 = 8;
    /// [`super::Begun`], daemon to agent.
    pub const BEGUN: u16 = 9;
    /// [`super::Own`], its answer; the sink's [`super::SocketEnd`] as it is then follows, if it is
    /// one.
    pub const OWN: u16 = 10;
    /// [`super::Take`], daemon to agent; the bytes follow if [`super::take::BYTES`].
    pub const TAKE: u16 = 11;
    /// [`super::Taken`], its answer.
    pub const TAKEN: u16 = 12;
    /// Ping, agent to daemon, with an id and without a body.
    pub const PING: u16 = 13;
    /// Answer to a ping, with the same id.
    pub const PONG: u16 = 14;
    /// [`super::Refusal`]s, 1 to [`super::MAX_REFUSALS`], agent to daemon, without an answer.
    pub const REFUSALS: u16 = 15;
    /// [`super::ProbePlaces`] of a read, agent to daemon.
    pub const PROBE_READ: u16 = 16;
    /// [`super::Take`] of bytes that are wanted, daemon to agent; none follow.
    pub const GIVE: u16 = 17;
    /// [`super::Taken`], its answer; the bytes follow if [`super::take::BYTES`] was asked for.
    pub const GIVEN: u16 = 18;
}

/// Count of pipes that the agent did not ask for, for one reason, since its last such message.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Refusal {
    /// A number of [`crate::Reason`].
    pub reason: U16,
    /// Zero.
    pub reserved: U16,
    /// Number of pipes.
    pub count: U32,
}

/// First message of the agent. The VM's secret follows, where the guest has one.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: U64,
    /// Oldest version it speaks.
    pub lowest: U16,
    /// Newest version it speaks.
    pub highest: U16,
    /// Zero.
    pub reserved: U32,
}

/// Answer of the daemon that agrees.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: U64,
    /// Version of all later messages.
    pub version: U16,
    /// Zero.
    pub reserved: U16,
    /// Most pipes of the VM at a time; more are refused.
    pub max_pipes: U32,
    /// Most bytes of one pipe; more is moved in parts.
    pub max_len_bytes: U64,
}

/// Bytes of a [`Probe`]'s block.
pub const PROBE_BLOCK_BYTES: usize = 4096;

/// A file system's self-test. The agent has written a block of [`PROBE_BLOCK_BYTES`], made of its
/// secret again and again, into a file of it, made it durable and asked where it lies.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Probe {
    /// Offset of the block, in bytes from the beginning of the disk.
    pub offset: U64,
    /// Random bytes.
    pub secret: [u8; 32],
}

/// Answer to a probe: the disk that has the block.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Probed {
    /// Number of the disk in later messages; holds as long as the stream. [`NO_DISK`]: none.
    pub disk: U32,
    /// Reason when there is none: a number of [`crate::Reason`].
    pub reason: U16,
    /// Zero.
    pub reserved: U16,
    /// Size of the disk.
    pub len_bytes: U64,
}

/// Disk number that says that no disk has the block.
pub const NO_DISK: u32 = u32::MAX;

/// Flags of a [`Pipe`].
pub mod flag {
    /// The file that is read is in the guest's memory. If its disk would have to be read for the
    /// pipe, it ends with [`crate::Reason::Cached`]: the guest's own way is the shorter one.
    pub const CACHED: u8 = 1;
}

/// Kinds of ends.
pub mod end {
    /// [`super::SocketEnd`].
    pub const SOCKET: u8 = 1;
    /// [`super::FileEnd`], of a source.
    pub const FILE: u8 = 2;
    /// [`super::PlacesEnd`], of a sink, or of a source without a lease.
    pub const PLACES: u8 = 3;
}

/// Request to move bytes. The source's end follows, then the sink's.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Pipe {
    /// [`end`] of the source.
    pub source: u8,
    /// [`end`] of the sink.
    pub sink: u8,
    /// [`flag`] bits.
    pub flags: u8,
    /// Zero.
    pub reserved: [u8; 5],
    /// Bytes to be moved, at least 1.
    pub len_bytes: U64,
}

/// Address families of [`SocketEnd`].
pub mod family {
    /// IPv4.
    pub const V4: u8 = 4;
    /// IPv6.
    pub const V6: u8 = 6;
}

/// Options negotiated when the connection began; the kernel's `TCPI_OPT_*`.
pub mod option {
    /// Timestamps (RFC 7323).
    pub const TIMESTAMPS: u8 = 1;
    /// Selective acknowledgements (RFC 2018).
    pub const SACK: u8 = 2;
    /// Window scaling (RFC 7323).
    pub const WINDOW_SCALE: u8 = 4;
    /// Explicit congestion notification (RFC 3168).
    pub const ECN: u8 = 8;
    /// ECN was seen at work.
    pub const ECN_SEEN: u8 = 16;
    /// Data went with the SYN (RFC 7413).
    pub const SYN_DATA: u8 = 32;
}

/// An established TCP connection, as `TCP_INFO` has it. Nothing of it waits to be sent for the
/// first time.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SocketEnd {
    /// [`family`].
    pub family: u8,
    /// [`option`] bits.
    pub options: u8,
    /// The peer's window scale (`tcpi_snd_wscale`).
    pub send_scale: u8,
    /// The guest's window scale (`tcpi_rcv_wscale`).
    pub receive_scale: u8,
    /// Most payload bytes of a segment that is sent, without options (`tcpi_snd_mss`).
    pub mss: U16,
    /// Port of the guest.
    pub local_port: U16,
    /// Port of the peer.
    pub remote_port: U16,
    /// Zero.
    pub reserved: U16,
    /// Congestion window in segments.
    pub cwnd: U32,
    /// Smoothed round trip time in microseconds.
    pub rtt_us: U32,
    /// Payload bytes received that the program of a source has not read (`SIOCINQ`), at the same
    /// moment as `received_bytes`. Of a sink: zero.
    pub unread_bytes: U32,
    /// Address of the guest; IPv4 in the first four bytes.
    pub local: [u8; 16],
    /// Address of the peer.
    pub remote: [u8; 16],
    /// Payload bytes sent, each once: `tcpi_bytes_sent` less `tcpi_bytes_retrans`.
    pub sent_bytes: U64,
    /// Payload bytes received in order (`tcpi_bytes_received`).
    pub received_bytes: U64,
    /// Name of the congestion control, zero-filled.
    pub congestion: [u8; 16],
}

/// Part of a file that is read in place; its [`Extent`]s follow, in the order of the file.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct FileEnd {
    /// Number of the disk, from [`Probed`].
    pub disk: U32,
    /// Number of extents.
    pub extents: U32,
}

/// Extent: bytes that lie together on a disk. All of a [`FileEnd`] together have the pipe's length.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Extent {
    /// Bytes from the beginning of the disk; [`HOLE`]: nowhere, they are zeroes.
    pub offset: U64,
    /// Number of bytes, at least 1.
    pub len_bytes: U64,
}

/// Offset of an extent that lies nowhere: see [`Extent::offset`].
pub const HOLE: u64 = u64::MAX;

/// Bytes of a sector: what is written begins with a [`Placeholder`] in each.
pub const SECTOR_BYTES: usize = 512;

/// Bytes of a block of a file: only whole ones, at multiples of it, are written as placeholders.
pub const BLOCK_BYTES: usize = 4096;

/// First bytes of a [`Placeholder`]: `MLRCHOLD`.
pub const PLACEHOLDER_MAGIC: u64 = u64::from_le_bytes(*b"MLRCHOLD");

/// Placeholder: beginning of a sector that the disk's engine replaces with the pipe's bytes. The
/// rest of a written one is zero.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Placeholder {
    /// [`PLACEHOLDER_MAGIC`].
    pub magic: U64,
    /// Offset of the sector's bytes in the pipe. In a [`ProbePlaces`]' block: in the block.
    pub at: U64,
    /// [`PlacesEnd::tag`].
    pub tag: [u8; 16],
}

/// Offset in a page at which the memory of a read with placeholders begins.
pub const READ_SKEW_BYTES: usize = SECTOR_BYTES;

/// File that is written, or read without a lease.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct PlacesEnd {
    /// Random tag, for this pipe alone.
    pub tag: [u8; 16],
    /// Offset of the pipe's first byte in the file, modulo [`BLOCK_BYTES`].
    pub skew_bytes: U32,
    /// Number of the file's disk ([`Probed`]).
    pub disk: U32,
}

/// A file system's self-test for placeholders with this tag. For writing: the agent is going to
/// write a block of [`PROBE_BLOCK_BYTES`] of them, and reads it then from the disk, where it must
/// be made of the secret. For reading: it has written a block made of the secret, and is going to
/// read it over placeholders, which must still be there then; if the disk has other bytes, the read
/// fails.
///
/// Answered by [`Probed`], once the daemon knows it: with [`crate::Reason::Complete`] and the disk,
/// or why not. Forgotten with the next one, and with the stream.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ProbePlaces {
    /// Number of the disk ([`Probed`]).
    pub disk: U32,
    /// Zero.
    pub reserved: U32,
    /// Random bytes.
    pub tag: [u8; 16],
    /// Random bytes.
    pub secret: [u8; 32],
}

/// Notice that the daemon receives from here on, for a socket that is read.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Begun {
    /// Bytes of the pipe that come to the guest, in front of the daemon's. All of them: then the
    /// daemon gets none.
    pub own_bytes: U64,
}

/// Answer that the bytes of [`Begun`] are read, and written to the sink: to a socket so that
/// nothing of it is unsent. A [`SocketEnd`] follows if the sink is one. If it failed, the agent
/// says [`Cancel`] instead.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Own {
    /// Number of bytes, as in [`Begun`].
    pub own_bytes: U64,
}

/// Ways in which the bytes of a [`Take`] come.
pub mod take {
    /// Placeholders: the range is of whole blocks of the file.
    pub const PLACES: u8 = 1;
    /// Bytes in the message, at most [`super::MAX_TAKE_BYTES`].
    pub const BYTES: u8 = 2;
}

/// Most bytes that follow a [`Take`].
pub const MAX_TAKE_BYTES: usize = 60 << 10;

/// Range of the pipe's bytes that are there, and to be written; or are wanted, and to be read.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Take {
    /// Offset in the pipe.
    pub at: U64,
    /// Number of bytes, at least 1.
    pub len_bytes: U32,
    /// Way in which the bytes come: see [`take`].
    pub how: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

/// Answer to a [`Take`]: whether all of it was written, or read.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Taken {
    /// Offset in the pipe, as in [`Take`].
    pub at: U64,
    /// Number of bytes, as in [`Take`]. A read may have fewer, also 0: the file ends there.
    pub len_bytes: U32,
    /// Errno of the file system, after which the pipe ends; or 0.
    pub errno: U32,
}

/// Answer at the end of a pipe.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Done {
    /// Bytes that arrived.
    pub moved_bytes: U64,
    /// Reason why not all arrived, or [`crate::Reason::Complete`].
    pub reason: U16,
    /// Zero.
    pub reserved: [u8; 6],
}

/// Request to end a pipe. Bytes that it has moved are not taken back.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Cancel {
    /// [`crate::Reason`].
    pub reason: U16,
    /// Zero.
    pub reserved: [u8; 6],
}

#[cfg(test)]
mod tests;
