//! Features, ownership, status, config space, MTU, the back-end channel.

use std::sync::Arc;

use base::peer_fd::PeerFd;

use super::{Fault, Reply, Session};
use crate::backend_channel::BackendChannel;
use crate::codec::{
    CONFIG_HEADER_LEN_BYTES, ConfigHeader, MAX_CONFIG_LEN_BYTES, Request, feature, payload,
    protocol,
};
use crate::device::DeviceKind;
use crate::error::VhostUserError;

/// Bits of `flags` in `SET_CONFIG`: 0 from the driver, 1 for live migration.
const CONFIG_FLAGS_MAX: u32 = 1;

impl Session {
    /// Everything but what the device does not do.
    pub(super) fn offered_protocol_features(&self) -> u64 {
        let device = &self.port.device;
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
            | when(device.has_config() && !self.keeps_device(), protocol::CONFIG)
            | when(device.wants_inflight(), protocol::INFLIGHT_SHMFD)
    }

    pub(super) fn get_protocol_features(&mut self) -> Reply {
        self.asked_before_owning |= !self.owned;
        Reply::u64(self.offered_protocol_features())
    }

    /// Whether the front end is a network device of its own, which keeps control queue and config
    /// space and leaves us the queue pairs: QEMU's. It asks for protocol features before it is the
    /// owner; Cloud Hypervisor, crosvm and DPDK's virtio-user own first. libkrun asks in QEMU's order,
    /// and shows by what it takes that it is another: see [`Session::is_mistaken`].
    fn keeps_device(&self) -> bool {
        let device = &self.port.device;
        device.kind() == DeviceKind::Net
            && self.asked_before_owning
            && !device.is_whole_to_any_front_end()
            && (self.protocol_features == 0 || !self.is_mistaken())
    }

    /// QEMU takes every protocol feature that it knows, `RARP` in all versions that count queues.
    fn is_mistaken(&self) -> bool {
        self.protocol_features & protocol::RARP == 0
    }

    /// The answer to `GET_QUEUE_NUM`. The specification speaks of queues; QEMU's network device
    /// takes the number for queue pairs, as DPDK's back end gives it, all others for rings.
    pub(super) fn queue_num(&self) -> u64 {
        let rings = self.vrings.len() as u64;
        if self.keeps_device() { rings / 2 } else { rings }
    }

    /// Why a front end may have left before any queue ran. QEMU closes the connection without a
    /// word when it was told of fewer queue pairs than it has.
    pub(crate) fn reason_to_leave(&self) -> String {
        let pairs = self.vrings.len() / 2;
        if self.keeps_device() {
            return format!(
                "the front end left; the port has queue_pairs = {pairs}: does the VMM \
                 ask for more (QEMU: queues=)?"
            );
        }
        "the front end left".to_owned()
    }

    pub(super) fn offered_features(&self) -> u64 {
        let device = &self.port.device;
        // QEMU's network device asks the first time before it can be told from others, and does not
        // look at these bits then.
        let is_whole = device.is_whole_to_any_front_end() || (self.owned && !self.keeps_device());
        let more = if is_whole { device.whole_device_features() } else { 0 };
        device.features() | more | feature::PROTOCOL_FEATURES | feature::LOG_ALL
    }

    pub(super) fn check_negotiated(&self, request: Request) -> Result<(), Fault> {
        let Some(needs) = request.shape().needs else { return Ok(()) };
        let have = if needs.negotiated {
            self.protocol_features
        } else {
            self.offered_protocol_features()
        };
        if have & needs.bit == 0 {
            let message = request.message();
            return Err(VhostUserError::NotNegotiated { message, feature: needs.name }.into());
        }
        Ok(())
    }

    pub(super) fn misplaced(request: Request, why: impl Into<String>) -> VhostUserError {
        VhostUserError::Misplaced { message: request.message(), why: why.into() }
    }

