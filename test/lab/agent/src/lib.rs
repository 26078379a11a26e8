//! The guest side of Millrace's lab: one static program that is init, command agent and network
//! test tool in the small VMs that tests, demo and benchmarks boot.
//!
//! # Theory of operation
//! The lab puts this program into every guest's initramfs as `/init`. As process 1 ([`init`]) it
//! mounts the kernel's file systems, loads the modules named on the kernel command line and starts
//! itself once more as the agent ([`serve`]). The agent opens the first virtio-serial port and
//! speaks the framed protocol of [`proto`]: run a shell command, send a signal to it, put a file,
//! get a file. Commands run side by side, each under the request's id. The same program, called by
//! other names, is the kernel's `modprobe` helper ([`modprobe`]) and the sender, receiver and echo
//! server of the network tests ([`tools`]), so that host and guest always run the same code.
//!
//! The lab links this crate as a library too, for the protocol and for the host's end of a
//! transfer ([`tools::xfer`]).
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | one frame's body | 256 KiB ([`proto::MAX_BODY_BYTES`]) | a reader allocates at most this much on the other side's word |
//! | one file or output chunk | 64 KiB ([`proto::CHUNK_BYTES`]) | commands sharing the port take turns |
//! | commands at once | 64 ([`serve::MAX_COMMANDS`]) | one thread each in a 128 MB guest |
//! | one datagram of the UDP tools | 1,400 bytes payload at most in `xfer` | never fragments at MTU 1,500 |

pub mod error;
pub mod init;
pub mod modprobe;
pub mod proto;
pub mod serve;
pub mod stream;
pub mod tools;

mod command;
mod files;

pub use error::AgentError;
