//! Guest buffers after translation, and the only functions that copy guest bytes.

/// One host-contiguous piece of guest memory; the layout of `struct iovec`. Neither constructible
/// nor clonable outside this crate: a `Seg` lives in a [`crate::Batch`] or [`crate::ChainBuf`],
/// which keeps its memory table mapped.
#[repr(C)]
#[derive(Debug)]
pub struct Seg {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: a `Seg` is an address into shared guest memory, valid on every thread while the owner
// (a batch) keeps the table alive.
unsafe impl Send for Seg {}

impl Seg {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The segments as the kernel takes them (`readv`, io_uring).
pub fn as_iovecs(segs: &[Seg]) -> &[libc::iovec] {
    // SAFETY: `Seg` is `repr(C)` with the fields of `iovec` in its order.
    unsafe { std::slice::from_raw_parts(segs.as_ptr().cast(), segs.len()) }
}

/// Sum of the lengths.
pub fn total_len(segs: &[Seg]) -> usize {
    segs.iter().map(|s| s.len).sum()
}

/// Copies guest bytes, from `offset` in `src`, into `dst`; returns how many there were.
pub fn copy_out(src: &[Seg], offset: usize, dst: &mut [u8]) -> usize {
    let _ = (src, offset, dst);
    unimplemented!("owner of crate queue")
}

/// Copies our bytes into the guest's, from `offset` in `dst`; returns how many fitted.
pub fn copy_in(dst: &[Seg], offset: usize, src: &[u8]) -> usize {
    let _ = (dst, offset, src);
    unimplemented!("owner of crate queue")
}

/// Copies up to `len` bytes from one guest's buffers to another's; returns how many. The one copy
/// of the switch.
pub fn copy_across(src: &[Seg], src_offset: usize, dst: &[Seg], dst_offset: usize, len: usize) -> usize {
    let _ = (src, src_offset, dst, dst_offset, len);
    unimplemented!("owner of crate queue")
}

/// Writes zeroes; returns how many fitted.
pub fn fill_zero(dst: &[Seg], offset: usize, len: usize) -> usize {
    let _ = (dst, offset, len);
    unimplemented!("owner of crate queue")
}

/// Appends the sub-range `offset..offset + len` of `src` to `out` as iovecs (no copy of bytes).
/// Returns how many bytes are described; stops when `out` is at its capacity (never grows it).
pub fn subrange(src: &[Seg], offset: usize, len: usize, out: &mut Vec<libc::iovec>) -> usize {
    let _ = (src, offset, len, out);
    unimplemented!("owner of crate queue")
}
