//! Opening an image: its tables are read, checked against each other, and put into memory.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, RwLock};

use super::image::{Image, L1};
use super::metadata::Metadata;
use super::refcounts::{self, Refcounts};
use super::slices::Slices;
use super::writer::{Meta, Writer};
use crate::check::{self, Outcome};
use crate::error::Error;
use crate::format::bitmap::{self, Bitmap};
use crate::format::entry::{self, BAD, COPIED};
use crate::format::header::{Header, feature, place};
use crate::format::snapshot::{self, Snapshot};
use crate::format::u64_at;
use crate::limits::{
    DEFAULT_CACHE_LEN_BYTES, MAX_BITMAP_LEN_BYTES, MAX_SNAPSHOT_TABLE_LEN_BYTES,
    MAX_SNAPSHOT_TABLES, MIN_CACHE_LEN_BYTES,
};
use crate::store::Store;

/// Options of opening an image.
#[derive(Debug, Clone)]
pub struct Options {
    /// Name in logs.
    pub name: String,
    /// Whether it may be written.
    pub writable: bool,
    /// Bytes of mapping entries that are kept in memory.
    pub cache_len_bytes: u64,
}

impl Options {
    /// Options with the default cache.
    pub fn new(name: impl Into<String>, writable: bool) -> Self {
        Self { name: name.into(), writable, cache_len_bytes: DEFAULT_CACHE_LEN_BYTES }
    }
}

/// The tables of an image, as they are in the file.
#[derive(Debug)]
pub(crate) struct Tables {
    pub l1: Vec<u64>,
    pub refcount_table: Vec<u64>,
    pub snapshots: Vec<Snapshot>,
    pub snapshot_table_len: u64,
    /// L1 tables of the snapshots.
    pub snapshot_l1s: Vec<Vec<u64>>,
    pub bitmaps: Vec<Bitmap>,
    pub file_len: u64,
}

/// Reads and checks the header.
pub fn read_header(store: &dyn Store) -> Result<Header, Error> {
    let mut bytes = vec![0; Header::MAX_LEN_BYTES];
    let mut got = 0;
    while got < bytes.len() {
        match store
            .read_at(&mut bytes[got..], got as u64)
            .map_err(Error::io("reading the header"))?
        {
            0 => break,
            n => got += n,
        }
    }
    Header::parse(&bytes[..got])
}

/// `count` big endian numbers.
pub(crate) fn read_words(
    store: &dyn Store,
    offset: u64,
    count: u64,
    what: &'static str,
) -> Result<Vec<u64>, Error> {
    let mut bytes = vec![0; count as usize * 8];
    store.read_padded(&mut bytes, offset).map_err(Error::io(what))?;
    Ok((0..count as usize).filter_map(|n| u64_at(&bytes, n * 8)).collect())
}

impl Tables {
    /// Reads all but the L2 tables and the counts.
    pub fn read(store: &dyn Store, header: &Header) -> Result<Self, Error> {
        let words = |offset, count, what| read_words(store, offset, count, what);
        let clusters = u64::from(header.refcount_table_clusters);
        let counts = (clusters << header.geometry.cluster_bits) / 8;
        let (snapshots, snapshot_table_len) = read_snapshots(store, header)?;
        let total: u64 = snapshots.iter().map(|s| u64::from(s.l1_entries)).sum();
        if total > MAX_SNAPSHOT_TABLES {
            let rule = format!("at most {MAX_SNAPSHOT_TABLES}");
            return Err(Error::header("entries of all snapshots' L1 tables", total, rule));
        }
        let mut snapshot_l1s = Vec::new();
        for s in &snapshots {
            let len = u64::from(s.l1_entries) * 8;
            header.check_table("the offset of a snapshot's L1 table", s.l1_offset, len)?;
            snapshot_l1s.push(words(s.l1_offset, s.l1_entries.into(), "reading a snapshot")?);
        }
        let bitmaps = read_bitmaps(store, header)?;
        Ok(Self {
            l1: words(header.l1_offset, header.l1_entries.into(), "reading the L1 table")?,
            refcount_table: words(header.refcount_table_offset, counts, "reading the refcounts")?,
            snapshots,
            snapshot_table_len,
            snapshot_l1s,
            bitmaps,
            file_len: store.len().map_err(Error::io("reading the file's length"))?,
        })
    }

