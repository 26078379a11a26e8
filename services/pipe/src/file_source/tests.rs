#![allow(non_snake_case)]

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::*;

const DISK_BYTES: usize = 300_000;

/// A disk of bytes that are all different from their neighbours.
fn disk() -> (OwnedFd, Vec<u8>) {
    let bytes: Vec<u8> = (0..DISK_BYTES as u32).flat_map(|n| [(n % 251) as u8 + 1]).collect();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    (file.into(), bytes)
}

/// Extents anywhere, in any order, twice if they like.
fn extents() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let extent = (0..DISK_BYTES as u64, 1..70_000u64, any::<bool>()).prop_map(|(at, len, hole)| {
        if hole { (HOLE, len) } else { (at, len.min(DISK_BYTES as u64 - at)) }
    });
    prop::collection::vec(extent, 1..12)
}

fn model(disk: &[u8], extents: &[(u64, u64)]) -> Vec<u8> {
    let mut out = Vec::new();
    for &(offset, len) in extents {
        match offset {
            HOLE => out.resize(out.len() + len as usize, 0),
            _ => out.extend(&disk[offset as usize..(offset + len) as usize]),
        }
    }
    out
}

fn total(extents: &[(u64, u64)]) -> u64 {
    extents.iter().map(|(_, len)| len).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// However the calls are cut, and wherever the socket is full, the bytes are the model's.
    #[test]
    fn any_calls_give_the_bytes_of_the_model(
        extents in extents(),
        sizes in prop::collection::vec((0..90_000usize, 1..90_000usize), 1..20),
    ) {
        let (image, disk) = disk();
        let want = model(&disk, &extents);
        let len_bytes = total(&extents);
        let mut source = FileSource::new(image, DISK_BYTES as u64, extents, len_bytes).unwrap();
        let (sink, mut taker) = UnixStream::pair().unwrap();
        sink.set_nonblocking(true).unwrap();
        taker.set_nonblocking(true).unwrap();
        let (mut sent, mut got) = (0, Vec::new());
        let mut buffer = vec![0; 90_000];
        for &(max, take) in sizes.iter().cycle() {
            match source.send(sink.as_fd(), max) {
                Ok(0) if max > 0 => break,
                Ok(n) => {
                    prop_assert!(n <= max);
                    sent += n;
                }
                Err(e) => prop_assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
            }
            if let Ok(n) = taker.read(&mut buffer[..take]) {
                got.extend(&buffer[..n]);
            }
            // A list of nothing but zeroes would never end.
            if sizes.iter().all(|(max, _)| *max == 0) {
                return Ok(());
            }
        }
        prop_assert_eq!(sent as u64, len_bytes);
        drop(sink);
        taker.set_nonblocking(false).unwrap();
        taker.read_to_end(&mut got).unwrap();
        prop_assert!(got == want);
    }

    /// Extents that are taken lie in the disk and have the length; others are not taken.
    #[test]
    fn any_extents_are_judged_without_a_panic(
        extents in prop::collection::vec((any::<u64>(), any::<u64>()), 0..6),
        disk_bytes in any::<u64>(),
        len_bytes in any::<u64>(),
    ) {
        if check(disk_bytes, &extents, len_bytes).is_ok() {
            let sum: u128 = extents.iter().map(|(_, len)| u128::from(*len)).sum();
            prop_assert_eq!(sum, u128::from(len_bytes));
            for (offset, len) in extents {
                let end = u128::from(offset) + u128::from(len);
                prop_assert!(len > 0 && (offset == HOLE || end <= u128::from(disk_bytes)));
            }
        }
    }
}

#[test]
fn abuse_C4_bad_extents_are_refused_with_the_reason() {
    let refused = |extents: Vec<(u64, u64)>, len_bytes| {
        let (image, _) = disk();
        FileSource::new(image, DISK_BYTES as u64, extents, len_bytes).unwrap_err().to_string()
    };
    let disk_bytes = DISK_BYTES as u64;
    for (extents, len_bytes, text) in [
        (vec![], 0, "together shorter than the pipe (0)"),
        (vec![], 5, "together shorter than the pipe (5)"),
        (vec![(0, 4)], 5, "together shorter than the pipe (5)"),
        (vec![(0, 0), (0, 5)], 5, "extent 0 of 0+0 bytes: too short (1)"),
        (vec![(0, 6)], 5, "behind the end of the pipe (5)"),
        (vec![(0, 3), (0, u64::MAX)], 5, "behind the end of the disk (300000)"),
        (vec![(HOLE, u64::MAX), (HOLE, 6)], 5, "behind the end of the pipe (5)"),
        (vec![(disk_bytes - 4, 5)], 5, "behind the end of the disk (300000)"),
        (vec![(disk_bytes, 1)], 1, "behind the end of the disk (300000)"),
        (vec![(u64::MAX - 1, 5)], 5, "behind the end of the disk (300000)"),
        (vec![(0, 1); MAX_EXTENTS as usize + 1], 2049, "too many extents (2048)"),
    ] {
        let error = refused(extents, len_bytes);
        assert!(error.contains(text), "{error}, not: {text}");
    }
}

#[test]
fn an_image_that_was_cut_off_is_an_error_and_not_an_end() {
    let (image, _) = disk();
    let short = image.try_clone().unwrap();
    let mut source = FileSource::new(image, DISK_BYTES as u64, vec![(1000, 3000)], 3000).unwrap();
    rustix::fs::ftruncate(&short, 2000).unwrap();
    let (sink, _taker) = UnixStream::pair().unwrap();
    assert_eq!(source.send(sink.as_fd(), 9000).unwrap(), 1000);
    let error = source.send(sink.as_fd(), 9000).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}
