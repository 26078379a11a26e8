//! Images in memory that tests change byte by byte.

use std::path::Path;
use std::sync::Arc;

use qcow2::testing::{Bytes, Recorder};
use qcow2::{Chain, Error, Image, Layer, Options, Store};

use super::kinds::qemu;

/// Offsets of fields of the header.
pub mod at {
    pub const SIZE: u64 = 24;
    pub const L1_ENTRIES: u64 = 36;
    pub const L1_OFFSET: u64 = 40;
    pub const REFCOUNT_TABLE: u64 = 48;
    pub const INCOMPATIBLE: u64 = 72;
}

/// Incompatible features.
pub const DIRTY: u64 = 1;
pub const CORRUPT: u64 = 2;

pub const COPIED: u64 = 1 << 63;
pub const COMPRESSED: u64 = 1 << 62;
/// Bits of an entry that are an offset.
pub const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

pub fn get_u32(bytes: &Bytes, offset: u64) -> u32 {
    let mut word = [0; 4];
    bytes.read(&mut word, offset);
    u32::from_be_bytes(word)
}

pub fn get_u64(bytes: &Bytes, offset: u64) -> u64 {
    let mut word = [0; 8];
    bytes.read(&mut word, offset);
    u64::from_be_bytes(word)
}

pub fn put_u64(bytes: &mut Bytes, offset: u64, value: u64) {
    bytes.write(&value.to_be_bytes(), offset);
}

pub fn set_dirty(bytes: &mut Bytes) {
    let bits = get_u64(bytes, at::INCOMPATIBLE);
    put_u64(bytes, at::INCOMPATIBLE, bits | DIRTY);
}

/// The offset of the L2 table of an L1 entry.
pub fn l2_table(bytes: &Bytes, index: u64) -> u64 {
    get_u64(bytes, get_u64(bytes, at::L1_OFFSET) + index * 8) & OFFSET
}

/// An image that `qemu-img create` makes, after the commands of `qemu-io`.
pub fn image(dir: &Path, options: &str, size: &str, commands: &[&str]) -> Bytes {
    let path = dir.join("sample.qcow2");
    let path = path.to_str().unwrap();
    let options = if options.is_empty() { "compat=1.1" } else { options };
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, path, size]);
    for command in commands {
        qemu("qemu-io", &["-f", "qcow2", "-c", command, path]);
    }
    Bytes::load(Path::new(path)).unwrap()
}

/// Opens it for writing.
pub fn open(bytes: Bytes) -> (Arc<Recorder>, Result<Chain, Error>) {
    open_over(bytes, Vec::new())
}

/// Opens an image as [`open`] does, over other layers.
pub fn open_over(bytes: Bytes, below: Vec<Layer>) -> (Arc<Recorder>, Result<Chain, Error>) {
    let store = Arc::new(Recorder::new(bytes));
    let opened = open_image(store.clone());
    (store, opened.map(|image| Chain::new(image, below)))
}

/// Opens it as a device of its length.
pub fn open_device(store: Arc<Recorder>) -> Chain {
    store.be_device();
    Chain::new(open_image(store).unwrap(), Vec::new())
}

fn open_image(store: Arc<dyn Store>) -> Result<Image, Error> {
    Image::open(store, None, &Options::new("sample", true), &mut |_| {}).map(|(image, _)| image)
}
