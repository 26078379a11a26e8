//! Addresses that a port may send from.
//!
//! A port with a binding owns one MAC address: the configured one, or the first it uses that nobody
//! else is using. With
//! [`BindMode::MacAndIp`] it also owns IP addresses: the configured ones, or the first few it uses
//! that no other port owns. Ports may [share](Shared) addresses besides, which nobody else may use.
//! Judged are our own copies of the headers, behind up to two VLAN tags;
//! a packet whose sender cannot be judged (headers beyond [`frame::HEAD_LEN`]) is dropped.

use std::sync::Arc;

use base::counter::DropReason;

use crate::allow::Allow;
use crate::fdb::{Ip, Learn, LearnRules, PortId, Table};
use crate::metrics::SwitchStats;
use crate::moves::Moves;
use frame::{Head, L4, Mac, be16, ether_type};

/// How strictly a port's source addresses are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BindMode {
    /// No binding: the VM may be a bridge or a router. Its MAC addresses are learned up to a limit.
    Off,
    /// One MAC address.
    Mac,
    /// One MAC address and the port's own IP addresses, and nothing else that [`Allow`] does not
    /// name.
    #[default]
    MacAndIp,
}

/// Most learned IP addresses of one port: one IPv4 and, per prefix, a stable and a few temporary
/// IPv6 addresses (Linux keeps up to 16 per interface).
pub const MAX_LEARNED_IPS: u32 = 16;

/// The switch's tables and limits that a check needs.
#[derive(Debug)]
pub(crate) struct Tables {
    pub macs: Table<Mac>,
    pub ips: Table<Ip>,
    pub max_macs_per_port: u32,
    /// Most learned MAC addresses of the uplink: it must leave room for the ports.
    pub max_macs_uplink: u32,
    /// Addresses that some ports share: no other port may use them.
    pub shared: Shared,
    pub moves: Moves,
    pub stats: Arc<SwitchStats>,
}

impl Tables {
    /// Changes with every change of an owner.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.macs.generation() + self.ips.generation()
    }

    /// A frame from `mac` came from `owner`. Counts moves, and addresses without a place.
    pub fn learn_mac(&mut self, mac: Mac, owner: PortId, now_ns: u64, rules: LearnRules) -> Learn {
        let learned = self.macs.learn(mac, owner, now_ns, rules);
        match learned {
            Learn::Moved { from } => {
                self.stats.mac_moves.add(1);
                self.moves.note(mac, from, owner);
            }
            Learn::OwnerFull | Learn::TableFull => self.stats.unlearned.add(1),
            Learn::Known | Learn::New | Learn::Taken => {}
        }
        learned
    }
}

/// Addresses that ports may use besides their own, and that move to the port which used one last:
/// of a bond, of a service that changes its host (VRRP, keepalived).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shared {
    /// MAC addresses.
    pub macs: Vec<Mac>,
    /// IP addresses.
    pub ips: Vec<Ip>,
}

/// A shared address is learned, however many the port has.
const SHARED_RULES: LearnRules = LearnRules { owner_limit: u32::MAX, may_move: true };

/// The binding of one port.
#[derive(Debug, Clone)]
pub(crate) struct Binding {
    pub mode: BindMode,
    /// The bound address: configured or first seen.
    pub mac: Option<Mac>,
    /// From the configuration: survives the end of a session.
    pub mac_configured: bool,
    /// No addresses configured: learn them.
    pub learn_ips: bool,
    /// Addresses that it may use besides.
    pub shared: Shared,
    /// Frames that it may send besides, with [`BindMode::MacAndIp`].
    pub allow: Allow,
}

