//! Parts of an image that is written: free clusters, the reserve, and released clusters.
//!
//! Clusters come from the *reserve*: counted as used, within the file, and zero, all of it so
//! durable that an entry may refer to them at any time. So a write to space that was never written
//! needs no other order than data before entry. They go by *release*: when no entry refers to a
//! cluster any more, that is durable, and no request that saw the old entry is under way, its count
//! goes down, and at zero its room goes back to the host.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use base::sync::lock;

use super::claims::Claims;
use super::epochs::Epochs;
use super::metadata::Metadata;
use super::refcounts::Refcounts;
use super::slices::Numbers;
use super::syncs::Syncs;
use crate::error::{Contradiction, contradiction};
use crate::format::geometry::Geometry;
use crate::format::header::{feature, place};
use crate::limits::{
    MAX_EXTENSION_LEN_BYTES, MAX_RELEASED_LEN_BYTES, MAX_RESERVE_CLUSTERS, MAX_RESERVE_LEN_BYTES,
    MIN_EXTENSION_LEN_BYTES, MIN_RESERVE_LEN_BYTES,
};
use crate::store::Store;

/// Files of an image, for writing.
#[derive(Debug)]
pub(crate) struct Files {
    /// Name of the image in logs.
    pub name: String,
    pub geometry: Geometry,
    pub store: Arc<dyn Store>,
    /// File with the data clusters: `store`, or the data file.
    pub data: Arc<dyn Store>,
}

/// Parts of an image for writing.
#[derive(Debug)]
pub struct Writer {
    files: Files,
    /// Claims on entries, and the reserve.
    pub claims: Claims,
    /// Epochs of requests, after which freed clusters are untouched.
    pub epochs: Epochs,
    /// Syncs of the file.
    pub syncs: Syncs,
    meta: Mutex<Meta>,
    /// Number of releases.
    changes: AtomicU64,
    /// Releases up to here are durable: no entry refers to them after a power cut.
    synced: AtomicU64,
    /// Number of clusters that wait to be freed.
    pending: AtomicU64,
    is_damaged: AtomicBool,
    /// Bytes, see [`Writer::memory_len`].
    memory: AtomicU64,
    /// Whether a change failed: clusters may be counted as used with nothing that refers to them.
    may_leak: AtomicBool,
    /// Incompatible features as they are in the file.
    incompatible: AtomicU64,
}

/// State that is only touched under the lock of the map.
#[derive(Debug)]
pub struct Meta {
    /// Refcounts of the file's clusters.
    pub refcounts: Refcounts,
    /// Clusters that no data of the guest is written to.
    pub metadata: Metadata,
    /// Cluster below which none is free.
    pub hint: u64,
    /// Cluster from which on the file has never been written, and none is in use.
    pub fresh: u64,
    /// Number of clusters that the file durably has.
    pub end: u64,
    /// Number of clusters of the next reserve.
    pub reserve: u64,
    /// Number of clusters at which the reserve is low: half of the last refill.
    pub low: u64,
    /// Whether a thread is filling the reserve.
    pub is_refilling: bool,
    /// Released clusters that are not yet counted as free.
    pub released: Vec<Release>,
    /// Slices whose data is counted as used, see [`Image::check_counts`].
    pub counted: Numbers,
    /// Whether clusters that no block counts are free: the image was checked at opening, or it is
    /// on a device, which has no other space.
    pub uses_gaps: bool,
    /// Length of the file at opening, to which it goes back where no cluster was added.
    pub opened_len: u64,
}

/// Clusters that no entry refers to any more.
#[derive(Debug)]
pub struct Release {
    clusters: Range<u64>,
    /// Number of the release: durable when that is.
    change: u64,
    epoch: u64,
}

impl Meta {
    /// Checks that none of the clusters, which were the guest's, holds metadata.
    pub fn check_no_table(&self, clusters: Range<u64>) -> io::Result<()> {
        match self.metadata.first_of(clusters) {
            Some(taken) => Err(contradiction(format!("cluster {taken} is data, and has tables"))),
            None => Ok(()),
        }
    }

    /// Bytes of memory, about.
    pub fn memory_len(&self) -> u64 {
        let counted = self.counted.memory_len();
        self.metadata.memory_len() + counted + crate::limits::REFCOUNT_CACHE_LEN_BYTES
    }
}