    /// Clusters of the file, the last one perhaps in part.
    pub fn file_clusters(&self, header: &Header) -> u64 {
        self.file_len.div_ceil(header.geometry.cluster_len())
    }

    /// Adds all metadata but L2 tables and refcount blocks. False with a contradiction.
    fn add_ranges(&self, header: &Header, all: &mut Metadata) -> bool {
        let bits = header.geometry.cluster_bits;
        let mut add = |offset: u64, len: u64| {
            let first = offset >> bits;
            all.add_range(first..first + len.div_ceil(1 << bits))
        };
        let mut is_right = add(0, 1);
        is_right &= add(header.l1_offset, u64::from(header.l1_entries) * 8);
        let clusters = u64::from(header.refcount_table_clusters);
        is_right &= add(header.refcount_table_offset, clusters << bits);
        is_right &= add(header.snapshots_offset, self.snapshot_table_len);
        for snapshot in &self.snapshots {
            is_right &= add(snapshot.l1_offset, u64::from(snapshot.l1_entries) * 8);
        }
        if let Some(bitmaps) = &header.bitmaps {
            is_right &= add(bitmaps.directory_offset, bitmaps.directory_len);
            for bitmap in &self.bitmaps {
                is_right &= add(bitmap.table_offset, u64::from(bitmap.table_entries) * 8);
            }
        }
        is_right
    }
}

fn read_snapshots(store: &dyn Store, header: &Header) -> Result<(Vec<Snapshot>, u64), Error> {
    if header.snapshots == 0 {
        return Ok((Vec::new(), 0));
    }
    let file_len = store.len().map_err(Error::io("reading the file's length"))?;
    let len = file_len.saturating_sub(header.snapshots_offset).min(MAX_SNAPSHOT_TABLE_LEN_BYTES);
    // Most tables are small: a page for each snapshot is plenty, more is read where it is not.
    let mut want = (u64::from(header.snapshots) * 4096).min(len);
    loop {
        let mut bytes = vec![0; want as usize];
        store
            .read_padded(&mut bytes, header.snapshots_offset)
            .map_err(Error::io("reading the snapshot table"))?;
        match snapshot::table(&bytes, header.snapshots) {
            Err(_) if want < len => want = (want * 4).min(len),
            other => return other,
        }
    }
}

fn read_bitmaps(store: &dyn Store, header: &Header) -> Result<Vec<Bitmap>, Error> {
    let Some(bitmaps) = &header.bitmaps else { return Ok(Vec::new()) };
    header.check_table("the offset of the bitmap directory", bitmaps.directory_offset, 1)?;
    let end = bitmaps.directory_offset.saturating_add(bitmaps.directory_len);
    let file_len = store.len().map_err(Error::io("reading the file's length"))?;
    if end > file_len {
        let rule = format!("at most the file's, {file_len}");
        return Err(Error::header("the end of the bitmap directory", end, rule));
    }
    let mut bytes = vec![0; bitmaps.directory_len as usize];
    store
        .read_padded(&mut bytes, bitmaps.directory_offset)
        .map_err(Error::io("reading the bitmap directory"))?;
    let all = bitmap::directory(&bytes, bitmaps.count).ok_or_else(|| {
        let rule = format!("enough for its {} bitmaps", bitmaps.count);
        Error::header("the length of the bitmap directory", bitmaps.directory_len, rule)
    })?;
    let limit = MAX_BITMAP_LEN_BYTES >> header.geometry.cluster_bits;
    match all.iter().position(|bitmap| u64::from(bitmap.table_entries) > limit) {
        None => Ok(all),
        Some(n) => {
            let rule = format!("at most {limit} in the table of bitmap {n}");
            Err(Error::header("entries of a bitmap's table", all[n].table_entries.into(), rule))
        }
    }
}

