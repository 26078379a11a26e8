//! Errors of channels: every text names the value, its place and its limit.

use std::io;
use std::path::PathBuf;

use crate::registry::RegistryError;
use thiserror::Error;

/// Reason why a call about channels failed.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// The operating system refused something.
    ///
    /// Remedy: mend what the cause says: memory, or limits of open files.
    #[error("channels: {what}: {source}")]
    Io {
        /// Action that failed.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// A setting makes no sense.
    ///
    /// Remedy: write a value within the rule that the text names.
    #[error("channels: {what} is {value}; {rule}")]
    BadConfig {
        /// Name of the setting.
        what: &'static str,
        /// Value that was given.
        value: String,
        /// Rule that the value breaks.
        rule: String,
    },
    /// A setting of a member makes no sense.
    ///
    /// Remedy: write a value within the rule that the text names, in the VM's `[vm.channel]` or
    /// QEMU's command line.
    #[error("channels of VM {vm}: {what} is {value}; {rule}")]
    BadMember {
        /// Name of the VM.
        vm: String,
        /// Name of the setting.
        what: &'static str,
        /// Value that was given.
        value: String,
        /// Rule that the value breaks.
        rule: String,
    },
    /// The memory file of a member cannot be used.
    ///
    /// Remedy: give QEMU memory that is shared and sealed (`memory-backend-memfd,share=on`):
    /// docs/operate/channels.md. `allow_unsealed = true` takes a file, if its owner is trusted.
    #[error("channels of VM {vm}: {what}: {source}")]
    Memory {
        /// Name of the VM.
        vm: String,
        /// Action that failed.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The VM has joined already.
    ///
    /// Remedy: none is needed; to join anew `millrace channel leave VM` first.
    #[error("channels of VM {vm}: it is a member already, of trust domain {domain}")]
    AlreadyMember {
        /// Name of the VM.
        vm: String,
        /// Trust domain of which it is a member.
        domain: String,
    },
    /// The VM has not joined, or has left.
    ///
    /// Remedy: `millrace channel join VM`; `millrace channel ls` says why it is out.
    #[error("channels of VM {vm}: it is no member")]
    NotMember {
        /// Name of the VM.
        vm: String,
    },
    /// The domain has as many members as it may have, with those that are gone and whose memory is
    /// still plugged somewhere.
    ///
    /// Remedy: take VMs out of the domain, or wait until the memory of those that are gone is given
    /// back (`millrace channel ls`).
    #[error("channels of VM {vm}: trust domain {domain} has {limit} members already, the most")]
    Full {
        /// Name of the VM.
        vm: String,
        /// Name of the domain.
        domain: String,
        /// Limit of members.
        limit: usize,
    },
    /// The VM's monitor failed or refused.
    ///
    /// Remedy: do as the cause says; it is tried again.
    #[error("channels of VM {vm}: {source}")]
    Plug {
        /// Name of the VM.
        vm: String,
        /// Cause.
        source: PlugError,
    },
    /// A member did not give back its peers' memory in time, or its peers did not give back its
    /// own.
    ///
    /// Remedy: wait and ask again: the VM goes on leaving. End the programs of the members that the
    /// text names, or raise `drain_timeout_ms`.
    #[error("channels of VM {vm}: leaving took more than {timeout_ms} ms: {holders}")]
    DrainTimeout {
        /// Name of the VM.
        vm: String,
        /// Time limit.
        timeout_ms: u64,
        /// Memory that is still in use, and by which member.
        holders: String,
    },
    /// A member did not say that it keeps flows off the channel.
    ///
    /// Remedy: look at the VM: its guest is overloaded or stopped. Load its kernel modules anew if
    /// it goes on.
    #[error("channels of VM {vm}: it did not answer to exclude {seq} within {timeout_ms} ms")]
    ExcludeTimeout {
        /// Name of the VM.
        vm: String,
        /// Number of the request.
        seq: u32,
        /// Time limit.
        timeout_ms: u64,
    },
    /// The member's half of its mailbox is nonsense.
    ///
    /// Remedy: restart the VM, or load the kernel modules of its guest anew.
    #[error("channels of VM {vm}: it is broken: {why}")]
    Broken {
        /// Name of the VM.
        vm: String,
        /// Reason.
        why: String,
    },
    /// The VM ended meanwhile.
    ///
    /// Remedy: none is needed.
    #[error("channels of VM {vm}: the VM is gone")]
    Gone {
        /// Name of the VM.
        vm: String,
    },
    /// The registry of memberships failed.
    ///
    /// Remedy: see `RegistryError`.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The channels were stopped.
    ///
    /// Remedy: none is needed: the daemon ends.
    #[error("channels: stopped")]
    Stopped,
}

impl ChannelError {
    /// Makes an operating system error with the action that failed.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// Reason why a monitor did not run a command.
#[derive(Debug, Error)]
pub enum QmpError {
    /// The monitor cannot be connected to.
    ///
    /// Remedy: start QEMU with `-qmp unix:PATH,server=on,wait=off`, with the path of `qmp`, which
    /// the daemon's user may open.
    #[error("monitor {path}: {what}: {source}", path = path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Action that failed.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The socket failed.
    ///
    /// Remedy: restart the VM if it does not go on by itself.
    #[error("monitor: {command}: {source}")]
    Io {
        /// Command, or what else was under way.
        command: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// QEMU closed the monitor: it has ended.
    ///
    /// Remedy: none is needed: QEMU has ended.
    #[error("monitor: closed by QEMU during {command}")]
    Closed {
        /// Command, or what else was under way.
        command: &'static str,
    },
    /// No answer in time. When not even the greeting comes, somebody else may be connected: a
    /// monitor's socket serves one at a time.
    ///
    /// Remedy: give Millrace a monitor of its own: no other program may be connected to `qmp`. Else
    /// QEMU is overloaded or stopped.
    #[error("monitor: {command}: no answer within {timeout_ms} ms")]
    Timeout {
        /// Command.
        command: &'static str,
        /// Time limit.
        timeout_ms: u64,
    },
    /// QEMU refused a command.
    ///
    /// Remedy: do as QEMU's text says: mostly there are too few root ports, or no shared memory.
    #[error("monitor: {command}: {class}: {text}")]
    Refused {
        /// Command.
        command: &'static str,
        /// Error class of QEMU.
        class: String,
        /// Text of QEMU.
        text: String,
    },
    /// A line that is too long or not of the protocol.
    ///
    /// Remedy: check that `qmp` is the socket of a QMP monitor, not of a human one.
    #[error("monitor: {command}: {why}")]
    BadLine {
        /// Command, or what else was under way.
        command: &'static str,
        /// Reason.
        why: String,
    },
    /// The member's worker was stopped.
    ///
    /// Remedy: none is needed: the VM leaves, or the daemon ends.
    #[error("monitor: stopped during {command}")]
    Stopped {
        /// Command, or what else was under way.
        command: &'static str,
    },
}

impl QmpError {
    /// Whether the monitor takes no more commands.
    #[must_use]
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Timeout { .. } | Self::Refused { .. })
    }
}

/// Reason why a device could not be plugged.
#[derive(Debug, Error)]
pub enum PlugError {
    /// The monitor failed or refused.
    ///
    /// Remedy: see `QmpError`.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// No root port is free.
    ///
    /// Remedy: start QEMU with more `pcie-root-port` devices whose ids begin with `root_ports`:
    /// one, and one for each peer.
    #[error("none of {count} root ports whose id begins with {prefix:?} is free")]
    NoPort {
        /// Prefix of the root ports' ids.
        prefix: String,
        /// Number of root ports with the prefix.
        count: usize,
    },
    /// Devices that an earlier daemon plugged could not be unplugged.
    ///
    /// Remedy: unplug them by hand (`device_del` in a monitor of QEMU), or restart the VM.
    #[error("devices of an earlier daemon are not unplugged after {timeout_ms} ms: {devices}")]
    Leftover {
        /// Ids of the devices.
        devices: String,
        /// Time limit.
        timeout_ms: u64,
    },
}
