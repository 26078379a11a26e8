//! Digest of a disk or image: a sum for each MiB, so that two that differ tell where.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::FsxError;

/// Bytes that one sum is of.
const CHUNK_BYTES: u64 = 1 << 20;

/// The length of a file or a disk.
///
/// # Errors
/// It cannot be opened.
pub fn len_of(path: &Path) -> Result<u64, FsxError> {
    // A disk's metadata says 0; its end does not.
    let mut file = File::open(path).map_err(FsxError::file("open", path))?;
    file.seek(SeekFrom::End(0)).map_err(FsxError::file("find the end of", path))
}

/// SHA-256 of each MiB of a file or disk that is not all zeroes, by the MiB's number.
///
/// # Errors
/// It cannot be read.
pub fn digest(path: &Path) -> Result<BTreeMap<u64, String>, FsxError> {
    let mut file = File::open(path).map_err(FsxError::file("open", path))?;
    let mut sums = BTreeMap::new();
    let mut chunk = Vec::with_capacity(CHUNK_BYTES as usize);
    for number in 0.. {
        chunk.clear();
        let read = file.by_ref().take(CHUNK_BYTES).read_to_end(&mut chunk);
        if read.map_err(FsxError::file("read", path))? == 0 {
            break;
        }
        if chunk.iter().any(|byte| *byte != 0) {
            sums.insert(number, format!("{:x}", Sha256::digest(&chunk)));
        }
    }
    Ok(sums)
}
