//! Compressed clusters, made by `qemu-img convert -c`: read, never written.
//!
//! What is decompressed was made by whoever made the image: output is bounded by the cluster, and a
//! frame's window by the decoder (100 MiB).

use std::io::{self, Read};

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};

use super::geometry::Compression;
use crate::error::unreadable;

/// Fills `out`, a whole cluster, from what is stored.
pub fn expand(kind: Compression, stored: &[u8], out: &mut [u8]) -> io::Result<()> {
    match kind {
        Compression::Zlib => inflate(stored, out),
        Compression::Zstd => ruzstd::decoding::StreamingDecoder::new(stored)
            .map_err(|e| unreadable(format!("a zstd cluster cannot be read: {e}")))?
            .read_exact(out)
            .map_err(|e| unreadable(format!("a zstd cluster ends early: {e}"))),
    }
}

/// Raw deflate. What follows the stream in its last sector is of another cluster.
fn inflate(stored: &[u8], out: &mut [u8]) -> io::Result<()> {
    let mut state = Box::<DecompressorOxide>::default();
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, made) = decompress(&mut state, stored, out, 0, flags);
    let ended = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
    if ended && made == out.len() {
        return Ok(());
    }
    Err(unreadable(format!("a compressed cluster gives {made} bytes ({status:?})")))
}
