//! Pieces of an operation whose data is in several places of the files: they are moved at the same
//! time.

use base::io::IoSlice;

/// Most pieces of an operation that are moved at a time: a step of 1 MiB in clusters of 64 KiB.
pub(super) const MAX_PIECES: usize = 16;

/// Operations that the disks of the files have room for beyond one for each of the queue's: pieces
/// after the first. 64 keep any device busy, and a ring stays small.
pub(super) const MAX_SPARE: u16 = 64;

/// Piece of an operation: its bytes, and the place of its buffers in the list.
#[derive(Debug, Clone, Copy, Default)]
struct Piece {
    from: u32,
    len: u32,
    first_buf: usize,
    bufs: u32,
}

/// The pieces of one operation that are under way.
#[derive(Debug)]
pub(super) struct Pieces {
    /// Buffers, piece by piece. Never longer than its first capacity: others have its address.
    list: Vec<IoSlice>,
    all: [Piece; MAX_PIECES],
    count: usize,
    pending: usize,
    /// Bytes before the first that is known to be missing.
    len_bytes: u32,
    errno: i32,
}

impl Pieces {
    pub fn new() -> Self {
        // Each piece cuts one buffer into two at most.
        let list = Vec::with_capacity(crate::limits::MAX_OP_SEGS + MAX_PIECES);
        Self { list, all: Default::default(), count: 0, pending: 0, len_bytes: 0, errno: libc::EIO }
    }

    /// Forgets all pieces, for a new operation.
    pub fn begin(&mut self) {
        self.list.clear();
        // One is pending until `all_begun`.
        (self.count, self.pending, self.len_bytes, self.errno) = (0, 1, 0, libc::EIO);
    }

    /// Bytes that have a piece.
    pub fn len_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Adds a piece for the next `len` bytes of an operation with the buffers `bufs`. Returns its
    /// number; `None` when there are [`MAX_PIECES`] already.
    pub fn add(&mut self, bufs: &[IoSlice], len: u32) -> Option<usize> {
        if self.count == MAX_PIECES {
            return None;
        }
        let (n, first_buf) = (self.count, self.list.len());
        cut(bufs, self.len_bytes as usize, len as usize, &mut self.list);
        let bufs = (self.list.len() - first_buf) as u32;
        self.all[n] = Piece { from: self.len_bytes, len, first_buf, bufs };
        self.count += 1;
        self.pending += 1;
        self.len_bytes += len;
        Some(n)
    }

    /// Buffers of a piece; they stay where they are until the next [`Pieces::begin`].
    pub fn bufs(&self, n: usize) -> (*const IoSlice, u32) {
        let piece = self.all[n];
        (self.list[piece.first_buf..].as_ptr(), piece.bufs)
    }

    /// Bytes of a piece.
    pub fn piece_len(&self, n: usize) -> u32 {
        self.all[n].len
    }

    /// Notes that no piece follows. Returns the result once all have ended, as [`Pieces::end`].
    pub fn all_begun(&mut self) -> Option<Result<u32, i32>> {
        self.pending -= 1;
        (self.pending == 0).then(|| self.result())
    }

    fn result(&self) -> Result<u32, i32> {
        if self.len_bytes == 0 { Err(self.errno) } else { Ok(self.len_bytes) }
    }

    /// Ends a piece. After the last one returns the bytes done before the first that is missing, or
    /// the errno of the first piece.
    pub fn end(&mut self, n: usize, result: Result<u32, i32>) -> Option<Result<u32, i32>> {
        let piece = self.all[n];
        let moved = result.map_or(0, |moved| moved.min(piece.len));
        if moved < piece.len {
            self.len_bytes = self.len_bytes.min(piece.from + moved);
            if let (0, Err(errno)) = (piece.from, result) {
                self.errno = errno;
            }
        }
        self.pending -= 1;
        (self.pending == 0).then(|| self.result())
    }
}

