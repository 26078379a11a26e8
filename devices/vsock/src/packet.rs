//! Header of a vsock packet (virtio 1.2, 5.10.6), copied once and then checked.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::PacketError;

/// Bytes in a header.
pub const HEADER_LEN_BYTES: u32 = 44;

/// Most payload of one packet. Linux and every device known to us stop here.
pub const MAX_PAYLOAD_BYTES: u32 = 64 << 10;

/// The CID of the host (virtio 1.2, 5.10.4).
pub const HOST_CID: u32 = 2;

/// `VIRTIO_VSOCK_TYPE_STREAM`.
pub const TYPE_STREAM: u16 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE`: the sender takes no more data.
pub const SHUT_RECEIVE: u8 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_SEND`: the sender sends no more data.
pub const SHUT_SEND: u8 = 2;

/// Flags of both directions.
pub const SHUT_BOTH: u8 = SHUT_RECEIVE | SHUT_SEND;

/// Operation of a packet (virtio 1.2, 5.10.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// Connect.
    Request = 1,
    /// Connected.
    Response = 2,
    /// Refused, broken or fully closed.
    Rst = 3,
    /// One or both directions end.
    Shutdown = 4,
    /// Data.
    Rw = 5,
    /// The sender's buffer space.
    CreditUpdate = 6,
    /// Asks for the receiver's buffer space.
    CreditRequest = 7,
}

impl Op {
    fn from_wire(op: u16) -> Option<Self> {
        Some(match op {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Rst,
            4 => Self::Shutdown,
            5 => Self::Rw,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// Header as it lies in guest memory.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawHeader {
    /// Sender.
    pub src_cid: U64,
    /// Receiver.
    pub dst_cid: U64,
    /// Sender's port.
    pub src_port: U32,
    /// Receiver's port.
    pub dst_port: U32,
    /// Payload bytes.
    pub len: U32,
    /// Socket type.
    pub kind: U16,
    /// Operation.
    pub op: U16,
    /// Flags of the operation.
    pub flags: U32,
    /// Sender's receive buffer, bytes.
    pub buf_alloc: U32,
    /// Bytes the sender's application has taken, modulo 2^32.
    pub fwd_cnt: U32,
}

/// Key of a connection as one guest sees it; unique within its port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    /// Port number of the guest.
    pub guest_port: u32,
    /// CID of the other end: 2 for the host, or another guest's.
    pub peer_cid: u32,
    /// Port number of the other end.
    pub peer_port: u32,
}

/// Checked header of a packet that a guest sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Connection of the packet.
    pub key: ConnectionKey,
    /// Operation.
    pub op: Op,
    /// Payload bytes, at most [`MAX_PAYLOAD_BYTES`] and what the chain has.
    pub len: u32,
    /// Flags.
    pub flags: u32,
    /// Size of the guest's receive buffer.
    pub buf_alloc: u32,
    /// Number of bytes that the guest's application has taken, modulo 2^32.
    pub fwd_cnt: u32,
}

impl RawHeader {
    /// Makes a header of its bytes.
    pub fn from_wire(bytes: &[u8; HEADER_LEN_BYTES as usize]) -> Self {
        zerocopy::transmute!(*bytes)
    }

    /// Connection that a guest's packet names. CIDs above 32 bits are reserved, so the
    /// cut never makes two different ones equal once [`RawHeader::check`] has passed the addresses.
    pub fn key(&self) -> ConnectionKey {
        ConnectionKey {
            guest_port: self.src_port.get(),
            peer_cid: self.dst_cid.get() as u32,
            peer_port: self.dst_port.get(),
        }
    }

