//! Messages on a byte stream: a header with the length and kind of the body, then the body.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Longest body in bytes. See the crate's limits.
pub const MAX_BODY_BYTES: u32 = 64 << 10;

/// Header in front of each body.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Header {
    /// Bytes of the body.
    pub len_bytes: U32,
    /// Kind of the body.
    pub kind: U16,
    /// Zero.
    pub reserved: U16,
    /// Id of the exchange: chosen by the side that began it, repeated in the answer.
    pub id: U64,
}

/// Bytes of a header.
pub const HEADER_BYTES: usize = size_of::<Header>();

impl Header {
    /// Makes the header of a body.
    pub fn new(kind: u16, id: u64, len_bytes: usize) -> Self {
        Self {
            len_bytes: U32::new(len_bytes as u32),
            kind: U16::new(kind),
            reserved: U16::ZERO,
            id: U64::new(id),
        }
    }

    /// Length of the body, if it is within [`MAX_BODY_BYTES`].
    pub fn body_len(&self) -> Option<usize> {
        let len = self.len_bytes.get();
        (len <= MAX_BODY_BYTES).then_some(len as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_where_the_specification_says() {
        let header = Header::new(0x0201, 0x0807_0605_0403_0201, 0x4030);
        let bytes = [0x30, 0x40, 0, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(header.as_bytes(), bytes);
        assert_eq!(Header::read_from_bytes(&bytes).unwrap(), header);
        assert_eq!(header.body_len(), Some(0x4030));
    }

    #[test]
    fn a_body_beyond_the_limit_has_no_length() {
        assert_eq!(Header::new(1, 1, 64 << 10).body_len(), Some(64 << 10));
        assert_eq!(Header::new(1, 1, (64 << 10) + 1).body_len(), None);
    }
}
