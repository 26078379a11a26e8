//! Pipes: the host moves a guest's bytes.
//!
//! # Theory of operation
//! **A namespace for twins.** Each network port whose VM has pipes gets a network namespace without a
//! name ([`namespace`]). In it is a TAP, whose other end the switch reads and writes, and nothing else:
//! no other interface, no forwarding, no way to the host. Its addresses are those of the guest's
//! connections that pipes have served. All routes lead through the TAP to a neighbour that does not
//! exist; frames carry the TAP's own hardware address, and the switch puts in the right ones. So nobody
//! asks for addresses, and the namespace says nothing by itself.
//!
//! **A twin** ([`twin`]) is a socket in it that the kernel was told, by `TCP_REPAIR`, to be a guest's
//! established connection from a certain byte on. It is made without a packet and goes without one.
//! Between these it is any TCP socket: segmentation, retransmission and congestion control are the
//! kernel's. Its congestion window is near the guest's: the socket's mark chooses a route with an initial
//! window of 2^n segments, so no BPF is needed.
//!
//! **A source** ([`mod@file`]) is the guest's file: extents of the image of its disk, checked once, and
//! holes. `sendfile` moves them from the host's page cache to the twin; no byte is copied.
//!
//! # Limits
//! - 64 addresses of a namespace ([`namespace::MAX_ADDRESSES`]); only such as hosts have.
//! - 2,048 extents of a file ([`guest_abi::pipe::MAX_EXTENTS`]).
//! - A twin begins with 10 (the kernel's), 16, 32, … or 1,024 segments in flight.
//! - Its retransmission timeout begins with 3 s on kernels before 6.15, which cannot be told
//!   otherwise; on later ones with 1 s, and doubles no further (or to four round trips, if these are
//!   longer). There it gives up after 255 attempts, about four minutes.
//! - Its segments have 88 to 32,767 bytes, options included.
//! - It does not use explicit congestion notification.

mod agent;
pub mod error;
pub mod file;
mod job;
pub mod limits;
pub mod listing;
pub mod message;
pub mod metrics;
pub mod namespace;
mod netlink;
mod pool;
mod sockopt;
#[cfg(test)]
mod test_support;
pub mod twin;
pub mod vm;

pub use error::PipeError;
pub use listing::PipeInfo;
pub use metrics::PipeStats;
pub use vm::{Devices, PipesConfig, VmPipes};
