//! The header of an image and its extensions.
//!
//! Read once at opening, checked as a whole, and from then on changed in place by single small
//! writes, each within one sector. Nothing else of it is ever written, so what we do not know stays.

use super::geometry::{Compression, Geometry};
use super::{u32_at, u64_at};
use crate::error::Error;
use crate::limits::{
    CLUSTER_BITS, MAX_BACKING_NAME_LEN_BYTES, MAX_BITMAP_DIRECTORY_LEN_BYTES, MAX_BITMAPS,
    MAX_DISK_LEN_BYTES, MAX_L1_LEN_BYTES, MAX_REFCOUNT_TABLE_LEN_BYTES, MAX_SNAPSHOTS,
};

/// "QFI\xfb".
const MAGIC: u32 = 0x5146_49fb;

/// Bytes of a version 2 header, which has no length of its own.
const V2_LEN_BYTES: u32 = 72;
/// Least bytes of a version 3 header.
const V3_LEN_BYTES: u32 = 104;

/// Where in the header the fields are that we change.
pub mod place {
    /// Size of the disk, then encryption, L1 entries, L1 offset: 24 bytes.
    pub const SIZE: u64 = 24;
    /// Refcount table: offset and clusters, 12 bytes.
    pub const REFCOUNT_TABLE: u64 = 48;
    /// Incompatible features.
    pub const INCOMPATIBLE: u64 = 72;
    /// Autoclear features.
    pub const AUTOCLEAR: u64 = 88;
}

/// Feature bits.
pub mod feature {
    /// Incompatible: refcounts may be wrong.
    pub const DIRTY: u64 = 1;
    /// Incompatible: the image is damaged.
    pub const CORRUPT: u64 = 1 << 1;
    /// Incompatible: data is in another file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// Incompatible: the header has a compression type.
    pub const COMPRESSION_TYPE: u64 = 1 << 3;
    /// Incompatible: extended L2 entries.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// Incompatible features that are served.
    pub const SERVED: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2;
    /// Autoclear: the bitmaps are right.
    pub const BITMAPS: u64 = 1;
    /// Autoclear: the data file is right without the image.
    pub const RAW_DATA_FILE: u64 = 1 << 1;
}

/// Types of header extensions.
mod extension {
    pub const END: u32 = 0;
    pub const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub const FEATURE_NAMES: u32 = 0x6803_f857;
    pub const BITMAPS: u32 = 0x2385_2875;
    pub const DATA_FILE: u32 = 0x4441_5441;
}

/// The bitmaps extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bitmaps {
    /// How many.
    pub count: u32,
    /// Bytes of the directory.
    pub directory_len: u64,
    /// Where it is.
    pub directory_offset: u64,
}

/// A header that was checked.
#[derive(Debug, Clone)]
pub struct Header {
    /// Sizes.
    pub geometry: Geometry,
    /// Size of the disk.
    pub len_bytes: u64,
    /// Entries of the L1 table.
    pub l1_entries: u32,
    /// Where it is.
    pub l1_offset: u64,
    /// Where the refcount table is.
    pub refcount_table_offset: u64,
    /// Clusters of it.
    pub refcount_table_clusters: u32,
    /// Snapshots.
    pub snapshots: u32,
    /// Where their table is.
    pub snapshots_offset: u64,
    /// Incompatible features.
    pub incompatible: u64,
    /// Autoclear features.
    pub autoclear: u64,
    /// Name of the backing file.
    pub backing_name: Option<String>,
    /// Format of the backing file.
    pub backing_format: Option<String>,
    /// Name of the data file.
    pub data_file_name: Option<String>,
    /// Bitmaps.
    pub bitmaps: Option<Bitmaps>,
}

impl Header {
    /// Most bytes that are looked at: the header, its extensions and the backing file's name are in
    /// the first cluster.
    pub const MAX_LEN_BYTES: usize = 1 << *CLUSTER_BITS.end();

