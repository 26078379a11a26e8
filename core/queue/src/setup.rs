//! Facts that describe a ring: its format, its addresses, its position, and its completions.
//!
//! A ground file: it knows nothing of memory, descriptors or queues.

/// Bit of the wrap counter beside a ring offset, in vring bases and event offsets.
pub(crate) const WRAP_BIT: u16 = 1 << 15;

/// Ring format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Virtio 1.x split virtqueue (2.7).
    Split,
    /// Virtio 1.1 packed virtqueue (2.8).
    Packed,
}

/// Position of both sides of a ring. Split: indices that wrap at 65,536 (wrap flags unused).
/// Packed: ring offsets with their wrap counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Next available entry to take.
    pub avail: u16,
    /// Next used entry to write.
    pub used: u16,
    /// Packed: driver ring wrap counter at `avail`.
    pub avail_wrap: bool,
    /// Packed: device ring wrap counter at `used`.
    pub used_wrap: bool,
}

impl Position {
    /// The position of a fresh ring.
    pub fn fresh() -> Self {
        Self { avail: 0, used: 0, avail_wrap: true, used_wrap: true }
    }

    /// Decodes the base of vhost-user `SET_VRING_BASE`: split = next avail index (used is read from
    /// the ring by the caller), packed = avail in bits 0–15, used in bits 16–31, wrap counter in
    /// the top bit of each half. Some front ends send 0 for a fresh packed ring: taken as fresh.
    /// DPDK's virtio-user names the available side only and leaves the upper half 0: taken as
    /// "nothing in flight". (Literally it would mean that a whole lap is in flight, which no back
    /// end hands back.)
    pub fn from_vring_base(layout: Layout, base: u32) -> Self {
        let (low, high) = (base as u16, (base >> 16) as u16);
        match layout {
            Layout::Split => Self { avail: low, used: low, avail_wrap: true, used_wrap: true },
            Layout::Packed if base == 0 => Self::fresh(),
            Layout::Packed if high == 0 && low & WRAP_BIT != 0 => {
                let at = low & !WRAP_BIT;
                Self { avail: at, used: at, avail_wrap: true, used_wrap: true }
            }
            Layout::Packed => Self {
                avail: low & !WRAP_BIT,
                used: high & !WRAP_BIT,
                avail_wrap: low & WRAP_BIT != 0,
                used_wrap: high & WRAP_BIT != 0,
            },
        }
    }

    /// Encodes the base for the reply to `GET_VRING_BASE`.
    pub fn to_vring_base(self, layout: Layout) -> u32 {
        let half = |at: u16, wrap: bool| u32::from(at | if wrap { WRAP_BIT } else { 0 });
        match layout {
            Layout::Split => u32::from(self.avail),
            Layout::Packed => {
                half(self.avail, self.avail_wrap) | half(self.used, self.used_wrap) << 16
            }
        }
    }
}

/// Guest-physical addresses of the three parts. Packed: descriptor ring, driver event suppression,
/// device event suppression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingAddrs {
    /// Descriptor table or ring.
    pub desc: u64,
    /// Available ring or driver event suppression.
    pub driver: u64,
    /// Used ring or device event suppression.
    pub device: u64,
}

impl RingAddrs {
    /// The three addresses, in the order of the fields.
    pub(crate) fn parts(&self) -> [u64; 3] {
        [self.desc, self.driver, self.device]
    }
}

/// Description of a ring, to make a [`crate::Queue`] from.
#[derive(Debug, Clone, Copy)]
pub struct RingSetup {
    /// Number of descriptors.
    pub size: u16,
    /// Split or packed.
    pub layout: Layout,
    /// VIRTIO_F_EVENT_IDX negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_IN_ORDER negotiated.
    pub in_order: bool,
    /// VIRTIO_F_INDIRECT_DESC negotiated.
    pub indirect: bool,
    /// Addresses of the parts.
    pub addrs: RingAddrs,
    /// Position to start from.
    pub start: Position,
    /// VHOST_VRING_F_LOG: guest address at which writes to the used ring are logged.
    pub log_used_addr: Option<u64>,
}

/// Completion of one descriptor chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// [`crate::Chain::id`].
    pub id: u16,
    /// [`crate::Chain::ndesc`].
    pub ndesc: u16,
    /// Bytes written into the chain's writable part (never more than are really written).
    pub written: u32,
}

/// Wish of a driver to hear of what was pushed since it was asked the last time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    /// The driver wants to.
    pub is_wanted: bool,
    /// The driver wanted to hear of the first of it, so it had taken everything before.
    pub was_waiting: bool,
}

impl Wish {
    /// Wish of a driver that says yes or no, and no position.
    pub fn always(is_wanted: bool) -> Self {
        Self { is_wanted, was_waiting: is_wanted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_position_survives_the_way_over_the_socket() {
        for (avail, used, avail_wrap, used_wrap) in
            [(0, 0, true, true), (5, 3, true, true), (1, 250, false, true), (7, 7, false, false)]
        {
            let position = Position { avail, used, avail_wrap, used_wrap };
            let base = position.to_vring_base(Layout::Packed);
            assert_eq!(Position::from_vring_base(Layout::Packed, base), position);
        }
    }

    #[test]
    fn a_front_end_that_names_the_available_side_only_has_nothing_in_flight() {
        let fresh = Position::from_vring_base(Layout::Packed, 0x8000);
        assert_eq!(fresh, Position::fresh());
        assert_eq!(Position::from_vring_base(Layout::Packed, 0), Position::fresh());
        let later = Position::from_vring_base(Layout::Packed, 0x8007);
        assert_eq!((later.used, later.used_wrap), (7, true));
    }
}
