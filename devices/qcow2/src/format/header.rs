//! The header of an image and its extensions.
//!
//! Read once at opening, checked as a whole, and from then on changed in place by single small
//! writes, each within one sector. Nothing else of it is ever written, so what we do not know
//! stays.

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

/// Offsets in the header of the fields that are changed.
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
    /// Number of bitmaps.
    pub count: u32,
    /// Bytes of the directory.
    pub directory_len: u64,
    /// Offset of the directory.
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
    /// Offset of the L1 table.
    pub l1_offset: u64,
    /// Offset of the refcount table.
    pub refcount_table_offset: u64,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// Number of snapshots.
    pub snapshots: u32,
    /// Offset of the snapshot table.
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

    /// Whether counts may be wrong: it is checked before it is written. Version 2 cannot say so.
    pub fn needs_check(&self) -> bool {
        self.incompatible & feature::DIRTY != 0 || self.geometry.version < 3
    }

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
        if header_len > 1 << cluster_bits {
            let rule = "at most a cluster";
            return Err(Error::header("the header's length", header_len.into(), rule));
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
            bitmaps: None,
        };
        // Bitmaps of an image that a program without bitmaps has changed are none any more.
        if header.autoclear & feature::BITMAPS != 0 {
            header.bitmaps = extensions.bitmaps.as_deref().map(bitmaps).transpose()?;
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
            self.check_table("the offset of the snapshot table", self.snapshots_offset, 1)?;
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

/// Values of the extensions that are used.
#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file_name: Option<String>,
    feature_names: Vec<u8>,
    bitmaps: Option<Vec<u8>>,
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
            extension::BITMAPS => self.bitmaps = Some(data.to_vec()),
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

#[cfg(test)]
mod tests {
    #![allow(non_snake_case)]

    use super::*;

    /// Place, value and length.
    type Field = (usize, u64, usize);

    fn put(bytes: &mut [u8], at: usize, value: u64, len: usize) {
        bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
    }

    /// A disk of 1 GiB with clusters of 64 KiB, header and extensions in 4 KiB.
    fn header(version: u32) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        let fields: &[Field] = &[
            (0, MAGIC.into(), 4),
            (4, version.into(), 4),
            (20, 16, 4),
            (24, 1 << 30, 8),
            (36, 2, 4),
            (40, 0x30000, 8),
            (48, 0x10000, 8),
            (56, 1, 4),
        ];
        fields.iter().for_each(|&(at, value, len)| put(&mut bytes, at, value, len));
        if version > 2 {
            put(&mut bytes, 96, 4, 4);
            put(&mut bytes, 100, 104, 4);
        }
        bytes
    }

    /// The header with these fields: place, value and length.
    fn with(fields: &[Field]) -> Result<Header, Error> {
        let mut bytes = header(3);
        fields.iter().for_each(|&(at, value, len)| put(&mut bytes, at, value, len));
        Header::parse(&bytes)
    }

    fn text(result: Result<Header, Error>) -> String {
        result.map(|_| ()).unwrap_err().to_string()
    }

    /// The header with extensions behind it.
    fn extended(extensions: &[(u32, &[u8])]) -> Vec<u8> {
        let mut bytes = header(3);
        let mut at = 104;
        for &(kind, data) in extensions {
            put(&mut bytes, at, kind.into(), 4);
            put(&mut bytes, at + 4, data.len() as u64, 4);
            bytes[at + 8..at + 8 + data.len()].copy_from_slice(data);
            at += 8 + data.len().next_multiple_of(8);
        }
        bytes
    }

    #[test]
    fn both_versions_are_read() {
        let v3 = Header::parse(&header(3)).unwrap();
        assert_eq!((v3.geometry.version, v3.len_bytes, v3.l1_entries), (3, 1 << 30, 2));
        let mut bytes = header(2);
        // Version 2 has no such fields: whatever is there is an extension's, or nothing.
        put(&mut bytes, 72, 0, 4);
        put(&mut bytes, 96, 9, 4);
        let v2 = Header::parse(&bytes).unwrap();
        assert_eq!((v2.geometry.refcount_order, v2.incompatible, v2.autoclear), (4, 0, 0));
    }

    #[test]
    fn every_field_is_taken_at_its_limit() {
        let large = [(20, 21, 4), (36, 1 << 17, 4), (40, 0x20_0000, 8), (48, 0x40_0000, 8)];
        let all: [&[Field]; 14] = [
            &[(24, 0, 8), (36, 0, 4), (40, 0, 8)],
            &[(20, 9, 4), (24, 1 << 16, 8)],
            &[large[0], large[1], large[2], large[3], (24, 1 << 56, 8)],
            &[(36, 4 << 20, 4)],
            &[(40, (1 << 56) - 0x10000, 8)],
            &[(56, 128, 4)],
            &[large[0], large[2], large[3], (56, 4, 4)],
            &[(60, 65_536, 4), (64, 0x50000, 8)],
            &[(96, 6, 4)],
            &[(96, 0, 4)],
            &[(100, 112, 4)],
            &[(100, 112, 4), (72, 8, 8), (104, 1, 1)],
            &[(8, 1024, 8), (16, 1023, 4), (1024, 0x6161_6161, 4)],
            &[(8, 4096 - 16, 8), (16, 16, 4)],
        ];
        for fields in &all[..12] {
            with(fields).unwrap_or_else(|e| panic!("{fields:x?}: {e}"));
        }
        for fields in &all[12..] {
            let mut bytes = header(3);
            fields.iter().for_each(|&(at, value, len)| put(&mut bytes, at, value, len));
            let (at, len) = (fields[0].1 as usize, fields[1].1 as usize);
            bytes[at..at + len].fill(b'a');
            assert_eq!(Header::parse(&bytes).unwrap().backing_name.unwrap().len(), len);
        }
    }

    #[test]
    fn abuse_Q10_every_field_is_refused_beyond_its_limit_by_name() {
        let all: [(&str, &[Field]); 32] = [
            ("not a qcow2 image", &[(0, 0x5146_49fa, 4)]),
            ("version 1;", &[(4, 1, 4)]),
            ("version 4;", &[(4, 4, 4)]),
            ("cluster_bits is 8;", &[(20, 8, 4)]),
            ("cluster_bits is 22;", &[(20, 22, 4)]),
            ("cluster_bits is 4294967295;", &[(20, u64::MAX, 4)]),
            ("size of the disk", &[(24, (1 << 56) + 1, 8)]),
            ("entries of the L1 table is 1;", &[(36, 1, 4)]),
            ("entries of the L1 table is 0;", &[(36, 0, 4)]),
            ("length of the L1 table", &[(36, (4 << 20) + 1, 4)]),
            ("offset of the L1 table", &[(40, 0x30200, 8)]),
            ("offset of the L1 table", &[(40, 0, 8)]),
            ("offset of the L1 table", &[(40, 1 << 56, 8)]),
            ("offset of the L1 table", &[(40, u64::MAX << 16, 8)]),
            ("offset of the refcount table", &[(48, 0x10001, 8)]),
            ("offset of the refcount table", &[(48, 0, 8)]),
            ("clusters of the refcount table is 0;", &[(56, 0, 4)]),
            ("clusters of the refcount table is 129;", &[(56, 129, 4)]),
            ("number of snapshots is 65537;", &[(60, 65_537, 4), (64, 0x50000, 8)]),
            ("offset of the snapshot table", &[(60, 1, 4), (64, 0x50100, 8)]),
            ("offset of the snapshot table", &[(60, 1, 4), (64, 0, 8)]),
            ("encrypted (AES)", &[(32, 1, 4)]),
            ("encrypted (LUKS)", &[(32, 2, 4)]),
            ("encrypted (method 3)", &[(32, 3, 4)]),
            ("refcount_order is 7;", &[(96, 7, 4)]),
            ("header's length is 96;", &[(100, 96, 4)]),
            ("header's length is 108;", &[(100, 108, 4)]),
            ("header's length is 65544;", &[(100, 65_544, 4)]),
            ("compression_type is 1;", &[(100, 112, 4), (104, 1, 1)]),
            ("compression_type is 0;", &[(100, 112, 4), (72, 8, 8)]),
            ("compression_type is 2;", &[(100, 112, 4), (72, 8, 8), (104, 2, 1)]),
            ("14 or more with extended", &[(20, 13, 4), (72, 16, 8), (36, 128, 4)]),
        ];
        for (what, fields) in all {
            let text = text(with(fields));
            assert!(text.contains(what), "{what}: {text}");
        }
        let name = |offset, len| text(with(&[(8, offset, 8), (16, len, 4)]));
        assert!(name(1024, 1024).contains("length of the backing file's name is 1024;"));
        for offset in [4090, 1 << 16, u64::MAX] {
            assert!(name(offset, 16).contains("offset of the backing file's name"), "{offset}");
        }
        assert!(name(512, 16).contains("is no text"), "it is zeroes");
    }

    #[test]
    fn a_header_that_ends_early_is_an_error() {
        for version in [2, 3] {
            let bytes = header(version);
            let whole = if version == 2 { 72 } else { 104 };
            for len in 0..whole {
                Header::parse(&bytes[..len]).unwrap_err();
            }
            Header::parse(&bytes[..whole]).unwrap();
        }
    }

    #[test]
    fn an_extension_that_ends_early_is_an_error() {
        let kinds = [
            extension::BACKING_FORMAT,
            extension::FEATURE_NAMES,
            extension::BITMAPS,
            extension::DATA_FILE,
            0x1234_5678,
        ];
        for kind in kinds {
            let mut bytes = extended(&[(kind, &[b'a'; 16])]);
            let rest = bytes.len() - 112;
            put(&mut bytes, 108, rest as u64 + 1, 4);
            assert!(text(Header::parse(&bytes)).contains("length of a header extension"));
            put(&mut bytes, 108, u64::MAX, 4);
            assert!(text(Header::parse(&bytes)).contains("length of a header extension"));
        }
        // An end mark, and the backing file's name, end them.
        let mut bytes = extended(&[(0, &[]), (extension::BITMAPS, &[0xff; 8])]);
        Header::parse(&bytes).unwrap();
        put(&mut bytes, 104, u64::MAX, 8);
        put(&mut bytes, 8, 104, 8);
        put(&mut bytes, 16, 4, 4);
        assert!(text(Header::parse(&bytes)).contains("is no text"));
    }

    #[test]
    fn abuse_Q9_unknown_features_are_named_as_the_image_names_them() {
        let mut names = [0; 96];
        names[..13].copy_from_slice(b"\0\x05time\ttravel");
        // A compatible feature's name is not that of an incompatible one.
        names[48..56].copy_from_slice(b"\x01\x06wrong.");
        let mut bytes = extended(&[(extension::FEATURE_NAMES, &names)]);
        put(&mut bytes, 72, 1 << 5 | 1 << 6 | 1 << 63 | 1, 8);
        let text = text(Header::parse(&bytes));
        assert!(text.contains("\"timetravel\" (bit 5), bit 6, bit 63;"), "{text}");
    }

    #[test]
    fn bitmaps_count_only_where_they_are_kept_up_to_date() {
        let bitmaps = |count: u64, len: u64, offset: u64, autoclear: u64| {
            let mut data = [0; 24];
            put(&mut data, 0, count, 4);
            put(&mut data, 8, len, 8);
            put(&mut data, 16, offset, 8);
            let mut bytes = extended(&[(extension::BITMAPS, &data)]);
            put(&mut bytes, 88, autoclear, 8);
            Header::parse(&bytes).map(|header| header.bitmaps)
        };
        assert!(bitmaps(65_535, 64 << 20, 0x50000, 1).unwrap().is_some());
        assert!(bitmaps(1, 64, 0x50000, 0).unwrap().is_none());
        assert!(bitmaps(0, u64::MAX, 7, 0).unwrap().is_none());
        bitmaps(0, 64, 0x50000, 1).unwrap_err();
        bitmaps(65_536, 64, 0x50000, 1).unwrap_err();
        bitmaps(1, (64 << 20) + 1, 0x50000, 1).unwrap_err();
        let mut bytes = extended(&[(extension::BITMAPS, &[0; 16])]);
        put(&mut bytes, 88, 1, 8);
        assert!(text(Header::parse(&bytes)).contains("bitmaps extension is 16;"));
    }
}
