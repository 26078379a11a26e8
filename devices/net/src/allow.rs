//! Frames that a VM may send besides ARP and IP of its own addresses.
//!
//! A port that is bound to its addresses ([`crate::BindMode::MacAndIp`]) is a host, until its
//! configuration says more: some packets make others send their traffic elsewhere, whoever they
//! come from, and what is no IP carries senders that nobody judges.

use base::counter::DropReason;

use frame::{L4, be16};

/// Frames that a bound port may send besides its own. The default: nothing but marks of channels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Allow {
    /// Answers of a DHCP server: UDP from port 67 or to port 68, over IPv6 547 and 546.
    pub dhcp_server: bool,
    /// Router advertisements and redirects, of ICMP and ICMPv6.
    pub router: bool,
    /// IP packets in IP packets, and GRE.
    pub tunnel: bool,
    /// Frames with a length and an LLC header (IEEE 802.3); never IP, ARP or tags in them.
    pub llc: bool,
    /// All EtherTypes.
    pub any_ether_type: bool,
    /// Further EtherTypes that may leave.
    pub ether_types: Vec<u16>,
}

/// Below it, the type is a length and an LLC header follows (IEEE 802.3, 3.2.6).
const MIN_ETHER_TYPE: u16 = 0x600;

/// Modules of channels mark a change of way with such frames (`guest-abi`, `channel_net`).
const CHANNEL_MARK: u16 = 0x88b5;

/// UDP ports of DHCP: a server's and a client's (RFC 2131, RFC 8415). Clients take an answer from
/// any port, so both ends of it are judged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DhcpPorts {
    server: u16,
    client: u16,
}

impl DhcpPorts {
    pub const V4: Self = Self { server: 67, client: 68 };
    pub const V6: Self = Self { server: 547, client: 546 };

    /// Whether a datagram between these ports comes from a server.
    #[inline]
    pub fn is_a_servers(self, from: u16, to: u16) -> bool {
        from == self.server || to == self.client
    }
}

const ICMP: u8 = 1;
const ICMP_REDIRECT: u8 = 5;
const ICMP_ROUTER_ADVERT: u8 = 9;
const UDP: u8 = 17;
/// Protocols that carry whole packets or frames: IPv4, IPv6, GRE, IPIP, EtherIP, ENCAP, L2TP, MPLS
/// (IANA's registry of protocol numbers).
const TUNNELS: [u8; 8] = [4, 41, 47, 94, 97, 98, 115, 137];

impl Allow {
    /// Whether frames of this type may be sent that are neither ARP nor IP. `payload` follows the
    /// type.
    pub(crate) fn admit_other(&self, kind: u16, payload: &[u8]) -> Result<(), DropReason> {
        match kind {
            0..MIN_ETHER_TYPE if is_snap_of_ip(payload) => Err(DropReason::Spoofed),
            0..MIN_ETHER_TYPE => allowed(self.llc),
            CHANNEL_MARK => Ok(()),
            _ => allowed(self.any_ether_type || self.ether_types.contains(&kind)),
        }
    }

    /// Whether an IPv4 packet may be sent, whose sender is right.
    pub(crate) fn admit_v4(&self, eth: &[u8], l4: L4) -> Result<(), DropReason> {
        match l4.proto {
            // What follows the first fragment is nothing without it.
            _ if l4.later => Ok(()),
            ICMP => match eth.get(l4.offset).ok_or(DropReason::Malformed)? {
                &(ICMP_REDIRECT | ICMP_ROUTER_ADVERT) => allowed(self.router),
                _ => Ok(()),
            },
            UDP => self.admit_udp(eth, l4, DhcpPorts::V4),
            proto => allowed(self.tunnel || !TUNNELS.contains(&proto)),
        }
    }

    /// The same for IPv6; ICMPv6 is judged by who knows its types.
    pub(crate) fn admit_v6(&self, eth: &[u8], l4: L4) -> Result<(), DropReason> {
        match l4.proto {
            _ if l4.later => Ok(()),
            UDP => self.admit_udp(eth, l4, DhcpPorts::V6),
            proto => allowed(self.tunnel || !TUNNELS.contains(&proto)),
        }
    }

    /// Ports that lie beyond our copy cannot be judged.
    fn admit_udp(&self, eth: &[u8], l4: L4, dhcp: DhcpPorts) -> Result<(), DropReason> {
        let port = |at| be16(eth, at).ok_or(DropReason::Malformed);
        let (from, to) = (port(l4.offset)?, port(l4.offset + 2)?);
        allowed(self.dhcp_server || !dhcp.is_a_servers(from, to))
    }

    /// Whether router advertisements and redirects may be sent.
    pub(crate) fn admit_router(&self) -> Result<(), DropReason> {
        allowed(self.router)
    }
}

fn allowed(ok: bool) -> Result<(), DropReason> {
    if ok { Ok(()) } else { Err(DropReason::NotAllowed) }
}

/// Whether an LLC frame carries what is judged by its addresses, or tags, in SNAP (RFC 1042). Some
/// systems take IP from such frames, none sends it on Ethernet: not worth a judgement of its own.
fn is_snap_of_ip(llc: &[u8]) -> bool {
    let kind = be16(llc, 6);
    matches!(llc, [0xaa | 0xab, 0xaa | 0xab, ..])
        && matches!(kind, Some(0x0800 | 0x0806 | 0x86dd | 0x8035 | 0x8100 | 0x88a8 | 0x9100))
}
