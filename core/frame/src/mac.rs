//! Ethernet addresses.

/// An Ethernet address in the low 48 bits, first byte highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Mac(u64);

impl Mac {
    /// The address with these six bytes.
    #[inline]
    pub fn new(bytes: [u8; 6]) -> Self {
        Self::read(&bytes)
    }

    /// Reads the first six bytes of `bytes` (which has them).
    #[inline]
    pub fn read(bytes: &[u8]) -> Self {
        let mut word = [0; 8];
        word[2..].copy_from_slice(&bytes[..6]);
        Self(u64::from_be_bytes(word))
    }

    /// The six bytes, first byte first.
    #[inline]
    pub fn bytes(self) -> [u8; 6] {
        let b = self.0.to_be_bytes();
        [b[2], b[3], b[4], b[5], b[6], b[7]]
    }

    /// The number that the address is kept as, for hashes.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Whether it is a multicast or broadcast address.
    #[inline]
    pub fn is_group(self) -> bool {
        self.0 & (1 << 40) != 0
    }

    /// Whether it is ff:ff:ff:ff:ff:ff.
    #[inline]
    pub fn is_broadcast(self) -> bool {
        self.0 == (1 << 48) - 1
    }

    /// Whether it is all zeroes.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Whether it is 01-80-C2-00-00-0x: for the next bridge only, never forwarded (IEEE 802.1Q,
    /// table 8-1).
    #[inline]
    pub fn is_link_local_group(self) -> bool {
        self.0 & !0xf == 0x0180_c200_0000
    }
}

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let b = self.bytes();
        write!(f, "{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", b[0], b[1], b[2], b[3], b[4], b[5])
    }
}
