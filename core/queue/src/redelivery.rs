//! Requests that an earlier back end took and did not complete: delivered before anything new.

use crate::batch::Batch;
use crate::error::RingError;
use crate::parts::Desc;
use crate::split::SplitRing;
use crate::walk::{ChainBuilder, Stop, Walk};

/// Request to deliver again: its head (split), or its descriptors (packed: those in the ring may be
/// overwritten).
#[derive(Debug)]
pub(crate) struct Redelivery {
    pub head: u16,
    pub descs: Vec<Desc>,
}

/// Requests to deliver again, in the order in which they were taken.
#[derive(Debug, Default)]
pub(crate) struct Redeliveries {
    requests: Vec<Redelivery>,
    next: usize,
    /// The last pop delivered from this list, so an unpop gives back to it.
    delivering: bool,
}

impl Redeliveries {
    pub fn new(requests: Vec<Redelivery>) -> Self {
        Self { requests, next: 0, delivering: false }
    }

    /// Whether requests wait.
    #[inline]
    pub fn is_pending(&self) -> bool {
        self.next < self.requests.len()
    }

    /// Whether the last pop delivered from this list.
    #[inline]
    pub fn is_delivering(&self) -> bool {
        self.delivering
    }

    /// Notes that the next pop takes new chains.
    #[inline]
    pub fn pass(&mut self) {
        self.delivering = false;
    }

    /// Gives the last `n` delivered requests back.
    pub fn unpop(&mut self, n: usize) {
        self.next = self.next.saturating_sub(n);
    }

    /// Appends up to `max` requests of a split ring: their descriptors are still in the table.
    #[cold]
    pub fn pop_split(
        &mut self,
        ring: &SplitRing,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        max: usize,
    ) -> Result<(), Box<RingError>> {
        self.pop(max, |request| ring.take(walk, batch, request.head))
    }

    /// Appends up to `max` requests of a packed ring, from the copies of their descriptors.
    #[cold]
    pub fn pop_packed(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        max: usize,
    ) -> Result<(), Box<RingError>> {
        self.pop(max, |request| {
            let mut build = ChainBuilder::new(batch, request.head);
            match build_from(&mut build, walk, batch, request) {
                Ok(()) => {
                    let id = request.descs.last().map_or(0, |d| d.tail);
                    build.finish(walk, batch, id, request.descs.len() as u16)
                }
                Err(stop) => {
                    batch.segs.truncate(build.first());
                    Err(stop)
                }
            }
        })
    }

    fn pop(
        &mut self,
        max: usize,
        mut take: impl FnMut(&Redelivery) -> Result<(), Stop>,
    ) -> Result<(), Box<RingError>> {
        self.delivering = true;
        for request in self.requests.iter().skip(self.next).take(max) {
            match take(request) {
                Ok(()) => self.next += 1,
                Err(Stop::Full) => break,
                Err(Stop::Broken(error)) => return Err(error),
            }
        }
        Ok(())
    }
}

fn build_from(
    build: &mut ChainBuilder,
    walk: &mut Walk<'_>,
    batch: &mut Batch,
    request: &Redelivery,
) -> Result<(), Stop> {
    for (i, desc) in request.descs.iter().enumerate() {
        build.add(walk, batch, *desc, i as u16)?;
    }
    Ok(())
}
