//! Queues of a session: messages about them, and their way on and off the sidecores.

use std::sync::Arc;

use base::doorbell::Doorbell;
use base::limits::MAX_QUEUE_SIZE;
use base::peer_fd::PeerFd;
use base::shm::SharedMemory;
use queue::slot::PositionSlot;
use queue::vring::VringParts;
use queue::{Layout, Position, Queue, RingAddrs, RingError, RingSetup, Vring};
use zerocopy::IntoBytes;

use super::inflight::{self, Inflight};
use super::memory::MemoryTable;
use super::outcome::{Fault, Reply, misplaced};
use super::vring::{Kick, RunningRing, VringState, layout};
use crate::codec::{
    Request, VRING_F_LOG, VRING_NO_FD, VringAddr, VringState as StateMessage, feature, payload,
};
use crate::device::DeviceKind;
use crate::error::VhostUserError;
use crate::port_context::PortContext;

/// Bits of the queue's index in messages that bring eventfds.
const INDEX_MASK: u64 = 0xff;

/// Queues, and the places where their positions outlive the daemon.
pub(super) struct Rings {
    port: Arc<PortContext>,
    pub vrings: Vec<VringState>,
    /// Position slots, one per queue, for devices that complete in order.
    pub slots: Option<Arc<SharedMemory>>,
    pub inflight: Option<Inflight>,
}

/// Makes the error of a queue size that cannot be.
fn bad_size(num: u32, rule: String) -> Fault {
    let (message, value) = (Request::SetVringNum.message(), u64::from(num));
    VhostUserError::BadField { message, field: "size", value, rule }.into()
}

impl Rings {
    /// Makes the queues of `port`, none of which runs.
    pub fn new(port: Arc<PortContext>) -> Self {
        let queues = usize::from(port.device.queue_count());
        let vrings = (0..queues).map(|_| VringState::default()).collect();
        Self { port, vrings, slots: None, inflight: None }
    }

    pub fn is_any_running(&self) -> bool {
        self.vrings.iter().any(|v| v.running.is_some())
    }

    /// Checks a queue index from the wire before it is narrowed.
    fn index(&self, request: Request, index: u64) -> Result<usize, VhostUserError> {
        match usize::try_from(index) {
            Ok(index) if index < self.vrings.len() => Ok(index),
            _ => Err(VhostUserError::BadField {
                message: request.message(),
                field: "queue",
                value: index,
                rule: self.queue_rule(index),
            }),
        }
    }

    /// Limit of queue indices, for an error about `index`: for a network device in the unit of its
    /// configuration, queue pairs.
    fn queue_rule(&self, index: u64) -> String {
        let rings = self.vrings.len();
        match self.port.device.kind() {
            DeviceKind::Net => format!(
                "the front end has {} queue pairs or more, this port has {} (queue_pairs)",
                index / 2 + 1,
                rings / 2,
            ),
            _ => format!("this port has {rings}"),
        }
    }

    fn parse_state(&self, request: Request, bytes: &[u8]) -> Result<(usize, u32), VhostUserError> {
        let state: StateMessage = payload(request, bytes)?;
        Ok((self.index(request, u64::from(state.index))?, state.num))
    }

    fn check_stopped(&self, request: Request, index: usize) -> Result<(), VhostUserError> {
        if self.vrings[index].running.is_some() {
            return Err(misplaced(request, format!("queue {index} is running")));
        }
        Ok(())
    }

    /// Handles `SET_VRING_NUM`.
    pub fn set_num(&mut self, bytes: &[u8], features: Option<u64>) -> Result<Reply, Fault> {
        let request = Request::SetVringNum;
        let (index, num) = self.parse_state(request, bytes)?;
        let size = match u16::try_from(num) {
            Ok(size) if (1..=MAX_QUEUE_SIZE).contains(&size) => size,
            _ => return Err(bad_size(num, format!("1 to {MAX_QUEUE_SIZE}"))),
        };
        // Before the features are known, the start of the queue finds it.
        let is_split = features.is_some_and(|bits| layout(bits) == Layout::Split);
        if is_split && !size.is_power_of_two() {
            let rule = format!("a power of two for a split ring, 1 to {MAX_QUEUE_SIZE}");
            return Err(bad_size(num, rule));
        }
        if self.vrings[index].size != Some(size) {
            self.check_stopped(request, index)?;
            self.vrings[index].size = Some(size);
        }
        Ok(Reply::Done)
    }

