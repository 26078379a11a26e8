//! Channels: `[channel]`, and `[vm.channel]` of each VM that takes part.

use std::collections::HashMap;
use std::net::IpAddr;

use guest_abi::channel::{MAX_ADDRESSES, MAX_MACS, MAX_MEMBERS, MAX_VECTORS, NAME_LEN};

use crate::model::{ChannelConfig, ChannelsConfig, Config, DEFAULT_ROOT_PORTS, VmConfig};
use crate::node::{Node, Value};
use crate::ports;
use crate::reader::{Context, Reader};
use crate::value::format_mac;

/// Longest name of a VM or domain: with its closing zero it has to fit into the members' table.
const MAX_MEMBER_NAME_LEN_BYTES: usize = NAME_LEN - 1;

/// Longest time to leave: the control API answers within 60 s, and the packaged unit has 30 s to
/// stop.
const MAX_DRAIN_TIMEOUT_MS: u64 = 20_000;

/// Longest time without a heartbeat: after that nobody waits any more.
const MAX_DEAD_AFTER_MS: u64 = 3_600_000;

/// Reads `[channel]`.
pub(crate) fn channels(mut r: Reader<'_, '_>) -> ChannelsConfig {
    let default = ChannelsConfig::default();
    let ms = |r: &mut Reader<'_, '_>, key, default: u32, low, high| {
        r.int(key, default.into(), low..=high) as u32
    };
    let vectors = ms(&mut r, "vectors", default.vectors, 2, MAX_VECTORS.into());
    let heartbeat_ms = ms(&mut r, "heartbeat_ms", default.heartbeat_ms, 10, 60_000);
    // Follows a slower heartbeat when only the heartbeat is set.
    let dead_after = default.dead_after_ms.max(4 * heartbeat_ms);
    let dead_after_ms = ms(&mut r, "dead_after_ms", dead_after, 20, MAX_DEAD_AFTER_MS);
    if dead_after_ms < 2 * heartbeat_ms {
        let what = format!("is {dead_after_ms}, less than two heartbeats of {heartbeat_ms} ms");
        r.bad("dead_after_ms", what, format!("write {} or more", 2 * heartbeat_ms));
    }
    let drain_timeout_ms =
        r.int("drain_timeout_ms", default.drain_timeout_ms, 1..=MAX_DRAIN_TIMEOUT_MS);
    r.finish();
    ChannelsConfig { vectors, heartbeat_ms, dead_after_ms, drain_timeout_ms }
}

/// Reads the optional `[vm.channel]` of the VM that `r` reads.
pub(crate) fn channel(r: &mut Reader<'_, '_>, has_domain: bool) -> Option<ChannelConfig> {
    let node = r.get("channel")?;
    if !has_domain {
        let what = "is for a VM without trust_domain: members of a channel map each other's \
                    memory, so it must be said who may";
        r.bad("channel", what, "add `trust_domain = \"...\"` to the VM, or take it out");
    }
    let path = format!("{}.channel", r.path);
    let mut r = Reader::new(&mut *r.ctx, path, node);
    let qmp = r.path("qmp").unwrap_or_default();
    if r.get("qmp").is_none() {
        let fix = "add the socket of QEMU's `-qmp unix:...,server=on,wait=off`, an absolute path";
        r.bad("qmp", "is missing", fix);
    }
    r.socket_fits("qmp", &qmp, 0);
    let root_ports = r.string("root_ports").unwrap_or(DEFAULT_ROOT_PORTS);
    let root_ports = r.checked_name("root_ports", root_ports);
    if root_ports.len() > MAX_MEMBER_NAME_LEN_BYTES {
        r.limit("root_ports", too_long(&root_ports), MAX_MEMBER_NAME_LEN_BYTES);
    }
    let macs = macs(&mut r);
    let addresses = ports::addresses(&mut r, MAX_ADDRESSES);
    let auto = r.bool("auto", true);
    let allow_unsealed = r.bool("allow_unsealed", false);
    r.finish();
    Some(ChannelConfig { qmp, root_ports, macs, addresses, auto, allow_unsealed })
}

fn too_long(name: &str) -> String {
    format!("{name:?} has {} bytes", name.len())
}

fn macs(r: &mut Reader<'_, '_>) -> Vec<[u8; 6]> {
    let mut all: Vec<[u8; 6]> = Vec::new();
    for (_, Node { value, .. }) in r.list("macs") {
        let Value::Str(text) = value else {
            let fix = "write strings: [\"02:00:00:00:00:01\"]";
            r.bad("macs", format!("has {}", value.kind()), fix);
            continue;
        };
        match ports::check_mac(text) {
            Err((what, fix)) => r.bad("macs", what, fix),
            Ok(mac) if all.contains(&mac) => {
                r.bad("macs", format!("names {text} twice"), "name it once");
            }
            Ok(mac) => all.push(mac),
        }
    }
    all
}

