//! TCP connections of a port that host-side pipes may serve: tracked, steered, shifted.
//!
//! # Theory of operation
//! A port whose VM has pipes keeps a [`table`] of the guest's connections, made by the guest's own
//! SYNs: the switch sees every segment, so it knows what was sent and acknowledged last. When a pipe
//! begins, a *twin* of the connection exists in the host's kernel, in a network namespace whose only
//! interface is a TAP, read and written here as a [`base::io::Wire`]. The connection is taken over by
//! halves. While a file goes to a socket, the twin has the *sending* half:
//!
//! - The twin's segments go out as the guest's, from its addresses, through its stages; they say of the
//!   receiving half (acknowledgement, window, congestion) what the guest said last.
//! - The peer's segments go to the twin without payload, for their acknowledgements; to the guest go
//!   those with bytes or a FIN for it, acknowledging no more than it has sent. All others do not wake
//!   it.
//! - The guest's acknowledgements go on to the peer, behind what the twin has sent. What the guest
//!   sends again of old goes on; what it sends newly waits: it is not acknowledged, and sent again.
//!   Its probes are answered here.
//!
//! Nothing has to be held: the twin begins with the first number that the guest has not used, and the
//! guest's unacknowledged bytes stay its own. When the peer has acknowledged all of the twin's bytes,
//! the twin goes silently, and for the connection's remaining life the guest's numbers are *shifted*:
//! its sequence numbers up by what its twins sent, acknowledgements and their selective blocks down,
//! timestamps so that they never go back ([`state`]). The shift ends with the SYN of a new connection
//! between the same addresses.
//!
//! While a socket goes to a file or to another socket, the twin has the *receiving* half: a stretch of the
//! peer's stream ([`receive`]). It begins behind all that has passed to the guest when the twin starts,
//! so nothing has to be held here either. The guest goes on sending: it hears what is acknowledged of its
//! bytes, and whoever speaks to the peer, guest or twin, says of the peer's bytes what all of them
//! have in order. Behind the twin's last byte the guest goes on, its acknowledgements shifted up by
//! what its twins received, and the peer's sequence numbers down. The bytes for a twin are written to
//! its TAP from where they lie; whoever lent them has them back after his turn ([`crate::forward`]).
//!
//! A connection has one twin at a time, and so one of its halves is a pipe's.
//!
//! How many bytes the guest has sent is told twice: by the agent from `TCP_INFO`, and by the segments
//! that came. A pipe begins when both agree; so no byte of the guest's is still on its way.
//!
//! ICMP errors about a segment that left as the guest's go to who sent it, with the number that its kernel
//! knows the segment by ([`icmp`]): path MTU discovery works for both.
//!
//! Checksums are changed by what changes (RFC 1624), so what was damaged stays damaged. Who decides
//! that bytes are acknowledged is the twin's kernel, not this module.
//!
//! # Limits
//! - 8,192 connections of a port ([`table::MAX_FLOWS`]): under four megabytes. The one that was not
//!   seen for longest among a few makes room, never one that is shifted; those that find none are not
//!   tracked.
//! - A pipe has at most 1 GiB: its numbers are compared over half of the sequence space.
//! - Untagged TCP only, with all headers in the first 128 bytes of the frame.
//! - Connections whose SYN did not pass by since pipes were switched on have no twin, nor have those
//!   whose peer was not heard on this port or has sent fragments. What comes in fragments beside a twin
//!   is dropped ([`fragment`]).
//! - A table is one port's: in a bond of two, connections with a shift do not survive a change of ports.
//! - 64 segments wait for a twin between two looks of its TAP; more push them out.
//! - A segment with payload whose checksum is wrong tells the twin nothing. Payload that only passes to
//!   a twin is not summed here, but by the twin's kernel.
//! - What comes for the guest behind the bytes of a twin that lacks some comes again. So does what was
//!   selectively acknowledged by a twin that is stopped then (RFC 2018, 8).
//! - An ICMP error about a twin's segment is not told to the guest, which would not believe it: that the
//!   path takes no long packets it finds out for itself. Errors that the guest sends its peers keep the
//!   numbers that it knows, which peers do not believe.
//! - After a restart no twin receives before the guest has acknowledged all that was allowed to be sent
//!   before: what it keeps behind a gap is not known.

