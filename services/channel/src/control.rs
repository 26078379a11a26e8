//! Control thread: it alone touches members, and waits for nothing but descriptors and deadlines.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::time::{Duration, Instant};

use crate::registry::{Membership, PluggedDevice, Registry};
use base::event::Event;
use guest_abi::channel::MAX_MEMBERS;
use rustix::event::{PollFd, PollFlags};

use crate::ceiling::Ceiling;
use crate::ceiling_check::CeilingCheck;
use crate::config::{ChannelsConfig, Flow, MemberConfig};
use crate::domain::{Timing, TrustDomain};
use crate::error::ChannelError;
use crate::mailbox::Mailbox;
use crate::member::{Member, MemberStage, PlugState, Reply, Waiter, answer};
use crate::member_info::{MemberInfo, list};
use crate::memory::Memory;
use crate::plug::DevicePart;
use crate::poll_until::poll_until;
use crate::qmp::is_gone;
use crate::worker::{MonitorWorker, ReportSink, WorkerReport, WorkerStart};

/// Input of the control thread: a call, or a worker's report.
#[derive(Debug)]
pub(crate) enum ControlInput {
    Join(Box<MemberConfig>, Reply),
    Leave(String, Reply),
    SetAddresses(String, Vec<[u8; 6]>, Vec<IpAddr>, Reply),
    Exclude(String, Vec<Flow>, Reply),
    SetCeiling(String, Ceiling, Reply),
    List(SyncSender<Vec<MemberInfo>>),
    /// Report of the worker of the member with this serial number.
    WorkerReport(u64, WorkerReport),
    Stop,
}

/// Sender of inputs to the control thread.
#[derive(Debug, Clone)]
pub(crate) struct ControlSender {
    pub sender: Sender<ControlInput>,
    pub wake: Arc<Event>,
}

impl ControlSender {
    /// Sends an input; false when the thread has ended.
    pub fn send(&self, input: ControlInput) -> bool {
        self.sender.send(input).is_ok() && self.wake.signal().is_ok()
    }
}

/// Sender of reports of one member's worker.
#[derive(Debug, Clone)]
struct MemberReports {
    inputs: ControlSender,
    serial: u64,
}

impl ReportSink for MemberReports {
    fn report(&self, report: WorkerReport) {
        // A report is lost when the control thread has ended.
        self.inputs.send(ControlInput::WorkerReport(self.serial, report));
    }
}

/// State of the control thread: all trust domains.
pub(crate) struct ControlThread {
    config: ChannelsConfig,
    domains: BTreeMap<String, TrustDomain>,
    registry: Box<dyn Registry>,
    inputs: ControlSender,
    queue: Receiver<ControlInput>,
    next_beat: Instant,
    last_serial: u64,
}

impl ControlThread {
    /// Makes the thread's state, without members. Memberships of VMs that are gone are forgotten.
    pub fn new(
        config: ChannelsConfig,
        mut registry: Box<dyn Registry>,
        inputs: ControlSender,
        queue: Receiver<ControlInput>,
    ) -> Result<Self, ChannelError> {
        for membership in registry.memberships() {
            if is_gone(&membership.qmp) {
                registry.remove(&membership.vm)?;
            }
        }
        let (domains, next_beat) = (BTreeMap::new(), Instant::now());
        Ok(Self { config, domains, registry, inputs, queue, next_beat, last_serial: 0 })
    }

    /// Runs until it is stopped.
    pub fn run(mut self) {
        loop {
            self.inputs.wake.drain();
            while let Ok(input) = self.queue.try_recv() {
                if matches!(input, ControlInput::Stop) {
                    self.announce_leaving();
                    return;
                }
                self.handle(input);
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
                tracing::error!("channels stop: waiting for members failed: {error}");
                return;
            }
        }
    }

