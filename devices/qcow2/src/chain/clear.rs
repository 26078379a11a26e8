//! DISCARD and WRITE ZEROES.
//!
//! Whole clusters lose their entries, and the host gets their room back after the next flush. Parts
//! of clusters are zeroed where they are; of a discard they stay.

use std::io;
use std::ops::Range;

use super::read::Scratch;
use super::{Chain, ChainView};
use crate::error::contradiction;
use crate::format::entry::{self, COPIED, Kind, ZERO};
use crate::map::slices::{Pair, Slice};
use crate::map::view::{Look, Piece};

/// Way of clearing a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clear {
    /// The content is no longer needed.
    Discard,
    /// The range reads as zeroes.
    Zero {
        /// Whether its room may be given back.
        may_unmap: bool,
    },
}

/// All pieces of an extended entry read as zeroes.
const ALL_ZERO: u64 = 0xffff_ffff << 32;

impl Chain {
    /// Clears a range of the disk. Waits for the disk below.
    pub fn clear(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        range: Range<u64>,
        how: Clear,
    ) -> io::Result<()> {
        let disk_end = self.top.len_bytes();
        let end = range.end.min(disk_end);
        // The last cluster may be longer than the disk.
        let upto = if end == disk_end {
            end.next_multiple_of(self.top.geometry().cluster_len())
        } else {
            end
        };
        self.clear_upto(view, scratch, range.start..end, upto, how)
    }

    /// Clears a range; clusters count as whole up to `upto`, the end of the disk's last one.
    pub(super) fn clear_upto(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        range: Range<u64>,
        upto: u64,
        how: Clear,
    ) -> io::Result<()> {
        let geometry = *self.top.geometry();
        let bits = geometry.cluster_bits;
        let mut at = range.start;
        while at < range.end {
            let whole = geometry.in_cluster(at) == 0 && upto - at >= geometry.cluster_len();
            if whole {
                let first = at >> bits;
                let slice_end = (geometry.slice_of(first) + 1) << geometry.slice_bits();
                let end = (upto >> bits).min(slice_end);
                let done = self.clear_run(view, scratch, first..end, how);
                at = self.top.noticed(done)? << bits;
            } else {
                let end = (((at >> bits) + 1) << bits).min(range.end);
                if matches!(how, Clear::Zero { .. }) {
                    let done = self.zero_part(view, scratch, at, end - at);
                    self.top.noticed(done)?;
                }
                at = end;
            }
        }
        Ok(())
    }

    /// Zeroes a part of a cluster.
    fn zero_part(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let mut at = 0;
        while at < len {
            let Some(top) = view.top() else { return Ok(()) };
            let Look::Piece(piece) = top.look(&self.top, offset + at, len - at) else {
                self.load(0, view, offset + at)?;
                continue;
            };
            let Piece { kind, host, len: n, in_place, is_sure } = piece;
            let is_zero = match kind {
                Kind::Zero => is_sure,
                Kind::Unallocated if is_sure => self.zero_below(view, offset + at, n)?,
                Kind::Data if in_place => {
                    self.top.writer()?;
                    self.top.data.zero(host, n, false)?;
                    true
                }
                Kind::Unallocated | Kind::Data | Kind::Compressed | Kind::Bad => false,
            };
            if !is_zero {
                self.write(view, scratch, &vec![0; n as usize], offset + at)?;
            }
            at += n;
        }
        Ok(())
    }

    /// Clears whole clusters of one slice. Returns the first one that it left alone.
    fn clear_run(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        clusters: Range<u64>,
        how: Clear,
    ) -> io::Result<u64> {
        let writer = self.top.writer()?;
        let geometry = *self.top.geometry();
        let number = geometry.slice_of(clusters.start);
        let is_empty = self.top.slice(number)?.is_none();
        let bytes = (clusters.end - clusters.start) << geometry.cluster_bits;
        if is_empty && self.zero_below(view, clusters.start << geometry.cluster_bits, bytes)? {
            return Ok(clusters.end);
        }
        let Some(cleared) = self.cleared() else {
            return self.clear_old(view, scratch, clusters, how);
        };
        let claim = writer.claims.claim(clusters.start, clusters.end);
        let slice = self.own_slice(writer, number)?;
        self.clear_claimed(view, &slice, claim.clusters(), cleared, how)?;
        Ok(claim.clusters().end)
    }

