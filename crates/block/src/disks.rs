//! A queue's disk, and those that it had before and that still have operations.
//!
//! Tokens name slots of the queue: a request whose operation comes back from an earlier disk goes on
//! with the newest one.

use std::io;
use std::os::fd::RawFd;

use base::io::{Disk, DiskDone, DiskOp};

/// A disk that gets no more operations.
struct Former {
    disk: Box<dyn Disk>,
    /// Operations that it has: dropped with the last.
    in_flight: usize,
}

/// See the module's text.
pub(crate) struct Disks {
    now: Box<dyn Disk>,
    /// Hardly ever more than one, for milliseconds: until the operations are done that were in
    /// flight when the memory table changed.
    former: Vec<Former>,
}

impl Disks {
    pub fn new(disk: Box<dyn Disk>) -> Self {
        Self { now: disk, former: Vec::new() }
    }

    /// All operations go to `disk` from now on. `in_flight`: those of all disks.
    pub fn succeed(&mut self, disk: Box<dyn Disk>, in_flight: usize) {
        let mut disk = std::mem::replace(&mut self.now, disk);
        let in_flight = in_flight - self.former.iter().map(|f| f.in_flight).sum::<usize>();
        if in_flight > 0 {
            // Nobody waits for its event any more, see `has_former`.
            disk.set_wakeups(false);
            self.former.push(Former { disk, in_flight });
        }
    }

    /// Operations come back that ring no event: the owner has to look.
    pub fn has_former(&self) -> bool {
        !self.former.is_empty()
    }

    /// As [`Disk::submit`].
    ///
    /// # Safety
    /// As there.
    #[inline]
    pub unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.now.submit(token, op) }
    }

    /// As [`Disk::flush_submissions`].
    #[inline]
    pub fn flush_submissions(&mut self) -> io::Result<()> {
        for former in &mut self.former {
            former.disk.flush_submissions()?;
        }
        self.now.flush_submissions()
    }

    /// As [`Disk::reap`].
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<DiskDone>) {
        if !self.former.is_empty() {
            self.reap_former(done);
        }
        self.now.reap(done);
    }

    #[cold]
    fn reap_former(&mut self, done: &mut Vec<DiskDone>) {
        self.former.retain_mut(|former| {
            let before = done.len();
            former.disk.reap(done);
            former.in_flight -= done.len() - before;
            former.in_flight > 0
        });
    }

    /// As [`Disk::event_fd`], of the newest.
    pub fn event_fd(&self) -> Option<RawFd> {
        self.now.event_fd()
    }

    /// As [`Disk::set_wakeups`], of the newest.
    #[inline]
    pub fn set_wakeups(&mut self, on: bool) {
        self.now.set_wakeups(on);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::model_disk::ModelDisk;

    fn tokens(disks: &mut Disks) -> Vec<u32> {
        let mut done = Vec::with_capacity(8);
        disks.flush_submissions().unwrap();
        disks.reap(&mut done);
        done.iter().map(|d| d.token).collect()
    }

    #[test]
    fn what_was_in_flight_comes_back_from_the_disk_that_has_it() {
        let all = [0; 3].map(|_| ModelDisk::new(4096));
        let mut disks = Disks::new(all[0].boxed());
        for (n, disk) in all.iter().enumerate() {
            disk.state().hold = true;
            if n > 0 {
                disks.succeed(disk.boxed(), n);
            }
            // SAFETY: a flush has no buffers.
            unsafe { disks.submit(n as u32, DiskOp::Flush) }.unwrap();
            disks.flush_submissions().unwrap();
        }
        assert!(tokens(&mut disks).is_empty());
        assert_eq!(disks.former.len(), 2);
        all[1].let_go();
        assert_eq!(tokens(&mut disks), [1]);
        assert_eq!(disks.former.len(), 1);
        all[2].let_go();
        assert_eq!(tokens(&mut disks), [2]);
        all[0].let_go();
        assert_eq!(tokens(&mut disks), [0]);
        assert!(!disks.has_former());
        // One that has nothing to do goes at once.
        disks.succeed(all[0].boxed(), 0);
        assert!(!disks.has_former());
        assert!(all.iter().all(|disk| !disk.state().abandoned));
    }
}
