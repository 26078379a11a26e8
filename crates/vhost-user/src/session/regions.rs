//! Messages about memory: the table, single regions, the dirty log.

use base::peer_fd::PeerFd;
use queue::memory::RegionSpec;
use zerocopy::IntoBytes;

use super::memory::MemoryTable;
use super::vring::layout;
use super::{Fault, Reply, Session};
use crate::DeviceKind;
use crate::codec::{Log, Region, Request, SingleRegion, payload};
use crate::error::VhostUserError;

fn memory_error(request: Request) -> impl Fn(queue::MemoryError) -> VhostUserError {
    move |source| VhostUserError::Memory { message: request.message(), source }
}

impl Session {
    /// The whole table anew.
    pub(super) fn set_mem_table(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let request = Request::SetMemTable;
        let count: u32 = payload(request, bytes)?;
        let want = 8 + u64::from(count) * size_of::<Region>() as u64;
        if bytes.len() as u64 != want {
            return Err(VhostUserError::BadSize {
                message: request.message(),
                got: bytes.len() as u32,
                want: format!("{want} (for {count} regions)"),
            }
            .into());
        }
        let mut regions = Vec::with_capacity(fds.len());
        for (chunk, fd) in bytes[8..].chunks_exact(size_of::<Region>()).zip(fds) {
            let region: Region = payload(request, chunk)?;
            regions.push((region.spec(), fd));
        }
        let next = self.memory.replaced(regions).map_err(memory_error(request))?;
        self.change_memory(request, next)?;
        Ok(Reply::Done)
    }

    pub(super) fn add_region(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let request = Request::AddMemReg;
        let spec = single_region(request, bytes)?;
        let Some(fd) = fds.into_iter().next() else {
            return Err(Self::misplaced(request, "no descriptor").into());
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

    /// Queues whose rings are in the region stop; the others go on without it.
    pub(super) fn remove_region(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::RemMemReg;
        let spec = single_region(request, bytes)?;
        match self.memory.without_region(spec) {
            Ok(next) => self.change_memory(request, next)?,
            Err(_) if self.may_repeat_regions() => {}
            Err(e) => return Err(Fault::Refused(memory_error(request)(e))),
        }
        Ok(Reply::Done)
    }

    /// The reply is expected also without `need_reply`. What is in it the specification leaves open: QEMU
    /// looks at the header alone, crate `vhost` (Cloud Hypervisor) waits for the log's description.
    pub(super) fn set_log_base(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let request = Request::SetLogBase;
        let log: Log = payload(request, bytes)?;
        let Some(fd) = fds.into_iter().next() else {
            return Err(Self::misplaced(request, "no descriptor").into());
        };
        let next = self.memory.with_log(fd, log.size, log.offset).map_err(memory_error(request))?;
        self.change_memory(request, next)?;
        Ok(Reply::Body(log.as_bytes().to_vec()))
    }

    /// Makes `next` the session's memory. Queues whose rings are no longer there, or somewhere
    /// else, are stopped first (and started again by the caller where they can be).
    pub(super) fn change_memory(
        &mut self,
        request: Request,
        next: MemoryTable,
    ) -> Result<(), Fault> {
        next.check_log().map_err(memory_error(request))?;
        let layout = layout(self.features.unwrap_or(0));
        let mut keeps_any = false;
        for index in 0..self.vrings.len() {
            let vring = &self.vrings[index];
            let (Some(running), Some(size), Some(addrs)) = (vring.running, vring.size, vring.addrs)
            else {
                continue;
            };
            if next.resolve(&addrs, size, layout) == Ok(running.addrs) {
                keeps_any = true;
            } else {
                self.stop(index);
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
}

fn single_region(request: Request, bytes: &[u8]) -> Result<RegionSpec, VhostUserError> {
    let single: SingleRegion = payload(request, bytes)?;
    Ok(single.region.spec())
}
