//! Channels of the VMs that have them: who joins when, what is shown of it, and the end.
//!
//! Each VM with a `[vm.channel]` has a thread that sleeps until something of its ports changes, a
//! command comes, or it is time to look again ([`candidate`]). What it waits for, a monitor or a
//! guest, so holds up no other VM and no port.

mod addresses;
mod candidate;
mod excludes;
mod inbox;
mod members;
mod memory;
mod show;
#[cfg(test)]
mod tests;
mod vm;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use anyhow::Context;
use base::sync::lock;
use channel::{ChannelError, MemberInfo};
use config::{Config, CreditConfig};
use control::plane::{ChannelState, ChannelStatus, PlaneError};
use control::sample::Metrics;
use flow::FlowKey;
use pipe::PortFlows;

use self::addresses::NetAddresses;
use self::candidate::{Candidate, FrontEnds, Session};
use self::excludes::Excludes;
use self::inbox::{Command, Inbox};
use self::members::Members;
use self::vm::Vm;
use super::engine::Engine;
use super::port::{Live, Ports};
use super::shortcuts::Shortcuts;

/// A VM with a `[vm.channel]`, and its thread.
struct Seat {
    vm: Arc<Vm>,
    inbox: Arc<Inbox>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The VMs with a `[vm.channel]`; empty, and free of cost, when there is none.
#[derive(Default)]
pub struct Channels {
    seats: Vec<Seat>,
    /// Members of all channels; none once stopped, or when channels could not be started.
    members: Mutex<Option<Arc<dyn Members>>>,
    /// Why channels could not be started.
    failed: Option<String>,
}

impl Channels {
    /// Starts what the VMs of `config` need. Channels that cannot be started are shown with the
    /// reason and keep no port from its VM.
    pub fn start(
        config: &Config,
        ports: &Ports,
        shortcuts: Arc<Shortcuts>,
    ) -> anyhow::Result<Self> {
        let vms: Vec<Vm> = config.vms.iter().filter_map(Vm::of).collect();
        if vms.is_empty() {
            return Ok(Self::default());
        }
        let wanted = channel::ChannelsConfig {
            vectors: config.channel.vectors,
            heartbeat_ms: config.channel.heartbeat_ms,
            dead_after_ms: config.channel.dead_after_ms,
            drain_timeout_ms: config.channel.drain_timeout_ms,
            ..channel::ChannelsConfig::new(&config.daemon.run_dir)
        };
        match channel::Channels::start(wanted) {
            Ok(members) => {
                let all = ports.clone();
                let bound = Box::new(move |vm: &str| flows_bound(&all, vm));
                let excludes = Excludes::new(shortcuts, bound);
                let front = |vm: &Vm| {
                    Box::new(VmPorts { ports: ports.clone(), vm: vm.name.clone() }) as Box<_>
                };
                Self::with(Arc::new(members), excludes, vms, front)
            }
            Err(error) => {
                tracing::error!("no channels: {error}");
                let seat =
                    |vm| Seat { vm: Arc::new(vm), inbox: Arc::default(), thread: Mutex::default() };
                let seats = vms.into_iter().map(seat).collect();
                Ok(Self { seats, members: Mutex::default(), failed: Some(error.to_string()) })
            }
        }
    }

    fn with(
        members: Arc<dyn Members>,
        excludes: Excludes,
        vms: Vec<Vm>,
        front: impl Fn(&Vm) -> Box<dyn FrontEnds>,
    ) -> anyhow::Result<Self> {
        let excludes = Arc::new(excludes);
        let mut seats = Vec::with_capacity(vms.len());
        for vm in vms {
            let front = front(&vm);
            let (vm, inbox) = (Arc::new(vm), Arc::new(Inbox::default()));
            let candidate = Candidate::new(vm.clone(), members.clone(), excludes.clone(), front);
            let theirs = inbox.clone();
            let thread = std::thread::Builder::new()
                .name("channel".to_owned())
                .spawn(move || candidate.run(&theirs))
                .with_context(|| format!("starting the channel thread of VM {}", vm.name))?;
            seats.push(Seat { vm, inbox, thread: Mutex::new(Some(thread)) });
        }
        Ok(Self { seats, members: Mutex::new(Some(members)), failed: None })
    }

    fn members(&self) -> Option<Arc<dyn Members>> {
        lock(&self.members).clone()
    }

    fn seat(&self, vm: &str) -> Option<&Seat> {
        self.seats.iter().find(|seat| seat.vm.name == vm)
    }

    /// Whether the VM has a `[vm.channel]`.
    pub fn has(&self, vm: &str) -> bool {
        self.seat(vm).is_some()
    }

    /// Watches the memory that the front end of a running port shares.
    pub fn watch(&self, vm: &str, live: &Live) {
        if let Some(seat) = self.seat(vm) {
            let inbox = seat.inbox.clone();
            live.watch_memory(Arc::new(move || inbox.look()));
        }
    }