mod api;
mod build;
#[cfg(test)]
mod case;
mod fragment;
#[cfg(feature = "testing")]
pub mod fuzzing;
mod icmp;
mod journal;
#[cfg(test)]
mod model;
mod receive;
mod segment;
mod sending;
mod state;
mod steer;
mod table;
mod takeover;
#[cfg(test)]
pub(crate) mod testing;

use std::net::IpAddr;
use std::sync::Arc;

use base::clock::{Clock, MonotonicClock};
use base::counter::{DropReason, QueueStats};
use base::io::{IoSlice, Wire};
use queue::seg::subrange;
use thiserror::Error;

use crate::rxq::{Body, Frame};
use crate::uplink::MAX_PIECES;
pub use journal::Journal;
pub use state::Shift;
use table::FlowTable;
pub use takeover::{Relief, Snapshot};

pub(crate) use steer::{FlowVerdict, reply};

/// A connection as its guest names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// The guest's address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The guest's port.
    pub local_port: u16,
    /// The peer's port.
    pub remote_port: u16,
}

impl FlowKey {
    /// As the peer names it.
    pub(crate) fn mirror(&self) -> Self {
        let &Self { local, remote, local_port, remote_port } = self;
        Self { local: remote, remote: local, local_port: remote_port, remote_port: local_port }
    }
}

/// Hardware addresses of a segment that goes the other way.
pub(crate) fn turned(macs: &[u8; 12]) -> [u8; 12] {
    let mut back = *macs;
    back.rotate_left(6);
    back
}

/// What a twin needs to know. Sequence numbers are the wire's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowSnapshot {
    /// The twin's first byte.
    pub send_seq: u32,
    /// The peer's next byte.
    pub receive_seq: u32,
    /// The peer has acknowledged everything before.
    pub acked_seq: u32,
    /// The peer's window, as it stood in its header.
    pub send_window: u16,
    /// The guest's window, as it stood in its header.
    pub receive_window: u16,
    /// The last timestamp that was sent.
    pub timestamp: u32,
}

/// How a twin begins to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveStart {
    /// Bytes that come to the guest itself, behind those that it had counted as received.
    pub own_bytes: u32,
    /// Bytes that come to the twin then; 0: nothing has begun.
    pub twin_bytes: u32,
}

/// What a pipe is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowEvent {
    /// The guest's last bytes have passed: ask for the snapshot again.
    Settled,
    /// The peer seems to have acknowledged all that the twin was to send.
    Acknowledged,
    /// The connection was reset, by either side.
    Reset,
    /// The peer has closed its direction within the twin's bytes, and all in front of that have
    /// arrived at the twin.
    Ended,
}

/// Takes the events of all connections of a port; on the sidecore, so it must not wait.
pub trait FlowWatch: Send + Sync {
    /// `token` is that of the pipe.
    fn flow_event(&self, token: u64, event: FlowEvent);
}

/// Why a connection cannot be taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FlowError {
    /// Not seen from its beginning on this port.
    #[error("the connection was not seen from its beginning")]
    Unknown,
    /// Closing, or reset.
    #[error("the connection is closing")]
    Closing,
    /// Another pipe has it.
    #[error("another pipe has the connection")]
    Busy,
    /// Something was sent that the agent has not told of.
    #[error("the guest goes on sending")]
    Changed,
    /// Bytes of a twin are lost: the connection is reset.
    #[error("bytes that were sent for the guest are lost")]
    Broken,
    /// The port has no pipes, or has gone.
    #[error("the port has no pipes")]
    Off,
}

/// The hardware address of a twin's TAP, in every namespace the same: its kernel takes no frames but
/// those that are for it.
pub const TWIN_MAC: [u8; 6] = [2, 0x4d, 0x52, 0x54, 0x57, 0x4e];

/// Segments for the twin that wait for the TAP's next flush.
const TWIN_SLOTS: usize = 64;

/// Bytes of a segment that are copied, so that it can wait until others are flushed with it: an Ethernet
/// frame with its virtio-net header. Copying these costs a tenth of the system call that it saves. Longer
/// ones, and those in guests' memory, are lent for as long as their sender is busy with its batch.
const SLOT_LEN: usize = 1536;

/// Where the pieces of a frame are, only while it is queued.
struct Pieces(Vec<IoSlice>);

// SAFETY: addresses in it are used by the call that put them there, and by no other.
unsafe impl Send for Pieces {}

