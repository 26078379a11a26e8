//! Ceilings of a domain's members: changed, and checked by what their peers report.

use std::time::Instant;

use crate::ceiling::Ceiling;
use crate::ceiling_check::{CeilingCheck, Received, Slack};
use crate::domain::TrustDomain;
use crate::member::{Member, MemberStage};
use crate::member_report::LinkState;

impl TrustDomain {
    fn slack(&self) -> Slack {
        // Vector 0 is for control, each other one for a ring.
        let queues = u64::from(self.server.vectors().saturating_sub(1));
        Slack { queues, heartbeat_ms: self.timing.heartbeat_ms }
    }

    /// Changes the ceiling of a VM's member; false when there is none.
    pub fn set_ceiling(&mut self, vm: &str, ceiling: Ceiling, now: Instant) -> bool {
        let slack = self.slack();
        let member = self.find(vm);
        member.map(|member| member.ceiling.set(ceiling, slack, now)).is_some()
    }

    /// Breaks members that are over their ceilings: their modules do not keep to them.
    pub(crate) fn check_ceilings(&mut self, now: Instant) {
        let slack = self.slack();
        let limited: Vec<usize> = self
            .members
            .values()
            .filter(|member| member.stage == MemberStage::Joined)
            .map(|member| member.index)
            .collect();
        for index in limited {
            let peers = self.received_of(index);
            let Some(member) = self.members.get_mut(&index) else { continue };
            let Some(why) = member.ceiling.check(&peers, slack, now) else { continue };
            member.set_broken(why);
            member.is_over_ceiling = true;
            // Its next guest begins anew.
            member.ceiling = CeilingCheck::new(member.ceiling.ceiling(), now);
        }
    }

    /// Amounts that each peer has received of a member, by the peer's word.
    fn received_of(&self, index: usize) -> Vec<(u64, Option<Received>)> {
        let Some(member) = self.members.get(&index) else { return Vec::new() };
        if member.ceiling.ceiling().is_none() {
            return Vec::new();
        }
        let peers = self.members.values().filter(|peer| peer.index != index);
        peers.map(|peer| (peer.serial, received(peer, member))).collect()
    }
}

/// Amounts that a peer has received of a member; none: it has no link to it.
fn received(peer: &Member, member: &Member) -> Option<Received> {
    let report = peer.report.as_ref()?;
    let link = report.link(member.index);
    if link.state == LinkState::None || link.peer_id != u32::from(member.id()) {
        return None;
    }
    let (messages, bytes) = (link.received, link.received_bytes);
    Some(Received { generation: report.generation, messages, bytes })
}
