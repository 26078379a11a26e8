//! Compressed clusters, made by `qemu-img convert -c`: read, never written.
//!
//! What is decompressed was made by whoever made the image: output is bounded by the cluster, and a
//! frame's window by what every decoder of the format has to take (RFC 8878: 8 MiB).

use std::io::{self, Read};

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
use ruzstd::decoding::StreamingDecoder;

use super::geometry::Compression;
use crate::error::unreadable;

const MAX_WINDOW_LEN_BYTES: u64 = 8 << 20;

/// Fills `out`, a whole cluster, from what is stored.
pub fn expand(kind: Compression, stored: &[u8], out: &mut [u8]) -> io::Result<()> {
    match kind {
        Compression::Zlib => inflate(stored, out),
        Compression::Zstd => unpack(stored, out),
    }
}

/// Expands one or more zstd frames. Bytes after them are another cluster's. As in QEMU, the last
/// frame ends with the cluster, and has the length that its header says. Checksums of frames are
/// not compared, and skippable frames not known: QEMU writes neither.
fn unpack(stored: &[u8], out: &mut [u8]) -> io::Result<()> {
    let (mut rest, mut at) = (stored, 0);
    while at < out.len() {
        let mut frame = StreamingDecoder::new_with_max_window_size(&mut rest, MAX_WINDOW_LEN_BYTES)
            .map_err(|e| unreadable(format!("a zstd cluster cannot be read: {e}")))?;
        let (before, left) = (at, out.len() - at);
        while at < out.len() {
            match frame.read(&mut out[at..]) {
                Ok(0) => break,
                Ok(n) => at += n,
                Err(e) => return Err(unreadable(format!("a zstd cluster cannot be read: {e}"))),
            }
        }
        let said = frame.decoder.content_size();
        let is_bad = said != 0 && said != (at - before) as u64;
        if is_bad || at == before || at == out.len() && !matches!(frame.read(&mut [0]), Ok(0)) {
            return Err(unreadable(format!("a zstd cluster is not of {left} bytes, or not whole")));
        }
    }
    Ok(())
}

/// Raw deflate. What follows the stream in its last sector is of another cluster.
fn inflate(stored: &[u8], out: &mut [u8]) -> io::Result<()> {
    let mut state = Box::<DecompressorOxide>::default();
    let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, made) = decompress(&mut state, stored, out, 0, flags);
    // As zlib, which does not insist on the end mark where all that was asked for is there.
    let is_bad = matches!(status, TINFLStatus::Failed | TINFLStatus::BadParam);
    if !is_bad && made == out.len() {
        return Ok(());
    }
    Err(unreadable(format!("a compressed cluster gives {made} bytes ({status:?})")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: usize = 4096;

    fn cluster() -> Vec<u8> {
        (0..LEN).map(|n| (n / 64 * 7 + n % 5) as u8).collect()
    }

    fn deflated() -> Vec<u8> {
        miniz_oxide::deflate::compress_to_vec(&cluster(), 6)
    }

    /// A frame of one block that is not compressed.
    fn frame(data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
        bytes.extend((data.len() as u32).to_le_bytes());
        bytes.extend(&((data.len() as u32) << 3 | 1).to_le_bytes()[..3]);
        bytes.extend(data);
        bytes
    }

    fn expanded(kind: Compression, stored: &[u8]) -> Option<Vec<u8>> {
        let mut out = vec![0xee; LEN];
        expand(kind, stored, &mut out).ok().map(|()| out)
    }

    #[test]
    fn a_cluster_is_what_was_stored_and_what_follows_does_not_matter() {
        for (kind, stored) in [
            (Compression::Zlib, deflated()),
            (Compression::Zstd, frame(&cluster())),
            (Compression::Zstd, [frame(&cluster()[..100]), frame(&cluster()[100..])].concat()),
        ] {
            assert!(expanded(kind, &stored) == Some(cluster()), "{kind:?}");
            let rest = [&stored[..], &[0xff; 300]].concat();
            assert!(expanded(kind, &rest) == Some(cluster()), "{kind:?}, with more behind it");
        }
    }

    #[test]
    fn what_ends_early_is_an_error() {
        for (kind, stored) in
            [(Compression::Zlib, deflated()), (Compression::Zstd, frame(&cluster()))]
        {
            // The last byte of a deflate stream may be its end mark alone.
            for len in 0..stored.len() - 2 {
                assert!(expanded(kind, &stored[..len]).is_none(), "{kind:?}, {len}");
            }
        }
        let short = miniz_oxide::deflate::compress_to_vec(&cluster()[..LEN - 1], 6);
        assert_eq!(expanded(Compression::Zlib, &short), None);
        assert_eq!(expanded(Compression::Zstd, &frame(&cluster()[..LEN - 1])), None);
    }

    #[test]
    fn a_zstd_frame_ends_with_its_cluster() {
        let mut endless = frame(&cluster());
        // The block is not the last any more, and none that could be follows.
        endless[9] &= !1;
        assert_eq!(expanded(Compression::Zstd, &endless), None);
        assert_eq!(expanded(Compression::Zstd, &frame(&[cluster(), cluster()].concat())), None);
        let mut other = frame(&cluster());
        // Of the frame's content.
        other[5] ^= 1;
        assert_eq!(expanded(Compression::Zstd, &other), None);
    }

    /// A stream without its end mark has given all bytes of the cluster, as in zlib.
    #[test]
    fn a_stream_without_its_end_mark_is_whole_when_the_cluster_is() {
        let mut stored = vec![0, 0x00, 0x10, 0xff, 0xef];
        stored.extend(cluster());
        assert!(expanded(Compression::Zlib, &stored) == Some(cluster()));
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_no_more(
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
            at in 0usize..300,
        ) {
            expanded(Compression::Zlib, &bytes);
            expanded(Compression::Zstd, &bytes);
            for (kind, good) in
                [(Compression::Zlib, deflated()), (Compression::Zstd, frame(&cluster()))]
            {
                let mut bad = good;
                let at = at.min(bad.len());
                let n = bytes.len().min(bad.len() - at);
                bad[at..at + n].copy_from_slice(&bytes[..n]);
                expanded(kind, &bad);
            }
        }
    }

    /// A frame that asks for a window of 128 MiB, before anything of it can be read.
    #[test]
    fn a_zstd_window_has_a_limit() {
        let block = (4096u32 << 3 | 1 << 1 | 1).to_le_bytes();
        for (window, is_read) in [(13 << 3, true), (17 << 3, false)] {
            let frame = [&[0x28, 0xb5, 0x2f, 0xfd, 0, window][..], &block[..3], &[7]].concat();
            let mut out = vec![0; 4096];
            assert_eq!(expand(Compression::Zstd, &frame, &mut out).is_ok(), is_read);
        }
    }
}
