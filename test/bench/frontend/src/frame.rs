//! The frames of a flood: Ethernet, IPv4 and UDP with a sequence number and a pattern.

use base::random::{Random, Seeded};

/// A port's addresses.
#[derive(Debug, Clone, Copy)]
pub struct Station {
    /// MAC address.
    pub mac: [u8; 6],
    /// IPv4 address.
    pub ip: [u8; 4],
}

impl Station {
    /// The station with a number.
    pub const fn number(n: u16) -> Self {
        let [high, low] = n.to_be_bytes();
        Self { mac: [2, 0, 0, 0, high, low], ip: [10, 99, high, low] }
    }
}

/// The sender of a flood.
pub const STATION_A: Station = Station::number(10);
/// Station that receives.
pub const STATION_B: Station = Station::number(11);

/// Ethernet, IPv4 and UDP headers.
const HEADERS: usize = 14 + 20 + 8;
/// Shortest frame: headers and the sequence number.
pub const MIN_FRAME: usize = HEADERS + 8;
/// Longest: an IP packet of 65,535 bytes.
pub const MAX_FRAME: usize = 65_535 + 14;

/// Writes headers of a frame of `frame.len()` bytes (within the limits).
pub fn write_headers(frame: &mut [u8], from: Station, to: Station) {
    let ip_len = (frame.len() - 14) as u16;
    frame[..6].copy_from_slice(&to.mac);
    frame[6..12].copy_from_slice(&from.mac);
    frame[12..14].copy_from_slice(&[8, 0]);
    let ip = &mut frame[14..34];
    ip.fill(0);
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&ip_len.to_be_bytes());
    (ip[8], ip[9]) = (64, 17);
    ip[12..16].copy_from_slice(&from.ip);
    ip[16..20].copy_from_slice(&to.ip);
    let sum = checksum(ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    // Ports 9 (discard); a UDP checksum of 0 means none (RFC 768).
    frame[34..38].copy_from_slice(&[0, 9, 0, 9]);
    frame[38..40].copy_from_slice(&(ip_len - 20).to_be_bytes());
    frame[40..42].fill(0);
}

fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let mut sum: u32 = words.sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Writes sequence number and pattern behind the headers.
pub fn write_payload(frame: &mut [u8], seq: u64) {
    frame[HEADERS..MIN_FRAME].copy_from_slice(&seq.to_be_bytes());
    for (i, chunk) in frame[MIN_FRAME..].chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&pattern(seq, i as u64).to_le_bytes()[..chunk.len()]);
    }
}

/// The number of the station that sent a frame; none when it is no frame of ours.
#[inline]
pub fn sender(frame: &[u8]) -> Option<u16> {
    match frame.get(6..12)? {
        [2, 0, 0, 0, high, low] => Some(u16::from_be_bytes([*high, *low])),
        _ => None,
    }
}

/// Writes the sequence number alone: a frame whose pattern nobody checks.
#[inline]
pub fn write_seq(frame: &mut [u8], seq: u64) {
    frame[HEADERS..MIN_FRAME].copy_from_slice(&seq.to_be_bytes());
}

/// The sequence number of a frame, its pattern unchecked.
#[inline]
pub fn read_seq(frame: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(frame.get(HEADERS..MIN_FRAME)?.try_into().ok()?))
}

/// The sequence number of a frame whose pattern is right.
pub fn check_payload(frame: &[u8]) -> Option<u64> {
    let seq = u64::from_be_bytes(frame.get(HEADERS..MIN_FRAME)?.try_into().ok()?);
    let chunks = frame[MIN_FRAME..].chunks(8).enumerate();
    let right =
        |(i, chunk): (usize, &[u8])| *chunk == pattern(seq, i as u64).to_le_bytes()[..chunk.len()];
    chunks.into_iter().all(right).then_some(seq)
}

/// 64 bits that depend on all bits of both numbers.
pub fn pattern(a: u64, b: u64) -> u64 {
    Seeded::new(a ^ b.rotate_left(32)).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stations_have_numbers_and_frames_tell_their_sender() {
        assert_eq!(Station::number(0x0203).mac, [2, 0, 0, 0, 2, 3]);
        assert_eq!(Station::number(0x0203).ip, [10, 99, 2, 3]);
        let mut frame = vec![0; MIN_FRAME];
        write_headers(&mut frame, Station::number(515), STATION_B);
        write_seq(&mut frame, 99);
        assert_eq!((sender(&frame), read_seq(&frame)), (Some(515), Some(99)));
        frame[6] = 0;
        assert_eq!((sender(&frame), sender(&[0; 11]), read_seq(&[0; 49])), (None, None, None));
    }

    #[test]
    fn a_changed_byte_is_noticed() {
        for len in [MIN_FRAME, 64, 61, 1500] {
            let mut frame = vec![0; len];
            write_headers(&mut frame, STATION_A, STATION_B);
            write_payload(&mut frame, 77);
            assert_eq!(check_payload(&frame), Some(77));
            assert_eq!(checksum(&frame[14..34]), 0);
            if len > MIN_FRAME {
                frame[len - 1] ^= 1;
                assert_eq!(check_payload(&frame), None);
            }
        }
        assert_eq!(check_payload(&[0; 20]), None);
    }
}
