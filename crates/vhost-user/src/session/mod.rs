//! One connection with a front end: the state machine.
//!
//! A handler changes what the session knows and stops queues that must not run any more; then
//! [`Session::start_wanted`] brings up every queue that has all it needs; then the session is
//! saved; then the reply goes out; only then is the message taken off the socket.

mod doorbells;
mod features;
mod inflight;
mod memory;
mod regions;
mod rings;
mod save;
mod start;
mod vring;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use base::counter::QueueStats;
use base::event::Event;
use base::peer_fd::PeerFd;
use base::shm::SharedMemory;
use queue::health::PortHealth;
use queue::memory::RegionSpec;
use rustix::net::sockopt::set_socket_oobinline;

use crate::backend_channel::BackendChannel;
use crate::codec::{Answer, Header, Log, Request};
use crate::device::{ConfigNotifier, Device};
use crate::error::VhostUserError;
use crate::session_store::SessionStore;
use crate::share::VmShare;
use crate::status::{PortStatus, QueueStatus, RegionStatus};
use crate::wire::{self, Incoming, Received};

use inflight::Inflight;
use memory::MemoryTable;
use vring::{VringState, layout};

/// What all sessions of a port have in common.
pub(crate) struct Port {
    pub name: String,
    pub device: Arc<dyn Device>,
    pub stats: Vec<Arc<QueueStats>>,
    pub session_store: Arc<dyn SessionStore>,
    pub health: Arc<PortHealth>,
    /// What it has in common with the other ports of its VM: sessions that come again begin nothing anew.
    pub share: VmShare,
    /// Is rung when the port breaks.
    pub alarm: Event,
    /// Becomes readable when the port shall stop.
    pub stop: Event,
    /// Set before `stop` is rung, so that a flood of messages cannot hide it.
    pub stopping: AtomicBool,
    /// Times that a front end was made to wait.
    pub slowed: AtomicU64,
}

impl Port {
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// After a message with so many descriptors, or what is as much work: waits, but not longer than until the
    /// stop, if the VM's front ends have too much done.
    pub fn keep_pace(&self, fds: usize) {
        let Some(wait) = self.share.pace.note(fds) else { return };
        self.slowed.fetch_add(1, Ordering::Relaxed);
        // One that fails waits less.
        let _ = wire::wait_for(&[self.stop.as_fd()], Some(wait));
    }
}

/// Why a session ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The front end hung up.
    Closed,
    /// The port is to stop; the session may be taken over by the next daemon.
    Stopped,
    /// The front end broke the protocol, or the world failed.
    Failed(VhostUserError),
    /// A fault of ours; what it said.
    Panicked(String),
}

/// Why a message was not obeyed.
#[derive(Debug)]
enum Fault {
    /// The front end is told (when it asked) and the session goes on.
    Refused(VhostUserError),
    /// The front end is told (when it asked) and the session ends.
    Fatal(VhostUserError),
}

impl From<VhostUserError> for Fault {
    fn from(error: VhostUserError) -> Self {
        Self::Fatal(error)
    }
}

/// A handler's answer.
enum Reply {
    /// Zero, when the front end asked for it.
    Done,
    /// A body.
    Body(Vec<u8>),
    /// A body with a descriptor.
    BodyWithFd(Vec<u8>, OwnedFd),
}

impl Reply {
    fn u64(value: u64) -> Self {
        Self::Body(value.to_ne_bytes().to_vec())
    }
}

/// Device status: something went wrong that only a reset mends (virtio 1.2, 2.1).
const DEVICE_NEEDS_RESET: u8 = 0x40;

/// One connection.
pub(crate) struct Session {
    port: Arc<Port>,
    socket: PeerFd,
    slots: Option<Arc<SharedMemory>>,
    protocol_features: u64,
    /// As negotiated, with the session's own bits.
    features: Option<u64>,
    owned: bool,
    /// See [`Session::keeps_device`].
    asked_before_owning: bool,
    device_status: u8,
    mtu: Option<u16>,
    memory: MemoryTable,
    inflight: Option<Inflight>,
    backend: Option<Arc<BackendChannel>>,
    vrings: Vec<VringState>,
    /// The first message after a take-over may be one that the dead daemon had half done.
    may_be_repeated: bool,
    held: bool,
    /// The holder may have a state of this session, the newest or an older one.
    kept: bool,
    /// A message came.
    heard: bool,
    /// A queue ran.
    served: bool,
    /// The socket goes on in the holder.
    is_left: bool,
    /// Tells the port's owner what changed.
    publish: Box<dyn Fn(&Session) + Send>,
}