impl Writer {
    pub(crate) fn new(files: Files, meta: Meta, incompatible: u64) -> Self {
        Self {
            files,
            claims: Claims::default(),
            epochs: Epochs::default(),
            syncs: Syncs::default(),
            meta: Mutex::new(meta),
            changes: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            pending: AtomicU64::new(0),
            memory: AtomicU64::new(0),
            is_damaged: AtomicBool::new(incompatible & feature::CORRUPT != 0),
            may_leak: AtomicBool::new(false),
            incompatible: AtomicU64::new(incompatible),
        }
    }

    /// Notes a change that failed: the next opening has to look for leaks.
    pub(crate) fn note_leaks(&self) {
        self.may_leak.store(true, Ordering::Relaxed);
    }

    pub(crate) fn meta(&self) -> MutexGuard<'_, Meta> {
        lock(&self.meta)
    }

    /// Bytes of memory that counts and metadata take, about: as last seen while the lock is held
    /// over I/O, so that whoever asks does not wait for the disk.
    pub(crate) fn memory_len(&self) -> u64 {
        if let Ok(meta) = self.meta.try_lock() {
            self.memory.store(meta.memory_len(), Ordering::Relaxed);
        }
        self.memory.load(Ordering::Relaxed)
    }

    /// An error where the image turned out to be damaged: nothing is written to it any more.
    #[inline]
    pub fn check(&self) -> io::Result<()> {
        if self.is_damaged.load(Ordering::Relaxed) {
            return Err(contradiction("it was found to be damaged before"));
        }
        Ok(())
    }

    /// Whether it was.
    pub fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Relaxed)
    }

    /// Clusters that wait to be freed; those of a damaged image wait for its next opening.
    pub fn pending(&self) -> u64 {
        if self.is_damaged() {
            return 0;
        }
        self.pending.load(Ordering::Relaxed)
    }

    /// Clusters that no entry refers to any more: freed after the next sync.
    pub(crate) fn release(&self, meta: &mut Meta, clusters: Range<u64>) {
        if clusters.is_empty() {
            return;
        }
        let count = clusters.end - clusters.start;
        let pending = self.pending.fetch_add(count, Ordering::Relaxed) + count;
        if pending << self.geometry().cluster_bits > MAX_RELEASED_LEN_BYTES {
            self.claims.poke();
        }
        let change = self.changes.fetch_add(1, Ordering::SeqCst) + 1;
        meta.released.push(Release { clusters, change, epoch: self.epochs.now() });
    }

    /// Number of releases that a flush covers which begins now, for [`Writer::flush_ended`].
    pub fn flush_begins(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Notes that a flush is done which covered that many releases.
    pub fn flush_ended(&self, covers: u64) {
        self.synced.fetch_max(covers, Ordering::SeqCst);
        if self.pending() > 0 {
            self.claims.poke();
        }
    }

    #[inline]
    fn geometry(&self) -> &Geometry {
        &self.files.geometry
    }

    fn store(&self) -> &dyn Store {
        &*self.files.store
    }

    /// Makes durable what was written before. Waits.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let covers = self.flush_begins();
        if self.geometry().data_file {
            self.syncs.sync(&[&*self.files.data, self.store()])?;
        } else {
            self.syncs.sync(&[self.store()])?;
        }
        self.flush_ended(covers);
        Ok(())
    }

    /// Frees what can be freed, and fills the reserve.
    pub(crate) fn maintain(&self) -> io::Result<()> {
        self.noticed(self.maintain_inner())
    }

    fn maintain_inner(&self) -> io::Result<()> {
        if self.pending() << self.geometry().cluster_bits > MAX_RELEASED_LEN_BYTES {
            self.sync()?;
        }
        let mut meta = self.meta();
        self.settle(&mut meta)?;
        if meta.is_refilling || !self.is_low(&meta) {
            return Ok(());
        }
        meta.is_refilling = true;
        let (picked, low) = (self.pick(&mut meta), meta.low);
        drop(meta);
        let done = picked.and_then(|picked| self.reserve(picked, low));
        self.meta().is_refilling = false;
        done
    }

    /// A panic ended some work on the image: what it had taken may be lost, and others go on.
    pub(crate) fn panicked(&self) {
        self.note_leaks();
        self.meta().is_refilling = false;
    }

    /// Adds to the reserve what was picked for it.
    fn reserve(&self, picked: Picked, low: u64) -> io::Result<()> {
        if picked.needs_sync {
            self.sync()?;
        }
        picked.ranges.into_iter().for_each(|range| self.claims.add(range, low));
        Ok(())
    }

    fn is_low(&self, meta: &Meta) -> bool {
        self.claims.reserved() <= meta.low
    }

    /// Takes up to `max` clusters in a row, counted as used, durably zero and within the file.
    /// Waits where the reserve is empty.
    pub(crate) fn take_clusters(&self, meta: &mut Meta, max: u64) -> io::Result<Range<u64>> {
        loop {
            if let Some(taken) = self.claims.take(max) {
                return Ok(taken);
            }
            let picked = self.pick(meta)?;
            self.reserve(picked, meta.low)?;
        }
    }

    /// `count` clusters in a row, for a table that needs them so. They may hold anything.
    pub(crate) fn take_row(&self, meta: &mut Meta, count: u64) -> io::Result<u64> {
        // A refcount block may be in the way at each of its turns.
        if count >= self.geometry().block_entries() {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        if !self.store().can_grow() {
            return self.take_old_row(meta, count);
        }
        loop {
            let found = self.next_fresh(meta, count)?;
            meta.refcounts.set(found.clone(), 1)?;
            if found.end - found.start == count {
                return Ok(found.start);
            }
            self.claims.soil(found);
        }
    }

    /// Takes clusters in a row where the file cannot grow, see [`Writer::take_row`].
    fn take_old_row(&self, meta: &mut Meta, count: u64) -> io::Result<u64> {
        let mut from = 0;
        while let Some(found) = self.find_old(meta, from, count)? {
            if found.end - found.start == count {
                meta.refcounts.set(found.clone(), 1)?;
                return Ok(found.start);
            }
            from = found.end;
        }
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }

    /// Free clusters from `from` on, where the file may have been written before. On a device, and
    /// in what a kill left behind, there are such that no block counts yet.
    fn find_old(&self, meta: &mut Meta, mut from: u64, max: u64) -> io::Result<Option<Range<u64>>> {
        loop {
            let Meta { refcounts, metadata, fresh, .. } = &mut *meta;
            if let Some(found) = refcounts.find_free(from..*fresh, max, metadata)? {
                return Ok(Some(found));
            }
            let Some(first) = self.fill_gap(meta)? else { return Ok(None) };
            from = first;
        }
    }

    /// Makes a block for the first clusters that none counts, which are free then. Returns the
    /// first.
    fn fill_gap(&self, meta: &mut Meta) -> io::Result<Option<u64>> {
        let gap = meta.refcounts.first_without_block().filter(|&gap| gap < meta.fresh);
        let Some(gap) = gap.filter(|_| meta.uses_gaps) else { return Ok(None) };
        let end = (gap + self.geometry().block_entries()).min(meta.fresh);
        meta.metadata.check_uncounted(gap..end)?;
        self.make_countable(meta, gap)?;
        Ok(Some(gap))
    }

    /// Counts free clusters as used, and zeroes those that may not be zero.
    fn pick(&self, meta: &mut Meta) -> io::Result<Picked> {
        let want = meta.reserve;
        // Somebody waits, or goes the longer way: the next one had better last.
        let factor = if self.claims.reserved() == 0 { 8 } else { 2 };
        // In version 2 nothing says after a power cut that counts may be wrong.
        let mut picked = Picked { ranges: Vec::new(), needs_sync: self.geometry().version < 3 };
        let holes = self.pick_holes(meta, want, &mut picked);
        let found: u64 = picked.ranges.iter().map(|r| r.end - r.start).sum();
        let all = holes.and_then(|()| {
            if found < want {
                let fresh = self.next_fresh(meta, want - found)?;
                meta.refcounts.set(fresh.clone(), 1)?;
                picked.ranges.push(fresh);
            }
            Ok(())
        });
        match all {
            // What was found is enough for now.
            Err(_) if !picked.ranges.is_empty() => {}
            all => all?,
        }
        // A device may write the zeroes of it one by one, while others wait for the map.
        let most_len = MAX_RESERVE_LEN_BYTES >> if self.store().can_grow() { 0 } else { 4 };
        let most = most_len >> self.geometry().cluster_bits;
        meta.low = want / 2;
        meta.reserve = (want * factor).min(most.clamp(1, MAX_RESERVE_CLUSTERS)).max(want);
        Ok(picked)
    }

    fn pick_holes(&self, meta: &mut Meta, want: u64, picked: &mut Picked) -> io::Result<()> {
        let bits = self.geometry().cluster_bits;
        let mut left = want;
        while left > 0 {
            let Some(hole) = self.next_hole(meta, left)? else { break };
            let count = hole.end - hole.start;
            self.store().zero(hole.start << bits, count << bits, true)?;
            meta.refcounts.set(hole.clone(), 1)?;
            left -= count;
            picked.needs_sync = true;
            picked.ranges.push(hole);
        }
        Ok(())
    }

    /// Free clusters where the file may have been written before, from the hint on.
    fn next_hole(&self, meta: &mut Meta, max: u64) -> io::Result<Option<Range<u64>>> {
        let found = self.find_old(meta, meta.hint, max)?;
        meta.hint = found.as_ref().map_or(meta.fresh, |found| found.end);
        Ok(found)
    }

    /// Free clusters where the file was never written.
    fn next_fresh(&self, meta: &mut Meta, max: u64) -> io::Result<Range<u64>> {
        loop {
            let first = meta.fresh;
            self.extend_to(meta, first + 1, max)?;
            self.make_countable(meta, first)?;
            let first = meta.fresh;
            let entries = self.geometry().block_entries();
            let end = ((first / entries + 1) * entries).min(meta.end);
            if first >= end {
                continue;
            }
            let Meta { refcounts, metadata, .. } = meta;
            let found = refcounts.find_free(first..end, max, metadata)?;
            meta.fresh = found.as_ref().map_or(end, |found| found.end);
            if let Some(found) = found {
                return Ok(found);
            }
        }
    }

    /// Extends the file so that it has at least `clusters`, and for some time to come.
    fn extend_to(&self, meta: &mut Meta, clusters: u64, wanted: u64) -> io::Result<()> {
        if clusters <= meta.end {
            return Ok(());
        }
        if !self.store().can_grow() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let bits = self.geometry().cluster_bits;
        let len = meta.end << bits;
        let step = (len / 8).clamp(MIN_EXTENSION_LEN_BYTES, MAX_EXTENSION_LEN_BYTES);
        let far = clusters.max((len + step) >> bits);
        let near = clusters + wanted;
        // A file system may not have files that large, or want the room at once.
        let longer = |end: u64| self.store().set_len(end << bits).map(|()| end);
        let end = longer(far).or_else(|_| longer(near)).or_else(|_| longer(clusters))?;
        self.sync()?;
        meta.end = end;
        Ok(())
    }

    /// Sees to it that there is a refcount block for `cluster`, the first fresh one.
    fn make_countable(&self, meta: &mut Meta, cluster: u64) -> io::Result<()> {
        if !meta.refcounts.reaches(cluster) {
            let new = meta.refcounts.larger_table()?;
            let end = new.begin + new.blocks + new.clusters;
            self.extend_to(meta, end, 0)?;
            let Meta { refcounts, metadata, .. } = &mut *meta;
            let old = refcounts.grow(new, metadata, &mut || self.sync())?;
            meta.fresh = meta.fresh.max(end);
            self.release(meta, old);
            return Ok(());
        }
        if meta.refcounts.has_block(cluster) {
            return Ok(());
        }
        let is_v2 = self.geometry().version < 3;
        let mut sync = || if is_v2 { self.sync() } else { Ok(()) };
        let Meta { refcounts, metadata, .. } = &mut *meta;
        refcounts.make_block(cluster, metadata, &mut sync)?;
        let entries = self.geometry().block_entries();
        if cluster.is_multiple_of(entries) {
            meta.fresh = meta.fresh.max(cluster + 1);
        }
        Ok(())
    }

    /// Frees what may be freed by now.
    fn settle(&self, meta: &mut Meta) -> io::Result<()> {
        for soiled in self.claims.take_soiled() {
            self.release(meta, soiled);
        }
        let (synced, epoch) = (self.synced.load(Ordering::SeqCst), self.epochs.advance());
        let is_over = |r: &Release| r.change <= synced && r.epoch + 2 <= epoch;
        let over: Vec<_> = {
            let (over, left) = std::mem::take(&mut meta.released).into_iter().partition(is_over);
            meta.released = left;
            over
        };
        // Each of them, whatever becomes of another: what cannot be counted down is a leak.
        let mut all = Ok(());
        for Release { clusters, .. } in over {
            self.pending.fetch_sub(clusters.end - clusters.start, Ordering::Relaxed);
            all = all.and(self.count_down(meta, clusters));
        }
        all
    }

    fn count_down(&self, meta: &mut Meta, clusters: Range<u64>) -> io::Result<()> {
        let bits = self.geometry().cluster_bits;
        let mut at = clusters.start;
        while at < clusters.end {
            let count = meta.refcounts.get(at)?;
            let mut end = at + 1;
            while end < clusters.end && meta.refcounts.get(end)? == count {
                end += 1;
            }
            let Some(less) = count.checked_sub(1) else {
                return Err(contradiction(format!("cluster {at} was in use with refcount 0")));
            };
            meta.refcounts.set(at..end, less)?;
            if less == 0 {
                (at..end).for_each(|cluster| meta.metadata.remove(cluster));
                meta.hint = meta.hint.min(at);
                // Its room is the host's again. What cannot be unmapped is zeroed when it is
                // reused.
                let _ = self.store().zero(at << bits, (end - at) << bits, true);
            }
            at = end;
        }
        Ok(())
    }

    /// Passes a result on, and notes what failed, and a contradiction in the image.
    pub(crate) fn noticed<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.inspect_err(|e| {
            self.note_leaks();
            let cause = e.get_ref().and_then(|cause| cause.downcast_ref::<Contradiction>());
            if let Some(cause) = cause {
                self.mark_damaged(&cause.0);
            }
        })
    }

    /// Marks the image as damaged, for us and for whoever opens it next.
    pub(crate) fn mark_damaged(&self, what: &str) {
        if self.is_damaged.swap(true, Ordering::SeqCst) {
            return;
        }
        tracing::error!(
            image = self.files.name,
            "qcow2 image is damaged: {what}. Nothing is written to it any more; what can be read is. \
             Make a copy, then `qemu-img check -r all` mends what can be mended"
        );
        let bits = self.incompatible.fetch_or(feature::CORRUPT, Ordering::SeqCst);
        if let Err(e) = self.write_incompatible(bits | feature::CORRUPT) {
            tracing::error!(image = self.files.name, "the mark of damage cannot be written: {e}");
        }
    }

    fn write_incompatible(&self, bits: u64) -> io::Result<()> {
        if self.geometry().version < 3 {
            return Ok(());
        }
        self.store().write_at(&bits.to_be_bytes(), place::INCOMPATIBLE)?;
        self.store().sync()
    }

    /// Ends writing, see [`Image::close`](crate::Image::close).
    pub(crate) fn close(&self) -> io::Result<()> {
        if self.is_damaged() {
            return self.sync();
        }
        self.noticed(self.close_inner())
    }

    fn close_inner(&self) -> io::Result<()> {
        let mut meta = self.meta();
        let soiled = self.claims.take_soiled();
        soiled.into_iter().for_each(|s| self.release(&mut meta, s));
        self.sync()?;
        while !meta.released.is_empty() {
            let before = meta.released.len();
            self.settle(&mut meta)?;
            if meta.released.len() == before {
                let text = "requests are still under way: freed clusters stay for the next opening";
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
            }
        }
        while let Some(unused) = self.claims.take(u64::MAX) {
            meta.refcounts.set(unused.clone(), 0)?;
            meta.fresh = if meta.fresh == unused.end { unused.start } else { meta.fresh };
        }
        self.cut(&mut meta)?;
        self.sync()?;
        if self.may_leak.load(Ordering::Relaxed) {
            tracing::warn!(
                image = self.files.name,
                "writing failed before: it is checked when it is opened"
            );
            return Ok(());
        }
        let bits = self.incompatible.load(Ordering::SeqCst) & !feature::DIRTY;
        self.write_incompatible(bits)
    }

    /// Cuts off what the file was extended by and did not use.
    fn cut(&self, meta: &mut Meta) -> io::Result<()> {
        let bits = self.geometry().cluster_bits;
        let needed = (meta.fresh << bits).max(meta.opened_len);
        if self.store().can_grow() && self.store().len()? > needed {
            self.store().set_len(needed)?;
        }
        Ok(())
    }

    /// Number of clusters of the first reserve.
    pub(crate) fn first_reserve(cluster_bits: u32) -> u64 {
        (MIN_RESERVE_LEN_BYTES >> cluster_bits).clamp(4, MAX_RESERVE_CLUSTERS)
    }
}

/// Clusters that [`Writer::pick`] found.
struct Picked {
    ranges: Vec<Range<u64>>,
    /// Whether a sync must come before their use.
    needs_sync: bool,
}
