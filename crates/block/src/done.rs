//! Finished operations waiting to be reaped, for disks that finish within `submit`.

use std::io;

use base::io::DiskDone;

/// A list that never grows beyond the queue's depth.
#[derive(Debug)]
pub(crate) struct DoneList {
    list: Vec<DiskDone>,
    depth: usize,
}

impl DoneList {
    /// Room for `depth` operations.
    pub fn new(depth: u16) -> Self {
        let depth = usize::from(depth);
        Self { list: Vec::with_capacity(depth), depth }
    }

    /// `WouldBlock` when the list is full.
    pub fn check_room(&self) -> io::Result<()> {
        self.check_room_for(1)
    }

    /// `WouldBlock` when the list has no room for `n` more.
    pub fn check_room_for(&self, n: usize) -> io::Result<()> {
        let has_room = self.list.len() + n <= self.depth;
        if has_room { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// Adds one (after [`DoneList::check_room`]).
    pub fn push(&mut self, done: DiskDone) {
        self.list.push(done);
    }

    /// Moves as many as `done` has spare room for.
    pub fn reap(&mut self, done: &mut Vec<DiskDone>) {
        let n = self.list.len().min(done.capacity() - done.len());
        done.extend(self.list.drain(..n));
    }
}
