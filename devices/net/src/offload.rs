//! Offloads that a receiver lacks: work on a frame in software before it takes it.

use frame::{F_NEEDS_CSUM, GSO_ECN, GSO_TCPV4, GSO_TCPV6, L4, Vnet};

/// Work on a frame before a receiver can take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// Filling in its checksum.
    Checksum,
    /// Cutting into segments.
    Segments,
}

/// Work that `vnet` asks of a receiver whose driver negotiated `features`.
#[inline]
pub fn needed(vnet: &Vnet, head: &[u8], features: u64) -> Need {
    use crate::features as f;
    if vnet.flags & F_NEEDS_CSUM == 0 && !vnet.is_gso() {
        return Need::Nothing;
    }
    let has = |bit| features & bit != 0;
    if !vnet.is_gso() {
        return if has(f::GUEST_CSUM) { Need::Nothing } else { Need::Checksum };
    }
    let taken = match vnet.gso_kind() {
        GSO_TCPV4 => has(f::GUEST_TSO4),
        GSO_TCPV6 => has(f::GUEST_TSO6),
        _ if L4::find(head).is_some_and(|l4| l4.v6) => has(f::GUEST_USO6),
        _ => has(f::GUEST_USO4),
    };
    let ecn = vnet.gso_type & GSO_ECN == 0 || has(f::GUEST_ECN);
    if taken && ecn && has(f::GUEST_CSUM) { Need::Nothing } else { Need::Segments }
}
