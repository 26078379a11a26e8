//! One connection with a front end: the state machine.
//!
//! A handler changes what the session knows and stops queues that must not run any more; then
//! [`Rings::prepare_wanted`] makes ready every queue that has all it needs; then the session is
//! saved and the queues start; then the reply goes out; only then is the message taken off the
//! socket.
//!
//! Each part of the state has its own type: [`Negotiation`], [`MemoryTable`], [`Rings`]. Handlers
//! of messages about one of them stand there; those that change several stand here.

mod config_space;
mod inflight;
mod memory;
mod negotiation;
mod outcome;
mod rings;
mod save;
mod vring;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use base::peer_fd::PeerFd;
use queue::memory::RegionSpec;
use rustix::net::sockopt::set_socket_oobinline;
use zerocopy::IntoBytes;

use crate::backend_channel::BackendChannel;
use crate::codec::{Answer, Header, Log, Request, feature, payload, protocol};
use crate::device::{ConfigNotifier, DeviceKind};
use crate::error::VhostUserError;
use crate::port_context::PortContext;
use crate::status::{PortStatus, QueueStatus, RegionStatus};
use crate::wire::{self, Incoming, Received};

use memory::{MemoryTable, memory_error};
use negotiation::Negotiation;
pub(crate) use outcome::End;
use outcome::{Fault, Reply, misplaced};
use rings::Rings;

/// Device status: something went wrong that only a reset mends (virtio 1.2, 2.1).
const DEVICE_NEEDS_RESET: u8 = 0x40;

/// Called with a session whenever its state changed.
pub(crate) type Publisher = Box<dyn Fn(&FrontEndSession) + Send>;

/// One connection with a front end.
pub(crate) struct FrontEndSession {
    port: Arc<PortContext>,
    socket: PeerFd,
    negotiation: Negotiation,
    memory: MemoryTable,
    rings: Rings,
    back_end: Option<Arc<BackendChannel>>,
    saved: SavedCopy,
    /// Whether the next message is the first after a take-over: the dead daemon may have half done
    /// it.
    may_be_repeated: bool,
    /// Whether a message came.
    is_heard: bool,
    /// Whether a queue ran.
    has_served: bool,
    /// Whether the socket goes on in the holder.
    is_left: bool,
    /// Tells the port's owner of changes.
    publish: Publisher,
}

/// Copy of the session in the store.
#[derive(Debug, Default)]
struct SavedCopy {
    /// Whether the store has the session as it is now.
    is_current: bool,
    /// Whether the store may have a state of this session, the newest or an older one.
    may_exist: bool,
}

impl FrontEndSession {
    /// Makes a fresh session on a connected socket.
    pub fn new(
        port: Arc<PortContext>,
        socket: PeerFd,
        publish: Publisher,
    ) -> Result<Self, VhostUserError> {
        let slots = rings::create_slots(&port)?;
        port.health.reset();
        let mut session = Self::blank(port, socket, publish);
        session.rings.slots = slots;
        Ok(session)
    }

    fn blank(port: Arc<PortContext>, socket: PeerFd, publish: Publisher) -> Self {
        Self {
            socket,
            negotiation: Negotiation::default(),
            memory: MemoryTable::new(Arc::clone(&port.share.memory)),
            rings: Rings::new(Arc::clone(&port)),
            back_end: None,
            saved: SavedCopy::default(),
            may_be_repeated: false,
            is_heard: false,
            has_served: false,
            is_left: false,
            publish,
            port,
        }
    }

    /// Whether the front end sent a message in this session.
    pub fn is_heard(&self) -> bool {
        self.is_heard
    }

    /// Whether a queue ran in this session.
    pub fn has_served(&self) -> bool {
        self.has_served
    }