    /// Checks the first cluster of an image; `bytes` may be more or, in a short file, less.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        if u32_at(bytes, 0) != Some(MAGIC) {
            let text = "it is not a qcow2 image (formats are never guessed)";
            return Err(Error::NotServed(text.into()));
        }
        let version = u32_at(bytes, 4).unwrap_or(0);
        if !matches!(version, 2 | 3) {
            let text = format!("it has version {version}; served are 2 and 3 (qemu-img convert)");
            return Err(Error::NotServed(text));
        }
        let fields = Fields { bytes, version };
        fields.check_encryption()?;
        let header_len = fields.header_len()?;
        let cluster_bits = fields.u32(20)?;
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(Error::header("cluster_bits", cluster_bits.into(), "9 to 21"));
        }
        let cluster = &bytes[..bytes.len().min(1 << cluster_bits)];
        let extensions = Extensions::parse(cluster, header_len, fields.backing_offset()?)?;
        let incompatible = fields.since_v3(72)?;
        fields.check_features(incompatible, &extensions.feature_names)?;
        let mut header = Self {
            geometry: fields.geometry(cluster_bits, incompatible, header_len)?,
            len_bytes: fields.u64(24)?,
            l1_entries: fields.u32(36)?,
            l1_offset: fields.u64(40)?,
            refcount_table_offset: fields.u64(48)?,
            refcount_table_clusters: fields.u32(56)?,
            snapshots: fields.u32(60)?,
            snapshots_offset: fields.u64(64)?,
            incompatible,
            autoclear: fields.since_v3(88)?,
            backing_name: fields.backing_name(cluster)?,
            backing_format: extensions.backing_format,
            data_file_name: extensions.data_file_name,
            bitmaps: extensions.bitmaps,
        };
        // Bitmaps of an image that a program without bitmaps has changed are none any more.
        if header.autoclear & feature::BITMAPS == 0 {
            header.bitmaps = None;
        }
        header.check()?;
        Ok(header)
    }

    /// Checks sizes and places of tables against each other.
    fn check(&self) -> Result<(), Error> {
        let geometry = &self.geometry;
        if self.len_bytes > MAX_DISK_LEN_BYTES {
            let rule = format!("at most {MAX_DISK_LEN_BYTES}");
            return Err(Error::header("the size of the disk", self.len_bytes, rule));
        }
        let l1_len = u64::from(self.l1_entries) * 8;
        if l1_len > MAX_L1_LEN_BYTES {
            let rule = format!("at most {MAX_L1_LEN_BYTES}");
            return Err(Error::header("the length of the L1 table", l1_len, rule));
        }
        let needed = geometry.l1_entries(self.len_bytes);
        if u64::from(self.l1_entries) < needed {
            let rule = format!("at least {needed} for a disk of {} bytes", self.len_bytes);
            return Err(Error::header("entries of the L1 table", self.l1_entries.into(), rule));
        }
        self.check_table("the offset of the L1 table", self.l1_offset, l1_len)?;
        let clusters = u64::from(self.refcount_table_clusters);
        let limit = MAX_REFCOUNT_TABLE_LEN_BYTES >> geometry.cluster_bits;
        if clusters == 0 || clusters > limit.max(1) {
            let rule = format!("1 to {}", limit.max(1));
            return Err(Error::header("clusters of the refcount table", clusters, rule));
        }
        let len = clusters << geometry.cluster_bits;
        self.check_table("the offset of the refcount table", self.refcount_table_offset, len)?;
        if self.snapshots > MAX_SNAPSHOTS {
            let rule = format!("at most {MAX_SNAPSHOTS}");
            return Err(Error::header("the number of snapshots", self.snapshots.into(), rule));
        }
        if self.snapshots > 0 {
            self.check_table("the offset of the snapshot table", self.snapshots_offset, 0)?;
        }
        Ok(())
    }

    /// A table begins at a cluster, behind the header, and ends where a file can.
    pub(crate) fn check_table(
        &self,
        what: &'static str,
        offset: u64,
        len: u64,
    ) -> Result<(), Error> {
        let is_aligned = self.geometry.in_cluster(offset) == 0;
        let ends = offset.checked_add(len).is_some_and(|end| end < 1 << 56);
        if offset == 0 && len == 0 || is_aligned && ends && offset > 0 {
            return Ok(());
        }
        let rule = format!("a multiple of {} above 0", self.geometry.cluster_len());
        Err(Error::header(what, offset, rule))
    }
}

