//! List of members, for the API.

use std::net::IpAddr;
use std::time::Instant;

use crate::domain::TrustDomain;
use crate::member::{Member, PlugState};
use crate::member_report::Link;

/// Member, as listings show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberInfo {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain of the member.
    pub domain: String,
    /// Id at the doorbell server, above 0.
    pub id: u16,
    /// State: `joining` (its doorbell is being plugged), `joined` (its module has not spoken yet),
    /// `active`, `leaving`, `broken`, or `dead` (its VM is gone and peers still have its memory).
    pub state: &'static str,
    /// Reason why the member is broken.
    pub why_broken: Option<String>,
    /// Whether it is broken because it sent more than its ceiling.
    pub is_over_ceiling: bool,
    /// Number that the kernel module has for this load; none when it has not spoken.
    pub generation: Option<u64>,
    /// Whether its kernel module has not counted its heartbeat up for `dead_after_ms`.
    pub is_silent: bool,
    /// Length of its memory that peers see.
    pub window_len_bytes: u64,
    /// Hardware addresses.
    pub macs: Vec<[u8; 6]>,
    /// IP addresses.
    pub addresses: Vec<IpAddr>,
    /// Number of peers' devices in this VM that should not be there any more and could not be
    /// unplugged yet.
    pub zombies: usize,
    /// Links to each peer.
    pub links: Vec<LinkInfo>,
}

/// Member's side of a link to one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkInfo {
    /// Name of the peer's VM.
    pub vm: String,
    /// Id of the peer at the doorbell server.
    pub id: u16,
    /// State of the peer's memory in this VM: `none`, `plugging`, `plugged`, `unplugging` or
    /// `failed`.
    pub memory: &'static str,
    /// Reason why it could not be plugged.
    pub why_failed: Option<String>,
    /// Physical slot that it is plugged into.
    pub slot: Option<u32>,
    /// Report of the member about the link.
    pub link: Link,
}

/// Lists all members of a domain.
pub(crate) fn list(domain: &TrustDomain, now: Instant) -> Vec<MemberInfo> {
    domain.members.values().map(|member| one(domain, member, now)).collect()
}

fn one(domain: &TrustDomain, member: &Member, now: Instant) -> MemberInfo {
    let others = domain.members.values().filter(|other| other.index != member.index);
    let wanted = |index: &usize| {
        member.is_joined() && domain.members.get(index).is_some_and(Member::is_joined)
    };
    let is_zombie = |(index, plug): &(&usize, &PlugState)| plug.place().is_some() && !wanted(index);
    MemberInfo {
        vm: member.vm.clone(),
        domain: domain.name.clone(),
        id: member.id(),
        state: member.state_name(),
        why_broken: member.why_broken.clone(),
        is_over_ceiling: member.is_over_ceiling,
        generation: member.report.as_ref().map(|report| report.generation),
        is_silent: member.is_silent(now, domain.timing.dead_after_ms),
        window_len_bytes: member.memory.window_len,
        macs: member.macs.clone(),
        addresses: member.addresses.clone(),
        zombies: member.peers.iter().filter(is_zombie).count(),
        links: others.map(|other| link(member, other)).collect(),
    }
}

fn link(member: &Member, peer: &Member) -> LinkInfo {
    let plug = member.peers.get(&peer.index);
    let why_failed = match plug {
        Some(PlugState::Failed(why)) => Some(why.clone()),
        _ => None,
    };
    LinkInfo {
        vm: peer.vm.clone(),
        id: peer.id(),
        memory: plug.map_or("none", PlugState::name),
        why_failed,
        slot: plug.and_then(PlugState::place).map(|place| place.slot),
        link: member.report.as_ref().map(|report| report.link(peer.index)).unwrap_or_default(),
    }
}
