//! The vsock device engine: guest to host, host to guest, guest to guest inside a trust domain.
//!
//! # Theory of operation
//! One trust domain is one [`Domain`], one worker on one sidecore. It serves the receive and
//! transmit queues of all its guests (virtio 1.2, section 5.10) in rounds: packets off every
//! transmit queue, then packets into every receive queue.
//!
//! *Host programs* use the convention that other VMMs have: a guest that connects to CID 2, port P
//! reaches whoever listens at `<socket>_P`; a program that connects to `<socket>` and writes
//! `CONNECT P\n` reaches the guest's port P and reads `OK <port>\n` once the guest has accepted.
//!
//! *Services* are ports of CID 2 that the daemon answers itself ([`HostService`]): the engine makes
//! a pair of sockets instead of connecting to a path, and hands over one of them. From there on the
//! connection is like any other.
//!
//! *Credit ends here.* Towards each guest the device is the other end of every connection
//! (`connection`): the guest sees the space in our fixed buffer, and we keep to the space
//! that the guest announces. A connection between two guests is two of these back to back, so no
//! guest depends on another's numbers. Bytes skip the buffer when the other end takes them at once:
//! a guest's packets for one Unix socket leave in one `sendmsg` straight from its memory, bytes of
//! a Unix socket arrive in one `recvmsg` straight in the guest's buffers, and between guests there
//! is one copy.
//!
//! *Nothing queues up.* What is owed to a guest is a set of bits in its connection, not a list of
//! packets. Connections with something to send stand in a list through the table, each at most
//! once, and take turns. Resets for packets of no connection have a small fixed queue. When a guest
//! gives no receive buffers, everything waits in that bounded state, and only towards that guest.
//!
//! *Rounds are short* whatever a guest posts: what is taken from its ring ends with its allowance,
//! by bytes (the packet that exceeds it is the last one), and packets and bytes towards one guest
//! in one round have an upper bound ([`limits::ROUND_PACKETS`], [`limits::ROUND_BYTES`]). Its
//! connections draw on it in turn; other guests copy straight into its buffers with what is left,
//! and else through the buffer of the sending connection. A receive buffer without room for a
//! header and a byte stops the port.
//!
//! *Nobody takes it all.* Of a domain's buffers each port is sure of an equal share and may borrow
//! what the others' shares leave; of a port's connections another guest gets as many as it leaves
//! free. VMs that are in no trust domain have a [`Domain`] each.
//!
//! *System calls* on the hot path are one `sendmsg` or `recvmsg` per connection and batch, and one
//! `epoll_wait` at most every 20 µs: Unix sockets are in an epoll set of the worker's own, whose
//! descriptor wakes the sidecore. Opening a connection costs a socket, a buffer (allocated, or
//! reused) and an `epoll_ctl`.
//!
//! *A guest that starts anew* is known by its fresh rings, both of them, when they run after
//! neither did: its old connections end then, and on reset. A paused VM keeps them, and so does
//! one whose VMM gives a running queue another doorbell, for which that queue starts anew. Until
//! both queues run, neither is served.
//!
//! # Limits
//! All numbers, each with its reason, are in [`limits`]. Beyond those:
//! - A packet of more than 2,048 segments or 64 MiB, or with a buffer outside the VM's memory, is
//!   dropped and counted as malformed, and its connection is reset; receive buffers like that go
//!   back empty.
//! - Streams only. Datagrams and `SOCK_SEQPACKET` are refused with a reset: QEMU 7.2 does not pass
//!   the seqpacket feature on to vhost-user devices.
//! - Connections do not outlive the daemon: their Unix sockets end with it. After a restart through
//!   the holder the device goes on and answers packets of old connections with resets, so a guest
//!   sees `ECONNRESET` on the next thing it sends; one that only waits sees nothing, but for
//!   clients of privileged services on the four highest ports, which are told.
//! - Nor do they survive migration; vsock devices are unplugged around it.
//! - A paused VM both of whose rings stand exactly where fresh rings do is taken for one that
//!   starts anew, and its connections end.
//! - Each domain with Unix sockets costs one `epoll_wait` per sleep of its sidecore: a host with a
//!   hundred VMs outside of trust domains, each with an open connection, pays for a hundred.
//! - A guest cannot connect to its own CID through the device; Linux does that by itself.
//! - CIDs are unique within a domain; keeping them unique in a host is the configuration's task.

mod byte_ring;
pub mod connection;
mod connection_table;
pub mod device;
pub mod domain;
mod endpoint;
mod engine;
pub mod error;
mod guest_copy;
mod guest_directory;
mod handshakes;
mod host_connections;
pub mod limits;
pub mod listing;
pub mod metrics;
pub mod packet;
mod port;
mod port_config;
mod queues;
mod rx;
mod send_run;
mod service;
mod slab;
mod socket_set;
mod timer;
mod tx;
mod unix_socket;

pub use device::VsockPort;
pub use domain::{Domain, DomainConfig};
pub use engine::VsockEngine;
pub use error::{PacketError, VsockError};
pub use listing::{ConnectionInfo, Peer};
pub use metrics::VsockStats;
pub use port_config::{HostPorts, VsockPortConfig};
pub use service::{GuestResetHook, HostService, ServiceSink};

#[cfg(feature = "testing")]
pub mod fuzzing;
#[cfg(test)]
mod tests;
