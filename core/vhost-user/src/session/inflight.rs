//! Inflight region of a session: the front end's, or our own for front ends that have none.

use std::sync::Arc;

use base::limits::MAX_QUEUE_SIZE;
use base::peer_fd::PeerFd;
use queue::Layout;
use queue::inflight::InflightRegion;

use crate::codec::{Inflight as InflightMessage, Request};
use crate::error::VhostUserError;

/// Inflight region with the dimensions that it was made for.
#[derive(Debug, Clone)]
pub(super) struct Inflight {
    pub region: Arc<InflightRegion>,
    pub num_queues: u16,
    pub queue_size: u16,
    pub layout: Layout,
    /// Whether the front end knows nothing of it. Dropped when no queue runs, since nothing is in
    /// flight then.
    pub is_private: bool,
}

impl Inflight {
    /// Makes a new region.
    pub fn create(
        request: Request,
        num_queues: u16,
        queue_size: u16,
        layout: Layout,
        is_private: bool,
    ) -> Result<Self, VhostUserError> {
        let region = InflightRegion::new(num_queues, queue_size, layout)
            .map_err(|source| VhostUserError::Ring { message: request.message(), source })?;
        Ok(Self { region, num_queues, queue_size, layout, is_private })
    }

    /// Maps the region that `message` describes.
    pub fn open(
        message: &InflightMessage,
        fd: PeerFd,
        layout: Layout,
        is_private: bool,
    ) -> Result<Self, VhostUserError> {
        let InflightMessage { mmap_size, mmap_offset, num_queues, queue_size, .. } = *message;
        let region =
            InflightRegion::from_fd(fd, mmap_size, mmap_offset, num_queues, queue_size, layout);
        let region = region.map_err(|source| VhostUserError::Ring {
            message: Request::SetInflightFd.message(),
            source,
        })?;
        Ok(Self { region, num_queues, queue_size, layout, is_private })
    }
}

/// Parses the message in either of its two sizes, and checks its counts for a port of `queues`.
pub(super) fn parse_message(
    request: Request,
    bytes: &[u8],
    queues: usize,
) -> Result<InflightMessage, VhostUserError> {
    let mut padded = [0u8; size_of::<InflightMessage>()];
    let n = bytes.len().min(padded.len());
    padded[..n].copy_from_slice(&bytes[..n]);
    let message: InflightMessage = crate::codec::payload(request, &padded)?;
    let limits = [
        ("queues", message.num_queues, queues as u16),
        ("queue size", message.queue_size, MAX_QUEUE_SIZE),
    ];
    for (field, value, limit) in limits {
        if value == 0 || value > limit {
            return Err(VhostUserError::BadField {
                message: request.message(),
                field,
                value: u64::from(value),
                rule: format!("1 to {limit}"),
            });
        }
    }
    Ok(message)
}
