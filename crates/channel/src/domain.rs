//! A trust domain: what follows for each member from how all of them are.
//!
//! Whatever happens is noted first; [`Domain::settle`] then compares what is plugged with what should
//! be, gives jobs, writes the tables that have changed, and answers who waits. It may be called at
//! any time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use guest_abi::channel::{Host, MAX_MEMBERS};
use registry::Registry;
use zerocopy::FromZeros;

use crate::doorbell::{HOST_ID, Server};
use crate::error::{ChannelError, PlugError};
use crate::member::{Life, Member, Plug, Wait, id_of};
use crate::plug::{Part, Place};
use crate::table::Table;
use crate::waits::answer;
use crate::worker::{Job, Report, Worker};

/// The vector of a member that means "look at the table".
const CONTROL: usize = 0;
/// Members' calls are heard so often at most: a member that calls all the time keeps nobody else.
const CALL_INTERVAL: Duration = Duration::from_millis(10);

/// So many times as long as makes one silent, a member may be silent while others leave: 30 s by default. A VM
/// that is stopped for a moment loses nothing.
const GIVE_UP_SILENT: u32 = 15;

/// What members are told of time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    pub heartbeat_ms: u32,
    pub dead_after_ms: u32,
    pub drain_timeout_ms: u64,
    pub exclude_timeout_ms: u64,
}

/// A trust domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pub name: String,
    pub server: Server,
    pub members: BTreeMap<usize, Member>,
    pub timing: Timing,
    next_index: usize,
    /// Calls are not heard until then.
    pub deaf_until: Option<Instant>,
}

impl Domain {
    /// One without members.
    pub fn new(name: &str, vectors: u32, timing: Timing) -> Result<Self, ChannelError> {
        let server = Server::new(vectors).map_err(ChannelError::io("making an eventfd"))?;
        let (members, name) = (BTreeMap::new(), name.to_owned());
        Ok(Self { name, server, members, timing, next_index: 0, deaf_until: None })
    }

    /// An index that nobody has; the one that was given back last comes last.
    pub fn free_index(&mut self) -> Option<usize> {
        let free = (0..MAX_MEMBERS)
            .map(|step| (self.next_index + step) % MAX_MEMBERS)
            .find(|index| !self.members.contains_key(index))?;
        self.next_index = (free + 1) % MAX_MEMBERS;
        Some(free)
    }

    /// The member of a VM that is not gone.
    pub fn find(&mut self, vm: &str) -> Option<&mut Member> {
        self.members.values_mut().find(|member| member.vm == vm && member.life != Life::Dead)
    }

    /// The member's monitor is being asked.
    pub fn set_worker(&mut self, index: usize, worker: Worker) {
        if let Some(member) = self.members.get_mut(&index) {
            member.worker = Some(worker);
        }
    }

    /// Takes back a member that nobody was told of.
    pub fn discard(&mut self, index: usize) {
        if let Some(member) = self.members.remove(&index) {
            self.server.remove(member.id());
        }
    }

    /// Counts heartbeats up.
    pub fn beat(&mut self) {
        self.members.values_mut().for_each(|member| member.mailbox.beat());
    }

    /// Reads what members say of themselves.
    pub fn hear(&mut self, now: Instant) {
        self.members.values_mut().for_each(|member| member.hear(now));
    }

    /// Takes calls off the doorbell, for [`Domain::settle`] to hear who has called.
    pub fn take_calls(&mut self, now: Instant) {
        if self.deaf_until.is_some_and(|until| now < until) {
            return;
        }
        self.deaf_until = None;
        if self.server.take_calls() {
            self.deaf_until = Some(now + CALL_INTERVAL);
        }
    }

