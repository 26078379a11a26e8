//! Channels, host side: members, doorbell server, hot-plug, heartbeats.
//!
//! # Theory of operation
//! Members of a trust domain read each other's memory and ring each other's doorbells. Their
//! messages, by rings in their own memory, are the business of their kernel modules
//! ([`guest_abi::channel`]); the host plugs and unplugs.
//!
//! **A member** is a VM under QEMU that has root ports to spare. Joining plugs a doorbell into it
//! (`ivshmem-doorbell`), whose shared memory is the *mailbox* (`mailbox`): one file for each
//! member, which it has in common with the host alone. The host's half has the table of all members
//! (`table`), the member's half its kernel module's report, which is copied once and checked
//! (`member_report`). Then the memory of every other member is plugged into it (`ivshmem-plain`),
//! and its own into theirs, for reading only: QEMU gets a descriptor that cannot be written
//! (`memory`).
//!
//! **Who is who** comes from the monitors. The doorbell server (`doorbell`) has no socket file: its
//! connections are handed to each QEMU over QMP (`qmp`, `plug`), as are the descriptors of memory
//! files. The host is a peer of every domain, with number 0, so members can call it.
//!
//! **One thread** ([`Channels`], `control`) has all members. It counts heartbeats, takes calls, and
//! after each event compares the plugged devices with those that should be (`domain`). A thread of
//! each member runs the commands of its monitor (`worker`), because a guest may take seconds to let
//! a device go.
//!
//! **A member that leaves** is shown as such to everyone. Its memory is unplugged from a peer when
//! that peer says that it uses none of it, and peers' memory from it likewise; the doorbell goes
//! last. After a time-out the caller is told which members still have which memory, and the rest
//! goes on. **One that is dead** (its monitor was closed) is shown as such, and its memory stays in
//! each peer until that says the same: a counted zombie, whose index nobody else gets. **One that
//! speaks nonsense** is shown as leaving and its report counts no more, and so is one whose kernel
//! module is silent for 15 times `dead_after_ms` while another one leaves: the leaver's memory is
//! taken back from it, even if it still uses it.
//!
//! **Ceilings** (`ceiling`) are kept by the member's own kernel module, which has them from its
//! mailbox. The host only checks, by what the peers' modules say that they received of it
//! (`ceilings`, `ceiling_check`): a member that is over its ceiling by a clear margin is broken, so
//! its traffic goes by its network port again, whose ceiling the guest cannot pass.
//!
//! **After a restart** of the daemon, the registry knows the devices of each VM; they are unplugged
//! when the VM joins again. [`Channels::stop`] shows everyone as leaving, and leaves the rest to
//! this.
//!
//! # Limits
//! - 32 members of a domain, with zombies ([`guest_abi::channel::MAX_MEMBERS`]); 64 root ports of a
//!   VM are looked at. A VM needs one for the doorbell and one for each peer, with `pref64-reserve`
//!   of at least a peer's window.
//! - Peers see the largest power of two of bytes that fits into the memory file, from its
//!   beginning: a VM with 3 GiB shows 2 GiB. The guest copies what lies outside. At least 1 MiB
//!   ([`MIN_WINDOW_LEN_BYTES`]), at most 1 TiB.
//! - A memory file that somebody shortens ends the VMs of its peers: one that is not sealed against
//!   that (QEMU's `memory-backend-memfd` is) is refused, unless [`MemberConfig::allow_unsealed`]
//!   takes it with a warning.
//! - Only the monitor says that a VM is gone. It serves one client at a time: a monitor for us
//!   alone.
//! - A QEMU that can open `/proc/self/fd` of its own can open a peer's memory for writing, if it
//!   runs as a user that may: the guest cannot, a QEMU that was taken over can.
//! - With ACPI's hot-plug (QEMU's default for q35) a guest lets a device go at once; with that of
//!   the root ports Linux takes 5 s, and leaving 12 s: more than the default for it.
//! - A member that is over its ceiling is found once its peers have received above it what fits
//!   into all their rings, 10 MiB each, and ten seconds of the ceiling. Peers that lie for it hide
//!   it, and ones that lie against it break it: they are of its trust domain.
//! - While a doorbell is plugged, QEMU refuses to migrate the VM.
//! - A member that lives, and keeps what another one lent it, is waited for: `leave` says after its
//!   time-out who that is. Only silence ends it.
//! - Members that call are heard 100 times a second; a line of a monitor has 1 MiB, a command 10 s.
//! - An unplugged doorbell is not quite gone in a QEMU without KVM: each time costs it about 15
//!   descriptors (`plug`). A QEMU that was taken over can keep the eventfds of its number
//!   (`doorbell`) and swallow calls of whoever has it next, or hold the control thread with one
//!   that is full and blocking.
//! - A guest that ejects a peer's memory gets it back when a root port becomes free, one that
//!   ejects its doorbell is broken until it leaves.

mod ceiling;
mod ceiling_check;
mod ceilings;
mod config;
mod control;
mod domain;
mod doorbell;
pub mod error;
mod mailbox;
mod member;
mod member_info;
mod member_report;
mod memory;
mod plug;
mod poll_until;
mod qmp;
pub mod registry;
mod table;
mod waiters;
mod worker;

#[cfg(feature = "testing")]
pub mod fuzzing;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::thread::JoinHandle;

use crate::registry::{FileRegistry, Registry};
use base::event::Event;

