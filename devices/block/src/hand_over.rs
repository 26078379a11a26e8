//! When the operations of a batch are handed to the kernel.
//!
//! A batch goes in parts that grow, so that the device begins with the first requests while the
//! last ones are still on their way to it: at most one `io_uring_enter` more each time that what it
//! has in hand grows by a half.
//!
//! Direct operations that adjoin stay in one part. The kernel's block layer makes one request of
//! them, up to what the device takes at once, but only of what comes in one call. A guest's read of
//! 4 MiB arrives as four requests of up to 1,280 KiB, and where its buffers lie apart as more and
//! smaller ones; a device pays for each.

use base::io::DiskOp;

/// Operations that are handed over before the rest of their batch, to a device that has nothing to
/// do. One that has is given half as many as it has: as busy as it can be, and in few calls.
const MIN_START_OPS: u32 = 2;

/// Least operations of a call whose requests the kernel joins (`IO_PLUG_THRESHOLD` in
/// io_uring/io_uring.c, and one more).
const JOINED_OPS: u32 = 3;

/// The end of adjoining reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct End {
    is_write: bool,
    offset: u64,
}

/// The operations that wait to be handed over.
#[derive(Debug)]
pub(crate) struct HandOver {
    /// Whether a device does the operations themselves, without the page cache.
    is_direct: bool,
    end: Option<End>,
    /// Whether any of those that wait adjoins the one before.
    has_joined: bool,
}

impl HandOver {
    /// Nothing waits.
    pub fn new(is_direct: bool) -> Self {
        Self { is_direct, end: None, has_joined: false }
    }

    /// Notes the next operation. True: the `waiting` ones go before it is added. `in_disk`: those
    /// that were handed over and are not done.
    #[inline]
    pub fn goes_first(&mut self, op: &DiskOp, waiting: u32, in_disk: u32) -> bool {
        let (begin, next_end) = self.bounds(op);
        let joins = waiting > 0 && begin.is_some() && begin == self.end;
        self.end = next_end;
        let is_due = !joins && waiting >= MIN_START_OPS.max(in_disk / 2);
        self.has_joined |= joins;
        is_due
    }

    /// Notes that the `waiting` operations go now. True: one more, which does nothing, makes them
    /// enough to be joined.
    #[inline]
    pub fn go(&mut self, waiting: u32) -> bool {
        std::mem::take(&mut self.has_joined) && waiting + 1 == JOINED_OPS
    }

    /// Begin and end of a direct operation.
    #[inline]
    fn bounds(&self, op: &DiskOp) -> (Option<End>, Option<End>) {
        let (is_write, offset, len_bytes) = match *op {
            DiskOp::Read { offset, len_bytes, .. } if self.is_direct => (false, offset, len_bytes),
            DiskOp::Write { offset, len_bytes, .. } if self.is_direct => (true, offset, len_bytes),
            _ => return (None, None),
        };
        let end = offset.checked_add(len_bytes.into());
        (Some(End { is_write, offset }), end.map(|offset| End { is_write, offset }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN_BYTES: u32 = 4096;

    fn read(at: u64) -> DiskOp {
        let offset = at * u64::from(LEN_BYTES);
        DiskOp::Read { offset, bufs: std::ptr::null(), count: 0, len_bytes: LEN_BYTES }
    }

    fn write(at: u64) -> DiskOp {
        let offset = at * u64::from(LEN_BYTES);
        DiskOp::Write { offset, bufs: std::ptr::null(), count: 0, len_bytes: LEN_BYTES }
    }

    /// Sizes of the parts in which a batch goes, those included that do nothing.
    fn parts(is_direct: bool, ops: &[DiskOp]) -> Vec<u32> {
        let (mut over, mut waiting, mut in_disk) = (HandOver::new(is_direct), 0, 0);
        let mut parts = Vec::new();
        for op in ops {
            if over.goes_first(op, waiting, in_disk) {
                parts.push(waiting + u32::from(over.go(waiting)));
                (in_disk, waiting) = (in_disk + waiting, 0);
            }
            waiting += 1;
        }
        parts.push(waiting + u32::from(over.go(waiting)));
        parts
    }

    #[test]
    fn what_does_not_adjoin_goes_in_growing_parts() {
        let apart: Vec<DiskOp> = (0..32).map(|n| read(2 * n)).collect();
        let expected = [2, 2, 2, 3, 4, 6, 9, 4];
        assert_eq!(parts(true, &apart), expected);
        // The page cache joins what it reads itself.
        let adjoining: Vec<DiskOp> = (0..32).map(read).collect();
        assert_eq!(parts(false, &adjoining), expected);
        assert_eq!(parts(true, &[DiskOp::Flush; 3]), [2, 1]);
    }

    #[test]
    fn what_adjoins_stays_together() {
        let adjoining: Vec<DiskOp> = (0..32).map(read).collect();
        assert_eq!(parts(true, &adjoining), [32]);
        let two: Vec<DiskOp> = (0..5).chain(100..103).map(read).collect();
        assert_eq!(parts(true, &two), [5, 3]);
        assert_eq!(parts(true, &[read(9), read(0), read(1)]), [3]);
        assert_eq!(parts(true, &[read(1), read(0)]), [2], "backwards");
    }

    #[test]
    fn two_that_adjoin_get_a_third() {
        assert_eq!(parts(true, &[read(0), read(1)]), [3]);
        assert_eq!(parts(true, &[read(0), read(2)]), [2]);
        assert_eq!(parts(true, &[read(0), read(1), read(9), read(20)]), [3, 2]);
        assert_eq!(parts(true, &[read(0), read(1), write(2), write(3)]), [3, 3]);
        let end =
            DiskOp::Write { offset: u64::MAX, bufs: std::ptr::null(), count: 0, len_bytes: 9 };
        assert_eq!(parts(true, &[end, end]), [2]);
    }
}
