//! Queues on and off their sidecores.

use base::doorbell::Doorbell;
use queue::slot::PositionSlot;
use queue::vring::VringParts;
use queue::{Position, Queue, RingAddrs, RingError, RingSetup, Vring};

use super::inflight::Inflight;
use super::vring::{Kick, Running, VringState, layout};
use super::{Fault, Session};
use crate::codec::{Request, feature};
use crate::error::VhostUserError;

impl Session {
    pub(super) fn is_any_running(&self) -> bool {
        self.vrings.iter().any(|v| v.running.is_some())
    }

    /// Takes a queue off its sidecore, if it is on one; remembers where it stopped.
    pub(super) fn stop(&mut self, index: usize) {
        let layout = layout(self.features.unwrap_or(0));
        let vring = &mut self.vrings[index];
        vring.stale = false;
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

    pub(super) fn stop_all(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
        }
    }

    /// The driver (or its VMM) has let go of all rings: what was broken is forgiven, and nothing is
    /// in flight.
    pub(super) fn rings_were_reset(&mut self) {
        if !self.port.health.is_live() {
            self.port.health.reset();
        }
        if self.inflight.as_ref().is_some_and(|i| i.private) {
            self.inflight = None;
        }
    }

    /// Makes ready every queue that has all it needs and does not run (or runs with an old
    /// doorbell); marks it as running. A broken port starts nothing.
    pub(super) fn prepare_wanted(&mut self, request: Request) -> Result<Vec<Vring>, Fault> {
        let Some(features) = self.features else { return Ok(Vec::new()) };
        if !self.port.health.is_live() {
            return Ok(Vec::new());
        }
        let mut ready = Vec::new();
        for index in 0..self.vrings.len() {
            if self.vrings[index].stale {
                self.stop(index);
            }
            let vring = &self.vrings[index];
            if vring.running.is_some() || !vring.is_wanted(features) {
                continue;
            }
            let (Some(size), Some(addrs)) = (vring.size, vring.addrs) else { continue };
            // Rings outside memory wait for the region to come (back).
            let Ok(addrs) = self.memory.resolve(&addrs, size, layout(features)) else { continue };
            self.provide_inflight(request)?;
            self.warn_of_lost_pages();
            match self.build(index, addrs, false) {
                Ok(built) => ready.push(built),
                Err(error) => self.break_port(index, &error),
            }
        }
        Ok(ready)
    }

    /// QEMU turns logging on before it gives the log, but starts no queue in between.
    fn warn_of_lost_pages(&self) {
        if self.memory.wants_logging()
            && !self.memory.is_logging()
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

    pub(super) fn start_prepared(&mut self, ready: Vec<Vring>) {
        for vring in ready {
            let index = usize::from(vring.parts.index);
            if let Err(error) = self.port.device.start_queue(vring) {
                self.vrings[index].running = None;
                self.break_port(index, &error);
            } else {
                self.served = true;
            }
        }
    }

    /// A ring that cannot run breaks the port, not the session: the VMM hears of it on the err
    /// descriptor.
    fn break_port(&self, index: usize, error: &dyn std::fmt::Display) {
        self.port.health.fail(Some(index as u16), error);
        if let Some(err) = &self.vrings[index].err
            && let Err(error) = err.ring()
        {
            tracing::warn!(port = %self.port.name, "queue {index}: err descriptor: {error}");
        }
    }

    /// A vring from what the front end said. `resume`: an earlier daemon ran it, and the slot, the
    /// inflight region or the ring knows where it stood.
    pub(super) fn build(
        &mut self,
        index: usize,
        addrs: RingAddrs,
        resume: bool,
    ) -> Result<Vring, VhostUserError> {
        let ring_error = |source: RingError| VhostUserError::Ring {
            message: Request::SetVringKick.message(),
            source,
        };
        let slot = self.slots.as_ref().and_then(|s| PositionSlot::new(s.clone(), index));
        let setup = self.setup(index, addrs);
        let memory = self.memory.table().clone();
        let queue = match &slot {
            Some(slot) if resume => Queue::resume(memory, setup, slot),
            _ => self
                .start_position(index, &setup, resume)
                .and_then(|start| Queue::new(memory, RingSetup { start, ..setup })),
        }
        .map_err(ring_error)?;
        let vring = &self.vrings[index];
        let inflight = self.inflight_of(index);
        let parts = VringParts {
            index: index as u16,
            kick: kick_of(vring)?,
            call: clone_of(vring.call.as_ref())?,
            err: clone_of(vring.err.as_ref())?,
            stats: self.port.stats[index].clone(),
            health: self.port.health.clone(),
            slot,
            inflight: inflight.map(|i| i.region.clone()),
        };
        let built = Vring::new(queue, parts).map_err(ring_error)?;
        let log_used_addr = setup.log_used_addr;
        self.vrings[index].running = Some(Running { addrs, log_used_addr });
        Ok(built)
    }

    fn setup(&self, index: usize, addrs: RingAddrs) -> RingSetup {
        let features = self.features.unwrap_or(0);
        let vring = &self.vrings[index];
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

    /// The inflight region, if it has a part for this queue.
    fn inflight_of(&self, index: usize) -> Option<&Inflight> {
        self.inflight.as_ref().filter(|i| index < usize::from(i.num_queues))
    }

    /// Where a queue begins: behind the last completed request, which a split ring has in its memory
    /// (the used index). What an earlier back end took and did not complete is taken again: from the
    /// ring by a device that completes in order, else from the inflight region.
    ///
    /// `SET_VRING_BASE` counts where neither is there. Front ends that give the region do not know
    /// better than it: Cloud Hypervisor names the available index, behind requests that nobody took.
    fn start_position(
        &self,
        index: usize,
        setup: &RingSetup,
        resume: bool,
    ) -> Result<Position, RingError> {
        let mut start = setup.start;
        start.used = Queue::read_used_index(self.memory.table(), setup)?;
        let in_order = !self.port.device.wants_inflight();
        let is_tracked = self.inflight_of(index).is_some();
        let has_base = self.vrings[index].base.is_some();
        if resume || in_order || is_tracked || !has_base {
            (start.avail, start.avail_wrap) = (start.used, start.used_wrap);
        }
        Ok(start)
    }
}

fn clone_of(bell: Option<&Doorbell>) -> Result<Option<Doorbell>, VhostUserError> {
    bell.map(Doorbell::try_clone)
        .transpose()
        .map_err(VhostUserError::std_io("duplicating an eventfd"))
}

fn kick_of(vring: &VringState) -> Result<Option<Doorbell>, VhostUserError> {
    match &vring.kick {
        Kick::Event(bell) => clone_of(Some(bell)),
        Kick::Polled | Kick::Unset => Ok(None),
    }
}
