//! Trust domain: the devices and tables of each member follow from the states of all.
//!
//! Each event is noted first; [`TrustDomain::settle`] then compares the plugged devices with those
//! that should be, gives jobs, writes the tables that have changed, and answers callers. It may be
//! called at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::registry::Registry;
use guest_abi::channel::{Host, MAX_MEMBERS};
use zerocopy::FromZeros;

use crate::doorbell::{DoorbellServer, HOST_ID};
use crate::error::{ChannelError, PlugError};
use crate::member::{Member, MemberStage, PlugState, Waiter, answer, id_of};
use crate::plug::{DeviceLocation, DevicePart};
use crate::table::Table;
use crate::worker::{MonitorJob, MonitorWorker, WorkerReport};

/// Vector of a member that means "read the table".
const CONTROL: usize = 0;
/// Least time between two looks at members' calls: one that calls all the time delays no other.
const CALL_INTERVAL: Duration = Duration::from_millis(10);

/// Factor of `dead_after_ms` for which a member may be silent while others leave: 30 s by default.
/// A VM that is stopped for a moment loses nothing.
const SILENCE_FACTOR: u32 = 15;

/// Times of the heartbeat and of the waiting for members.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    pub heartbeat_ms: u32,
    pub dead_after_ms: u32,
    pub drain_timeout_ms: u64,
    pub exclude_timeout_ms: u64,
}

/// Trust domain with its members and its doorbell server.
#[derive(Debug)]
pub(crate) struct TrustDomain {
    pub name: String,
    pub server: DoorbellServer,
    pub members: BTreeMap<usize, Member>,
    pub timing: Timing,
    next_index: usize,
    /// Time until which calls are not looked at.
    pub calls_muted_until: Option<Instant>,
}

impl TrustDomain {
    /// Makes a domain without members.
    pub fn new(name: &str, vectors: u32, timing: Timing) -> Result<Self, ChannelError> {
        let server = DoorbellServer::new(vectors).map_err(ChannelError::io("making an eventfd"))?;
        let (members, name) = (BTreeMap::new(), name.to_owned());
        Ok(Self { name, server, members, timing, next_index: 0, calls_muted_until: None })
    }

    /// Finds a free index; the one that was freed last comes last.
    pub fn free_index(&mut self) -> Option<usize> {
        let free = (0..MAX_MEMBERS)
            .map(|step| (self.next_index + step) % MAX_MEMBERS)
            .find(|index| !self.members.contains_key(index))?;
        self.next_index = (free + 1) % MAX_MEMBERS;
        Some(free)
    }

    /// Finds the member of a VM that is not gone.
    pub fn find(&mut self, vm: &str) -> Option<&mut Member> {
        self.members
            .values_mut()
            .find(|member| member.vm == vm && member.stage != MemberStage::Dead)
    }

    /// Sets the worker of a member.
    pub fn set_worker(&mut self, index: usize, worker: MonitorWorker) {
        if let Some(member) = self.members.get_mut(&index) {
            member.worker = Some(worker);
        }
    }

    /// Removes a member that no peer knows of.
    pub fn discard(&mut self, index: usize) {
        if let Some(member) = self.members.remove(&index) {
            self.server.remove(member.id());
        }
    }

    /// Counts heartbeats up.
    pub fn beat(&mut self) {
        self.members.values_mut().for_each(|member| member.mailbox.beat());
    }

    /// Reads all members' reports.
    pub fn read_report(&mut self, now: Instant) {
        self.members.values_mut().for_each(|member| member.read_report(now));
    }

    /// Takes calls off the doorbell; [`TrustDomain::settle`] then reads the members' reports.
    pub fn take_calls(&mut self, now: Instant) {
        if self.calls_muted_until.is_some_and(|until| now < until) {
            return;
        }
        self.calls_muted_until = None;
        if self.server.take_calls() {
            self.calls_muted_until = Some(now + CALL_INTERVAL);
        }
    }

