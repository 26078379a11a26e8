//! Difference between the guest's numbers and the wire's.

/// Amounts by which the guest's numbers are behind those on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shift {
    /// Bytes that twins sent for the guest.
    pub send: u32,
    /// Bytes that twins received for it.
    pub receive: u32,
    /// Ticks that its timestamps are behind those of its twins.
    pub timestamp: u32,
}

impl Shift {
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}