    fn wait(&self) -> std::io::Result<()> {
        let mut fds = vec![PollFd::new(&*self.inputs.wake, PollFlags::IN)];
        let mut until = self.next_beat;
        for domain in self.domains.values() {
            if domain.calls_muted_until.is_none() {
                fds.push(PollFd::new(domain.server.host(), PollFlags::IN));
            }
            for fd in domain.server.waiting() {
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::OUT));
            }
            until = domain.deadline().map_or(until, |deadline| until.min(deadline));
        }
        poll_until(&mut fds, Some(until)).map(|_| ())
    }

    fn handle(&mut self, input: ControlInput) {
        let now = Instant::now();
        match input {
            ControlInput::Join(config, reply) => {
                if let Err(error) = self.join(*config, &reply, now) {
                    answer(reply, Err(error));
                }
            }
            ControlInput::Leave(vm, reply) => {
                let until = now + Duration::from_millis(self.config.drain_timeout_ms);
                self.with_member(&vm, reply, |member, reply| {
                    member.stage = MemberStage::Leaving;
                    member.waiters.push(Waiter::Leave(reply, until));
                });
            }
            ControlInput::SetAddresses(vm, macs, addresses, reply) => {
                self.with_member(&vm, reply, |member, reply| {
                    (member.macs, member.addresses) = (macs, addresses);
                    answer(reply, Ok(()));
                });
            }
            ControlInput::SetCeiling(vm, ceiling, reply) => {
                let mut domains = self.domains.values_mut();
                let found = domains.any(|domain| domain.set_ceiling(&vm, ceiling, now));
                let missing = || ChannelError::NotMember { vm };
                answer(reply, if found { Ok(()) } else { Err(missing()) });
            }
            ControlInput::Exclude(vm, flows, reply) => {
                let until = now + Duration::from_millis(self.config.exclude_timeout_ms);
                self.with_member(&vm, reply, |member, reply| {
                    member.excludes = flows;
                    member.excludes_seq = member.excludes_seq.wrapping_add(1);
                    member.waiters.push(Waiter::Exclude(reply, member.excludes_seq, until));
                });
            }
            ControlInput::List(reply) => {
                let all = self.domains.values_mut().flat_map(|domain| {
                    domain.read_report(now);
                    list(domain, now)
                });
                let all = all.collect();
                // A caller that has given up gets no answer.
                let _ = reply.try_send(all);
            }
            ControlInput::WorkerReport(serial, report) => self.report(serial, report),
            ControlInput::Stop => {}
        }
    }

    /// Calls `act` with the member of a VM.
    fn with_member(&mut self, vm: &str, reply: Reply, act: impl FnOnce(&mut Member, Reply)) {
        match self.domains.values_mut().find_map(|domain| domain.find(vm)) {
            Some(member) => act(member, reply),
            None => answer(reply, Err(ChannelError::NotMember { vm: vm.into() })),
        }
    }

    fn report(&mut self, serial: u64, report: WorkerReport) {
        for domain in self.domains.values_mut() {
            let found = domain.members.values().find(|member| member.serial == serial);
            let Some(member) = found else { continue };
            let index = member.index;
            let mut membership = member.membership(&domain.name);
            membership.devices.clone_from(&member.recorded);
            let keep =
                matches!(report, WorkerReport::Bell(Err(_))) && !membership.devices.is_empty();
            if domain.apply_report(index, report) {
                self.forget(membership, keep);
            }
            return;
        }
    }

    /// Forgets the membership of a member that is gone, unless devices of an earlier daemon may be
    /// left.
    fn forget(&mut self, membership: Membership, keep: bool) {
        let changed =
            if keep { self.registry.put(membership) } else { self.registry.remove(&membership.vm) };
        if let Err(error) = changed {
            tracing::error!("membership not recorded: {error}");
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
        member.waiters.push(Waiter::Join(reply.clone()));
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
        // Before the member reads the mailbox.
        domain.publish();
        let devices = with_bell(&leftovers);
        let leftover_timeout = Duration::from_millis(self.config.drain_timeout_ms);
        let started = self
            .registry
            .put(Membership { vm, domain: name.clone(), qmp: qmp.clone(), devices })
            .map_err(ChannelError::from)
            .and_then(|()| {
                let reports = MemberReports { inputs: self.inputs.clone(), serial };
                let start = WorkerStart {
                    qmp,
                    root_ports,
                    connection,
                    vectors,
                    leftovers,
                    leftover_timeout,
                };
                MonitorWorker::start(start, reports)
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

    /// Makes a member, which is in no domain yet.
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
            stage: MemberStage::Joining,
            why_broken: None,
            is_over_ceiling: false,
            ceiling: CeilingCheck::new(config.ceiling, now),
            bell: Some(PlugState::Plugging(DevicePart::Bell.new_id())),
            peers: BTreeMap::new(),
            report: None,
            heartbeat_changed_at: now,
            // A module that has seen no list yet has that of number 0.
            excludes_seq: u32::from(!config.excludes.is_empty()),
            excludes: config.excludes,
            recorded: Vec::new(),
            waiters: Vec::new(),
        })
    }

    /// Finds the domain with a name, or makes it.
    fn domain(&mut self, name: &str) -> Result<&mut TrustDomain, ChannelError> {
        match self.domains.entry(name.to_owned()) {
            Entry::Occupied(domain) => Ok(domain.into_mut()),
            Entry::Vacant(place) => {
                let timing = Timing {
                    heartbeat_ms: self.config.heartbeat_ms,
                    dead_after_ms: self.config.dead_after_ms,
                    drain_timeout_ms: self.config.drain_timeout_ms,
                    exclude_timeout_ms: self.config.exclude_timeout_ms,
                };
                Ok(place.insert(TrustDomain::new(name, self.config.vectors, timing)?))
            }
        }
    }

    /// Shows all members as leaving, so that they stop sending at once. Their devices stay for the
    /// next daemon to unplug.
    fn announce_leaving(&mut self) {
        for domain in self.domains.values_mut() {
            for member in domain.members.values_mut() {
                if member.stage != MemberStage::Dead {
                    member.stage = MemberStage::Leaving;
                }
            }
            domain.publish();
        }
    }
}

/// Devices of an earlier daemon, and the doorbell that is about to be plugged.
fn with_bell(leftovers: &[PluggedDevice]) -> Vec<PluggedDevice> {
    let bell = DevicePart::Bell.record(&DevicePart::Bell.new_id(), None);
    let mut devices = leftovers.to_vec();
    if !devices.iter().any(|device| device.device == bell.device) {
        devices.push(bell);
    }
    devices
}