    /// Applies a report of a member's worker. True when it ends the member as a whole: the registry
    /// forgets it.
    pub fn apply_report(&mut self, index: usize, report: WorkerReport) -> bool {
        let Some(member) = self.members.get_mut(&index) else { return false };
        match report {
            WorkerReport::Bell(Ok(place)) => {
                member.bell = Some(PlugState::Plugged(place));
                if member.stage == MemberStage::Joining {
                    member.stage = MemberStage::Joined;
                }
            }
            WorkerReport::Bell(Err(error)) => {
                self.refuse(index, error);
                return true;
            }
            WorkerReport::Memory(peer, result) => note_memory(member, peer, result),
            WorkerReport::Unplugged(part) => note_unplugged(member, part),
            WorkerReport::UnplugLate(part, asked) => {
                let plug = match part {
                    DevicePart::Bell => member.bell.as_mut(),
                    DevicePart::Memory(peer) => member.peers.get_mut(&peer),
                };
                if let Some(PlugState::Unplugging(_, times)) = plug {
                    *times = asked;
                }
                tracing::warn!(
                    vm = %member.vm,
                    ?part,
                    asked,
                    "a device of this member is not unplugged yet"
                );
            }
            WorkerReport::GuestEnded(how) => {
                tracing::info!(vm = %member.vm, how, "a member's guest has ended");
                member.forget_guest();
            }
            WorkerReport::Gone(error) => {
                tracing::info!(vm = %member.vm, "a member is gone: {error}");
                member.stage = MemberStage::Dead;
                member.worker = None;
                member.bell = None;
                member.peers.clear();
                let id = member.id();
                self.server.remove(id);
                return true;
            }
        }
        false
    }

    /// Ends a membership that has not begun, and answers its callers.
    pub fn refuse(&mut self, index: usize, error: PlugError) {
        let Some(member) = self.members.remove(&index) else { return };
        self.server.remove(member.id());
        tracing::warn!(vm = %member.vm, "cannot join: {error}");
        let mut error = Some(ChannelError::Plug { vm: member.vm.clone(), source: error });
        for wait in member.waiters {
            match wait {
                Waiter::Join(reply) => {
                    let gone = || ChannelError::Gone { vm: member.vm.clone() };
                    answer(reply, Err(error.take().unwrap_or_else(gone)));
                }
                Waiter::Leave(reply, _) => answer(reply, Ok(())),
                Waiter::Exclude(reply, ..) => {
                    answer(reply, Err(ChannelError::Gone { vm: member.vm.clone() }));
                }
            }
        }
    }

    /// Brings devices, tables and answers in line with the members' states.
    pub fn settle(&mut self, now: Instant, registry: &mut dyn Registry) {
        // No device is unplugged on an old report.
        self.read_report(now);
        self.break_silent_members(now);
        self.check_ceilings(now);
        let jobs = self.reconcile();
        // Before the devices are plugged.
        self.record_memberships(registry);
        for (index, job) in jobs {
            if let Some(worker) = self.members.get(&index).and_then(|member| member.worker.as_ref())
            {
                worker.send(job);
            }
        }
        self.remove_departed(registry);
        self.publish();
        self.answer_waiters(now);
        self.server.flush();
    }

    /// Breaks members whose modules have been silent for long while another leaves: a VM that is
    /// stopped, or one that will not speak. Their reports are void, which ends the waiting of the
    /// leaver's module too: in its table they are not who they were.
    fn break_silent_members(&mut self, now: Instant) {
        let limit_ms = self.timing.dead_after_ms.saturating_mul(SILENCE_FACTOR);
        let leavers: Vec<usize> = self
            .members
            .iter()
            .filter(|(_, member)| member.is_leaving())
            .map(|(index, _)| *index)
            .collect();
        for (index, member) in &mut self.members {
            let keeps_somebody = leavers.iter().any(|leaver| leaver != index);
            if keeps_somebody && member.is_silent(now, limit_ms) {
                let why = format!("its module was silent for {limit_ms} ms while another left");
                member.set_broken(why);
            }
        }
    }