/// The fixed fields of a header.
struct Fields<'a> {
    bytes: &'a [u8],
    version: u32,
}

impl Fields<'_> {
    fn u32(&self, at: usize) -> Result<u32, Error> {
        u32_at(self.bytes, at).ok_or_else(|| self.too_short())
    }

    fn u64(&self, at: usize) -> Result<u64, Error> {
        u64_at(self.bytes, at).ok_or_else(|| self.too_short())
    }

    /// A field that version 2 does not have.
    fn since_v3(&self, at: usize) -> Result<u64, Error> {
        if self.version < 3 { Ok(0) } else { self.u64(at) }
    }

    fn too_short(&self) -> Error {
        Error::header("the length of the file", self.bytes.len() as u64, "that of a whole header")
    }

    fn check_encryption(&self) -> Result<(), Error> {
        let name = match self.u32(32)? {
            0 => return Ok(()),
            1 => "AES".to_owned(),
            2 => "LUKS".to_owned(),
            other => format!("method {other}"),
        };
        Err(Error::NotServed(format!(
            "it is encrypted ({name}), which is not served: decrypt it with `qemu-img convert` into \
             another image"
        )))
    }

    fn header_len(&self) -> Result<u32, Error> {
        if self.version < 3 {
            return Ok(V2_LEN_BYTES);
        }
        let len = self.u32(100)?;
        if len < V3_LEN_BYTES || !len.is_multiple_of(8) {
            return Err(Error::header("the header's length", len.into(), "104 or more, by eights"));
        }
        Ok(len)
    }

    /// Refuses what is not known, by name where the image has one for it.
    fn check_features(&self, bits: u64, names: &[u8]) -> Result<(), Error> {
        let unknown = bits & !feature::SERVED;
        if unknown == 0 {
            return Ok(());
        }
        let named: Vec<_> = (0..64u8)
            .filter(|bit| unknown >> bit & 1 != 0)
            .map(|bit| match feature_name(names, bit) {
                Some(name) => format!("{name:?} (bit {bit})"),
                None => format!("bit {bit}"),
            })
            .collect();
        Err(Error::NotServed(format!(
            "it has incompatible features that are not served: {}; `qemu-img convert` makes an \
             image without them",
            named.join(", ")
        )))
    }

    fn geometry(
        &self,
        cluster_bits: u32,
        incompatible: u64,
        header_len: u32,
    ) -> Result<Geometry, Error> {
        let refcount_order = if self.version < 3 { 4 } else { self.u32(96)? };
        if refcount_order > 6 {
            return Err(Error::header("refcount_order", refcount_order.into(), "0 to 6"));
        }
        let extended_l2 = incompatible & feature::EXTENDED_L2 != 0;
        if extended_l2 && cluster_bits < 14 {
            let rule = "14 or more with extended L2 entries";
            return Err(Error::header("cluster_bits", cluster_bits.into(), rule));
        }
        let kind = match header_len {
            ..=104 => 0,
            _ => self.bytes.get(104).copied().ok_or_else(|| self.too_short())?,
        };
        let is_told = incompatible & feature::COMPRESSION_TYPE != 0;
        let compression = match kind {
            0 if !is_told => Compression::Zlib,
            1 if is_told => Compression::Zstd,
            _ => {
                let rule = "0 (zlib), or 1 (zstd) with the feature bit for it";
                return Err(Error::header("compression_type", kind.into(), rule));
            }
        };
        Ok(Geometry {
            version: self.version,
            cluster_bits,
            refcount_order,
            extended_l2,
            data_file: incompatible & feature::DATA_FILE != 0,
            compression,
        })
    }

    fn backing_offset(&self) -> Result<u64, Error> {
        self.u64(8)
    }

    fn backing_name(&self, cluster: &[u8]) -> Result<Option<String>, Error> {
        let (offset, len) = (self.backing_offset()?, self.u32(16)?);
        if offset == 0 {
            return Ok(None);
        }
        if len > MAX_BACKING_NAME_LEN_BYTES {
            let rule = format!("at most {MAX_BACKING_NAME_LEN_BYTES}");
            return Err(Error::header("the length of the backing file's name", len.into(), rule));
        }
        let from = usize::try_from(offset).ok();
        let name = from.and_then(|from| cluster.get(from..from.checked_add(len as usize)?));
        let Some(name) = name else {
            let rule = "within the first cluster";
            return Err(Error::header("the offset of the backing file's name", offset, rule));
        };
        if name.is_empty() {
            return Ok(None);
        }
        text(name, "the name of its backing file").map(Some)
    }
}