    /// Notes what a member's worker says. True when it concerns the member as a whole: the registry
    /// forgets it.
    pub fn note(&mut self, index: usize, report: Report) -> bool {
        let Some(member) = self.members.get_mut(&index) else { return false };
        match report {
            Report::Bell(Ok(place)) => {
                member.bell = Some(Plug::In(place));
                if member.life == Life::Joining {
                    member.life = Life::Joined;
                }
            }
            Report::Bell(Err(error)) => {
                self.refuse(index, error);
                return true;
            }
            Report::Memory(peer, result) => note_memory(member, peer, result),
            Report::Unplugged(part) => note_unplugged(member, part),
            Report::UnplugLate(part, asked) => {
                let plug = match part {
                    Part::Bell => member.bell.as_mut(),
                    Part::Memory(peer) => member.peers.get_mut(&peer),
                };
                if let Some(Plug::Unplugging(_, times)) = plug {
                    *times = asked;
                }
                tracing::warn!(vm = %member.vm, ?part, asked, "not unplugged yet");
            }
            Report::GuestEnded(how) => {
                tracing::info!(vm = %member.vm, how, "a member's guest has ended");
                member.forget_guest();
            }
            Report::Gone(error) => {
                tracing::info!(vm = %member.vm, "a member is gone: {error}");
                member.life = Life::Dead;
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

    /// Ends a membership that has not begun.
    pub fn refuse(&mut self, index: usize, error: PlugError) {
        let Some(member) = self.members.remove(&index) else { return };
        self.server.remove(member.id());
        tracing::warn!(vm = %member.vm, "cannot join: {error}");
        let mut error = Some(ChannelError::Plug { vm: member.vm.clone(), source: error });
        for wait in member.waits {
            match wait {
                Wait::Join(reply) => {
                    let gone = || ChannelError::Gone { vm: member.vm.clone() };
                    answer(reply, Err(error.take().unwrap_or_else(gone)));
                }
                Wait::Leave(reply, _) => answer(reply, Ok(())),
                Wait::Exclude(reply, ..) => {
                    answer(reply, Err(ChannelError::Gone { vm: member.vm.clone() }));
                }
            }
        }
    }

    /// Makes everything follow from what was noted.
    pub fn settle(&mut self, now: Instant, registry: &mut dyn Registry) {
        // Nothing is unplugged on an old word.
        self.hear(now);
        self.give_up_silent(now);
        let jobs = self.reconcile();
        // Before the devices are there.
        self.record(registry);
        for (index, job) in jobs {
            if let Some(worker) = self.members.get(&index).and_then(|member| member.worker.as_ref())
            {
                worker.send(job);
            }
        }
        self.bury(registry);
        self.publish();
        self.answer_waits(now);
        self.server.flush();
    }

    /// Members whose modules have been silent for long keep nobody from leaving: a VM that is stopped, or
    /// one that will not speak. What they said is void, which ends the waiting of the leaver's module too:
    /// in its table they are not who they were.
    fn give_up_silent(&mut self, now: Instant) {
        let limit_ms = self.timing.dead_after_ms.saturating_mul(GIVE_UP_SILENT);
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

    /// Compares what is plugged with what should be, and notes what is asked for.
    fn reconcile(&mut self) -> Vec<(usize, Job)> {
        let takes_part: BTreeSet<usize> = self
            .members
            .iter()
            .filter(|(_, member)| member.takes_part())
            .map(|(index, _)| *index)
            .collect();
        let mut jobs = Vec::new();
        for index in takes_part.iter().copied() {
            for peer in takes_part.iter().copied().filter(|peer| *peer != index) {
                jobs.extend(self.plug(index, peer).map(|job| (index, job)));
            }
        }
        for (index, member) in &mut self.members {
            let wanted = |peer: &usize| member.life == Life::Joined && takes_part.contains(peer);
            let unwanted: Vec<usize> =
                member.peers.keys().copied().filter(|peer| !wanted(peer)).collect();
            for peer in unwanted {
                jobs.extend(unplug(member, peer).map(|job| (*index, job)));
            }
        }
        let held: BTreeSet<usize> = self.held();
        for (index, member) in &mut self.members {
            let alone = member.peers.is_empty() && !held.contains(index);
            if let (Life::Leaving, true, Some(Plug::In(place))) = (member.life, alone, &member.bell)
            {
                jobs.push((*index, Job::Unplug(Part::Bell, place.id.clone())));
                member.bell = Some(Plug::Unplugging(place.clone(), 0));
                self.server.hush(member.id());
            }
        }
        jobs
    }

    /// Asks for the memory of `peer` in `index`, unless that was done.
    fn plug(&mut self, index: usize, peer: usize) -> Option<Job> {
        let memory = &self.members.get(&peer)?.memory;
        let (file, window_len) = (memory.file.clone(), memory.window_len);
        let holder = self.members.get_mut(&index)?;
        if holder.peers.contains_key(&peer) {
            return None;
        }
        let id = Part::Memory(peer).new_id();
        holder.peers.insert(peer, Plug::Plugging(id.clone()));
        Some(Job::PlugMemory { index: peer, id, file, window_len })
    }

    /// Indices whose memory is plugged somewhere, or may be.
    pub fn held(&self) -> BTreeSet<usize> {
        self.members.values().flat_map(|member| member.peers.keys().copied()).collect()
    }

    /// Lets the registry know what is plugged.
    fn record(&mut self, registry: &mut dyn Registry) {
        for member in self.members.values_mut() {
            // One that joins is recorded with what an earlier daemon left.
            if matches!(member.life, Life::Dead | Life::Joining) {
                continue;
            }
            let membership = member.membership(&self.name);
            if membership.devices == member.recorded {
                continue;
            }
            member.recorded.clone_from(&membership.devices);
            if let Err(error) = registry.put(membership) {
                tracing::error!(vm = %member.vm, "a later daemon will not know its devices: {error}");
            }
        }
    }

    /// Removes members that are gone for everyone.
    fn bury(&mut self, registry: &mut dyn Registry) {
        let held = self.held();
        let over = |member: &Member| match member.life {
            Life::Dead => true,
            Life::Leaving => member.peers.is_empty() && member.bell.is_none(),
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
            if member.life == Life::Leaving
                && let Err(error) = registry.remove(&member.vm)
            {
                tracing::error!(vm = %member.vm, "{error}");
            }
            tracing::info!(vm = %member.vm, domain = %self.name, "a member has left");
            for wait in member.waits {
                match wait {
                    Wait::Leave(reply, _) => answer(reply, Ok(())),
                    Wait::Join(reply) | Wait::Exclude(reply, ..) => {
                        answer(reply, Err(ChannelError::Gone { vm: member.vm.clone() }));
                    }
                }
            }
        }
    }

    /// Writes the tables that have changed, and calls who has one.
    pub fn publish(&mut self) {
        let entry_at = |holder: &Member, member: &Member| {
            let place = holder.peers.get(&member.index).and_then(Plug::place);
            member.entry(place.map_or(0, |place| place.slot))
        };
        let mut changed = Vec::new();
        for (index, member) in self.members.iter().filter(|(_, member)| member.life != Life::Dead) {
            let mut host = Host::new_zeroed();
            host.member_id = u32::from(member.id()).into();
            host.host_id = u32::from(HOST_ID).into();
            host.vectors = self.server.vectors().into();
            host.heartbeat_ms = self.timing.heartbeat_ms.into();
            host.dead_after_ms = self.timing.dead_after_ms.into();
            host.window_len = member.memory.window_len.into();
            let (excludes, seq) = (&member.excludes, member.excludes_seq);
            let mut table = Table::new(host, &self.name, &member.memory.regions, excludes, seq);
            for (other, entry) in &self.members {
                if entry.life != Life::Joining {
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

/// The memory of `peer` is plugged into a member, or could not be.
fn note_memory(member: &mut Member, peer: usize, result: Result<Place, PlugError>) {
    let plug = match result {
        Ok(place) => Plug::In(place),
        Err(error) => {
            tracing::warn!(vm = %member.vm, "a peer's memory cannot be plugged: {error}");
            Plug::Failed(error.to_string())
        }
    };
    member.peers.insert(peer, plug);
}

/// A device is gone: because we wanted it, or because the guest did.
fn note_unplugged(member: &mut Member, part: Part) {
    let asked = |plug: Option<&Plug>| matches!(plug, Some(Plug::Unplugging(..)));
    match part {
        Part::Bell => {
            if !asked(member.bell.as_ref()) {
                member.set_broken("its guest has ejected the doorbell".into());
            }
            member.bell = None;
        }
        Part::Memory(peer) if asked(member.peers.get(&peer)) => {
            member.peers.remove(&peer);
            member.forget_failures();
        }
        Part::Memory(peer) => {
            let why = "its guest has ejected the peer's memory".to_owned();
            tracing::warn!(vm = %member.vm, peer, "{why}");
            member.peers.insert(peer, Plug::Failed(why));
        }
    }
}

/// Asks for the memory of `peer` to go, if nothing of it is in use.
fn unplug(member: &mut Member, peer: usize) -> Option<Job> {
    match member.peers.get(&peer)? {
        Plug::Failed(_) => {
            member.peers.remove(&peer);
            None
        }
        Plug::In(place) if member.has_closed(peer) => {
            let place = place.clone();
            let job = Job::Unplug(Part::Memory(peer), place.id.clone());
            member.peers.insert(peer, Plug::Unplugging(place, 0));
            Some(job)
        }
        _ => None,
    }
}