/// Checks channels across VMs: addresses, names, counts.
pub(crate) fn check(ctx: &mut Context, config: &Config) {
    let members = || config.vms.iter().enumerate().filter(|(_, vm)| vm.channel.is_some());
    let mut domains: HashMap<&str, Owners> = HashMap::new();
    for (i, vm) in members() {
        let Some(domain) = &vm.trust_domain else { continue };
        let owners = domains.entry(domain).or_default();
        owners.members += 1;
        // Noted once, for the first VM beyond the limit.
        if owners.members == MAX_MEMBERS + 1 {
            let what =
                format!("trust domain {domain} has more than {MAX_MEMBERS} VMs with channels");
            let fix = format!("the limit is {MAX_MEMBERS}: a member maps all others");
            ctx.note(&format!("vm[{i}].channel"), what, fix, Some(MAX_MEMBERS.to_string()));
        }
        owners.take_ports(i, vm);
        names(ctx, i, vm);
        counts(ctx, i, vm);
    }
    for (i, vm) in members() {
        let owners = vm.trust_domain.as_ref().and_then(|domain| domains.get_mut(domain.as_str()));
        if let (Some(owners), Some(channel)) = (owners, &vm.channel) {
            owners.take_listed(ctx, i, channel);
        }
    }
}

/// Owners of the addresses in a trust domain. Members find each other by address, so each address
/// has one owner.
#[derive(Default)]
struct Owners {
    members: usize,
    macs: HashMap<[u8; 6], String>,
    addresses: HashMap<IpAddr, String>,
}

impl Owners {
    /// Ports of several switches may have the same addresses.
    fn take_ports(&mut self, i: usize, vm: &VmConfig) {
        for (j, net) in vm.nets.iter().enumerate() {
            if let Some(mac) = net.mac {
                self.macs.entry(mac).or_insert_with(|| format!("vm[{i}].net[{j}].mac"));
            }
            for address in &net.addresses {
                let field = || format!("vm[{i}].net[{j}].addresses");
                self.addresses.entry(*address).or_insert_with(field);
            }
        }
    }

    fn take_listed(&mut self, ctx: &mut Context, i: usize, channel: &ChannelConfig) {
        let fix = "each address belongs to one VM of the domain; those of its network ports are \
                   added by themselves";
        let mut take = |field: &str, what: String, first: Option<String>| {
            if let Some(first) = first {
                ctx.conflict(&format!("{what} is taken by"), &first, field, fix);
            }
        };
        let field = format!("vm[{i}].channel.macs");
        for mac in &channel.macs {
            let what = format!("the MAC address {}", format_mac(*mac));
            take(&field, what, taken(&mut self.macs, *mac, &field));
        }
        let field = format!("vm[{i}].channel.addresses");
        for address in &channel.addresses {
            let what = format!("the IP address {address}");
            take(&field, what, taken(&mut self.addresses, *address, &field));
        }
    }
}

/// Takes `key` for `field`; the field that had it already, if one had.
fn taken<K: Eq + std::hash::Hash>(
    all: &mut HashMap<K, String>,
    key: K,
    field: &str,
) -> Option<String> {
    if let Some(first) = all.get(&key) {
        return Some(first.clone());
    }
    all.insert(key, field.into());
    None
}

fn names(ctx: &mut Context, i: usize, vm: &VmConfig) {
    let names = [("name", Some(&vm.name)), ("trust_domain", vm.trust_domain.as_ref())];
    for (key, name) in names {
        let Some(name) = name.filter(|name| name.len() > MAX_MEMBER_NAME_LEN_BYTES) else {
            continue;
        };
        let limit = MAX_MEMBER_NAME_LEN_BYTES;
        let fix = format!("the limit of a VM with a [vm.channel] is {limit}");
        ctx.note(&format!("vm[{i}].{key}"), too_long(name), fix, Some(limit.to_string()));
    }
}

/// Checks that the addresses of a VM, those of its ports included, fit into the members' table.
fn counts(ctx: &mut Context, i: usize, vm: &VmConfig) {
    let Some(channel) = &vm.channel else { return };
    let macs = channel.macs.len() + vm.nets.iter().filter(|net| net.mac.is_some()).count();
    let addresses: usize = vm.nets.iter().map(|net| net.addresses.len()).sum();
    let addresses = channel.addresses.len() + addresses;
    for (key, what, count, limit) in [
        ("macs", "MAC addresses", macs, MAX_MACS),
        ("addresses", "IP addresses", addresses, MAX_ADDRESSES),
    ] {
        if count > limit {
            let field = format!("vm[{i}].channel.{key}");
            let what = format!("has {count} {what} with those of the VM's network ports");
            let fix = format!("the limit is {limit}: leave out those that channels are not for");
            ctx.note(&field, what, fix, Some(limit.to_string()));
        }
    }
}
