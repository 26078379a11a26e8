//! Saving of a session in the store, and its restoration by the next daemon.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use base::doorbell::Doorbell;
use base::peer_fd::PeerFd;
use base::shm::SharedMemory;
use queue::Layout;
use queue::memory::RegionSpec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::inflight::Inflight;
use super::outcome::{End, misplaced};
use super::vring::{Kick, VringState};
use super::{FrontEndSession, Publisher};
use crate::backend_channel::BackendChannel;
use crate::codec::{Inflight as InflightMessage, Request, VringAddr, feature, protocol};
use crate::device::DeviceKind;
use crate::error::VhostUserError;
use crate::port_context::PortContext;
use crate::session_store::{
    SAVED_VERSION, SavedAddrs, SavedInflight, SavedRegion, SavedSession, SavedVring,
};
use crate::wire::retry;

impl FrontEndSession {
    /// Saves the session for the next daemon. A store that fails costs the session its life after
    /// the daemon's, not its life: an older state is taken away, since the next daemon would go on
    /// with memory and rings that are no longer so.
    pub(super) fn save(&mut self) {
        if !self.port.session_store.is_persistent() {
            return;
        }
        let state = self.saved_state();
        let result = self.port.session_store.save(&self.port.name, &state, &self.saved_fds());
        if let Err(error) = &result {
            tracing::warn!(port = %self.port.name, "session not saved: {error}");
        }
        self.saved.is_current = result.is_ok();
        // A save that failed on the way may have arrived.
        let may_have_existed = std::mem::replace(&mut self.saved.may_exist, true);
        if !self.saved.is_current && may_have_existed {
            match self.port.session_store.forget(&self.port.name) {
                Ok(()) => self.saved.may_exist = false,
                Err(error) => {
                    tracing::warn!(
                        port = %self.port.name,
                        "the holder may still have an older state of the session: {error}"
                    );
                }
            }
        }
    }

    fn saved_state(&self) -> SavedSession {
        let region = |(s, _): &(RegionSpec, Arc<PeerFd>)| SavedRegion {
            guest_addr: s.guest_addr,
            user_addr: s.user_addr,
            len_bytes: s.len_bytes,
            mmap_offset: s.mmap_offset,
        };
        SavedSession {
            version: SAVED_VERSION,
            protocol_features: self.negotiation.protocol_features,
            features: self.negotiation.features,
            owned: self.negotiation.is_owned,
            status: self.negotiation.device_status,
            mtu: self.negotiation.mtu,
            has_slots: self.rings.slots.is_some(),
            regions: self.memory.regions.iter().map(region).collect(),
            log: self.memory.log.as_ref().map(|l| (l.size, l.offset)),
            inflight: self.rings.inflight.as_ref().map(saved_inflight),
            has_backend: self.back_end.is_some(),
            write_through: self.port.device.writes_through(),
            vrings: self.rings.vrings.iter().map(saved_vring).collect(),
        }
    }

