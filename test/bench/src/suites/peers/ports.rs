//! Ports between front end and back ends: addresses, sockets and queues.

use std::path::{Path, PathBuf};

/// Descriptors of each ring.
pub const QUEUE_SIZE: &str = "256";
/// MAC address of the front end's first port.
pub const MAC_A: &str = "02:00:00:00:00:0a";
/// MAC address of its second port.
pub const MAC_B: &str = "02:00:00:00:00:0b";
/// IPv4 address of its first port.
pub const IP_A: &str = "10.99.0.10";
/// IPv4 address of its second port.
pub const IP_B: &str = "10.99.0.11";

/// Sockets of both ports in a folder.
pub fn sockets(folder: &Path) -> (PathBuf, PathBuf) {
    (folder.join("a.sock"), folder.join("b.sock"))
}
