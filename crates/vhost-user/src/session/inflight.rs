//! Messages about the inflight region, and our own one for front ends that have none.

use std::sync::Arc;

use base::limits::MAX_QUEUE_SIZE;
use base::peer_fd::PeerFd;
use queue::Layout;
use queue::inflight::InflightRegion;
use zerocopy::IntoBytes;

use super::vring::layout;
use super::{Fault, Reply, Session};
use crate::codec::{Inflight as Message, Request};
use crate::error::VhostUserError;

/// A region and what it was made for.
#[derive(Debug, Clone)]
pub(crate) struct Inflight {
    pub region: Arc<InflightRegion>,
    pub num_queues: u16,
    pub queue_size: u16,
    pub layout: Layout,
    /// Ours alone; dropped when no queue runs, since nothing is in flight then.
    pub private: bool,
}

impl Session {
    /// The message, whichever of its two sizes it has; counts checked.
    fn inflight_message(&self, request: Request, bytes: &[u8]) -> Result<Message, Fault> {
        let mut padded = [0u8; size_of::<Message>()];
        let n = bytes.len().min(padded.len());
        padded[..n].copy_from_slice(&bytes[..n]);
        let message: Message = crate::codec::payload(request, &padded)?;
        let limits = [
            ("queues", message.num_queues, self.vrings.len() as u16),
            ("queue size", message.queue_size, MAX_QUEUE_SIZE),
        ];
        for (field, value, limit) in limits {
            if value == 0 || value > limit {
                return Err(VhostUserError::BadField {
                    message: request.message(),
                    field,
                    value: u64::from(value),
                    rule: format!("1 to {limit}"),
                }
                .into());
            }
        }
        if self.is_any_running() {
            let why = "inflight region changed while queues are running";
            return Err(Self::misplaced(request, why).into());
        }
        Ok(message)
    }

    /// A new region; QEMU asks for one at the first start of a driver.
    pub(super) fn get_inflight(&mut self, bytes: &[u8]) -> Result<Reply, Fault> {
        let request = Request::GetInflightFd;
        let mut message = self.inflight_message(request, bytes)?;
        let layout = layout(self.features.unwrap_or(0));
        let (num_queues, queue_size) = (message.num_queues, message.queue_size);
        let region = InflightRegion::new(num_queues, queue_size, layout)
            .map_err(|source| VhostUserError::Ring { message: request.message(), source })?;
        let (fd, size, offset) = region.as_parts();
        let fd = fd
            .try_clone_to_owned()
            .map_err(VhostUserError::std_io("duplicating the inflight descriptor"))?;
        (message.mmap_size, message.mmap_offset) = (size, offset);
        self.inflight = Some(Inflight { region, num_queues, queue_size, layout, private: false });
        Ok(Reply::BodyWithFd(message.as_bytes()[..bytes.len()].to_vec(), fd))
    }

    /// The region that the front end kept over our death.
    pub(super) fn set_inflight(&mut self, bytes: &[u8], fds: Vec<PeerFd>) -> Result<Reply, Fault> {
        let request = Request::SetInflightFd;
        let message = self.inflight_message(request, bytes)?;
        let Some(fd) = fds.into_iter().next() else {
            return Err(Self::misplaced(request, "no descriptor").into());
        };
        let layout = layout(self.features.unwrap_or(0));
        let (num_queues, queue_size) = (message.num_queues, message.queue_size);
        let region = InflightRegion::from_fd(
            fd,
            message.mmap_size,
            message.mmap_offset,
            num_queues,
            queue_size,
            layout,
        )
        .map_err(|source| VhostUserError::Ring { message: request.message(), source })?;
        self.inflight = Some(Inflight { region, num_queues, queue_size, layout, private: false });
        Ok(Reply::Done)
    }

    /// For a device that completes out of order and a front end without a region: one of our own,
    /// kept by the holder. Without a holder it would die with us, so there is none.
    pub(super) fn provide_inflight(&mut self, request: Request) -> Result<(), Fault> {
        let layout = layout(self.features.unwrap_or(0));
        if let Some(inflight) = &self.inflight {
            if inflight.layout == layout {
                return Ok(());
            }
            if !inflight.private {
                let why = "the inflight region was made for the other ring format";
                return Err(Self::misplaced(request, why).into());
            }
        }
        if !self.port.device.wants_inflight() || !self.port.session_store.is_persistent() {
            return Ok(());
        }
        let sizes = self.vrings.iter().filter_map(|v| v.size);
        let (num_queues, queue_size) = (self.vrings.len() as u16, sizes.max().unwrap_or(1));
        let region = InflightRegion::new(num_queues, queue_size, layout)
            .map_err(|source| VhostUserError::Ring { message: request.message(), source })?;
        self.inflight = Some(Inflight { region, num_queues, queue_size, layout, private: true });
        Ok(())
    }
}