    /// Descriptors of the session, in the order that [`SavedSession::fd_count`] describes.
    fn saved_fds(&self) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![self.socket.as_fd()];
        fds.extend(self.rings.slots.as_ref().map(|s| s.as_fd()));
        fds.extend(self.memory.regions.iter().map(|(_, fd)| fd.as_fd()));
        fds.extend(self.memory.log.as_ref().map(|l| l.fd.as_fd()));
        fds.extend(self.rings.inflight.as_ref().map(|i| i.region.as_parts().0));
        fds.extend(self.back_end.as_ref().map(|b| b.as_fd()));
        for vring in &self.rings.vrings {
            if let Kick::Event(kick) = &vring.kick {
                fds.push(kick.as_fd());
            }
            fds.extend(vring.call.as_ref().map(AsFd::as_fd));
            fds.extend(vring.err.as_ref().map(AsFd::as_fd));
        }
        fds
    }

    /// Takes over the session of an earlier daemon: its queues run again on return.
    pub fn restore(
        port: Arc<PortContext>,
        saved: &SavedSession,
        fds: Vec<PeerFd>,
        publish: Publisher,
    ) -> Result<Self, VhostUserError> {
        // First: also a driver whose session cannot go on, and whose VMM connects anew, relies on
        // it.
        if saved.write_through {
            port.device.keep_writing_through();
        }
        check_saved(&port, saved, fds.len())?;
        let mut fds = fds.into_iter();
        let socket = next(&mut fds)?;
        if has_hung_up(&socket) {
            // Nobody waits for its queues, not even for the requests begun.
            let why = format!("{}: the front end of the saved session is gone", port.name);
            return Err(VhostUserError::Holder(why));
        }
        port.health.reset();
        let mut session = Self::blank(port, socket, publish);
        if let Err(error) = session.refill(saved, &mut fds) {
            session.finish(&End::Stopped);
            return Err(error);
        }
        session.may_be_repeated = true;
        session.saved.may_exist = true;
        Ok(session)
    }

    fn refill(
        &mut self,
        saved: &SavedSession,
        fds: &mut impl Iterator<Item = PeerFd>,
    ) -> Result<(), VhostUserError> {
        self.negotiation.protocol_features = saved.protocol_features;
        self.negotiation.is_owned = saved.owned;
        // The order of the handshake is not saved. Of the known front ends, those that ask before
        // they own are those that take this feature.
        self.negotiation.asked_before_owning = saved.protocol_features & protocol::RARP != 0;
        self.negotiation.device_status = saved.status;
        if saved.has_slots {
            // A file of our own making, sealed against shrinking.
            let shm = SharedMemory::from_fd(next(fds)?.into_checked())
                .map_err(VhostUserError::std_io("mapping the positions file"))?;
            self.rings.slots = Some(Arc::new(shm));
        }
        self.refill_memory(saved, fds)?;
        self.refill_inflight(saved, fds)?;
        if saved.has_backend {
            self.back_end = Some(Arc::new(BackendChannel::new(next(fds)?, &self.port.name)?));
        }
        for (vring, saved) in self.rings.vrings.iter_mut().zip(&saved.vrings) {
            refill_vring(vring, saved, fds)?;
        }
        self.refill_device(saved)?;
        self.restart(saved)
    }

    fn refill_memory(
        &mut self,
        saved: &SavedSession,
        fds: &mut impl Iterator<Item = PeerFd>,
    ) -> Result<(), VhostUserError> {
        let message = Request::SetMemTable.message();
        let failed = |source| VhostUserError::Memory { message, source };
        let mut regions = Vec::with_capacity(saved.regions.len());
        for r in &saved.regions {
            let spec = RegionSpec {
                guest_addr: r.guest_addr,
                user_addr: r.user_addr,
                len_bytes: r.len_bytes,
                mmap_offset: r.mmap_offset,
            };
            regions.push((spec, next(fds)?));
        }
        self.memory = self.memory.replaced(regions).map_err(failed)?;
        if let Some((size, offset)) = saved.log {
            self.memory = self.memory.with_log(next(fds)?, size, offset).map_err(failed)?;
        }
        let logging = saved.features.unwrap_or(0) & feature::LOG_ALL != 0;
        self.memory = self.memory.with_logging(logging);
        Ok(())
    }

    fn refill_inflight(
        &mut self,
        saved: &SavedSession,
        fds: &mut impl Iterator<Item = PeerFd>,
    ) -> Result<(), VhostUserError> {
        let Some(i) = saved.inflight else { return Ok(()) };
        let layout = if i.packed { Layout::Packed } else { Layout::Split };
        let message = InflightMessage {
            mmap_size: i.mmap_size,
            mmap_offset: i.mmap_offset,
            num_queues: i.num_queues,
            queue_size: i.queue_size,
            padding: 0,
        };
        self.rings.inflight = Some(Inflight::open(&message, next(fds)?, layout, i.private)?);
        Ok(())
    }

    fn refill_device(&mut self, saved: &SavedSession) -> Result<(), VhostUserError> {
        let device = &self.port.device;
        if let Some(features) = saved.features {
            let own = feature::PROTOCOL_FEATURES | feature::LOG_ALL;
            device.activate(features & !own).map_err(|source| VhostUserError::Device {
                message: Request::SetFeatures.message(),
                source,
            })?;
        }
        self.negotiation.features = saved.features;
        if let Some(mtu) = saved.mtu {
            device.set_mtu(mtu).map_err(|source| VhostUserError::Device {
                message: Request::NetSetMtu.message(),
                source,
            })?;
            self.negotiation.mtu = Some(mtu);
        }
        device.set_notifier(self.notifier());
        Ok(())
    }

    /// Runs every queue again that ran.
    fn restart(&mut self, saved: &SavedSession) -> Result<(), VhostUserError> {
        let layout = self.negotiation.layout();
        let features = self.negotiation.feature_bits();
        let mut ready = Vec::new();
        for (index, vring) in saved.vrings.iter().enumerate().filter(|(_, v)| v.running) {
            let request = Request::SetVringAddr;
            let (Some(size), Some(addrs)) = (vring.size, self.rings.vrings[index].addrs) else {
                let why = format!("saved queue {index} has no size or addresses");
                return Err(misplaced(request, why));
            };
            let addrs = self.memory.resolve(&addrs, size, layout).map_err(|part| {
                let why = format!("the {part} of saved queue {index} is not in the VM's memory");
                misplaced(request, why)
            })?;
            ready.push(self.rings.build(index, addrs, features, &self.memory, true)?);
        }
        self.has_served |= self.rings.start_prepared(ready);
        Ok(())
    }
}

