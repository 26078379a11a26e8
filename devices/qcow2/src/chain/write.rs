//! Writing the longer way: what replaces content, in the order that loses nothing.
//!
//! Data and what must be copied with it go to new clusters; they are made durable, since the entry
//! may reach the disk before them; then the entries are written, then seen; then the old clusters
//! are released. Several at a time share a sync.

use std::io;
use std::ops::Range;

use super::read::Scratch;
use super::{Chain, ChainView};
use crate::error::contradiction;
use crate::format::entry::{self, BAD, COMPRESSED, COPIED, Kind, NO_WRITE};
use crate::limits::MAX_RUN_CLUSTERS;
use crate::map::image::Image;
use crate::map::slices::{Pair, Pinned, Slice};
use crate::map::writer::{Meta, Writer};

/// A cluster on its way to the file.
struct Filled {
    pair: Pair,
    /// Whether its old entry stood for content, or for space that is not zero in the file.
    needs_sync: bool,
}

/// A write within one cluster.
struct Part<'a> {
    cluster: u64,
    /// First byte, within the cluster.
    from: u64,
    data: &'a [u8],
}

impl Part<'_> {
    fn to(&self) -> u64 {
        self.from + self.data.len() as u64
    }
}

/// Place for a cluster's data.
#[derive(Clone, Copy)]
struct Home {
    host: u64,
    /// Whether it is another cluster than before.
    is_new: bool,
    /// Whether it reads as zeroes, durably.
    is_zero: bool,
}

impl Chain {
    /// Writes `data` at `offset`. Waits for the disk.
    pub fn write(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        data: &[u8],
        offset: u64,
    ) -> io::Result<()> {
        let mut at = 0;
        while at < data.len() {
            let done = self.write_run(view, scratch, &data[at..], offset + at as u64);
            at += self.top.noticed(done)?;
        }
        Ok(())
    }

    /// Writes to one cluster, or to several that all need new ones. Returns the bytes written.
    fn write_run(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        data: &[u8],
        offset: u64,
    ) -> io::Result<usize> {
        let writer = self.top.writer()?;
        let geometry = self.top.geometry();
        let first = geometry.cluster_of(offset);
        let number = geometry.slice_of(first);
        let slice_end = (number + 1) << geometry.slice_bits();
        let end = geometry.cluster_of(offset + data.len() as u64 - 1) + 1;
        let end = end.min(slice_end).min(first + MAX_RUN_CLUSTERS);
        let claim = writer.claims.claim(first, end);
        let slice = self.own_slice(writer, number)?;
        self.write_claimed(view, scratch, &slice, claim.clusters(), data, offset)
    }

    fn write_claimed(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        slice: &Slice,
        clusters: Range<u64>,
        data: &[u8],
        offset: u64,
    ) -> io::Result<usize> {
        let geometry = *self.top.geometry();
        let pair = |c| slice.get(geometry.index_in_slice(c));
        let mut parts = Vec::new();
        let (mut at, mut is_own) = (0usize, false);
        for cluster in clusters {
            let from = geometry.in_cluster(offset + at as u64);
            let n = (geometry.cluster_len() - from).min((data.len() - at) as u64) as usize;
            if n == 0 {
                break;
            }
            let is_next_own = self.is_own(pair(cluster), cluster)?;
            if is_next_own && !parts.is_empty() {
                break;
            }
            is_own = is_next_own;
            parts.push(Part { cluster, from, data: &data[at..at + n] });
            at += n;
            if is_own {
                break;
            }
        }
        let len = parts.iter().map(|part| part.data.len()).sum();
        let old: Vec<Pair> = parts.iter().map(|part| pair(part.cluster)).collect();
        if is_own {
            self.write_own(view, scratch, slice, &parts[0], old[0])?;
            return Ok(len);
        }
        let done = self.write_new(view, scratch, slice, &parts, &old)?;
        Ok(parts[..done].iter().map(|part| part.data.len()).sum())
    }

