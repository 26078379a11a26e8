//! Status and metrics of members.

use std::collections::BTreeSet;

use channel::MemberInfo;
use config::format_mac;
use control::plane::{ChannelLink, ChannelState, ChannelStatus};
use control::sample::Metrics;

use super::vm::Vm;

/// Status of a VM: one line, and one more for each earlier run of it whose memory peers still have.
/// The line of the current run comes last.
pub fn status(vm: &Vm, why: Option<String>, members: &[MemberInfo]) -> Vec<ChannelStatus> {
    let mut all: Vec<ChannelStatus> = members
        .iter()
        .filter(|member| member.vm == vm.name)
        .map(|member| of_member(vm, why.clone(), member))
        .collect();
    all.sort_by_key(|status| status.state != ChannelState::Dead);
    if all.last().is_none_or(|last| last.state == ChannelState::Dead) {
        let out = ChannelStatus::out(&vm.name, &vm.domain, vm.config.auto);
        all.push(ChannelStatus { reason: why, ..out });
    }
    all
}

fn of_member(vm: &Vm, why: Option<String>, member: &MemberInfo) -> ChannelStatus {
    // A state of a later version of the crate is shown as the nearest that is true of any member.
    let state = ChannelState::of(member.state).unwrap_or(ChannelState::Joined);
    let dead = "its VM is gone, and peers still have its memory";
    let reason = match state {
        ChannelState::Dead => Some(dead.into()),
        // What was in the way is being tried.
        ChannelState::Joining => None,
        _ => member.why_broken.clone().or(why),
    };
    ChannelStatus {
        state,
        reason,
        id: Some(member.id),
        silent: member.is_silent,
        over_ceiling: member.is_over_ceiling,
        window_len_bytes: member.window_len_bytes,
        macs: member.macs.iter().map(|mac| format_mac(*mac)).collect(),
        addresses: member.addresses.clone(),
        zombies: member.zombies,
        links: links(member),
        ..ChannelStatus::out(&vm.name, &member.domain, vm.config.auto)
    }
}

fn links(member: &MemberInfo) -> Vec<ChannelLink> {
    let link = |link: &channel::LinkInfo| ChannelLink {
        vm: link.vm.clone(),
        state: link.link.state.name().into(),
        memory: link.memory.into(),
        reason: link.why_failed.clone(),
        held_pages: link.link.borrowed,
        lent_messages: link.link.lent,
        sent: link.link.sent,
        received: link.link.received,
        sent_bytes: link.link.sent_bytes,
        received_bytes: link.link.received_bytes,
        referred_bytes: link.link.referred_bytes,
        refused: link.link.refused,
    };
    member.links.iter().map(link).collect()
}

/// Members by domain and state, and what each link of theirs counts.
pub fn metrics(all: &[ChannelStatus], metrics: &mut Metrics) {
    let domains: BTreeSet<&str> = all.iter().map(|status| status.domain.as_str()).collect();
    for domain in domains {
        for state in ChannelState::ALL {
            let labels = vec![("domain", domain.to_owned()), ("state", state.name().to_owned())];
            let count = all.iter().filter(|s| s.domain == domain && s.state == state).count();
            let help = "VMs that take part in channels, by state; out: no member.";
            metrics.sample("millrace_channel_members", help, labels, count as u64);
        }
    }
    for status in all.iter().filter(|s| !matches!(s.state, ChannelState::Out | ChannelState::Dead))
    {
        let labels = vec![("vm", status.vm.clone())];
        let help = "Devices of peers in a VM that should be gone and could not be unplugged yet.";
        metrics.sample("millrace_channel_zombies", help, labels, status.zombies as u64);
        let help =
            "Whether a VM is broken because its channel's peers received more than its ceiling.";
        let over_ceiling = u64::from(status.over_ceiling);
        let labels = vec![("vm", status.vm.clone())];
        metrics.sample("millrace_channel_over_ceiling", help, labels, over_ceiling);
        status.links.iter().for_each(|link| link_metrics(&status.vm, link, metrics));
    }
}

/// By peer: the counters of a link end with it, and a sum over links would seem to run backwards.
fn link_metrics(vm: &str, link: &ChannelLink, metrics: &mut Metrics) {
    let labels = |direction: Option<&str>| {
        let direction = direction.map(|direction| ("direction", direction.to_owned()));
        let vm = std::iter::once(("vm", vm.to_owned()));
        vm.chain(direction).chain([("peer", link.vm.clone())]).collect::<Vec<_>>()
    };
    let help = "Messages of a VM with a peer.";
    let name = "millrace_channel_messages_total";
    metrics.sample(name, help, labels(Some("sent")), link.sent);
    metrics.sample(name, help, labels(Some("received")), link.received);
    let help = "Bytes of these messages.";
    let name = "millrace_channel_bytes_total";
    metrics.sample(name, help, labels(Some("sent")), link.sent_bytes);
    metrics.sample(name, help, labels(Some("received")), link.received_bytes);
    let values = [
        (
            "referred_bytes_total",
            link.referred_bytes,
            "Of the bytes sent: passed by reference, without a copy.",
        ),
        ("held_pages", link.held_pages.into(), "Pages of the peer that are in use in the VM."),
        ("refused_total", link.refused, "Messages of the peer that were wrong."),
    ];
    for (name, value, help) in values {
        metrics.sample(&format!("millrace_channel_{name}"), help, labels(None), value);
    }
}
