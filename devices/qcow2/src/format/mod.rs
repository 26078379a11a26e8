//! The bytes of the format, as numbers: QEMU's `docs/interop/qcow2.txt`. Big endian throughout.
//!
//! Nothing here does I/O, and nothing that is read here is believed: each decoder checks what it
//! gives back, or says that its caller must.

pub mod bitmap;
pub mod compressed;
pub mod entry;
pub mod geometry;
pub mod header;
pub mod refcount;
pub mod snapshot;

/// Reads the big endian number at `at`; `None` when `bytes` is too short.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

/// Reads the big endian number of 8 bytes at `at`, see [`u32_at`].
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// Reads the big endian number of 2 bytes at `at`, see [`u32_at`].
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes(bytes.try_into().ok()?))
}