    /// Has a VM's thread look at its ports, which came or went.
    pub fn ports_changed(&self, vm: &str) {
        if let Some(seat) = self.seat(vm) {
            seat.inbox.look();
        }
    }

    /// Changes the ceilings of a VM's channel, if it has one, to those that it is granted.
    pub fn grant(&self, vm: &str, credit: &CreditConfig) {
        if let Some(seat) = self.seat(vm) {
            seat.vm.grant(credit);
            seat.inbox.look();
        }
    }

    /// Lists all VMs with a `[vm.channel]`.
    pub fn status(&self) -> Vec<ChannelStatus> {
        let members = self.members().map(|members| members.list()).unwrap_or_default();
        let why = |seat: &Seat| seat.inbox.why().or_else(|| self.failed.clone());
        self.seats.iter().flat_map(|seat| show::status(&seat.vm, why(seat), &members)).collect()
    }

    /// Adds the members' counters.
    pub fn metrics(&self, all: &mut Metrics) {
        show::metrics(&self.status(), all);
    }

    /// Makes a VM a member. Waits for its guest and its monitor.
    pub fn join(&self, vm: &str) -> Result<ChannelStatus, PlaneError> {
        let seat = self.ask(vm, Command::Join)?;
        let members = self.members().map(|members| members.list()).unwrap_or_default();
        let mut all = show::status(&seat.vm, seat.inbox.why(), &members);
        // The last one is of now: one that is gone may come before.
        all.pop().ok_or_else(|| PlaneError::Failed(format!("channels of VM {vm}: not shown")))
    }

    /// Ends a membership. Waits for its guest and its peers.
    pub fn leave(&self, vm: &str) -> Result<(), PlaneError> {
        self.ask(vm, Command::Leave).map(|_| ())
    }

    fn ask(&self, vm: &str, command: Command) -> Result<&Seat, PlaneError> {
        let seat = self.seat(vm).ok_or_else(|| {
            let what = "has no [vm.channel]: add one to the config and start the daemon anew";
            PlaneError::Conflict(format!("VM {vm} {what}"))
        })?;
        if let Some(why) = &self.failed {
            return Err(PlaneError::Refused(format!("the daemon has no channels: {why}")));
        }
        seat.inbox.ask(command).map(|()| seat)
    }

    /// Has all members leave, within the time that a member has for it: traffic goes through the
    /// switch again before the ports stop. A member that does not manage to is named in the log;
    /// the next daemon goes on.
    pub fn stop(&self) {
        self.seats.iter().for_each(|seat| seat.inbox.stop());
        let Some(members) = self.members() else { return };
        // This also ends the wait of one that is just joining.
        let left = leave_all(&*members, &BTreeSet::new());
        for seat in &self.seats {
            let thread = lock(&seat.thread).take();
            if thread.is_some_and(|thread| thread.join().is_err()) {
                tracing::error!(vm = %seat.vm.name, "the channel thread panicked");
            }
        }
        // One that had just begun to.
        leave_all(&*members, &left);
        lock(&self.members).take();
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Has all members leave at once, but those of `but`, so that one that does not answer takes no
/// time from the others. Returns the members that were asked.
fn leave_all(members: &dyn Members, but: &BTreeSet<String>) -> BTreeSet<String> {
    let lives = |member: &MemberInfo| member.state != ChannelState::Dead.name();
    let all: BTreeSet<String> =
        members.list().into_iter().filter(lives).map(|member| member.vm).collect();
    std::thread::scope(|scope| {
        for vm in all.difference(but) {
            let leave = move || match members.leave(vm) {
                Ok(()) | Err(ChannelError::NotMember { .. }) => {}
                Err(error) => tracing::warn!("stopped before it has left: {error}"),
            };
            if std::thread::Builder::new().spawn_scoped(scope, leave).is_err() {
                leave();
            }
        }
    });
    all
}

/// Connections of a VM that have to pass its network ports.
fn flows_bound(ports: &Ports, vm: &str) -> Vec<FlowKey> {
    let bound = ports.each_live(vm, |_, live| match &live.engine {
        Engine::Net(net, _) => Some(PortFlows::new(net).bound()),
        _ => None,
    });
    bound.concat()
}

/// Running ports of one VM.
struct VmPorts {
    ports: Ports,
    vm: String,
}

impl FrontEnds for VmPorts {
    fn sessions(&self) -> Vec<Session> {
        self.ports.each_live(&self.vm, |port, live| {
            let (number, memory) = live.session()?;
            Some(Session { port: port.config.name().to_owned(), number, memory })
        })
    }

    fn addresses(&self) -> Vec<NetAddresses> {
        self.ports.each_live(&self.vm, |port, live| match (&port.config, &live.engine) {
            (config::PortConfig::Net(config), Engine::Net(net, _)) => {
                // A switch that is gone knows none.
                let (mac, ips) = net.addresses().unwrap_or_default();
                Some(NetAddresses {
                    mac: config.mac.or(mac),
                    configured: config.addresses.clone(),
                    known: ips,
                })
            }
            _ => None,
        })
    }
}