    pub(super) fn set_features(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let wanted: u64 = payload(Request::SetFeatures, bytes)?;
        let offered = self.offered_features();
        let unknown = wanted & !(offered | self.harmless_features());
        if unknown != 0 {
            return Err(VhostUserError::BadField {
                message: Request::SetFeatures.message(),
                field: "bits that were not offered",
                value: unknown,
                rule: format!("offered are {offered:#x}"),
            }
            .into());
        }
        let features = wanted & offered & !feature::HARMLESS;
        let changed = self.features.map_or(u64::MAX, |old| old ^ features);
        if changed & !feature::LOG_ALL != 0 {
            if self.is_any_running() {
                let why = "features changed while queues are running";
                return Err(Self::misplaced(Request::SetFeatures, why).into());
            }
            self.activate(Request::SetFeatures, features)?;
        }
        self.features = Some(features);
        let logging = features & feature::LOG_ALL != 0;
        if logging != self.memory.wants_logging() {
            self.change_memory(Request::SetFeatures, self.memory.with_logging(logging))?;
        }
        Ok(Reply::Done)
    }

    /// Bits that a front end may acknowledge although they were not offered.
    fn harmless_features(&self) -> u64 {
        match self.port.device.kind() {
            DeviceKind::Net => feature::HARMLESS | feature::NET_MAC,
            _ => feature::HARMLESS,
        }
    }

    /// Tells the device its features.
    pub(super) fn activate(&mut self, request: Request, features: u64) -> Result<(), Fault> {
        if self.features.is_some() {
            self.port.device.reset();
        }
        let own = feature::PROTOCOL_FEATURES | feature::LOG_ALL;
        self.port.device.activate(features & !own).map_err(|source| {
            Fault::Fatal(VhostUserError::Device { message: request.message(), source })
        })
    }

    pub(super) fn set_protocol_features(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let wanted: u64 = payload(Request::SetProtocolFeatures, bytes)?;
        let offered = self.offered_protocol_features();
        if wanted & !offered != 0 {
            return Err(VhostUserError::BadField {
                message: Request::SetProtocolFeatures.message(),
                field: "bits that were not offered",
                value: wanted & !offered,
                rule: format!("offered are {offered:#x}"),
            }
            .into());
        }
        if wanted != self.protocol_features && self.is_any_running() {
            let why = "protocol features changed while queues are running";
            return Err(Self::misplaced(Request::SetProtocolFeatures, why).into());
        }
        let was_kept = self.keeps_device();
        self.protocol_features = wanted;
        if was_kept
            && !self.keeps_device()
            && let Some(left_out) = self.port.health.log().admit()
        {
            tracing::warn!(
                port = %self.port.name,
                left_out,
                "the front end asked as QEMU's network device does and is another: it was offered no \
                 config space and no control queue; whole_device = true at the port offers them"
            );
        }
        self.port.device.set_notifier(self.notifier());
        Ok(Reply::Done)
    }

    /// libkrun sends it at each start of a driver.
    pub(super) fn set_owner(&mut self) -> Result<Reply, Fault> {
        if self.owned && self.is_any_running() && !self.may_be_repeated {
            return Err(
                Self::misplaced(Request::SetOwner, "queues of its owner are running").into()
            );
        }
        self.owned = true;
        Ok(Reply::Done)
    }

    /// Deprecated; "use it to disable all rings".
    pub(super) fn reset_owner(&mut self) -> Result<Reply, Fault> {
        self.stop_all();
        for vring in &mut self.vrings {
            vring.kick = Default::default();
        }
        self.owned = false;
        self.rings_were_reset();
        Ok(Reply::Done)
    }

    pub(super) fn reset_device(&mut self) -> Result<Reply, Fault> {
        self.stop_all();
        for vring in &mut self.vrings {
            vring.forget_ring();
        }
        self.port.device.reset();
        self.features = None;
        self.device_status = 0;
        self.memory = self.memory.with_logging(false);
        self.inflight = None;
        self.rings_were_reset();
        Ok(Reply::Done)
    }

