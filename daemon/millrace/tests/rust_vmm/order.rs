//! The order in which VMMs of this field send their messages, each as a table.
//!
//! Read from their sources of summer 2026: Cloud Hypervisor's `vhost_user/vu_common_ctrl.rs`,
//! `blk.rs`, `net.rs` and `generic_vhost_user.rs`, Firecracker's `virtio/vhost_user.rs`, crosvm's
//! `vhost_user_frontend/mod.rs`, Dragonball's `vhost_user/connection.rs`, `block.rs` and `net.rs`,
//! libkrun's `vhost_user/device.rs`. None of them sends `SET_STATUS` or `RESET_DEVICE`.

use vhost::vhost_user::VhostUserProtocolFeatures as Protocols;

use crate::traffic::Kind;

/// One thing that a VMM does, most often one message.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    SetOwner,
    GetFeatures,
    SetFeatures,
    /// All that was offered, for now.
    SetAllFeatures,
    GetProtocols,
    SetProtocols,
    /// All that was offered, for now.
    SetAllProtocols,
    /// From here on each message asks for an acknowledgement, if that was negotiated.
    NeedReply,
    /// `SET_BACKEND_REQ_FD`.
    Channel,
    QueueNum,
    /// The whole config space at once.
    ReadConfig,
    MemTable,
    /// `GET_INFLIGHT_FD` if there is no region yet, and `SET_INFLIGHT_FD`.
    Inflight,
    /// For one queue after the other.
    Each(&'static [RingStep]),
}

/// One message about a queue.
#[derive(Debug, Clone, Copy)]
pub enum RingStep {
    Num,
    Addr,
    Base,
    Call,
    Kick,
    Enable,
}

/// Index that a VMM gives in `SET_VRING_BASE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// The available index that is in the ring.
    AvailIndex,
    /// After a reconnect the used index, and a kick, where the device keeps order and there is no
    /// inflight region; else the available index.
    UsedIfInOrder,
    /// Answer of the last `GET_VRING_BASE`; 0 at first.
    LastGiven,
    /// Nothing at all after a reconnect; 0 at first.
    NotAfterReconnect,
}

/// How a VMM halts the rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    /// `SET_VRING_ENABLE` with 0.
    Disable,
    /// The same, and `GET_VRING_BASE`.
    TakeBack,
}

/// One VMM.
#[derive(Debug)]
pub struct Order {
    pub name: &'static str,
    /// Kinds of devices that it has.
    pub kinds: &'static [Kind],
    /// `VIRTIO_F_EVENT_IDX` and the like: what it passes on to drivers, besides version 1.
    pub ring_features: u64,
    pub protocols: Protocols,
    /// Whether it listens, and the daemon dials.
    pub listens: bool,
    /// Whether it needs this key at a network port.
    pub whole_device: bool,
    /// When the VM is made.
    pub connect: &'static [Step],
    /// After the socket was lost, instead of `connect`; none where the VM ends then.
    pub reconnect: Option<&'static [Step]>,
    /// When the driver is ready.
    pub start: &'static [Step],
    /// When the VM pauses; none where it does nothing.
    pub pause: Option<Halt>,
    /// When the driver lets go of the device; none where it cannot.
    pub reset: Option<Halt>,
    /// When the driver comes back, or the VM goes on, after [`Halt::TakeBack`].
    pub again: &'static [Step],
    pub base: Base,
    /// Whether it moves VMs to other hosts while they use the device.
    pub migrates: bool,
}

const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const IN_ORDER: u64 = 1 << 35;

use RingStep::{Addr, Base as SetBase, Call, Enable, Kick, Num};
use Step::*;

const ALL: &[Kind] = &[Kind::Net, Kind::Disk, Kind::Vsock];

const CLOUD_HYPERVISOR_START: &[Step] = &[
    SetFeatures,
    MemTable,
    Each(&[Num]),
    Inflight,
    Each(&[Addr, SetBase, Call, Kick]),
    Each(&[Enable]),
    Channel,
];

/// Order of Cloud Hypervisor's disks and network cards.
const CLOUD_HYPERVISOR: Order = Order {
    name: "Cloud Hypervisor",
    kinds: &[Kind::Net, Kind::Disk],
    ring_features: PROTOCOL_FEATURES | INDIRECT_DESC | EVENT_IDX | IN_ORDER,
    protocols: Protocols::CONFIG
        .union(Protocols::MQ)
        .union(Protocols::CONFIGURE_MEM_SLOTS)
        .union(Protocols::REPLY_ACK)
        .union(Protocols::INFLIGHT_SHMFD)
        .union(Protocols::LOG_SHMFD)
        .union(Protocols::DEVICE_STATE),
    listens: false,
    whole_device: false,
    connect: &[SetOwner, GetFeatures, GetProtocols, SetProtocols, NeedReply, QueueNum, ReadConfig],
    // Also when a VM arrives from another host.
    reconnect: Some(&[SetOwner, GetFeatures, SetProtocols, NeedReply]),
    start: CLOUD_HYPERVISOR_START,
    pause: Some(Halt::Disable),
    reset: Some(Halt::TakeBack),
    again: CLOUD_HYPERVISOR_START,
    base: Base::AvailIndex,
    migrates: true,
};