fn text(bytes: &[u8], what: &str) -> Result<String, Error> {
    let text = std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
    text.map(str::to_owned).ok_or_else(|| Error::NotServed(format!("{what} is no text")))
}

/// The name of an incompatible feature, from the image's own table of names.
fn feature_name(names: &[u8], bit: u8) -> Option<String> {
    let entry = names.chunks_exact(48).find(|e| e[0] == 0 && e[1] == bit)?;
    let name = entry[2..].split(|&b| b == 0).next().unwrap_or(&[]);
    let name: String = String::from_utf8_lossy(name).chars().filter(|c| !c.is_control()).collect();
    (!name.is_empty()).then_some(name)
}

/// What the extensions say that we look at.
#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file_name: Option<String>,
    feature_names: Vec<u8>,
    bitmaps: Option<Bitmaps>,
}

impl Extensions {
    /// Extensions go up to the end mark, the backing file's name, or the end of the cluster.
    fn parse(cluster: &[u8], header_len: u32, backing_offset: u64) -> Result<Self, Error> {
        let end = match usize::try_from(backing_offset) {
            Ok(offset) if offset > 0 => offset.min(cluster.len()),
            _ => cluster.len(),
        };
        let cluster = &cluster[..end];
        let mut this = Self::default();
        let mut at = header_len as usize;
        while let (Some(kind), Some(len)) = (u32_at(cluster, at), u32_at(cluster, at + 4)) {
            if kind == extension::END {
                break;
            }
            let data = cluster.get(at + 8..).and_then(|rest| rest.get(..len as usize));
            let Some(data) = data else {
                let rule = "within the header's cluster";
                return Err(Error::header("the length of a header extension", len.into(), rule));
            };
            this.take(kind, data)?;
            at += 8 + (len as usize).next_multiple_of(8);
        }
        Ok(this)
    }

    fn take(&mut self, kind: u32, data: &[u8]) -> Result<(), Error> {
        match kind {
            extension::BACKING_FORMAT => {
                self.backing_format = Some(text(data, "the format of its backing file")?);
            }
            extension::DATA_FILE => {
                self.data_file_name = Some(text(data, "the name of its data file")?);
            }
            extension::FEATURE_NAMES => self.feature_names = data.to_vec(),
            extension::BITMAPS => self.bitmaps = Some(bitmaps(data)?),
            _ => {}
        }
        Ok(())
    }
}

fn bitmaps(data: &[u8]) -> Result<Bitmaps, Error> {
    let (Some(count), Some(directory_len), Some(directory_offset), 24) =
        (u32_at(data, 0), u64_at(data, 8), u64_at(data, 16), data.len())
    else {
        let len = data.len() as u64;
        return Err(Error::header("the length of the bitmaps extension", len, "24"));
    };
    if count == 0 || count > MAX_BITMAPS {
        let rule = format!("1 to {MAX_BITMAPS}");
        return Err(Error::header("the number of bitmaps", count.into(), rule));
    }
    if directory_len > MAX_BITMAP_DIRECTORY_LEN_BYTES {
        let rule = format!("at most {MAX_BITMAP_DIRECTORY_LEN_BYTES}");
        return Err(Error::header("the length of the bitmap directory", directory_len, rule));
    }
    Ok(Bitmaps { count, directory_len, directory_offset })
}
