//! Copies of the beginnings of frames.

use base::counter::DropReason;
use frame::Head;

use crate::port::TX_BATCH;

/// Copies of the beginnings of one batch of frames; the uplink reads from them until it is flushed.
pub(crate) struct HeadBatch {
    pub heads: Box<[Head]>,
    /// Whether each of them makes sense.
    pub verdicts: Box<[Result<(), DropReason>]>,
}

impl HeadBatch {
    pub fn new() -> Self {
        Self {
            heads: vec![Head::default(); TX_BATCH].into_boxed_slice(),
            verdicts: vec![Ok(()); TX_BATCH].into_boxed_slice(),
        }
    }

    /// Head of a frame that is in no batch.
    #[inline]
    pub fn lone(&mut self) -> &mut Head {
        &mut self.heads[0]
    }
}