    /// Compares the plugged devices with those that should be. Returns the jobs, noted as begun.
    fn reconcile(&mut self) -> Vec<(usize, MonitorJob)> {
        let joined: BTreeSet<usize> = self
            .members
            .iter()
            .filter(|(_, member)| member.is_joined())
            .map(|(index, _)| *index)
            .collect();
        let mut jobs = Vec::new();
        for index in joined.iter().copied() {
            for peer in joined.iter().copied().filter(|peer| *peer != index) {
                jobs.extend(self.plug(index, peer).map(|job| (index, job)));
            }
        }
        for (index, member) in &mut self.members {
            let wanted =
                |peer: &usize| member.stage == MemberStage::Joined && joined.contains(peer);
            let unwanted: Vec<usize> =
                member.peers.keys().copied().filter(|peer| !wanted(peer)).collect();
            for peer in unwanted {
                jobs.extend(unplug(member, peer).map(|job| (*index, job)));
            }
        }
        let held: BTreeSet<usize> = self.held();
        for (index, member) in &mut self.members {
            let alone = member.peers.is_empty() && !held.contains(index);
            if let (MemberStage::Leaving, true, Some(PlugState::Plugged(place))) =
                (member.stage, alone, &member.bell)
            {
                jobs.push((*index, MonitorJob::Unplug(DevicePart::Bell, place.id.clone())));
                member.bell = Some(PlugState::Unplugging(place.clone(), 0));
                self.server.silence(member.id());
            }
        }
        jobs
    }

    /// Makes the job that plugs the memory of `peer` into `index`, unless that was done.
    fn plug(&mut self, index: usize, peer: usize) -> Option<MonitorJob> {
        let memory = &self.members.get(&peer)?.memory;
        let (file, window_len) = (memory.file.clone(), memory.window_len);
        let holder = self.members.get_mut(&index)?;
        if holder.peers.contains_key(&peer) {
            return None;
        }
        let id = DevicePart::Memory(peer).new_id();
        holder.peers.insert(peer, PlugState::Plugging(id.clone()));
        Some(MonitorJob::PlugMemory { index: peer, id, file, window_len })
    }

    /// Indices of members whose memory is plugged somewhere, or may be.
    pub fn held(&self) -> BTreeSet<usize> {
        self.members.values().flat_map(|member| member.peers.keys().copied()).collect()
    }

    /// Records the plugged devices in the registry.
    fn record_memberships(&mut self, registry: &mut dyn Registry) {
        for member in self.members.values_mut() {
            // A member that joins is recorded with the devices of an earlier daemon.
            if matches!(member.stage, MemberStage::Dead | MemberStage::Joining) {
                continue;
            }
            let membership = member.membership(&self.name);
            if membership.devices == member.recorded {
                continue;
            }
            member.recorded.clone_from(&membership.devices);
            if let Err(error) = registry.put(membership) {
                tracing::error!(
                    vm = %member.vm,
                    "registry not written, a later daemon will not know this member's devices: \
                     {error}"
                );
            }
        }
    }

    /// Removes members that are gone and whose memory no peer has.
    fn remove_departed(&mut self, registry: &mut dyn Registry) {
        let held = self.held();
        let over = |member: &Member| match member.stage {
            MemberStage::Dead => true,
            MemberStage::Leaving => member.peers.is_empty() && member.bell.is_none(),
            _ => false,
        };
        let over: Vec<usize> = self
            .members
            .iter()
            .filter(|(index, member)| over(member) && !held.contains(index))
            .map(|(index, _)| *index)
            .collect();
        for index in over {
            let Some(member) = self.members.remove(&index) else { continue };
            self.server.remove(member.id());
            if member.stage == MemberStage::Leaving
                && let Err(error) = registry.remove(&member.vm)
            {
                tracing::error!(vm = %member.vm, "membership not removed: {error}");
            }
            tracing::info!(vm = %member.vm, domain = %self.name, "a member has left");
            for wait in member.waiters {
                match wait {
                    Waiter::Leave(reply, _) => answer(reply, Ok(())),
                    Waiter::Join(reply) | Waiter::Exclude(reply, ..) => {
                        answer(reply, Err(ChannelError::Gone { vm: member.vm.clone() }));
                    }
                }
            }
        }
    }

