//! TCP connections that host-side pipes may serve: tracked, steered, shifted.
//!
//! # Theory of operation
//! The switch keeps a [`Tracker`] for each port whose VM has pipes: a table of the guest's
//! connections, made by the guest's own SYNs. It is shown every segment, so it knows what was sent
//! and acknowledged last. When a pipe begins, a *twin* of the connection exists in the host's
//! kernel, in a network namespace whose only interface is a TAP. The connection is taken over by
//! halves. While a file goes to a socket, the twin has the *sending* half (`send.rs`):
//!
//! - The twin's segments go out as the guest's, from its addresses, through its stages; they say of
//!   the receiving half (acknowledgement, window, congestion) what the guest said last.
//! - The peer's segments go to the twin without payload, for their acknowledgements; to the guest
//!   go those with bytes or a FIN for it, acknowledging no more than it has sent. All others do not
//!   wake it.
//! - The guest's acknowledgements go on to the peer, behind what the twin has sent. What the guest
//!   sends again of old goes on; what it sends newly waits: it is not acknowledged, and sent again.
//!   Its probes are answered here.
//!
//! Nothing has to be held: the twin begins with the first number that the guest has not used, and
//! the guest's unacknowledged bytes stay its own. When the peer has acknowledged all of the twin's
//! bytes, the twin goes silently, and for the connection's remaining life the guest's numbers are
//! *shifted*: its sequence numbers up by what its twins sent, acknowledgements and their selective
//! blocks down, timestamps so that they never go back ([`Shift`]). The shift ends with the SYN of a
//! new connection between the same addresses.
//!
//! While a socket goes to a file or to another socket, the twin has the *receiving* half: a stretch
//! of the peer's stream (`receive.rs`). It begins behind all that has passed to the guest when the
//! twin starts, so nothing has to be held here either. The guest goes on sending: it hears what is
//! acknowledged of its bytes, and whichever side speaks to the peer, guest or twin, says of the
//! peer's bytes what all of them have in order. Behind the twin's last byte the guest goes on, its
//! acknowledgements shifted up by what its twins received, and the peer's sequence numbers down.
//! The bytes for a twin are written to its TAP from where they lie; their lender has them back
//! after the sender's turn.
//!
//! A connection has one twin at a time, and so one of its halves is a pipe's.
//!
//! How many bytes the guest has sent is told twice: by the agent from `TCP_INFO`, and by the
//! segments that came. A pipe begins when both agree; so no byte of the guest's is still on its
//! way.
//!
//! ICMP errors about a segment that left as the guest's go to its sender, guest or twin, with the
//! number that the sender's kernel knows the segment by (`icmp.rs`): path MTU discovery works for
//! both.
//!
//! Checksums are changed by what changes (RFC 1624), so what was damaged stays damaged. The twin's
//! kernel decides that bytes are acknowledged, not this crate.
//!
//! # Files
//! A `Flow` (`flow.rs`) is one connection: a sending half, a receiving half, each with its twin,
//! the clock and the shift. Segments change it as they pass; pipes do by `takeover.rs`;
//! `restart.rs` makes a record of it for the journal, and it of a record. A `FlowTable` has all of
//! a port, and the [`Tracker`] is the face to the switch, with the pipes' requests in `control.rs`.
//!
//! # Limits
//! - 8,192 connections of a port ([`MAX_FLOWS`]): under four megabytes. The one that was not seen
//!   for longest among a few makes room, never one that is shifted; those that find none are not
//!   tracked.
//! - A pipe has at most 1 GiB: its numbers are compared over half of the sequence space.
//! - Untagged TCP only, with all headers in the first 128 bytes of the frame.
//! - Connections whose SYN did not pass by since pipes were switched on have no twin, nor have
//!   those whose peer was not heard on this port or has sent fragments. What comes in fragments
//!   beside a twin is dropped (`fragment.rs`).
//! - A table is one port's: in a bond of two, connections with a shift do not survive a change of
//!   ports.
//! - 64 resets for peers wait for the end of a round ([`MAX_RESETS`]); more come again.
//! - A segment with payload whose checksum is wrong tells the twin nothing. Payload that only
//!   passes to a twin is not summed here, but by the twin's kernel.
//! - What comes for the guest behind the bytes of a twin that lacks some comes again. So does what
//!   was selectively acknowledged by a twin that is stopped then (RFC 2018, 8).
//! - An ICMP error about a twin's segment is not told to the guest, which would not believe it:
//!   that the path takes no long packets it finds out for itself. Errors that the guest sends its
//!   peers keep the numbers that it knows, which peers do not believe.
//! - After a restart no twin receives before the guest has acknowledged all that was allowed to be
//!   sent before: what it keeps behind a gap is not known.

mod bare_segment;
mod clock;
mod control;
mod flow;
mod fragment;
#[cfg(feature = "testing")]
pub mod fuzzing;
mod icmp;
mod journal;
#[cfg(test)]
mod model;
mod receive;
mod restart;
#[cfg(test)]
mod scenario;
mod segment;
mod send;
mod shift;
mod table;
mod takeover;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tracker;
mod types;
mod verdict;

pub use bare_segment::{BareSegment, Recipient};
pub use journal::Journal;
pub use shift::Shift;
pub use takeover::{Relief, Snapshot};
pub use tracker::{GuestOutcome, MAX_RESETS, PeerOutcome, Tracker};
pub use types::{
    FlowError, FlowEvent, FlowKey, FlowSnapshot, FlowWatch, MAX_FLOWS, ReceiveStart, TWIN_MAC,
};