    /// Whether a cluster is the image's own and may be written where it is.
    fn is_own(&self, (entry, _): Pair, cluster: u64) -> io::Result<bool> {
        if entry & COMPRESSED != 0 {
            return Ok(false);
        }
        if entry & BAD != 0 {
            return Err(contradiction(format!("the entry of cluster {cluster} of the disk")));
        }
        if entry & NO_WRITE != 0 {
            return Err(contradiction(format!(
                "cluster {cluster} of the disk is where tables are"
            )));
        }
        let geometry = self.top.geometry();
        let is_here = entry::is_allocated(entry, geometry);
        let is_zero = entry & entry::ZERO != 0 && !geometry.extended_l2;
        Ok(is_here && !is_zero && entry & COPIED != 0)
    }

    /// Writes to a cluster that the image has already.
    fn write_own(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        slice: &Slice,
        part: &Part<'_>,
        old: Pair,
    ) -> io::Result<()> {
        let home = Home { host: entry::offset(old.0), is_new: false, is_zero: false };
        let filled = self.fill(view, scratch, part, old, home)?;
        if filled.pair == old {
            return Ok(());
        }
        if filled.needs_sync {
            self.top.sync()?;
        }
        let index = self.top.geometry().index_in_slice(part.cluster);
        self.top.set_entries(slice, index, &[filled.pair])
    }