    /// Serves messages until the session ends. `idle` waits until the socket is readable (or the
    /// stop event is rung) and may do other things meanwhile.
    pub fn run(
        &mut self,
        mut idle: impl FnMut(BorrowedFd<'_>) -> Result<(), VhostUserError>,
    ) -> End {
        self.save();
        self.port.device.connected(true);
        (self.publish)(self);
        // A byte out of band would lie in front of no message, and wake us for ever.
        let _ = set_socket_oobinline(&self.socket, true);
        let mut was_idle = false;
        let end = loop {
            if self.port.is_stopping() {
                break End::Stopped;
            }
            self.tell_if_broken();
            match wire::receive(self.socket.as_fd(), self.port.stop.as_fd()) {
                Ok(Received::Nothing) => {
                    // Wake-ups without a message count for the pace as well.
                    if was_idle {
                        self.port.keep_pace(0);
                    }
                    was_idle = true;
                    if let Err(error) = idle(self.socket.as_fd()) {
                        break End::Failed(error);
                    }
                }
                Ok(Received::Message(message)) => {
                    was_idle = false;
                    let fds = message.fds.len();
                    match self.serve(message) {
                        Ok(true) => self.port.keep_pace(fds),
                        Ok(false) => break End::Stopped,
                        Err(error) => break End::Failed(error),
                    }
                }
                Ok(Received::Closed) => break End::Closed,
                Ok(Received::Stopped) => break End::Stopped,
                Err(error) => break End::Failed(error),
            }
        };
        self.finish(&end);
        end
    }

    /// Has the driver look at the device's status once the port is broken: see
    /// [`FrontEndSession::status`].
    fn tell_if_broken(&self) {
        if self.port.alarm.drain()
            && !self.port.health.is_live()
            && let Some(notifier) = self.notifier()
        {
            // The err descriptor and the log say so in any case.
            let _ = notifier.config_changed();
        }
    }

    /// Device status: as the front end set it, with `DEVICE_NEEDS_RESET` while the port is broken
    /// (virtio 1.2, 2.1.2).
    fn status(&self) -> u8 {
        let needs_reset = if self.port.health.is_live() { 0 } else { DEVICE_NEEDS_RESET };
        self.negotiation.device_status & !DEVICE_NEEDS_RESET | needs_reset
    }

    /// Serves one message from arrival to consumption; false when the port stopped meanwhile.
    fn serve(&mut self, mut message: Incoming) -> Result<bool, VhostUserError> {
        self.is_heard = true;
        let (request, header) = (message.request, message.header);
        let fds = std::mem::take(&mut message.fds);
        let result = self.obey(request, &message.payload, fds);
        self.may_be_repeated = false;
        let (reply, error, fatal) = match result {
            Ok(reply) => (Some(reply), None, false),
            Err(Fault::Refused(error)) => (None, Some(error), false),
            Err(Fault::Fatal(error)) => (None, Some(error), true),
        };
        if let Some(error) = &error
            && !fatal
            && let Some(left_out) = self.port.health.log().admit()
        {
            tracing::warn!(port = %self.port.name, left_out, "message refused: {error}");
        }
        // Before the answer: a front end that has it also finds the new status.
        (self.publish)(self);
        let sent = self.answer(request, &header, reply)?;
        if let (true, Some(error)) = (fatal, error) {
            return Err(error);
        }
        if !sent {
            return Ok(false);
        }
        message.consume(self.socket.as_fd())?;
        Ok(true)
    }

    /// Handles a message, brings up what it made possible, and saves the outcome.
    fn obey(&mut self, request: Request, payload: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        self.negotiation.check(request, &*self.port.device)?;
        let reply = self.dispatch(request, payload, fds)?;
        if changes_state(request) {
            let features = self.negotiation.features;
            let ready = self.rings.prepare_wanted(request, features, &self.memory)?;
            // Saved as running before it runs: whatever the device does from now on, the next
            // daemon looks for the position where the device keeps it.
            self.save();
            self.has_served |= self.rings.start_prepared(ready);
        }
        Ok(reply)
    }

    fn dispatch(
        &mut self,
        request: Request,
        payload: &[u8],
        fds: Vec<PeerFd>,
    ) -> Result<Reply, Fault> {
        let device = &*self.port.device;
        let layout = self.negotiation.layout();
        match request {
            Request::GetFeatures => Ok(Reply::u64(self.negotiation.offered_features(device))),
            Request::SetFeatures => self.set_features(payload),
            Request::GetProtocolFeatures => Ok(self.get_protocol_features()),
            Request::SetProtocolFeatures => self.set_protocol_features(payload),
            Request::SetOwner => self.set_owner(),
            Request::ResetOwner => self.reset_owner(),
            Request::GetQueueNum => Ok(Reply::u64(self.queue_num())),
            Request::SendRarp => self.send_rarp(payload),
            Request::NetSetMtu => self.set_mtu(payload),
            Request::SetBackendReqFd => self.set_backend_channel(fds),
            Request::GetConfig => config_space::get_config(device, payload),
            Request::SetConfig => config_space::set_config(device, payload),
            Request::ResetDevice => self.reset_device(),
            Request::SetStatus => self.set_status(payload),
            Request::GetStatus => Ok(Reply::u64(u64::from(self.status()))),
            Request::SetMemTable => self.set_mem_table(payload, fds),
            Request::GetMaxMemSlots => Ok(Reply::u64(base::limits::MAX_MEMORY_REGIONS as u64)),
            Request::AddMemReg => self.add_region(payload, fds),
            Request::RemMemReg => self.remove_region(payload),
            Request::SetLogBase => self.set_log_base(payload, fds),
            // Optional in the specification: the descriptor is closed, no log change is announced.
            Request::SetLogFd => Ok(Reply::Done),
            Request::GetInflightFd => self.rings.get_inflight(payload, layout),
            Request::SetInflightFd => self.rings.set_inflight(payload, fds, layout),
            Request::SetVringNum => self.rings.set_num(payload, self.negotiation.features),
            Request::SetVringAddr => self.rings.set_addr(payload, &self.memory, layout),
            Request::SetVringBase => self.rings.set_base(payload),
            Request::GetVringBase => self.rings.get_base(payload, layout),
            Request::SetVringEnable => self.rings.set_enable(payload, layout),
            Request::SetVringKick => self.rings.set_kick(payload, fds, &self.memory),
            Request::SetVringCall => self.rings.set_call(payload, fds),
            Request::SetVringErr => self.rings.set_err(payload, fds),
        }
    }

    fn get_protocol_features(&mut self) -> Reply {
        self.negotiation.asked_before_owning |= !self.negotiation.is_owned;
        Reply::u64(self.negotiation.offered_protocol_features(&*self.port.device))
    }

    fn queue_num(&self) -> u64 {
        self.negotiation.queue_num(&*self.port.device, self.rings.vrings.len())
    }

    fn set_features(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::SetFeatures;
        let features = self.negotiation.parse_features(bytes, &*self.port.device)?;
        let changed = self.negotiation.features.map_or(u64::MAX, |old| old ^ features);
        if changed & !feature::LOG_ALL != 0 {
            if self.rings.is_any_running() {
                return Err(misplaced(request, "features changed while queues are running").into());
            }
            self.activate(request, features)?;
        }
        self.negotiation.features = Some(features);
        let logging = features & feature::LOG_ALL != 0;
        if logging != self.memory.wants_logging() {
            self.change_memory(request, self.memory.with_logging(logging))?;
        }
        Ok(Reply::Done)
    }

    /// Gives the device its features.
    fn activate(&mut self, request: Request, features: u64) -> Result<(), Fault> {
        if self.negotiation.features.is_some() {
            self.port.device.reset();
        }
        let own = feature::PROTOCOL_FEATURES | feature::LOG_ALL;
        self.port.device.activate(features & !own).map_err(|source| {
            Fault::Fatal(VhostUserError::Device { message: request.message(), source })
        })
    }

    fn set_protocol_features(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::SetProtocolFeatures;
        let device = &*self.port.device;
        let wanted = self.negotiation.parse_protocol_features(bytes, device)?;
        if wanted != self.negotiation.protocol_features && self.rings.is_any_running() {
            let why = "protocol features changed while queues are running";
            return Err(misplaced(request, why).into());
        }
        let kept_device = self.negotiation.keeps_device(device);
        self.negotiation.protocol_features = wanted;
        if kept_device
            && !self.negotiation.keeps_device(device)
            && let Some(left_out) = self.port.health.log().admit()
        {
            tracing::warn!(
                port = %self.port.name,
                left_out,
                "the front end asked as QEMU's network device does and is another: it was offered no \
                 config space and no control queue; whole_device = true at the port offers them"
            );
        }
        device.set_notifier(self.notifier());
        Ok(Reply::Done)
    }

    /// Handles `SET_OWNER`, which libkrun sends at each start of a driver.
    fn set_owner(&mut self) -> Result<Reply, Fault> {
        let is_owned = self.negotiation.is_owned;
        if is_owned && self.rings.is_any_running() && !self.may_be_repeated {
            let why = "queues of its owner are running";
            return Err(misplaced(Request::SetOwner, why).into());
        }
        self.negotiation.is_owned = true;
        Ok(Reply::Done)
    }

    /// Handles `RESET_OWNER`: deprecated; "use it to disable all rings".
    fn reset_owner(&mut self) -> Result<Reply, Fault> {
        self.rings.stop_and_forget_kicks(self.negotiation.layout());
        self.negotiation.is_owned = false;
        self.rings.finish_reset();
        Ok(Reply::Done)
    }

    fn reset_device(&mut self) -> Result<Reply, Fault> {
        self.rings.stop_all(self.negotiation.layout());
        for vring in &mut self.rings.vrings {
            vring.forget_ring();
        }
        self.port.device.reset();
        self.negotiation.features = None;
        self.negotiation.device_status = 0;
        self.memory = self.memory.with_logging(false);
        self.rings.inflight = None;
        self.rings.finish_reset();
        Ok(Reply::Done)
    }

    /// Handles `SET_STATUS`. Status 0 is the driver's reset. QEMU sends it at every stop (also a
    /// pause), and negotiates anew before the next start: so the rings stop, and the device keeps
    /// its state.
    fn set_status(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let status = negotiation::parse_status(bytes)?;
        self.negotiation.device_status = status;
        if status == 0 {
            self.rings.stop_and_forget_kicks(self.negotiation.layout());
            self.rings.finish_reset();
        }
        Ok(Reply::Done)
    }

    fn send_rarp(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let word: [u8; 8] = payload(Request::SendRarp, bytes)?;
        let mut mac = [0u8; 6];
        mac.copy_from_slice(&word[..6]);
        self.port.device.announce(mac);
        Ok(Reply::Done)
    }

    fn set_mtu(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let message = Request::NetSetMtu.message();
        let mtu = negotiation::parse_mtu(bytes)?;
        let refused = |source| Fault::Refused(VhostUserError::Device { message, source });
        self.port.device.set_mtu(mtu).map_err(refused)?;
        self.negotiation.mtu = Some(mtu);
        Ok(Reply::Done)
    }

    fn set_backend_channel(&mut self, fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let channel = fds.into_iter().next();
        let channel = channel.map(|fd| BackendChannel::new(fd, &self.port.name)).transpose();
        // The session can do without a channel; the one that it had is gone in any case.
        self.back_end = None;
        let result = channel.map(|channel| self.back_end = channel.map(Arc::new));
        self.port.device.set_notifier(self.notifier());
        result.map(|()| Reply::Done).map_err(Fault::Refused)
    }

    /// Handles `SET_MEM_TABLE`: replaces the whole table.
    fn set_mem_table(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let request = Request::SetMemTable;
        let regions = memory::parse_table(bytes, fds)?;
        let next = self.memory.replaced(regions).map_err(memory_error(request))?;
        self.change_memory(request, next)?;
        Ok(Reply::Done)
    }

    fn add_region(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let request = Request::AddMemReg;
        let spec = memory::parse_region(request, bytes)?;
        let Some(fd) = fds.into_iter().next() else {
            return Err(misplaced(request, "no descriptor").into());
        };
        if self.may_repeat_regions() && self.memory.has(&spec) {
            return Ok(Reply::Done);
        }
        // Memory hot-plug that we cannot follow: the VMM can undo it, so the session goes on.
        let refused = |e| Fault::Refused(memory_error(request)(e));
        let next = self.memory.with_region(spec, fd).map_err(refused)?;
        self.change_memory(request, next)?;
        Ok(Reply::Done)
    }

    /// Whether a region that is there may be added, and one that is not there removed: after a
    /// take-over, and always by a card with several queue pairs: QEMU before 8.0 sends these
    /// messages once for each.
    fn may_repeat_regions(&self) -> bool {
        let device = &self.port.device;
        let several_pairs = device.kind() == DeviceKind::Net && device.queue_count() > 2;
        self.may_be_repeated || several_pairs
    }

    /// Handles `REM_MEM_REG`: queues whose rings are in the region stop; the others go on without
    /// it.
    fn remove_region(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::RemMemReg;
        let spec = memory::parse_region(request, bytes)?;
        match self.memory.without_region(spec) {
            Ok(next) => self.change_memory(request, next)?,
            Err(_) if self.may_repeat_regions() => {}
            Err(e) => return Err(Fault::Refused(memory_error(request)(e))),
        }
        Ok(Reply::Done)
    }

    /// Handles `SET_LOG_BASE`. The reply is expected also without `need_reply`. The specification
    /// leaves its content open: QEMU looks at the header alone, crate `vhost` (Cloud Hypervisor)
    /// waits for the log's description.
    fn set_log_base(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let request = Request::SetLogBase;
        let log: Log = payload(request, bytes)?;
        let Some(fd) = fds.into_iter().next() else {
            return Err(misplaced(request, "no descriptor").into());
        };
        let next = self.memory.with_log(fd, log.size, log.offset).map_err(memory_error(request))?;
        self.change_memory(request, next)?;
        Ok(Reply::Body(log.as_bytes().to_vec()))
    }

    /// Makes `next` the session's memory. Queues whose rings are no longer there, or somewhere
    /// else, are stopped first (and started again by the caller where they can be).
    fn change_memory(&mut self, request: Request, next: MemoryTable) -> Result<(), Fault> {
        next.check_log().map_err(memory_error(request))?;
        let layout = self.negotiation.layout();
        let mut keeps_any = false;
        for index in 0..self.rings.vrings.len() {
            let vring = &self.rings.vrings[index];
            let (Some(running), Some(size), Some(addrs)) = (vring.running, vring.size, vring.addrs)
            else {
                continue;
            };
            if next.resolve(&addrs, size, layout) == Ok(running.addrs) {
                keeps_any = true;
            } else {
                self.rings.stop(index, layout);
            }
        }
        if keeps_any {
            self.port.device.update_memory(next.table().clone()).map_err(|source| {
                Fault::Fatal(VhostUserError::Device { message: request.message(), source })
            })?;
        }
        self.memory = next;
        Ok(())
    }
    /// Sends the answer that the front end waits for, if any; false when the port stopped
    /// meanwhile.
    fn answer(
        &self,
        request: Request,
        header: &Header,
        reply: Option<Reply>,
    ) -> Result<bool, VhostUserError> {
        let acks = self.negotiation.has_protocol(protocol::REPLY_ACK);
        let (body, fd) = match (request.shape().answer, reply) {
            (_, Some(Reply::Body(body))) => (body, None),
            (_, Some(Reply::BodyWithFd(body, fd))) => (body, Some(fd)),
            // "Uses zero length of payload to indicate an error".
            (Answer::Body, None) if request == Request::GetConfig => (Vec::new(), None),
            // The front end waits for an answer: a log of no bytes means that there is none.
            (Answer::Body, None) if request == Request::SetLogBase => {
                (vec![0; size_of::<Log>()], None)
            }
            // No body to give, and no other way to say no: the caller ends the session.
            (Answer::Body, _) => return Ok(true),
            (Answer::Ack, reply) if acks && header.needs_reply() => {
                (u64::from(reply.is_none()).to_ne_bytes().to_vec(), None)
            }
            (Answer::Ack, _) => return Ok(true),
        };
        let header = Header::reply(header.request, body.len() as u32);
        let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
        wire::send(self.socket.as_fd(), self.port.stop.as_fd(), &header, &body, &fds)
    }

    /// Ends the session: nothing of it is in flight afterwards. A session that the next daemon
    /// takes over stays in the holder as it was.
    fn finish(&mut self, end: &End) {
        let leave = matches!(end, End::Stopped) && self.saved.is_current;
        self.is_left = leave;
        // A region of our own goes with us, unless the holder has it.
        let has_front_end_region = self.rings.inflight.as_ref().is_some_and(|i| !i.is_private);
        self.port.device.session_ends(leave || has_front_end_region);
        self.rings.stop_all(self.negotiation.layout());
        self.port.device.set_notifier(None);
        self.port.device.connected(false);
        self.port.device.reset();
        if !leave && let Err(error) = self.port.session_store.forget(&self.port.name) {
            tracing::warn!(
                port = %self.port.name,
                "the holder still has a session that ended: {error}"
            );
        }
    }

    /// Writes the session's state into the port's status.
    pub fn describe(&self, status: &mut PortStatus) {
        let features = self.negotiation.feature_bits();
        status.features = self.negotiation.features;
        status.protocol_features = self.negotiation.protocol_features;
        status.packed = self.negotiation.layout() == queue::Layout::Packed;
        status.logging = self.memory.is_logging();
        status.held = self.saved.is_current;
        status.queues = self
            .rings
            .vrings
            .iter()
            .enumerate()
            .map(|(index, v)| QueueStatus {
                index: index as u16,
                size: v.size.unwrap_or(0),
                enabled: v.is_enabled(features),
                running: v.running.is_some(),
            })
            .collect();
        status.memory_regions = self
            .memory
            .regions
            .iter()
            .map(|(s, _)| RegionStatus { guest_addr: s.guest_addr, len_bytes: s.len_bytes })
            .collect();
    }

    /// Memory regions with their files.
    pub fn regions(&self) -> &[(RegionSpec, Arc<PeerFd>)] {
        &self.memory.regions
    }

    /// Likely reason why the front end left before any queue ran. QEMU closes the connection
    /// without a word when it was told of fewer queue pairs than it has.
    pub fn reason_to_leave(&self) -> String {
        let pairs = self.rings.vrings.len() / 2;
        if self.negotiation.keeps_device(&*self.port.device) {
            return format!(
                "the front end left; the port has queue_pairs = {pairs}: does the VMM \
                 ask for more (QEMU: queues=)?"
            );
        }
        "the front end left".to_owned()
    }

    /// Back-end channel as devices take it, when config changes may be announced.
    fn notifier(&self) -> Option<Arc<dyn ConfigNotifier>> {
        let config = self.negotiation.has_protocol(protocol::CONFIG);
        let channel = self.back_end.as_ref().filter(|_| config)?;
        Some(Arc::clone(channel) as Arc<dyn ConfigNotifier>)
    }
}

impl Drop for FrontEndSession {
    fn drop(&mut self) {
        if !self.is_left {
            self.socket.hang_up();
        }
    }
}

/// Whether a message may change the session: not those that only ask.
fn changes_state(request: Request) -> bool {
    !matches!(
        request,
        Request::GetFeatures
            | Request::GetProtocolFeatures
            | Request::GetQueueNum
            | Request::GetMaxMemSlots
            | Request::GetConfig
            | Request::GetStatus
            | Request::SendRarp
            | Request::SetLogFd
    )
}
