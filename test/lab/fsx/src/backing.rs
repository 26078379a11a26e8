//! Content of a disk's backing file: a pattern of its own, so that its bytes are known where they
//! show.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::FsxError;
use crate::model::Content;

/// Bytes that are made at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Makes a raw file full of the backing file's pattern.
///
/// # Errors
/// It cannot be written.
pub fn fill(path: &Path, len_bytes: u64) -> Result<(), FsxError> {
    let file = File::create(path).map_err(FsxError::file("create", path))?;
    let mut out = BufWriter::with_capacity(CHUNK_BYTES, file);
    let mut chunk = vec![0; CHUNK_BYTES];
    for at in (0..len_bytes).step_by(CHUNK_BYTES) {
        let len = chunk.len().min((len_bytes - at) as usize);
        Content::BACKING.fill(&mut chunk[..len], at);
        out.write_all(&chunk[..len]).map_err(FsxError::file("write", path))?;
    }
    out.flush().map_err(FsxError::file("write", path))
}
