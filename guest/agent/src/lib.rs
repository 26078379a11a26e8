//! The guest's agent: the only one in a guest that the daemon believes about files and connections.
//!
//! # Theory of operation
//! Programs connect to a Unix socket ([`serve`]) and hand over a source and a sink as descriptors:
//! having them is the permission, as for `sendfile(2)`. For each connection a thread waits for
//! requests. It looks at the descriptors itself and believes nothing that it can see for itself:
//!
//! - a **socket** ([`socket`]) must be established TCP; it is uncorked, what is unsent is waited for,
//!   and the rest is read from `TCP_INFO`;
//! - a **file** ([`file`]) must be a regular one on ext4 or xfs. The agent opens it again and takes a
//!   read lease ([`lease`]), so that nobody can write or truncate it, then asks where its bytes lie
//!   ([`fiemap`]). Which disk of the VM that is, and that what is found there really is the file's
//!   content, is shown once for each file system by a self-test ([`disks`]): the agent writes a
//!   secret into a file, and the daemon must find it on a disk at that place.
//!
//! Then it asks the daemon ([`host`]), one stream for all requests, and waits ([`pipe`]) for the end,
//! for the program to go, for its time to be over or for somebody who wants to write the file. Lease
//! and descriptors are held until the daemon has said that it needs the file's blocks no more.
//!
//! Whatever is in the way has a [`guest_abi::Reason`], with which the program's library falls back to
//! the ordinary system call. One reason is not to be followed by that:
//! [`guest_abi::Reason::Lost`], as nobody knows how much has arrived.
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | connections of programs | 256 ([`serve::MAX_CONNECTIONS`]) | a thread each |
//! | of one user but root | 128 ([`serve::MAX_USER_CONNECTIONS`]) | nobody takes all |
//! | idle connection | 30 s ([`serve::IDLE_TIME`]) | they count, and libraries connect again |
//! | unsent bytes | 200 ms ([`socket::UNSENT_TIME`]) | a client that does not read is no case for a pipe |
//! | self-tests remembered | 64 ([`disks::MAX_FILE_SYSTEMS`]) | memory |
//! | failed self-test | 30 s ([`disks::RETRY_TIME`]) | it writes to the disk |
//! | file systems | ext4, xfs on a disk or partition | others move blocks, or do not say where they are |
//!
//! What the lease does not stop: on xfs with reflinks, deduplication of the very file, by its owner or
//! root, exchanges blocks for equal ones; the old ones may be used anew while a pipe reads them.

pub mod disks;
pub mod fiemap;
pub mod file;
pub mod host;
pub mod lease;
pub mod mounts;
pub mod notify;
pub mod pipe;
pub mod serve;
pub mod socket;
pub mod wake;

mod error;
mod sys;

pub use error::AgentError;
pub use serve::{Agent, Config};
