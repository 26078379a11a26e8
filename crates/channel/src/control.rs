//! The control thread: it alone touches members, and waits for nothing but descriptors and moments.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::time::{Duration, Instant};

use base::event::Event;
use guest_abi::channel::MAX_MEMBERS;
use registry::{Membership, PluggedDevice, Registry};
use rustix::event::{PollFd, PollFlags};

use crate::config::{ChannelsConfig, Flow, MemberConfig};
use crate::domain::{Domain, Timing};
use crate::error::ChannelError;
use crate::info::{MemberInfo, list};
use crate::mailbox::Mailbox;
use crate::member::{Life, Member, Plug, Reply, Wait};
use crate::memory::Memory;
use crate::plug::Part;
use crate::qmp::is_gone;
use crate::wait::wait;
use crate::waits::answer;
use crate::worker::{Report, Reports, Start, Worker};

/// What the control thread is told.
#[derive(Debug)]
pub(crate) enum Input {
    Join(Box<MemberConfig>, Reply),
    Leave(String, Reply),
    SetAddresses(String, Vec<[u8; 6]>, Vec<IpAddr>, Reply),
    Exclude(String, Vec<Flow>, Reply),
    List(SyncSender<Vec<MemberInfo>>),
    /// Of the member with this serial number.
    Report(u64, Report),
    Stop,
}

/// The way to the control thread.
#[derive(Debug, Clone)]
pub(crate) struct Inputs {
    pub sender: Sender<Input>,
    pub wake: Arc<Event>,
}

impl Inputs {
    /// False when the thread has ended.
    pub fn send(&self, input: Input) -> bool {
        self.sender.send(input).is_ok() && self.wake.signal().is_ok()
    }
}

/// The way of one member's worker.
#[derive(Debug, Clone)]
struct MemberReports {
    inputs: Inputs,
    serial: u64,
}

impl Reports for MemberReports {
    fn report(&self, report: Report) {
        // Nobody listens when everything stops.
        self.inputs.send(Input::Report(self.serial, report));
    }
}

/// All domains.
pub(crate) struct Control {
    config: ChannelsConfig,
    domains: BTreeMap<String, Domain>,
    registry: Box<dyn Registry>,
    inputs: Inputs,
    queue: Receiver<Input>,
    next_beat: Instant,
    last_serial: u64,
}

impl Control {
    /// Begins without members. Memberships of VMs that are gone are forgotten.
    pub fn new(
        config: ChannelsConfig,
        mut registry: Box<dyn Registry>,
        inputs: Inputs,
        queue: Receiver<Input>,
    ) -> Result<Self, ChannelError> {
        for membership in registry.memberships() {
            if is_gone(&membership.qmp) {
                registry.remove(&membership.vm)?;
            }
        }
        let (domains, next_beat) = (BTreeMap::new(), Instant::now());
        Ok(Self { config, domains, registry, inputs, queue, next_beat, last_serial: 0 })
    }

    /// Until it is stopped.
    pub fn run(mut self) {
        loop {
            self.inputs.wake.drain();
            while let Ok(input) = self.queue.try_recv() {
                if matches!(input, Input::Stop) {
                    self.say_farewell();
                    return;
                }
                self.take(input);
            }
            let now = Instant::now();
            let beats = now >= self.next_beat;
            if beats {
                self.next_beat = now + Duration::from_millis(self.config.heartbeat_ms.into());
            }
            for domain in self.domains.values_mut() {
                if beats {
                    domain.beat();
                }
                domain.take_calls(now);
                domain.settle(now, &mut *self.registry);
            }
            self.domains.retain(|_, domain| !domain.members.is_empty());
            if let Err(error) = self.wait() {
                tracing::error!("channels: waiting for members: {error}");
                return;
            }
        }
    }

