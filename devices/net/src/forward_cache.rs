//! Forwarding cache of a port: the source that was admitted last, and where frames to an address
//! go. Saves the tables' lookups for most frames.
//!
//! A finding holds while no table has changed an owner ([`Tables::generation`]) and for
//! [`HOLDS_NS`]; then the tables are asked again, which also tells them that the address is alive.

use crate::allow::DhcpPorts;
use crate::binding::{BindMode, Tables};
use crate::fdb::Dest;
use frame::{Head, Mac, be16};

/// How long a finding holds, also after a VM has gone or come: a tenth of the shortest ageing time
/// that a switch can have.
pub(crate) const HOLDS_NS: u64 = 100_000_000;

/// Destinations remembered by a port. More talkers at once cost lookups, nothing else.
const DESTS: usize = 16;

const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;

/// Bytes that a binding judges a frame by, as they lie in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Judged {
    /// The MAC address only.
    Mac,
    /// An IPv4 packet of TCP or UDP without options, so that no header can lie beyond our copy, and
    /// not from the port of a DHCP server: other packets are judged one by one.
    V4([u8; 4]),
    /// The same of IPv6.
    V6([u8; 16]),
}

/// The source of frames of which no more is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source {
    /// Source address and type: eight bytes of the Ethernet header.
    start: u64,
    judged: Judged,
}

/// The source address in [`Source::start`].
const MAC_BITS: u64 = (1 << 48) - 1;

impl Source {
    /// None when more than addresses is judged of such a frame.
    fn of(head: &Head, mode: BindMode) -> Option<Self> {
        let eth = head.eth();
        let start = start_of(head.first::<14>()?);
        if mode != BindMode::MacAndIp {
            return Some(Self { start, judged: Judged::Mac });
        }
        let judged = match be16(eth, 12)? {
            0x0800 => Judged::V4(eth.get(26..30)?.try_into().ok()?),
            0x86dd => Judged::V6(eth.get(22..38)?.try_into().ok()?),
            _ => return None,
        };
        // The unspecified address is nobody's: what comes from it is judged by its content.
        let is_nobody = matches!(judged, Judged::V4([0, 0, 0, 0]))
            || matches!(judged, Judged::V6(ip) if ip == [0; 16]);
        let source = Self { start, judged };
        (!is_nobody && source.is_of(head)).then_some(source)
    }

    /// Whether the frame comes from there too.
    // Aldests: it is asked for every frame, and what it compares with stays in registers then.
    #[inline(always)]
    pub fn is_of(&self, head: &Head) -> bool {
        match self.judged {
            Judged::Mac => {
                let Some(eth) = head.first::<14>() else { return false };
                (start_of(eth) ^ self.start) & MAC_BITS == 0
            }
            Judged::V4(ip) => {
                let Some(eth) = head.first::<38>() else { return false };
                start_of(eth) == self.start
                    && eth[14] == 0x45
                    && eth[26..30] == ip
                    && is_a_hosts(eth[23], [eth[34], eth[35], eth[36], eth[37]], DhcpPorts::V4)
            }
            Judged::V6(ip) => {
                let Some(eth) = head.first::<58>() else { return false };
                start_of(eth) == self.start
                    && eth[14] >> 4 == 6
                    && eth[22..38] == ip
                    && is_a_hosts(eth[20], [eth[54], eth[55], eth[56], eth[57]], DhcpPorts::V6)
            }
        }
    }
}

/// Whether a packet of this protocol, between these ports, is what any host may send.
#[inline]
fn is_a_hosts(proto: u8, [a, b, c, d]: [u8; 4], dhcp: DhcpPorts) -> bool {
    let (from, to) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    proto == IPPROTO_TCP || (proto == IPPROTO_UDP && !dhcp.is_a_servers(from, to))
}

/// Source address and type of a frame (which has them).
#[inline]
fn start_of(eth: &[u8]) -> u64 {
    let mut start = [0; 8];
    start.copy_from_slice(&eth[6..14]);
    u64::from_le_bytes(start)
}

/// The cache, one for each port.
#[derive(Debug, Default)]
pub(crate) struct ForwardCache {
    generation: u64,
    until_ns: u64,
    source: Option<Source>,
    dests: [Option<(Mac, Dest)>; DESTS],
}

impl ForwardCache {
    /// Forgets what does not hold any more. Call before a batch is looked at.
    #[inline]
    pub fn refresh(&mut self, tables: &Tables, now_ns: u64) {
        let generation = tables.generation();
        if generation != self.generation || now_ns >= self.until_ns {
            *self = Self { generation, until_ns: now_ns + HOLDS_NS, ..Self::default() };
        }
    }

    /// The source that was admitted last. Only while [`ForwardCache::dest`] finds something: the
    /// same change ends both.
    #[inline]
    pub fn source(&self) -> Option<Source> {
        self.source
    }

    /// The tables have just admitted this frame.
    pub fn note_source(&mut self, head: &Head, mode: BindMode, tables: &Tables) {
        // A frame that changed an owner is not worth it: it will not be the last.
        if self.generation == tables.generation() {
            self.source = Source::of(head, mode);
        }
    }

    /// Destination that frames to `dst` had.
    #[inline]
    pub fn dest(&self, dst: Mac, tables: &Tables) -> Option<Dest> {
        let (mac, dest) = self.dests[slot(dst)]?;
        (mac == dst && self.generation == tables.generation()).then_some(dest)
    }

    /// Frames to `dst` go there. Floods are not remembered: the answer may come any time.
    pub fn note_dest(&mut self, dst: Mac, dest: Dest, tables: &Tables) {
        if matches!(dest, Dest::Port(_) | Dest::Uplink) && self.generation == tables.generation() {
            self.dests[slot(dst)] = Some((dst, dest));
        }
    }
}

#[inline]
fn slot(mac: Mac) -> usize {
    let bits = mac.bits();
    (bits ^ bits >> 4 ^ bits >> 8) as usize % DESTS
}
