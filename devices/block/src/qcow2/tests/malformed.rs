//! Headers that no tool makes: each is opened or refused, and never the end of the daemon (F1).
#![allow(non_snake_case)]

use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::super::Qcow2Backend;
use super::{create, open_as};
use crate::error::BlockError;

/// Offset of the header's length, at which the extensions of a version 3 header begin.
const AT_HEADER_LEN: usize = 100;
/// The first cluster: header, extensions and the backing file's name are in it.
const CLUSTER_LEN_BYTES: usize = 64 << 10;

/// A small image with a backing file.
fn image() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    create(&path, Some(("base.raw", "raw")));
    let bytes = fs::read(path).unwrap();
    assert!(bytes.len() >= CLUSTER_LEN_BYTES);
    bytes
}

/// Offset of each extension, the end mark included.
fn extensions(image: &[u8]) -> Vec<usize> {
    let u32_at = |at: usize| u32::from_be_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let mut all = vec![u32_at(AT_HEADER_LEN)];
    while let Some(&last) = all.last()
        && u32_at(last) != 0
    {
        all.push(last + 8 + u32_at(last + 4).next_multiple_of(8));
    }
    all
}

fn open(bytes: &[u8]) -> Result<Qcow2Backend, BlockError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    fs::write(&path, bytes).unwrap();
    fs::write(dir.path().join("base.raw"), [0; 4096]).unwrap();
    let opened = open_as(&path, Some(dir.path()), true);
    if let Err(error) = &opened {
        assert_names(error, &path);
    }
    opened
}

/// Asserts that the error names an image: the administrator has to learn which one is wrong.
fn assert_names(error: &BlockError, path: &Path) {
    let text = error.to_string();
    let named = text.contains("disk.qcow2") || text.contains("base.raw");
    assert!(named, "{text} does not name {}", path.display());
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

#[test]
fn abuse_F1_an_extension_that_ends_beyond_the_header_is_an_error() {
    let mut bytes = image();
    open(&bytes).unwrap();
    let at = *extensions(&bytes).last().unwrap();
    put(&mut bytes, at, 0x6803_f857);
    put(&mut bytes, at + 4, 1 << 20);
    let text = open(&bytes).err().expect("must be refused").to_string();
    assert!(text.contains("header extension is 1048576"), "{text}");
}

/// Each byte of header and extensions, with values that are off by one, at the ends, or a bit.
#[test]
fn abuse_F1_every_byte_of_the_header_changed() {
    let good = image();
    let end = extensions(&good).last().unwrap() + 8 + 16;
    for at in 4..end {
        for value in [0, 1, 0x7f, 0x80, 0xff, good[at] ^ 1, good[at].wrapping_add(1)] {
            let mut bytes = good[..CLUSTER_LEN_BYTES].to_vec();
            bytes[at] = value;
            let _ = open(&bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn abuse_F1_mutated_headers_are_opened_or_refused(
        patches in proptest::collection::vec((4usize..600, any::<u8>()), 0..6),
        which in any::<prop::sample::Index>(),
        kind in prop_oneof![
            Just(None),
            Just(Some(0x6803_f857u32)),
            Just(Some(0xe279_2aca)),
            Just(Some(0x4441_5441)),
            any::<u32>().prop_map(Some),
        ],
        len in prop_oneof![0u32..200, Just(65_536), any::<u32>()],
        keep in prop_oneof![Just(usize::MAX), 0usize..1000],
    ) {
        let mut bytes = image();
        let all = extensions(&bytes);
        let at = all[which.index(all.len())];
        if let Some(kind) = kind {
            put(&mut bytes, at, kind);
        }
        put(&mut bytes, at + 4, len);
        for (at, value) in patches {
            bytes[at] = value;
        }
        bytes.truncate(keep);
        let _ = open(&bytes);
    }
}
