//! Guest agent: the one program of a guest that the daemon believes about files and connections.
//!
//! # Theory of operation
//! Programs connect to a Unix socket ([`serve`]) and hand over a source and a sink as descriptors:
//! having them is the permission, as for `sendfile(2)`. For each connection a thread waits for
//! requests ([`request`]). It checks the descriptors itself, and trusts no fact about them that it
//! can check ([`pipe`], [`ends`]):
//!
//! - a **socket** ([`socket`]) must be established TCP. A sink is pushed until nothing is unsent.
//!   Of a source, the daemon gets the numbers of bytes received and read by the program, taken at
//!   one moment. The rest is read from `TCP_INFO`;
//! - a **file that is read** ([`file_source`]) must be a regular one on ext4 or xfs. The agent
//!   opens it again ([`reopen`]) and takes a read lease ([`lease`]), so that no process can write
//!   or truncate it, then looks up its extents ([`fiemap`]). A self-test shows once for each file
//!   system which disk of the VM it is on, and that the extents really have the file's content
//!   ([`disks`], [`self_test`]): the agent writes a secret into a file, and the daemon must find it
//!   on a disk at that place. If another process has the file open for writing there is no lease.
//!   Then the agent reads it with direct I/O over placeholders, piece by piece
//!   ([`placed_source`]), where a self-test has shown that the daemon sees them;
//! - a **file that is written** ([`file_sink`]) must be such a file, too. The agent opens it again
//!   for direct I/O and writes placeholders, which the daemon's disk replaces by the pipe's bytes,
//!   as a second self-test shows. It does so as the program's user ([`identity`]): root's
//!   privileges are not lent.
//!
//! Then it asks the daemon ([`host`], [`line`]), over one stream for all requests, and serves the
//! daemon's messages ([`exchange`]) until the end, or until the program exits, the time limit is
//! over, a process wants to write the file that is read, or the daemon is silent for too long
//! ([`watch`]). Lease and descriptors are held until the daemon has released them.
//!
//! Bytes of a socket that came to the guest before the pipe are the guest's to move: the agent
//! reads just these, and takes them out of the socket only when they are in the sink.
//!
//! At every end, no placeholder stays in a file and no byte is reported that is not there: bytes in
//! doubt are read again and checked. With a file as the sink, the answer is a short count even when
//! the daemon is lost.
//!
//! A program that believes its bytes to be sent gets a pipe in the background ([`background`]),
//! which outlives it.
//!
//! The break-even size of pipes is measured ([`measure`]) once for each stream to the daemon, after
//! its first pipe of a file; programs can ask for it.
//!
//! Each obstacle has a [`guest_abi::Reason`], with which the program's library falls back to the
//! ordinary system call; the daemon gets their counts ([`refusals`]) for its metrics. After one
//! reason there is no fallback: [`guest_abi::Reason::Lost`], as the number of bytes that arrived is
//! not known; with a count, it is.
//!
//! # Limits
//! - 256 connections of programs ([`serve::MAX_CONNECTIONS`]): each has a thread. 128 of one user
//!   but root ([`serve::MAX_USER_CONNECTIONS`]): no user can take all.
//! - An idle connection is closed after 30 s ([`serve::IDLE_TIME`]): it counts, and libraries
//!   connect again.
//! - Unsent bytes of a sink are waited for 200 ms ([`socket::UNSENT_TIME`]): a client that does not
//!   read is no case for a pipe. In front of a pipe from a socket it is 30 s
//!   ([`exchange::OWN_UNSENT_TIME`]): that has begun already.
//! - 16 messages of the daemon, with 240 KiB of bytes, wait for a pipe ([`line::MAX_EVENTS`]):
//!   memory. A daemon has two writes or reads under way.
//! - A daemon that is silent for 12 s while somebody waits is gone ([`line::Heartbeat`]): vsock
//!   does not tell of a host that has gone.
//! - 64 gaps in what is written to a file ([`file_sink::MAX_RANGES`]): memory. Writes come in
//!   order.
//! - 1 MiB of memory for a pipe to a file: a few requests of a disk. 512 KiB for one from a file
//!   without a lease: a request of a disk, with a segment for each page.
//! - One message a second about refused requests ([`refusals::PAUSE`]): a program may ask without
//!   end.
//! - The self-tests of 64 file systems are remembered ([`disks::MAX_FILE_SYSTEMS`]): memory. A
//!   failed one is not repeated for 30 s ([`disks::RETRY_TIME`]): it writes to the disk.
//! - File systems are ext4 and xfs on a disk or a partition: others move blocks, or do not say
//!   where they are.
//!
//! The lease does not stop deduplication: on xfs with reflinks, the file's owner or root can have
//! its blocks exchanged for equal ones; the old ones may be used anew while a pipe reads them.
//!
//! A file that is written may not end behind the program's `RLIMIT_FSIZE`, which is read when the
//! pipe begins; where `/proc` hides it there are no pipes into files. If the agent is killed and
//! the daemon goes before it has replaced what was written last, placeholders stay there: the
//! program then has no answer ([`guest_abi::Reason::Lost`]), and the file no more than a crash
//! would leave.
//!
//! The urgent byte of a connection that is read is noticed when it has come, not before.

pub mod background;
pub mod disks;
pub mod ends;
pub mod exchange;
pub mod fiemap;
pub mod file_sink;
pub mod file_source;
pub mod host;
pub mod identity;
pub mod lease;
pub mod line;
pub mod log;
pub mod measure;
pub mod mounts;
pub mod outcome;
pub mod pipe;
pub mod placed_source;
pub mod placeholders;
pub mod ranges;
pub mod refusals;
pub mod reopen;
pub mod request;
pub mod self_test;
pub mod serve;
pub mod shared;
pub mod socket;
pub mod wake;
pub mod watch;

mod error;
mod sys;

pub use error::AgentError;
pub use serve::{Agent, Config};
