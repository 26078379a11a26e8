//! Who waits for a member, and what they are answered.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::domain::{Domain, Timing};
use crate::error::ChannelError;
use crate::member::{Life, Member, Plug, Reply, Wait};
use crate::said::ModuleState;

impl Domain {
    /// Answers who waits for something that is so now, or for too long.
    pub(crate) fn answer_waits(&mut self, now: Instant) {
        let busy: BTreeSet<usize> = self
            .members
            .iter()
            .flat_map(|(index, member)| {
                let plugging =
                    member.peers.iter().filter(|(_, plug)| matches!(plug, Plug::Plugging(_)));
                plugging.flat_map(|(peer, _)| [*index, *peer])
            })
            .collect();
        let late: Vec<usize> = self
            .members
            .iter()
            .filter(|(_, member)| member.waits.iter().any(|wait| wait.is_late(now)))
            .map(|(index, _)| *index)
            .collect();
        let holders: BTreeMap<usize, String> =
            late.into_iter().map(|index| (index, self.holders(index))).collect();
        let timing = self.timing;
        for (index, member) in &mut self.members {
            for wait in std::mem::take(&mut member.waits) {
                let late = wait.is_late(now);
                match wait {
                    Wait::Join(reply) if member.life == Life::Joining || busy.contains(index) => {
                        member.waits.push(Wait::Join(reply));
                    }
                    Wait::Join(reply) => answer(reply, joined(member)),
                    Wait::Leave(reply, _) if late => {
                        let holders = holders.get(index).cloned().unwrap_or_default();
                        answer(reply, Err(drain_timeout(member, timing, holders)));
                    }
                    Wait::Exclude(reply, seq, until) => match excluded(member, seq) {
                        Some(result) => answer(reply, result),
                        None if late => answer(reply, Err(exclude_timeout(member, timing, seq))),
                        None => member.waits.push(Wait::Exclude(reply, seq, until)),
                    },
                    wait @ Wait::Leave(..) => member.waits.push(wait),
                }
            }
        }
    }

    /// Who keeps a member from leaving, for people.
    fn holders(&self, index: usize) -> String {
        let mut texts = Vec::new();
        let name = |index: &usize| self.members.get(index).map_or("?", |member| &member.vm);
        for (holder, member) in &self.members {
            for (peer, plug) in member.peers.iter().filter(|(p, _)| [*holder, **p].contains(&index))
            {
                let link = member.said.as_ref().map(|said| said.link(*peer)).unwrap_or_default();
                texts.push(format!(
                    "{} has {} pages of {} in use and lends it {} (link {}, memory {})",
                    member.vm,
                    link.borrowed,
                    name(peer),
                    link.lent,
                    link.state.name(),
                    plug.name()
                ));
            }
        }
        if texts.is_empty() { "its doorbell is not unplugged".into() } else { texts.join("; ") }
    }

    /// When [`Domain::settle`] has to be called at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let waits = self.members.values().flat_map(|member| &member.waits);
        waits.filter_map(Wait::until).chain(self.deaf_until).min()
    }
}

impl Wait {
    fn until(&self) -> Option<Instant> {
        match self {
            Self::Join(_) => None,
            Self::Leave(_, until) | Self::Exclude(_, _, until) => Some(*until),
        }
    }

    fn is_late(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| now >= until)
    }
}

/// Who does not wait any more does not hear it.
pub(crate) fn answer(reply: Reply, result: Result<(), ChannelError>) {
    let _ = reply.try_send(result);
}

fn joined(member: &Member) -> Result<(), ChannelError> {
    let vm = member.vm.clone();
    match member.life {
        Life::Joined | Life::Broken => Ok(()),
        Life::Leaving => Err(ChannelError::NotMember { vm }),
        Life::Joining | Life::Dead => Err(ChannelError::Gone { vm }),
    }
}

/// Whether flows are off the channel; none: not yet.
fn excluded(member: &Member, seq: u32) -> Option<Result<(), ChannelError>> {
    let vm = || member.vm.clone();
    if member.life == Life::Dead {
        return Some(Err(ChannelError::Gone { vm: vm() }));
    }
    if let Some(why) = &member.why_broken {
        return Some(Err(ChannelError::Broken { vm: vm(), why: why.clone() }));
    }
    match &member.said {
        // Nothing of it is on the channel, and before something is it reads the table.
        None => Some(Ok(())),
        Some(said) if matches!(said.state, ModuleState::None | ModuleState::Left) => Some(Ok(())),
        // Or a later one, which has taken its place.
        Some(said) if said.excludes_seq.wrapping_sub(seq) < 1 << 31 => Some(Ok(())),
        Some(_) => None,
    }
}

fn drain_timeout(member: &Member, timing: Timing, holders: String) -> ChannelError {
    let (vm, timeout_ms) = (member.vm.clone(), timing.drain_timeout_ms);
    ChannelError::DrainTimeout { vm, timeout_ms, holders }
}

fn exclude_timeout(member: &Member, timing: Timing, seq: u32) -> ChannelError {
    let (vm, timeout_ms) = (member.vm.clone(), timing.exclude_timeout_ms);
    ChannelError::ExcludeTimeout { vm, seq, timeout_ms }
}