    /// Handles `SET_VRING_ADDR`. The same addresses with another log flag are fine while the queue
    /// runs (a migration begins or ends); other addresses are not.
    pub fn set_addr(
        &mut self,
        bytes: &[u8],
        memory: &MemoryTable,
        layout: Layout,
    ) -> Result<Reply, Fault> {
        let request = Request::SetVringAddr;
        let addr: VringAddr = payload(request, bytes)?;
        let index = self.index(request, u64::from(addr.index))?;
        if addr.flags & !VRING_F_LOG != 0 {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field: "flags",
                value: u64::from(addr.flags),
                rule: format!("only {VRING_F_LOG:#x} (log) is known"),
            }
            .into());
        }
        let vring = &self.vrings[index];
        let same =
            |old: VringAddr| (old.desc, old.used, old.avail) == (addr.desc, addr.used, addr.avail);
        if !vring.addrs.is_some_and(same) {
            self.check_stopped(request, index)?;
            let size = vring.size.unwrap_or(1);
            memory.resolve(&addr, size, layout).map_err(|part| {
                misplaced(request, format!("the {part} of queue {index} is not in the VM's memory"))
            })?;
        }
        let vring = &mut self.vrings[index];
        vring.addrs = Some(addr);
        vring.is_stale |= vring.running.is_some_and(|r| r.log_used_addr != vring.log_used_addr());
        Ok(Reply::Done)
    }

    /// Handles `SET_VRING_BASE`.
    pub fn set_base(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::SetVringBase;
        let (index, base) = self.parse_state(request, bytes)?;
        self.check_stopped(request, index)?;
        self.vrings[index].base = Some(base);
        Ok(Reply::Done)
    }

    /// Handles `GET_VRING_BASE`: stops the ring, which stays stopped until the next kick
    /// descriptor.
    pub fn get_base(&mut self, bytes: &[u8], layout: Layout) -> Result<Reply, Fault> {
        let request = Request::GetVringBase;
        let (index, _) = self.parse_state(request, bytes)?;
        self.stop(index, layout);
        let vring = &mut self.vrings[index];
        vring.kick = Kick::Unset;
        let state = StateMessage { index: index as u32, num: vring.base.unwrap_or(0) };
        if !self.is_any_running() {
            self.finish_reset();
        }
        Ok(Reply::Body(state.as_bytes().to_vec()))
    }

    /// Handles `SET_VRING_ENABLE`, which QEMU's network device sends before `SET_FEATURES`.
    pub fn set_enable(&mut self, bytes: &[u8], layout: Layout) -> Result<Reply, Fault> {
        let request = Request::SetVringEnable;
        let (index, num) = self.parse_state(request, bytes)?;
        if num > 1 {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field: "enable",
                value: u64::from(num),
                rule: "0 or 1".to_owned(),
            }
            .into());
        }
        self.vrings[index].enabled = Some(num == 1);
        if num == 0 {
            self.stop(index, layout);
        }
        Ok(Reply::Done)
    }

    fn parse_doorbell(
        &self,
        request: Request,
        bytes: &[u8],
        fds: Vec<PeerFd>,
    ) -> Result<(usize, Option<Doorbell>), VhostUserError> {
        let word: u64 = payload(request, bytes)?;
        if word & !(INDEX_MASK | VRING_NO_FD) != 0 {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field: "queue and flags",
                value: word,
                rule: format!("bits outside {:#x} are reserved", INDEX_MASK | VRING_NO_FD),
            });
        }
        let index = self.index(request, word & INDEX_MASK)?;
        let bell = fds.into_iter().next().map(Doorbell::from_peer).transpose();
        let bell = bell.map_err(|source| VhostUserError::BadDoorbell {
            message: request.message(),
            port: self.port.name.clone(),
            queue: index,
            source,
        })?;
        Ok((index, bell))
    }

    /// Handles `SET_VRING_KICK`.
    pub fn set_kick(
        &mut self,
        bytes: &[u8],
        fds: Vec<PeerFd>,
        memory: &MemoryTable,
    ) -> Result<Reply, Fault> {
        let request = Request::SetVringKick;
        let (index, bell) = self.parse_doorbell(request, bytes, fds)?;
        if memory.is_empty() {
            let why = format!("queue {index} is kicked before there is any memory");
            return Err(misplaced(request, why).into());
        }
        let vring = &mut self.vrings[index];
        vring.kick = bell.map_or(Kick::Polled, Kick::Event);
        vring.is_stale |= vring.running.is_some();
        Ok(Reply::Done)
    }

    /// Handles `SET_VRING_CALL`, which comes while the queue runs whenever the guest masks or
    /// unmasks an interrupt.
    pub fn set_call(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let (index, bell) = self.parse_doorbell(Request::SetVringCall, bytes, fds)?;
        let vring = &mut self.vrings[index];
        vring.call = bell;
        vring.is_stale |= vring.running.is_some();
        Ok(Reply::Done)
    }

    /// Handles `SET_VRING_ERR`.
    pub fn set_err(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let (index, bell) = self.parse_doorbell(Request::SetVringErr, bytes, fds)?;
        let vring = &mut self.vrings[index];
        vring.err = bell;
        vring.is_stale |= vring.running.is_some();
        Ok(Reply::Done)
    }

    fn parse_inflight(
        &self,
        request: Request,
        bytes: &[u8],
    ) -> Result<crate::codec::Inflight, VhostUserError> {
        let message = inflight::parse_message(request, bytes, self.vrings.len())?;
        if self.is_any_running() {
            return Err(misplaced(request, "inflight region changed while queues are running"));
        }
        Ok(message)
    }

    /// Handles `GET_INFLIGHT_FD` with a new region; QEMU asks for one at the first start of a
    /// driver.
    pub fn get_inflight(&mut self, bytes: &[u8], layout: Layout) -> Result<Reply, Fault> {
        let request = Request::GetInflightFd;
        let mut message = self.parse_inflight(request, bytes)?;
        let (num_queues, queue_size) = (message.num_queues, message.queue_size);
        let inflight = Inflight::create(request, num_queues, queue_size, layout, false)?;
        let (fd, size, offset) = inflight.region.as_parts();
        let fd = fd
            .try_clone_to_owned()
            .map_err(VhostUserError::std_io("duplicating the inflight descriptor"))?;
        (message.mmap_size, message.mmap_offset) = (size, offset);
        self.inflight = Some(inflight);
        Ok(Reply::BodyWithFd(message.as_bytes()[..bytes.len()].to_vec(), fd))
    }

    /// Handles `SET_INFLIGHT_FD` with the region that the front end kept over our death.
    pub fn set_inflight(
        &mut self,
        bytes: &[u8],
        fds: Vec<PeerFd>,
        layout: Layout,
    ) -> Result<Reply, Fault> {
        let request = Request::SetInflightFd;
        let message = self.parse_inflight(request, bytes)?;
        let Some(fd) = fds.into_iter().next() else {
            return Err(misplaced(request, "no descriptor").into());
        };
        self.inflight = Some(Inflight::open(&message, fd, layout, false)?);
        Ok(Reply::Done)
    }

    /// Makes a region of our own for a device that completes out of order and a front end without
    /// one; the holder keeps it. Without a holder it would die with us, so there is none.
    fn provide_inflight(&mut self, request: Request, layout: Layout) -> Result<(), Fault> {
        if let Some(inflight) = &self.inflight {
            if inflight.layout == layout {
                return Ok(());
            }
            if !inflight.is_private {
                let why = "the inflight region was made for the other ring format";
                return Err(misplaced(request, why).into());
            }
        }
        if !self.port.device.wants_inflight() || !self.port.session_store.is_persistent() {
            return Ok(());
        }
        let sizes = self.vrings.iter().filter_map(|v| v.size);
        let (num_queues, queue_size) = (self.vrings.len() as u16, sizes.max().unwrap_or(1));
        self.inflight = Some(Inflight::create(request, num_queues, queue_size, layout, true)?);
        Ok(())
    }

    /// Takes a queue off its sidecore, if it is on one, and records where it stopped.
    pub fn stop(&mut self, index: usize, layout: Layout) {
        let vring = &mut self.vrings[index];
        vring.is_stale = false;
        if vring.running.take().is_none() {
            return;
        }
        match self.port.device.stop_queue(index as u16) {
            Ok(Some(stopped)) => {
                vring.base = Some(stopped.queue.position().to_vring_base(layout));
            }
            Ok(None) => {}
            Err(error) => self.port.health.fail(Some(index as u16), &error),
        }
    }

    pub fn stop_all(&mut self, layout: Layout) {
        for index in 0..self.vrings.len() {
            self.stop(index, layout);
        }
    }

    /// Stops all queues until the next kick descriptors.
    pub fn stop_and_forget_kicks(&mut self, layout: Layout) {
        self.stop_all(layout);
        for vring in &mut self.vrings {
            vring.kick = Kick::Unset;
        }
    }

    /// Ends a reset: the driver (or its VMM) has let go of all rings, so a broken port is whole
    /// again, and nothing is in flight.
    pub fn finish_reset(&mut self) {
        if !self.port.health.is_live() {
            self.port.health.reset();
        }
        if self.inflight.as_ref().is_some_and(|i| i.is_private) {
            self.inflight = None;
        }
    }

    /// Makes ready every queue that has all it needs and does not run (or runs with an old
    /// doorbell); marks it as running. A broken port starts nothing.
    pub fn prepare_wanted(
        &mut self,
        request: Request,
        features: Option<u64>,
        memory: &MemoryTable,
    ) -> Result<Vec<Vring>, Fault> {
        let Some(features) = features else { return Ok(Vec::new()) };
        if !self.port.health.is_live() {
            return Ok(Vec::new());
        }
        let layout = layout(features);
        let mut ready = Vec::new();
        for index in 0..self.vrings.len() {
            if self.vrings[index].is_stale {
                self.stop(index, layout);
            }
            let vring = &self.vrings[index];
            if vring.running.is_some() || !vring.is_wanted(features) {
                continue;
            }
            let (Some(size), Some(addrs)) = (vring.size, vring.addrs) else { continue };
            // Rings outside memory wait for the region to come (back).
            let Ok(addrs) = memory.resolve(&addrs, size, layout) else { continue };
            self.provide_inflight(request, layout)?;
            self.warn_of_lost_pages(memory);
            match self.build(index, addrs, features, memory, false) {
                Ok(built) => ready.push(built),
                Err(error) => self.break_port(index, &error),
            }
        }
        Ok(ready)
    }

    /// Logs that a queue starts without the dirty log that its driver negotiated. QEMU turns
    /// logging on before it gives the log, but starts no queue in between.
    fn warn_of_lost_pages(&self, memory: &MemoryTable) {
        if memory.wants_logging()
            && !memory.is_logging()
            && let Some(left_out) = self.port.health.log().admit()
        {
            tracing::warn!(
                port = %self.port.name,
                left_out,
                "a queue starts with VHOST_F_LOG_ALL and without a log: pages that it changes are \
                 lost to a migration until SET_LOG_BASE"
            );
        }
    }

    /// Puts prepared queues on their sidecores. Returns whether any of them runs.
    pub fn start_prepared(&mut self, ready: Vec<Vring>) -> bool {
        let mut is_any_started = false;
        for vring in ready {
            let index = usize::from(vring.parts.index);
            if let Err(error) = self.port.device.start_queue(vring) {
                self.vrings[index].running = None;
                self.break_port(index, &error);
            } else {
                is_any_started = true;
            }
        }
        is_any_started
    }

    /// Breaks the port for a ring that cannot run, not the session: the VMM hears of it on the err
    /// descriptor.
    fn break_port(&self, index: usize, error: &dyn std::fmt::Display) {
        self.port.health.fail(Some(index as u16), error);
        if let Some(err) = &self.vrings[index].err
            && let Err(error) = err.ring()
        {
            tracing::warn!(
                port = %self.port.name,
                "err descriptor of queue {index} not rung: {error}"
            );
        }
    }

    /// Builds a queue from the front end's settings and marks it as running. `resume`: an earlier
    /// daemon ran it, and its position is in the slot, the inflight region or the ring.
    pub fn build(
        &mut self,
        index: usize,
        addrs: RingAddrs,
        features: u64,
        memory: &MemoryTable,
        resume: bool,
    ) -> Result<Vring, VhostUserError> {
        let ring_error = |source: RingError| VhostUserError::Ring {
            message: Request::SetVringKick.message(),
            source,
        };
        let slot = self.slots.as_ref().and_then(|s| PositionSlot::new(s.clone(), index));
        let setup = setup(&self.vrings[index], addrs, features);
        let table = memory.table();
        let queue = match &slot {
            Some(slot) if resume => Queue::resume(table.clone(), setup, slot),
            _ => self
                .start_position(index, table, &setup, resume)
                .and_then(|start| Queue::new(table.clone(), RingSetup { start, ..setup })),
        }
        .map_err(ring_error)?;
        let vring = &self.vrings[index];
        let inflight = self.inflight_of(index);
        let parts = VringParts {
            index: index as u16,
            kick: clone_kick(vring)?,
            call: clone_doorbell(vring.call.as_ref())?,
            err: clone_doorbell(vring.err.as_ref())?,
            stats: self.port.stats[index].clone(),
            health: self.port.health.clone(),
            slot,
            inflight: inflight.map(|i| i.region.clone()),
        };
        let built = Vring::new(queue, parts).map_err(ring_error)?;
        let log_used_addr = setup.log_used_addr;
        self.vrings[index].running = Some(RunningRing { addrs, log_used_addr });
        Ok(built)
    }

    /// Inflight region, if it has a part for this queue.
    fn inflight_of(&self, index: usize) -> Option<&Inflight> {
        self.inflight.as_ref().filter(|i| index < usize::from(i.num_queues))
    }

    /// Position at which a queue begins: behind the last completed request, which a split ring has
    /// in its memory (the used index). Requests that an earlier back end took and did not complete
    /// are taken again: from the ring by a device that completes in order, else from the inflight
    /// region.
    ///
    /// `SET_VRING_BASE` counts where neither is there. Front ends that give the region do not know
    /// better than it: Cloud Hypervisor names the available index, behind requests that nobody
    /// took.
    fn start_position(
        &self,
        index: usize,
        table: &queue::GuestMemory,
        setup: &RingSetup,
        resume: bool,
    ) -> Result<Position, RingError> {
        let mut start = setup.start;
        start.used = Queue::read_used_index(table, setup)?;
        let in_order = !self.port.device.wants_inflight();
        let is_tracked = self.inflight_of(index).is_some();
        let has_base = self.vrings[index].base.is_some();
        if resume || in_order || is_tracked || !has_base {
            (start.avail, start.avail_wrap) = (start.used, start.used_wrap);
        }
        Ok(start)
    }
}

