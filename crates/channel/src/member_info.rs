//! Members as listings show them.

use std::net::IpAddr;
use std::time::Instant;

use crate::domain::Domain;
use crate::member::{Member, Plug};
use crate::said::Link;

/// A member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberInfo {
    /// The VM.
    pub vm: String,
    /// Its trust domain.
    pub domain: String,
    /// Its number at the doorbell server, above 0.
    pub id: u16,
    /// `joining` (its doorbell is being plugged), `joined` (its module has not spoken yet), `active`,
    /// `leaving`, `broken`, or `dead` (its VM is gone and peers still have its memory).
    pub state: &'static str,
    /// What was nonsense in the member's half of the mailbox.
    pub why_broken: Option<String>,
    /// Its module's number for this load; none when it has not spoken.
    pub generation: Option<u64>,
    /// True when its module has not counted its heartbeat up for `dead_after_ms`.
    pub is_silent: bool,
    /// Bytes of its memory that peers see.
    pub window_len_bytes: u64,
    /// Its hardware addresses.
    pub macs: Vec<[u8; 6]>,
    /// Its IP addresses.
    pub addresses: Vec<IpAddr>,
    /// Peers' devices in this VM that should not be there any more and could not be unplugged yet.
    pub zombies: usize,
    /// How it stands with each peer.
    pub links: Vec<LinkInfo>,
}

/// A member's side of a link to one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkInfo {
    /// The peer.
    pub vm: String,
    /// The peer's number at the doorbell server.
    pub id: u16,
    /// The peer's memory in this VM: `none`, `plugging`, `plugged`, `unplugging` or `failed`.
    pub memory: &'static str,
    /// Why it could not be plugged.
    pub why_failed: Option<String>,
    /// The physical slot that it is plugged into.
    pub slot: Option<u32>,
    /// What the member says of the link.
    pub link: Link,
}

/// All members of a domain.
pub(crate) fn list(domain: &Domain, now: Instant) -> Vec<MemberInfo> {
    domain.members.values().map(|member| one(domain, member, now)).collect()
}

fn one(domain: &Domain, member: &Member, now: Instant) -> MemberInfo {
    let others = domain.members.values().filter(|other| other.index != member.index);
    let wanted = |index: &usize| {
        member.takes_part() && domain.members.get(index).is_some_and(Member::takes_part)
    };
    let is_zombie = |(index, plug): &(&usize, &Plug)| plug.place().is_some() && !wanted(index);
    MemberInfo {
        vm: member.vm.clone(),
        domain: domain.name.clone(),
        id: member.id(),
        state: member.state_name(),
        why_broken: member.why_broken.clone(),
        generation: member.said.as_ref().map(|said| said.generation),
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
        Some(Plug::Failed(why)) => Some(why.clone()),
        _ => None,
    };
    LinkInfo {
        vm: peer.vm.clone(),
        id: peer.id(),
        memory: plug.map_or("none", Plug::name),
        why_failed,
        slot: plug.and_then(Plug::place).map(|place| place.slot),
        link: member.said.as_ref().map(|said| said.link(peer.index)).unwrap_or_default(),
    }
}