pub use ceiling::Ceiling;
pub use config::{
    ChannelsConfig, DEFAULT_DEAD_AFTER_MS, DEFAULT_DRAIN_TIMEOUT_MS, DEFAULT_EXCLUDE_TIMEOUT_MS,
    DEFAULT_HEARTBEAT_MS, DEFAULT_ROOT_PORTS, DEFAULT_VECTORS, Flow, MemberConfig,
};
pub use error::{ChannelError, PlugError, QmpError};
pub use member_info::{LinkInfo, MemberInfo};
pub use member_report::{Link, LinkState};
pub use memory::{MAX_WINDOW_LEN_BYTES, MIN_WINDOW_LEN_BYTES, MemberMemory, MemoryRegion};

use control::{ControlInput, ControlSender, ControlThread};

/// Channels of a daemon. Its calls wait; it may be shared between threads. Dropping it stops it.
#[derive(Debug)]
pub struct Channels {
    inputs: ControlSender,
    thread: Option<JoinHandle<()>>,
}

impl Channels {
    /// Starts without members; memberships are kept in a file below `run_dir`.
    ///
    /// # Errors
    /// A setting out of its limits; the file of memberships is unreadable or not ours.
    pub fn start(config: ChannelsConfig) -> Result<Self, ChannelError> {
        let registry = FileRegistry::open(config.run_dir.join(config::REGISTRY_FILE))?;
        Self::start_with(config, Box::new(registry))
    }

    /// Starts as [`Channels::start`] does, with another registry.
    ///
    /// # Errors
    /// A setting out of its limits; the registry fails.
    pub fn start_with(
        config: ChannelsConfig,
        registry: Box<dyn Registry>,
    ) -> Result<Self, ChannelError> {
        config.check()?;
        let wake = Event::new().map_err(ChannelError::io("making an eventfd"))?;
        let (sender, queue) = channel();
        let inputs = ControlSender { sender, wake: Arc::new(wake) };
        let control = ControlThread::new(config, registry, inputs.clone(), queue)?;
        let thread = std::thread::Builder::new()
            .name("channels".to_owned())
            .spawn(move || control.run())
            .map_err(ChannelError::io("starting the control thread"))?;
        Ok(Self { inputs, thread: Some(thread) })
    }

    /// Makes a VM a member: waits for its doorbell, and for its memory and that of its peers to be
    /// plugged. A peer whose memory could not be plugged is no error: see [`LinkInfo::why_failed`].
    ///
    /// # Errors
    /// Something out of its limits; it is a member already; its domain is full; its monitor cannot
    /// be reached or refuses; no root port is free; what an earlier daemon plugged does not go.
    pub fn join(&self, config: MemberConfig) -> Result<(), ChannelError> {
        config.check()?;
        self.ask(|reply| ControlInput::Join(Box::new(config), reply))
    }

    /// Ends a membership: waits until nothing of the VM is in use by others and nothing of others
    /// in it, and all of it is unplugged.
    ///
    /// # Errors
    /// It is no member. [`ChannelError::DrainTimeout`]: it is still leaving, and will have left as
    /// soon as it can; another call waits for that again.
    pub fn leave(&self, vm: &str) -> Result<(), ChannelError> {
        self.ask(|reply| ControlInput::Leave(vm.into(), reply))
    }

    /// Changes a VM's addresses in all tables.
    ///
    /// # Errors
    /// Too many; it is no member.
    pub fn set_addresses(
        &self,
        vm: &str,
        macs: &[[u8; 6]],
        addresses: &[IpAddr],
    ) -> Result<(), ChannelError> {
        config::check_addresses(vm, macs, addresses)?;
        self.ask(|reply| {
            ControlInput::SetAddresses(vm.into(), macs.into(), addresses.into(), reply)
        })
    }

    /// Takes flows off the channel, from the VM's side: these and no others. Waits until the member
    /// says that none of their packets is on it. (Packets towards the VM are excluded at its peer.)
    ///
    /// # Errors
    /// Too many; it is no member; it is broken; it does not answer in time.
    pub fn exclude(&self, vm: &str, flows: &[Flow]) -> Result<(), ChannelError> {
        config::check_flows(vm, flows)?;
        self.ask(|reply| ControlInput::Exclude(vm.into(), flows.into(), reply))
    }

    /// Changes what a VM may send over its channels. Does not wait for its guest to know.
    ///
    /// # Errors
    /// It is no member.
    pub fn set_ceiling(&self, vm: &str, ceiling: Ceiling) -> Result<(), ChannelError> {
        self.ask(|reply| ControlInput::SetCeiling(vm.into(), ceiling, reply))
    }

    /// Lists all members, dead ones included whose memory others still have.
    #[must_use]
    pub fn list(&self) -> Vec<MemberInfo> {
        let (reply, answer) = sync_channel(1);
        self.inputs.send(ControlInput::List(reply));
        answer.recv().unwrap_or_default()
    }

    /// Shows all members as leaving and ends; what is plugged stays.
    pub fn stop(self) {
        drop(self);
    }

    fn ask(&self, input: impl FnOnce(member::Reply) -> ControlInput) -> Result<(), ChannelError> {
        let (reply, answer) = sync_channel(1);
        self.inputs.send(input(reply));
        wait_for(&answer)
    }
}

/// Waits for an answer. An input that the ended thread does not take is dropped, and its reply with
/// it.
fn wait_for(answer: &Receiver<Result<(), ChannelError>>) -> Result<(), ChannelError> {
    answer.recv().unwrap_or(Err(ChannelError::Stopped))
}

impl Drop for Channels {
    fn drop(&mut self) {
        self.inputs.send(ControlInput::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the channels' thread panicked");
        }
    }
}
