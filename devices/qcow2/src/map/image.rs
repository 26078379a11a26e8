//! Image of a chain: its tables in memory, and the only way to them.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use base::sync::read;

use super::metadata::Metadata;
use super::slices::{Pair, Slice, Slices};
use super::writer::{Meta, Writer};
use crate::error::contradiction;
use crate::format::entry::{self, BAD, COMPRESSED, NO_WRITE};
use crate::format::geometry::Geometry;
use crate::format::header::Header;
use crate::store::Store;

/// An L1 table in memory: entries without their reserved bits.
#[derive(Debug)]
pub struct L1 {
    /// Offsets of L2 tables, and whether they are the image's own.
    pub entries: Box<[AtomicU64]>,
    /// Offset of the table in the file.
    pub offset: u64,
}

/// An open image, without its backing files.
#[derive(Debug)]
pub struct Image {
    /// Name in logs.
    pub(crate) name: String,
    pub(crate) header: Header,
    pub(crate) store: Arc<dyn Store>,
    /// File with the data clusters: `store`, or the data file.
    pub(crate) data: Arc<dyn Store>,
    pub(crate) len_bytes: AtomicU64,
    pub(crate) l1: RwLock<Arc<L1>>,
    /// Counts the exchanges of `l1`.
    pub(crate) l1_generation: AtomicU64,
    pub(crate) slices: Slices,
    /// Parts for writing; `None`: read-only.
    pub(crate) writer: Option<Writer>,
}

impl Image {
    /// Sizes.
    #[inline]
    pub fn geometry(&self) -> &Geometry {
        &self.header.geometry
    }

    /// Size of the disk in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    /// The header as it was at opening.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Name in logs, as given at opening.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The current L1 table.
    pub(crate) fn l1(&self) -> Arc<L1> {
        Arc::clone(&read(&self.l1))
    }

    /// The parts for writing; an error where there are none, or where the image has turned out to
    /// be damaged.
    pub(crate) fn writer(&self) -> io::Result<&Writer> {
        let writer = self.writer.as_ref().ok_or_else(read_only)?;
        writer.check()?;
        Ok(writer)
    }

    /// Gets a slice, read if need be; `None` where there is no table. Takes the lock of the map.
    pub(crate) fn slice(&self, number: u64) -> io::Result<Option<Arc<Slice>>> {
        if let Some(slice) = self.slices.get(number) {
            return Ok(Some(slice));
        }
        match &self.writer {
            Some(writer) => {
                let meta = writer.meta();
                self.slice_with(number, Some(&meta))
            }
            None => self.slice_with(number, None),
        }
    }

    /// Gets a slice under the lock of the map, where there is one: see [`Image::slice`].
    pub(crate) fn slice_with(
        &self,
        number: u64,
        meta: Option<&Meta>,
    ) -> io::Result<Option<Arc<Slice>>> {
        if let Some(slice) = self.slices.get(number) {
            return Ok(Some(slice));
        }
        let index = self.geometry().l1_index_of(number);
        let l1_entry = self.l1_entry(index)?;
        if l1_entry == 0 {
            return Ok(None);
        }
        let offset = entry::offset(l1_entry) + self.geometry().offset_in_table(number);
        let mut bytes = vec![0; self.geometry().slice_len() as usize];
        self.store.read_padded(&mut bytes, offset)?;
        let metadata = meta.map(|meta| &meta.metadata);
        let first = number << self.geometry().slice_bits();
        let check = |n, entry| check_entry(entry, first + n as u64, self.geometry(), metadata);
        let is_own = l1_entry & entry::COPIED != 0;
        let slice = Slice::new(number, offset, is_own, &bytes, self.geometry(), check);
        if meta.is_some_and(|meta| meta.counted.contains(number)) {
            slice.set_counted();
        }
        Ok(Some(self.slices.add(slice)))
    }

    /// Sees to it that the slice's data may be overwritten where it is: a cluster that is counted
    /// as free may become a table at any time, or has become one. For the first write only: reads
    /// need no counts.
    pub(crate) fn check_counts(&self, slice: &Slice, meta: &mut Meta) -> io::Result<()> {
        let geometry = *self.geometry();
        if slice.is_counted() {
            return Ok(());
        }
        if !geometry.data_file {
            let entries = (0..1usize << geometry.slice_bits()).map(|n| slice.get(n).0);
            let ours = entries.filter(|&entry| {
                entry & COMPRESSED == 0
                    && entry::may_write(entry)
                    && entry::is_allocated(entry, &geometry)
            });
            let hosts = ours.map(|entry| entry::offset(entry) >> geometry.cluster_bits);
            let mut hosts: Vec<u64> = hosts.collect();
            hosts.sort_unstable();
            hosts.iter().try_for_each(|&host| meta.check_no_table(host..host + 1))?;
            if let Some(free) = meta.refcounts.first_uncounted(&hosts)? {
                let text = format!("cluster {free} of the file is in use, and counted as free");
                return Err(contradiction(text));
            }
        }
        meta.counted.add(slice.number);
        slice.set_counted();
        Ok(())
    }

