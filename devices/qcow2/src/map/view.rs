//! Looking at the map, as one queue does it: without a lock as long as slices are remembered.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::image::{Image, L1};
use super::slices::Slice;
use crate::format::entry::{self, BAD, COMPRESSED, Kind, UNSURE, ZERO};
use crate::format::geometry::Geometry;
use crate::limits::QUEUE_SLICES;

/// A piece of the disk that is of one kind and, where it has data, in one piece in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Kind of the piece.
    pub kind: Kind,
    /// Offset of its data, for [`Kind::Data`].
    pub host: u64,
    /// Bytes, at most as many as were asked for.
    pub len: u64,
    /// Whether its data may be overwritten where it is.
    pub in_place: bool,
    /// Whether the entry in the file is known to be the same, see [`entry::UNSURE`].
    pub is_sure: bool,
}

/// Result of a look at the map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The answer.
    Piece(Piece),
    /// The slice is not in memory and must be read.
    Miss,
}

/// A queue's memory of the slices of one image.
#[derive(Debug)]
pub struct View {
    slices: Vec<Option<Arc<Slice>>>,
    l1: Arc<L1>,
    l1_generation: u64,
}

impl View {
    /// Knows nothing yet.
    pub fn new(image: &Image) -> Self {
        let l1_generation = image.l1_generation.load(Ordering::Acquire);
        Self { slices: vec![None; QUEUE_SLICES], l1: image.l1(), l1_generation }
    }

    /// The entry of a cluster that has data and all of the bytes, and whether its table is the
    /// image's own, and counted. None for the few requests that are not so: look the longer way.
    #[inline(always)]
    pub(crate) fn data_entry(
        &mut self,
        image: &Image,
        offset: u64,
        len: u64,
    ) -> Option<(u64, bool)> {
        let geometry = image.geometry();
        if geometry.extended_l2 || geometry.in_cluster(offset) + len > geometry.cluster_len() {
            return None;
        }
        let cluster = geometry.cluster_of(offset);
        let slice = self.slice(image, geometry.slice_of(cluster))?;
        let is_ours = slice.is_ours();
        let (entry, _) = slice.get(geometry.index_in_slice(cluster));
        let is_data = entry & (COMPRESSED | BAD | ZERO) == 0 && entry::offset(entry) != 0;
        is_data.then_some((entry, is_ours))
    }

    /// Address of the entry of a byte of the disk, if it is in memory.
    #[inline]
    pub(crate) fn entry_address(&mut self, image: &Image, offset: u64) -> Option<*const u8> {
        let geometry = image.geometry();
        let cluster = geometry.cluster_of(offset);
        let slice = self.slice(image, geometry.slice_of(cluster))?;
        slice.address(geometry.index_in_slice(cluster))
    }

    /// The slice `number`, if it is in memory. At most a lock for a moment, never I/O.
    #[inline]
    pub fn slice(&mut self, image: &Image, number: u64) -> Option<&Arc<Slice>> {
        let at = (number as usize) % QUEUE_SLICES;
        let is_known = |slice: &Arc<Slice>| slice.number == number && !slice.is_retired();
        if !self.slices[at].as_ref().is_some_and(is_known) {
            self.look_up(image, number);
        }
        self.slices[at].as_ref().inspect(|slice| slice.touch())
    }

    /// Remembers the slice `number` in place of another, if it is in memory.
    #[cold]
    fn look_up(&mut self, image: &Image, number: u64) {
        self.slices[(number as usize) % QUEUE_SLICES] = image.slices.get(number);
    }

    /// Remembers a slice that was read.
    pub(crate) fn remember(&mut self, slice: Arc<Slice>) {
        let at = (slice.number as usize) % QUEUE_SLICES;
        self.slices[at] = Some(slice);
    }

    /// Whether there is a table for the slice.
    fn has_table(&mut self, image: &Image, number: u64) -> bool {
        let now = image.l1_generation.load(Ordering::Acquire);
        if now != self.l1_generation {
            (self.l1, self.l1_generation) = (image.l1(), now);
        }
        let index = image.geometry().l1_index_of(number) as usize;
        self.l1.entries.get(index).is_some_and(|e| e.load(Ordering::Acquire) != 0)
    }

    /// Looks for the piece at `offset`, of at most `max` bytes, which is not 0.
    pub fn look(&mut self, image: &Image, offset: u64, max: u64) -> Look {
        let geometry = *image.geometry();
        let number = geometry.slice_of(geometry.cluster_of(offset));
        if let Some(slice) = self.slice(image, number) {
            return Look::Piece(piece(slice, &geometry, offset, max));
        }
        if self.has_table(image, number) {
            return Look::Miss;
        }
        Look::Piece(unmapped(&geometry, offset, max))
    }
}

/// Piece at `offset` where there is no table: nothing is allocated, up to the end of the slice.
pub(crate) fn unmapped(geometry: &Geometry, offset: u64, max: u64) -> Piece {
    let span = 1u64 << (geometry.slice_bits() + geometry.cluster_bits);
    let len = max.min(span - (offset & (span - 1)));
    Piece { kind: Kind::Unallocated, host: 0, len, in_place: false, is_sure: true }
}

/// Piece at `offset` in a slice, of at most `max` bytes and up to the slice's end.
pub(crate) fn piece(slice: &Slice, geometry: &Geometry, offset: u64, max: u64) -> Piece {
    let sub_bits = geometry.sub_bits();
    let subs_bits = geometry.cluster_bits - sub_bits;
    let first = offset >> sub_bits;
    let in_sub = offset & ((1 << sub_bits) - 1);
    let is_ours = slice.is_ours();
    let at = |sub: u64| {
        let index = geometry.index_in_slice(sub >> subs_bits);
        let (entry, bitmap) = slice.get(index);
        one(entry, bitmap, (sub & ((1 << subs_bits) - 1)) as u32, is_ours, geometry)
    };
    let begin = at(first);
    let slice_end = (geometry.slice_of(first >> subs_bits) + 1) << geometry.slice_bits();
    let end = ((offset + max - 1) >> sub_bits).min((slice_end << subs_bits) - 1) + 1;
    let mut next = first + 1;
    while next < end && goes_on(&begin, &at(next), (next - first) << sub_bits) {
        next += 1;
    }
    let len = (((next - first) << sub_bits) - in_sub).min(max);
    Piece { host: begin.host + in_sub, len, ..begin }
}

/// Piece of a subcluster, from its beginning.
fn one(entry: u64, bitmap: u64, sub: u32, is_ours: bool, geometry: &Geometry) -> Piece {
    let kind = entry::kind(entry, bitmap, sub, geometry);
    let host = match kind {
        Kind::Data => entry::offset(entry) + (u64::from(sub) << geometry.sub_bits()),
        _ => 0,
    };
    let is_sure = entry & COMPRESSED != 0 || entry & UNSURE == 0;
    let in_place = kind == Kind::Data && is_ours && entry::may_write(entry);
    Piece { kind, host, len: 1 << geometry.sub_bits(), in_place, is_sure }
}

fn goes_on(begin: &Piece, next: &Piece, distance: u64) -> bool {
    begin.kind == next.kind
        && begin.in_place == next.in_place
        && begin.is_sure == next.is_sure
        && (begin.kind != Kind::Data || begin.host + distance == next.host)
}