impl Session {
    /// A fresh session on a connected socket.
    pub fn new(
        port: Arc<Port>,
        socket: PeerFd,
        publish: Box<dyn Fn(&Session) + Send>,
    ) -> Result<Self, VhostUserError> {
        let queues = usize::from(port.device.queue_count());
        let slots = if port.session_store.is_persistent() && !port.device.wants_inflight() {
            let len_bytes = queues.max(1) * queue::slot::SLOT_LEN_BYTES;
            let shm = SharedMemory::new("millrace-positions", len_bytes)
                .map_err(VhostUserError::std_io("making the positions file"))?;
            Some(Arc::new(shm))
        } else {
            None
        };
        port.health.reset();
        let mut session = Self::blank(port, socket, publish);
        session.slots = slots;
        Ok(session)
    }

    fn blank(port: Arc<Port>, socket: PeerFd, publish: Box<dyn Fn(&Session) + Send>) -> Self {
        let queues = usize::from(port.device.queue_count());
        let memory = MemoryTable::new(Arc::clone(&port.share.memory));
        Self {
            port,
            socket,
            slots: None,
            protocol_features: 0,
            features: None,
            owned: false,
            asked_before_owning: false,
            device_status: 0,
            mtu: None,
            memory,
            inflight: None,
            backend: None,
            vrings: (0..queues).map(|_| VringState::default()).collect(),
            may_be_repeated: false,
            held: false,
            kept: false,
            heard: false,
            served: false,
            is_left: false,
            publish,
        }
    }

    /// Whether the front end said anything in this session.
    pub fn was_heard(&self) -> bool {
        self.heard
    }

    /// Whether a queue ran in this session.
    pub fn has_served(&self) -> bool {
        self.served
    }