    /// An entry of the L1 table; 0 behind its end.
    pub(crate) fn l1_entry(&self, index: u64) -> io::Result<u64> {
        let l1 = self.l1();
        let entry = l1.entries.get(index as usize).map_or(0, |e| e.load(Ordering::Acquire));
        if entry & BAD != 0 {
            return Err(points_nowhere(index));
        }
        Ok(entry)
    }

    /// The entry of a guest cluster: 0 where there is no table.
    pub(crate) fn entry(&self, cluster: u64) -> io::Result<Pair> {
        let slice = self.slice(self.geometry().slice_of(cluster))?;
        Ok(slice.map_or((0, 0), |slice| slice.get(self.geometry().index_in_slice(cluster))))
    }

    /// Sets entries in a row, first in the file. The caller has claimed their clusters.
    pub(crate) fn set_entries(
        &self,
        slice: &Slice,
        index: usize,
        pairs: &[Pair],
    ) -> io::Result<()> {
        let bytes = encode(pairs, self.geometry());
        let offset = slice.offset + index as u64 * self.geometry().entry_len();
        let written = self.store.write_at(&bytes, offset);
        match written {
            Ok(()) => pairs.iter().enumerate().for_each(|(n, &pair)| slice.set(index + n, pair)),
            Err(_) => slice.mark_unsure(index..index + pairs.len()),
        }
        written
    }

    /// Makes durable what was written before. Waits.
    pub fn sync(&self) -> io::Result<()> {
        self.writer.as_ref().map_or(Ok(()), Writer::sync)
    }

    /// Looks after the map: frees what can be freed, fills the reserve. To be called by a thread
    /// that may wait, when [`Claims::take_work`](super::claims::Claims::take_work) says so.
    pub fn maintain(&self) -> io::Result<()> {
        self.writer()?.maintain()
    }

    /// A panic ended some work on the image: what it had taken may be lost, and others go on.
    pub fn panicked(&self) {
        self.writer.iter().for_each(Writer::panicked);
    }

    /// Passes a result on, and notes what failed, and a contradiction in the image.
    pub(crate) fn noticed<T>(&self, result: io::Result<T>) -> io::Result<T> {
        match &self.writer {
            Some(writer) => writer.noticed(result),
            None => result,
        }
    }

    /// Ends writing: nothing is reserved, freed clusters are counted so, and the file says that it
    /// was closed. Nobody uses the image any more. After an error, or where writing failed before,
    /// it stays marked as not closed.
    pub fn close(&self) -> io::Result<()> {
        self.writer.as_ref().map_or(Ok(()), Writer::close)
    }

    /// Whether it was found to be damaged, so that nothing is written to it any more.
    pub fn is_damaged(&self) -> bool {
        self.writer.as_ref().is_some_and(Writer::is_damaged)
    }

    /// Bytes of memory that tables take now, about.
    pub fn memory_len(&self) -> u64 {
        let l1 = self.l1().entries.len() as u64 * 8;
        let slices = self.slices.count() as u64 * self.geometry().slice_len();
        let meta = self.writer.as_ref().map_or(0, Writer::memory_len);
        l1 + slices + meta
    }
}

/// Error of an entry of the L1 table that is [`BAD`].
pub(crate) fn points_nowhere(index: u64) -> io::Error {
    contradiction(format!("entry {index} of the L1 table points at no table"))
}

pub(crate) fn read_only() -> io::Error {
    io::Error::from_raw_os_error(libc::EROFS)
}

/// The bytes of entries in a row.
pub(crate) fn encode(pairs: &[Pair], geometry: &Geometry) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(pairs.len() * 16);
    for &(entry, bitmap) in pairs {
        bytes.extend_from_slice(&entry.to_be_bytes());
        if geometry.extended_l2 {
            bytes.extend_from_slice(&bitmap.to_be_bytes());
        }
    }
    bytes
}

/// Marks an entry that cannot be used, or not for writing.
fn check_entry(entry: u64, cluster: u64, geometry: &Geometry, metadata: Option<&Metadata>) -> u64 {
    if entry & entry::COMPRESSED != 0 {
        return if geometry.data_file { BAD } else { entry };
    }
    if entry & entry::ZERO != 0 && geometry.version < 3 {
        return entry | BAD;
    }
    let offset = entry::offset(entry);
    if !entry::is_allocated(entry, geometry) {
        return entry;
    }
    let is_placed = geometry.in_cluster(offset) == 0
        && (!geometry.data_file || offset == cluster << geometry.cluster_bits);
    if !is_placed {
        return entry | BAD;
    }
    let host = offset >> geometry.cluster_bits;
    let is_metadata = !geometry.data_file && metadata.is_some_and(|m| m.contains(host));
    if is_metadata { entry | NO_WRITE } else { entry }
}