const DRAGONBALL_START: &[Step] = &[
    SetOwner,
    GetFeatures,
    SetFeatures,
    GetProtocols,
    SetProtocols,
    QueueNum,
    Each(&[Call]),
    MemTable,
    Each(&[Num]),
    Each(&[SetBase]),
    Each(&[Addr]),
    Each(&[Kick]),
    Each(&[Call]),
    Each(&[Enable]),
];

const DRAGONBALL_DISK: Order = Order {
    name: "Dragonball (disk)",
    kinds: &[Kind::Disk],
    ring_features: PROTOCOL_FEATURES | INDIRECT_DESC,
    protocols: Protocols::MQ
        .union(Protocols::CONFIG)
        .union(Protocols::CONFIGURE_MEM_SLOTS)
        .union(Protocols::REPLY_ACK),
    listens: false,
    whole_device: false,
    connect: &[GetFeatures, SetAllFeatures, GetProtocols, SetAllProtocols, ReadConfig],
    reconnect: Some(&[]),
    start: DRAGONBALL_START,
    pause: None,
    reset: None,
    again: &[],
    base: Base::NotAfterReconnect,
    migrates: false,
};

const CROSVM_START: &[Step] = &[MemTable, Each(&[Num, Addr, SetBase, Call, Kick, Enable])];

const LIBKRUN_START: &[Step] =
    &[SetOwner, MemTable, SetFeatures, Each(&[Num, SetBase, Addr, Kick, Call, Enable])];

pub static ORDERS: &[Order] = &[
    CLOUD_HYPERVISOR,
    Order {
        name: "Cloud Hypervisor (generic)",
        kinds: ALL,
        protocols: CLOUD_HYPERVISOR.protocols.union(Protocols::BACKEND_REQ),
        connect: &[SetOwner, GetFeatures, GetProtocols, SetProtocols, NeedReply, QueueNum],
        base: Base::UsedIfInOrder,
        ..CLOUD_HYPERVISOR
    },
    Order {
        name: "Firecracker",
        kinds: &[Kind::Disk],
        ring_features: PROTOCOL_FEATURES | EVENT_IDX,
        protocols: Protocols::CONFIG,
        listens: false,
        whole_device: false,
        connect: &[SetOwner, GetFeatures, GetProtocols, SetProtocols, ReadConfig],
        reconnect: None,
        start: &[SetFeatures, MemTable, Each(&[Num]), Each(&[Addr, SetBase, Call, Kick, Enable])],
        pause: None,
        reset: None,
        again: &[],
        base: Base::AvailIndex,
        migrates: false,
    },
    Order {
        name: "crosvm",
        kinds: ALL,
        ring_features: PROTOCOL_FEATURES | INDIRECT_DESC | EVENT_IDX,
        // `need_reply` is never set, although acknowledgements are negotiated.
        protocols: Protocols::CONFIG
            .union(Protocols::MQ)
            .union(Protocols::BACKEND_REQ)
            .union(Protocols::DEVICE_STATE)
            .union(Protocols::SHMEM)
            .union(Protocols::REPLY_ACK),
        listens: false,
        whole_device: false,
        connect: &[SetOwner, GetFeatures, GetProtocols, SetProtocols, Channel, QueueNum],
        reconnect: None,
        start: &[SetFeatures, MemTable, Each(&[Num, Addr, SetBase, Call, Kick, Enable])],
        pause: Some(Halt::TakeBack),
        reset: Some(Halt::TakeBack),
        // Features are sent again only if they changed.
        again: CROSVM_START,
        base: Base::LastGiven,
        migrates: false,
    },
    DRAGONBALL_DISK,
    Order {
        name: "Dragonball (network card)",
        kinds: &[Kind::Net],
        protocols: Protocols::MQ,
        listens: true,
        connect: &[GetFeatures],
        reconnect: Some(&[GetFeatures]),
        ..DRAGONBALL_DISK
    },
    Order {
        name: "libkrun",
        kinds: ALL,
        ring_features: PROTOCOL_FEATURES | INDIRECT_DESC | EVENT_IDX,
        protocols: Protocols::CONFIG.union(Protocols::MQ),
        listens: false,
        // Its first messages are those of QEMU's network device.
        whole_device: true,
        connect: &[GetFeatures, GetProtocols, SetProtocols, QueueNum],
        reconnect: None,
        start: LIBKRUN_START,
        pause: None,
        reset: Some(Halt::Disable),
        // It owns the session again at each start.
        again: LIBKRUN_START,
        base: Base::LastGiven,
        migrates: false,
    },
    Order {
        // Rings are enabled from the start. Front ends from before `SET_VRING_ENABLE`.
        name: "a VMM without protocol features",
        kinds: ALL,
        ring_features: 0,
        protocols: Protocols::empty(),
        listens: false,
        whole_device: false,
        connect: &[SetOwner, GetFeatures],
        reconnect: None,
        start: &[SetFeatures, MemTable, Each(&[Num, Addr, SetBase, Call, Kick])],
        pause: Some(Halt::TakeBack),
        reset: Some(Halt::TakeBack),
        again: &[MemTable, Each(&[Num, Addr, SetBase, Call, Kick])],
        base: Base::LastGiven,
        migrates: false,
    },
];