/// Work done at opening, for logs and `ports`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Opened {
    /// Whether the image was not closed, and was checked.
    pub was_checked: bool,
    /// Errors that were mended.
    pub outcome: Outcome,
}

impl Image {
    /// Opens an image. `data` is the data file's store where the header asks for one. `progress` is
    /// called with what share of an image that was not closed has been checked.
    pub fn open(
        store: Arc<dyn Store>,
        data: Option<Arc<dyn Store>>,
        options: &Options,
        progress: &mut dyn FnMut(f64),
    ) -> Result<(Self, Opened), Error> {
        let header = read_header(&*store)?;
        let data = match (data, header.geometry.data_file) {
            (Some(data), true) => data,
            (None, false) => Arc::clone(&store),
            (None, true) => return Err(Error::NotServed(text_of_data_file(&header))),
            (Some(_), false) => {
                let text = "a data file is configured, and the image has none";
                return Err(Error::NotServed(text.into()));
            }
        };
        if header.incompatible & feature::CORRUPT != 0 && options.writable {
            let text = "it is marked as damaged: make a copy, then `qemu-img check -r all` mends \
                        what can be mended; read_only serves what can be read";
            return Err(Error::NotServed(text.into()));
        }
        let mut tables = Tables::read(&*store, &header)?;
        let mut opened = Opened::default();
        if options.writable && header.needs_check() {
            opened.outcome = check::mend(&store, &header, &tables, progress)?;
            // Version 2 cannot say that it was closed.
            let is_dirty = header.incompatible & feature::DIRTY != 0;
            opened.was_checked = is_dirty || opened.outcome != Outcome::default();
            tables = Tables::read(&*store, &header)?;
        }
        Ok((Self::build(store, data, header, tables, options)?, opened))
    }

    fn build(
        store: Arc<dyn Store>,
        data: Arc<dyn Store>,
        header: Header,
        tables: Tables,
        options: &Options,
    ) -> Result<Self, Error> {
        let geometry = header.geometry;
        let clusters = tables.file_clusters(&header);
        let l1 = tables.l1.iter().map(|&raw| {
            let entry = raw & (0x00ff_ffff_ffff_fe00 | COPIED);
            let is_bad = geometry.in_cluster(entry::offset(entry)) != 0
                || entry::offset(entry) >> geometry.cluster_bits >= clusters;
            let is_none = entry::offset(entry) == 0;
            AtomicU64::new(if is_none {
                0
            } else if is_bad {
                BAD
            } else {
                entry
            })
        });
        let l1 = L1 { entries: l1.collect(), offset: header.l1_offset };
        let writer = if options.writable {
            Some(start_writing(&store, &header, &tables, &l1, &options.name)?)
        } else {
            None
        };
        let cache = options.cache_len_bytes.max(MIN_CACHE_LEN_BYTES) / geometry.slice_len();
        let image = Self {
            name: options.name.clone(),
            len_bytes: AtomicU64::new(header.len_bytes),
            store,
            data,
            l1: RwLock::new(Arc::new(l1)),
            l1_generation: AtomicU64::new(0),
            slices: Slices::new(cache as usize),
            writer,
            header,
        };
        Ok(image)
    }
}

fn text_of_data_file(header: &Header) -> String {
    let name = header.data_file_name.as_deref().unwrap_or("");
    format!(
        "its data is in another file (it says {name:?}): name that file in the setting `data_file`, \
         or make an image without one by `qemu-img convert`"
    )
}

