//! Negotiation with the front end: features, ownership, device status, MTU.

use queue::Layout;

use super::outcome::Fault;
use super::vring::layout;
use crate::codec::{Request, feature, payload, protocol};
use crate::device::{Device, DeviceKind};
use crate::error::VhostUserError;

/// State of the negotiation.
#[derive(Debug, Default)]
pub(super) struct Negotiation {
    /// Protocol features that the front end took.
    pub protocol_features: u64,
    /// Features that the driver took, with the session's own bits.
    pub features: Option<u64>,
    /// Whether `SET_OWNER` was seen.
    pub is_owned: bool,
    /// Whether the front end asked for protocol features before it was the owner: see
    /// [`Negotiation::keeps_device`].
    pub asked_before_owning: bool,
    /// Device status as the front end set it.
    pub device_status: u8,
    /// MTU as the front end set it.
    pub mtu: Option<u16>,
}

impl Negotiation {
    /// Feature bits that hold now; none before `SET_FEATURES`.
    pub fn feature_bits(&self) -> u64 {
        self.features.unwrap_or(0)
    }

    /// Ring format that was negotiated.
    pub fn layout(&self) -> Layout {
        layout(self.feature_bits())
    }

    /// Whether the front end took this protocol feature.
    pub fn has_protocol(&self, bit: u64) -> bool {
        self.protocol_features & bit != 0
    }

    /// Protocol features on offer: all but those that the device cannot do.
    pub fn offered_protocol_features(&self, device: &dyn Device) -> u64 {
        let net = device.kind() == DeviceKind::Net;
        let always = protocol::MQ
            | protocol::LOG_SHMFD
            | protocol::REPLY_ACK
            | protocol::BACKEND_REQ
            | protocol::BACKEND_SEND_FD
            | protocol::RESET_DEVICE
            | protocol::CONFIGURE_MEM_SLOTS
            | protocol::STATUS;
        let when = |yes: bool, bits: u64| if yes { bits } else { 0 };
        always
            | when(net, protocol::RARP | protocol::MTU)
            // QEMU's network device would warn of it.
            | when(device.has_config() && !self.keeps_device(device), protocol::CONFIG)
            | when(device.wants_inflight(), protocol::INFLIGHT_SHMFD)
    }

    /// Whether the front end is a network device of its own, which keeps control queue and config
    /// space and leaves us the queue pairs: QEMU's. It asks for protocol features before it is the
    /// owner; Cloud Hypervisor, crosvm and DPDK's virtio-user own first. libkrun asks in QEMU's
    /// order, and shows by the features that it takes that it is another: see
    /// [`Negotiation::is_mistaken`].
    pub fn keeps_device(&self, device: &dyn Device) -> bool {
        device.kind() == DeviceKind::Net
            && self.asked_before_owning
            && !device.is_whole_to_any_front_end()
            && (self.protocol_features == 0 || !self.is_mistaken())
    }

    /// Whether the front end was taken for QEMU and is another. QEMU takes every protocol feature
    /// that it knows, `RARP` in all versions that count queues.
    fn is_mistaken(&self) -> bool {
        self.protocol_features & protocol::RARP == 0
    }

    /// Number for `GET_QUEUE_NUM`. The specification speaks of queues; QEMU's network device takes
    /// the number for queue pairs, as DPDK's back end gives it, all others for rings.
    pub fn queue_num(&self, device: &dyn Device, rings: usize) -> u64 {
        let rings = rings as u64;
        if self.keeps_device(device) { rings / 2 } else { rings }
    }

    /// Features on offer.
    pub fn offered_features(&self, device: &dyn Device) -> u64 {
        // QEMU's network device asks the first time before it can be told from others, and does not
        // look at these bits then.
        let is_whole =
            device.is_whole_to_any_front_end() || (self.is_owned && !self.keeps_device(device));
        let more = if is_whole { device.whole_device_features() } else { 0 };
        device.features() | more | feature::PROTOCOL_FEATURES | feature::LOG_ALL
    }

    /// Checks that the protocol feature that a message needs is there.
    pub fn check(&self, request: Request, device: &dyn Device) -> Result<(), Fault> {
        let Some(needs) = request.shape().needs else { return Ok(()) };
        let have = if needs.negotiated {
            self.protocol_features
        } else {
            self.offered_protocol_features(device)
        };
        if have & needs.bit == 0 {
            let message = request.message();
            return Err(VhostUserError::NotNegotiated { message, feature: needs.name }.into());
        }
        Ok(())
    }

    /// Features out of `SET_FEATURES`, checked.
    pub fn parse_features(&self, bytes: &[u8], device: &dyn Device) -> Result<u64, Fault> {
        let request = Request::SetFeatures;
        let wanted: u64 = payload(request, bytes)?;
        let offered = self.offered_features(device);
        let harmless = harmless_features(device.kind());
        check_offered(request, wanted & !(offered | harmless), offered)?;
        Ok(wanted & offered & !feature::HARMLESS)
    }

    /// Protocol features out of `SET_PROTOCOL_FEATURES`, checked.
    pub fn parse_protocol_features(&self, bytes: &[u8], device: &dyn Device) -> Result<u64, Fault> {
        let request = Request::SetProtocolFeatures;
        let wanted: u64 = payload(request, bytes)?;
        let offered = self.offered_protocol_features(device);
        check_offered(request, wanted & !offered, offered)?;
        Ok(wanted)
    }
}

/// Bits that a front end may acknowledge although they were not offered.
fn harmless_features(kind: DeviceKind) -> u64 {
    match kind {
        DeviceKind::Net => feature::HARMLESS | feature::NET_MAC,
        _ => feature::HARMLESS,
    }
}

fn check_offered(request: Request, unknown: u64, offered: u64) -> Result<(), Fault> {
    if unknown == 0 {
        return Ok(());
    }
    Err(VhostUserError::BadField {
        message: request.message(),
        field: "bits that were not offered",
        value: unknown,
        rule: format!("offered are {offered:#x}"),
    }
    .into())
}

/// Status byte out of `SET_STATUS`, checked.
pub(super) fn parse_status(bytes: &[u8]) -> Result<u8, Fault> {
    let status: u64 = payload(Request::SetStatus, bytes)?;
    u8::try_from(status).map_err(|_| {
        VhostUserError::BadField {
            message: Request::SetStatus.message(),
            field: "status",
            value: status,
            rule: "a status is one byte".to_owned(),
        }
        .into()
    })
}

/// MTU out of `NET_SET_MTU`, checked.
pub(super) fn parse_mtu(bytes: &[u8]) -> Result<u16, Fault> {
    let value: u64 = payload(Request::NetSetMtu, bytes)?;
    u16::try_from(value).map_err(|_| {
        Fault::Refused(VhostUserError::BadField {
            message: Request::NetSetMtu.message(),
            field: "MTU",
            value,
            rule: format!("at most {}", u16::MAX),
        })
    })
}
