//! A queue's current disk, and its former disks that still have operations.
//!
//! Tokens name slots of the queue: a request whose operation comes back from an earlier disk goes
//! on with the newest one.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use base::io::{Disk, DiskDone, DiskOp};

use crate::dropper;
use crate::limits::MAX_FORMER_DISKS;

/// A disk that gets no more operations.
struct FormerDisk {
    disk: Box<dyn Disk>,
    /// Operations that it has: dropped after the last.
    in_flight: usize,
}

/// Current disk of a queue, with its former ones.
pub(crate) struct QueueDisks {
    current: Box<dyn Disk>,
    /// Former disks: hardly ever more than one, for milliseconds, until the operations are done
    /// that were in flight when the memory table changed.
    former: Vec<FormerDisk>,
}

impl QueueDisks {
    pub fn new(disk: Box<dyn Disk>) -> Self {
        Self { current: disk, former: Vec::new() }
    }

    /// Sends all operations to `disk` from now on. `in_flight`: the operations of all disks. With
    /// [`MAX_FORMER_DISKS`] the current disk stays instead, and forgets the memory that it knows.
    pub fn replace(&mut self, disk: Box<dyn Disk>, in_flight: usize) {
        if self.former.len() >= MAX_FORMER_DISKS {
            // SAFETY: no ranges. It cannot fail then.
            let _ = unsafe { self.current.set_memory(&[], Arc::default()) };
            dropper::drop_disk(disk);
            return;
        }
        let mut disk = std::mem::replace(&mut self.current, disk);
        let in_flight = in_flight - self.former.iter().map(|f| f.in_flight).sum::<usize>();
        if in_flight > 0 {
            // Nobody waits for its event any more, see `has_former`.
            disk.set_wakeups(false);
            self.former.push(FormerDisk { disk, in_flight });
        } else {
            dropper::drop_disk(disk);
        }
    }

    /// Whether operations come back that ring no event: the owner has to look.
    pub fn has_former(&self) -> bool {
        !self.former.is_empty()
    }

    /// Gives an operation to the current disk: [`Disk::submit`].
    ///
    /// # Safety
    /// The same contract.
    #[inline]
    pub unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.current.submit(token, op) }
    }

    /// Whether the current disk does `count` requests sooner by [`QueueDisks::run`]:
    /// [`Disk::runs_within_call`].
    #[inline]
    pub fn runs_within_call(&self, count: usize) -> bool {
        self.current.runs_within_call(count)
    }

    /// Has the current disk do an operation at once: [`Disk::run`].
    ///
    /// # Safety
    /// The same contract.
    #[inline]
    pub unsafe fn run(&mut self, op: DiskOp) -> Result<u32, i32> {
        // SAFETY: the caller's promise.
        unsafe { self.current.run(op) }
    }

    /// Starts the operations of all disks: [`Disk::flush_submissions`].
    #[inline]
    pub fn flush_submissions(&mut self) -> io::Result<()> {
        if self.former.is_empty() {
            return self.current.flush_submissions();
        }
        // Each of them, whatever became of another.
        let mut all = self.current.flush_submissions();
        for former in &mut self.former {
            all = all.and(former.disk.flush_submissions());
        }
        all
    }

    /// Takes finished operations of all disks: [`Disk::reap`].
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<DiskDone>) {
        if !self.former.is_empty() {
            self.reap_former(done);
        }
        self.current.reap(done);
    }

    #[cold]
    fn reap_former(&mut self, done: &mut Vec<DiskDone>) {
        let mut at = 0;
        while at < self.former.len() {
            let former = &mut self.former[at];
            let before = done.len();
            former.disk.reap(done);
            former.in_flight -= done.len() - before;
            if former.in_flight > 0 {
                at += 1;
            } else {
                dropper::drop_disk(self.former.swap_remove(at).disk);
            }
        }
    }

    /// Event of the current disk: [`Disk::event_fd`].
    pub fn event_fd(&self) -> Option<RawFd> {
        self.current.event_fd()
    }

    /// Switches the event of the current disk: [`Disk::set_wakeups`].
    #[inline]
    pub fn set_wakeups(&mut self, on: bool) {
        self.current.set_wakeups(on);
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;
    use crate::testing::model_disk::ModelDisk;

    fn tokens(disks: &mut QueueDisks) -> Vec<u32> {
        let mut done = Vec::with_capacity(8);
        disks.flush_submissions().unwrap();
        disks.reap(&mut done);
        done.iter().map(|d| d.token).collect()
    }

    #[test]
    fn what_was_in_flight_comes_back_from_the_disk_that_has_it() {
        let all = [0; 3].map(|_| ModelDisk::new(4096));
        let mut disks = QueueDisks::new(all[0].boxed());
        for (n, disk) in all.iter().enumerate() {
            disk.state().hold = true;
            if n > 0 {
                disks.replace(disk.boxed(), n);
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
        disks.replace(all[0].boxed(), 0);
        assert!(!disks.has_former());
        dropper::wait();
        assert!(all.iter().all(|disk| !disk.state().abandoned));
    }

    #[test]
    fn abuse_R11_disks_that_do_not_end_do_not_pile_up() {
        let all = [0; MAX_FORMER_DISKS + 4].map(|_| ModelDisk::new(4096));
        all.iter().for_each(|disk| disk.state().hold = true);
        let mut disks = QueueDisks::new(all[0].boxed());
        let many = MAX_FORMER_DISKS as u32 + 3;
        for n in 0..many {
            // SAFETY: a flush has no buffers.
            unsafe { disks.submit(n, DiskOp::Flush) }.unwrap();
            disks.flush_submissions().unwrap();
            disks.replace(all[n as usize + 1].boxed(), n as usize + 1);
            assert!(disks.former.len() <= MAX_FORMER_DISKS);
        }
        all.iter().for_each(ModelDisk::let_go);
        let mut back = tokens(&mut disks);
        back.sort_unstable();
        assert_eq!(back, (0..many).collect::<Vec<_>>());
    }
}