    /// Status 0 is the driver's reset. QEMU sends it at every stop (also a pause), and negotiates
    /// anew before the next start: so the rings stop, and the device keeps its state.
    pub(super) fn set_status(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let status: u64 = payload(Request::SetStatus, bytes)?;
        let Ok(status) = u8::try_from(status) else {
            return Err(VhostUserError::BadField {
                message: Request::SetStatus.message(),
                field: "status",
                value: status,
                rule: "a status is one byte".to_owned(),
            }
            .into());
        };
        self.device_status = status;
        if status == 0 {
            self.stop_all();
            for vring in &mut self.vrings {
                vring.kick = Default::default();
            }
            self.rings_were_reset();
        }
        Ok(Reply::Done)
    }

    pub(super) fn send_rarp(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let word: [u8; 8] = payload(Request::SendRarp, bytes)?;
        let mut mac = [0u8; 6];
        mac.copy_from_slice(&word[..6]);
        self.port.device.announce(mac);
        Ok(Reply::Done)
    }

    pub(super) fn set_mtu(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let message = Request::NetSetMtu.message();
        let value: u64 = payload(Request::NetSetMtu, bytes)?;
        let mtu = u16::try_from(value).map_err(|_| {
            Fault::Refused(VhostUserError::BadField {
                message,
                field: "MTU",
                value,
                rule: format!("at most {}", u16::MAX),
            })
        })?;
        let refused = |source| Fault::Refused(VhostUserError::Device { message, source });
        self.port.device.set_mtu(mtu).map_err(refused)?;
        self.mtu = Some(mtu);
        Ok(Reply::Done)
    }

    pub(super) fn set_backend_channel(&mut self, fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let channel = fds.into_iter().next();
        let channel = channel.map(|fd| BackendChannel::new(fd, &self.port.name)).transpose();
        // The session can do without; what it had before is gone in any case.
        self.backend = None;
        let taken = channel.map(|channel| self.backend = channel.map(Arc::new));
        self.port.device.set_notifier(self.notifier());
        taken.map(|()| Reply::Done).map_err(Fault::Refused)
    }

    /// Offset and content of a config message, checked: the whole lies in the 256 bytes that the
    /// protocol knows, and the sizes agree.
    fn config_part(request: Request, bytes: &[u8]) -> Result<(ConfigHeader, &[u8]), Fault> {
        let header: ConfigHeader = payload(request, bytes)?;
        let content = &bytes[CONFIG_HEADER_LEN_BYTES as usize..];
        if header.size as usize != content.len() {
            return Err(VhostUserError::BadSize {
                message: request.message(),
                got: bytes.len() as u32,
                want: format!("{CONFIG_HEADER_LEN_BYTES} and the {} named in it", header.size),
            }
            .into());
        }
        let fits =
            header.offset.checked_add(header.size).is_some_and(|e| e <= MAX_CONFIG_LEN_BYTES);
        if !fits {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field: "offset",
                value: u64::from(header.offset),
                rule: format!("offset and size together are at most {MAX_CONFIG_LEN_BYTES}"),
            }
            .into());
        }
        Ok((header, content))
    }

    pub(super) fn get_config(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let (header, _) = Self::config_part(Request::GetConfig, bytes)?;
        let mut body = bytes.to_vec();
        let content = &mut body[CONFIG_HEADER_LEN_BYTES as usize..];
        content.fill(0);
        self.port.device.read_config(header.offset, content).map_err(|source| {
            let message = Request::GetConfig.message();
            Fault::Refused(VhostUserError::Device { message, source })
        })?;
        Ok(Reply::Body(body))
    }

    pub(super) fn set_config(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let message = Request::SetConfig.message();
        let (header, content) = Self::config_part(Request::SetConfig, bytes)?;
        if header.flags > CONFIG_FLAGS_MAX {
            return Err(VhostUserError::BadField {
                message,
                field: "flags",
                value: u64::from(header.flags),
                rule: "0 (driver) or 1 (migration)".to_owned(),
            }
            .into());
        }
        let refused = |source| Fault::Refused(VhostUserError::Device { message, source });
        self.port.device.write_config(header.offset, content).map_err(refused)?;
        Ok(Reply::Done)
    }
}