    /// The entry of a cluster that reads as zeroes and has no room; none where there is no such.
    fn cleared(&self) -> Option<Pair> {
        let geometry = self.top.geometry();
        match (self.layers() == 1, geometry.version, geometry.extended_l2) {
            (true, ..) => Some((0, 0)),
            (false, 2, _) => None,
            (false, _, false) => Some((ZERO, 0)),
            (false, _, true) => Some((0, ALL_ZERO)),
        }
    }

    /// Version 2 over a backing file: there are no clusters that read as zeroes, so they are
    /// written.
    fn clear_old(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        clusters: Range<u64>,
        how: Clear,
    ) -> io::Result<u64> {
        let bits = self.top.geometry().cluster_bits;
        if matches!(how, Clear::Zero { .. }) {
            let offset = clusters.start << bits;
            let len = self.top.len_bytes().min((clusters.start + 1) << bits) - offset;
            self.zero_part(view, scratch, offset, len)?;
            return Ok(clusters.start + 1);
        }
        Ok(clusters.end)
    }

    fn clear_claimed(
        &self,
        view: &mut ChainView,
        slice: &Slice,
        clusters: Range<u64>,
        cleared: Pair,
        how: Clear,
    ) -> io::Result<()> {
        let geometry = *self.top.geometry();
        let bits = geometry.cluster_bits;
        let keeps_room = how == Clear::Zero { may_unmap: false };
        let first = geometry.index_in_slice(clusters.start);
        let mut changed: Vec<(usize, Pair, Pair)> = Vec::new();
        for (n, cluster) in clusters.enumerate() {
            let old = slice.get(first + n);
            if entry::is_forbidden(old.0) {
                return Err(contradiction(format!("the entry of cluster {cluster} of the disk")));
            }
            let is_data = entry::kind(old.0, old.1, 0, &geometry) == Kind::Data;
            let host = entry::offset(old.0);
            if keeps_room && is_data && !geometry.extended_l2 && old.0 & COPIED != 0 {
                self.zero_cluster(host, false)?;
                continue;
            }
            if old == cleared
                || old == (0, 0) && self.zero_below(view, cluster << bits, 1 << bits)?
            {
                continue;
            }
            if geometry.data_file && entry::is_allocated(old.0, &geometry) {
                self.zero_cluster(host, true)?;
            }
            changed.push((first + n, old, cleared));
        }
        self.set_cleared(slice, &changed)
    }

    /// Zeroes a cluster, where it is; what is behind the end of the file is zero anyway.
    fn zero_cluster(&self, host: u64, may_unmap: bool) -> io::Result<()> {
        let data = &*self.top.data;
        let len = data.len()?.saturating_sub(host).min(self.top.geometry().cluster_len());
        if len > 0 { data.zero(host, len, may_unmap) } else { Ok(()) }
    }

    /// Writes changed entries, those in a row at once, and releases what they referred to.
    fn set_cleared(&self, slice: &Slice, changed: &[(usize, Pair, Pair)]) -> io::Result<()> {
        let writer = self.top.writer()?;
        for run in changed.chunk_by(|a, b| a.0 + 1 == b.0) {
            let pairs: Vec<Pair> = run.iter().map(|&(_, _, new)| new).collect();
            self.top.set_entries(slice, run[0].0, &pairs)?;
            let old: Vec<Pair> = run.iter().map(|&(_, old, _)| old).collect();
            self.release_old(writer, &old)?;
        }
        Ok(())
    }
}
