//! Messages of the vhost-user protocol: ids, sizes, file descriptors, features.
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`, sections "Message specification" and "Front-end
//! message types".

use std::fmt;

/// Most bytes of config space in one message (QEMU's `VHOST_USER_MAX_CONFIG_SIZE`).
pub const MAX_CONFIG_LEN_BYTES: u32 = 256;
/// Set in the payload of `SET_VRING_KICK/CALL/ERR` when no descriptor comes with it.
pub const VRING_NO_FD: u64 = 1 << 8;
/// Bytes of a config message in front of its content.
pub const CONFIG_HEADER_LEN_BYTES: u32 = 12;

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

/// Payload sizes that a message may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// Exactly this number.
    Exact(u32),
    /// One of two numbers.
    Either(u32, u32),
    /// Between two numbers (inclusive); the handler checks the size against the content.
    Range(u32, u32),
}

impl Sizes {
    pub(crate) fn allows(self, size: u32) -> bool {
        match self {
            Self::Exact(n) => size == n,
            Self::Either(a, b) => size == a || size == b,
            Self::Range(min, max) => (min..=max).contains(&size),
        }
    }

    pub(crate) fn rule(self) -> String {
        match self {
            Self::Exact(n) => n.to_string(),
            Self::Either(a, b) => format!("{a} or {b}"),
            Self::Range(min, max) => format!("{min} to {max}"),
        }
    }
}

/// Number of file descriptors that come with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fds {
    /// Exactly this number.
    Exact(usize),
    /// None or one.
    Optional,
    /// One, or none when the payload has [`VRING_NO_FD`].
    UnlessNoFd,
    /// One per memory region named in the payload.
    PerRegion,
}

/// Answer that the front end gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Nothing, unless it asks for an acknowledgement with `need_reply`.
    Ack,
    /// Always a reply with a body.
    Body,
}

/// Shape of a message: what the front end must send, and what it gets.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Payload sizes.
    pub sizes: Sizes,
    /// File descriptors.
    pub fds: Fds,
    /// Answer to the front end.
    pub answer: Answer,
    /// Protocol feature that the message needs.
    pub needs: Option<Needs>,
}

/// Protocol feature that a message depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Feature bit.
    pub bit: u64,
    /// Name of the feature in the specification.
    pub name: &'static str,
    /// Whether the feature must be negotiated; where not, it is enough that it is offered.
    pub negotiated: bool,
}

macro_rules! requests {
    ($($id:literal $variant:ident $name:literal;)*) => {
        /// Front-end message that we serve. The number is the id on the wire.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Request {
            $(#[doc = concat!("`VHOST_USER_", $name, "`.")] $variant = $id,)*
        }

        impl Request {
            /// All messages.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Message with this id; none for messages that we do not serve.
            pub fn from_id(id: u32) -> Option<Self> {
                match id {
                    $($id => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Name in the specification, without the prefix.
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
    /// Name as errors show it.
    pub fn message(self) -> MessageName {
        MessageName(self as u32)
    }

    /// Shape of the message.
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

/// Number of a message, shown with its name in the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageName(pub u32);

impl fmt::Display for MessageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Request::from_id(self.0) {
            Some(request) => write!(f, "{}", request.name()),
            None => write!(f, "message {}", self.0),
        }
    }
}