impl Binding {
    /// May this port send this frame? Learns what it may learn.
    #[inline]
    pub fn admit(
        &mut self,
        port: PortId,
        head: &Head,
        tables: &mut Tables,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let src = head.src();
        if self.mode == BindMode::Off {
            if tables.shared.macs.contains(&src) && !self.shared.macs.contains(&src) {
                return Err(DropReason::Spoofed);
            }
            return self.learn_mac(port, src, tables, now_ns);
        }
        match self.mac {
            Some(mac) if mac == src => {}
            _ if tables.shared.macs.contains(&src) => self.use_shared(port, src, tables, now_ns)?,
            Some(_) => return Err(DropReason::Spoofed),
            None => self.bind_first(port, src, tables, now_ns)?,
        }
        match self.mode {
            BindMode::MacAndIp => self.admit_ip(port, head.eth(), src, tables, now_ns),
            _ => Ok(()),
        }
    }

    /// A frame from a shared address, which is at this port from now on.
    fn use_shared(
        &self,
        port: PortId,
        src: Mac,
        tables: &mut Tables,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        if !self.shared.macs.contains(&src) {
            return Err(DropReason::Spoofed);
        }
        judged(tables.learn_mac(src, port, now_ns, SHARED_RULES) != Learn::Taken)
    }

    fn learn_mac(
        &self,
        port: PortId,
        src: Mac,
        tables: &mut Tables,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        if src.is_group() || src.is_zero() {
            return Err(DropReason::Malformed);
        }
        let owner_limit = tables.max_macs_per_port + self.shared.macs.len() as u32;
        let rules = LearnRules { owner_limit, may_move: true };
        // A full table, or port, costs flooding, as in any switch.
        match tables.learn_mac(src, port, now_ns, rules) {
            Learn::Taken => Err(DropReason::Spoofed),
            _ => Ok(()),
        }
    }

    /// The first frame of a port without a configured address binds it, unless somebody else is
    /// using that address: one frame would cut off the gateway, or any port without a binding.
    fn bind_first(
        &mut self,
        port: PortId,
        src: Mac,
        tables: &mut Tables,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        if src.is_group() || src.is_zero() {
            return Err(DropReason::Malformed);
        }
        if tables.macs.owner(src, now_ns).is_some_and(|owner| owner != port) {
            return Err(DropReason::Spoofed);
        }
        match tables.macs.fix(src, port, now_ns) {
            Learn::Known | Learn::New => self.mac = Some(src),
            Learn::TableFull => return Err(DropReason::TableFull),
            _ => return Err(DropReason::Spoofed),
        }
        Ok(())
    }

    fn admit_ip(
        &self,
        port: PortId,
        eth: &[u8],
        mac: Mac,
        tables: &mut Tables,
        now_ns: u64,
    ) -> Result<(), DropReason> {
        let (kind, at) = ether_type(eth).ok_or(DropReason::Malformed)?;
        let mut owns = |ip| self.owns(port, ip, tables, now_ns);
        match kind {
            0x0806 => admit_arp(&eth[at..], mac, &mut owns),
            0x0800 => admit_v4(eth, &self.allow, &mut owns),
            0x86dd => admit_v6(eth, mac, &self.allow, &mut owns),
            0x8035 => admit_rarp(&eth[at..], mac),
            _ => self.allow.admit_other(kind, &eth[at..]),
        }
    }

    /// Whether the port may use `ip`, learning it when allowed.
    fn owns(&self, port: PortId, ip: Ip, tables: &mut Tables, now_ns: u64) -> bool {
        if tables.shared.ips.contains(&ip) {
            return self.shared.ips.contains(&ip)
                && tables.ips.learn(ip, port, now_ns, SHARED_RULES) != Learn::Taken;
        }
        let may_learn = self.learn_ips || is_v6_link_local(ip);
        // Those that it shares are counted with them.
        let most = MAX_LEARNED_IPS + self.shared.ips.len() as u32;
        let owner_limit = if may_learn { most } else { 0 };
        let rules = LearnRules { owner_limit, may_move: false };
        matches!(tables.ips.learn(ip, port, now_ns, rules), Learn::Known | Learn::New)
    }
}

fn is_v6_link_local(ip: Ip) -> bool {
    ip.0 >> 118 == 0xfe80 >> 6
}

