//! Sessions of vhost-user, which connect a VMM's socket with a device engine.
//!
//! # Theory of operation
//! [`serve_port`] gives a port one thread that sleeps in `poll`. The thread takes one connection
//! after the other ([`Endpoint`]: we listen, we dial, or we are handed a descriptor), and runs a
//! session on each. A session never sees a packet: it learns memory, rings and doorbells from the
//! front end, makes [`queue::Vring`]s of them and hands these to a [`Device`], which runs them on
//! its sidecores.
//!
//! A session is a record of the front end's settings. A message changes the record; queues that
//! must not run any more are stopped; then every queue that has all it needs (features, size,
//! addresses in memory, a kick, enabled) and does not run is started. So the order of messages
//! matters only where the specification says so, and a ring whose memory was taken away starts
//! again when the memory is back.
//!
//! Each message goes through the same steps: *peeked* at in the socket, checked ([`codec`]: size,
//! number of descriptors, version; then every field), obeyed, *saved* with the [`SessionStore`],
//! answered, and only then taken off the socket. A daemon killed at any of these steps leaves the
//! message to the next one, and messages may be obeyed twice without harm.
//!
//! The [`holder`] is a separate, tiny process. Per port it keeps a JSON state and the descriptors:
//! the session's own socket, memory, doorbells, the inflight region, and a file with the rings'
//! positions. The next daemon's [`serve_port`] of the same name takes them, maps the same memory,
//! and starts the same queues where the dead one was; the VMM sees no disconnect. Where a ring
//! stood: devices that complete in order find it in the position slot or in the ring; others in the
//! inflight region, which the session makes itself when the front end has none.
//!
//! Beside a session the holder may keep one file of a port's device ([`SessionStore::save_file`]):
//! the memory of a disk, which it has whether or not a front end is connected. A holder that was
//! started again has none until the daemon is.
//!
//! A wrong *message* ends the session, with a reason in the status and the log: the listener takes
//! the next connection. A fault of a *ring* breaks the port
//! ([`queue::health::PortHealth`]): its queues stop, the err descriptor rings, the status says
//! DEVICE_NEEDS_RESET and a config change has the driver look at it, the session stays,
//! and a reset of the rings heals it. Refusals that a front end can live with (a memory slot that
//! cannot be mapped, an MTU, a config write) are answered and logged, and the session goes on.
//!
//! # Limits
//! - 4,096 bytes a message: the largest legal one has 2,056 ([`codec::MAX_PAYLOAD_LEN_BYTES`]).
//! - 64 descriptors a message and 64 memory regions a VM ([`base::limits::MAX_MEMORY_REGIONS`]),
//!   16 TiB together; all ports of a VM have one share of the address space ([`VmShare`]), all VMs
//!   64 TiB ([`base::limits::MAX_MAPPED_BYTES`]).
//! - `GET_QUEUE_NUM` of a network port: queue pairs for QEMU's network device, which is known by
//!   asking for protocol features before it is the owner, and rings for all others.
//! - 33 queues a port (16 queue pairs and their control queue), 32,768 descriptors a queue
//!   ([`base::limits`]), 131,072 in all queues of an inflight region.
//! - `SET_VRING_BASE` says where a ring begins only for a disk without inflight region. Elsewhere
//!   the used index and the region know better, and front ends that leave it out after a reconnect
//!   are served.
//! - 256 bytes of config space in a message: QEMU's limit.
//! - Kick, call and err are eventfds, nothing else: a pipe, a socket or a file could block whoever
//!   rings or watches it. Its other owner can fill one and make it blocking; that holds up nobody
//!   ([`base::doorbell`]). Nor does a descriptor whose `close` hangs ([`base::peer_fd`]).
//! - 10,000 messages a second from all front ends of a VM, and a hundredth of a CPU for them, of
//!   which 100 ms may be used at once: what session threads compute, no guest's CPU does. More wait
//!   in their sockets, each for a tenth of a second to 4.1 s.
//! - 20 log lines at once that a front end causes, then ten a minute ([`base::log_limit`]). A stop
//!   waits 25 s for a session's thread.
//! - One front end a port; a second connection is closed at once.
//! - 256 KiB of stack a port: there may be a thousand.
//! - Holder: 1,024 ports, 64 KiB and 168 descriptors each (what 64 regions and 33 queues need), 16
//!   connections, 2 s for an answer: after that the session goes on unsaved, and says so.
//! - Dialling again: after 50 ms, doubled up to 1 s; at once after a session of 1 s or more, after
//!   50 ms when a shorter one brought a message.
//! - Sessions in a row in which no queue ran: after three, 100 a second, and a line a minute in the
//!   log.
//! - A daemon killed in the microsecond between answering a message and taking it off the socket
//!   answers it a second time. Nothing on a socket can close this gap from our side; front ends
//!   take the second answer for a wrong reply and close the connection.
//! - A message that does not lie in the socket in one piece is consumed as it comes: a daemon
//!   killed meanwhile loses it. Real front ends send each message in one write.
//! - Not offered: postcopy, IOMMU, in-band notifications, host notifiers, cross-endian, crypto,
//!   shared objects and device state. The eventfd of `SET_LOG_FD` is accepted and never rung (it is
//!   optional). A systemd fd store is not used; [`SessionStore`] is where it would go.

mod backend_channel;
pub mod capabilities;
pub mod codec;
pub mod device;
mod endpoint;
mod error;
mod failed_sessions;
pub mod holder;
mod pace;
mod port_context;
mod request;
mod server;
mod session;
pub mod session_store;
mod share;
mod shared_memory;
mod status;
mod wire;

pub use device::{ConfigNotifier, ConfigNotifyError, Device, DeviceError, DeviceKind};
pub use endpoint::Endpoint;
pub use error::VhostUserError;
pub use request::MessageName;
pub use server::{PortConfig, PortServer, serve_port};
pub use session_store::{NullStore, SessionStore};
pub use share::VmShare;
pub use shared_memory::SharedRegion;
pub use status::{PortStatus, QueueStatus, RegionStatus};

#[cfg(feature = "testing")]
pub mod testing;
