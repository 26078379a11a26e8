//! Config space of a network device (virtio 1.2, 5.1.4), for front ends that leave it to us.

/// `VIRTIO_NET_S_LINK_UP`, of the field `status`.
const STATUS_LINK_UP: u16 = 1;
/// `VIRTIO_NET_S_ANNOUNCE`, of the same.
const STATUS_ANNOUNCE: u16 = 2;

/// Bytes of the fields that we have: MAC address, status, most queue pairs, MTU. Those behind
/// belong to features that are not offered, and read as zeroes.
const LEN_BYTES: usize = 12;

/// The fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConfigSpace {
    /// Zero where none is configured; `VIRTIO_NET_F_MAC` is not offered then.
    pub mac: [u8; 6],
    pub link_up: bool,
    /// Whether the driver is to announce itself.
    pub announce: bool,
    pub queue_pairs: u16,
    /// Bytes of an IP packet.
    pub mtu: u16,
}

impl ConfigSpace {
    /// Fills `out` with what is at `offset`.
    pub fn read(&self, offset: u32, out: &mut [u8]) {
        out.fill(0);
        let bytes = self.to_bytes();
        let from = bytes.get(offset as usize..).unwrap_or_default();
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
    }

    fn to_bytes(self) -> [u8; LEN_BYTES] {
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        let status = bit(self.link_up, STATUS_LINK_UP) | bit(self.announce, STATUS_ANNOUNCE);
        let mut bytes = [0; LEN_BYTES];
        bytes[..6].copy_from_slice(&self.mac);
        bytes[6..8].copy_from_slice(&status.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.queue_pairs.to_le_bytes());
        bytes[10..].copy_from_slice(&self.mtu.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_can_be_read_and_what_is_behind_is_zero() {
        let mac = [2, 0, 0, 0, 0, 7];
        let space = ConfigSpace { mac, link_up: true, announce: false, queue_pairs: 4, mtu: 9000 };
        let whole = [2, 0, 0, 0, 0, 7, 1, 0, 4, 0, 0x28, 0x23];
        for offset in [0u32, 1, 6, 11, 12, 13, 200, u32::MAX] {
            for len in [0usize, 1, 4, 12, 60] {
                let mut out = vec![0xff; len];
                space.read(offset, &mut out);
                let want = (0..len).map(|i| whole.get(offset as usize + i).copied().unwrap_or(0));
                assert_eq!(out, want.collect::<Vec<u8>>(), "{offset} {len}");
            }
        }
        let mut status = [0xff; 2];
        ConfigSpace { link_up: false, ..space }.read(6, &mut status);
        assert_eq!(status, [0, 0]);
        ConfigSpace { announce: true, ..space }.read(6, &mut status);
        assert_eq!(status, [3, 0]);
    }
}