    /// Writes to new clusters, as many as there are in a row. Returns how many parts are done.
    fn write_new(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        slice: &Slice,
        parts: &[Part<'_>],
        old: &[Pair],
    ) -> io::Result<usize> {
        let writer = self.top.writer()?;
        let geometry = *self.top.geometry();
        let first = parts[0].cluster;
        let hosts = if geometry.data_file {
            first..first + parts.len() as u64
        } else {
            match writer.claims.take(parts.len() as u64) {
                Some(taken) => taken,
                None => writer.take_clusters(&mut writer.meta(), parts.len() as u64)?,
            }
        };
        let count = (hosts.end - hosts.start) as usize;
        let mut pairs = Vec::with_capacity(count);
        let filled = parts[..count].iter().zip(old).zip(hosts.clone()).try_fold(
            false,
            |needs_sync, ((part, &old), host)| {
                let host = host << geometry.cluster_bits;
                let home = Home { host, is_new: true, is_zero: !geometry.data_file };
                let filled = self.fill(view, scratch, part, old, home)?;
                pairs.push(filled.pair);
                Ok::<_, io::Error>(needs_sync | filled.needs_sync)
            },
        );
        let ready = filled.and_then(|needs_sync| if needs_sync { self.top.sync() } else { Ok(()) });
        if let Err(e) = ready {
            if !geometry.data_file {
                writer.claims.soil(hosts);
            }
            return Err(e);
        }
        // After an error here the file may have the entries: the clusters stay in use.
        let index = geometry.index_in_slice(first);
        self.top.set_entries(slice, index, &pairs)?;
        self.release_old(writer, &old[..count])?;
        Ok(count)
    }

    /// Releases what entries referred to that are no more. An entry that pointed at a table is a
    /// contradiction: the table stays as it is.
    pub(super) fn release_old(&self, writer: &Writer, old: &[Pair]) -> io::Result<()> {
        let geometry = *self.top.geometry();
        if geometry.data_file || old.iter().all(|&(entry, _)| entry <= entry::ZERO) {
            return Ok(());
        }
        let bits = geometry.cluster_bits;
        let mut meta = writer.meta();
        for &(entry, _) in old {
            if entry & COMPRESSED != 0 {
                let (from, len) = entry::compressed(entry, &geometry);
                let clusters = from >> bits..((from + len - 1) >> bits) + 1;
                meta.check_no_table(clusters.clone())?;
                writer.release(&mut meta, clusters);
            } else if entry::is_allocated(entry, &geometry) {
                let host = entry::offset(entry) >> bits;
                meta.check_no_table(host..host + 1)?;
                // Without the mark that it is ours alone it is somebody else's, too. If the count
                // says otherwise, a leak is better than a cluster that is used twice.
                if entry & COPIED != 0 || meta.refcounts.get(host)? > 1 {
                    writer.release(&mut meta, host..host + 1);
                }
            }
        }
        Ok(())
    }

    /// Writes a part, with what belongs to its pieces, to where it is to be. Returns the entry for
    /// it.
    fn fill(
        &self,
        view: &mut ChainView,
        scratch: &mut Scratch,
        part: &Part<'_>,
        old: Pair,
        home: Home,
    ) -> io::Result<Filled> {
        let geometry = *self.top.geometry();
        let sub_bits = geometry.sub_bits();
        let subs = 1u32 << (geometry.cluster_bits - sub_bits);
        let base = part.cluster << geometry.cluster_bits;
        let (mut whole, mut written, mut needs_sync) = (Vec::new(), 0u64, false);
        for sub in 0..subs {
            let (from, to) = (u64::from(sub) << sub_bits, u64::from(sub + 1) << sub_bits);
            let kind = entry::kind(old.0, old.1, sub, &geometry);
            if kind == Kind::Bad {
                return Err(contradiction(format!(
                    "the entry of byte {} of the disk",
                    base + from
                )));
            }
            let is_touched = part.from < to && part.to() > from;
            let is_covered = part.from <= from && part.to() >= to;
            let has_data = matches!(kind, Kind::Data | Kind::Compressed);
            if is_touched || home.is_new && has_data {
                written |= 1 << sub;
            } else {
                continue;
            }
            if !home.is_new && kind == Kind::Data {
                continue;
            }
            let is_zero = !has_data
                && (kind == Kind::Zero || self.zero_below(view, base + from, to - from)?);
            needs_sync |= !is_zero || !home.is_zero;
            if !is_covered && !is_zero {
                whole.resize(geometry.cluster_len() as usize, 0);
                let old = &mut whole[from as usize..to as usize];
                self.read(view, scratch, old, base + from)?;
            }
        }
        self.write_filled(part, old, home, written, (whole, needs_sync))
    }

    fn write_filled(
        &self,
        part: &Part<'_>,
        old: Pair,
        home: Home,
        written: u64,
        (mut whole, needs_sync): (Vec<u8>, bool),
    ) -> io::Result<Filled> {
        let geometry = *self.top.geometry();
        let sub_bits = geometry.sub_bits();
        let data = &*self.top.data;
        let keeps =
            home.is_new && home.is_zero || written & !self.data_bits(old) == 0 && !home.is_new;
        if whole.is_empty() && keeps {
            // What is around it is right as it is.
            data.write_at(part.data, home.host + part.from)?;
        } else {
            let end = self.top.len_bytes() - (part.cluster << geometry.cluster_bits);
            whole.resize(geometry.cluster_len() as usize, 0);
            whole[part.from as usize..part.to() as usize].copy_from_slice(part.data);
            for sub in (0..32).filter(|sub| written >> sub & 1 != 0) {
                let is_kept = !home.is_new && self.data_bits(old) >> sub & 1 != 0;
                let (from, to) = (sub << sub_bits, (sub + 1) << sub_bits);
                let (from, to) = match is_kept {
                    true => (from.max(part.from), to.min(part.to())),
                    // A data file is no longer than the disk.
                    false if geometry.data_file => (from, to.min(end).max(from)),
                    false => (from, to),
                };
                data.write_at(&whole[from as usize..to as usize], home.host + from)?;
            }
        }
        let bitmap = if geometry.extended_l2 {
            let before = if old.0 & COMPRESSED != 0 { 0 } else { old.1 };
            let alloc = if home.is_new { 0 } else { before & 0xffff_ffff };
            (before & !0xffff_ffff & !(written << 32)) | alloc | written
        } else {
            0
        };
        Ok(Filled { pair: (home.host | COPIED, bitmap), needs_sync })
    }

    /// The pieces of a cluster that are data in it.
    fn data_bits(&self, (entry, bitmap): Pair) -> u64 {
        let geometry = self.top.geometry();
        let subs = 1u32 << (geometry.cluster_bits - geometry.sub_bits());
        let is_data = |sub: &u32| entry::kind(entry, bitmap, *sub, geometry) == Kind::Data;
        (0..subs).filter(is_data).map(|sub| 1 << sub).sum()
    }

    /// Whether the layers below have only zeroes there; their slices are read.
    pub(super) fn zero_below(
        &self,
        view: &mut ChainView,
        offset: u64,
        len: u64,
    ) -> io::Result<bool> {
        let mut at = 0;
        while self.layers() > 1 && at < len {
            match self.find_from(1, view, offset + at, len - at) {
                super::Place::Zero(n) => at += n,
                super::Place::Miss { layer } => self.load(layer, view, offset + at)?,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// The slice, in a table of the image's own, pinned. A table is made, or copied, if need be.
    pub(super) fn own_slice(&self, writer: &Writer, number: u64) -> io::Result<Pinned> {
        let image = &*self.top;
        loop {
            let found = image.slices.get(number).filter(|slice| slice.is_ours());
            if let Some(slice) = found.and_then(Pinned::new) {
                return Ok(slice);
            }
            let mut meta = writer.meta();
            let index = image.geometry().l1_index_of(number);
            image.own_table(writer, &mut meta, index)?;
            // Under the lock nobody evicts it before it is pinned.
            let slice = image.slice_with(number, Some(&meta))?;
            if let Some(slice) = slice.and_then(Pinned::new) {
                image.check_counts(&slice, &mut meta)?;
                return Ok(slice);
            }
        }
    }
}

impl Image {
    /// Sees to it that an L1 entry has a table of the image's own.
    fn own_table(&self, writer: &Writer, meta: &mut Meta, index: u64) -> io::Result<()> {
        let old = self.l1_entry(index)?;
        if old & COPIED != 0 {
            return Ok(());
        }
        let bits = self.geometry().cluster_bits;
        if old == 0 {
            let table = writer.take_clusters(meta, 1)?.start;
            meta.metadata.add(table);
            return self.set_l1(index, table << bits | COPIED);
        }
        let old_table = entry::offset(old) >> bits;
        if meta.refcounts.get(old_table)? <= 1 {
            // It is ours alone, and the mark for it is missing.
            self.set_l1(index, old | COPIED)?;
            self.drop_slices(index);
            return Ok(());
        }
        let table = writer.take_clusters(meta, 1)?.start;
        meta.metadata.add(table);
        let mut bytes = vec![0; self.geometry().cluster_len() as usize];
        self.store.read_padded(&mut bytes, old_table << bits)?;
        self.store.write_at(&bytes, table << bits)?;
        self.sync()?;
        self.set_l1(index, table << bits | COPIED)?;
        self.drop_slices(index);
        writer.release(meta, old_table..old_table + 1);
        Ok(())
    }

    /// Sets an L1 entry, first in the file.
    fn set_l1(&self, index: u64, entry: u64) -> io::Result<()> {
        let l1 = self.l1();
        let Some(slot) = l1.entries.get(index as usize) else {
            return Err(contradiction(format!("the L1 table has no entry {index}")));
        };
        self.store.write_at(&entry.to_be_bytes(), l1.offset + index * 8)?;
        slot.store(entry, std::sync::atomic::Ordering::Release);
        Ok(())
    }

    /// Forgets the slices of a table, which is not where it was. None of them is pinned: they were
    /// not the image's own.
    fn drop_slices(&self, index: u64) {
        let per_table = self.geometry().l2_bits() - self.geometry().slice_bits();
        self.slices.drop_all(index << per_table..(index + 1) << per_table);
    }
}