/// Adds the buffers of `len` bytes of `bufs`, from byte `from` on, to a list.
pub(super) fn cut(bufs: &[IoSlice], from: usize, len: usize, list: &mut Vec<IoSlice>) {
    let (mut skip, mut left) = (from, len);
    for buf in bufs {
        if left == 0 {
            return;
        }
        let skipped = skip.min(buf.iov_len);
        let used = (buf.iov_len - skipped).min(left);
        if used > 0 {
            let iov_base = buf.iov_base.cast::<u8>().wrapping_add(skipped).cast();
            list.push(IoSlice { iov_base, iov_len: used });
        }
        skip -= skipped;
        left -= used;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bufs(lens: &[usize]) -> Vec<IoSlice> {
        let mut at = 0x1000;
        let buf = |&iov_len: &usize| {
            at += iov_len;
            IoSlice { iov_base: (at - iov_len) as *mut _, iov_len }
        };
        lens.iter().map(buf).collect()
    }

    fn shown(pieces: &Pieces, n: usize) -> Vec<(usize, usize)> {
        let (list, count) = pieces.bufs(n);
        // SAFETY: the list of a piece.
        let list = unsafe { std::slice::from_raw_parts(list, count as usize) };
        list.iter().map(|buf| (buf.iov_base as usize, buf.iov_len)).collect()
    }

    #[test]
    fn pieces_share_the_buffers_in_order() {
        let all = bufs(&[100, 200, 300]);
        let mut pieces = Pieces::new();
        pieces.begin();
        assert_eq!(pieces.add(&all, 150), Some(0));
        assert_eq!(pieces.add(&all, 150), Some(1));
        assert_eq!(pieces.add(&all, 300), Some(2));
        assert_eq!(shown(&pieces, 0), [(0x1000, 100), (0x1000 + 100, 50)]);
        assert_eq!(shown(&pieces, 1), [(0x1000 + 150, 150)]);
        assert_eq!(shown(&pieces, 2), [(0x1000 + 300, 300)]);
        assert_eq!(pieces.len_bytes(), 600);
    }

    #[test]
    fn what_is_done_ends_at_the_first_byte_that_is_not() {
        let all = bufs(&[600]);
        let run = |ends: [(usize, Result<u32, i32>); 3]| {
            let mut pieces = Pieces::new();
            pieces.begin();
            (0..3).for_each(|n| assert_eq!(pieces.add(&all, 200), Some(n)));
            assert_eq!(pieces.all_begun(), None);
            ends.map(|(n, result)| pieces.end(n, result))[2].unwrap()
        };
        assert_eq!(run([(2, Ok(200)), (0, Ok(200)), (1, Ok(200))]), Ok(600));
        assert_eq!(run([(1, Ok(50)), (0, Ok(200)), (2, Err(5))]), Ok(250));
        assert_eq!(run([(2, Ok(200)), (1, Err(28)), (0, Ok(200))]), Ok(200));
        assert_eq!(run([(2, Ok(200)), (0, Err(28)), (1, Ok(200))]), Err(28));
        assert_eq!(run([(0, Ok(0)), (1, Ok(200)), (2, Ok(200))]), Err(libc::EIO));
    }

    #[test]
    fn there_is_a_most_and_the_list_stays_where_it_is() {
        let all = bufs(&[2; crate::limits::MAX_OP_SEGS]);
        let mut pieces = Pieces::new();
        pieces.begin();
        let begin = pieces.list.as_ptr();
        (0..MAX_PIECES).for_each(|n| assert_eq!(pieces.add(&all, 31), Some(n)));
        assert_eq!(pieces.add(&all, 1), None);
        assert_eq!(pieces.list.as_ptr(), begin);
        pieces.begin();
        assert_eq!(pieces.add(&all, 2 * all.len() as u32), Some(0));
        assert_eq!(shown(&pieces, 0).len(), all.len());
    }
}
