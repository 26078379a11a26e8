//! Opening an image: its tables are read, checked against each other, and put into memory.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, RwLock};

use super::image::{Image, L1};
use super::metadata::Metadata;
use super::refcounts::{self, Refcounts};
use super::slices::Slices;
use super::tables::Tables;
use super::writer::{Files, Meta, Writer};
use crate::check::{self, Outcome};
use crate::error::Error;
use crate::format::bitmap;
use crate::format::entry::{self, BAD, COPIED};
use crate::format::header::{Header, feature, place};
use crate::limits::{DEFAULT_CACHE_LEN_BYTES, MIN_CACHE_LEN_BYTES};
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
            let files = Files {
                name: options.name.clone(),
                geometry,
                store: Arc::clone(&store),
                data: Arc::clone(&data),
            };
            Some(start_writing(files, &header, &tables, &l1)?)
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
fn start_writing(files: Files, header: &Header, tables: &Tables, l1: &L1) -> Result<Writer, Error> {
    let (store, geometry) = (&files.store, files.geometry);
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
        reserve: Writer::first_reserve(geometry.cluster_bits),
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
        tracing::error!(
            image = files.name,
            "qcow2 image: its tables overlap; nothing is written to it"
        );
        header.incompatible | feature::CORRUPT
    };
    Ok(Writer::new(files, meta, bits))
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
