//! Answers to placeholder requests on their way to the queue, from any thread, without a lock.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use base::event::Event;
use base::io::DiskDone;

/// Answers that a queue has not taken in yet: at most one for each of its slots, which has no other
/// request before. A queue that starts again has a new list: answers that come too late for the old
/// one are lost.
#[derive(Debug)]
pub(crate) struct Answers {
    /// A bit for each slot that has an answer.
    given: Box<[AtomicU64]>,
    /// Answer to each slot: 0, or an errno.
    errnos: Box<[AtomicI32]>,
    /// Whether the owner sleeps, or is about to.
    wakeups: AtomicBool,
    /// Event that answers ring while it does.
    pub event: Event,
}

impl Answers {
    /// Room for `depth` slots.
    pub fn new(depth: u16) -> io::Result<Self> {
        Ok(Self {
            given: (0..depth.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            errnos: (0..depth).map(|_| AtomicI32::new(0)).collect(),
            wakeups: AtomicBool::new(false),
            event: Event::new()?,
        })
    }

    /// Gives a slot its answer.
    pub fn give(&self, slot: u16, errno: i32) {
        let slot = usize::from(slot);
        self.errnos[slot].store(errno, Ordering::Relaxed);
        // Publishes the errno, and is before the look at `wakeups` for all threads: the owner sees
        // the bit after it said that it sleeps, or we see that it does.
        self.given[slot / 64].fetch_or(1 << (slot % 64), Ordering::SeqCst);
        if self.wakeups.load(Ordering::SeqCst) {
            // An eventfd that cannot be written to does not exist: it is ours and non-blocking.
            let _ = self.event.signal();
        }
    }

    /// Moves answers into `done`, which has room for one of each slot: the slot as token, no bytes
    /// or the errno. No system call.
    pub fn reap(&self, done: &mut Vec<DiskDone>) {
        for (word, given) in self.given.iter().enumerate() {
            if given.load(Ordering::SeqCst) == 0 {
                continue;
            }
            let mut bits = given.swap(0, Ordering::SeqCst);
            while bits != 0 {
                let slot = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let errno = self.errnos[slot].load(Ordering::Relaxed);
                let result = if errno == 0 { Ok(0) } else { Err(errno) };
                done.push(DiskDone { token: slot as u32, result });
            }
        }
    }

    /// Whether answers ring the event. After switching on, the owner looks once more.
    pub fn set_wakeups(&self, on: bool) {
        self.wakeups.store(on, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn reap(answers: &Answers) -> Vec<(u32, Result<u32, i32>)> {
        let mut done = Vec::new();
        answers.reap(&mut done);
        done.iter().map(|d| (d.token, d.result)).collect()
    }

    #[test]
    fn each_answer_comes_once_with_its_errno() {
        let answers = Answers::new(130).unwrap();
        assert!(reap(&answers).is_empty());
        for (slot, errno) in [(129, 5), (0, 0), (64, 28), (63, 0)] {
            answers.give(slot, errno);
        }
        let all = [(0, Ok(0)), (63, Ok(0)), (64, Err(28)), (129, Err(5))];
        assert_eq!(reap(&answers), all);
        assert!(reap(&answers).is_empty());
        // The slot's next write.
        answers.give(64, 0);
        assert_eq!(reap(&answers), [(64, Ok(0))]);
    }

    #[test]
    fn the_event_rings_only_for_one_that_sleeps() {
        let answers = Answers::new(1).unwrap();
        answers.give(0, 0);
        assert!(!answers.event.drain());
        reap(&answers);
        answers.set_wakeups(true);
        answers.give(0, 0);
        assert!(answers.event.drain());
        answers.set_wakeups(false);
        answers.give(0, 0);
        assert!(!answers.event.drain());
    }

    /// Threads answer, one slot each, again and again; the owner sleeps whenever it finds nothing.
    #[test]
    fn no_answer_is_missed_by_one_that_goes_to_sleep() {
        const SLOTS: u16 = 3;
        const ROUNDS: u32 = 3000;
        let answers = Arc::new(Answers::new(SLOTS).unwrap());
        let (taken, next): (Vec<_>, Vec<_>) =
            (0..SLOTS).map(|_| std::sync::mpsc::channel::<()>()).unzip();
        let threads = next.into_iter().enumerate().map(|(slot, next)| {
            let answers = Arc::clone(&answers);
            std::thread::spawn(move || {
                for round in 1..=ROUNDS {
                    answers.give(slot as u16, round as i32);
                    next.recv().unwrap();
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        let mut seen = [0; SLOTS as usize];
        while seen.iter().any(|&n| n < ROUNDS as i32) {
            answers.set_wakeups(true);
            let found = reap(&answers);
            if found.is_empty() {
                let event = &answers.event;
                let mut fds = [rustix::event::PollFd::new(event, rustix::event::PollFlags::IN)];
                let limit = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
                assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "missed");
                event.drain();
            }
            answers.set_wakeups(false);
            for (slot, result) in found {
                let round = result.unwrap_err();
                assert_eq!(round, seen[slot as usize] + 1);
                seen[slot as usize] = round;
                taken[slot as usize].send(()).unwrap();
            }
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}
