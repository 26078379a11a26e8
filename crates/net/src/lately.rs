//! What a port's last frames were found to be: addresses that were admitted, and where frames to an
//! address go. Saves the tables' lookups for most frames.
//!
//! A finding holds while no table has changed an owner ([`Tables::generation`]) and for
//! [`HOLDS_NS`]; then the tables are asked again, which also tells them that the address is alive.

use crate::binding::{BindMode, Tables};
use crate::forward::Dest;
use crate::header::{Head, Mac, be16};

/// How long a finding holds: a tenth of the shortest ageing time that a switch can have.
const HOLDS_NS: u64 = 100_000_000;

/// Destinations remembered by a port. More talkers at once cost lookups, nothing else.
const WAYS: usize = 16;

const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;

/// The source of a frame, as far as a binding judges it. Frames of which more is judged have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Source {
    mac: Mac,
    kind: u16,
    ip: u128,
}

impl Source {
    #[inline]
    fn of(head: &Head, mode: BindMode) -> Option<Self> {
        let (eth, mac) = (head.eth(), head.src());
        if mode != BindMode::MacAndIp {
            return Some(Self { mac, kind: 0, ip: 0 });
        }
        let kind = be16(eth, 12)?;
        let ip = match kind {
            // Without options, so that no header can lie beyond our copy.
            0x0800 if eth.len() >= 34 && eth[14] == 0x45 => {
                u128::from(u32::from_be_bytes([eth[26], eth[27], eth[28], eth[29]]))
            }
            // Transport headers only: neighbour messages are judged one by one.
            0x86dd
                if eth.len() >= 54
                    && eth[14] >> 4 == 6
                    && matches!(eth[20], IPPROTO_TCP | IPPROTO_UDP) =>
            {
                u128::from_be_bytes(eth[22..38].try_into().ok()?)
            }
            _ => return None,
        };
        // The unspecified address is nobody's: what comes from it is judged by its content.
        (ip != 0).then_some(Self { mac, kind, ip })
    }
}

/// See the module's text. One per port.
#[derive(Debug, Default)]
pub(crate) struct Lately {
    generation: u64,
    until_ns: u64,
    source: Option<Source>,
    ways: [Option<(Mac, Dest)>; WAYS],
}

impl Lately {
    /// Forgets what does not hold any more. Call before a batch is looked at.
    #[inline]
    pub fn refresh(&mut self, tables: &Tables, now_ns: u64) {
        let generation = tables.generation();
        if generation != self.generation || now_ns >= self.until_ns {
            *self = Self { generation, until_ns: now_ns + HOLDS_NS, ..Self::default() };
        }
    }

    /// Whether a frame from the same source was admitted, under the same owners.
    #[inline]
    pub fn admitted(&self, head: &Head, mode: BindMode, tables: &Tables) -> bool {
        self.source.is_some()
            && self.generation == tables.generation()
            && self.source == Source::of(head, mode)
    }

    /// The tables have just admitted this frame.
    pub fn note_admitted(&mut self, head: &Head, mode: BindMode, tables: &Tables) {
        // A frame that changed an owner is not worth it: it will not be the last.
        if self.generation == tables.generation() {
            self.source = Source::of(head, mode);
        }
    }

    /// Where frames to `dst` went.
    #[inline]
    pub fn way(&self, dst: Mac, tables: &Tables) -> Option<Dest> {
        let (mac, dest) = self.ways[slot(dst)]?;
        (mac == dst && self.generation == tables.generation()).then_some(dest)
    }

    /// Frames to `dst` go there. Floods are not remembered: the answer may come any time.
    pub fn note_way(&mut self, dst: Mac, dest: Dest, tables: &Tables) {
        if matches!(dest, Dest::Port(_) | Dest::Uplink) && self.generation == tables.generation() {
            self.ways[slot(dst)] = Some((dst, dest));
        }
    }
}

#[inline]
fn slot(mac: Mac) -> usize {
    let bits = mac.bits();
    (bits ^ bits >> 4 ^ bits >> 8) as usize % WAYS
}