    /// Serves until the end. `idle` waits until the socket is readable (or the stop event is rung)
    /// and may do other things meanwhile.
    pub fn run(
        &mut self,
        mut idle: impl FnMut(BorrowedFd<'_>) -> Result<(), VhostUserError>,
    ) -> End {
        self.save();
        self.port.device.connected(true);
        (self.publish)(self);
        // A byte out of band would lie in front of no message, and wake us without an end.
        let _ = set_socket_oobinline(&self.socket, true);
        let mut was_idle = false;
        let end = loop {
            if self.port.is_stopping() {
                break End::Stopped;
            }
            self.tell_if_broken();
            match wire::receive(self.socket.as_fd(), self.port.stop.as_fd()) {
                Ok(Received::Nothing) => {
                    // Whatever wakes it for nothing has its pace as well.
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

    /// Has the driver look at the device's status once the port is broken: see [`Session::status`].
    fn tell_if_broken(&self) {
        if self.port.alarm.drain()
            && !self.port.health.is_live()
            && let Some(notifier) = self.notifier()
        {
            // The err descriptor and the log say so in any case.
            let _ = notifier.config_changed();
        }
    }

    /// The device's status: what the front end set, and `DEVICE_NEEDS_RESET` while the port is broken (virtio
    /// 1.2, 2.1.2).
    fn status(&self) -> u8 {
        let needs_reset = if self.port.health.is_live() { 0 } else { DEVICE_NEEDS_RESET };
        self.device_status & !DEVICE_NEEDS_RESET | needs_reset
    }

    /// One message from arrival to consumption; false when the port stopped meanwhile.
    fn serve(&mut self, mut message: Incoming) -> Result<bool, VhostUserError> {
        self.heard = true;
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
            tracing::warn!(port = %self.port.name, left_out, "refused: {error}");
        }
        // Whoever has the answer also finds the new status.
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
        self.check_negotiated(request)?;
        let reply = self.dispatch(request, payload, fds)?;
        if changes_state(request) {
            let ready = self.prepare_wanted(request)?;
            // Saved as running before it runs: whatever the device does from now on, the next
            // daemon looks for the position where the device keeps it.
            self.save();
            self.start_prepared(ready);
        }
        Ok(reply)
    }

    fn dispatch(
        &mut self,
        request: Request,
        payload: &[u8],
        fds: Vec<PeerFd>,
    ) -> Result<Reply, Fault> {
        match request {
            Request::GetFeatures => Ok(Reply::u64(self.offered_features())),
            Request::SetFeatures => self.set_features(payload),
            Request::GetProtocolFeatures => Ok(self.get_protocol_features()),
            Request::SetProtocolFeatures => self.set_protocol_features(payload),
            Request::SetOwner => self.set_owner(),
            Request::ResetOwner => self.reset_owner(),
            Request::GetQueueNum => Ok(Reply::u64(self.queue_num())),
            Request::SendRarp => self.send_rarp(payload),
            Request::NetSetMtu => self.set_mtu(payload),
            Request::SetBackendReqFd => self.set_backend_channel(fds),
            Request::GetConfig => self.get_config(payload),
            Request::SetConfig => self.set_config(payload),
            Request::ResetDevice => self.reset_device(),
            Request::SetStatus => self.set_status(payload),
            Request::GetStatus => Ok(Reply::u64(u64::from(self.status()))),
            Request::SetMemTable => self.set_mem_table(payload, fds),
            Request::GetMaxMemSlots => Ok(Reply::u64(base::limits::MAX_MEMORY_REGIONS as u64)),
            Request::AddMemReg => self.add_region(payload, fds),
            Request::RemMemReg => self.remove_region(payload),
            Request::SetLogBase => self.set_log_base(payload, fds),
            // Optional in the specification: the descriptor is closed, nobody is told of log
            // changes.
            Request::SetLogFd => Ok(Reply::Done),
            Request::GetInflightFd => self.get_inflight(payload),
            Request::SetInflightFd => self.set_inflight(payload, fds),
            Request::SetVringNum => self.set_vring_num(payload),
            Request::SetVringAddr => self.set_vring_addr(payload),
            Request::SetVringBase => self.set_vring_base(payload),
            Request::GetVringBase => self.get_vring_base(payload),
            Request::SetVringEnable => self.set_vring_enable(payload),
            Request::SetVringKick => self.set_vring_kick(payload, fds),
            Request::SetVringCall => self.set_vring_call(payload, fds),
            Request::SetVringErr => self.set_vring_err(payload, fds),
        }
    }

    /// Sends what the front end waits for, if anything; false when the port stopped meanwhile.
    fn answer(
        &self,
        request: Request,
        header: &Header,
        reply: Option<Reply>,
    ) -> Result<bool, VhostUserError> {
        let acks = self.protocol_features & crate::codec::protocol::REPLY_ACK != 0;
        let (body, fd) = match (request.shape().answer, reply) {
            (_, Some(Reply::Body(body))) => (body, None),
            (_, Some(Reply::BodyWithFd(body, fd))) => (body, Some(fd)),
            // "Uses zero length of payload to indicate an error".
            (Answer::Body, None) if request == Request::GetConfig => (Vec::new(), None),
            // Whoever waits for an answer has one: a log of no bytes is none.
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

    /// The end: nothing of the session is in flight afterwards. A session that the next daemon
    /// takes over stays in the holder as it was.
    fn finish(&mut self, end: &End) {
        let leave = matches!(end, End::Stopped) && self.held;
        self.is_left = leave;
        // A region of our own goes with us, unless the holder has it.
        let is_kept = self.inflight.as_ref().is_some_and(|inflight| !inflight.private);
        self.port.device.session_ends(leave || is_kept);
        self.stop_all();
        self.port.device.set_notifier(None);
        self.port.device.connected(false);
        self.port.device.reset();
        if !leave && let Err(error) = self.port.session_store.forget(&self.port.name) {
            tracing::warn!(port = %self.port.name, "the holder still has a session that ended: {error}");
        }
    }

    /// Writes what the session is into the port's status.
    pub fn describe(&self, status: &mut PortStatus) {
        let features = self.features.unwrap_or(0);
        status.features = self.features;
        status.protocol_features = self.protocol_features;
        status.packed = layout(features) == queue::Layout::Packed;
        status.logging = self.memory.is_logging();
        status.held = self.held;
        status.queues = self
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

    /// The memory table, with the files.
    pub fn regions(&self) -> &[(RegionSpec, Arc<PeerFd>)] {
        &self.memory.regions
    }

    /// The channel as devices see it, when config changes may be told.
    fn notifier(&self) -> Option<Arc<dyn ConfigNotifier>> {
        let config = self.protocol_features & crate::codec::protocol::CONFIG != 0;
        let channel = self.backend.as_ref().filter(|_| config)?;
        Some(Arc::clone(channel) as Arc<dyn ConfigNotifier>)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.is_left {
            self.socket.hang_up();
        }
    }
}

/// False for messages that only ask.
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