fn ip_v4(bytes: &[u8]) -> Option<[u8; 4]> {
    bytes.get(..4)?.try_into().ok()
}

fn ip_v6(bytes: &[u8]) -> Option<Ip> {
    Some(Ip(u128::from_be_bytes(bytes.get(..16)?.try_into().ok()?)))
}

fn v4_key(addr: [u8; 4]) -> Ip {
    Ip::from(std::net::IpAddr::from(addr))
}

/// A source nobody may own: this network, loopback, multicast, broadcast.
fn is_bad_v4_source(addr: [u8; 4]) -> bool {
    addr[0] == 0 || addr[0] == 127 || addr[0] >= 224
}

fn judged(ok: bool) -> Result<(), DropReason> {
    if ok { Ok(()) } else { Err(DropReason::Spoofed) }
}

/// Sender hardware and protocol address must be the port's. A probe (RFC 5227) names no sender,
/// and is passed for what the port may own alone: a probe for the address that another one is
/// probing for makes that one give it up.
fn admit_arp(arp: &[u8], mac: Mac, owns: &mut impl FnMut(Ip) -> bool) -> Result<(), DropReason> {
    if arp.len() < 28 || arp[..6] != [0, 1, 8, 0, 6, 4] {
        return Err(DropReason::Malformed);
    }
    let spa = ip_v4(&arp[14..]).ok_or(DropReason::Malformed)?;
    if Mac::read(&arp[8..]) != mac {
        return Err(DropReason::Spoofed);
    }
    let claimed = match spa {
        [0, 0, 0, 0] => ip_v4(&arp[24..]).ok_or(DropReason::Malformed)?,
        _ => spa,
    };
    judged(!is_bad_v4_source(claimed) && owns(v4_key(claimed)))
}

/// RARP claims addresses the way ARP does and no guest needs it, but for the announcement after a
/// migration: about the sender itself, without an IP address.
fn admit_rarp(rarp: &[u8], mac: Mac) -> Result<(), DropReason> {
    let body = rarp.get(8..28).ok_or(DropReason::Malformed)?;
    let is_own = Mac::read(body) == mac && Mac::read(&body[10..]) == mac;
    judged(is_own && body[6..10] == [0; 4])
}

fn admit_v4(
    eth: &[u8],
    allow: &Allow,
    owns: &mut impl FnMut(Ip) -> bool,
) -> Result<(), DropReason> {
    let l4 = L4::find(eth).ok_or(DropReason::Malformed)?;
    let src = ip_v4(&eth[l4.ip + 12..]).ok_or(DropReason::Malformed)?;
    if src == [0; 4] {
        // No address yet: DHCP (RFC 2131) and IGMP joins (RFC 4541) only.
        let dhcp = l4.proto == 17
            && !l4.fragment
            && be16(eth, l4.offset) == Some(68)
            && be16(eth, l4.offset + 2) == Some(67);
        return judged(dhcp || l4.proto == 2);
    }
    judged(!is_bad_v4_source(src) && owns(v4_key(src)))?;
    allow.admit_v4(eth, l4)
}

/// ICMPv6 types that matter here (RFC 4861, RFC 2710, RFC 3810).
const ROUTER_SOLICIT: u8 = 133;
const ROUTER_ADVERT: u8 = 134;
const NEIGHBOUR_SOLICIT: u8 = 135;
const NEIGHBOUR_ADVERT: u8 = 136;
const REDIRECT: u8 = 137;
const MLD_REPORT: u8 = 131;
const MLD2_REPORT: u8 = 143;