/// Checks that a saved session can be taken over, before anything is touched.
fn check_saved(port: &PortContext, saved: &SavedSession, fds: usize) -> Result<(), VhostUserError> {
    let nonsense = |text: String| Err(VhostUserError::Holder(format!("{}: {text}", port.name)));
    if saved.version != SAVED_VERSION {
        let version = saved.version;
        return nonsense(format!("saved session of version {version}, ours is {SAVED_VERSION}"));
    }
    if saved.fd_count() != fds {
        return nonsense(format!("{fds} saved descriptors; {} expected", saved.fd_count()));
    }
    // A front end that was told of fewer queues sets up no more. There are as many position slots
    // as the earlier daemon had queues; older daemons offered network ports no control queue.
    let (before, now) = (saved.vrings.len(), usize::from(port.device.queue_count()));
    let lacks_control = port.device.kind() == DeviceKind::Net && before + 1 == now && now % 2 == 1;
    if before > now || (before < now && saved.has_slots && !lacks_control) {
        return nonsense(format!("the saved session has {before} queues, the port has {now} now"));
    }
    let own = feature::PROTOCOL_FEATURES | feature::LOG_ALL;
    let device = &port.device;
    let now = device.features() | device.whole_device_features();
    let lost = saved.features.unwrap_or(0) & !(now | own);
    if lost != 0 {
        return nonsense(format!("the driver uses features {lost:#x}, which the port lost"));
    }
    Ok(())
}

/// Whether the other end is closed. Messages that it sent before may still be in the socket.
fn has_hung_up(socket: &PeerFd) -> bool {
    let mut set = [PollFd::new(socket, PollFlags::empty())];
    let polled = retry(|| poll(&mut set, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })));
    // When this fails, the session's own reads tell.
    polled.is_ok() && set[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

fn next(fds: &mut impl Iterator<Item = PeerFd>) -> Result<PeerFd, VhostUserError> {
    fds.next().ok_or_else(|| VhostUserError::Holder("too few saved descriptors".to_owned()))
}

fn next_event(fds: &mut impl Iterator<Item = PeerFd>) -> Result<Doorbell, VhostUserError> {
    Doorbell::from_peer(next(fds)?).map_err(VhostUserError::std_io("taking a saved eventfd"))
}

fn refill_vring(
    vring: &mut VringState,
    saved: &SavedVring,
    fds: &mut impl Iterator<Item = PeerFd>,
) -> Result<(), VhostUserError> {
    vring.size = saved.size;
    vring.addrs = saved.addrs.map(|a| VringAddr {
        index: 0,
        flags: a.flags,
        desc: a.desc,
        used: a.used,
        avail: a.avail,
        log: a.log,
    });
    vring.base = saved.has_base.then_some(saved.base);
    vring.enabled = saved.enabled;
    if saved.has_kick {
        vring.kick = Kick::Event(next_event(fds)?);
    } else if saved.polled {
        vring.kick = Kick::Polled;
    }
    if saved.has_call {
        vring.call = Some(next_event(fds)?);
    }
    if saved.has_err {
        vring.err = Some(next_event(fds)?);
    }
    Ok(())
}

fn saved_inflight(i: &Inflight) -> SavedInflight {
    let (_, mmap_size, mmap_offset) = i.region.as_parts();
    SavedInflight {
        mmap_size,
        mmap_offset,
        num_queues: i.num_queues,
        queue_size: i.queue_size,
        packed: i.layout == Layout::Packed,
        private: i.is_private,
    }
}

fn saved_vring(vring: &VringState) -> SavedVring {
    SavedVring {
        size: vring.size,
        addrs: vring.addrs.map(|a| SavedAddrs {
            flags: a.flags,
            desc: a.desc,
            used: a.used,
            avail: a.avail,
            log: a.log,
        }),
        base: vring.base.unwrap_or(0),
        has_base: vring.base.is_some(),
        enabled: vring.enabled,
        polled: matches!(vring.kick, Kick::Polled),
        has_kick: matches!(vring.kick, Kick::Event(_)),
        has_call: vring.call.is_some(),
        has_err: vring.err.is_some(),
        running: vring.running.is_some(),
    }
}
