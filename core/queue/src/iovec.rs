//! Copies between memory of ours and buffers that are named by address, as disk back ends get them.
//!
//! Guests and other queues may write the same bytes at the same time, so no reference is ever made
//! to them.

use base::io::IoSlice;

/// Writes zeroes to all buffers.
///
/// # Safety
/// `bufs` points at `count` buffers, all valid for writes.
#[inline]
pub unsafe fn zero_all(bufs: *const IoSlice, count: u32) {
    for i in 0..count as usize {
        // SAFETY: by the contract `i` is inside the list and the buffer valid for writes.
        unsafe {
            let buf = bufs.add(i).read();
            std::ptr::write_bytes(buf.iov_base.cast::<u8>(), 0, buf.iov_len);
        }
    }
}

/// Copies from `src` into the buffers, in order.
///
/// # Safety
/// `bufs` points at `count` buffers valid for writes, `src` is valid for reads of the sum of their
/// lengths, and none overlaps `src`.
#[inline]
pub unsafe fn scatter(src: *const u8, bufs: *const IoSlice, count: u32) {
    let mut at = 0;
    for i in 0..count as usize {
        // SAFETY: by the contract; `at` is the sum of the lengths before this buffer.
        unsafe {
            let buf = bufs.add(i).read();
            std::ptr::copy_nonoverlapping(src.add(at), buf.iov_base.cast::<u8>(), buf.iov_len);
            at += buf.iov_len;
        }
    }
}

/// Copies the buffers, in order, to `dst`.
///
/// # Safety
/// `bufs` points at `count` buffers valid for reads, `dst` is valid for writes of the sum of their
/// lengths, and none overlaps `dst`.
#[inline]
pub unsafe fn gather(bufs: *const IoSlice, count: u32, dst: *mut u8) {
    let mut at = 0;
    for i in 0..count as usize {
        // SAFETY: by the contract; `at` is the sum of the lengths before this buffer.
        unsafe {
            let buf = bufs.add(i).read();
            std::ptr::copy_nonoverlapping(buf.iov_base.cast::<u8>(), dst.add(at), buf.iov_len);
            at += buf.iov_len;
        }
    }
}
