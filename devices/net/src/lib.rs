//! Network engine: a learning switch between VM ports and one optional uplink.
//!
//! # Theory of operation
//! A [`Switch`] is one worker of one sidecore. In each round it takes a batch of frames from every
//! transmit queue and from the uplink. For each frame it copies the virtio-net header and the first
//! 128 bytes into memory of its own ([`frame::Head`]), checks that copy (never the guest's bytes
//! again; headers, checksums and segmentation are in the crate `frame`), asks the binding of the
//! port whether it may send from these addresses ([`binding`]), looks the destination up ([`fdb`];
//! by MAC address alone, VLAN tags pass as they are) and fills receive buffers of the destination:
//! our header bytes, then the rest straight from the sender's buffers, so that payload is copied
//! exactly once. Frames become visible to their receivers together, with one notification: at the
//! end of a round, each time that 16 KiB were moved, and before a port has a long turn.
//! Super-packets and partial checksums pass untouched to receivers that negotiated them; for others
//! the frame is finished in software ([`offload`]).
//!
//! **The seam.** A port may have a hook ([`PortHook`]): it sees each frame of the guest's, once the
//! binding let it pass, before the switch looks for the destination, and each frame for the guest
//! before it is delivered; it may change, answer or end them, and send frames of its own in the
//! port's turn. What it queues is flushed at the end of a round, or before the sender's turn ends
//! where it lies in the sender's memory. The switch knows nothing of what it does. The hook of
//! pipes is in the crate `pipe`, with the connections of the crate `flow`.
//!
//! **The short way.** Nearly all frames need nothing done to them and follow others between the
//! same two addresses. A port remembers what its last source was found to be and where its last
//! destinations went ([`forward_cache`]), until a table changes an owner; a run of such frames goes
//! from ring to ring in one loop ([`transmit`]). Everything else takes the long way through
//! [`forward`].
//!
//! **No buffers.** A VM's frame for one receiver that has no buffers stays in its sender's ring,
//! with all frames behind it, and is tried again when the receiver posts buffers. Each receive
//! queue has a budget of `hold_us` for that: waiting spends it, taking frames (and, slowly, time)
//! refills it. With none left the receiver is stalled: what finds no buffers is dropped and
//! counted. So a busy receiver slows its senders down without loss, a dead one costs each sender
//! one hold time, and one that posts a buffer now and then an eighth of the time
//! ([`backpressure`]). Broadcasts, multicasts and frames to unknown addresses are never held: a
//! full receiver misses them. Frames from the uplink for one receiver are not held either, but
//! kept: copied, cut to what it takes, and handed over as it posts buffers ([`ingress`],
//! [`backlog`]).
//!
//! **Windows.** A guest's kernel takes frames before its programs run. Fed without end by a fast
//! sender it does nothing else, its ring stays empty, and datagrams are lost at its sockets, for
//! which programs come too late. So a datagram for one receiver also waits when 64 buffers of
//! datagrams were given to that one in less than twice the time that its kernel needs for them, as
//! probes learn it: a driver that has taken all asks for an interrupt, which is seen in the ring.
//! Senders that wait for one receiver have turns, in the order in which they began to wait. TCP
//! does not wait, it has a window of its own; nor does what goes to drivers that ask for no
//! interrupts, or to ports that may be routers (any but `bind = "mac-and-ip"`), whose kernel does
//! all the work itself; nor what comes from the uplink ([`window`]).
//!
//! **Queue pairs.** Frames of transmit queue `i` go to the receiver's running queue `i` modulo
//! their number; frames from the uplink by a hash of their flow. A flow therefore stays in order.
//!
//! **Bindings.** See [`BindMode`]. Learned addresses survive the guest reloading its driver, also
//! with other features; the end of the session forgets them. An address that another port of the
//! switch owns cannot be learned, nor a MAC address that the uplink or a port without a binding
//! has shown within the ageing time. (So a VM without a configured MAC that moves here from behind
//! the uplink is cut off until the switch has not seen it there for that long.) A probe
//! for an address (ARP probe, IPv6 duplicate detection) claims it as its use does. Who must not
//! trust the first use (a guest that claims the gateway's address before anyone else), or moves
//! VMs, configures the addresses. IP over SNAP is dropped on IP-bound ports.
//!
//! **Sleeping.** An idle switch arms the kicks of its transmit queues and has no timer; tables age
//! when they are looked at. Only a held sender brings a wake-up, at the end of its hold.
//!
//! **Config space.** A VMM with a network device of its own (QEMU's, Cloud Hypervisor's) keeps it.
//! Front ends that leave the device to us (crosvm, QEMU's `vhost-user-device`) read it here, and
//! are told when the link changes; the guests of the others keep their carrier while frames are
//! dropped.
//!
//! **Control queue.** Theirs too, and served to the latter only ([`control`]): receive modes,
//! address and VLAN filters act where frames are delivered ([`filter`]), so that a guest is not
//! woken by floods that it does not want. Where the queue is taken over from another daemon the
//! driver is asked to announce itself; a VMM with a control queue of its own says it by
//! `SEND_RARP`. Not offered: receive-side scaling and hash reports (a frame's queue is its
//! sender's, see above).
//!
//! # Limits
//! - One sidecore per switch; several switches spread over sidecores.
//! - 1,024 ports ([`base::limits::MAX_PORTS`]), 16 queue pairs each: indexes of a session.
//! - 64 unicast and 64 multicast addresses in the filter of a control queue, with more all of the
//!   kind pass. Its state is lost when another daemon takes the session over: then all frames pass
//!   and no offload is used for them, until the driver asks again.
//! - 64 frames or 256 KiB from one transmit queue per round, floods counted once per receiver:
//!   fairness, and the cache; less where the VM's turn ends first. From the uplink 64 frames or
//!   128 KiB, floods included.
//! - A frame counts as 512 bytes at least, and as 32 for each of its segments. So do segments
//!   beyond 20 at its receiver, where they are more than its bytes: who sends to a guest that cuts
//!   its buffers into crumbs, pays for them (from the uplink, that guest does).
//! - 65,557 bytes per frame: the largest IP packet behind two VLAN tags.
//! - 256 buffers per frame at the receiver: 64 KiB in the smallest buffers in use take 43.
//! - 64 buffers of datagrams before a kernel that takes none: what Linux takes in one turn, and
//!   less than what a socket of default size holds.
//! - 2,048 segments of a frame from a guest, 1,023 of one that leaves by the uplink (`writev` takes
//!   1,024). Frames with more, or with a buffer outside the VM's memory, are dropped as too big or
//!   malformed; receive buffers like that go back empty, and end what one frame may take.
//! - 128 segments when a super-packet is cut in software: 64 KiB at an MSS of 536 is 122.
//! - Headers of a super-packet end within 128 bytes; third VLAN tags and longer IPv6 extension
//!   headers make a super-packet, a packet of an IP-bound port, or one whose checksum is to be
//!   filled in, malformed. So does a checksum that would go in front of the transport header, into
//!   a fragment or into what is not IP: it is written after the frame was judged.
//! - 4,096 MAC addresses by default, 64 of them per port and half from the uplink, so that forged
//!   ones from outside leave room for the ports. Frames from more are passed, and answers to them
//!   are flooded, which `unlearned` counts. A bound or configured one takes the place of the
//!   learned one that was not seen for longest.
//! - 16 learned IP addresses per port, 4,096 per
//!   switch, kept for an hour of silence.
//! - Broadcasts of a port have a ceiling where one is configured, with a burst of a tenth of a
//!   second; multicasts and frames to unknown addresses have none.
//! - IP addresses are bound per switch, not per VLAN.
//! - 01-80-C2-00-00-0x (spanning tree, pause, LLDP) is never forwarded.
//! - A TAP hands up one frame per system call on kernels before 6.4 (no `RWF_NOWAIT` there).

pub mod allow;
mod announce;
mod backlog;
mod backpressure;
pub mod binding;
mod ceiling;
mod config_space;
mod control;
mod delivery;
pub mod device;
mod engine;
pub mod error;
pub mod fdb;
pub mod features;
mod filter;
mod forward;
mod forward_cache;
mod head_batch;
pub mod hook;
mod hook_turn;
mod ingress;
mod kicks;
pub mod metrics;
mod moves;
pub mod offload;
mod outcome;
mod port;
mod rejects;
mod rxq;
pub mod switch;
pub mod tap;
mod transmit;
mod uplink;
mod window;

#[cfg(feature = "testing")]
pub mod fuzzing;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use allow::Allow;
pub use binding::BindMode;
pub use device::{NetPort, NetPortConfig};
pub use error::NetError;
pub use hook::{FromGuest, Outbox, OutboxTo, Polled, PortHook, Queued, ToGuest};
pub use metrics::SwitchStats;
pub use switch::{MacEntry, Switch, SwitchConfig};