    /// Checks everything in a guest's header: `cid` is the guest's, `payload_bytes` what its chain
    /// has after the header.
    pub fn check(&self, cid: u32, payload_bytes: u32) -> Result<Header, PacketError> {
        let src = self.src_cid.get();
        if src != u64::from(cid) {
            return Err(PacketError::ForeignSource { cid: src, expected: cid });
        }
        let dst = self.dst_cid.get();
        if dst > u64::from(u32::MAX) {
            return Err(PacketError::BadDestination { cid: dst, limit: u32::MAX });
        }
        if self.kind.get() != TYPE_STREAM {
            return Err(PacketError::UnknownType(self.kind.get()));
        }
        let op = Op::from_wire(self.op.get()).ok_or(PacketError::UnknownOp(self.op.get()))?;
        let len = self.len.get();
        if len > MAX_PAYLOAD_BYTES {
            return Err(PacketError::TooLong { len, limit: MAX_PAYLOAD_BYTES });
        }
        if len > payload_bytes {
            return Err(PacketError::BeyondChain { len, have: payload_bytes });
        }
        Ok(Header {
            key: self.key(),
            op,
            len,
            flags: self.flags.get(),
            buf_alloc: self.buf_alloc.get(),
            fwd_cnt: self.fwd_cnt.get(),
        })
    }

    /// Makes a reset for `key`, to the guest `cid`, in answer to a packet of socket type `kind`.
    pub fn reset(key: ConnectionKey, cid: u32, kind: u16) -> Self {
        Self { kind: kind.into(), ..Self::to_guest(key, cid, Op::Rst) }
    }

    /// Makes a header to the guest `cid` without payload, flags and credit.
    pub fn to_guest(key: ConnectionKey, cid: u32, op: Op) -> Self {
        Self {
            src_cid: u64::from(key.peer_cid).into(),
            dst_cid: u64::from(cid).into(),
            src_port: key.peer_port.into(),
            dst_port: key.guest_port.into(),
            kind: TYPE_STREAM.into(),
            op: (op as u16).into(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> RawHeader {
        RawHeader {
            src_cid: 5.into(),
            dst_cid: 2.into(),
            src_port: 1000.into(),
            dst_port: 52.into(),
            len: 10.into(),
            kind: TYPE_STREAM.into(),
            op: 5.into(),
            flags: 0.into(),
            buf_alloc: 4096.into(),
            fwd_cnt: 7.into(),
        }
    }

    #[test]
    fn the_header_has_the_size_and_order_of_the_specification() {
        assert_eq!(size_of::<RawHeader>(), HEADER_LEN_BYTES as usize);
        let mut bytes = [0u8; 44];
        bytes[0] = 5;
        bytes[8] = 2;
        bytes[16..18].copy_from_slice(&1000u16.to_le_bytes());
        bytes[20] = 52;
        bytes[24] = 10;
        bytes[28] = 1;
        bytes[30] = 5;
        bytes[36..38].copy_from_slice(&4096u16.to_le_bytes());
        bytes[40] = 7;
        assert_eq!(RawHeader::from_wire(&bytes).as_bytes(), good().as_bytes());
    }

    #[test]
    fn a_good_header_passes_and_keeps_its_values() {
        let h = good().check(5, 10).unwrap();
        assert_eq!(h.key, ConnectionKey { guest_port: 1000, peer_cid: 2, peer_port: 52 });
        assert_eq!((h.op, h.len, h.buf_alloc, h.fwd_cnt), (Op::Rw, 10, 4096, 7));
    }

    #[test]
    fn every_bad_field_is_named() {
        type Spoil = fn(&mut RawHeader);
        let cases: [(Spoil, PacketError); 8] = [
            (|h| h.src_cid = 6.into(), PacketError::ForeignSource { cid: 6, expected: 5 }),
            (
                |h| h.src_cid = ((1u64 << 32) | 5).into(),
                PacketError::ForeignSource { cid: (1 << 32) | 5, expected: 5 },
            ),
            (
                |h| h.dst_cid = ((1u64 << 32) | 2).into(),
                PacketError::BadDestination { cid: (1 << 32) | 2, limit: u32::MAX },
            ),
            (|h| h.kind = 2.into(), PacketError::UnknownType(2)),
            (|h| h.op = 0.into(), PacketError::UnknownOp(0)),
            (|h| h.op = 8.into(), PacketError::UnknownOp(8)),
            (|h| h.len = 11.into(), PacketError::BeyondChain { len: 11, have: 10 }),
            (
                |h| h.len = u32::MAX.into(),
                PacketError::TooLong { len: u32::MAX, limit: MAX_PAYLOAD_BYTES },
            ),
        ];
        for (spoil, error) in cases {
            let mut header = good();
            spoil(&mut header);
            assert_eq!(header.check(5, 10), Err(error));
        }
    }
}
