//! Ceiling: how much a member may send over its channels, to all peers together.

/// Ceiling of a member; of none by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ceiling {
    /// Bytes per second, each message counted with [`guest_abi::channel::MIN_CHARGE_LEN`] at
    /// least; 0: no ceiling.
    pub bytes_per_s: u64,
    /// Messages per second; 0: no ceiling.
    pub ops_per_s: u64,
    /// Milliseconds of both that it may use at once after a pause.
    pub burst_ms: u32,
}

impl Ceiling {
    /// Whether the member may send as much as it likes.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.bytes_per_s == 0 && self.ops_per_s == 0
    }

    /// The looser of both, number by number.
    pub(crate) fn loosest(self, other: Self) -> Self {
        let loosest = |a: u64, b: u64| if a == 0 || b == 0 { 0 } else { a.max(b) };
        Self {
            bytes_per_s: loosest(self.bytes_per_s, other.bytes_per_s),
            ops_per_s: loosest(self.ops_per_s, other.ops_per_s),
            burst_ms: self.burst_ms.max(other.burst_ms),
        }
    }
}
