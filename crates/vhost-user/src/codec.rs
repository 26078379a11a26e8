//! The messages of the vhost-user protocol: ids, sizes, file descriptors, payload layouts.
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`, sections "Message specification" and "Front-end
//! message types". All numbers are in native byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::{MessageName, VhostUserError};

/// Bytes of a message header.
pub const HEADER_LEN_BYTES: usize = 12;
/// Most bytes of a payload: the largest legal one is a table of 64 regions, 2,056 bytes.
pub const MAX_PAYLOAD_LEN_BYTES: usize = 4096;
/// Most file descriptors of a message: one per memory region.
pub const MAX_FDS: usize = base::limits::MAX_MEMORY_REGIONS;
/// Most bytes of config space in one message (QEMU's `VHOST_USER_MAX_CONFIG_SIZE`).
pub const MAX_CONFIG_LEN_BYTES: u32 = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0x3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Set in the payload of `SET_VRING_KICK/CALL/ERR` when no descriptor comes with it.
pub const VRING_NO_FD: u64 = 1 << 8;
/// `VHOST_VRING_F_LOG`: log writes to the used ring.
pub const VRING_F_LOG: u32 = 1;

/// Feature bits that belong to the session, not to the device.
pub mod feature {
    /// `VHOST_F_LOG_ALL`: log all writes to guest memory.
    pub const LOG_ALL: u64 = 1 << 26;
    /// `VIRTIO_NET_F_MAC`: the address in config space, which is the VMM's where we have no config
    /// space. Some VMMs pass on that the driver took it.
    pub const NET_MAC: u64 = 1 << 5;
    /// `VHOST_USER_F_PROTOCOL_FEATURES`.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// `VIRTIO_F_NOTIFY_ON_EMPTY` and `VIRTIO_F_ANY_LAYOUT`: some VMMs acknowledge them by
    /// themselves; they ask nothing of us.
    pub const HARMLESS: u64 = 1 << 24 | 1 << 27;
    /// `VIRTIO_RING_F_INDIRECT_DESC`.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// `VIRTIO_RING_F_EVENT_IDX`.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// `VIRTIO_F_RING_PACKED`.
    pub const RING_PACKED: u64 = 1 << 34;
    /// `VIRTIO_F_IN_ORDER`.
    pub const IN_ORDER: u64 = 1 << 35;
}

/// Protocol feature bits (`VHOST_USER_PROTOCOL_F_*`).
pub mod protocol {
    /// Several queues: `GET_QUEUE_NUM`.
    pub const MQ: u64 = 1 << 0;
    /// The dirty log comes as a file descriptor.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// `SEND_RARP`.
    pub const RARP: u64 = 1 << 2;
    /// Any message may ask for an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// `NET_SET_MTU`.
    pub const MTU: u64 = 1 << 4;
    /// `SET_BACKEND_REQ_FD`.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// `GET_CONFIG` and `SET_CONFIG`.
    pub const CONFIG: u64 = 1 << 9;
    /// Descriptors on the back-end channel.
    pub const BACKEND_SEND_FD: u64 = 1 << 10;
    /// `GET_INFLIGHT_FD` and `SET_INFLIGHT_FD`.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// `RESET_DEVICE`.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// `GET_MAX_MEM_SLOTS`, `ADD_MEM_REG`, `REM_MEM_REG`.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// `GET_STATUS` and `SET_STATUS`.
    pub const STATUS: u64 = 1 << 16;
}

/// How many bytes a payload may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// Exactly this many.
    Exact(u32),
    /// One of two.
    Either(u32, u32),
    /// Between (inclusive); the handler checks the rest against the content.
    Range(u32, u32),
}

impl Sizes {
    fn allows(self, size: u32) -> bool {
        match self {
            Self::Exact(n) => size == n,
            Self::Either(a, b) => size == a || size == b,
            Self::Range(min, max) => (min..=max).contains(&size),
        }
    }

    fn rule(self) -> String {
        match self {
            Self::Exact(n) => n.to_string(),
            Self::Either(a, b) => format!("{a} or {b}"),
            Self::Range(min, max) => format!("{min} to {max}"),
        }
    }
}

/// How many file descriptors come with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fds {
    /// Exactly this many.
    Exact(usize),
    /// None or one.
    Optional,
    /// One, or none when the payload has [`VRING_NO_FD`].
    UnlessNoFd,
    /// One per memory region named in the payload.
    PerRegion,
}

/// What the front end gets back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Nothing, unless it asks with `need_reply`.
    Ack,
    /// Always a reply with a body.
    Body,
}

/// The shape of a message.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Payload sizes.
    pub sizes: Sizes,
    /// File descriptors.
    pub fds: Fds,
    /// Reply.
    pub answer: Answer,
    /// The protocol feature it needs.
    pub needs: Option<Needs>,
}

/// A protocol feature that a message depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// The bit.
    pub bit: u64,
    /// Its name.
    pub name: &'static str,
    /// True when it must be negotiated; false when the specification is content with its being
    /// offered.
    pub negotiated: bool,
}

macro_rules! requests {
    ($($id:literal $variant:ident $name:literal;)*) => {
        /// Every front-end message we serve. The number is the id on the wire.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Request {
            $(#[doc = concat!("`VHOST_USER_", $name, "`.")] $variant = $id,)*
        }

        impl Request {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The message with this id; none for messages that we do not serve.
            pub fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Its name in the specification, without the prefix.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

requests! {
    1 GetFeatures "GET_FEATURES";
    2 SetFeatures "SET_FEATURES";
    3 SetOwner "SET_OWNER";
    4 ResetOwner "RESET_OWNER";
    5 SetMemTable "SET_MEM_TABLE";
    6 SetLogBase "SET_LOG_BASE";
    7 SetLogFd "SET_LOG_FD";
    8 SetVringNum "SET_VRING_NUM";
    9 SetVringAddr "SET_VRING_ADDR";
    10 SetVringBase "SET_VRING_BASE";
    11 GetVringBase "GET_VRING_BASE";
    12 SetVringKick "SET_VRING_KICK";
    13 SetVringCall "SET_VRING_CALL";
    14 SetVringErr "SET_VRING_ERR";
    15 GetProtocolFeatures "GET_PROTOCOL_FEATURES";
    16 SetProtocolFeatures "SET_PROTOCOL_FEATURES";
    17 GetQueueNum "GET_QUEUE_NUM";
    18 SetVringEnable "SET_VRING_ENABLE";
    19 SendRarp "SEND_RARP";
    20 NetSetMtu "NET_SET_MTU";
    21 SetBackendReqFd "SET_BACKEND_REQ_FD";
    24 GetConfig "GET_CONFIG";
    25 SetConfig "SET_CONFIG";
    31 GetInflightFd "GET_INFLIGHT_FD";
    32 SetInflightFd "SET_INFLIGHT_FD";
    34 ResetDevice "RESET_DEVICE";
    36 GetMaxMemSlots "GET_MAX_MEM_SLOTS";
    37 AddMemReg "ADD_MEM_REG";
    38 RemMemReg "REM_MEM_REG";
    39 SetStatus "SET_STATUS";
    40 GetStatus "GET_STATUS";
}

impl Request {
    /// The name as errors show it.
    pub fn message(self) -> MessageName {
        MessageName(self as u32)
    }

    /// The message's shape.
    pub fn shape(self) -> Shape {
        use Fds::{Exact as F, Optional, PerRegion, UnlessNoFd};
        use Sizes::{Either, Exact, Range};
        let config = Range(CONFIG_HEADER_LEN_BYTES, CONFIG_HEADER_LEN_BYTES + MAX_CONFIG_LEN_BYTES);
        let table = Range(8, 8 + 32 * base::limits::MAX_MEMORY_REGIONS as u32);
        let (sizes, fds) = match self {
            Self::GetFeatures
            | Self::SetOwner
            | Self::ResetOwner
            | Self::GetProtocolFeatures
            | Self::GetQueueNum
            | Self::ResetDevice
            | Self::GetMaxMemSlots
            | Self::GetStatus => (Exact(0), F(0)),
            Self::SetFeatures
            | Self::SetProtocolFeatures
            | Self::SendRarp
            | Self::NetSetMtu
            | Self::SetStatus => (Exact(8), F(0)),
            Self::SetMemTable => (table, PerRegion),
            Self::SetLogBase => (Exact(16), F(1)),
            // Some front ends send a u64 although the specification says none.
            Self::SetLogFd | Self::SetBackendReqFd => (Either(0, 8), F(1)),
            Self::SetVringNum | Self::SetVringBase | Self::GetVringBase | Self::SetVringEnable => {
                (Exact(8), F(0))
            }
            Self::SetVringAddr => (Exact(40), F(0)),
            Self::SetVringKick | Self::SetVringCall | Self::SetVringErr => (Exact(8), UnlessNoFd),
            Self::GetConfig | Self::SetConfig => (config, F(0)),
            // 24 with the C structure's padding (QEMU, DPDK), 20 without.
            Self::GetInflightFd => (Either(20, 24), F(0)),
            Self::SetInflightFd => (Either(20, 24), F(1)),
            Self::AddMemReg => (Exact(40), F(1)),
            // "The back-end MAY accept messages with one file descriptor" (and closes it).
            Self::RemMemReg => (Exact(40), Optional),
        };
        Shape { sizes, fds, answer: self.answer(), needs: self.needs() }
    }

    fn answer(self) -> Answer {
        match self {
            Self::GetFeatures
            | Self::GetProtocolFeatures
            | Self::GetVringBase
            | Self::GetQueueNum
            | Self::GetConfig
            | Self::GetInflightFd
            | Self::GetMaxMemSlots
            | Self::GetStatus
            // With LOG_SHMFD (which we require) the front end waits for a reply.
            | Self::SetLogBase => Answer::Body,
            _ => Answer::Ack,
        }
    }

    fn needs(self) -> Option<Needs> {
        let offered = |bit, name| Some(Needs { bit, name, negotiated: false });
        let negotiated = |bit, name| Some(Needs { bit, name, negotiated: true });
        match self {
            Self::GetQueueNum => offered(protocol::MQ, "MQ"),
            Self::SendRarp => offered(protocol::RARP, "RARP"),
            Self::NetSetMtu => offered(protocol::MTU, "MTU"),
            Self::SetBackendReqFd => offered(protocol::BACKEND_REQ, "BACKEND_REQ"),
            Self::SetLogBase => negotiated(protocol::LOG_SHMFD, "LOG_SHMFD"),
            Self::GetConfig | Self::SetConfig => negotiated(protocol::CONFIG, "CONFIG"),
            Self::GetInflightFd | Self::SetInflightFd => {
                negotiated(protocol::INFLIGHT_SHMFD, "INFLIGHT_SHMFD")
            }
            Self::ResetDevice => negotiated(protocol::RESET_DEVICE, "RESET_DEVICE"),
            Self::GetMaxMemSlots | Self::AddMemReg | Self::RemMemReg => {
                negotiated(protocol::CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")
            }
            Self::SetStatus | Self::GetStatus => negotiated(protocol::STATUS, "STATUS"),
            _ => None,
        }
    }
}

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Message id.
    pub request: u32,
    /// Version, reply and need-reply bits.
    pub flags: u32,
    /// Payload bytes.
    pub size: u32,
}

impl Header {
    /// The header of a request that we send.
    pub fn request(id: u32, size: u32, need_reply: bool) -> Self {
        Self { request: id, flags: VERSION | if need_reply { NEED_REPLY } else { 0 }, size }
    }

    /// The header of a reply.
    pub fn reply(id: u32, size: u32) -> Self {
        Self { request: id, flags: VERSION | REPLY, size }
    }

    /// The name for errors.
    pub fn message(&self) -> MessageName {
        MessageName(self.request)
    }

    /// True when the front end waits for an acknowledgement.
    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Checks id, version, direction and size; the size is below
    /// [`MAX_PAYLOAD_LEN_BYTES`] afterwards.
    pub fn check(&self) -> Result<Request, VhostUserError> {
        let message = self.message();
        if self.flags & VERSION_MASK != VERSION || self.flags & REPLY != 0 {
            return Err(VhostUserError::BadFlags { message, flags: self.flags });
        }
        let request =
            Request::from_id(self.request).ok_or(VhostUserError::Unsupported { message })?;
        let sizes = request.shape().sizes;
        if self.size as usize > MAX_PAYLOAD_LEN_BYTES || !sizes.allows(self.size) {
            return Err(VhostUserError::BadSize { message, got: self.size, want: sizes.rule() });
        }
        Ok(request)
    }
}

/// Checks the number of descriptors that came with a message. `truncated`: the kernel had more
/// than there was room for.
pub fn check_fds(
    request: Request,
    payload: &[u8],
    got: usize,
    truncated: bool,
) -> Result<(), VhostUserError> {
    let first_word = u64_at(payload, 0);
    let (min, max) = match request.shape().fds {
        Fds::Exact(n) => (n, n),
        Fds::Optional => (0, 1),
        Fds::UnlessNoFd if first_word & VRING_NO_FD != 0 => (0, 0),
        Fds::UnlessNoFd => (1, 1),
        Fds::PerRegion => {
            let n = first_word as u32 as usize;
            (n, n)
        }
    };
    if !truncated && (min..=max).contains(&got) {
        return Ok(());
    }
    let got = if truncated { format!("more than {got}") } else { got.to_string() };
    let want = if min == max { min.to_string() } else { format!("{min} to {max}") };
    Err(VhostUserError::BadFds { message: request.message(), got, want })
}

fn u64_at(payload: &[u8], offset: usize) -> u64 {
    let mut word = [0u8; 8];
    if let Some(bytes) = payload.get(offset..offset + 8) {
        word.copy_from_slice(bytes);
    }
    u64::from_ne_bytes(word)
}

/// The copy of a payload structure from the first bytes of `payload`.
pub(crate) fn payload<T: FromBytes>(request: Request, payload: &[u8]) -> Result<T, VhostUserError> {
    T::read_from_prefix(payload).map(|(value, _)| value).map_err(|_| VhostUserError::BadSize {
        message: request.message(),
        got: payload.len() as u32,
        want: format!("at least {}", size_of::<T>()),
    })
}

/// "A vring state description".
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Queue.
    pub index: u32,
    /// Size, base or enable.
    pub num: u32,
}

/// "A vring address description". Ring addresses are the front end's user addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Queue.
    pub index: u32,
    /// [`VRING_F_LOG`].
    pub flags: u32,
    /// Descriptor table or ring.
    pub desc: u64,
    /// Used ring or device event suppression.
    pub used: u64,
    /// Available ring or driver event suppression.
    pub avail: u64,
    /// Guest address at which writes to the used ring are logged.
    pub log: u64,
}

/// One memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Region {
    /// First guest-physical address.
    pub guest_addr: u64,
    /// Bytes.
    pub len_bytes: u64,
    /// First address in the front end.
    pub user_addr: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
}

/// "Single memory region description".
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// Ignored.
    pub padding: u64,
    /// The region.
    pub region: Region,
}

/// "Log description".
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Log {
    /// Bytes of the bitmap.
    pub size: u64,
    /// Offset in the file.
    pub offset: u64,
}

/// Bytes of [`ConfigHeader`].
pub const CONFIG_HEADER_LEN_BYTES: u32 = 12;

/// "Virtio device config space", without the content that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHeader {
    /// Offset in config space.
    pub offset: u32,
    /// Bytes of content.
    pub size: u32,
    /// 0: written by the driver; 1: live migration.
    pub flags: u32,
}

/// "Inflight description", with the C structure's padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Inflight {
    /// Bytes of the area.
    pub mmap_size: u64,
    /// Offset in the file.
    pub mmap_offset: u64,
    /// Queues.
    pub num_queues: u16,
    /// Descriptors per queue.
    pub queue_size: u16,
    /// Not always sent.
    pub padding: u32,
}

#[cfg(test)]
mod tests;