    fn wait(&self) -> std::io::Result<()> {
        let mut fds = vec![PollFd::new(&*self.inputs.wake, PollFlags::IN)];
        let mut until = self.next_beat;
        for domain in self.domains.values() {
            if domain.deaf_until.is_none() {
                fds.push(PollFd::new(domain.server.host(), PollFlags::IN));
            }
            for fd in domain.server.waiting() {
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::OUT));
            }
            until = domain.deadline().map_or(until, |deadline| until.min(deadline));
        }
        wait(&mut fds, Some(until)).map(|_| ())
    }

    fn take(&mut self, input: Input) {
        let now = Instant::now();
        match input {
            Input::Join(config, reply) => {
                if let Err(error) = self.join(*config, &reply, now) {
                    answer(reply, Err(error));
                }
            }
            Input::Leave(vm, reply) => {
                let until = now + Duration::from_millis(self.config.drain_timeout_ms);
                self.with(&vm, reply, |member, reply| {
                    member.life = Life::Leaving;
                    member.waits.push(Wait::Leave(reply, until));
                });
            }
            Input::SetAddresses(vm, macs, addresses, reply) => {
                self.with(&vm, reply, |member, reply| {
                    (member.macs, member.addresses) = (macs, addresses);
                    answer(reply, Ok(()));
                });
            }
            Input::Exclude(vm, flows, reply) => {
                let until = now + Duration::from_millis(self.config.exclude_timeout_ms);
                self.with(&vm, reply, |member, reply| {
                    member.excludes = flows;
                    member.excludes_seq = member.excludes_seq.wrapping_add(1);
                    member.waits.push(Wait::Exclude(reply, member.excludes_seq, until));
                });
            }
            Input::List(reply) => {
                let all = self.domains.values_mut().flat_map(|domain| {
                    domain.hear(now);
                    list(domain, now)
                });
                let all = all.collect();
                // Who does not wait any more does not hear it.
                let _ = reply.try_send(all);
            }
            Input::Report(serial, report) => self.report(serial, report),
            Input::Stop => {}
        }
    }

    /// Does something with the member of a VM.
    fn with(&mut self, vm: &str, reply: Reply, act: impl FnOnce(&mut Member, Reply)) {
        match self.domains.values_mut().find_map(|domain| domain.find(vm)) {
            Some(member) => act(member, reply),
            None => answer(reply, Err(ChannelError::NotMember { vm: vm.into() })),
        }
    }

    fn report(&mut self, serial: u64, report: Report) {
        for domain in self.domains.values_mut() {
            let found = domain.members.values().find(|member| member.serial == serial);
            let Some(member) = found else { continue };
            let index = member.index;
            let mut membership = member.membership(&domain.name);
            membership.devices.clone_from(&member.recorded);
            let keep = matches!(report, Report::Bell(Err(_))) && !membership.devices.is_empty();
            if domain.note(index, report) {
                self.forget(membership, keep);
            }
            return;
        }
    }

    /// A member is gone: so is its membership, unless devices of an earlier daemon may be left.
    fn forget(&mut self, membership: Membership, keep: bool) {
        let changed =
            if keep { self.registry.put(membership) } else { self.registry.remove(&membership.vm) };
        if let Err(error) = changed {
            tracing::error!("{error}");
        }
    }

    fn join(
        &mut self,
        config: MemberConfig,
        reply: &Reply,
        now: Instant,
    ) -> Result<(), ChannelError> {
        let vm = config.vm.clone();
        let mut domains = self.domains.values_mut();
        if let Some(domain) = domains.find_map(|d| d.find(&vm).is_some().then(|| d.name.clone())) {
            return Err(ChannelError::AlreadyMember { vm, domain });
        }
        let known = self.registry.membership(&vm);
        let leftovers = known.map(|known| known.devices).unwrap_or_default();
        let (name, qmp) = (config.domain.clone(), config.qmp.clone());
        let root_ports = config.root_ports.clone();
        let mut member = self.member(config, now)?;
        member.recorded.clone_from(&leftovers);
        member.waits.push(Wait::Join(reply.clone()));
        let domain = self.domain(&name)?;
        let Some(index) = domain.free_index() else {
            return Err(ChannelError::Full { vm, domain: name, limit: MAX_MEMBERS });
        };
        member.index = index;
        let connection = domain
            .server
            .add(member.id(), Arc::clone(member.mailbox.file()))
            .map_err(ChannelError::io("making a doorbell connection"))?;
        let vectors = domain.server.vectors();
        let serial = member.serial;
        domain.members.insert(index, member);
        // Before anybody reads the mailbox.
        domain.publish();
        let devices = with_bell(&leftovers);
        let leftover_timeout = Duration::from_millis(self.config.drain_timeout_ms);
        let started = self
            .registry
            .put(Membership { vm, domain: name.clone(), qmp: qmp.clone(), devices })
            .map_err(ChannelError::from)
            .and_then(|()| {
                let reports = MemberReports { inputs: self.inputs.clone(), serial };
                let start =
                    Start { qmp, root_ports, connection, vectors, leftovers, leftover_timeout };
                Worker::start(start, reports)
            });
        let domain = self.domain(&name)?;
        match started {
            Ok(worker) => domain.set_worker(index, worker),
            Err(error) => {
                domain.discard(index);
                return Err(error);
            }
        }
        Ok(())
    }

    /// A member that nobody knows yet.
    fn member(&mut self, config: MemberConfig, now: Instant) -> Result<Member, ChannelError> {
        let memory = Memory::new(&config.vm, config.memory, config.allow_unsealed)?;
        let mailbox = Mailbox::new().map_err(ChannelError::io("making a mailbox"))?;
        self.last_serial += 1;
        Ok(Member {
            serial: self.last_serial,
            index: 0,
            vm: config.vm,
            qmp: config.qmp,
            memory,
            macs: config.macs,
            addresses: config.addresses,
            mailbox,
            worker: None,
            life: Life::Joining,
            why_broken: None,
            bell: Some(Plug::Plugging(Part::Bell.new_id())),
            peers: BTreeMap::new(),
            said: None,
            heard_at: now,
            // A module that has seen no list yet has that of number 0.
            excludes_seq: u32::from(!config.excludes.is_empty()),
            excludes: config.excludes,
            recorded: Vec::new(),
            waits: Vec::new(),
        })
    }

    /// The domain of a name, made when there is none.
    fn domain(&mut self, name: &str) -> Result<&mut Domain, ChannelError> {
        match self.domains.entry(name.to_owned()) {
            Entry::Occupied(domain) => Ok(domain.into_mut()),
            Entry::Vacant(place) => {
                let timing = Timing {
                    heartbeat_ms: self.config.heartbeat_ms,
                    dead_after_ms: self.config.dead_after_ms,
                    drain_timeout_ms: self.config.drain_timeout_ms,
                    exclude_timeout_ms: self.config.exclude_timeout_ms,
                };
                Ok(place.insert(Domain::new(name, self.config.vectors, timing)?))
            }
        }
    }

    /// Members stop sending at once, without waiting for heartbeats. What is plugged stays for the
    /// next daemon to unplug.
    fn say_farewell(&mut self) {
        for domain in self.domains.values_mut() {
            for member in domain.members.values_mut() {
                if member.life != Life::Dead {
                    member.life = Life::Leaving;
                }
            }
            domain.publish();
        }
    }
}

/// What an earlier daemon left, and the doorbell that is about to be plugged.
fn with_bell(leftovers: &[PluggedDevice]) -> Vec<PluggedDevice> {
    let bell = Part::Bell.record(&Part::Bell.new_id(), None);
    let mut devices = leftovers.to_vec();
    if !devices.iter().any(|device| device.device == bell.device) {
        devices.push(bell);
    }
    devices
}
