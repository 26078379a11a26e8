//! Writes as a sidecore plans them: in place, or into new clusters that replace nothing.
//!
//! A write to space that reads as zeroes takes clusters of the reserve, which are zero: the data
//! goes there from the guest's memory, then the entries go to the file, then everybody sees them.
//! Nothing is copied and nothing is synced. Whatever replaces content goes the longer way
//! ([`super::write`]).

use std::ops::Range;
use std::sync::Arc;

use super::{Chain, ChainView, Place};
use crate::format::entry::{self, COPIED, Kind, ZERO};
use crate::limits::MAX_RUN_CLUSTERS;
use crate::map::claims::Taken;
use crate::map::epochs::Stay;
use crate::map::slices::{Pinned, Slice};
use crate::map::view::{Piece, View, piece};

/// Plan of a write: the way in which it begins.
#[derive(Debug)]
pub enum Plan {
    /// The bytes go where the old ones are.
    InPlace {
        /// Offset in the data file.
        host: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The bytes go into new clusters.
    Allocate(Allocation),
    /// Another write is about to change the entry; the view's waker is rung after that.
    Busy,
    /// [`Chain::write`] has to do it.
    Slow,
}

/// New clusters for a write: claimed, and visible to nobody before [`Chain::commit`].
#[derive(Debug)]
#[must_use]
pub struct Allocation {
    slice: Pinned,
    index: usize,
    /// Clusters of the disk.
    clusters: Range<u64>,
    /// First of the new clusters of the file.
    first: u64,
    /// Offset of the data in the data file.
    pub host: u64,
    /// Bytes of data.
    pub len: u64,
    cluster_bits: u32,
}

/// Most bytes of an allocation's entries.
pub const MAX_ENTRIES_LEN_BYTES: usize = MAX_RUN_CLUSTERS as usize * 8;

impl Allocation {
    /// Offset of the entries in the image file.
    pub fn entries_offset(&self) -> u64 {
        self.slice.offset + self.index as u64 * 8
    }

    /// The entries, as they go to the file. Returns their length.
    pub fn encode(&self, out: &mut [u8; MAX_ENTRIES_LEN_BYTES]) -> usize {
        let count = (self.clusters.end - self.clusters.start) as usize;
        for (n, bytes) in out.chunks_exact_mut(8).take(count).enumerate() {
            bytes.copy_from_slice(&self.entry(n).to_be_bytes());
        }
        count * 8
    }

    fn entry(&self, n: usize) -> u64 {
        (self.first + n as u64) << self.cluster_bits | COPIED
    }
}

impl Chain {
    /// Enters an epoch, before an operation looks at the map: the clusters that it finds are not
    /// freed until [`Chain::leave`].
    #[inline]
    pub fn enter(&self, view: &mut ChainView) -> Option<Stay> {
        self.top.writer.as_ref().map(|writer| writer.epochs.enter(&view.party))
    }

    /// Leaves the epoch, after the last operation on the clusters found.
    #[inline]
    pub fn leave(&self, view: &mut ChainView, stay: Option<Stay>) {
        if let (Some(writer), Some(stay)) = (&self.top.writer, stay) {
            writer.epochs.leave(&view.party, stay);
        }
    }

    /// Plans a write of `max` bytes (not 0) at `offset`. No I/O.
    #[inline]
    pub fn plan(&self, view: &mut ChainView, offset: u64, max: u64) -> Plan {
        match self.find_in_place(view, offset, max) {
            Some((host, len)) => Plan::InPlace { host, len },
            None => self.plan_new(view, offset, max),
        }
    }

    /// Finds a place where bytes from `offset` on, at most `max` of them (not 0), may be written as
    /// they are: offset in the data file, and number. No I/O, and no cluster is taken.
    #[inline]
    pub fn find_in_place(&self, view: &mut ChainView, offset: u64, max: u64) -> Option<(u64, u64)> {
        let top = view.top()?;
        if let Some((entry, is_own)) = top.data_entry(&self.top, offset, max) {
            let host = entry::offset(entry) + self.top.geometry().in_cluster(offset);
            let in_place = is_own && entry::may_write(entry) && !self.is_damaged();
            return in_place.then_some((host, max));
        }
        let found = self.top_piece(top, offset, max)?.1;
        (found.in_place && !self.is_damaged()).then_some((found.host, found.len))
    }

    /// Piece at `offset`, with its slice; `None` where the slice is not in memory.
    fn top_piece<'a>(
        &self,
        top: &'a mut View,
        offset: u64,
        max: u64,
    ) -> Option<(&'a Arc<Slice>, Piece)> {
        let geometry = self.top.geometry();
        let slice = top.slice(&self.top, geometry.slice_of(geometry.cluster_of(offset)))?;
        let found = piece(slice, geometry, offset, max);
        Some((slice, found))
    }

    /// Plans a write that cannot go where the old bytes are.
    fn plan_new(&self, view: &mut ChainView, offset: u64, max: u64) -> Plan {
        let geometry = self.top.geometry();
        let found = view.top().and_then(|top| self.top_piece(top, offset, max));
        let Some((slice, found)) = found else { return Plan::Slow };
        match found.kind {
            Kind::Unallocated | Kind::Zero if !geometry.extended_l2 && !geometry.data_file => {
                let slice = Arc::clone(slice);
                self.allocate(view, slice, offset, found.len)
            }
            _ => Plan::Slow,
        }
    }

