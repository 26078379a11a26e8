//! Internet checksums (RFC 1071): sums, and filling in what a sender left to its network card.

use base::counter::DropReason;

use crate::head::ETH_LEN;
use crate::vnet::{F_NEEDS_CSUM, Vnet};

/// Ones' complement sum of `bytes`, added to `sum` (RFC 1071). An odd tail counts as padded.
pub fn sum(bytes: &[u8], sum: u64) -> u64 {
    let mut total = sum;
    let mut words = bytes.chunks_exact(4);
    for w in &mut words {
        total += u64::from(u32::from_be_bytes([w[0], w[1], w[2], w[3]]));
    }
    let mut tail = [0; 4];
    let rest = words.remainder();
    tail[..rest.len()].copy_from_slice(rest);
    total + u64::from(u32::from_be_bytes(tail))
}

/// Folds a sum to 16 bits and complements it.
pub fn fold(mut sum: u64) -> u16 {
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Completes the checksum of a frame whose header asks for it: over everything from `csum_start`,
/// where the sender left the pseudo header's sum in the checksum's place.
pub fn complete_checksum(frame: &mut [u8], vnet: &Vnet) -> Result<(), DropReason> {
    if vnet.flags & F_NEEDS_CSUM == 0 {
        return Ok(());
    }
    let start = usize::from(vnet.csum_start);
    let at = start + usize::from(vnet.csum_offset);
    if start < ETH_LEN || at + 2 > frame.len() {
        return Err(DropReason::Malformed);
    }
    let value = fold(sum(&frame[start..], 0));
    // In UDP a sum of 0 means "none": it is sent as all ones (RFC 768). 6 is UDP's place alone.
    let value = if value == 0 && vnet.csum_offset == 6 { 0xffff } else { value };
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
    Ok(())
}