fn admit_v6(
    eth: &[u8],
    mac: Mac,
    allow: &Allow,
    owns: &mut impl FnMut(Ip) -> bool,
) -> Result<(), DropReason> {
    let l4 = L4::find(eth).ok_or(DropReason::Malformed)?;
    if l4.fragment && !l4.later && !holds_chain_v6(eth, l4) {
        return Err(DropReason::Malformed);
    }
    let src = ip_v6(&eth[l4.ip + 8..]).ok_or(DropReason::Malformed)?;
    let icmp = if l4.proto == 58 { Some(&eth[l4.offset.min(eth.len())..]) } else { None };
    // A neighbour discovery message must not come in fragments (RFC 6980): where the type is out
    // of sight the receiver drops it, and every other fragment is judged by its source.
    let kind = match icmp {
        Some(_) if l4.fragment => None,
        Some(icmp) => Some(*icmp.first().ok_or(DropReason::Malformed)?),
        None => None,
    };
    let icmp = icmp.unwrap_or_default();
    if src.0 == 0 {
        return match kind {
            // Duplicate detection, as an ARP probe: see there.
            Some(NEIGHBOUR_SOLICIT) => judged(may_claim(target_of(icmp)?, owns)),
            Some(ROUTER_SOLICIT) => judged(option_is_own(icmp, 8, 1, mac)?),
            _ => judged(matches!(kind, Some(MLD_REPORT | MLD2_REPORT))),
        };
    }
    if !may_claim(src, owns) {
        return Err(DropReason::Spoofed);
    }
    match kind {
        Some(ROUTER_ADVERT | REDIRECT) => allow.admit_router(),
        Some(ROUTER_SOLICIT) => judged(option_is_own(icmp, 8, 1, mac)?),
        Some(NEIGHBOUR_SOLICIT) => judged(option_is_own(icmp, 24, 1, mac)?),
        Some(NEIGHBOUR_ADVERT) => {
            judged(may_claim(target_of(icmp)?, owns) && option_is_own(icmp, 24, 2, mac)?)
        }
        _ => allow.admit_v6(eth, l4),
    }
}

/// Whether a first fragment holds the whole chain of headers (RFC 7112): what its padding says in
/// their place, the second fragment may say otherwise. No transport header that is judged is below
/// eight bytes.
fn holds_chain_v6(eth: &[u8], l4: L4) -> bool {
    const MIN_TRANSPORT_BYTES: usize = 8;
    let payload_len = be16(eth, l4.ip + 4).map_or(0, usize::from);
    l4.offset + MIN_TRANSPORT_BYTES <= l4.ip + 40 + payload_len
}

/// The address that a neighbour solicitation or advertisement is about.
fn target_of(icmp: &[u8]) -> Result<Ip, DropReason> {
    icmp.get(8..).and_then(ip_v6).ok_or(DropReason::Malformed)
}

/// Whether a port may claim an address: not multicast, loopback or unspecified, and the port's or
/// free.
fn may_claim(ip: Ip, owns: &mut impl FnMut(Ip) -> bool) -> bool {
    ip.0 >> 120 != 0xff && ip.0 > 1 && owns(ip)
}

/// Whether every link-layer address option of type `wanted` in a neighbour message names `mac`.
/// The options start `at` bytes into the message; at most as many as we copied are there.
fn option_is_own(icmp: &[u8], at: usize, wanted: u8, mac: Mac) -> Result<bool, DropReason> {
    let mut at = at;
    while at < icmp.len() {
        let len = icmp.get(at + 1).map_or(0, |n| usize::from(*n) * 8);
        // A length of 0 makes the message invalid (RFC 4861, 4.6); padding behind a short frame
        // looks like that too, and the receiver ignores the whole message or the padding.
        if len == 0 {
            return Ok(icmp[at..].iter().all(|b| *b == 0));
        }
        if icmp[at] == wanted {
            let addr = icmp.get(at + 2..at + 8).ok_or(DropReason::Malformed)?;
            if Mac::read(addr) != mac {
                return Ok(false);
            }
        }
        at += len;
    }
    // Options that go beyond our copy cannot be judged: only an exact end is a good one.
    if at == icmp.len() { Ok(true) } else { Err(DropReason::Malformed) }
}

#[cfg(test)]
mod tests;