/// Everything a port has for pipes; see the module's text.
pub(crate) struct PortFlows {
    table: FlowTable,
    watch: Arc<dyn FlowWatch>,
    wire: Option<Box<dyn Wire>>,
    pub stats: Arc<QueueStats>,
    /// Copies that the wire reads from until it is flushed.
    slots: Box<[[u8; SLOT_LEN]]>,
    used: usize,
    /// The pieces of one frame.
    pieces: Pieces,
    /// The fabric knows that frames in memory of others are queued.
    is_lent: bool,
    /// What pipes are told once the wire is flushed: their twins have heard of it then.
    events: Vec<(u64, FlowEvent)>,
    /// Resets for peers of connections that are broken: key, hardware addresses, numbers.
    resets: Vec<(FlowKey, [u8; 12], (u32, u32))>,
    /// A frame of the twin's waits for a receiver without buffers.
    held_on: Option<crate::port::Awaited>,
    unfilled: bool,
}

impl PortFlows {
    /// With a new table, or that of the journal.
    pub(crate) fn new(
        watch: Arc<dyn FlowWatch>,
        wire: Box<dyn Wire>,
        stats: Arc<QueueStats>,
        journal: Option<Journal>,
    ) -> Self {
        let table = match journal {
            Some(journal) => FlowTable::restored(journal, MonotonicClock.now_ns()),
            None => FlowTable::new(table::MAX_FLOWS),
        };
        Self {
            table,
            watch,
            wire: Some(wire),
            stats,
            slots: vec![[0; SLOT_LEN]; TWIN_SLOTS].into_boxed_slice(),
            used: 0,
            pieces: Pieces(Vec::with_capacity(MAX_PIECES)),
            is_lent: false,
            events: Vec::with_capacity(TWIN_SLOTS),
            resets: Vec::with_capacity(TWIN_SLOTS),
            held_on: None,
            unfilled: false,
        }
    }

    /// Queues a frame for the twin.
    ///
    /// # Safety
    /// Its body stays valid until [`Self::flush`], which is called once the fabric's lenders want their
    /// memory back.
    unsafe fn queue(&mut self, frame: &Frame<'_>) {
        if self.used == TWIN_SLOTS {
            self.flush();
        }
        let Some(wire) = self.wire.as_mut() else { return };
        let slot = &mut self.slots[self.used];
        let mut len = frame.wire.len();
        slot[..len].copy_from_slice(frame.wire);
        let pieces = &mut self.pieces.0;
        pieces.clear();
        pieces.push(IoSlice { iov_base: slot.as_mut_ptr().cast(), iov_len: len });
        match frame.body {
            Body::Ours(bytes) if len + bytes.len() <= SLOT_LEN => {
                slot[len..len + bytes.len()].copy_from_slice(bytes);
                len += bytes.len();
                pieces[0].iov_len = len;
            }
            Body::Ours(bytes) => {
                let iov_base = bytes.as_ptr().cast_mut().cast();
                pieces.push(IoSlice { iov_base, iov_len: bytes.len() });
                self.is_lent = true;
            }
            Body::Guest { len: 0, .. } => {}
            Body::Guest { segs, offset, len } => {
                if subrange(segs, offset, len, pieces) != len {
                    return self.stats.drop_one(DropReason::Malformed);
                }
                self.is_lent = true;
            }
        }
        self.used += 1;
        // SAFETY: the slot is not used again before `flush`, and stays where it is: it is boxed. The
        // rest is the caller's promise.
        let mut sent = unsafe { wire.send(pieces) };
        if matches!(&sent, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock) {
            self.flush_wire();
            let Some(wire) = self.wire.as_mut() else { return };
            // SAFETY: as above.
            sent = unsafe { wire.send(&self.pieces.0) };
        }
        if sent.is_err() {
            self.stats.drop_one(DropReason::WireError);
        }
    }

    /// Hands what is queued to the twin, in at most one system call, and tells pipes.
    pub(crate) fn flush(&mut self) {
        if std::mem::take(&mut self.used) > 0 {
            self.flush_wire();
        }
        for (token, event) in self.events.drain(..) {
            self.watch.flow_event(token, event);
        }
    }

    fn flush_wire(&mut self) {
        let refused = match self.wire.as_mut().map(|wire| wire.flush()) {
            Some(Ok(refused)) => u64::from(refused),
            Some(Err(_)) => 1,
            None => 0,
        };
        self.stats.drops[DropReason::WireError as usize].add(refused);
    }

    /// The TAP's descriptor.
    pub(crate) fn event_fd(&self) -> Option<std::os::fd::RawFd> {
        self.wire.as_ref().and_then(|wire| wire.event_fd())
    }
}