    /// Writes the tables that have changed, and calls their members.
    pub fn publish(&mut self) {
        let entry_at = |holder: &Member, member: &Member| {
            let place = holder.peers.get(&member.index).and_then(PlugState::place);
            member.entry(place.map_or(0, |place| place.slot))
        };
        let mut changed = Vec::new();
        for (index, member) in
            self.members.iter().filter(|(_, member)| member.stage != MemberStage::Dead)
        {
            let mut host = Host::new_zeroed();
            host.member_id = u32::from(member.id()).into();
            host.host_id = u32::from(HOST_ID).into();
            host.vectors = self.server.vectors().into();
            host.heartbeat_ms = self.timing.heartbeat_ms.into();
            host.dead_after_ms = self.timing.dead_after_ms.into();
            host.window_len = member.memory.window_len.into();
            let ceiling = member.ceiling.ceiling();
            host.ceiling_bytes_per_s = ceiling.bytes_per_s.into();
            host.ceiling_ops_per_s = ceiling.ops_per_s.into();
            host.ceiling_burst_ms = ceiling.burst_ms.into();
            let (excludes, seq) = (&member.excludes, member.excludes_seq);
            let mut table = Table::new(host, &self.name, &member.memory.regions, excludes, seq);
            for (other, entry) in &self.members {
                if entry.stage != MemberStage::Joining {
                    table.set(*other, &entry_at(member, entry));
                }
            }
            changed.push((*index, table.words()));
        }
        for (index, words) in changed {
            let Some(member) = self.members.get_mut(&index) else { continue };
            if member.mailbox.publish(&words) {
                self.server.ring(id_of(index), CONTROL);
            }
        }
    }
}

/// Notes that the memory of `peer` was plugged into a member, or could not be.
fn note_memory(member: &mut Member, peer: usize, result: Result<DeviceLocation, PlugError>) {
    let plug = match result {
        Ok(place) => PlugState::Plugged(place),
        Err(error) => {
            tracing::warn!(vm = %member.vm, "a peer's memory cannot be plugged: {error}");
            PlugState::Failed(error.to_string())
        }
    };
    member.peers.insert(peer, plug);
}

/// Notes that a device is gone, by our request or by the guest's own act.
fn note_unplugged(member: &mut Member, part: DevicePart) {
    let asked = |plug: Option<&PlugState>| matches!(plug, Some(PlugState::Unplugging(..)));
    match part {
        DevicePart::Bell => {
            if !asked(member.bell.as_ref()) {
                member.set_broken("its guest has ejected the doorbell".into());
            }
            member.bell = None;
        }
        DevicePart::Memory(peer) if asked(member.peers.get(&peer)) => {
            member.peers.remove(&peer);
            member.forget_failures();
        }
        DevicePart::Memory(peer) => {
            let why = "its guest has ejected the peer's memory".to_owned();
            tracing::warn!(vm = %member.vm, peer, "{why}");
            member.peers.insert(peer, PlugState::Failed(why));
        }
    }
}

/// Makes the job that unplugs the memory of `peer`, if nothing of it is in use.
fn unplug(member: &mut Member, peer: usize) -> Option<MonitorJob> {
    match member.peers.get(&peer)? {
        PlugState::Failed(_) => {
            member.peers.remove(&peer);
            None
        }
        PlugState::Plugged(place) if member.has_closed(peer) => {
            let place = place.clone();
            let job = MonitorJob::Unplug(DevicePart::Memory(peer), place.id.clone());
            member.peers.insert(peer, PlugState::Unplugging(place, 0));
            Some(job)
        }
        _ => None,
    }
}
