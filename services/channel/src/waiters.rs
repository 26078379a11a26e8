//! Waiting callers of a member, and their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use crate::domain::{Timing, TrustDomain};
use crate::error::ChannelError;
use crate::member::{Member, MemberStage, PlugState, Waiter, answer};
use crate::member_report::ModuleState;

impl TrustDomain {
    /// Answers callers whose wait is over, or has lasted too long.
    pub(crate) fn answer_waiters(&mut self, now: Instant) {
        let busy: BTreeSet<usize> = self
            .members
            .iter()
            .flat_map(|(index, member)| {
                let plugging =
                    member.peers.iter().filter(|(_, plug)| matches!(plug, PlugState::Plugging(_)));
                plugging.flat_map(|(peer, _)| [*index, *peer])
            })
            .collect();
        let late: Vec<usize> = self
            .members
            .iter()
            .filter(|(_, member)| member.waiters.iter().any(|wait| wait.is_late(now)))
            .map(|(index, _)| *index)
            .collect();
        let holders: BTreeMap<usize, String> =
            late.into_iter().map(|index| (index, self.holders(index))).collect();
        let timing = self.timing;
        for (index, member) in &mut self.members {
            for wait in std::mem::take(&mut member.waiters) {
                let late = wait.is_late(now);
                match wait {
                    Waiter::Join(reply)
                        if member.stage == MemberStage::Joining || busy.contains(index) =>
                    {
                        member.waiters.push(Waiter::Join(reply));
                    }
                    Waiter::Join(reply) => answer(reply, joined(member)),
                    Waiter::Leave(reply, _) if late => {
                        let holders = holders.get(index).cloned().unwrap_or_default();
                        answer(reply, Err(drain_timeout(member, timing, holders)));
                    }
                    Waiter::Exclude(reply, seq, until) => match excluded(member, seq) {
                        Some(result) => answer(reply, result),
                        None if late => answer(reply, Err(exclude_timeout(member, timing, seq))),
                        None => member.waiters.push(Waiter::Exclude(reply, seq, until)),
                    },
                    wait @ Waiter::Leave(..) => member.waiters.push(wait),
                }
            }
        }
    }

    /// Text about the members that keep a member from leaving.
    fn holders(&self, index: usize) -> String {
        let mut texts = Vec::new();
        let name = |index: &usize| self.members.get(index).map_or("?", |member| &member.vm);
        for (holder, member) in &self.members {
            for (peer, plug) in member.peers.iter().filter(|(p, _)| [*holder, **p].contains(&index))
            {
                let link =
                    member.report.as_ref().map(|report| report.link(*peer)).unwrap_or_default();
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

    /// Time at which [`TrustDomain::settle`] has to be called at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let waits = self.members.values().flat_map(|member| &member.waiters);
        waits.filter_map(Waiter::until).chain(self.calls_muted_until).min()
    }
}

impl Waiter {
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

fn joined(member: &Member) -> Result<(), ChannelError> {
    let vm = member.vm.clone();
    match member.stage {
        MemberStage::Joined | MemberStage::Broken => Ok(()),
        MemberStage::Leaving => Err(ChannelError::NotMember { vm }),
        MemberStage::Joining | MemberStage::Dead => Err(ChannelError::Gone { vm }),
    }
}

/// Result of an exclude: whether flows are off the channel; none: not yet.
fn excluded(member: &Member, seq: u32) -> Option<Result<(), ChannelError>> {
    let vm = || member.vm.clone();
    if member.stage == MemberStage::Dead {
        return Some(Err(ChannelError::Gone { vm: vm() }));
    }
    if let Some(why) = &member.why_broken {
        return Some(Err(ChannelError::Broken { vm: vm(), why: why.clone() }));
    }
    match &member.report {
        // Nothing of it is on the channel, and before something is it reads the table.
        None => Some(Ok(())),
        Some(report) if matches!(report.state, ModuleState::None | ModuleState::Left) => {
            Some(Ok(()))
        }
        // Or a later one, which has taken its place.
        Some(report) if report.excludes_seq.wrapping_sub(seq) < 1 << 31 => Some(Ok(())),
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