/// Makes the file of position slots, where the store saves sessions and the device needs it.
pub(super) fn create_slots(
    port: &PortContext,
) -> Result<Option<Arc<SharedMemory>>, VhostUserError> {
    if !port.session_store.is_persistent() || port.device.wants_inflight() {
        return Ok(None);
    }
    let len_bytes = usize::from(port.device.queue_count()).max(1) * queue::slot::SLOT_LEN_BYTES;
    let shm = SharedMemory::new("millrace-positions", len_bytes)
        .map_err(VhostUserError::std_io("making the positions file"))?;
    Ok(Some(Arc::new(shm)))
}

fn setup(vring: &VringState, addrs: RingAddrs, features: u64) -> RingSetup {
    let layout = layout(features);
    RingSetup {
        size: vring.size.unwrap_or(0),
        layout,
        event_idx: features & feature::EVENT_IDX != 0,
        in_order: features & feature::IN_ORDER != 0,
        indirect: features & feature::INDIRECT_DESC != 0,
        addrs,
        start: Position::from_vring_base(layout, vring.base.unwrap_or(0)),
        log_used_addr: vring.log_used_addr(),
    }
}

fn clone_doorbell(bell: Option<&Doorbell>) -> Result<Option<Doorbell>, VhostUserError> {
    bell.map(Doorbell::try_clone)
        .transpose()
        .map_err(VhostUserError::std_io("duplicating an eventfd"))
}

fn clone_kick(vring: &VringState) -> Result<Option<Doorbell>, VhostUserError> {
    match &vring.kick {
        Kick::Event(bell) => clone_doorbell(Some(bell)),
        Kick::Polled | Kick::Unset => Ok(None),
    }
}
