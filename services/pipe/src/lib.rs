//! Pipes: the host moves a guest's bytes between files and TCP connections.
//!
//! # Theory of operation
//! **A namespace for twins.** Each network port whose VM has pipes gets a network namespace without
//! a name ([`namespace`]). In it is a TAP, whose other end the switch reads and writes, and nothing
//! else: no other interface, no forwarding, no way to the host. Its addresses are those of the
//! guest's connections that pipes have served. All routes lead through the TAP to a neighbour that
//! does not exist; frames carry the TAP's own hardware address, and the switch puts in the right
//! ones. So nobody asks for addresses, and the namespace sends nothing by itself.
//!
//! **A twin** ([`twin`]) is a socket in it that the kernel was told, by `TCP_REPAIR`, to be a
//! guest's established connection from a certain byte on. It is made without a packet and goes
//! without one. Between these it is any TCP socket: segmentation, retransmission and congestion
//! control are the kernel's. Its congestion window is near the guest's: the socket's mark chooses a
//! route with an initial window of 2^n segments, so no BPF is needed.
//!
//! **A source** is a file or a connection. A file with a lease ([`mod@file_source`]) is extents of
//! the image of its disk, checked once, and holes; `sendfile` moves them from the host's page cache
//! to a twin, and no byte is copied. A file without one the guest reads itself ([`placed_source`]).
//! Of a connection ([`socket_source`]) the twin has the receiving half: the switch decides between
//! two of the peer's bytes where the guest's end and the twin's begin; the guest moves its own
//! bytes, and the daemon the others. To another connection they are spliced ([`stream_source`]),
//! and not copied either.
//!
//! **A sink** is a connection ([`socket_sink`]), of which the twin has the sending half, or a file
//! ([`file_sink`]). The guest's file system decides where in the disk a file's bytes go. So the
//! guest is asked, range by range, to write placeholders with direct I/O; the engine of its disk
//! knows them ([`placeholders`]), hands over where they go, and the bytes are put there ([`copy`]):
//! shared with the source's where the host's file system can, else copied once; those of a
//! connection wait in memory ([`range_source`]) and are copied twice. Only then the guest's request
//! is done. Ranges that did not pass such an engine, and parts of a block of the file, are sent to
//! the guest as bytes.
//!
//! **A pipe** ([`job`]) is a series of steps, none of which waits; a few threads of the VM do them
//! ([`pool`]). What the steps are depends on its sink: [`pipe_to_socket`], [`pipe_to_file`]. It
//! holds a connection only as long as it must: what the peer of a connection that is read believes
//! to have arrived is written before the connection goes back, or it is reset.
//!
//! **What it costs** is charged to the VM's account, which its devices share. A file that is read
//! by extents passes a gate ([`disk_gate`]): the ceilings of the VM, and its place in the device,
//! as a request of the guest does; a pipe that is held there waits without a thread. Placeholders
//! are requests of the guest, and twins' segments frames of its port: disk and switch have charged
//! them, and held them back, already. The CPU time of all these threads is charged as well, by
//! weight alone: it makes the VM yield on the sidecores, and holds no pipe back by itself.
//!
//! **The agent** of the guest asks for pipes. A connection of it is taken by the [`acceptor`]; a
//! session ([`agent_session`]) reads its messages, and a [`line`] writes to it.
//!
//! **Another way.** The switch cannot take over what it has not seen. A connection whose packets
//! may have gone by a channel, now or since it began, is not piped; one that was shifted before
//! there was a channel is kept off it ([`Devices::has_way_past`], [`PortFlows::bound`]).
//!
//! # Words
//! Files and types have the same names as in the guest's agent (`guest/agent`), where there are
//! both: file and socket sources and sinks, placed sources, placeholders, ends, the line, the
//! self-test. *Own bytes* are those of a connection that came to the guest before the pipe did: the
//! guest moves them. The *skew* is the offset of a pipe's first byte in its block of the file.
//!
//! # Limits
//! - 64 addresses of a namespace ([`namespace::MAX_ADDRESSES`]); only such as hosts have.
//! - 2,048 extents of a file ([`guest_abi::pipe::MAX_EXTENTS`]).
//! - A twin begins with 10 (the kernel's), 16, 32, … or 1,024 segments in flight.
//! - Its retransmission timeout begins with 3 s on kernels before 6.15, which cannot be told
//!   otherwise; on later ones with 1 s (or four round trips, if these are longer), which it keeps
//!   until it has measured a round trip. From then on it is as with any socket.
//! - A peer that acknowledges nothing for 15 minutes is lost ([`limits::SILENCE_TIMEOUT`]).
//! - A twin's segments have 88 to 32,767 bytes, options included.
//! - A twin does not use explicit congestion notification; a connection that has negotiated it is
//!   not read.
//! - A file is written in requests of 4 MiB, or 1 MiB of a connection, two at a time
//!   ([`limits::WRITE_REQUEST_BYTES`], [`limits::MAX_OPEN_REQUESTS`]); 64 pipes of a VM at a time
//!   hold up to 3 MiB of a connection in memory ([`limits::MAX_BUFFERING_PIPES`]).
//! - 10,000 messages of an agent are read in a second ([`limits::MAX_MESSAGES`]). A message costs
//!   the session's own thread at most the check of 2,048 extents, or a read of 4 KiB of each disk
//!   of the VM, and the switch's worker two calls.
//! - A self-test with placeholders is waited for 30 s ([`limits::SELF_TEST_TIMEOUT`]).
//! - A pipe's own reads do not wait for the weight of their VM at the device; what they have read
//!   is owed there by the next requests of the guest, up to four bursts at once.
//! - Of the CPU time of an agent's sessions only that of its messages is charged, none before the
//!   hello; nor is that of the acceptor.
//! - Only raw disks whose stages leave content alone are read and written
//!   ([`block::BlockPort::image`]).

mod acceptor;
mod agent_session;
mod buffer_slot;
pub mod config;
mod connection;
mod copy;
mod disk_gate;
mod disks;
mod ends;
mod epoll_set;
pub mod error;
mod file_sink;
pub mod file_source;
mod gated_file;
pub mod hook;
mod job;
pub mod limits;
mod line;
pub mod message;
pub mod metrics;
pub mod namespace;
mod netlink;
mod page_cache;
pub mod pipe_info;
mod pipe_set;
mod pipe_to_file;
mod pipe_to_socket;
mod placed_request;
mod placed_source;
mod placeholders;
mod pool;
mod port_flows;
mod purse;
mod range_request;
mod range_source;
mod self_test;
mod socket_sink;
mod socket_source;
mod sockopt;
mod stream_source;
#[cfg(test)]
mod testing;
mod transfer;
pub mod twin;
mod twin_port;
mod twin_queue;
pub mod vm;

pub use config::{Devices, PipesConfig, Secret};
pub use error::PipeError;
pub use hook::PipeHook;
pub use metrics::PipeStats;
pub use pipe_info::PipeInfo;
pub use port_flows::PortFlows;
pub use vm::VmPipes;
