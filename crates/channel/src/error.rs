//! What can be wrong with channels: every text names what, where and the limit.

use std::io;
use std::path::PathBuf;

use registry::RegistryError;
use thiserror::Error;

/// Why something about channels did not work.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// The operating system refused something.
    #[error("channels: {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A setting makes no sense.
    #[error("channels: {what} is {value}; {rule}")]
    BadConfig {
        /// Which.
        what: &'static str,
        /// Given.
        value: String,
        /// What is allowed.
        rule: String,
    },
    /// Something that was said of a member makes no sense.
    #[error("channels of VM {vm}: {what} is {value}; {rule}")]
    BadMember {
        /// The VM.
        vm: String,
        /// Which.
        what: &'static str,
        /// Given.
        value: String,
        /// What is allowed.
        rule: String,
    },
    /// A member's memory file.
    #[error("channels of VM {vm}: {what}: {source}")]
    Memory {
        /// The VM.
        vm: String,
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The VM has joined already.
    #[error("channels of VM {vm}: it is a member already, of trust domain {domain}")]
    AlreadyMember {
        /// The VM.
        vm: String,
        /// Where.
        domain: String,
    },
    /// The VM has not joined, or has left.
    #[error("channels of VM {vm}: it is no member")]
    NotMember {
        /// The VM.
        vm: String,
    },
    /// The domain has as many members as it may have, with those that are gone and whose memory is
    /// still plugged somewhere.
    #[error("channels of VM {vm}: trust domain {domain} has {limit} members already, the most")]
    Full {
        /// The VM.
        vm: String,
        /// The domain.
        domain: String,
        /// Most members.
        limit: usize,
    },
    /// The VM's monitor.
    #[error("channels of VM {vm}: {source}")]
    Plug {
        /// The VM.
        vm: String,
        /// The cause.
        source: PlugError,
    },
    /// A member did not give back in time what it has of others, or others what they have of it.
    #[error("channels of VM {vm}: leaving took more than {timeout_ms} ms: {holders}")]
    DrainTimeout {
        /// The VM.
        vm: String,
        /// The limit.
        timeout_ms: u64,
        /// Who still has what.
        holders: String,
    },
    /// A member did not say that it keeps flows off the channel.
    #[error("channels of VM {vm}: it did not answer to exclude {seq} within {timeout_ms} ms")]
    ExcludeTimeout {
        /// The VM.
        vm: String,
        /// The number of the request.
        seq: u32,
        /// The limit.
        timeout_ms: u64,
    },
    /// The member's half of its mailbox is nonsense.
    #[error("channels of VM {vm}: it is broken: {why}")]
    Broken {
        /// The VM.
        vm: String,
        /// What it said.
        why: String,
    },
    /// The VM ended meanwhile.
    #[error("channels of VM {vm}: the VM is gone")]
    Gone {
        /// The VM.
        vm: String,
    },
    /// What has to outlive the daemon.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The channels were stopped.
    #[error("channels: stopped")]
    Stopped,
}

impl ChannelError {
    /// An operating system error with its place.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// Why a monitor did not do what it was asked for.
#[derive(Debug, Error)]
pub enum QmpError {
    /// No connection.
    #[error("monitor {path}: {what}: {source}", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The socket failed.
    #[error("monitor: {command}: {source}")]
    Io {
        /// During what.
        command: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// QEMU closed the monitor: it has ended.
    #[error("monitor: closed by QEMU during {command}")]
    Closed {
        /// During what.
        command: &'static str,
    },
    /// No answer in time. When not even the greeting comes, somebody else may be connected: a
    /// monitor's socket serves one at a time.
    #[error("monitor: {command}: no answer within {timeout_ms} ms")]
    Timeout {
        /// The command.
        command: &'static str,
        /// The limit.
        timeout_ms: u64,
    },
    /// QEMU refused a command.
    #[error("monitor: {command}: {class}: {text}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's class of errors.
        class: String,
        /// QEMU's own text.
        text: String,
    },
    /// A line that is too long or not of the protocol.
    #[error("monitor: {command}: {why}")]
    BadLine {
        /// During what.
        command: &'static str,
        /// What is wrong.
        why: String,
    },
    /// We stop.
    #[error("monitor: stopped during {command}")]
    Stopped {
        /// During what.
        command: &'static str,
    },
}

impl QmpError {
    /// True when nothing can be asked of this monitor any more.
    #[must_use]
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Timeout { .. } | Self::Refused { .. })
    }
}

/// Why a device could not be plugged.
#[derive(Debug, Error)]
pub enum PlugError {
    /// The monitor.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// No root port is free.
    #[error("none of {count} root ports whose id begins with {prefix:?} is free")]
    NoPort {
        /// How the ids begin.
        prefix: String,
        /// How many there are.
        count: usize,
    },
    /// What an earlier daemon plugged could not be unplugged.
    #[error("devices of an earlier daemon are not unplugged after {timeout_ms} ms: {devices}")]
    Leftover {
        /// Their ids.
        devices: String,
        /// The limit.
        timeout_ms: u64,
    },
}
