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
//! **What is read** is a file or a connection. A file ([`mod@file`]) is extents of the image of its disk,
//! checked once, and holes; `sendfile` moves them from the host's page cache to a twin, and no byte is
//! copied. Of a connection the twin has the receiving half ([`receiving`]): the switch decides between two
//! of the peer's bytes where the guest's end and the twin's begin, the guest reads its own and the daemon
//! the others. To another connection they are spliced ([`feed`]), and not copied either.
//!
//! **What is written** is a connection ([`to_socket`]), of which the twin has the sending half
//! ([`sending`]), or a file ([`to_file`]). Where in the disk a file's bytes go is the business of the
//! guest's file system. So the guest is asked, range by range, to write placeholders with direct I/O; the
//! engine of its disk knows them ([`places`]), hands over where they go, and the bytes are put there
//! ([`copy`]): shared with the source's where the host's file system can, else copied once; those of a
//! connection wait in memory ([`supply`]) and are copied twice. Only then the guest's request is done. What
//! did not pass such an engine, and what is less than a block of the file, is sent to the guest as bytes.
//!
//! **A pipe** ([`job`]) is a series of steps, none of which waits; a few threads of the VM do them
//! ([`pool`]). It holds a connection only as long as it must: what the peer of a connection that is read
//! believes to have arrived is written before the connection goes back, or it is reset.
//!
//! **Another way.** What the switch has not seen it cannot take over. A connection whose packets may have
//! gone by a channel, now or since it began, is not piped; one that was shifted before there was a channel is
//! kept off it ([`Devices::has_way_past`], [`net::NetPort::flows_bound`]).
//!
//! # Limits
//! - 64 addresses of a namespace ([`namespace::MAX_ADDRESSES`]); only such as hosts have.
//! - 2,048 extents of a file ([`guest_abi::pipe::MAX_EXTENTS`]).
//! - A twin begins with 10 (the kernel's), 16, 32, … or 1,024 segments in flight.
//! - Its retransmission timeout begins with 3 s on kernels before 6.15, which cannot be told
//!   otherwise; on later ones with 1 s (or four round trips, if these are longer), which it keeps until it
//!   has measured a round trip. From then on it is as with any socket.
//! - A peer that acknowledges nothing for 15 minutes is lost ([`limits::SILENCE_TIMEOUT`]).
//! - Its segments have 88 to 32,767 bytes, options included.
//! - It does not use explicit congestion notification; a connection that has negotiated it is not read.
//! - A file is written in parts of 4 MiB, or 1 MiB of a connection, two at a time
//!   ([`limits::TAKE_BYTES`], [`limits::OPEN_TAKES`]); 64 pipes of a VM at a time hold up to 3 MiB of a
//!   connection in memory ([`limits::MAX_BUFFERED`]).
//! - An agent is heard 10,000 times a second ([`limits::MAX_HEARD`]). What it says costs its own thread at
//!   most the check of 2,048 extents, or a read of 4 KiB of each disk of the VM, and the switch's worker
//!   two calls.
//! - A self-test for writing is waited for 30 s ([`limits::PROBE_TIMEOUT`]).
//! - Only raw disks whose stages leave content alone are read and written ([`block::BlockPort::image`]).

mod agent;
mod arrivals;
mod connection;
mod copy;
mod disks;
mod ends;
pub mod error;
mod feed;
pub mod file;
mod given;
mod job;
pub mod limits;
pub mod listing;
pub mod message;
pub mod metrics;
pub mod namespace;
mod netlink;
mod page_cache;
mod places;
mod pool;
mod receiving;
mod sending;
mod sockopt;
mod supply;
mod takes;
#[cfg(test)]
mod testing;
mod to_file;
mod to_socket;
pub mod twin;
pub mod vm;

pub use error::PipeError;
pub use listing::PipeInfo;
pub use metrics::PipeStats;
pub use vm::{Devices, PipesConfig, Secret, VmPipes};