/// Marks the image as open, and puts together what writing needs. A contradiction between tables
/// makes an image that is read only, until it is mended.
fn start_writing(
    store: &Arc<dyn Store>,
    header: &Header,
    tables: &Tables,
    l1: &L1,
    name: &str,
) -> Result<Writer, Error> {
    let geometry = header.geometry;
    let was_checked = header.needs_check();
    let clusters = tables.file_clusters(header);
    let mut metadata = Metadata::default();
    let mut is_right = tables.add_ranges(header, &mut metadata);
    let (mut table, blocks) = refcounts::check_table(&tables.refcount_table, &geometry, clusters);
    let mut all = own_tables(l1, &geometry);
    all.extend(&blocks);
    is_right &= metadata.add_tables(all).is_empty();
    // A snapshot's tables may be the image's own, or another's: once is enough.
    let mut others = snapshot_tables(tables, &geometry);
    others.sort_unstable();
    others.dedup();
    others.retain(|&table| !metadata.contains(table));
    metadata.add_tables(others);
    let twice: Vec<u64> = {
        let mut seen = blocks.clone();
        seen.sort_unstable();
        let twice = seen.windows(2).filter(|pair| pair[0] == pair[1]);
        twice.map(|pair| pair[0]).collect()
    };
    refcounts::mark_bad(&mut table, &geometry, &twice);
    let offset = header.refcount_table_offset;
    let refcounts = Refcounts::new(Arc::clone(store), geometry, offset, table);
    let whole = tables.file_len >> geometry.cluster_bits;
    let meta = Meta {
        refcounts,
        metadata,
        hint: 0,
        // The end of a device may be within a cluster, which stays unused then.
        fresh: if store.can_grow() { clusters } else { whole },
        end: whole,
        reserve: Image::first_reserve(geometry.cluster_bits),
        low: 0,
        is_refilling: false,
        released: Vec::new(),
        counted: Default::default(),
        uses_gaps: was_checked || !store.can_grow(),
        opened_len: tables.file_len,
    };
    let bits = if is_right {
        mark_open(&**store, header, tables).map_err(Error::io("marking the image as open"))?
    } else {
        tracing::error!(image = name, "qcow2 image: its tables overlap; nothing is written to it");
        header.incompatible | feature::CORRUPT
    };
    Ok(Writer::new(meta, bits))
}

fn own_tables(l1: &L1, geometry: &crate::format::geometry::Geometry) -> Vec<u64> {
    let entries = l1.entries.iter().map(|e| e.load(std::sync::atomic::Ordering::Relaxed));
    entries.filter(|&e| e > BAD).map(|e| entry::offset(e) >> geometry.cluster_bits).collect()
}

fn snapshot_tables(tables: &Tables, geometry: &crate::format::geometry::Geometry) -> Vec<u64> {
    let entries = tables.snapshot_l1s.iter().flatten();
    let offsets = entries.map(|&e| entry::offset(e)).filter(|&offset| offset != 0);
    offsets.map(|offset| offset >> geometry.cluster_bits).collect()
}

/// Says in the file that it is open, durably: counts may be wrong from now on, bitmaps are, and
/// what we do not know how to keep up to date is cleared. Returns the incompatible features.
fn mark_open(store: &dyn Store, header: &Header, tables: &Tables) -> io::Result<u64> {
    if let Some(bitmaps) = &header.bitmaps {
        for bitmap in &tables.bitmaps {
            let at = bitmaps.directory_offset + (bitmap.at + bitmap::FLAGS_AT) as u64;
            store.write_at(&(bitmap.flags | bitmap::IN_USE).to_be_bytes(), at)?;
        }
    }
    if header.geometry.version < 3 {
        return Ok(0);
    }
    let known = feature::BITMAPS | feature::RAW_DATA_FILE;
    if header.autoclear & !known != 0 {
        store.write_at(&(header.autoclear & known).to_be_bytes(), place::AUTOCLEAR)?;
    }
    let bits = header.incompatible | feature::DIRTY;
    store.write_at(&bits.to_be_bytes(), place::INCOMPATIBLE)?;
    store.sync()?;
    Ok(bits)
}