    fn is_damaged(&self) -> bool {
        self.top.writer.as_ref().is_none_or(|writer| writer.is_damaged())
    }

    /// Takes clusters for the write, as many as replace nothing.
    fn allocate(&self, view: &mut ChainView, slice: Arc<Slice>, offset: u64, max: u64) -> Plan {
        let Ok(writer) = self.top.writer() else { return Plan::Slow };
        let geometry = *self.top.geometry();
        let bits = geometry.cluster_bits;
        let first = geometry.cluster_of(offset);
        let end = geometry.cluster_of(offset + max - 1) + 1;
        let end = end.min(first + MAX_RUN_CLUSTERS);
        let index = geometry.index_in_slice(first);
        let replaces_nothing = |slice: &Slice, view: &mut ChainView, cluster: u64| match slice
            .get(geometry.index_in_slice(cluster))
            .0
        {
            ZERO => true,
            0 => self.is_zero_below(view, cluster << bits, 1 << bits),
            _ => false,
        };
        let count = (first..end).take_while(|&c| replaces_nothing(&slice, view, c)).count() as u64;
        if count == 0 || !slice.is_own {
            return Plan::Slow;
        }
        let Some(slice) = Pinned::new(slice) else { return Plan::Slow };
        let taken = match writer.claims.try_take(first..first + count, &view.waker) {
            Taken::Clusters(taken) => taken,
            Taken::Busy => return Plan::Busy,
            Taken::Empty => return Plan::Slow,
        };
        let clusters = first..first + (taken.end - taken.start);
        let in_cluster = geometry.in_cluster(offset);
        let allocation = Allocation {
            index,
            first: taken.start,
            host: (taken.start << bits) + in_cluster,
            len: max.min(((taken.end - taken.start) << bits) - in_cluster),
            clusters: clusters.clone(),
            slice,
            cluster_bits: bits,
        };
        // Before the claim somebody else may have been here.
        if !clusters.clone().all(|c| replaces_nothing(&allocation.slice, view, c)) {
            self.unclaim(allocation);
            return Plan::Slow;
        }
        Plan::Allocate(allocation)
    }

    /// Gives back an allocation that was not used.
    fn unclaim(&self, allocation: Allocation) {
        let Some(writer) = &self.top.writer else { return };
        let count = allocation.clusters.end - allocation.clusters.start;
        writer.claims.soil(allocation.first..allocation.first + count);
        drop(allocation.slice);
        writer.claims.release(allocation.clusters);
    }

    /// The entries are in the file: everybody sees the data.
    pub fn commit(&self, allocation: Allocation) {
        let Some(writer) = &self.top.writer else { return };
        for n in 0..(allocation.clusters.end - allocation.clusters.start) as usize {
            allocation.slice.set(allocation.index + n, (allocation.entry(n), 0));
        }
        drop(allocation.slice);
        writer.claims.release(allocation.clusters);
    }

    /// The data, or the entries, could not be written: the disk stays as it is. `entries_tried`:
    /// the file may have the entries nevertheless, so the clusters stay in use until it is checked.
    pub fn abandon(&self, allocation: Allocation, entries_tried: bool) {
        if !entries_tried {
            return self.unclaim(allocation);
        }
        let Some(writer) = &self.top.writer else { return };
        writer.note_leaks();
        let count = (allocation.clusters.end - allocation.clusters.start) as usize;
        allocation.slice.mark_unsure(allocation.index..allocation.index + count);
        drop(allocation.slice);
        writer.claims.release(allocation.clusters);
    }

    /// Whether the layers below have nothing but zeroes there; false where they would have to be
    /// read to know.
    pub(crate) fn is_zero_below(&self, view: &mut ChainView, offset: u64, len: u64) -> bool {
        let mut at = 0;
        while self.layers() > 1 && at < len {
            match self.find_from(1, view, offset + at, len - at) {
                Place::Zero(n) => at += n,
                _ => return false,
            }
        }
        true
    }

    /// Whether [`Image::maintain`](crate::Image::maintain) has something to do; asked once,
    /// answered once.
    #[inline]
    pub fn take_work(&self) -> bool {
        self.top.writer.as_ref().is_some_and(|writer| writer.claims.take_work())
    }

    /// Begins a flush: see [`crate::map::writer::Writer::flush_begins`].
    pub fn flush_begins(&self) -> u64 {
        self.top.writer.as_ref().map_or(0, |writer| writer.flush_begins())
    }

    /// Notes a failed flush: every sync fails from now on.
    pub fn flush_failed(&self) {
        if let Some(writer) = &self.top.writer {
            writer.syncs.fail();
        }
    }

    /// Whether freed clusters wait for a flush.
    pub fn has_pending(&self) -> bool {
        self.top.writer.as_ref().is_some_and(|writer| writer.pending() > 0)
    }

    /// Ends a flush: see [`crate::map::writer::Writer::flush_ended`]. False where another sync has
    /// failed: writes that it should have made durable may be lost, whatever this flush says.
    pub fn flush_ended(&self, covers: u64) -> bool {
        let Some(writer) = &self.top.writer else { return true };
        let has_failed = writer.syncs.has_failed();
        if !has_failed {
            writer.flush_ended(covers);
        }
        !has_failed
    }
}
